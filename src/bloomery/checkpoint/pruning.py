"""What of a run's checkpoints is to be kept, and what may go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bloomery.checkpoint.catalogue import Found, abandoned_checkpoints, checkpoints
from bloomery.checkpoint.manifest import read_manifest
from bloomery.checkpoint.retention import reasons
from bloomery.config.keeping import CheckpointSection
from bloomery.errors import CheckpointError
from bloomery.events.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Fate:
    """One checkpoint, and why it is kept; () where it may go."""

    found: Found
    why: tuple[str, ...]


def fates(
    rundir: RunDir,
    *,
    section: CheckpointSection,
    run_length_steps: int | None,
    is_intact: Callable[[Found], bool],
    only_here: Collection[str] = (),
) -> list[Fate]:
    """Return what is to become of each checkpoint, in the order of their steps.

    is_intact: asked newest first until one is. only_here: names of those that are yet to be backed up.
    Of two with the same step the later counts. What a rewind abandoned goes once the run has passed it.
    """
    found = checkpoints(rundir)
    intact = next((item for item in reversed(found) if is_intact(item)), None)
    newest_of_step = {item.step: item for item in found}
    kept = reasons(
        newest_of_step,
        section=section,
        run_length_steps=run_length_steps,
        newest_intact=None if intact is None else intact.step,
        only_here={step for step, item in newest_of_step.items() if item.name in only_here},
        epoch_ends=_last_of_first_epochs(found),
    )
    decided = []
    for item in found:
        why = kept[item.step] if newest_of_step[item.step] == item or intact is None else ()
        if item == intact and not why:
            why = ("newest intact",)
        decided.append(Fate(found=item, why=why))
    for item in abandoned_checkpoints(rundir):
        passed = intact is not None and item.step <= intact.step
        decided.append(Fate(found=item, why=() if passed else ("abandoned; the run has not passed it",)))
    return sorted(decided, key=lambda fate: fate.found)


def _last_of_first_epochs(found: Sequence[Found]) -> set[int]:
    """Return the steps of the last checkpoints before a dataset's first epoch ended, as their manifests say.

    A manifest has the data's cursor (`about.cursor`) and where the next first epoch ends
    (`about.epoch_end_ahead`). What is too damaged to say so is passed over.
    """
    places = []
    for item in found:
        try:
            about = read_manifest(item.directory).about
        except CheckpointError:
            continue
        places.append((item.step, about.get("cursor"), about.get("epoch_end_ahead")))
    return {
        step
        for (step, _, end), (_, cursor, _) in pairwise(places)
        if isinstance(end, int) and isinstance(cursor, int) and cursor >= end
    }
