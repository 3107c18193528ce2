"""`bloomery ckpt backup` sends a run's newest checkpoint to its backup now, also while the run trains."""

from __future__ import annotations

import json
from pathlib import Path

from bloomery.checkpoint.format.catalogue import checkpoints, record_copy
from bloomery.checkpoint.remote.backup import backup_url, upload_run_files
from bloomery.checkpoint.remote.backup_duty import read_duty
from bloomery.checkpoint.remote.remote_checkpoint import place_at
from bloomery.checkpoint.remote.shared_upload import notes_of
from bloomery.checkpoint.remote.transfer import upload_checkpoint
from bloomery.cli.arguments import parser
from bloomery.cli.ckpt_copy import bar_of
from bloomery.cli.run_inputs import run_directory
from bloomery.cli.tables import size_words
from bloomery.errors import CheckpointError
from bloomery.objects import storage_failure

_FILES_AT_A_TIME = 8


def backup(arguments: list[str]) -> int:
    """Back up the newest checkpoint of a run; returns the exit status."""
    options = parser(
        "ckpt backup",
        "Send the newest checkpoint of a run to the place that its recipe names (backup.url), verified.\n"
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
    options.add_argument("--json", action="store_true", help="print one JSON object")
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
    url = backup_url(recipe.backup, recipe.run.name, read_duty(rundir))
    if not url:
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
    newest, remote = saved[-1], place_at(url)
    try:
        upload_run_files(rundir, remote)
    except OSError as error:
        raise storage_failure(error, doing="The backup") from error
    done = upload_checkpoint(
        newest.directory,
        remote,
        what=recipe.backup.what,
        notes=notes_of(rundir, newest.name),
        progress=bar_of(args),
        workers=args.workers,
    )
    record_copy(rundir, newest.name, url=done.url, what=done.what, bytes=done.bytes)
    if args.json:
        facts = {"from": str(newest.directory), "to": done.url, "bytes": done.bytes}
        print(json.dumps(facts | {"bytes_sent": done.bytes_sent, "what": done.what}))
    else:
        print(f"{done.url}: {size_words(float(done.bytes))}, verified")
    return 0
