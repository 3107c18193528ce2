"""A loss that climbs slowly after it was level: where the climb begins, and the checkpoint kept of before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.guard.reports import guards_of, report

from bloomery.checkpoint.format.retention import steps_to_keep
from bloomery.config.checkpoint import CheckpointSection, GuardSection
from bloomery.events.records import StepReport
from bloomery.guard.judge import judge
from bloomery.guard.verdict import Rewind

LEVEL_UNTIL = 1500


def climbing(a_step: float) -> Iterator[StepReport]:
    """Yield reports of a loss that is level, as noisy as a run, and then climbs by so much a step."""
    for step in range(1, LEVEL_UNTIL + 2048):
        noise = 0.02 * ((step * 7919 % 13) - 6) / 6
        yield report(step, 2.0 + noise + a_step * max(0, step - LEVEL_UNTIL))


@pytest.mark.parametrize("a_step", [0.0008, 0.0003])
@pytest.mark.parametrize("every_steps", [20, 500])
def test_of_a_slow_climb_the_checkpoint_before_it_is_kept_however_often_the_run_saves(
    a_step: float, every_steps: int
) -> None:
    section, guard = CheckpointSection(every_steps=every_steps, keep_tenths=False), GuardSection()
    guards, kept = guards_of(), set[int]()
    for one in climbing(a_step):
        verdict = judge(guards, one)
        if isinstance(verdict, Rewind):
            break
        if one.step % every_steps == 0:
            kept = steps_to_keep(
                {*kept, one.step},
                section=section,
                run_length_steps=None,
                newest_intact=one.step,
                reach_steps=guard.reach_steps,
                before_climb=guards.step_before_climb(),
            )
            assert len(kept) <= section.keep_last + 2 * len(guard.reach_steps) + 1
    assert isinstance(verdict, Rewind) and verdict.reason.startswith("diverging: the loss climbed from")
    begins = verdict.to_step + guard.spike_rewind_steps
    assert abs(begins - LEVEL_UNTIL) < 200, "of the level loss the lowest block may lie far before the climb"
    back = max(step for step in kept if step <= verdict.to_step)
    assert verdict.to_step - back <= max(guard.reach_steps) + every_steps


def test_while_the_loss_is_level_the_step_to_go_back_to_follows_the_run() -> None:
    guards = guards_of()
    assert guards.step_before_climb() is None
    behind = []
    for one in climbing(0.0):
        judge(guards, one)
        if one.step > 400:
            behind.append(one.step - (guards.step_before_climb() or 0))
    assert max(behind) < 200 and min(behind) >= GuardSection().spike_rewind_steps
    assert guards_of(spike=False).step_before_climb() is None, "nobody watches for a climb"
    guards.load_state_values({"spike": {"level": 7, "blocks": "of another peer"}})
    assert guards.step_before_climb() is None
