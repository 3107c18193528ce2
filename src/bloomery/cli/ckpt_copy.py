"""`bloomery ckpt copy`, `backup` and `slim`: copy checkpoints to or from a URL, or write smaller ones."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint, checkpoints, record_copy
from bloomery.checkpoint.format.source import StoredCheckpoint
from bloomery.checkpoint.remote.backup_duty import backup_url, note_round, read_duty
from bloomery.checkpoint.remote.mounts import require_kept, require_mounted
from bloomery.checkpoint.remote.places import sections
from bloomery.checkpoint.remote.remote_run import (
    download_run_files,
    is_remote,
    place_at,
    upload_logs_and_data,
    upload_run_files,
)
from bloomery.checkpoint.remote.shared_upload import notes_of
from bloomery.checkpoint.remote.transfer import Progress, download_checkpoint, upload_checkpoint
from bloomery.cli.arguments import data_bar, parsed_with_target, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import (
    is_checkpoint,
    local_checkpoint,
    one_checkpoint,
    refuse_existing,
    run_directory,
)
from bloomery.cli.tables import size_words
from bloomery.config.checkpoint import BackupSection
from bloomery.errors import BloomeryError, CheckpointError, UsageError
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import lock_run
from bloomery.objects import storage_failure

COPY_EXAMPLES = """\
bloomery ckpt copy runs/demo s3://bucket/demo                 back up the newest checkpoint and the recipe
bloomery ckpt copy s3://bucket/demo runs/demo                 restore them
bloomery ckpt copy runs/demo file:///mnt/usb/demo --what model    copy only the weights to a disk"""
SLIM_EXAMPLES = """\
bloomery ckpt slim runs/demo/checkpoints/step-000500.i001 slim     keep only the model
bloomery ckpt slim pytorch_model.bin slim.bin                      keep only each tensor's own elements"""


def copy(arguments: list[str]) -> int:
    """Copy one checkpoint, and return the exit status."""
    options = parser(
        "ckpt copy",
        "Copy a checkpoint, read the copy back and compare it. Of a run, the newest checkpoint is copied.\n"
        "Either the source or the target must be a URL. After an interruption the same command resumes.",
        examples=COPY_EXAMPLES,
    )
    options.add_argument("source", metavar="RUN|CHECKPOINT|URL", help="the run or checkpoint to copy")
    options.add_argument("target", metavar="URL|RUN", help="the URL of a backup, or a run directory")
    options.add_argument(
        "--what",
        choices=("all", "model"),
        default="all",
        help="all: the whole checkpoint (default); model: only the weights",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    if is_remote(args.target) == is_remote(args.source):
        raise UsageError(
            f"one of {args.source} and {args.target} must be a URL",
            remedy="A directory is a URL too: file:///mnt/disk/run.",
        )
    if args.what == "model" and not is_remote(args.target):
        raise UsageError(
            "--what model only works for copies to a URL", remedy="Copy all, then use `ckpt slim`."
        )
    copied = _up(args) if is_remote(args.target) else _down(args)
    if args.json:
        print(json_text(copied))
    else:
        print(f"{copied['to']}: {size_words(float(copied['bytes']))}, verified")
    return 0


def _up(args: Namespace) -> dict[str, str | int]:
    source = one_checkpoint(args.source)
    if isinstance(source, StoredCheckpoint):
        raise CheckpointError(
            f"{args.source} keeps its checkpoints in object storage already: {source.place()}",
            remedy="Copy from there to a run directory: bloomery ckpt copy URL RUN.",
        )
    directory = Path(source.place())
    run = RunDirectory(directory.parent.parent) if directory.parent.name == "checkpoints" else None
    beside = run.backups if run is not None else directory.parent
    is_ours = os.access(run.path if run is not None else beside, os.W_OK)
    if run is not None:
        require_mounted(run, args.target.rstrip("/"), place="copies", records=is_ours)
    remote = place_at(args.target)
    if run is not None:
        try:
            upload_run_files(run, remote)
        except OSError as error:
            raise storage_failure(error, doing="Copying the run's recipe") from error
    with TemporaryDirectory() as elsewhere, transfer_bar(args) as progress:
        notes = (beside if is_ours else Path(elsewhere)) / f"{directory.name}.notes"
        done = upload_checkpoint(directory, remote, what=args.what, notes=notes, progress=progress)
    if run is not None and is_ours:
        record_copy(run, directory.name, url=done.url, what=done.what, bytes=done.bytes)
    return {"from": source.place(), "to": done.url, "bytes": done.bytes, "bytes_sent": done.bytes_sent}


def _down(args: Namespace) -> dict[str, str | int]:
    source, target = one_checkpoint(args.source), Path(args.target)
    if is_checkpoint(target):
        raise CheckpointError(
            f"{target} is a checkpoint", remedy="Give the run directory that the copy belongs to."
        )
    rundir = (
        run_directory(target) if target.exists() and any(target.iterdir()) else RunDirectory(target).create()
    )
    base = source.place().rpartition("/checkpoints/")[0]

    def fetch_the_rest() -> None:
        # Before the checkpoint is committed: without its incarnations no reader would list it.
        if base:
            try:
                download_run_files(place_at(base, create=False), rundir)
            except OSError as error:
                raise storage_failure(error, doing="Fetching the run's recipe") from error

    # The run lock keeps a trainer from starting meanwhile: it would remove what is not committed yet.
    with lock_run(rundir, doing="restored"), transfer_bar(args) as progress:
        directory = download_checkpoint(
            source, rundir.checkpoints, before_commit=fetch_the_rest, progress=progress
        )
    size = sum(path.stat().st_size for path in directory.iterdir())
    return {"from": source.place(), "to": str(directory), "bytes": size}


@contextmanager
def transfer_bar(args: Namespace) -> Iterator[Progress]:
    """Yield a callback that draws how much is copied, and the time left; it does nothing with --json."""
    with data_bar(shown=not args.json) as progress:
        yield lambda done, total: progress("copying", done, total, "bytes")


def slim(arguments: list[str]) -> int:
    """Write a smaller copy; the original stays as it is. Returns the exit status."""
    options = parser(
        "ckpt slim",
        "Write a smaller copy: of a checkpoint, the model without optimizer states; of a torch.save file,\n"
        "each tensor without the larger storage that it is a view of. The original stays as it is.",
        examples=SLIM_EXAMPLES,
    )
    options.add_argument(
        "path", type=Path, metavar="RUN|CHECKPOINT|FILE", help="a run or checkpoint directory, or a .pt file"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    about = "the directory or file to write"
    args = parsed_with_target(options, arguments, metavar="TARGET", about=about, required=True)

    if not args.path.exists():
        raise CheckpointError(f"{args.path} does not exist.", remedy="Check the path.")
    checkpoint = local_checkpoint(args.path) if args.path.is_dir() else None
    refuse_existing(args.to if checkpoint is None else args.to / checkpoint.name)
    from bloomery.interchange.slim import slim_checkpoint, slim_file  # loads torch

    if checkpoint is not None:
        with data_bar(shown=not args.json) as progress:
            done = slim_checkpoint(checkpoint, args.to, progress=progress)
    else:
        done = slim_file(args.path, args.to)
    if args.json:
        facts = {"path": str(done.path), "bytes_before": done.before, "bytes_after": done.after}
        print(json_text(facts | {"tensors_repaired": done.repaired}))
        return 0
    shared = f"; {done.repaired} tensors had been saved with unused storage" if done.repaired else ""
    print(f"{done.path}: {done.before / 1e6:,.1f} MB before, {done.after / 1e6:,.1f} MB now{shared}")
    return 0


_FILES_AT_A_TIME = 8


def backup(arguments: list[str]) -> int:
    """Back up the newest checkpoint of a run, and return the exit status."""
    options = parser(
        "ckpt backup",
        "Send the newest checkpoint of a run to the places that its recipe names (backup.url,\n"
        "second_backup.url), verified, with its logs and data.\n"
        "The run may be training. After an interruption the same command resumes.",
    )
    options.add_argument("run", type=Path, metavar="RUN", help="the directory of a run")
    options.add_argument(
        "--workers",
        type=int,
        default=_FILES_AT_A_TIME,
        metavar="N",
        help=f"files that are sent at a time (default {_FILES_AT_A_TIME})",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object for each place")
    args = options.parse_args(arguments)
    if args.workers < 1:
        options.error(f"--workers {args.workers} is below 1")
    from bloomery.config.load import load_recipe

    rundir = run_directory(args.run)
    if not rundir.recipe.exists():
        raise CheckpointError(
            f"{rundir.path} has no recipe.toml, which says where backups go",
            remedy="Use `bloomery ckpt copy RUN URL`.",
        )
    recipe = load_recipe(str(rundir.recipe)).recipe
    named = sections(recipe)
    if not named:
        raise CheckpointError(
            f"the recipe of {rundir.path} names no place for backups",
            remedy="Set backup.url, or use `bloomery ckpt copy RUN URL`.",
        )
    saved = checkpoints(rundir)
    if not saved:
        raise CheckpointError(
            f"{rundir.path} has no checkpoints yet",
            remedy="The run saves the first one as the recipe's [checkpoint] says.",
        )
    refused: list[BloomeryError] = []
    for place, section in named.items():
        url = backup_url(section, recipe.run.name, read_duty(rundir))
        try:
            _send(args, rundir, saved[-1], section, url, place)
        except BloomeryError as error:  # another place may take it all the same
            refused.append(error)
    for earlier in refused[:-1]:
        print(f"bloomery: {earlier}", file=sys.stderr)
    if refused:
        raise refused[-1]
    return 0


def _send(
    args: Namespace,
    rundir: RunDirectory,
    newest: CommittedCheckpoint,
    section: BackupSection,
    url: str,
    place: str,
) -> None:
    """Send the checkpoint, then logs and data, to one place; print what was done, one line a place."""
    require_mounted(rundir, url, place=place)
    require_kept(rundir, url)
    remote = place_at(url)
    try:
        upload_run_files(rundir, remote)
        with transfer_bar(args) as progress:
            done = upload_checkpoint(
                newest.directory,
                remote,
                what=section.what,
                notes=notes_of(rundir, newest.name, place=place),
                progress=progress,
                workers=args.workers,
            )
        record_copy(rundir, newest.name, url=done.url, what=done.what, bytes=done.bytes, place=place)
        if not place and read_duty(rundir) is not None:
            note_round(rundir, newest.directory)
        more_bytes = upload_logs_and_data(rundir, remote, section, place=place)
    except OSError as error:
        raise storage_failure(error, doing="The backup") from error
    if args.json:
        facts = {"from": str(newest.directory), "to": done.url, "bytes": done.bytes}
        more = {"bytes_sent": done.bytes_sent, "what": done.what, "bytes_of_logs_and_data": more_bytes}
        print(json_text(facts | more))
    else:
        beside = f"; {size_words(float(more_bytes))} of logs and data" if more_bytes else ""
        print(f"{done.url}: {size_words(float(done.bytes))}, verified{beside}")
