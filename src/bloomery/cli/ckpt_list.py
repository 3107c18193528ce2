"""`bloomery ckpt list` and `bloomery ckpt prune`: what there is, why it is kept, and what goes."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bloomery.checkpoint.backup import due
from bloomery.checkpoint.catalogue import Found
from bloomery.checkpoint.commit import remove_checkpoint
from bloomery.checkpoint.copies import Copy, copies
from bloomery.checkpoint.manifest import read_manifest
from bloomery.checkpoint.pruning import Fate, fates
from bloomery.checkpoint.remote import RemoteCheckpoint, is_remote, place_at, remote_checkpoints
from bloomery.checkpoint.source import Source, source_of
from bloomery.checkpoint.subset import SUBSET
from bloomery.checkpoint.verify import excess, verify
from bloomery.cli.arguments import parser
from bloomery.cli.ckpt_words import run_directory, size_words
from bloomery.config.recipe import Recipe
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.events.rundir import RunDir
from bloomery.objects import storage_failure

_COLUMNS = ("step", "inc", "saved", "size", "tokens", "loss", "backup", "kept", "state")
_WIDTH, _KEPT_WIDTH, _STATE_WIDTH = 100, 26, 22
_EXCESS = 1.2


def show_list(arguments: list[str]) -> int:
    """List checkpoints; returns the exit status."""
    options = parser("ckpt list", "List the checkpoints of a run, or of a run's backup, oldest first.")
    options.add_argument("run", metavar="RUN|URL", help="run directory, or s3://…, gs://…, az://…, file://…")
    options.add_argument("--all", action="store_true", help="also those that a rewind left behind")
    options.add_argument("--verify", action="store_true", help="read and check every byte of each")
    options.add_argument("--json", action="store_true", help="one JSON object a line")
    given = options.parse_args(arguments)
    rows = _remote_rows(given) if is_remote(given.run) else _local_rows(given)
    if given.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    elif rows:
        print(_table(rows))
        for row in rows:
            if row["excess"] is not None and row["excess"] > _EXCESS:
                print(
                    f"step {row['step']:,} takes {row['excess']:.0%} of the bytes of its tensors: "
                    "look for what does not belong into its directory"
                )
    else:
        print(f"{given.run} has no checkpoints yet.")
    return 0


def prune(arguments: list[str]) -> int:
    """Remove what the run's recipe does not keep; returns the exit status."""
    options = parser("ckpt prune", "Remove the checkpoints of a run that its recipe does not keep.")
    options.add_argument("run", type=Path, metavar="RUN", help="run directory, of a run that is not training")
    options.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    options.add_argument("--json", action="store_true", help="one JSON object a checkpoint")
    given = options.parse_args(arguments)
    from bloomery.config.load import load_recipe
    from bloomery.events.holder import hold

    rundir = run_directory(given.run)
    if not rundir.recipe.exists():
        raise CheckpointError(
            f"{rundir.path} has no recipe.toml, which says what is kept",
            remedy="Is this a whole run directory?",
        )
    recipe = load_recipe(str(rundir.recipe)).recipe
    if given.dry_run:
        decided = _fates(rundir, recipe, intact=lambda found: not verify(found.directory))
        _tell(decided, given, removed=False)
        return 0
    with hold(rundir):
        decided = _fates(rundir, recipe, intact=lambda found: not verify(found.directory))
        for fate in decided:
            if not fate.why:
                remove_checkpoint(fate.found.directory)
    _tell(decided, given, removed=True)
    return 0


def _tell(decided: list[Fate], given: Namespace, *, removed: bool) -> None:
    for fate in decided:
        if given.json:
            told = {
                "checkpoint": fate.found.name,
                "kept": list(fate.why),
                "removed": removed and not fate.why,
            }
            print(json.dumps(told))
        else:
            gone = "removed" if removed else "would be removed"
            print(f"{fate.found.name}  {'kept: ' + ', '.join(fate.why) if fate.why else gone}")
    if not decided and not given.json:
        print(f"{given.run} has no checkpoints yet.")


def _local_rows(given: Namespace) -> list[dict[str, Any]]:
    rundir = run_directory(Path(given.run))
    recipe = _recipe(rundir)
    done = copies(rundir)
    rows = []
    for fate in _fates(rundir, recipe, intact=lambda found: not verify(found.directory, contents=False)):
        hidden = fate.why[:1] == () or fate.why[0].startswith("abandoned")
        abandoned = hidden and fate.found.base not in _visible(rundir)
        if abandoned and not given.all:
            continue
        row = _row(source_of(fate.found.directory), fate.found.step, fate.found.incarnation, given.verify)
        row |= {
            "abandoned": abandoned,
            "kept": [] if abandoned else list(fate.why),
            **_backup(done.get(fate.found.name, ())),
            "excess": _excess(fate.found),
            "directory": str(fate.found.directory),
        }
        rows.append(row)
    return rows


def _remote_rows(given: Namespace) -> list[dict[str, Any]]:
    try:
        remote = place_at(given.run)
        sources: list[RemoteCheckpoint] = remote_checkpoints(remote, abandoned=given.all)
        shown = {source.name for source in (remote_checkpoints(remote) if given.all else sources)}
    except OSError as error:
        raise storage_failure(error, doing="Listing the backups") from error
    rows = []
    for source in sources:
        step, incarnation = (int(part.lstrip("step-i")) for part in source.name.split("."))
        row = _row(source, step, incarnation, given.verify)
        place = source.place()
        beside = {"abandoned": source.name not in shown, "kept": [], "excess": None, "directory": place}
        rows.append({**row, **beside, "backup": place, "backup_what": row["what"]})
    return rows


def _row(source: Source, step: int, incarnation: int, check: bool) -> dict[str, Any]:  # noqa: FBT001  — an option
    """Return one checkpoint as JSON. A damaged one is a row too: the list must not fail on it."""
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
        "what": "model" if SUBSET in about else "all",
        "state": f"damaged: {problems[0]}" if problems else "verified" if check else "complete",
    }


def _fates(rundir: RunDir, recipe: Recipe | None, *, intact: Any) -> list[Fate]:  # Any: a predicate of Found
    from bloomery.config.keeping import CheckpointSection
    from bloomery.plan.schedule import steps_of_peer

    length = None
    if recipe is not None:
        tokens = recipe.data.sequence_length
        length = steps_of_peer(recipe.train, recipe.elastic, sequence_length=tokens)
    return fates(
        rundir,
        section=recipe.checkpoint if recipe is not None else CheckpointSection(),
        run_length_steps=length,
        is_intact=intact,
        only_here=() if recipe is None else _only_here(rundir, recipe),
    )


def _only_here(rundir: RunDir, recipe: Recipe) -> set[str]:
    return {found.name for found in due(rundir, recipe.backup, run_name=recipe.run.name)}


def _backup(listed: Sequence[Copy]) -> dict[str, str | None]:
    """Return where a verified copy is and what it holds: one that is whole, where there is one."""
    if not listed:
        return {"backup": None, "backup_what": None}
    best = min(listed, key=lambda copy: copy.what != "all")
    return {"backup": best.url, "backup_what": best.what}


def _recipe(rundir: RunDir) -> Recipe | None:
    from bloomery.config.load import load_recipe

    if not rundir.recipe.exists():
        return None
    try:
        return load_recipe(str(rundir.recipe)).recipe
    except BloomeryError:
        return None  # of another version: the list is shown without what it would keep


def _visible(rundir: RunDir) -> set[tuple[int, int]]:
    from bloomery.checkpoint.catalogue import checkpoints

    return {found.base for found in checkpoints(rundir)}


def _excess(found: Found) -> float | None:
    try:
        return round(excess(found.directory), 3)
    except (CheckpointError, OSError):
        return None


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for people, at most 100 columns wide."""
    lines = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    shown = []
    for line in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(line[:-2], widths, strict=False)]
        cells.append(f"{line[-2]:<{widths[-2]}}")
        text = "  ".join([*cells, line[-1]]).rstrip()
        shown.append(text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…")
    return "\n".join(shown)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    kept = "abandoned" if row["abandoned"] else ", ".join(row["kept"]) or "-"
    loss = row["loss"]
    return (
        f"{row['step']:,}",
        str(row["incarnation"]),
        "-" if row["time"] is None else time.strftime("%m-%d %H:%M", time.localtime(row["time"])),
        "-" if row["bytes"] is None else size_words(row["bytes"]),
        "-" if row["tokens"] is None else _count_words(row["tokens"]),
        f"{loss:.3f}" if isinstance(loss, float) else "-",
        {None: "-", "all": "yes"}.get(row["backup_what"], "weights"),
        _shortened(kept, _KEPT_WIDTH),
        _shortened(row["state"], _STATE_WIDTH),
    )


def _count_words(count: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9)):
        if count >= 10 * size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,}"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
