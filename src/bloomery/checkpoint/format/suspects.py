"""Marks checkpoints whose contents a check for silent corruption called into question.

The mark is a file beside the manifest, since a finding comes after the checkpoint was committed. A marked
checkpoint is never chosen to go on from; a person who trusts it removes the file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from bloomery import durable
from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
from bloomery.checkpoint.format.manifest import now
from bloomery.errors import CheckpointError, storage_error

log = logging.getLogger(__name__)

SUSPECT = "suspect.json"


def mark_suspects(checkpoints: Iterable[CommittedCheckpoint], *, clean_step: int, why: str) -> list[str]:
    """Mark those saved after `clean_step`, the last step found clean; return their names.

    why: a sentence for people. Raises StorageError.
    """
    marked = []
    for checkpoint in checkpoints:
        if checkpoint.step > clean_step:
            path = checkpoint.directory / SUSPECT
            try:
                durable.write_whole(path, json.dumps({"why": why, "time": now()}, ensure_ascii=False) + "\n")
            except OSError as error:
                raise storage_error(error, path=path, doing="Marking a checkpoint") from error
            marked.append(checkpoint.name)
    return marked


def why_suspect(directory: Path) -> str:
    """Return why a checkpoint is marked, '' where it is not. A mark that cannot be read counts."""
    try:
        return str(json.loads((directory / SUSPECT).read_text(encoding="utf-8"))["why"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        return "its mark cannot be read"


def trusted(checkpoints: Iterable[CommittedCheckpoint], *, tells: bool = False) -> list[CommittedCheckpoint]:
    """Return those that are not marked, in their order. tells: log a warning for each that is left out."""
    kept = []
    for checkpoint in checkpoints:
        why = why_suspect(checkpoint.directory)
        if not why:
            kept.append(checkpoint)
        elif tells:
            log.warning("%s is passed over as suspect: %s", checkpoint.name, why)
    return kept


def refuse_if_only_suspects(found: Iterable[CommittedCheckpoint]) -> None:
    """Raise CheckpointError if there are any; call it where all are marked, so that no run begins anew."""
    names = [checkpoint.name for checkpoint in found]
    if names:
        raise CheckpointError(
            f"every checkpoint is suspect of silent corruption: {', '.join(names)}",
            remedy=f"Restore an older backup, use another --run, or remove {SUSPECT} from one you trust.",
        )
