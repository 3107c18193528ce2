"""The saves that a plan counts are those that the guard asks for, step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from tests.guard.reports import report
from tests.plan.test_checkpoint_plan import USUAL, planned, stretch

from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.records import Facts
from bloomery.guard.basic_guards import SaveIntervals
from bloomery.guard.verdict import Save
from bloomery.plan.timeline import Stretch

COURSE = (stretch(0, 10, 4, 3.0), stretch(10, 3, 6, 4.0, sample=40), stretch(13, 300, 8, 2.0, sample=58))


def saves_asked_for(section: CheckpointSection, course: tuple[Stretch, ...], *, peers: int) -> int:
    guard = SaveIntervals(
        every_steps=section.every_steps,
        every_samples=section.every_samples,
        every_minutes=section.every_minutes,
    )
    saves = step = consumed = 0
    saved_s = clock_s = 0.0
    for each in course:
        for _ in range(each.steps):
            step, consumed = step + 1, consumed + each.global_batch * peers
            clock_s += each.step.seconds
            told = replace(
                report(step),
                consumed_samples=consumed,
                global_batch=each.global_batch,
                peers=peers,
                facts=Facts(minutes_since_save=(clock_s - saved_s) / 60),
            )
            saved = isinstance(guard.judge(None, told)[1], Save)
            saves, saved_s = saves + saved, clock_s if saved else saved_s
    return saves + (section.at_end and not saved)


@pytest.mark.parametrize("peers", [1, 3])
def test_each_cadence_saves_by_itself_and_any_save_begins_the_minutes_anew(peers: int) -> None:
    mixed = product((0, 1, 7, 20), (0, 9, 130), (0.0, 0.05, 0.5, 1.5), (False, True))
    for steps, samples, minutes, at_end in mixed:
        section = replace(
            USUAL, every_steps=steps, every_samples=samples, every_minutes=minutes, at_end=at_end
        )
        asked = saves_asked_for(section, COURSE, peers=peers)
        assert planned(section, course=COURSE, peers=peers).saves == asked, section


@pytest.mark.parametrize("every_steps", [1, 2, 3])
def test_more_saves_than_are_listed_are_counted(every_steps: int) -> None:
    course = (stretch(0, 30_000, 4, 3.0), stretch(30_000, 600_001, 8, 2.0, sample=120_000))
    plan = planned(replace(USUAL, every_steps=every_steps), course=course)
    assert plan.saves == -(-630_001 // every_steps)
    assert plan.saving_s == plan.saves * plan.blocking_s
