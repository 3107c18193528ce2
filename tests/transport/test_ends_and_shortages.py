"""What relays and listeners free when they end, and when a thread or the other end is missing."""

from __future__ import annotations

import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.elastic_peers import TOKEN, until
from tests.protocol import example

from bloomery.state_transfer import averages, client, server
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.transport import listener, relay, state_relay
from bloomery.transport.connection import Contact
from bloomery.transport.handshake import AuthenticatedConnection, OwnIdentity
from bloomery.transport.listener import Listener, StrangerQuota
from bloomery.transport.relay import Relay, copy_both_ways
from bloomery.transport.sockets import RateLimiter, TcpTimeouts, open_listener
from bloomery.transport.state_relay import PAUSE_S, StateRelay, _Keeper

DEADLINE_S = 60.0
PLACE = Contact(peer="r", incarnation="r1", addresses=())
Pair = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:

        def make() -> tuple[socket.socket, socket.socket]:
            ends = socket.socketpair()
            for end in ends:
                stack.enter_context(end)
                end.settimeout(DEADLINE_S)
            return ends

        yield make


def authenticated(connection: socket.socket, **fields: Any) -> AuthenticatedConnection:
    return AuthenticatedConnection(hello=example.connection_hello(**fields), connection=connection, key=b"")


def no_thread(**given: Any) -> Any:
    def start() -> None:
        raise RuntimeError("can't start new thread")

    return SimpleNamespace(start=start)


WITHOUT_THREADS = SimpleNamespace(Thread=no_thread)


def test_a_silent_direction_of_a_relay_is_given_up_by_the_kernel_in_either_way(pair: Pair) -> None:
    (one, here), (other, there) = pair(), pair()
    timeouts: list[tuple[int, ...]] = []

    class Noting(RateLimiter):
        def take(self, count: int) -> None:
            for end in (one, other):
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    timeouts.append(struct.unpack("@ll", end.getsockopt(socket.SOL_SOCKET, option, 16)))

    here.sendall(b"x")
    here.shutdown(socket.SHUT_WR)
    copy_both_ways(one, other, idle_s=7.5, rate_limiter=Noting(1e9))
    assert timeouts == [(7, 500_000)] * 4 and there.recv(9) == b"x"
    assert one.fileno() == other.fileno() == -1


def test_all_bytes_are_forwarded_however_few_the_kernel_takes_and_then_both_ends_are_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    splice = os.splice
    (source, sender), (sink, receiver) = pair(), pair()

    def slow(reads: int, writes: int, count: int) -> int:
        return splice(reads, writes, min(count, 3) if writes == sink.fileno() else count)

    monkeypatch.setattr(os, "splice", slow)
    sender.sendall(b"0123456789")
    sender.shutdown(socket.SHUT_WR)
    relay._Copying(0.0, RateLimiter(0.0)).copy(source, sink)
    assert receiver.recv(99) == b"0123456789" and receiver.recv(1) == b"" and sender.recv(1) == b""


def test_of_a_relay_whose_receiver_has_gone_the_sender_is_told_and_no_pipe_stays(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes: list[str] = []
    make = os.pipe

    def noted() -> tuple[int, int]:
        made = make()
        pipes.append(f"pipe:[{os.fstat(made[0]).st_ino}]")
        return made

    monkeypatch.setattr(os, "pipe", noted)
    (source, sender), (sink, receiver) = pair(), pair()
    sender.sendall(b"bytes")
    receiver.close()
    relay._Copying(0.0, RateLimiter(0.0)).copy(source, sink)
    assert sender.recv(1) == b""
    opened = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert len(pipes) == 1 and not [path for path in opened if os.path.lexists(path) and _leads(path, pipes)]


def _leads(path: Path, pipes: list[str]) -> bool:
    try:
        return str(path.readlink()) in pipes
    except OSError:  # the listing's own descriptor
        return False


def test_a_relay_that_gets_no_thread_closes_both_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay, "threading", WITHOUT_THREADS)
    (one, here), (other, there) = pair(), pair()
    copy_both_ways(one, other)
    assert here.recv(1) == there.recv(1) == b""
    assert caplog.messages == ["a connection is not relayed: can't start new thread"]


def test_a_relay_that_is_closed_ends_who_is_joined_and_who_waits(pair: Pair) -> None:
    joins = Relay(wait_s=1e6)
    (joined, here), (waiting, there) = pair(), pair()
    joins._open[joined] = "a"
    joins.join(authenticated(waiting, peer="b", circuit="x"))
    joins.close()
    assert here.recv(1) == there.recv(1) == b"" and joins._waiting == {}


@pytest.mark.parametrize("comes", ["a connection", "the end"])
def test_who_waits_for_a_source_at_a_relay_is_woken_by_its_connection_and_by_the_end(
    pair: Pair, comes: str
) -> None:
    waits, looked, taken = StateRelay(), threading.Event(), queue.SimpleQueue[Any]()
    newest = waits._newest
    waits._newest = lambda source: (looked.set(), newest(source))[1]  # type: ignore[method-assign]
    threading.Thread(target=lambda: taken.put(waits.take("b", deadline_s=1e6)), daemon=True).start()
    assert looked.wait(DEADLINE_S)  # it holds the lock until it waits
    connection, _ = pair()
    connection.setblocking(False)
    if comes == "a connection":
        waits.wait(authenticated(connection, peer="b"))
    else:
        waits.close()
    assert taken.get(timeout=DEADLINE_S) is (connection if comes == "a connection" else None)


def test_a_relay_of_states_that_is_closed_ends_who_fetches_and_who_waits(pair: Pair) -> None:
    waits = StateRelay()
    (fetching, here), (waiting, there) = pair(), pair()
    waits._fetching.add(fetching)
    waits.wait(authenticated(waiting, peer="b"))
    waits.close()
    assert here.recv(1) == there.recv(1) == b"" and waiting.fileno() == -1


def test_seconds_are_waited_for_as_seconds_at_a_relay_of_states(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float | None] = []
    poll = SimpleNamespace(register=lambda *of: None, poll=lambda ms: timeouts.append(ms) or [])
    monkeypatch.setattr(state_relay, "select", SimpleNamespace(poll=lambda: poll, POLLIN=1))
    assert not StateRelay(join_s=5.0)._has_begun(pair()[0])
    keeper = _Keeper(PLACE, min, max)  # type: ignore[arg-type]
    for seconds in (2.5, None):
        keeper._watch(seconds)
    assert timeouts == [5000.0, 2500.0, None]


def test_reverse_connections_that_wait_are_closed_when_their_peer_waits_no_more(pair: Pair) -> None:
    (waiting, here), (late, there) = pair(), pair()

    def dial(place: Contact) -> socket.socket:
        keeper.end()  # meanwhile
        return late

    keeper = _Keeper(PLACE, dial, min)  # type: ignore[arg-type]
    keeper._waiting[waiting.fileno()] = waiting
    keeper._add()
    assert here.recv(1) == there.recv(1) == b"", "also the one that was being dialled"
    keeper.run()
    assert waiting.fileno() == late.fileno() == -1


@pytest.mark.parametrize("error", [OSError("no descriptor"), RuntimeError("no thread")], ids=["os", "run"])
def test_a_newcomer_for_whom_there_is_no_thread_or_descriptor_is_closed_and_the_next_one_served(
    pair: Pair, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    served: list[str] = []

    def serve(connection: socket.socket, peer: str) -> None:
        served.append(peer)
        if len(served) == 1:
            raise error

    keeper = _Keeper(PLACE, min, serve)  # type: ignore[arg-type]
    keeper._pause_s = 8 * PAUSE_S
    for number in range(2):
        mine, theirs = pair()
        keeper._waiting[mine.fileno()] = mine
        theirs.send(b"G")
        keeper._watch(0.0)
        assert (mine.fileno() == -1) is (number == 0)
    assert caplog.messages == [f"a newcomer at 'r' is not served: {error}"] and served == ["r", "r"]
    assert keeper._pause_s == PAUSE_S


def test_a_peer_waits_at_a_relay_once_there_is_a_thread_for_it(monkeypatch) -> None:
    dialled, told = queue.Queue[Contact](), threading.Event()

    def dial(place: Contact) -> socket.socket:
        dialled.put(place)
        told.wait(DEADLINE_S)
        raise OSError("the end")

    waiting = state_relay.ReverseDialer(dial)
    with monkeypatch.context() as full:
        full.setattr(state_relay.threading, "Thread", no_thread)
        waiting.keep_at([PLACE], lambda connection, address: None)
    waiting.keep_at([PLACE], lambda connection, address: None)
    assert dialled.get(timeout=DEADLINE_S) == PLACE
    waiting.close()
    told.set()


def test_a_listener_that_is_closed_ends_its_threads_and_strangers_and_warns_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="bloomery.transport.listener")
    before = set(threading.enumerate())
    listening = open_listener("127.0.0.1:0")
    hears = Listener(
        [listening],
        OwnIdentity(run="r", peer="b", incarnation="b1"),
        TOKEN,
        handlers={},
        patience=TcpTimeouts(),
    )
    with socket.create_connection(listening.getsockname(), timeout=DEADLINE_S) as stranger:
        until(lambda: hears._strangers._count == 1)
        hears.close()
        assert stranger.recv(1) == b"" and listening.fileno() == -1
    until(
        lambda: (
            not {"listener", "handshake"} & {thread.name for thread in set(threading.enumerate()) - before}
        )
    )
    assert "no connection can be accepted" not in caplog.text


def test_a_stranger_for_whom_there_is_no_thread_keeps_no_place(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears = Listener(
        (), OwnIdentity(run="r", peer="b", incarnation="b1"), TOKEN, handlers={}, patience=TcpTimeouts()
    )
    serves = StateServer("", TOKEN, ServedStates())
    for module in (listener, server):
        monkeypatch.setattr(module, "threading", WITHOUT_THREADS)
    for take, strangers in ((hears._take, hears._strangers), (serves.serve, serves._strangers)):
        with pytest.raises(RuntimeError):
            take(pair()[0], "127.0.0.1")
        assert strangers._handles == {}


def test_who_leaves_or_makes_room_keeps_no_copy_of_its_connection(pair: Pair) -> None:
    strangers = StrangerQuota(total=2, per_address=1)
    places = [strangers.enter(pair()[0], "192.0.2.1") for _ in range(2)]
    for place in places:
        place.leave()
        assert place._handle.fileno() == -1


def test_who_waits_at_a_relay_has_longer_than_who_is_joined_and_that_longer_than_who_joins() -> None:
    waits = StateRelay()
    assert waits._join_s < waits._idle_s < waits._wait_s
    assert (waits._join_s, waits._idle_s, waits._wait_s) == (5.0, 120.0, 600.0)
    assert state_relay.EACH * 4 <= state_relay.OF_SOURCE < state_relay.WAITING
    assert serving_connections_of_a_newcomer() <= state_relay.OF_NEWCOMER < state_relay.JOINED


def serving_connections_of_a_newcomer() -> int:
    """Those for a state, and for an average from as many sources as it may come from."""
    return client.STREAMS + 1 + averages.SOURCES * (averages.STREAMS + 1)
