"""The retention policy: decides which checkpoints of a run are kept, with reasons, and which are pruned."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import CheckpointError
from bloomery.frozen import dataclass

if TYPE_CHECKING:
    from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
    from bloomery.events.run_directory import RunDirectory


_NOTHING: Mapping[int, float] = MappingProxyType({})
BEFORE_CLIMB = "before_climb"
"""In a manifest's `about`: the latest step to go back to, should the loss climb then or go on climbing."""


def steps_to_keep(
    steps: Iterable[int],
    *,
    section: CheckpointSection,
    run_length_steps: int | None,
    newest_intact: int | None,
    not_backed_up: Collection[int] = (),
    epoch_ends: Collection[int] = (),
    reach_steps: Collection[int] = (),
    before_climb: int | None = None,
) -> set[int]:
    """Return those of `steps` to keep: all for which there is a reason (see `reasons_to_keep`)."""
    reasons = reasons_to_keep(
        steps,
        section=section,
        run_length_steps=run_length_steps,
        newest_intact=newest_intact,
        not_backed_up=not_backed_up,
        epoch_ends=epoch_ends,
        reach_steps=reach_steps,
        before_climb=before_climb,
    )
    return {step for step, why in reasons.items() if why}


def reasons_to_keep(
    steps: Iterable[int],
    *,
    section: CheckpointSection,
    run_length_steps: int | None,
    newest_intact: int | None,
    not_backed_up: Collection[int] = (),
    epoch_ends: Collection[int] = (),
    reach_steps: Collection[int] = (),
    held_out: Mapping[int, float] = _NOTHING,
    before_climb: int | None = None,
) -> dict[int, tuple[str, ...]]:
    """Return the reasons to keep each of `steps`; () for a step that may be removed.

    Kept are the newest `keep_last`, multiples of `keep_every_steps`, the first of each tenth of the run, the
    newest intact one, the `keep_best` with the lowest held-out loss, those that are not backed up yet, the
    last before an epoch ended, and for each of `reach_steps` two: the newest that is at least so many steps
    old, and the oldest younger one, which takes its place later, and the newest at or before `before_climb`.
    It is the first of a tenth, not the last, so that the choice never changes later. Everything is kept while
    nothing is known to be intact.

    run_length_steps: None where the run's length in steps is not known; then no tenth is kept.
    newest_intact: None where no checkpoint is known to be intact.
    not_backed_up: steps that are to be backed up and are not yet.
    epoch_ends: steps of the last checkpoints before a dataset's first epoch ended.
    reach_steps: how many steps before the newest checkpoint a rewind may have to begin; () for none.
    held_out: the held-out loss of each step that has one.
    before_climb: a step of which the newest checkpoint at or before it is kept; None for none.
    """
    ordered = sorted(set(steps))
    if newest_intact is None:
        return {step: ("nothing is known to be intact",) for step in ordered}
    reasons: dict[int, list[str]] = {step: [] for step in ordered}
    for step in ordered[-section.keep_last :]:
        reasons[step].append(f"last {section.keep_last}")
    every = section.keep_every_steps
    for step in [step for step in ordered if every and step % every == 0]:
        reasons[step].append(f"every {every}")
    if section.keep_tenths and run_length_steps:
        for tenth, step in _first_of_tenths(ordered, run_length_steps).items():
            reasons[step].append(f"tenth {tenth}")
    for step in {step for reach in reach_steps for step in _rewind_targets(ordered, reach)}:
        reasons[step].append("for a rewind")
    if newest_intact in reasons:
        reasons[newest_intact].append("newest intact")
    for step, why in (*_before(before_climb, ordered), *_best(ordered, held_out, section.keep_best)):
        reasons[step].append(why)
    for step in ordered:
        if step in epoch_ends:
            reasons[step].append("first epoch's end")
        if step in not_backed_up:
            reasons[step].append("not backed up")
    return {step: tuple(why) for step, why in reasons.items()}


def _before(climb: int | None, steps: Sequence[int]) -> list[tuple[int, str]]:
    """Return the newest step from before a climb, and what it is; nothing where there is none."""
    early = [step for step in steps if climb is not None and step <= climb]
    return [(step, "before a climb of the loss") for step in early[-1:]]


def _best(steps: Sequence[int], held_out: Mapping[int, float], count: int) -> list[tuple[int, str]]:
    """Return the steps with the lowest held-out losses, and what each is."""
    lowest = sorted((held_out[step], step) for step in steps if step in held_out)[:count]
    return [(step, f"best {place}" if place > 1 else "best") for place, (_, step) in enumerate(lowest, 1)]


def _rewind_targets(ordered: Sequence[int], reach: int) -> tuple[int, ...]:
    """Return the newest step that lies at least `reach` steps back, and the oldest after it.

    The second becomes the first when the run has gone on as far. So one is always there once the run is
    longer than that, at most twice as far back and one save interval, and two are enough at any interval.
    """
    if not ordered or not reach:
        return ()
    line = ordered[-1] - reach
    early = [step for step in ordered if step <= line]
    return (*early[-1:], *[step for step in ordered if step > line][:1])


def _first_of_tenths(ordered: Sequence[int], run_length_steps: int) -> dict[int, int]:
    first: dict[int, int] = {}
    for step in ordered:
        first.setdefault(_tenth(step, run_length_steps), step)
    return first


def _tenth(step: int, run_length_steps: int) -> int:
    """Return which tenth of the run a step ends in: 1 for steps up to a tenth of it."""
    return -(-step * 10 // run_length_steps)


@dataclass(frozen=True, kw_only=True)
class PruneDecision:
    """A checkpoint, and the reasons to keep it; () where it may be removed."""

    checkpoint: CommittedCheckpoint
    why: tuple[str, ...]


def prune_plan(
    rundir: RunDirectory,
    *,
    section: CheckpointSection,
    run_length_steps: int | None,
    is_intact: Callable[[CommittedCheckpoint], bool],
    not_backed_up: Collection[str] = (),
    reach_steps: Collection[int] = (),
) -> list[PruneDecision]:
    """Return for each checkpoint of a run whether it is kept, in the order of their steps.

    Of two checkpoints of the same step, only that of the later incarnation can be kept for its step. What a
    rewind abandoned may be removed once an intact checkpoint of the run has reached its step.

    is_intact: asked newest first, until it says yes. not_backed_up: names of checkpoints that have no backup
        yet.
    """
    # Not loaded with this module: the planner, which is to be quick, uses only the rules.
    from bloomery.checkpoint.format.catalogue import abandoned_checkpoints, checkpoints

    committed = checkpoints(rundir)
    intact = next((item for item in reversed(committed) if is_intact(item)), None)
    newest_of_step = {item.step: item for item in committed}
    reasons = reasons_to_keep(
        newest_of_step,
        section=section,
        run_length_steps=run_length_steps,
        newest_intact=None if intact is None else intact.step,
        not_backed_up={step for step, item in newest_of_step.items() if item.name in not_backed_up},
        epoch_ends=_last_of_first_epochs(committed),
        reach_steps=reach_steps,
        held_out=held_out_losses(newest_of_step.values()),
        before_climb=_step_before_climb(committed),
    )
    decided = []
    for item in committed:
        why = reasons[item.step] if newest_of_step[item.step] == item or intact is None else ()
        if item == intact and not why:
            why = ("newest intact",)
        decided.append(PruneDecision(checkpoint=item, why=why))
    for item in abandoned_checkpoints(rundir):
        passed = intact is not None and item.step <= intact.step
        decided.append(
            PruneDecision(checkpoint=item, why=() if passed else ("abandoned; the run has not passed it",))
        )
    return sorted(decided, key=lambda fate: fate.checkpoint)


def _step_before_climb(committed: Sequence[CommittedCheckpoint]) -> int | None:
    """Return what the newest readable manifest says of a climb; earlier versions wrote nothing."""
    from bloomery.checkpoint.format.manifest import read_manifest

    for item in reversed(committed):
        try:
            step = read_manifest(item.directory).about.get(BEFORE_CLIMB)
        except CheckpointError:
            continue
        return step if isinstance(step, int) else None
    return None


def held_out_losses(committed: Iterable[CommittedCheckpoint]) -> dict[int, float]:
    """Return the held-out loss of each checkpoint that has a finite one, by step, from their manifests."""
    from bloomery.checkpoint.format.manifest import read_manifest

    losses = {}
    for item in committed:
        try:
            loss = read_manifest(item.directory).about.get("held_out_loss")
        except CheckpointError:
            continue
        if isinstance(loss, float) and math.isfinite(loss):
            losses[item.step] = loss
    return losses


def _last_of_first_epochs(committed: Sequence[CommittedCheckpoint]) -> set[int]:
    """Return the steps of the last checkpoints before a dataset's first epoch ended, and of the last one
    before a dataset was read again, from their manifests.

    A manifest holds the data's cursor (`about.cursor`) and where the next first epoch ends
    (`about.epoch_end_ahead`). A checkpoint with an unreadable manifest is skipped.
    """
    from bloomery.checkpoint.format.manifest import read_manifest

    places = []
    for item in committed:
        try:
            about = read_manifest(item.directory).about
        except CheckpointError:
            continue
        is_single = _is_single_pass(about)
        places.append((item.step, about.get("cursor"), about.get("epoch_end_ahead"), is_single))
    return {
        step
        for (step, _, end, is_single), (_, cursor, _, is_next_single) in pairwise(places)
        if (isinstance(end, int) and isinstance(cursor, int) and cursor >= end)
        or (is_single and not is_next_single)
    }


def last_single_pass(committed: Sequence[CommittedCheckpoint]) -> CommittedCheckpoint | None:
    """Return the newest checkpoint whose run had read no sample of any dataset twice; None if there is none.

    committed: of one run, oldest first. A checkpoint is left out that does not say where its run reads a
    dataset again (`about.first_repeat`; of earlier versions, where its earliest epoch ends,
    `about.first_epoch_end`), or whose manifest cannot be read.
    """
    from bloomery.checkpoint.format.manifest import read_manifest

    for item in reversed(committed):
        try:
            about = read_manifest(item.directory).about
        except CheckpointError:
            continue
        if _is_single_pass(about):
            return item
    return None


def _is_single_pass(about: Mapping[str, Any]) -> bool:  # Any: JSON
    cursor, end = about.get("cursor"), about.get("first_repeat", about.get("first_epoch_end", "unknown"))
    return isinstance(cursor, int) and (end is None or (isinstance(end, int) and cursor <= end))
