"""`bloomery ckpt copy`: to a backup, from a backup, or from one place to another, verified."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from bloomery.checkpoint.backup import copy_beside, fetch_beside
from bloomery.checkpoint.copies import note_copy
from bloomery.checkpoint.download import download_checkpoint
from bloomery.checkpoint.remote import is_remote, place_at
from bloomery.checkpoint.upload import Progress, upload_checkpoint
from bloomery.cli.arguments import parser
from bloomery.cli.ckpt_words import is_checkpoint, one_checkpoint, run_directory, size_words
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.rundir import RunDir
from bloomery.objects import storage_failure

EXAMPLES = """\
bloomery ckpt copy runs/demo s3://bucket/demo                 the newest checkpoint, and what makes it a run
bloomery ckpt copy s3://bucket/demo runs/demo                 and back
bloomery ckpt copy runs/demo file:///mnt/usb/demo --what model    the weights alone, to a disk"""


def copy(arguments: list[str]) -> int:
    """Copy one checkpoint; returns the exit status."""
    options = parser(
        "ckpt copy",
        "Copy a checkpoint (a run's newest, or the one given), read it back and compare. One side is a URL. "
        "Interrupted, the same command goes on.",
        examples=EXAMPLES,
    )
    options.add_argument("source", metavar="RUN|CHECKPOINT|URL", help="what to copy")
    options.add_argument("target", metavar="URL|RUN", help="a run's backup, or a run directory")
    options.add_argument("--what", choices=("all", "model"), default="all", help="model: the weights alone")
    options.add_argument("--json", action="store_true", help="one JSON object")
    given = options.parse_args(arguments)
    if is_remote(given.target) == is_remote(given.source):
        raise CheckpointError(
            f"one of {given.source} and {given.target} must be a URL",
            remedy="A directory is a URL too: file:///mnt/disk/run.",
        )
    told = _up(given) if is_remote(given.target) else _down(given)
    if given.json:
        print(json.dumps(told))
    else:
        print(f"{told['to']}: {size_words(float(told['bytes']))}, verified")
    return 0


def _up(given: Namespace) -> dict[str, str | int]:
    source = one_checkpoint(given.source)
    directory, remote = Path(source.place()), place_at(given.target)
    run = RunDir(directory.parent.parent) if directory.parent.name == "checkpoints" else None
    if run is not None:
        try:
            copy_beside(run, remote)
        except OSError as error:
            raise storage_failure(error, doing="Copying the run's recipe") from error
    beside = run.backups if run is not None else directory.parent
    notes = beside / f"{directory.name}.notes"
    done = upload_checkpoint(directory, remote, what=given.what, notes=notes, progress=_bar(given))
    if run is not None:
        note_copy(run, directory.name, url=done.url, what=done.what, bytes=done.bytes)
    return {"from": source.place(), "to": done.url, "bytes": done.bytes, "bytes_sent": done.bytes_sent}


def _down(given: Namespace) -> dict[str, str | int]:
    source, target = one_checkpoint(given.source), Path(given.target)
    if is_checkpoint(target):
        raise CheckpointError(f"{target} is a checkpoint", remedy="Give the run directory it is to go to.")
    rundir = run_directory(target) if target.exists() and any(target.iterdir()) else RunDir(target).create()
    if given.what == "model":
        raise CheckpointError("--what model is for copies to a URL", remedy="Copy all, then `ckpt slim`.")
    base = source.place().rpartition("/checkpoints/")[0]

    def fetch_the_rest() -> None:
        """Before the checkpoint is one: without its incarnations it would be an orphan."""
        if base:
            try:
                fetch_beside(place_at(base), rundir)
            except OSError as error:
                raise storage_failure(error, doing="Fetching the run's recipe") from error

    found = download_checkpoint(
        source, rundir.checkpoints, before_commit=fetch_the_rest, progress=_bar(given)
    )
    size = sum(path.stat().st_size for path in found.iterdir())
    return {"from": source.place(), "to": str(found), "bytes": size}


def _bar(given: Namespace) -> Progress | None:
    """Progress on standard error, where a person looks at it."""
    if given.json or not sys.stderr.isatty():
        return None

    def shown(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\r  {size_words(done)} of {size_words(total)}", end=end, file=sys.stderr, flush=True)

    return shown


__all__ = ["StorageError", "copy"]
