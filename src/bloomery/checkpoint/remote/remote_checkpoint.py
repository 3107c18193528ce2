"""Finds the checkpoints of a backed-up run in a remote store, and reads them like local ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from bloomery.checkpoint.format.manifest import MANIFEST, parse_name
from bloomery.checkpoint.format.remote_source import CHECKPOINTS, RemoteCheckpoint
from bloomery.checkpoint.format.source import Source
from bloomery.checkpoint.format.suspects import SUSPECT, refuse_if_only_suspects, why_suspect
from bloomery.config.checkpoint import SCHEMES
from bloomery.errors import CheckpointError
from bloomery.events.incarnation import Base, bases_of, visible
from bloomery.objects import PATIENCE_S, Objects, storage_failure, without_secrets

log = logging.getLogger(__name__)


def is_remote(text: str) -> bool:
    """Say whether a command's argument is a URL of objects rather than a path."""
    scheme, found, _ = text.partition("://")
    return bool(found) and scheme.isalnum()


def place_at(url: str, *, patience_s: float = PATIENCE_S, create: bool = True) -> Objects:
    """Return the objects at the URL of a run's backup. Raises CheckpointError, StorageError.

    create: make the directory of a file:// URL; who only reads makes none.
    """
    if url.partition("://")[0] not in SCHEMES:
        raise CheckpointError(
            f"{without_secrets(url)} is not the URL of a store",
            remedy=f"One of {', '.join(SCHEMES)}://…",
        )
    return Objects(url, patience_s=patience_s, create=create)


def remote_checkpoints(remote: Objects, *, abandoned: bool = False) -> list[RemoteCheckpoint]:
    """Return the committed checkpoints of a backed-up run, oldest first. Raises OSError, CheckpointError.

    abandoned: whether to include those that a rewind left behind, by the incarnation records in the store.
    """
    copies: list[tuple[Base, RemoteCheckpoint]] = []
    keys = {entry.key for entry in remote.entries(f"{CHECKPOINTS}/")}
    for key in keys:
        _, _, rest = key.partition("/")
        name, _, file = rest.partition("/")
        parsed = parse_name(name)
        if file == MANIFEST and parsed is not None:
            prefix = f"{CHECKPOINTS}/{name}"
            is_marked = f"{prefix}/{SUSPECT}" in keys
            copies.append((parsed, RemoteCheckpoint(remote, prefix, is_marked=is_marked)))
    if copies and not abandoned:
        shown = visible((base for base, _ in copies), bases_of(remote_incarnations(remote)))
        copies = [item for item in copies if item[0] in shown]
    return [checkpoint for _, checkpoint in sorted(copies, key=lambda item: item[0])]


def trusted_copies(copies: Iterable[RemoteCheckpoint]) -> list[RemoteCheckpoint]:
    """Return the backups that are not marked as suspect, in their order; log a warning for each other."""
    kept = []
    for checkpoint in copies:
        if checkpoint.is_marked:
            log.warning(
                "the backup %s is passed over as suspect: %s", checkpoint.place(), why_suspect(checkpoint)
            )
        else:
            kept.append(checkpoint)
    return kept


def remote_incarnations(remote: Objects) -> dict[str, bytes]:
    """Return the incarnation records of a backed-up run, by their URLs. Raises OSError."""
    records = {}
    for entry in remote.entries("incarnations/"):
        name = entry.key.rpartition("/")[2]
        if name.endswith(".json") and name.removesuffix(".json").isdecimal():
            records[remote.place(entry.key)] = remote.content(entry.key)
    return records


def remote_source(url: str) -> Source:
    """Return the checkpoint at a URL, or the run's newest there that is not marked as suspect.

    Raises CheckpointError, StorageError.
    """
    remote = place_at(url, create=False)
    try:
        if parse_name(url.rstrip("/").rsplit("/", 1)[-1]) is not None:
            return RemoteCheckpoint(remote, "")
        copies = remote_checkpoints(remote)
    except OSError as error:
        raise storage_failure(error, doing="Looking for checkpoints") from error
    if not copies:
        raise CheckpointError(
            f"{url} holds no finished checkpoint", remedy="Give the URL of a run's backup, or of one of it."
        )
    unmarked = trusted_copies(copies)
    if not unmarked:
        refuse_if_only_suspects(checkpoint.name for checkpoint in copies)
    return unmarked[-1]
