"""When a ring attempt begins each way of connecting, and when it looks again though none has changed."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from bloomery.transport.connection import Connection, ConnectionPlace
from bloomery.transport.connection_pool import Cancelled, ConnectionPool, DialTiming, Neighbour, _Want

DEADLINE_S = 60.0
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


@pytest.mark.parametrize(
    ("sends", "is_dialable", "last_way", "relays", "starts_s"),
    [
        (True, True, "", True, {"dialled": 0.0, "relayed": 200.0}),  # the sender dials first
        (False, True, "", True, {"dialled": 100.0, "relayed": 200.0}),  # the receiver waits to be dialled
        (False, False, "", True, {"dialled": 0.0, "relayed": 200.0}),  # unless nobody can dial it
        (False, True, "dialled", True, {"dialled": 0.0, "relayed": 200.0}),  # what worked comes first
        (True, True, "accepted", True, {"dialled": 100.0, "relayed": 200.0}),
        (False, False, "accepted", True, {"dialled": 100.0, "relayed": 200.0}),
        (True, True, "relayed", True, {"dialled": 0.0, "relayed": 0.0}),
        (True, True, "relayed", False, {"dialled": 0.0}),  # no peer relays any more
    ],
)
def test_the_way_that_worked_and_the_senders_dialling_begin_at_once(
    sends, is_dialable, last_way, relays, starts_s
):
    hop = replace(HOP, sends=sends)
    assert _starts_s(hop, is_dialable=is_dialable, last_way=last_way, relays=relays) == starts_s


@pytest.mark.parametrize(("is_dialable", "relayed_s"), [(True, 200.0), (False, 0.0)])
def test_a_relay_is_asked_at_once_where_neither_side_can_dial_the_other(is_dialable, relayed_s):
    hop = replace(HOP, addresses=())
    assert _starts_s(hop, is_dialable=is_dialable) == {"relayed": relayed_s}


def test_a_way_that_is_busy_or_has_just_failed_is_not_begun():
    pool = ConnectionPool(dial=refused, relay=refused, is_dialable=True, turns=TURNS)
    with closing(pool):
        want = _Want(HOP, HOP.places[0], next_try={"dialled": 230.0})
        due = {s: pool._ways_due(want, now=s, began=0.0, relays=True) for s in (229.0, 230.0)}
        assert due == {229.0: ["relayed"], 230.0: ["dialled", "relayed"]}
        want.busy.add("relayed")
        assert pool._ways_due(want, now=230.0, began=0.0, relays=True) == ["dialled"]


class LookedAt(threading.Event):
    """An event that is never set; tells that it was looked at."""

    def __init__(self):
        super().__init__()
        self.looks = threading.Event()

    def is_set(self):
        self.looks.set()
        return False


def test_a_connection_that_is_made_while_it_is_waited_for_is_used_at_once():
    """The other peer has dialled, and no way of this one's has its turn before the deadline."""
    pool = ConnectionPool(dial=refused, relay=refused, is_dialable=True, turns=TURNS)
    hop, cancelled, gathered = replace(HOP, addresses=()), LookedAt(), queue.SimpleQueue()
    mine, theirs = socket.socketpair()
    mine.setblocking(False)

    def gather():
        gathered.put(pool.gather([hop], epoch=7, deadline_s=1000.0, cancelled=cancelled))

    with closing(pool), theirs:
        threading.Thread(target=gather, daemon=True).start()
        assert cancelled.looks.wait(DEADLINE_S)  # it holds the lock until it waits
        made = Connection(place=hop.places[0], connection=mine, key=b"k" * 32, way="accepted")
        pool.offer(made)
        place = ConnectionPlace("a", "1", 0, 0, sends=False)
        other = Connection(place=place, connection=theirs, key=b"k" * 32, way="dialled")
        theirs.settimeout(DEADLINE_S)
        assert other.receive_begin() and other.received_epoch == 7
        other.send_begin(7)
        assert gathered.get(timeout=DEADLINE_S) == [made]


def _starts_s(hop, *, is_dialable, last_way="", relays=True):
    """The seconds after which each way is begun."""
    pool = ConnectionPool(dial=refused, relay=refused, is_dialable=is_dialable, turns=TURNS)
    with closing(pool):
        if last_way:
            pool._ways[hop.peer, hop.incarnation] = last_way
        want, starts_s = _Want(hop, hop.places[0]), {}
        for now in (0.0, 99.0, 100.0, 199.0, 200.0):
            for way in pool._ways_due(want, now=now, began=0.0, relays=relays):
                starts_s.setdefault(way, now)
        return starts_s


def test_who_gathers_looks_again_after_a_failure_and_ends_with_its_pool():
    turns = DialTiming(turn_s=1e6, answer_s=1e6, retry_s=1e6)
    looks, gathered = threading.Semaphore(0), queue.SimpleQueue()

    class Counted(threading.Event):
        def is_set(self):
            looks.release()
            return False

    def gather():
        try:
            pool.gather([HOP], epoch=7, deadline_s=1e6, cancelled=Counted())
        except Cancelled as cancelled:
            gathered.put(cancelled)

    pool = ConnectionPool(dial=refused, relay=refused, is_dialable=True, turns=turns)
    threading.Thread(target=gather, daemon=True).start()
    for _ in range(2):  # at first, and after the address has refused
        assert looks.acquire(timeout=DEADLINE_S)
    pool.close()
    assert gathered.get(timeout=DEADLINE_S)


def test_the_room_for_connections_is_that_of_the_largest_ring_so_far():
    pool, ended = (
        ConnectionPool(dial=refused, relay=refused, is_dialable=True, turns=TURNS),
        threading.Event(),
    )
    ended.set()
    with closing(pool):
        for streams, places in ((1, 64), (100, 100), (1, 100)):
            with pytest.raises(Cancelled):
                pool.gather([replace(HOP, streams=streams)], epoch=7, deadline_s=1.0, cancelled=ended)
            assert pool._most_places == places


def test_of_spare_connections_the_older_ones_are_closed_and_the_younger_stay():
    pool = ConnectionPool(dial=refused, relay=refused, is_dialable=True, turns=TURNS)
    with closing(pool), contextlib.ExitStack() as ends:
        links = []
        for since in (1.0, 2.0, 3.0):
            mine, theirs = socket.socketpair()
            ends.enter_context(theirs)
            links.append(
                Connection(place=HOP.places[0], connection=mine, key=b"k" * 32, way="dialled", since=since)
            )
            pool.offer(links[-1])
        with pool._changed:
            pool._take(links[1], 7)
            assert pool._links[HOP.places[0]] == links[1:]


@pytest.mark.parametrize(("way", "left"), [("dialled", {"": 1}), ("relayed", {"b": 1})])
def test_a_try_has_three_turns_and_makes_room_for_others_of_its_way(way, left):
    asked_s = []

    def make(hop, place, epoch, deadline_s):
        asked_s.append(deadline_s)
        raise OSError("nobody is there")

    pool = ConnectionPool(dial=refused, relay=refused, is_dialable=True, turns=TURNS)
    with closing(pool):
        pool._dials.update({"b": 1, "": 1})
        pool._make(_Want(HOP, HOP.places[0]), way, make, 7)
        assert asked_s == [300.0] and dict(pool._dials) == left


def test_a_way_that_made_a_connection_rests_until_the_neighbour_may_have_answered_on_it():
    pool = ConnectionPool(dial=refused, relay=refused, is_dialable=True, turns=TURNS)
    mine, theirs = socket.socketpair()
    with closing(pool), theirs:
        made = Connection(place=HOP.places[0], connection=mine, key=b"k" * 32, way="dialled")
        for make, pause_s in ((lambda *how: made, 10.0), (refused, 30.0)):
            want, began = _Want(HOP, HOP.places[0]), time.monotonic()
            pool._make(want, "dialled", make, 7)
            assert began + pause_s <= want.next_try["dialled"] <= time.monotonic() + pause_s
