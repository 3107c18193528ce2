"""What the guard of spikes remembers and says of single reports, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.guard.reports import BATCH, report

from bloomery.guard.robust_window import WINDOW, RobustWindow
from bloomery.guard.spike import Spike, SpikeGuard, _from_json, _Past, _to_json, _widened
from bloomery.guard.verdict import Anomaly, CarryOn, Rung, Watch

GUARD = SpikeGuard(patience=10)
ABOUT = " 1 0"  # what reports here say of precision, peers and mixture
SPIKE = Spike(
    first_step=101, first_loss=2.5, level=2.0, spread=0.125, peak=3.0, newest=(2.75, 3.0, 2.75), high_steps=9
)
PAST = _Past(step=109, distance=1, batch=BATCH, rate=1e-3, circumstances=ABOUT, spike=SPIKE)


def test_a_spike_that_stayed_high_for_the_patience_is_asked_to_be_undone_from_its_first_step() -> None:
    after, verdict = GUARD.judged(PAST, report(110, 2.875))
    spike = replace(SPIKE, newest=(3.0, 2.75, 2.875), high_steps=10, judged=True)
    assert after == replace(PAST, step=110, spike=spike)
    assert verdict == Anomaly(
        judged_step=110,
        first_bad=101,
        reason="diverging: loss 2.875 is 0.875 above 2.000, 7.0 of its usual spreads of 0.1250, "
        "and has been high for 10 steps since step 101",
        numbers={
            "loss": 2.875, "level": 2.0, "spread": 0.125, "spreads": 7.0, "peak": 3.0,
            "first_step": 101.0, "high_steps": 10.0,
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "loss", "said"),
    [
        ({}, 2.75, "fast spike"),  # a median of two spreads above the first loss
        ({"first_loss": 2.4375}, 2.75, "diverging"),
        ({"newest": ()}, 2.875, "fast spike"),  # one value is no rise
        ({"high_steps": 8}, 2.75, "nothing"),  # nine steps
        ({}, 2.375, "nothing"),  # three spreads above the level is not high
        ({"newest": (2.5, 2.5, 2.5)}, 2.5, "fast spike"),  # half of the way back is not coming back
        ({"newest": (2.5, 2.4375, 2.4375)}, 2.4375, "nothing"),
        ({"newest": (2.5, 2.4375, 2.4375), "high_steps": 28}, 2.4375, "nothing"),
        ({"newest": (2.5, 2.4375, 2.4375), "high_steps": 29}, 2.4375, "fast spike"),
        ({"judged": True}, 2.875, "nothing"),
        ({"judged": True, "high_steps": 498}, 2.875, "nothing"),
        ({"judged": True, "high_steps": 499}, 2.875, "new level"),
        ({"calm": 1}, 2.375, "nothing"),
        ({"calm": 2}, 2.375, "recovered"),
        ({"calm": 2, "judged": True}, 2.375, "recovered"),
    ],
)
def test_a_report_of_a_spike_under_way(changed: dict[str, Any], loss: float, said: str) -> None:
    after, verdict = GUARD.judged(replace(PAST, spike=replace(SPIKE, **changed)), report(110, loss))
    if isinstance(verdict, Anomaly):
        assert verdict.reason.startswith(f"{said}:")
    else:
        assert getattr(verdict, "kind", "nothing") == said
    assert (after.spike is None) is (said in ("recovered", "new level"))
    assert after.spike is None or after.spike.newest[-1] == loss, "it is remembered whatever is said"


def test_a_spike_counts_steps_of_high_reports_and_calm_reports_in_a_row() -> None:
    past = replace(PAST, distance=5, spike=replace(SPIKE, high_steps=1, calm=2))
    high, _ = GUARD.judged(past, report(114, 2.5))
    assert high.spike == replace(SPIKE, newest=(3.0, 2.75, 2.5), high_steps=6, calm=0)
    calm, _ = GUARD.judged(replace(past, spike=replace(SPIKE, high_steps=1, calm=1)), report(114, 2.0))
    assert calm.spike == replace(SPIKE, newest=(3.0, 2.75, 2.0), high_steps=1, calm=2)
    peak, _ = GUARD.judged(replace(past, spike=replace(SPIKE, high_steps=1)), report(114, 9.0))
    assert peak.spike == replace(SPIKE, newest=(3.0, 2.75, 9.0), high_steps=6), "by medians of three"
    peak, _ = GUARD.judged(replace(peak, step=114, distance=5), report(119, 9.0))
    assert peak.spike is not None and peak.spike.peak == 9.0


@pytest.mark.parametrize(
    ("judged", "end"),
    [(True, "it came down after it was judged"), (False, "it recovered by itself: left alone")],
)
def test_the_end_of_a_spike_is_told_with_its_peak_and_length(judged: bool, end: str) -> None:
    past = replace(PAST, spike=replace(SPIKE, calm=2, judged=judged), blocks=((32, 2.0),))
    after, verdict = GUARD.judged(past, report(110, 2.0))
    assert after == replace(past, step=110, spike=None)
    assert isinstance(verdict, Watch) and verdict.judged_step == 110
    assert verdict.reason == f"the spike from step 101 (peak 3.000, 9 steps) is over; {end}"
    assert verdict.numbers["spreads"] == 0.0


def test_a_loss_that_stayed_at_a_new_level_is_judged_by_nothing_of_before() -> None:
    level = RobustWindow(window=(2.0,) * WINDOW, centre=2.0, spread=0.1)
    spike = replace(SPIKE, judged=True, high_steps=499)
    past = replace(PAST, spike=spike, level=level, blocks=((32, 2.0),))
    after, verdict = GUARD.judged(past, report(110, 2.75))
    assert after == replace(past, step=110, spike=None, level=RobustWindow(), blocks=())
    assert isinstance(verdict, Watch)
    assert verdict.reason == "the loss stayed at 2.750 since step 101: judged anew there"


def calm_level(**changed: Any) -> RobustWindow:
    recent, heights = (2.0,) * 4 + (3.5, 3.5), (0.0,) * 4 + (12.0, 12.0)
    level = RobustWindow(window=(2.0,) * WINDOW, recent=recent, heights=heights, centre=2.0, spread=0.125)
    return replace(level, **changed)


def began(level: RobustWindow, loss: float, *, patience: int = 10, distance: int = 1) -> tuple[_Past, Any]:
    past = _Past(
        step=300, distance=distance, batch=BATCH, rate=1e-3, circumstances=ABOUT, excused_until=0, level=level
    )
    return SpikeGuard(patience=patience).judged(past, report(300 + distance, loss))


def test_a_spike_begins_at_its_first_high_loss_whose_losses_leave_the_past() -> None:
    past, verdict = began(calm_level(), 3.75)
    spike = Spike(
        first_step=299,
        first_loss=3.5,
        level=2.0,
        spread=0.125,
        peak=3.5,
        newest=(3.5, 3.5, 3.75),
        high_steps=3,
    )
    assert past.spike == spike and past.level == calm_level(recent=(), heights=())
    assert verdict == Watch(
        judged_step=301,
        kind="fast spike",
        reason="a fast spike begins: loss 3.750 is 1.750 above 2.000, 14.0 of its usual spreads of 0.1250, "
        "and has been high for 3 steps since step 299",
        numbers={
            "loss": 3.75, "level": 2.0, "spread": 0.125, "spreads": 14.0, "peak": 3.5,
            "first_step": 299.0, "high_steps": 3.0,
        },
    )  # fmt: skip
    past, verdict = began(calm_level(), 3.75, patience=3)
    assert isinstance(verdict, Anomaly) and past.spike == replace(spike, judged=True)
    assert verdict.reason.startswith("fast spike: loss 3.750")
    past, _ = began(calm_level(window=(2.0,) * 94 + (1.0,) * 2), 3.75)
    assert past.level.window == (2.0,) * 90 + (1.0,) * 2 + (2.0,) * 4, "calm losses enter, and no more stay"


def test_losses_of_several_steps_each_begin_a_spike_that_many_steps_earlier() -> None:
    past, verdict = began(calm_level(), 3.75, distance=4)
    assert past.spike is not None and (past.spike.first_step, past.spike.high_steps) == (304 - 8, 12)
    assert isinstance(verdict, Anomaly) and verdict.first_bad == 296
    level = calm_level(recent=(2.0,) * 6, heights=(0.0,) * 6)
    # One mean of ten steps that is far out is told; only one that is extreme is to be undone at once.
    assert isinstance(began(level, 5.0, distance=10)[1], Watch)
    assert isinstance(began(level, 2.0 + 60.5 / 8, distance=10)[1], Anomaly)
    assert isinstance(began(level, 4.5, distance=4)[1], CarryOn), "one of four steps is not enough"
    past, _ = began(replace(level, recent=(), heights=()), 5.0, distance=10)
    assert past.spike is not None and past.spike.first_loss == 5.0


BLOCKS = ((132, 2.0), (164, 2.0), (196, 2.0))


def climbed(
    newest: float, *, spread: float = 0.015625, distance: int = 1, step: int = 228, **changed: Any
) -> tuple[_Past, Any]:
    past = _Past(step=196, distance=distance, batch=BATCH, rate=1e-3, blocks=BLOCKS)
    level = RobustWindow(window=(9.0,) * 64 + (newest,) * 32, centre=2.0, spread=spread)
    return GUARD.after_block(replace(past, **changed), level, step=step, rate=2e-3, batch=7)


@pytest.mark.parametrize(
    ("newest", "spread", "said"),
    [
        (2.1875, 0.015625, "slow spike"),  # six spreads: 0.09375 by means of two neighbours
        (2.18, 0.015625, "nothing"),
        (2.375, 0.015625, "diverging"),  # twelve
        (2.37, 0.015625, "slow spike"),
        (2.085, 0.0001, "slow spike"),  # a fiftieth of the loss
        (2.075, 0.0001, "nothing"),
        (2.205, 0.0001, "diverging"),  # a twentieth
        (2.195, 0.0001, "slow spike"),
    ],
)
def test_blocks_whose_median_rises_slowly(newest: float, spread: float, said: str) -> None:
    past, verdict = climbed(newest, spread=spread)
    if said == "diverging":
        assert isinstance(verdict, Anomaly) and verdict.first_bad == 197
        assert past.blocks == () and not past.climbs
    else:
        assert getattr(verdict, "kind", "nothing") == said
        assert past.blocks == (*BLOCKS, (228, newest)) and past.climbs is (said == "slow spike")
    assert (past.rate, past.batch, past.step) == (2e-3, 7, 228)


def test_a_slow_rise_is_told_from_its_lowest_blocks_with_its_spreads() -> None:
    past, verdict = climbed(2.25)
    assert verdict == Watch(
        judged_step=228,
        kind="slow spike",
        reason="a slow spike: the loss climbed from 2.000 at step 196 to 2.125, 8.0 spreads of 0.0156",
        numbers={"level": 2.0, "loss": 2.125, "spread": 0.015625, "since_step": 196.0},
    )
    assert past.climbs
    assert climbed(2.25, climbs=True)[1] == CarryOn(judged_step=228), "it was told"
    (_, anomaly) = climbed(2.5, climbs=True)
    assert isinstance(anomaly, Anomaly) and anomaly.numbers == {
        "level": 2.0, "loss": 2.25, "spread": 0.015625, "since_step": 196.0,
    }  # fmt: skip
    assert (
        anomaly.reason
        == "diverging: the loss climbed from 2.000 at step 196 to 2.250, 16.0 spreads of 0.0156"
    )


def test_a_rise_that_went_down_by_half_may_be_told_again() -> None:
    assert not climbed(2.09375, climbs=True)[0].climbs, "three spreads"
    assert climbed(2.11, climbs=True)[0].climbs


def test_blocks_soon_after_a_known_change_and_fewer_than_four_are_not_compared() -> None:
    past, verdict = climbed(3.0, blocks=BLOCKS[1:])
    assert isinstance(verdict, CarryOn) and len(past.blocks) == 3
    for distance in (0, 1, 2):
        until = 228 - 32 * max(distance, 1)
        past, verdict = climbed(3.0, distance=distance, excused_until=until)
        assert isinstance(verdict, CarryOn) and past.blocks == () and past.batch == 7
        assert isinstance(climbed(3.0, distance=distance, excused_until=until - 1)[1], Anomaly)
    assert climbed(3.0, excused_until=228)[0].batch == BATCH, "the batch of before the change"
    many = tuple((at, 2.0) for at in range(64))
    assert climbed(2.0, blocks=many)[0].blocks == (*many[1:], (228, 2.0))


@pytest.mark.parametrize(
    ("changed", "step", "rate", "plain"),
    [
        ({}, 301, 1e-3, True),
        ({}, 301, 1.25e-3, True),
        ({}, 301, 1.26e-3, False),
        ({}, 302, 1e-3, False),
        ({"distance": 2}, 302, 1e-3, True),
        ({"spike": SPIKE}, 301, 1e-3, False),
        ({"rate": 0.0}, 301, 0.0, False),
        ({"excused_until": 300}, 301, 1e-3, True),
        ({"excused_until": 301}, 301, 1e-3, False),
        ({"step": 199}, 200, 1e-3, False),
        ({"step": 200}, 201, 1e-3, True),
    ],
)
def test_a_report_is_plain_that_continues_a_calm_and_settled_run(
    changed: dict[str, Any], step: int, rate: float, plain: bool
) -> None:
    past = replace(_Past(step=300, distance=1, rate=1e-3), **changed)
    assert GUARD.is_plain(past, step=step, rate=rate) is plain


def test_the_spread_is_wider_at_the_start_after_a_change_and_for_smaller_batches() -> None:
    past = _Past(batch=40, excused_until=500)
    assert _widened(past, report(501, global_batch=10)) == 2.0
    assert _widened(past, report(500, global_batch=10)) == 6.0
    assert _widened(past, report(501, global_batch=90)) == 1.0
    assert _widened(past, report(501, global_batch=0)) == 1.0
    assert _widened(_Past(batch=40), report(200, global_batch=40)) == 3.0
    assert _widened(_Past(batch=40), report(201, global_batch=40)) == 1.0


@pytest.mark.parametrize(
    ("changed", "reported", "after"),
    [
        ({}, {}, {}),
        ({}, {"global_batch": BATCH // 2}, {"excused_until": 402, "blocks": ()}),
        ({}, {"global_batch": BATCH * 2}, {}),
        ({"excused_until": 302}, {"global_batch": BATCH // 2}, {"excused_until": 302}),
        ({}, {"precision": "fp8"}, {"excused_until": 402, "blocks": (), "circumstances": "fp8 1 0"}),
        ({}, {"peers": 2}, {"excused_until": 402, "blocks": (), "circumstances": " 2 0"}),
        ({}, {"mixture": 3}, {"excused_until": 402, "blocks": (), "circumstances": " 1 3"}),
        ({"circumstances": ""}, {}, {}),
        ({}, {"learning_rate": 1.25e-3}, {}),
        ({}, {"learning_rate": 1.26e-3}, {"excused_until": 402, "blocks": (), "rate": 1.26e-3}),
        ({"batch": 0}, {}, {"batch": BATCH}),
        ({"rate": 0.0}, {"learning_rate": 5e-3}, {"rate": 5e-3}),
    ],
)
def test_known_changes_excuse_a_hundred_reports(
    changed: dict[str, Any], reported: dict[str, Any], after: dict[str, Any]
) -> None:
    past = replace(
        _Past(step=300, distance=2, batch=BATCH, rate=1e-3, circumstances=ABOUT, blocks=BLOCKS), **changed
    )
    found, _ = GUARD.judged(past, report(302, float("nan"), **reported))
    until = {"excused_until": 302 + 200} if after.get("excused_until") == 402 else {}
    assert found == replace(past, **{"step": 302, "circumstances": ABOUT, **after, **until})


@pytest.mark.parametrize(("step", "until"), [(301, 401), (5000, 5100)])
def test_a_change_is_excused_for_a_hundred_steps_where_reports_follow_or_their_distance_is_unknown(
    step: int, until: int
) -> None:
    past = _Past(step=300, distance=1, batch=BATCH, rate=1e-3, circumstances=ABOUT)
    assert GUARD.judged(past, report(step, 2.0, precision="fp8"))[0].excused_until == until


def test_the_first_report_of_a_run_has_no_distance_from_another() -> None:
    assert GUARD.judged(_Past(), report(5, 2.0))[0].distance == 0


@pytest.mark.parametrize(
    ("distance", "step", "after"),
    [
        (0, 1300, 1000),  # a distance that is not known yet
        (0, 1301, None),
        (2, 340, 2),
        (2, 341, None),
        (5, 303, 3),  # it is the shortest that was seen
    ],
)
def test_the_distance_of_reports_is_the_shortest_and_a_gap_begins_the_past_anew(
    distance: int, step: int, after: int | None
) -> None:
    level = calm_level()
    past = _Past(step=300, distance=distance, climbs=True, level=level, blocks=BLOCKS, spike=SPIKE)
    found, _ = GUARD.judged(past, report(step, float("nan")))
    if after is None:
        fresh = (0, RobustWindow(), (), None, False)
        assert (found.distance, found.level, found.blocks, found.spike, found.climbs) == fresh
    else:
        kept = (after, level, BLOCKS, SPIKE, True)
        assert (found.distance, found.level, found.blocks, found.spike, found.climbs) == kept


def test_what_is_made_again_forgets_its_spike_and_the_blocks_from_there_on() -> None:
    level = calm_level()
    past = _Past(step=300, distance=2, level=level, blocks=((100, 2.0), (240, 2.1), (290, 2.2)), spike=SPIKE)
    near, _ = GUARD.judged(past, report(240, float("nan")))
    assert near.spike is None and near.level == replace(level, recent=(), heights=())
    assert near.blocks == ((100, 2.0),) and near.distance == 2
    assert GUARD.judged(past, report(237, float("nan")))[0].level != RobustWindow()
    far, _ = GUARD.judged(past, report(236, float("nan")))
    assert far.level == RobustWindow(), "32 reports back"
    same, _ = GUARD.judged(past, report(300, float("nan")))
    assert same.spike is None and same.distance == 2


def test_a_history_holds_all_of_a_past_and_reads_it_back() -> None:
    past = replace(
        PAST, excused_until=7, climbs=True, level=calm_level(), blocks=BLOCKS, spike=replace(SPIKE, calm=2)
    )
    stored = json.loads(json.dumps(_to_json(past)))
    assert stored["blocks"] == [[132, 2.0], [164, 2.0], [196, 2.0]]
    assert _from_json(stored) == past
    assert _from_json(_to_json(replace(past, spike=None))) == replace(past, spike=None)
    assert _from_json(None) == _from_json({"losses": []}) == _Past() == GUARD.begin()
    judged = replace(past, spike=replace(SPIKE, judged=True))
    assert _from_json(GUARD.resumed(_to_json(judged))) == replace(past, spike=SPIKE)
    assert GUARD.resumed(GUARD.fresh()) == GUARD.fresh()


def test_a_rewind_goes_on_with_the_history_of_the_checkpoint_and_nothing_under_way() -> None:
    restored = replace(PAST, climbs=True, blocks=BLOCKS, level=calm_level())
    before = replace(PAST, step=400, blocks=())
    found = GUARD.rewound(_to_json(before), _to_json(restored), rung=Rung.SKIP)
    assert _from_json(found) == replace(restored, spike=None, climbs=False)


def test_a_mean_that_is_far_out_by_its_spread_and_near_by_its_loss_is_no_spike() -> None:
    level = calm_level(recent=(2.0,) * 6, heights=(0.0,) * 6, spread=0.00390625)
    assert isinstance(began(level, 2.09375, distance=10)[1], CarryOn), "24 spreads, and 4.7% of the loss"
    assert isinstance(began(level, 2.125, distance=10)[1], Watch)


def test_the_newest_three_of_four_high_losses_are_kept() -> None:
    level = calm_level(recent=(2.0, 2.0, 3.0, 3.5, 4.0), heights=(0.0, 0.0, 4.0, 12.0, 16.0))
    past, _ = began(level, 3.75)
    assert past.spike is not None and past.spike.newest == (3.5, 4.0, 3.75)
    assert (past.spike.peak, past.spike.first_loss, past.spike.high_steps) == (3.75, 3.0, 4)
    past, _ = began(replace(level, heights=(0.0, 0.0, 3.0, 12.0, 16.0)), 3.75)
    assert past.spike is not None
    assert (past.spike.first_step, past.spike.first_loss, past.spike.high_steps) == (299, 3.5, 3)


def test_a_spike_begins_at_the_first_step_at_the_earliest() -> None:
    level = calm_level(recent=(2.0, 3.5, 3.5, 3.5), heights=(0.0, 12.0, 12.0, 12.0))
    past = _Past(step=20, distance=10, batch=BATCH, rate=1e-3, circumstances=ABOUT, level=level)
    after, _ = GUARD.judged(past, report(30, 9.0))
    assert after.spike is not None and after.spike.first_step == 1


def test_a_spike_is_measured_from_where_a_trend_had_come_to_when_it_began() -> None:
    past, _ = began(calm_level(slope=-0.0009765625), 3.75)
    assert past.spike is not None
    assert past.spike.level == pytest.approx(2.0 - 0.8 * 0.0009765625 * (24 + 4 + 1)), (
        "after four calm losses"
    )


def test_losses_that_do_not_scatter_have_a_spread_of_a_thousandth() -> None:
    level = RobustWindow(window=(2.0,) * 40, recent=(2.0,) * 9, heights=(0.0,) * 9, centre=2.0, spread=0.125)
    past = _Past(step=300, distance=1, batch=BATCH, rate=1e-3, circumstances=ABOUT, level=level)
    after, _ = GUARD.judged(past, report(301, 2.0))
    assert after.level.spread == pytest.approx(0.002 * (1.0 + 4.0 / 41))


@pytest.mark.parametrize(("step", "is_judged"), [(20, False), (21, True)])
def test_the_first_twenty_steps_are_not_judged(step: int, is_judged: bool) -> None:
    level = calm_level(spread=0.03125)  # three times as wide in the first steps
    past = _Past(step=step - 1, distance=1, batch=BATCH, rate=1e-3, circumstances=ABOUT, level=level)
    after, _ = GUARD.judged(past, report(step, 3.75))
    assert (after.spike is not None) is is_judged


def test_between_reports_of_unknown_distance_lies_one_step() -> None:
    after, _ = GUARD.judged(replace(PAST, distance=0, spike=replace(SPIKE, high_steps=3)), report(110, 2.75))
    assert after.spike is not None and after.spike.high_steps == 4 and after.distance == 1
    _, new = GUARD.judged(replace(PAST, spike=replace(SPIKE, judged=True, high_steps=499)), report(110, 2.75))
    assert new.numbers["loss"] == 2.75 and new.numbers["high_steps"] == 500.0
    assert not climbed(2.5, climbs=True)[0].climbs


@pytest.mark.parametrize(("step", "is_near"), [(269, True), (268, False)])
def test_what_is_made_again_counts_as_near_by_single_steps_where_no_distance_is_known(
    step: int, is_near: bool
) -> None:
    past = _Past(step=300, distance=0, level=calm_level())
    found, _ = GUARD.judged(past, report(step, float("nan")))
    assert (found.level != RobustWindow()) is is_near
