"""What a hop's pace learns from links that are simulated: each answers a limit with what was seen."""

from __future__ import annotations

import pytest

from bloomery.transport.connection import DeliveryStatistics, HopRateLimit

MEGABIT = 125_000


def seen(best_mbit, *, lost=0.0, seconds=3.0):
    delivered = int(0.9 * best_mbit * MEGABIT * seconds)  # it takes a while until much is under way
    return DeliveryStatistics(
        seconds=seconds,
        delivered_bytes=delivered,
        lost_bytes=int(delivered * lost),
        best_bytes_s=best_mbit * MEGABIT,
    )


def through(link_mbit, pace, *, rounds=1, loses=0.05, stray=0.0):
    """Rounds over a link that loses what is pushed in beyond 110% of its rate. The limits, in Mbit/s."""
    limits = []
    for _ in range(rounds):
        limits.append((pace.limit_bytes_s or float("inf")) / MEGABIT)
        lost = stray + (loses if limits[-1] > 1.1 * link_mbit else 0.0)
        pace.learn(seen(min(limits[-1], link_mbit), lost=lost))
    return limits


def test_a_link_that_loses_nothing_gets_no_limit():
    pace = HopRateLimit()

    through(200, pace, rounds=20, loses=0.0)

    assert pace.limit_bytes_s is None


def test_a_link_that_loses_gets_a_limit_near_its_rate():
    pace = HopRateLimit()

    limits = through(200, pace, rounds=60)

    assert limits[0] == float("inf")
    assert min(limits[1:]) >= 0.95 * 200 and max(limits[1:]) <= 1.3 * 200
    assert sum(limit > 1.1 * 200 for limit in limits[1:]) <= 25, "it loses too often"


@pytest.mark.parametrize("first", [120, 330])
def test_a_first_round_that_misled_is_made_up_for(first):
    pace = HopRateLimit()
    pace.learn(seen(first, lost=0.05))

    limits = through(200, pace, rounds=10)

    assert 0.95 * 200 <= limits[-1] <= 1.2 * 200


def test_a_link_that_became_slower_is_followed_at_once():
    pace = HopRateLimit()
    through(200, pace, rounds=5)

    limits = through(100, pace, rounds=3)

    assert limits[1] <= 1.15 * 100


def test_a_limit_learnt_in_a_bad_moment_goes_away():
    pace = HopRateLimit()
    through(50, pace, rounds=3)

    limits = through(200, pace, rounds=20)

    assert limits[-1] >= 0.95 * 200


def test_losses_that_no_limit_cures_cost_no_more_than_a_tenth():
    pace = HopRateLimit()

    limits = through(200, pace, rounds=60, stray=0.02)

    assert min(limits) >= 0.85 * 200


def test_what_its_owner_allows_is_never_exceeded():
    pace = HopRateLimit(100 * MEGABIT)

    assert max(through(200, pace, rounds=30, stray=0.02)) <= 100
    assert max(through(80, HopRateLimit(100 * MEGABIT), rounds=9)) <= 100


def test_a_round_too_short_to_show_a_rate_teaches_nothing():
    pace = HopRateLimit()

    pace.learn(seen(10, lost=0.2, seconds=0.3))
    pace.learn(DeliveryStatistics(seconds=3.0, delivered_bytes=0, lost_bytes=0, best_bytes_s=0.0))

    assert pace.limit_bytes_s is None


def round_of(*, best: float, mean: float, lost: float = 0.0) -> DeliveryStatistics:
    return DeliveryStatistics(
        seconds=2.0,
        delivered_bytes=int(2000 * mean),
        lost_bytes=int(2000 * mean * lost),
        best_bytes_s=best * 1e3,
    )


def test_a_limit_goes_down_by_a_small_step_and_up_by_steps_that_grow():
    pace = HopRateLimit()
    pace.learn(round_of(best=100.0, mean=60.0, lost=0.005))
    assert pace.limit_bytes_s is None  # so little may be lost
    limits = []
    for best, lost in (
        (100.0, 0.006),
        (95.0, 0.05),
        (95.0, 0.0),
        (95.0, 0.0),
        (95.0, 0.0),
        (95.0, 0.0),
        (95.0, 0.0),
    ):
        pace.learn(round_of(best=best, mean=60.0, lost=lost))
        limits.append(pace.limit_bytes_s / 1e3)
    down = 0.94 * 110.0
    assert limits[:2] == pytest.approx([110.0, down])
    assert limits[2:6] == pytest.approx([down * 1.03**steps for steps in (1, 2, 3, 4)])
    assert limits[6] == pytest.approx(down * 1.03**4 * 1.06)
    pace.learn(round_of(best=0.79 * limits[6], mean=60.0))
    assert pace.limit_bytes_s / 1e3 == pytest.approx(limits[6])  # it was not tried


def test_a_link_that_lost_at_less_than_four_fifths_of_its_limit_is_learnt_anew():
    pace = HopRateLimit()
    pace.learn(round_of(best=100.0, mean=90.0, lost=0.05))
    pace.learn(round_of(best=89.0, mean=50.0, lost=0.05))
    assert pace.limit_bytes_s / 1e3 == pytest.approx(0.94 * 110.0)
    pace.learn(round_of(best=50.0, mean=40.0, lost=0.05))
    assert pace.limit_bytes_s / 1e3 == pytest.approx(1.1 * 50.0)
    for _ in range(9):  # what it reached before has no part in it
        pace.learn(round_of(best=50.0, mean=40.0, lost=0.05))
    assert pace.limit_bytes_s / 1e3 == pytest.approx(40.0)


def test_half_a_second_shows_a_rate():
    pace = HopRateLimit()
    pace.learn(seen(10, lost=0.2, seconds=0.5))
    assert pace.limit_bytes_s == pytest.approx(11 * MEGABIT)
