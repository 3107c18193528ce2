"""`bloomery ckpt backup` sends a run's newest checkpoint to its backup now, also while the run trains."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint, checkpoints, record_copy
from bloomery.checkpoint.remote.backup import backup_url
from bloomery.checkpoint.remote.backup_duty import read_duty
from bloomery.checkpoint.remote.backup_places import sections
from bloomery.checkpoint.remote.remote_run import place_at, upload_more, upload_run_files
from bloomery.checkpoint.remote.shared_upload import notes_of
from bloomery.checkpoint.remote.transfer import upload_checkpoint
from bloomery.cli.arguments import parser
from bloomery.cli.ckpt_copy import transfer_bar
from bloomery.cli.run_inputs import run_directory
from bloomery.cli.tables import size_words
from bloomery.config.checkpoint import BackupSection
from bloomery.errors import CheckpointError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import storage_failure

_FILES_AT_A_TIME = 8


def backup(arguments: list[str]) -> int:
    """Back up the newest checkpoint of a run; returns the exit status."""
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
    for place, section in named.items():
        _send(
            args, rundir, saved[-1], section, backup_url(section, recipe.run.name, read_duty(rundir)), place
        )
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
        more_bytes = upload_more(rundir, remote, section, place=place)
    except OSError as error:
        raise storage_failure(error, doing="The backup") from error
    if args.json:
        facts = {"from": str(newest.directory), "to": done.url, "bytes": done.bytes}
        more = {"bytes_sent": done.bytes_sent, "what": done.what, "bytes_of_logs_and_data": more_bytes}
        print(json.dumps(facts | more))
    else:
        beside = f"; {size_words(float(more_bytes))} of logs and data" if more_bytes else ""
        print(f"{done.url}: {size_words(float(done.bytes))}, verified{beside}")
