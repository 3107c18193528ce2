"""Which checkpoints are kept. Arithmetic on steps alone."""

from __future__ import annotations

from collections.abc import Iterable

from bloomery.config.keeping import CheckpointSection


def keep(
    steps: Iterable[int],
    *,
    section: CheckpointSection,
    run_length_steps: int | None,
    newest_intact: int | None,
) -> set[int]:
    """Return those of `steps` to keep: the newest, the multiples, the first of each tenth, the newest intact.

    The first of a tenth, not the last: what is kept for it today is kept for it tomorrow. run_length_steps:
    None where the run's end is not known in steps; then there are no tenths.
    When nothing is known to be intact, everything is kept.
    """
    ordered = sorted(set(steps))
    if newest_intact is None:
        return set(ordered)
    kept = {*ordered[-section.keep_last :], newest_intact} & set(ordered)
    if section.keep_every_steps:
        kept |= {step for step in ordered if step % section.keep_every_steps == 0}
    if section.keep_tenths and run_length_steps:
        first: dict[int, int] = {}
        for step in ordered:
            first.setdefault(_tenth(step, run_length_steps), step)
        kept |= set(first.values())
    return kept


def _tenth(step: int, run_length_steps: int) -> int:
    """Return which tenth of the run a step ends in: 1 for steps up to a tenth of it."""
    return -(-step * 10 // run_length_steps)
