"""Fetching a state from a peer that only dials and waits at a relay, which joins members and nobody else."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, TOKEN, Authority, connection_manager, contact, raw, until
from tests.diloco.served_states import files_of, make_checkpoint
from tests.transport.test_connection_manager import dialled

from bloomery.state_transfer.client import fetch_state
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import THROUGH_RELAY, PeerSource
from bloomery.transport import connection_manager as managing
from bloomery.transport import state_relay
from bloomery.transport.connection import Contact
from bloomery.transport.sockets import RateLimiter
from bloomery.transport.state_relay import StateRelay
from bloomery.transport.trust import PeerRefused

DIGEST = "ab12"


@pytest.fixture
def opened():
    with ExitStack() as stack:

        def open_manager(*arguments, **options):
            return stack.enter_context(closing(connection_manager(*arguments, **options)))

        yield open_manager


@pytest.fixture
def deadlines(monkeypatch):
    """Chooses the deadlines of relays that are opened from now on."""

    def choose(**chosen):
        monkeypatch.setattr(managing, "StateRelay", lambda **more: StateRelay(**chosen, **more))

    return choose


@pytest.fixture(params=["token", "certificates", "encrypted"])
def trust_of(request, tmp_path):
    if request.param == "token":
        return lambda peer: {"trust": TOKEN}
    authority = Authority(tmp_path / "authority", "run r")
    return lambda peer: {"trust": authority.trust(peer), "encrypt": request.param == "encrypted"}


@pytest.fixture
def served(tmp_path):
    """A server that listens nowhere, and the checkpoint that it serves."""
    with ExitStack() as stack:

        def serve(trust):
            server = stack.enter_context(StateServer("", trust, ServedStates()))
            checkpoint = make_checkpoint(tmp_path / "source", own=1)
            server.offer(checkpoint, round=3, digest=DIGEST)
            return server, checkpoint

        yield serve


def fetched_files(tmp_path, newcomer, trust, *, url=THROUGH_RELAY):
    origin = PeerSource(peer="b", url=url, reach=lambda: newcomer.reach("b"))
    state = fetch_state(lambda: [origin], DIGEST, tmp_path / "here", trust, progress_s=120.0, stall_s=60.0)
    return files_of(state.directory)


def test_a_state_comes_through_a_relay_from_a_peer_that_only_dials(opened, trust_of, served, tmp_path):
    relay = opened("r", **trust_of("r"), is_relay=True)
    relays = lambda: (contact(relay),)  # noqa: E731
    source, newcomer = (opened(name, **trust_of(name), listen=(), relays=relays) for name in "bc")
    server, checkpoint = served(trust_of("b")["trust"])
    source.keep_reverse_connections(source.relays_for("b"), server.serve)
    assert fetched_files(tmp_path, newcomer, trust_of("c")["trust"]) == files_of(checkpoint)


def test_what_a_relay_forwards_is_limited_with_all_else_that_it_forwards(opened, served, tmp_path):
    taken = []

    class Counting(RateLimiter):
        def take(self, count):
            taken.append(count)
            super().take(count)

    limiter = Counting(1e9)
    relay = opened("r", is_relay=True, rate_limiter=limiter)
    source, newcomer = (opened(name, listen=(), relays=lambda: (contact(relay),)) for name in "bc")
    server, checkpoint = served(TOKEN)
    source.keep_reverse_connections(source.relays_for("b"), server.serve)
    files = files_of(checkpoint)
    assert fetched_files(tmp_path, newcomer, TOKEN) == files
    assert sum(taken) > sum(map(len, files.values())) and max(taken) <= limiter.piece_bytes
    before = sum(taken)
    ring = [dialled(opened(name), relay, purpose="relay", circuit="a ring") for name in "de"]
    with closing(ring[0]), closing(ring[1]):
        ring[1].settimeout(DEADLINE_S)
        ring[0].settimeout(DEADLINE_S)
        ring[0].sendall(b"x" * 100_000)
        ring[0].shutdown(socket.SHUT_WR)
        assert len(read_all(ring[1])) == 100_000
    assert sum(taken) == before + 100_000


def read_all(connection):
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_a_relay_that_lost_its_state_fetches_from_who_waits_at_it(opened, served, tmp_path):
    relay = opened("r", is_relay=True, relays=lambda: (contact(relay),))
    source = opened("b", listen=(), relays=lambda: (contact(relay),))
    server, checkpoint = served(TOKEN)
    source.keep_reverse_connections(source.relays_for("b"), server.serve)
    assert fetched_files(tmp_path, relay, TOKEN) == files_of(checkpoint)


def test_where_nobody_relays_a_newcomer_that_listens_is_dialled_by_the_source(opened, served, tmp_path):
    newcomer, source = opened("c"), opened("b", listen=())
    server, checkpoint = served(TOKEN)
    source.keep_reverse_connections((contact(newcomer),), server.serve)
    assert fetched_files(tmp_path, newcomer, TOKEN) == files_of(checkpoint)
    with pytest.raises(PeerRefused, match="no peer relays between this one and 'c'"):
        source.reach("c")


def test_a_source_whose_address_does_not_answer_is_reached_through_a_relay(opened, served, tmp_path):
    relay = opened("r", is_relay=True)
    source, newcomer = (opened(name, listen=(), relays=lambda: (contact(relay),)) for name in "bc")
    server, checkpoint = served(TOKEN)
    source.keep_reverse_connections(source.relays_for("b"), server.serve)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    assert fetched_files(tmp_path, newcomer, TOKEN, url=nowhere) == files_of(checkpoint)


def test_a_loopback_address_of_a_source_elsewhere_is_not_dialled_and_a_relay_reaches_it(
    opened, served, tmp_path
):
    relay = opened("r", is_relay=True)
    source, newcomer = (opened(name, listen=(), relays=lambda: (contact(relay),)) for name in "bc")
    server, checkpoint = served(TOKEN)
    source.keep_reverse_connections(source.relays_for("b"), server.serve)
    with socket.create_server(("127.0.0.1", 0)) as mine:
        url = f"http://127.0.0.1:{mine.getsockname()[1]}"
        elsewhere = replace(TOKEN, dials_loopback=False)
        assert fetched_files(tmp_path, newcomer, elsewhere, url=url) == files_of(checkpoint)
        mine.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            mine.accept()


def waiting(manager, at):
    return dialled(manager, at, purpose="serve")


def fetching(manager, at, of, first=b"x"):
    connection = dialled(manager, at, purpose="fetch", circuit=of)
    connection.settimeout(DEADLINE_S)
    connection.sendall(first)
    return connection


def is_ended(connection, within_s=0.0):
    """Whether the other end has closed it, as it was or with bytes that it had not read."""
    connection.settimeout(within_s)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except ConnectionError:
        return True
    except (TimeoutError, BlockingIOError):
        return False


def ends(connection):
    return is_ended(connection, within_s=DEADLINE_S)


def are_joined(newcomer, source):
    source.settimeout(DEADLINE_S)
    has_come = source.recv(1) == b"x"
    source.sendall(b"back")
    return has_come and newcomer.recv(4) == b"back"


def test_the_newest_waiting_connection_that_lives_is_joined_and_a_peer_has_a_few_at_most(opened):
    relay, source, newcomer = opened("r", is_relay=True), opened("b", listen=()), opened("c", listen=())
    with ExitStack() as stack:
        ends = [stack.enter_context(waiting(source, relay)) for _ in range(12)]
        until(lambda: sum(is_ended(end) for end in ends) == 4)
        alive = [end for end in ends if not is_ended(end)]
        for end in alive[1:]:
            end.close()  # as when the peer was killed, and waits again after its start
        assert are_joined(stack.enter_context(fetching(newcomer, relay, "b")), alive[0])


def test_nobody_waits_for_ever_and_a_silent_newcomer_is_joined_to_nobody(opened, deadlines):
    deadlines(join_s=0.3, wait_s=0.0)
    relay, source, newcomer = opened("r", is_relay=True), opened("b", listen=()), opened("c", listen=())
    with ExitStack() as stack:
        nobody = stack.enter_context(fetching(newcomer, relay, "b"))
        assert ends(nobody)
        mine = stack.enter_context(waiting(source, relay))
        silent = stack.enter_context(dialled(newcomer, relay, purpose="fetch", circuit="b"))
        assert ends(silent) and not is_ended(mine)
        late = stack.enter_context(fetching(newcomer, relay, "b"))  # then the relay looks at who is late
        assert ends(late) and ends(mine)


def test_joined_connections_that_carry_nothing_are_ended(opened, deadlines):
    deadlines(idle_s=0.3)
    relay, source, newcomer = opened("r", is_relay=True), opened("b", listen=()), opened("c", listen=())
    with waiting(source, relay) as mine, fetching(newcomer, relay, "b") as theirs:
        assert are_joined(theirs, mine)
        assert ends(theirs) and ends(mine)


def test_a_newcomer_that_fetches_without_end_leaves_room_for_others(opened, monkeypatch):
    monkeypatch.setattr("bloomery.transport.state_relay.OF_NEWCOMER", 2)
    relay, source = opened("r", is_relay=True), opened("b", listen=())
    hostile, honest = opened("c", listen=()), opened("d", listen=())
    with ExitStack() as stack:
        theirs = [stack.enter_context(waiting(source, relay)) for _ in range(4)]
        held = [stack.enter_context(fetching(hostile, relay, "b")) for _ in range(6)]
        until(lambda: sum(is_ended(end) for end in held) == 4)
        until(lambda: sum(has_byte(end) for end in theirs) == 2)
        free = [end for end in theirs if not has_byte(end)]
        newcomer = stack.enter_context(fetching(honest, relay, "b"))
        until(lambda: any(has_byte(end) for end in free))  # in which order they came to the relay is open
        assert are_joined(newcomer, next(end for end in free if has_byte(end)))


def test_a_newcomer_whose_connections_have_ended_may_make_others(opened, monkeypatch):
    monkeypatch.setattr("bloomery.transport.state_relay.OF_NEWCOMER", 2)
    relay, source, newcomer = opened("r", is_relay=True), opened("b", listen=()), opened("c", listen=())
    for _ in range(4):
        with waiting(source, relay) as mine, fetching(newcomer, relay, "b") as theirs:
            assert are_joined(theirs, mine)
        until(lambda: not relay._state_relay._quota._held)


def has_byte(connection):
    connection.settimeout(0.0)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b"x"
    except BlockingIOError:
        return False


def test_so_many_that_wait_in_all_are_refused_and_who_waited_before_stays(opened, monkeypatch):
    monkeypatch.setattr("bloomery.transport.state_relay.WAITING", 3)
    relay, newcomer = opened("r", is_relay=True), opened("c", listen=())
    with ExitStack() as stack:
        first = stack.enter_context(waiting(opened("b", listen=()), relay))
        others = [stack.enter_context(waiting(opened(f"d{n}", listen=()), relay)) for n in range(4)]
        until(lambda: sum(is_ended(end) for end in others) == 2)
        assert are_joined(stack.enter_context(fetching(newcomer, relay, "b")), first)


@pytest.mark.parametrize("of", ["127.0.0.1:22", "", "nobody", "a/b", "b1"])
def test_a_relay_joins_to_members_that_wait_and_to_nothing_else(opened, deadlines, of):
    deadlines(join_s=0.3)
    relay, source, newcomer = opened("r", is_relay=True), opened("b", listen=()), opened("c", listen=())
    with waiting(source, relay) as mine, fetching(newcomer, relay, of) as theirs:
        assert ends(theirs) and not is_ended(mine)


def test_a_stranger_is_joined_to_nobody_and_closed_at_the_deadline(opened, tmp_path):
    authority, other = Authority(tmp_path / "ours", "run r"), Authority(tmp_path / "theirs", "run r")
    relay = opened("r", authority.trust("r"), is_relay=True, handshake_s=0.5)
    relays = lambda: (contact(relay),)  # noqa: E731
    with raw(relay) as silent:
        assert silent.recv(1) == b""
    stranger = opened("c", other.trust("c"), listen=(), relays=relays)
    with pytest.raises((PeerRefused, OSError)):
        stranger.reach("b")
    until(lambda: relay.refusals.count >= 2)


def test_a_peer_that_does_not_relay_joins_nobody(opened):
    with pytest.raises(PeerRefused, match="does not serve 'fetch'"):
        fetching(opened("c", listen=()), opened("r"), "b")


def test_a_source_waits_again_after_each_newcomer_and_no_more_when_told(opened):
    relay = opened("r", is_relay=True)
    source, newcomer = (opened(name, listen=(), relays=lambda: (contact(relay),)) for name in "bc")
    served = []

    def serve(connection, address):
        served.append(connection)

    before = set(threading.enumerate())
    source.keep_reverse_connections(source.relays_for("b"), serve)
    with ExitStack() as stack:
        for number in range(1, 9):
            stack.enter_context(fetching(newcomer, relay, "b"))
            until(lambda number=number: len(served) == number)
        for connection in served:
            stack.enter_context(connection)
        source.keep_reverse_connections((), serve)
        until(lambda: relay._state_relay.take("b", deadline_s=0.0) is None)
        until(lambda: not {thread.name for thread in set(threading.enumerate()) - before} & {"waiting"})


def test_a_relay_that_ends_ends_who_waits_at_it_and_who_is_joined(opened):
    relay, source, newcomer = opened("r", is_relay=True), opened("b", listen=()), opened("c", listen=())
    with waiting(source, relay) as joined, fetching(newcomer, relay, "b") as theirs:
        assert are_joined(theirs, joined)  # before another waits: a relay joins to the newest
        with waiting(source, relay) as waits:
            until(lambda: relay._state_relay._waiting)
            relay.close()
            assert ends(waits) and ends(joined) and ends(theirs)


def test_a_relay_that_cannot_be_dialled_is_tried_ever_more_rarely_and_at_once_after_it_was_of_use(
    monkeypatch,
):
    now = 100.0
    monkeypatch.setattr(state_relay, "time", SimpleNamespace(monotonic=lambda: now))
    served, errors = [], [OSError("nobody is there"), RuntimeError("can't start new thread")]

    def refuses(place):
        errors.append(errors.pop(0))
        raise errors[-1]

    keeper = state_relay._Keeper(
        Contact(peer="r", incarnation="r1", addresses=()), refuses, lambda *told: served.append(told)
    )
    waits_s = []
    for _ in range(8):
        keeper._add()
        waits_s.append(keeper._next_s - now)
    assert waits_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    mine, theirs = socket.socketpair()
    with mine, theirs:
        keeper._waiting[mine.fileno()] = mine
        theirs.send(b"GET")
        keeper._watch(0.0)
        assert served == [(mine, "r")] and not keeper._waiting
    ended, other = socket.socketpair()
    other.close()
    keeper._waiting[ended.fileno()] = ended
    keeper._watch(0.0)
    assert keeper._next_s - now == 0.5 and ended.fileno() == -1


def test_connections_that_waited_as_long_as_they_may_are_made_anew_without_a_longer_pause(monkeypatch):
    now, ends = 100.0, []
    monkeypatch.setattr(state_relay, "time", SimpleNamespace(monotonic=lambda: now))

    def dial(place):
        mine, theirs = socket.socketpair()
        ends.append(theirs)
        return mine

    keeper = state_relay._Keeper(Contact(peer="r", incarnation="r1", addresses=()), dial, min)
    pauses_s = []
    for waited_s in (600.0, 600.0, 600.0, 1.0, 1.0, 600.0):
        keeper._add()
        keeper._add()
        now += waited_s
        while ends:
            ends.pop().close()
        keeper._watch(0.0)
        pauses_s.append(keeper._next_s - now)
    assert pauses_s == [0.5, 0.5, 0.5, 2.0, 8.0, 0.5] and not keeper._waiting
