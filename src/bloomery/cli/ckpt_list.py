"""`bloomery ckpt list` and `bloomery ckpt prune`: list checkpoints with why each is kept; remove others."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.catalogue import (
    CommittedCheckpoint,
    RemoteCopy,
    checkpoints,
    copies_of,
    disk_bytes_per_tensor_byte,
    verify,
)
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.retention import PruneDecision, last_single_pass, prune_plan
from bloomery.checkpoint.format.source import RemoteCheckpoint, Source, is_stored_elsewhere, source_of
from bloomery.checkpoint.remote.places import remove_kept, sections, waiting_for_copies
from bloomery.checkpoint.remote.remote_run import (
    is_remote,
    place_at,
    remote_checkpoints,
)
from bloomery.checkpoint.remote.transfer import SUBSET
from bloomery.cli.arguments import data_bar, parser
from bloomery.cli.ckpt import verify_watched, was_removed
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import run_directory
from bloomery.cli.tables import size_words, table_text
from bloomery.config.environment import OfflineRefused
from bloomery.config.recipe import Recipe
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import storage_failure
from bloomery.objects.uploads import UnfinishedUploads

_COLUMNS = ("step", "inc", "saved", "size", "tokens", "loss", "held-out", "backup", "state", "kept")
_KEPT_WIDTH, _STATE_WIDTH = 26, 15
_EXCESS = 1.2


def show_list(arguments: list[str]) -> int:
    """Print the checkpoints of a run or of a backup. Return the exit status: 1 if --verify finds damage."""
    options = parser("ckpt list", "List the checkpoints of a run, or of a run's backup, oldest first.")
    options.add_argument(
        "run", metavar="RUN|URL", help="a run directory, or a backup at s3://…, gs://…, az://… or file://…"
    )
    options.add_argument("--all", action="store_true", help="list those too that a rewind abandoned")
    options.add_argument("--verify", action="store_true", help="read and check every byte of each")
    options.add_argument(
        "--single-pass",
        action="store_true",
        help="list only the last one before a dataset was read a second time",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object for each checkpoint")
    args = options.parse_args(arguments)
    if args.single_pass and (is_remote(args.run) or args.all):
        options.error("--single-pass is of a local run, and of what no rewind abandoned")
    rows = _remote_rows(args) if is_remote(args.run) else _local_rows(args)
    if args.single_pass:
        rows = _single_pass(rows, run_directory(Path(args.run)))
    if args.json:
        for row in rows:
            print(json_text(row, ensure_ascii=False))
    elif rows:
        state, kept = len(_COLUMNS) - 2, len(_COLUMNS) - 1
        print(table_text([_COLUMNS, *(_cells(row) for row in rows)], left=(state, kept), wrap=False))
        for row in rows:
            if row["excess"] is not None and row["excess"] > _EXCESS:
                print(
                    f"step {row['step']:,} takes {row['excess']:.0%} of the bytes of its tensors: "
                    "its directory holds files that do not belong to it"
                )
    else:
        print(f"{args.run} has no checkpoints yet.")
    return int(args.verify and any(row["state"].startswith("damaged") for row in rows))


def prune(arguments: list[str]) -> int:
    """Remove the checkpoints that the run's recipe does not keep, and return the exit status."""
    options = parser("ckpt prune", "Remove the checkpoints of a run that its recipe does not keep.")
    options.add_argument(
        "run", type=Path, metavar="RUN", help="the directory of a run that is not training now"
    )
    options.add_argument("--dry-run", action="store_true", help="print what would be removed; remove nothing")
    options.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object for each checkpoint, and one for each upload that was cut short",
    )
    args = options.parse_args(arguments)
    from bloomery.config.load import load_recipe
    from bloomery.events.run_lock import lock_run

    rundir = run_directory(args.run)
    if not rundir.recipe.exists():
        raise CheckpointError(
            f"{rundir.path} has no recipe.toml, which says what is kept",
            remedy="Give a whole run directory, with its recipe.toml.",
        )
    recipe = load_recipe(str(rundir.recipe)).recipe
    with ExitStack() as stack:
        if not args.dry_run:
            stack.enter_context(lock_run(rundir, doing="pruned"))
        with data_bar(shown=not args.json) as progress:
            decisions = _prune_plan(
                rundir,
                recipe,
                intact=lambda checkpoint: not verify_watched(checkpoint.directory, progress),
            )
        for decision in decisions:
            if not decision.why and not args.dry_run:
                remove_kept(decision.checkpoint.directory)
        _print_decisions(decisions, args, removed=not args.dry_run)
        _end_cut_uploads(recipe, args)
    return 0


def _print_decisions(decisions: list[PruneDecision], args: Namespace, *, removed: bool) -> None:
    for decision in decisions:
        if args.json:
            facts = {
                "checkpoint": decision.checkpoint.name,
                "kept": list(decision.why),
                "removed": removed and not decision.why,
            }
            print(json_text(facts))
        else:
            gone = "removed" if removed else "would be removed"
            print(
                f"{decision.checkpoint.name}  {'kept: ' + ', '.join(decision.why) if decision.why else gone}"
            )
    if not decisions and not args.json:
        print(f"{args.run} has no checkpoints yet.")


def _end_cut_uploads(recipe: Recipe, args: Namespace) -> None:
    """Abort the run's multipart uploads that were never completed, as after a kill, and print each of them.

    With --dry-run they are only printed.
    """
    urls = {section.url for section in sections(recipe).values()} | {recipe.checkpoint.url}
    for url in sorted(url for url in urls if url.startswith(("s3://", "gs://"))):
        try:
            uploads = UnfinishedUploads(f"{url.rstrip('/')}/{recipe.run.name}")
            for upload in uploads.list():
                if not args.dry_run:
                    uploads.end(upload)
                if args.json:
                    facts = {"upload": upload.key, "begun": upload.begun.isoformat()}
                    print(json_text({**facts, "removed": not args.dry_run}))
                else:
                    gone = "would be removed" if args.dry_run else "removed"
                    begun = upload.begun.astimezone()  # the store tells the time of Greenwich
                    print(f"{upload.key}  an upload cut short, begun {begun:%Y-%m-%d %H:%M}: {gone}")
        except (OSError, OfflineRefused) as error:
            text = error.strerror if isinstance(error, OSError) else error
            print(f"uploads that were cut short were not looked for: {text}", file=sys.stderr)


def _local_rows(args: Namespace) -> list[dict[str, Any]]:
    rundir = run_directory(Path(args.run))
    recipe = _recipe(rundir)
    rows = []
    for decision in _prune_plan(
        rundir, recipe, intact=lambda checkpoint: not verify(checkpoint.directory, contents=False)
    ):
        hidden = decision.why[:1] == () or decision.why[0].startswith("abandoned")
        abandoned = hidden and decision.checkpoint.base not in _visible(rundir)
        if abandoned and not args.all:
            continue
        row = _row(
            source_of(decision.checkpoint.directory),
            decision.checkpoint.step,
            decision.checkpoint.incarnation,
            args.verify,
        )
        if row["state"].startswith("damaged") and was_removed(rundir.path, decision.checkpoint.name):
            continue
        row |= {
            "abandoned": abandoned,
            "kept": [] if abandoned else list(decision.why),
            **_backup(copies_of(rundir, [decision.checkpoint.name]).get(decision.checkpoint.name, ())),
            "excess": _excess(decision.checkpoint),
            "directory": str(decision.checkpoint.directory),
        }
        rows.append(row)
    return rows


def _single_pass(rows: list[dict[str, Any]], rundir: RunDirectory) -> list[dict[str, Any]]:
    last = last_single_pass(checkpoints(rundir))
    if last is None:
        raise CheckpointError(
            f"{rundir.path} has no checkpoint of which it is known that no dataset had been read twice",
            remedy="List all of them; the journal's `epoch_end` events say when each first epoch ended.",
        )
    return [row for row in rows if row["directory"] == str(last.directory)]


def _remote_rows(args: Namespace) -> list[dict[str, Any]]:
    try:
        remote = place_at(args.run, create=False)
        sources: list[RemoteCheckpoint] = remote_checkpoints(remote, abandoned=args.all)
        shown = {source.name for source in (remote_checkpoints(remote) if args.all else sources)}
    except OSError as error:
        raise storage_failure(error, doing="Listing the backups") from error
    rows = []
    for source in sources:
        step, incarnation = (int(part.lstrip("step-i")) for part in source.name.split("."))
        row = _row(source, step, incarnation, args.verify)
        place = source.place()
        beside = {"abandoned": source.name not in shown, "kept": [], "excess": None, "directory": place}
        rows.append({**row, **beside, "backup": place, "backup_what": row["what"]})
    return rows


def _row(source: Source, step: int, incarnation: int, check: bool) -> dict[str, Any]:  # noqa: FBT001  — an option
    """Return the values of one checkpoint in `ckpt list`; `state` says what is wrong with a damaged one."""
    problems = verify(source, contents=check)
    try:
        manifest = read_manifest(source)
        about, size, saved = manifest.about, manifest.bytes, manifest.time
    except CheckpointError:
        about, size, saved = {}, None, None
    return {
        "step": step,
        "incarnation": incarnation,
        "time": saved,
        "bytes": size,
        "tokens": about.get("consumed_tokens"),
        "loss": about.get("loss"),
        "held_out_loss": about.get("held_out_loss"),
        "what": "model" if SUBSET in about else "all",
        "state": f"damaged: {problems[0]}" if problems else "verified" if check else "complete",
    }


def _prune_plan(
    rundir: RunDirectory, recipe: Recipe | None, *, intact: Any
) -> list[PruneDecision]:  # Any: a predicate of Found
    from bloomery.config.checkpoint import CheckpointSection
    from bloomery.plan.schedule import steps_of_peer

    length = None
    if recipe is not None:
        tokens = recipe.data.sequence_length
        length = steps_of_peer(recipe.train, recipe.elastic, sequence_length=tokens)
    return prune_plan(
        rundir,
        section=recipe.checkpoint if recipe is not None else CheckpointSection(),
        run_length_steps=length,
        is_intact=intact,
        not_backed_up=() if recipe is None else waiting_for_copies(rundir, recipe),
        reach_steps=() if recipe is None else recipe.guard.reach_steps,
    )


def _backup(listed: Sequence[RemoteCopy]) -> dict[str, str | None]:
    """Return where a verified copy is and what it holds; a copy of the whole checkpoint is preferred."""
    if not listed:
        return {"backup": None, "backup_what": None}
    best = min(listed, key=lambda copy: copy.what != "all")
    return {"backup": best.url, "backup_what": best.what}


def _recipe(rundir: RunDirectory) -> Recipe | None:
    from bloomery.config.load import load_recipe

    if not rundir.recipe.exists():
        return None
    try:
        return load_recipe(str(rundir.recipe)).recipe
    except BloomeryError:
        return None  # a recipe of another version: the list does without its rules of keeping


def _visible(rundir: RunDirectory) -> set[tuple[int, int]]:
    from bloomery.checkpoint.format.catalogue import checkpoints

    return {checkpoint.base for checkpoint in checkpoints(rundir)}


def _excess(checkpoint: CommittedCheckpoint) -> float | None:
    if is_stored_elsewhere(checkpoint.directory):
        return None
    try:
        return round(disk_bytes_per_tensor_byte(checkpoint.directory), 3)
    except (CheckpointError, OSError):
        return None


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    kept = "abandoned" if row["abandoned"] else ", ".join(row["kept"]) or "-"
    loss, held_out = row["loss"], row["held_out_loss"]
    return (
        f"{row['step']:,}",
        str(row["incarnation"]),
        "-" if row["time"] is None else time.strftime("%m-%d %H:%M", time.localtime(row["time"])),
        "-" if row["bytes"] is None else size_words(row["bytes"]),
        "-" if row["tokens"] is None else _count_words(row["tokens"]),
        f"{loss:.3f}" if isinstance(loss, float) else "-",
        f"{held_out:.3f}" if isinstance(held_out, float) else "-",
        {None: "-", "all": "yes"}.get(row["backup_what"], "weights"),
        _shortened(row["state"], _STATE_WIDTH),
        _shortened(kept, _KEPT_WIDTH),
    )


def _count_words(count: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9)):
        if count >= 10 * size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,}"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
