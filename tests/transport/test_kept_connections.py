"""Which of the kept connections an attempt takes, asks for, frees or closes, one decision at a time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, until

from bloomery.errors import PeerError
from bloomery.transport import connection_pool
from bloomery.transport.connection import Connection, ConnectionPlace
from bloomery.transport.connection_pool import (
    Cancelled,
    ConnectionPool,
    DialTiming,
    LinkError,
    Neighbour,
    _unreachable,
    _Want,
)
from bloomery.transport.trust import PeerRefused

TURNS = DialTiming(turn_s=100.0, answer_s=10.0, retry_s=30.0)
HOP = Neighbour(peer="b", incarnation="1", addresses=("h:1",), sends=True, ranks=(0,), streams=1)
PLACE = HOP.places[0]
BACK = ConnectionPlace("b", "1", 0, 0, sends=False)


class Kept:
    """A pool of connections whose other ends are in `others`."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.made: Any = OSError("nobody is there")
        self.pool = ConnectionPool(dial=self.make, relay=self.make, is_dialable=True, turns=TURNS)
        self.others: list[socket.socket] = []

    def make(self, hop: Neighbour, place: ConnectionPlace, epoch: int, deadline_s: float) -> Connection:
        self.begun.append((hop.peer, place, epoch, deadline_s))
        if isinstance(self.made, Exception):
            raise self.made
        return self.made

    def add(self, place: ConnectionPlace = PLACE, **state: Any) -> Connection:
        mine, other = socket.socketpair()
        mine.setblocking(False)
        self.others.append(other)
        link = Connection(place=place, connection=mine, key=b"k" * 32, way="accepted")
        self.pool.offer(link)
        for name, value in state.items():
            setattr(link, name, value)
        return link

    def open(self, *links: Connection) -> list[bool]:
        return [link.connection.fileno() != -1 for link in links]


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.pool.close()
    for other in kept.others:
        other.close()


def test_the_places_of_a_hop_are_those_of_each_rank_and_stream_in_turn() -> None:
    hop = Neighbour(peer="b", incarnation="1", addresses=(), sends=False, ranks=(0, 2), streams=2)
    assert hop.places == tuple(
        ConnectionPlace("b", "1", *at, False) for at in ((0, 0), (0, 1), (2, 0), (2, 1))
    )


def test_a_ring_that_is_over_frees_its_own_connections_and_one_that_failed_closes_all_meant_for_it(
    kept: Kept,
) -> None:
    used = kept.add(sent_epoch=7, received_epoch=7, used=7)
    asked, heard = kept.add(sent_epoch=7), kept.add(received_epoch=7)
    earlier = kept.add(sent_epoch=6, received_epoch=6, used=6)
    later = kept.add(sent_epoch=8, received_epoch=7)
    for link in (used, earlier):
        kept.pool._selector.unregister(link.connection)
    kept.pool.discard(5)
    assert kept.open(used, asked, heard, earlier, later) == [True] * 5
    kept.pool.release(6)
    assert (earlier.used, used.used) == (0, 7)
    assert kept.pool._selector.get_map()[earlier.connection.fileno()].data is earlier, "it is watched again"
    kept.pool.discard(7)
    assert kept.open(used, asked, heard, earlier, later) == [False, False, False, True, True]
    assert kept.pool.size == 2


def test_a_neighbour_that_asks_on_two_connections_for_one_place_does_not_end_who_frees_them(
    kept: Kept,
) -> None:
    links = [kept.add(BACK), kept.add(BACK)]
    for other in kept.others:
        other_end = Connection(place=PLACE, connection=other, key=b"k" * 32, way="dialled")
        other_end.send_begin(7)
    until(lambda: [link.received_epoch for link in links] == [7, 7])
    hop = Neighbour(peer="b", incarnation="1", addresses=(), sends=False, ranks=(0,), streams=1)
    assert kept.pool.gather([hop], epoch=7, deadline_s=10.0, cancelled=threading.Event()) == links[:1]
    kept.pool.release(7)
    watched = kept.pool._selector.get_map()
    assert all(watched[link.connection.fileno()].data is link and not link.used for link in links)


def test_an_agreed_connection_is_taken_and_idle_ones_that_are_older_are_closed(kept: Kept) -> None:
    old, agreed = kept.add(since=1.0), kept.add(since=2.0, sent_epoch=7, received_epoch=7)
    newer, elsewhere = kept.add(since=3.0), kept.add(BACK, since=1.0)
    busy = kept.add(since=1.0, used=6)
    want = _Want(HOP, PLACE)
    kept.pool._advance(want, 7, now=0.0, began=0.0, relays=False)
    assert want.link is agreed and agreed.used == 7
    assert kept.open(old, agreed, newer, elsewhere, busy) == [False, True, True, True, True]
    assert agreed.connection.fileno() not in kept.pool._selector.get_map(), "the ring reads it now"
    assert kept.pool._ways == {("b", "1"): "accepted"}
    assert kept.begun == []


def test_a_sender_asks_for_the_newest_connection_and_for_the_next_once_that_was_silent(kept: Kept) -> None:
    first, second = kept.add(), kept.add()
    want = _Want(HOP, PLACE)
    for now in (0.0, 5.0):
        kept.pool._propose(want, [first, second], 7, now)
        assert (first.sent_epoch, second.sent_epoch) == (0, 7)
    second.sent_at = 100.0
    kept.pool._propose(want, [first, second], 7, 110.0)
    assert kept.open(first, second) == [True, True] and want.why == ""
    kept.pool._propose(want, [first, second], 7, 110.1)
    assert kept.open(first, second) == [True, False]
    assert (first.sent_epoch, want.why) == (7, "a kept connection did not answer")


def test_a_sender_asks_no_connection_that_is_in_use_or_was_asked_for_a_later_attempt(kept: Kept) -> None:
    busy, later = kept.add(used=6, sent_epoch=6), kept.add(sent_epoch=8)
    kept.pool._propose(_Want(HOP, PLACE), [later], 7, 0.0)
    assert (busy.sent_epoch, later.sent_epoch) == (6, 8)


def test_a_connection_that_takes_no_request_is_closed_and_the_next_one_asked(kept: Kept) -> None:
    first, broken = kept.add(), kept.add()
    broken.connection.shutdown(socket.SHUT_RDWR)
    want = _Want(HOP, PLACE)
    with kept.pool._changed:
        kept.pool._propose(want, [first, broken], 7, 0.0)
    assert kept.open(first, broken) == [True, False] and first.sent_epoch == 7


def test_a_receiver_answers_the_request_of_this_attempt_and_dials_only_where_it_has_no_connection(
    kept: Kept,
) -> None:
    hop = Neighbour(peer="b", incarnation="1", addresses=("h:1",), sends=False, ranks=(0,), streams=1)
    want = _Want(hop, BACK)
    other = kept.add(BACK, received_epoch=6)
    kept.pool._advance(want, 7, now=1e9, began=0.0, relays=True)
    assert want.link is None and other.sent_epoch == 0 and not want.busy
    asked = kept.add(BACK, received_epoch=7)
    kept.pool._advance(want, 7, now=1e9, began=0.0, relays=True)
    assert want.link is asked and asked.sent_epoch == 7 and kept.begun == []


def test_a_way_that_failed_is_tried_again_after_a_while_and_its_reason_kept(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "time", SimpleNamespace(monotonic=lambda: 500.0))
    for error, why in (
        (OSError("no route"), "no route"),
        (PeerRefused("another run"), "another run"),
        (PeerError("no address"), "no address"),
        (TimeoutError(), "TimeoutError"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
    ):
        want = _Want(HOP, PLACE, busy={"dialled", "relayed"})
        kept.made = error
        kept.pool._make(want, "dialled", kept.make, 7)
        assert (want.why, want.next_try, want.busy) == (why, {"dialled": 530.0}, {"relayed"})
    assert kept.begun == [("b", PLACE, 7, 300.0)] * 5
    mine, other = socket.socketpair()
    kept.others.append(other)
    kept.made = Connection(place=PLACE, connection=mine, key=b"", way="dialled")
    want = _Want(HOP, PLACE, busy={"dialled"})
    kept.pool._make(want, "dialled", kept.make, 7)
    assert (want.why, want.next_try, want.busy, kept.pool.size) == ("", {"dialled": 510.0}, set(), 1)


def test_of_too_many_idle_connections_of_a_peer_the_oldest_is_closed(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.pool._most_places = 1  # of which a peer may have four times as many
    busy = kept.add(since=0.0, used=3)
    elsewhere = kept.add(ConnectionPlace("c", "1", 0, 0, True), since=0.0)
    links = [
        kept.add(place, since=since)
        for place, since in ((PLACE, 2.0), (BACK, 1.0), (PLACE, 3.0), (PLACE, 4.0))
    ]
    assert all(kept.open(busy, elsewhere, *links))
    more = kept.add(since=5.0)
    assert kept.open(busy, elsewhere, *links, more) == [True, True, True, False, True, True, True]


def test_a_closed_pool_takes_nothing_and_gives_nothing(kept: Kept) -> None:
    link = kept.add(used=3)
    kept.pool.close()
    assert kept.open(link) == [False] and not kept.pool._watcher.is_alive()
    assert kept.others[0].recv(1) == b""
    late = kept.add()
    assert kept.open(late) == [False] and kept.pool.size == 0
    with pytest.raises(Cancelled):
        kept.pool.gather([HOP], epoch=9, deadline_s=60.0, cancelled=threading.Event())


@pytest.mark.parametrize(
    ("addresses", "why", "told"),
    [
        (("h:1", "h:2"), "no route", "(h:1, h:2) could not be made within 8 s: no route."),
        ((), "", "(no address) could not be made within 8 s."),
    ],
)
def test_who_is_out_of_reach_is_told_with_addresses_count_and_reason(
    addresses: tuple[str, ...], why: str, told: str
) -> None:
    hop = Neighbour(peer="b", incarnation="1", addresses=addresses, sends=True, ranks=(0,), streams=2)
    wants = [_Want(hop, place, why=why) for place in hop.places]
    error = _unreachable(wants, 8.0)
    assert isinstance(error, LinkError) and error.peer == "b"
    assert error.message == f"2 connections with 'b' {told}"


def test_a_connection_that_is_closed_has_ended_for_those_who_hold_a_copy_of_it(kept: Kept) -> None:
    link = kept.add(sent_epoch=7)
    with link.connection.dup() as of_a_rank:
        kept.pool.discard(7)
        assert kept.others[0].recv(1) == b"" and of_a_rank.recv(1) == b""


def test_a_peer_may_keep_four_times_as_many_idle_connections_as_the_largest_ring_needed(kept: Kept) -> None:
    kept.pool._most_places = 1
    hop = Neighbour(peer="b", incarnation="1", addresses=(), sends=True, ranks=(0,), streams=2)
    for hops in ([hop], [HOP]):
        with pytest.raises(LinkError):
            kept.pool.gather(hops, epoch=7, deadline_s=-1.0, cancelled=threading.Event())
    links = [kept.add(since=float(number)) for number in range(8)]
    assert all(kept.open(*links))
    kept.add(since=8.0)
    assert kept.open(*links) == [False] + [True] * 7


def test_of_a_connection_that_both_ends_agreed_on_the_rings_bytes_are_left_to_the_ring(kept: Kept) -> None:
    link = kept.add(sent_epoch=7)
    other = Connection(place=BACK, connection=kept.others[0], key=link.key, way="dialled")
    other.send_begin(7)
    other.connection.send(b"of the ring")
    until(lambda: link.received_epoch == 7)
    with kept.pool._changed:
        assert link.connection.fileno() not in kept.pool._selector.get_map()
        assert link.connection.recv(64) == b"of the ring"


def test_a_pool_that_is_closed_keeps_no_descriptor_of_its_own(kept: Kept) -> None:
    kept.pool.close()
    assert kept.pool._wake.fileno() == kept.pool._woken.fileno() == -1
    assert kept.pool._selector.get_map() is None
    kept.pool.close()


def test_a_peer_that_ends_is_told_once_and_not_for_each_of_its_connections(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=connection_pool.__name__)
    links = [kept.add() for _ in range(2)]
    later = kept.add(PLACE._replace(incarnation="2"))
    for other, link in zip(kept.others, (*links, later), strict=True):
        other.close()
        until(lambda link=link: link.connection.fileno() == -1)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["connections to b are closed: closed by the other end"] * 2, "the second life is another"


def test_of_many_missing_connections_few_to_each_neighbour_are_made_at_once_and_then_the_next(
    kept: Kept,
) -> None:
    """A listener ends the oldest of 64 strangers of one address, so more at once would end one another."""
    gate, cancelled, ended = threading.Event(), threading.Event(), list[Exception]()

    def make(hop: Neighbour, *of: Any) -> Connection:
        kept.begun.append(hop.peer)
        gate.wait(DEADLINE_S)
        raise OSError("nobody is there")

    kept.pool._dialling = make
    ranks = tuple(range(25))
    hops = [
        Neighbour(peer=peer, incarnation="1", addresses=("h:1",), sends=True, ranks=ranks, streams=4)
        for peer in "bc"
    ]

    def gather() -> None:
        try:
            kept.pool.gather(hops, epoch=7, deadline_s=DEADLINE_S, cancelled=cancelled)
        except Cancelled as error:
            ended.append(error)

    gathering = threading.Thread(target=gather)
    gathering.start()
    until(lambda: len(kept.begun) == 2 * 48)
    for _ in range(3):
        kept.pool.check_cancelled()  # which looks at all of them again
    assert [kept.begun.count(peer) for peer in "bc"] == [48, 48]
    gate.set()
    until(lambda: len(kept.begun) == 200)
    cancelled.set()
    kept.pool.check_cancelled()
    gathering.join()
    assert len(ended) == 1
    until(lambda: not +kept.pool._dials)
    gate.clear()
    kept.pool._relaying = make
    with kept.pool._changed:
        for hop in hops:
            for place in hop.places:
                kept.pool._begin(_Want(hop, place), "relayed", 8)
    until(lambda: len(kept.begun) == 248)
    assert kept.pool._dials == {"": 48}, "they all go to one relay"
    gate.set()
    until(lambda: not +kept.pool._dials)


def test_a_way_for_which_there_is_no_thread_takes_no_place_from_later_tries(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(**given: Any) -> Any:
        def start() -> None:
            raise RuntimeError("can't start new thread")

        return SimpleNamespace(start=start)

    want = _Want(HOP, PLACE)
    with monkeypatch.context() as full:
        full.setattr(connection_pool, "threading", SimpleNamespace(Thread=no_thread))
        with pytest.raises(RuntimeError, match="start new thread"):
            kept.pool._begin(want, "dialled", 7)
    assert want.busy == set() and not +kept.pool._dials
