"""What a hop's pace learns from links that are simulated: each answers a limit with what was seen."""

from __future__ import annotations

import pytest

from bloomery.elastic.wire import Delivered, Pace

MEGABIT = 125_000


def seen(best_mbit, *, lost=0.0, seconds=3.0):
    delivered = int(best_mbit * MEGABIT * seconds)
    return Delivered(
        seconds=seconds,
        delivered_bytes=delivered,
        lost_bytes=int(delivered * lost),
        best_bytes_s=best_mbit * MEGABIT,
    )


def through(link_mbit, pace, *, rounds=1, loses=0.03, stray=0.0):
    """Rounds over a link that loses what is pushed in beyond 95% of its rate. The rates, in Mbit/s."""
    rates = []
    for _ in range(rounds):
        limit = (pace.limit_bytes_s or float("inf")) / MEGABIT
        rates.append(min(limit, link_mbit))
        pace.learn(seen(rates[-1], lost=stray + (loses if limit > 0.95 * link_mbit else 0.0)))
    return rates


def test_a_link_that_loses_nothing_gets_no_limit():
    pace = Pace()

    through(200, pace, rounds=20, loses=0.0)

    assert pace.limit_bytes_s is None


def test_a_link_that_loses_is_kept_slightly_below_its_rate():
    pace = Pace()

    rates = through(200, pace, rounds=60)

    assert min(rates) >= 0.9 * 200
    assert sum(rate > 0.95 * 200 for rate in rates) == 7, "one round in nine looks for a faster link"


def test_a_link_that_became_slower_is_followed():
    pace = Pace()
    through(200, pace, rounds=5)

    rates = through(160, pace, rounds=5)

    assert rates[-1] <= 0.95 * 160


def test_a_limit_learnt_in_a_bad_moment_goes_away():
    pace = Pace()
    through(50, pace, rounds=3)

    rates = through(200, pace, rounds=9)

    assert rates[-1] >= 0.9 * 200


def test_one_bad_moment_takes_no_more_than_a_quarter():
    pace = Pace()
    through(200, pace, rounds=3)

    through(20, pace)

    assert pace.limit_bytes_s == pytest.approx(0.75 * 200 * MEGABIT)


def test_losses_that_a_limit_does_not_cure_do_not_lower_it_again_and_again():
    pace = Pace()

    rates = through(200, pace, rounds=30, stray=0.02)

    assert min(rates) >= 0.9 * 200


def test_what_its_owner_allows_is_never_exceeded():
    pace = Pace(100 * MEGABIT)

    assert max(through(200, pace, rounds=30, stray=0.02)) <= 100
    assert max(through(80, pace, rounds=5)[1:]) <= 0.95 * 80


def test_a_round_too_short_to_show_a_rate_teaches_nothing():
    pace = Pace()

    pace.learn(seen(10, lost=0.2, seconds=0.3))
    pace.learn(Delivered(seconds=3.0, delivered_bytes=0, lost_bytes=0, best_bytes_s=0.0))

    assert pace.limit_bytes_s is None
