"""When a ring attempt looks again for connections, though none has changed."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from bloomery.transport.connection_pool import ConnectionPool, DialTiming, Neighbour, _Want

TURNS = DialTiming(turn_s=100.0, answer_s=10.0, retry_s=30.0)
HOP = Neighbour(peer="b", incarnation="1", addresses=("h:1",), sends=True, ranks=(0,), streams=1)


def refused(*arguments):
    raise OSError("nobody is there")


@pytest.mark.parametrize(
    ("ago_s", "deadline_s", "tries", "after_s"),
    [
        (0.0, 1000.0, {}, 100.0),  # the next way has its turn
        (150.0, 1000.0, {}, 200.0),  # and then the last one
        (250.0, 1000.0, {}, 1000.001),  # all have had theirs: the deadline
        (0.0, 50.0, {}, 50.001),
        (0.0, 1000.0, {"dialled": 30.0}, 30.0),  # a way that failed is tried again
        (50.0, 1000.0, {"dialled": 30.0}, 100.0),  # a moment that has passed is no reason to look
    ],
)
def test_it_looks_again_when_a_way_has_its_turn_and_no_earlier(ago_s, deadline_s, tries, after_s):
    pool = ConnectionPool(dial=refused, relay=refused, is_dialable=True, turns=TURNS)
    with closing(pool):
        began = time.monotonic() - ago_s
        want = _Want(HOP, HOP.places[0], next_try={way: began + s for way, s in tries.items()})
        assert pool._next_moment([want], began, deadline_s) == pytest.approx(began + after_s, abs=1e-6)
