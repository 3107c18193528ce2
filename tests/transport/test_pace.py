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
