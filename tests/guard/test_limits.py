"""Limits and intervals at their bounds, what the settings make of guards, and what is journalled of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.guard.reports import guards_of, judged, noisy, report

from bloomery.config.checkpoint import CheckpointSection, GuardSection
from bloomery.guard.basic_guards import NotFinite, Requests, SaveIntervals, StopLimits
from bloomery.guard.corruption import CLEAN_STEP, SilentCorruption
from bloomery.guard.judge import LADDER, build_guards, described, judge, watching_guards
from bloomery.guard.receipt import (
    Promise,
    RankEvidence,
    broken_promises,
    evidence_from_json,
    promise_from_json,
)
from bloomery.guard.spike import SpikeGuard
from bloomery.guard.trial import after_step, begin_trial
from bloomery.guard.verdict import Anomaly, CarryOn, Rewind, Rung, Save, Stop, Watch


def test_a_run_that_is_beyond_its_last_step_stops_and_one_before_its_minutes_does_not() -> None:
    limits = StopLimits(at_step=7, after_minutes=2.5)
    for step, minutes, kind in ((6, 2.4, CarryOn), (7, 0.0, Stop), (8, 0.0, Stop), (6, 2.5, Stop)):
        history, verdict = limits.judge(None, report(step, minutes_running=minutes))
        assert history is None and type(verdict) is kind
    never = StopLimits(at_step=0, after_minutes=0.0)
    assert type(never.judge(None, report(9, minutes_running=1e9))[1]) is CarryOn


@pytest.mark.parametrize(
    ("step", "consumed", "minutes", "reason"),
    [
        (12, 1150, 9.0, "every 4 steps"),
        (13, 1000, 9.0, "every 500 samples"),
        (13, 1029, 9.0, "every 500 samples"),
        (13, 1030, 9.0, "every 8.5 minutes"),
        (13, 999, 8.5, "every 8.5 minutes"),
        (13, 999, 8.4, None),
    ],
)
def test_each_interval_gives_its_reason_to_save(
    step: int, consumed: int, minutes: float, reason: str | None
) -> None:
    every = SaveIntervals(every_steps=4, every_samples=500, every_minutes=8.5)
    one = report(step, consumed_samples=consumed, global_batch=10, peers=3, minutes_since_save=minutes)
    history, verdict = every.judge(None, one)
    assert history is None, "it remembers nothing"
    assert verdict == (CarryOn(judged_step=step) if reason is None else Save(judged_step=step, reason=reason))


def test_a_stop_that_gives_no_reason_was_asked_for_and_a_request_to_go_back_comes_before_a_save() -> None:
    _, verdict = Requests().judge(None, report(4, stop_requested=True))
    assert verdict == Stop(judged_step=4, reason="asked to stop", failed=False)
    _, verdict = Requests().judge(None, report(4, save_requested=True))
    assert verdict == Save(judged_step=4, reason="asked to save")
    _, verdict = Requests().judge(None, report(4, rewind_requested=(2, 16, 40), save_requested=True))
    assert isinstance(verdict, Rewind) and verdict.rung is Rung.WATCH and "step 2" in verdict.reason
    assert (verdict.to_step, verdict.skip) == (2, range(16, 40))
    assert verdict.latest_step is None and not verdict.may_start_anew and verdict.may_go_on


def test_settings_reach_the_guards_that_they_are_for() -> None:
    section = GuardSection(
        not_finite_losses=4,
        refused_updates=6,
        corruption_steps=50,
        corruption_faults=3,
        forget_rewind_steps=700,
        spike_patience=17,
        stop_at_step=90,
        stop_after_minutes=11.5,
    )
    checkpoint = CheckpointSection(every_steps=5, every_samples=60, every_minutes=7.5)
    guards = build_guards(checkpoint=checkpoint, guard=section)
    assert guards.guards[:2] == (
        NotFinite(losses=4, updates=6),
        SilentCorruption(faults=3, forget_steps=700),
    )
    assert SpikeGuard(patience=17) in guards.guards and guards.ladder.section is section
    assert guards.guards[-2:] == (
        StopLimits(at_step=90, after_minutes=11.5),
        SaveIntervals(every_steps=5, every_samples=60, every_minutes=7.5),
    )
    one_of_both = GuardSection(not_finite_losses=0, refused_updates=6)
    assert NotFinite(losses=0, updates=6) in watching_guards(one_of_both)
    one_of_both = GuardSection(not_finite_losses=4, refused_updates=0)
    assert NotFinite(losses=4, updates=0) in watching_guards(one_of_both)


def test_only_warnings_rewinds_and_failures_are_findings() -> None:
    guards = guards_of(every_steps=2)
    for facts in ({}, {"stop_requested": True}):
        judge(guards, report(2, **facts))
        assert guards.findings == (), "a save, and a stop that was asked for"
    judge(guards, report(3, rewind_requested=(1, 5, 9)))
    ((name, verdict),) = guards.findings
    assert name == "requests" and isinstance(verdict, Rewind)
    fields = described(verdict)
    assert (fields["action"], fields["rung"]) == ("rewind", "watch")
    assert fields["to_step"] == 1 and fields["skip"] == [5, 9] and "kind" not in fields
    judge(guards, report(4, math.nan))
    assert [type(verdict) for _, verdict in guards.findings] == [Watch]
    judge(guards, report(5))
    assert guards.findings == ()


def test_what_is_refused_or_warned_about_is_not_calm() -> None:
    def calm_of(one: Any) -> object:
        guards = guards_of()
        judged(guards, [report(step, loss) for step, loss in enumerate(noisy(20), 1)])
        guards.rewound(guards.state_values(), rung=Rung.SKIP)
        judge(guards, one)
        ladder = guards.state_values()[LADDER]
        assert isinstance(ladder, dict)
        return ladder["calm"]

    assert calm_of(report(21)) == 1
    assert calm_of(report(21, update_applied=False, refused_in_a_row=1)) == 0
    assert calm_of(report(21, math.nan)) == 0


def test_a_checkpoint_without_a_guards_history_leaves_it_as_before_the_first_step() -> None:
    guards = guards_of()
    judged(guards, [report(step, math.nan) for step in (1, 2)])
    stored = guards.state_values()
    guards.load_state_values({name: value for name, value in stored.items() if name != "not_finite"})
    values = guards.state_values()
    assert values["not_finite"] == {"in_a_row": 0, "first": 0, "asked": False}
    assert values["resume_parity"] == stored["resume_parity"]
    guards.load_state_values({})
    assert guards.state_values()[LADDER] == guards_of().state_values()[LADDER]


def test_the_guard_of_corruption_tells_its_numbers_and_checks_that_found_nothing_are_clean() -> None:
    guard = SilentCorruption(faults=3, forget_steps=10)
    history, _ = guard.judge(guard.fresh(), report(1))
    history, _ = guard.judge(history, report(30, corruption_checked=True))
    assert history == {"clean": 29, "named": [], "undecided": []}
    assert guard.judge(history, report(40))[0] == history, "without a check nothing is known of its weights"

    def found(step: int, *ranks: int) -> Any:
        return report(step, corruption_checked=True, corruption="odd bits", corrupt_ranks=ranks)

    history, verdict = guard.judge(history, found(41, 5))
    history, verdict = guard.judge(history, found(42, 5, 6))
    assert isinstance(verdict, Rewind) and verdict.to_step == 29 and not verdict.may_start_anew
    assert verdict.numbers == {"faults of rank 5": 2.0, "faults of rank 6": 1.0, CLEAN_STEP: 29.0}
    assert history["named"] == [[41, 5], [42, 5], [42, 6]] and history["undecided"] == []
    forgotten, verdict = guard.judge(history, found(51, 6))
    assert forgotten["named"] == [[42, 5], [42, 6], [51, 6]], "the first is ten steps ago"
    _, verdict = guard.judge(history, found(50, 5))
    assert isinstance(verdict, Stop) and verdict.failed and "Rank 5 was named 3 times" in verdict.reason
    assert verdict.numbers[CLEAN_STEP] == 29.0 and verdict.numbers["faults of rank 5"] == 3.0
    both = guard.rewound(forgotten, {"clean": 12}, rung=Rung.REPEAT)
    assert both == {**forgotten, "clean": 12}


USUAL = [2.0, 2.02, 1.98, 2.01, 1.99] * 4


def test_a_trial_tells_the_numbers_that_it_is_judged_by() -> None:
    trial = begin_trial(Rung.SLOW, base_step=30, problem_step=40, steps=3, losses_before=[math.nan, *USUAL])
    assert (trial.last_step, trial.limit) == (43, pytest.approx(trial.usual + 3.0 * trial.spread))
    assert trial.usual == pytest.approx(2.0) and 0.0 < trial.spread < 0.03
    end: Any = None
    for step, loss in ((31, 9.0), (40, 9.0), (41, 2.03), (42, 2.0), (43, 1.9)):
        assert trial is not None and end is None
        trial, end = after_step(trial, report(step, loss, update_applied=step != 31))
    assert trial is None and isinstance(end, Watch) and end.judged_step == 43
    assert {name: end.numbers[name] for name in ("rung", "base_step", "steps_beyond", "median")} == {
        "rung": 3.0,
        "base_step": 30.0,
        "steps_beyond": 3.0,
        "median": 2.0,
    }
    assert end.numbers["highest"] == 2.03 and end.numbers["refused_updates"] == 1.0
    assert "lower learning rate was tried on a fork of step 30, until 3 steps beyond" in end.reason


def test_a_trial_whose_median_is_too_high_is_an_anomaly_from_its_beginning_and_is_judged_once() -> None:
    trial = begin_trial(Rung.SKIP, base_step=30, problem_step=40, steps=1, losses_before=USUAL)
    at_most, end = after_step(trial, report(41, trial.limit))
    assert at_most is None and isinstance(end, Watch)
    above, end = after_step(trial, report(41, math.nextafter(trial.limit, 9.0)))
    assert above is not None and above.is_over and isinstance(end, Anomaly)
    assert (end.judged_step, end.first_bad) == (41, 31) and end.reason.endswith("it is discarded")
    assert after_step(above, report(42, 1.0)) == (above, None)
    few = begin_trial(Rung.SKIP, base_step=3, problem_step=5, steps=1, losses_before=USUAL[:15])
    assert (
        few.limit == math.inf
        and begin_trial(Rung.SKIP, base_step=3, problem_step=5, steps=1, losses_before=USUAL[:16]).limit
        < math.inf
    )
    assert not after_step(few, report(6, 7.0))[1].reason.endswith("is taken)")


PROMISED = Promise(first=80, count=6, samples="aa", learning_rate=0.25, settings="ss", optimizer="oo")


def evidence(count: int, **wrong: Any) -> list[RankEvidence]:
    """What `count` ranks say that keep the promise, but for the last, of which `wrong` is true."""
    kept = [RankEvidence(promise=PROMISED, part=rank % 2, given=(80 + rank % 2,)) for rank in range(count)]
    given = {name: wrong.pop(name) for name in ("given", "part") if name in wrong}
    return [*kept[:-1], replace(kept[-1], promise=replace(PROMISED, **wrong), **given)]


SHARES = {0: [80], 1: [81]}


def test_ranks_that_keep_a_promise_break_none_and_a_promise_survives_its_record() -> None:
    ranks = evidence(4)
    assert broken_promises(PROMISED, ranks, shares=SHARES) == []
    assert [evidence_from_json(one.to_json()) for one in ranks] == ranks
    assert promise_from_json(PROMISED.to_json()) == PROMISED and promise_from_json(None) is None
    assert promise_from_json({**PROMISED.to_json(), "more": 1}) == PROMISED
    assert promise_from_json({"first": 80}) is None, "of another version"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"samples": "bb"}, "other samples come next on 1 of 3 ranks (2) (samples bb, promised aa)"),
        ({"first": 81}, "the stream is at another place on 1 of 3 ranks (2) (first 81, promised 80)"),
        ({"optimizer": "pp"}, "the optimizer state is another on 1 of 3 ranks (2)"),
        ({"learning_rate": 0.5}, "the learning rate is 0.5 on 1 of 3 ranks (2), promised 0.25"),
        ({"given": (81,)}, "another rank's samples on 1 of 3 ranks (2)"),
    ],
)
def test_each_broken_promise_names_the_rank_and_both_values(wrong: dict[str, Any], words: str) -> None:
    (broken,) = broken_promises(PROMISED, evidence(3, **wrong), shares=SHARES)
    assert words in broken


def test_changed_settings_or_mixtures_explain_what_follows_from_them_and_no_more() -> None:
    settings = evidence(3, settings="tt", learning_rate=0.5, optimizer="pp")
    assert broken_promises(PROMISED, settings, shares=SHARES) == []
    mixture = evidence(3, samples="bb", first=81)
    (broken,) = broken_promises(PROMISED, mixture, shares={}, other_mixture=True)
    assert "another place" in broken
    unknown = evidence(3, given=())
    assert broken_promises(PROMISED, unknown, shares=SHARES) == []
    assert broken_promises(PROMISED, evidence(3, given=(81,)), shares={}) == []


def test_many_wrong_ranks_are_counted_and_the_first_eight_are_named() -> None:
    wrong = [replace(one, promise=replace(PROMISED, first=9)) for one in evidence(10)]
    (broken,) = broken_promises(PROMISED, [*wrong, *evidence(1)], shares={})
    assert "on 10 of 11 ranks (0, 1, 2, 3, 4, 5, 6, 7, …)" in broken
    (broken,) = broken_promises(PROMISED, [*wrong[:8], *evidence(1)], shares={})
    assert "on 8 of 9 ranks (0, 1, 2, 3, 4, 5, 6, 7)" in broken
    (broken,) = broken_promises(PROMISED, wrong, shares={})
    assert "on all ranks" in broken
    (broken,) = broken_promises(PROMISED, wrong[:1], shares={})
    assert "on its only rank" in broken


@pytest.mark.parametrize(("differs_by", "is_kept"), [(1e-13, True), (-1e-13, True), (1e-9, False)])
def test_the_last_bits_of_a_promised_learning_rate_may_be_those_of_another_library(
    differs_by: float, is_kept: bool
) -> None:
    ranks = evidence(3, learning_rate=0.25 * (1.0 + differs_by))
    assert (broken_promises(PROMISED, ranks, shares=SHARES) == []) is is_kept
