"""Which checkpoints are kept, and why. Arithmetic on steps alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from bloomery.config.keeping import CheckpointSection


def keep(
    steps: Iterable[int],
    *,
    section: CheckpointSection,
    run_length_steps: int | None,
    newest_intact: int | None,
    only_here: Collection[int] = (),
    epoch_ends: Collection[int] = (),
) -> set[int]:
    """Return those of `steps` to keep: all for which there is a reason (see `reasons`)."""
    found = reasons(
        steps,
        section=section,
        run_length_steps=run_length_steps,
        newest_intact=newest_intact,
        only_here=only_here,
        epoch_ends=epoch_ends,
    )
    return {step for step, why in found.items() if why}


def reasons(
    steps: Iterable[int],
    *,
    section: CheckpointSection,
    run_length_steps: int | None,
    newest_intact: int | None,
    only_here: Collection[int] = (),
    epoch_ends: Collection[int] = (),
) -> dict[int, tuple[str, ...]]:
    """Return why each of `steps` is kept; () for one that may go.

    The newest, the multiples, the first of each tenth, the newest intact one, those whose only copy is here
    though they are to be backed up, and `epoch_ends`: the last before a first epoch ended. The first of a
    tenth, not the last: what is kept for it today is kept for it tomorrow. run_length_steps: None where the
    run's end is not known in steps; then there are no tenths. When nothing is known to be intact, everything
    is kept.
    """
    ordered = sorted(set(steps))
    if newest_intact is None:
        return {step: ("nothing is known to be intact",) for step in ordered}
    found: dict[int, list[str]] = {step: [] for step in ordered}
    for step in ordered[-section.keep_last :]:
        found[step].append(f"last {section.keep_last}")
    for step in ordered if section.keep_every_steps else ():
        if step % section.keep_every_steps == 0:
            found[step].append(f"every {section.keep_every_steps}")
    if section.keep_tenths and run_length_steps:
        for tenth, step in _first_of_tenths(ordered, run_length_steps).items():
            found[step].append(f"tenth {tenth}")
    if newest_intact in found:
        found[newest_intact].append("newest intact")
    for step in ordered:
        if step in epoch_ends:
            found[step].append("first epoch's end")
        if step in only_here:
            found[step].append("not backed up")
    return {step: tuple(why) for step, why in found.items()}


def _first_of_tenths(ordered: Sequence[int], run_length_steps: int) -> dict[int, int]:
    first: dict[int, int] = {}
    for step in ordered:
        first.setdefault(_tenth(step, run_length_steps), step)
    return first


def _tenth(step: int, run_length_steps: int) -> int:
    """Return which tenth of the run a step ends in: 1 for steps up to a tenth of it."""
    return -(-step * 10 // run_length_steps)
