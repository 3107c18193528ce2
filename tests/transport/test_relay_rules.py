"""Who waits at a relay, how long, for whom, and who is closed for it; and how a listener treats strangers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.elastic_peers import TOKEN
from tests.protocol import example

from bloomery.transport import listener, relay, state_relay
from bloomery.transport.connection import Contact
from bloomery.transport.handshake import AuthenticatedConnection, OwnIdentity
from bloomery.transport.listener import MemberQuota, StrangerQuota, accept_all
from bloomery.transport.relay import Relay
from bloomery.transport.sockets import RateLimiter, TcpTimeouts, origin_of
from bloomery.transport.state_relay import ReverseDialer, StateRelay, is_begun
from bloomery.transport.trust import PeerRefused

DEADLINE_S = 60.0


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes connections of a member: (what a relay is given, the member's end)."""
    with ExitStack() as stack:

        def make(peer: str, circuit: str = "") -> tuple[AuthenticatedConnection, socket.socket]:
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            theirs.settimeout(DEADLINE_S)
            hello = example.connection_hello(peer=peer, circuit=circuit)
            return AuthenticatedConnection(hello=hello, connection=ours, key=b""), theirs

        yield make


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def is_closed(given: AuthenticatedConnection) -> bool:
    return given.connection.fileno() == -1


def test_the_newest_connection_that_still_waits_is_taken_and_those_that_ended_are_closed(made: Any) -> None:
    waits, (old, _), (silent, _), (spoke, speaker), (ended, ender) = (
        StateRelay(),
        *(made("b") for _ in range(4)),
    )
    for given in (old, silent, spoke, ended):
        waits.wait(given)
    speaker.sendall(b"x")  # before its turn
    ender.close()
    assert waits.take("c", deadline_s=0.0) is None
    assert waits.take("b", deadline_s=0.0) is silent.connection
    assert [is_closed(each) for each in (old, silent, spoke, ended)] == [False, False, True, True]
    assert waits.take("b", deadline_s=0.0) is old.connection
    assert waits.take("b", deadline_s=0.0) is None and waits._waiting == {}


def test_who_waits_for_too_long_or_beyond_its_part_is_closed_and_the_oldest_first(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(state_relay, "time", clock)
    monkeypatch.setattr(state_relay, "OF_SOURCE", 2)
    waits = StateRelay(wait_s=10.0)
    first, second, third = (made("b")[0] for _ in range(3))
    for given in (first, second):
        waits.wait(given)
    clock.now = 110.0  # not late yet
    waits.wait(third)
    assert [is_closed(each) for each in (first, second, third)] == [True, False, False]
    clock.now = 110.1
    late = made("c")[0]
    waits.wait(late)
    assert [is_closed(each) for each in (second, third, late)] == [True, False, False]
    clock.now = 120.2
    assert waits.take("b", deadline_s=0.0) is None and is_closed(third) and is_closed(late)
    assert waits._waiting == {}


def test_a_relay_with_no_room_or_that_has_ended_refuses_by_name(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_relay, "WAITING", 1)
    waits = StateRelay()
    waits.wait(made("b")[0])
    more = made("c")[0]
    waits.wait(more)
    told = "refused a connection from 'c': as many connections wait here as there is room for"
    assert is_closed(more) and caplog.messages == [told]
    waits.close()
    late = made("d")[0]
    waits.wait(late)
    assert is_closed(late) and waits.take("b", deadline_s=1e6) is None, "nobody waits for what cannot come"


def test_a_fetch_that_is_joined_to_nobody_is_closed_and_gives_its_place_back(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    waits = StateRelay(join_s=0.0)
    for circuit, why in (
        ("a/b", "it names no peer, or has as many connections as it may"),
        ("b", "'b' does not wait here, or 'c' sent nothing"),
    ):
        given, theirs = made("c", circuit)
        theirs.sendall(b"x")
        waits.join(given)
        assert is_closed(given) and not waits._fetching and not waits._quota._held
        assert caplog.messages[-1] == f"refused a connection from 'c': {why}"


def test_a_fetch_is_joined_with_the_limits_of_the_relay(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = RateLimiter(1e6)
    waits, joined = StateRelay(idle_s=7.0, rate_limiter=limiter), list[Any]()
    source = made("b")[0]
    given, theirs = made("c", "b")

    def copy(*given: Any, **more: Any) -> None:
        joined.append((given, more, set(waits._fetching), dict(waits._quota._held)))

    monkeypatch.setattr(state_relay, "copy_both_ways", copy)
    waits.wait(source)
    theirs.sendall(b"x")
    waits.join(given)
    ends = (given.connection, source.connection)
    assert joined == [(ends, {"idle_s": 7.0, "rate_limiter": limiter}, {given.connection}, {"c": 1})]
    assert not waits._fetching and not waits._quota._held and not is_begun(given.connection)


def test_reverse_connections_are_kept_where_they_are_wanted_and_ended_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class Keeper:
        def __init__(self, place: Contact, dial: Any, serve: Any) -> None:
            self.place = place
            calls.append(("made", place.peer, dial, serve))

        def run(self) -> None:
            calls.append(("run", self.place.peer))

        def end(self) -> None:
            calls.append(("end", self.place.peer))

    monkeypatch.setattr(state_relay, "_Keeper", Keeper)
    thread = lambda *, target, **more: SimpleNamespace(start=target)  # noqa: E731
    monkeypatch.setattr(state_relay, "threading", SimpleNamespace(Thread=thread))
    r, s, t = (Contact(peer=peer, incarnation="1", addresses=()) for peer in "rst")
    dialer, serve, dial = ReverseDialer(min), max, min
    dialer.keep_at([r], serve)
    dialer.keep_at([r, s], serve)
    dialer.keep_at([t], serve)
    assert calls[:4] == [("made", "r", dial, serve), ("run", "r"), ("made", "s", dial, serve), ("run", "s")]
    assert sorted(calls[4:6]) == [("end", "r"), ("end", "s")]
    assert calls[6:] == [("made", "t", dial, serve), ("run", "t")]
    dialer.close()
    assert calls[8:] == [("end", "t")]


def test_the_ends_of_a_ring_are_joined_by_their_circuit_and_a_late_one_is_closed(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, limiter, joined = Clock(), RateLimiter(1e6), list[Any]()
    monkeypatch.setattr(relay, "time", clock)
    joins = Relay(wait_s=10.0, rate_limiter=limiter)

    def copy(*ends: Any, **more: Any) -> None:
        joined.append((ends, more, dict(joins._open)))

    monkeypatch.setattr(relay, "copy_both_ways", copy)
    late, first, second = made("a", "x")[0], made("a", "y")[0], made("b", "y")[0]
    joins.join(late)
    clock.now = 110.0
    joins.join(first)
    assert not is_closed(late) and joined == []
    clock.now = 110.1
    joins.join(second)
    assert is_closed(late)
    ends = (second.connection, first.connection)
    held = {second.connection: "b", first.connection: "a"}
    assert joined == [(ends, {"rate_limiter": limiter}, held)]
    assert joins._open == {} and joins._waiting == {}


def test_the_ends_of_one_member_at_a_relay_are_counted_joined_or_waiting(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay, "_OF_MEMBER", 2)
    joins = Relay(wait_s=1e6)
    joins._open = {made("a")[1]: "a", made("b")[1]: "b"}
    waiting, other, more = made("a", "x")[0], made("b", "y")[0], made("a", "z")[0]
    for given in (waiting, other, more):
        joins.join(given)
    assert [is_closed(each) for each in (waiting, other, more)] == [False, False, True]
    assert caplog.messages == ["refused a connection from 'a': it is not relayed, for 2 of its ends are here"]
    monkeypatch.setattr(relay, "_MAX_CIRCUITS", 4)  # of which one is joined and two wait
    fourth, last = made("c", "v")[0], made("d", "w")[0]
    for given in (fourth, last):
        joins.join(given)
    assert not is_closed(fourth) and is_closed(last)


def test_a_listener_pauses_after_a_shortage_tells_it_once_a_minute_and_goes_on(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, pauses, taken, closed = Clock(), list[float](), list[Any](), list[Any]()
    monkeypatch.setattr(listener, "time", clock)
    connections = [SimpleNamespace(close=lambda n=n: closed.append(n)) for n in range(4)]
    accepted = iter([
        (connections[0], ("h", 1)), ConnectionAbortedError(), OSError("no descriptor"),
        (connections[1], ("h", 2)), (connections[2], ("h", 3)), (connections[3], ("h", 4)),
    ])  # fmt: skip

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            clock.now += 40.0
            return False

    ended = Ended()

    def accept() -> Any:
        got = next(accepted)
        if isinstance(got, Exception):
            raise got
        return got

    def take(connection: Any, address: str) -> None:
        taken.append((connection, address))
        if connection is connections[3]:
            ended.set()
        if connection is not connections[0]:
            raise RuntimeError("no thread")

    accept_all(SimpleNamespace(accept=accept), take, ended=ended)  # type: ignore[arg-type]
    assert taken == [(connection, "h") for connection in connections]
    assert pauses == [0.5, 0.5, 0.5] and closed == [1, 2, 3]
    assert caplog.messages == [
        f"no connection can be accepted ({why}): trying again every 0.5 s"
        for why in ("no descriptor", "no thread")
    ]


def test_a_stranger_is_prepared_and_judged_by_its_address_and_its_place_is_freed_before_it_is_served(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, served = list[Any](), list[Any]()
    identity, patience = OwnIdentity(run="r", peer="b", incarnation="b1"), TcpTimeouts(idle_s=3)
    hears = listener.Listener(
        (), identity, TOKEN, handlers={"ring": served.append}, patience=patience, deadline_s=4.0
    )
    monkeypatch.setattr(listener, "prepare", lambda *given: calls.append(("prepare", *given)))
    connection = SimpleNamespace(getpeername=lambda: ("127.0.0.1", 5), close=lambda: calls.append("close"))
    place = StrangerQuota(total=9, per_address=9).enter(made("a")[1], "127.0.0.1")

    def authenticate(*given: Any, admit: Any, deadline_s: float) -> Any:
        refusals = [admit(example.connection_hello(purpose=purpose)) for purpose in ("ring", "relay")]
        calls.append((given, refusals, deadline_s, len(place._strangers._handles)))
        return AuthenticatedConnection(
            hello=example.connection_hello(purpose="ring"), connection=connection, key=b""
        )  # type: ignore[arg-type]

    monkeypatch.setattr(listener, "handshake_as_listener", authenticate)
    hears._authenticate(connection, place)  # type: ignore[arg-type]
    refusals = ["", "this peer does not serve 'relay'"]
    assert calls == [
        ("prepare", connection, patience), ((connection, identity, TOKEN), refusals, 4.0, 1),
    ]  # fmt: skip
    assert len(served) == 1 and place._strangers._handles == {}

    def refuse(*given: Any, **more: Any) -> Any:
        raise PeerRefused("another run")

    monkeypatch.setattr(listener, "handshake_as_listener", refuse)
    elsewhere = SimpleNamespace(getpeername=lambda: ("192.0.2.1", 5), close=lambda: calls.append("closed"))
    for stranger in (connection, elsewhere):
        hears._authenticate(stranger, place)  # type: ignore[arg-type]
    assert calls[3] == "close" and calls[-1] == "closed" and hears.refusals.count == 2 and len(served) == 1
    hears.close()


def test_places_of_members_are_free_once_all_that_they_hold_is_gone() -> None:
    quota = MemberQuota(2)
    assert quota.enter("a") and quota.enter("a") and not quota.enter("a")
    quota.leave("a")
    assert quota.enter("a") and not quota.enter("a") and quota._held == {"a": 2}
    for _ in range(3):  # once too often
        quota.leave("a")
    assert quota._held == {} and quota.enter("a") and quota.enter("a") and not quota.enter("a")


def test_the_other_end_of_a_connection_is_told_by_its_address(made: Any) -> None:
    four = SimpleNamespace(getpeername=lambda: ("127.0.0.1", 5))
    six = SimpleNamespace(getpeername=lambda: ("::1", 5, 0, 0))
    assert [origin_of(each) for each in (four, six)] == ["127.0.0.1:5", "[::1]:5"]  # type: ignore[arg-type]
    given, _ = made("a")
    assert origin_of(given.connection) == "an encrypted connection"
    given.connection.close()
    assert origin_of(given.connection) == "an end that has closed"


def test_a_transfer_one_way_is_not_silent_while_its_bytes_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    copying = relay._Copying(5.0, RateLimiter(0.0))
    (source, sender), (sink, receiver) = socket.socketpair(), socket.socketpair()
    with source, sender, sink, receiver:
        sender.sendall(b"bytes")
        sender.close()
        now[0] = 4.0
        copying.copy(source, sink)
        assert receiver.recv(9) == b"bytes"

        def silent(*words: int) -> int:
            now[0] += 2.4
            raise BlockingIOError

        monkeypatch.setattr("os.splice", silent)  # the other direction, which hears nothing
        with pytest.raises(BlockingIOError):
            copying._fill_pipe(sink, 0)
    assert now[0] == pytest.approx(4.0 + 3 * 2.4), "five seconds after the last byte of either"
