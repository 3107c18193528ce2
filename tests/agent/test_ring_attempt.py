"""What a peer asks of its neighbours in a ring, and what its ranks are given."""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.agent.test_round_driver import Links
from tests.coordination.test_gathering import listed
from tests.protocol import example

from bloomery.agent.rank_server import RankServer
from bloomery.agent.ring_attempt import AttemptStage, AttemptTimeouts, RingAttempt
from bloomery.agent.round_driver import RoundDriver
from bloomery.agent.state_serving import _beside, following
from bloomery.agent.state_sync import KeptAverages, missed_rounds
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.diloco.agent_client import AgentClient
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import Reduce
from bloomery.transport.connection_pool import Cancelled, LinkError, Neighbour

DEADLINE_S = 60.0
ATTEMPT = example.attempt(round=3, epoch=8, members=("c", "a", "d", "b"), weights=(0.25,) * 4)


class Gathered(Links):
    """A pool that has every connection at once: its descriptor and key tell which one it is."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.asked: dict[str, Any] = {}
        self.error = error

    def gather(self, hops: Any, **more: Any) -> Any:
        self.asked = {"hops": hops, **more}
        if self.error is not None:
            raise self.error
        return [self.link(hop, place) for hop in hops for place in hop.places]

    @staticmethod
    def link(hop: Neighbour, place: Any) -> Any:
        number = 100 * hop.sends + 10 * place.rank + place.stream
        connection = SimpleNamespace(fileno=lambda: number)
        return SimpleNamespace(place=place, connection=connection, key=bytes([number]) * 32)


class Late(Gathered):
    """A pool that has every connection at the moment at which the attempt is ended."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ended = threading.Event()

    def check_cancelled(self) -> None:
        self.is_ended.set()

    def gather(self, hops: Any, **more: Any) -> Any:
        assert self.is_ended.wait(DEADLINE_S)
        return super().gather(hops, **more)


Sent = list[tuple[int, Reduce]]


def attempt_of(me: str, links: Links, *, relays: str = "") -> tuple[RingAttempt, Sent]:
    """The attempt of a peer of two ranks with three streams, once it has told its ranks or failed."""
    attempt, sent, woken = begun(me, links, relays=relays)
    woken.get(timeout=DEADLINE_S)
    return attempt, sent


def begun(me: str, links: Links, *, relays: str = "") -> tuple[RingAttempt, Sent, queue.SimpleQueue[None]]:
    sent: Sent = []
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    members = {
        name: example.member(
            peer=name, incarnation=f"{name}1", addresses=(f"{name}:1",), relays=name == relays
        )
        for name in ATTEMPT.members
    }
    attempt = RingAttempt(
        ATTEMPT,
        me=me,
        members=members,
        ranks=2,
        streams=3,
        links=links,  # type: ignore[arg-type]
        timeouts=AttemptTimeouts(connect_s=4.0, stall_s=5.0, ring_s=6.0),
        norm_limit=7.0,
        send=lambda rank, reduce: sent.append((rank, reduce)),
        wake=lambda: woken.put(None),
    )
    return attempt, sent, woken


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_attempt_for_which_no_thread_is_left_fails_and_ends_nobody(monkeypatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    attempt, sent = attempt_of("a", Gathered())
    assert attempt.failure is not None and attempt.failure.kind == "unreachable"
    assert "can't start new thread" in attempt.failure.why and not sent


@pytest.mark.parametrize(
    ("me", "following", "preceding"), [("c", "a", "b"), ("a", "d", "c"), ("d", "b", "a"), ("b", "c", "d")]
)
def test_a_peer_sends_to_the_one_after_it_in_the_ring_and_receives_from_the_one_before(
    me: str, following: str, preceding: str
) -> None:
    links = Gathered()
    attempt_of(me, links)
    sending, receiving = links.asked["hops"]
    assert (sending.peer, sending.incarnation, sending.addresses) == (
        following,
        f"{following}1",
        (f"{following}:1",),
    )
    assert (receiving.peer, receiving.sends, sending.sends) == (preceding, False, True)
    assert sending.ranks == receiving.ranks == (0, 1) and sending.streams == receiving.streams == 3
    assert (links.asked["epoch"], links.asked["deadline_s"], links.asked["relays"]) == (8, 4.0, False)


def test_a_relay_is_asked_where_any_member_relays() -> None:
    links = Gathered()
    attempt_of("a", links, relays="b")
    assert links.asked["relays"] is True


def test_each_rank_is_given_its_own_connections_with_their_keys_and_the_limits_of_the_attempt() -> None:
    attempt, sent = attempt_of("d", Gathered())
    assert [rank for rank, _ in sent] == [0, 1] and attempt.stage is AttemptStage.REDUCING
    assert attempt.reducing_s > attempt.began_s
    for rank, reduce in sent:
        (hop,) = reduce.hops
        assert hop.rank == rank and reduce.attempt == ATTEMPT and reduce.index == 2
        assert (reduce.stall_s, reduce.deadline_s, reduce.norm_limit) == (5.0, 6.0, 7.0)
        out, back = (
            [100 + 10 * rank + stream for stream in range(3)],
            [10 * rank + stream for stream in range(3)],
        )
        assert (hop.next_fds, hop.previous_fds) == (tuple(out), tuple(back))
        assert hop.send_keys == tuple(bytes([number]) * 32 for number in out)
        assert hop.receive_keys == tuple(bytes([number]) * 32 for number in back)


@pytest.mark.parametrize(
    ("error", "culprit"),
    [
        (LinkError("b", "out of reach", remedy=""), "b"),
        (PeerError("x"), None),
        (RuntimeError("no thread"), None),
        (OSError(24, "Too many open files"), None),
    ],
)
def test_an_attempt_whose_connections_do_not_come_names_the_neighbour_if_it_is_known(error, culprit) -> None:
    attempt, sent = attempt_of("a", Gathered(error))
    assert attempt.failure is not None and not sent
    assert (attempt.failure.kind, attempt.failure.culprit) == ("unreachable", culprit)


def test_an_attempt_whose_connections_were_given_up_with_it_has_not_failed() -> None:
    attempt, sent, woken = begun("a", Gathered(Cancelled()))
    for thread in threading.enumerate():
        if thread.name == "connect":
            thread.join(DEADLINE_S)
    assert attempt.failure is None and sent == [] and woken.empty()


def test_an_attempt_that_is_over_stays_so_however_it_ends_again() -> None:
    links = Gathered()
    attempt, _ = attempt_of("a", links)
    attempt.end(went_well=True)
    attempt.end(went_well=False)
    assert (links.released, links.discarded) == ([8], [])


def test_connections_that_come_once_an_attempt_is_over_are_given_to_no_rank() -> None:
    before, links = set(threading.enumerate()), Late()
    attempt, sent, _ = begun("a", links)
    connecting = [one for one in set(threading.enumerate()) - before if one.name == "connect"]
    attempt.end(went_well=False)
    for thread in connecting:
        thread.join(DEADLINE_S)
    assert len(connecting) == 1 and not connecting[0].is_alive()
    assert attempt.stage is AttemptStage.OVER and not sent
    assert links.asked["cancelled"].is_set(), "the pool would go on to gather"


@pytest.mark.parametrize(("culprit", "name"), [("next", "d"), ("previous", "c"), ("b", "b"), (None, None)])
def test_the_neighbour_that_a_rank_blames_is_called_by_its_name(culprit, name) -> None:
    driver = object.__new__(RoundDriver)
    driver._context = SimpleNamespace(me="a")  # type: ignore[assignment]
    assert driver._named(ATTEMPT, culprit) == name
    driver._context = SimpleNamespace(me="b")  # type: ignore[assignment]
    assert driver._named(ATTEMPT, "next") == "c" and driver._named(ATTEMPT, "previous") == "d"


def test_sources_are_those_that_follow_by_name() -> None:
    assert following("c", ["a", "c", "e"]) == ["e", "a", "c"]
    assert following("b", ["a", "c", "e"]) == ["c", "e", "a"]
    assert following("z", ["a", "c"]) == ["a", "c"] and following("a", []) == []


@pytest.mark.parametrize(
    ("address", "beside"),
    [("127.0.0.1:29600", "127.0.0.1:29601"), ("[::1]:29600", "[::1]:29601"), ("127.0.0.1:0", "127.0.0.1:0")],
)
def test_states_are_served_on_the_port_after_that_of_the_ring(address: str, beside: str) -> None:
    assert _beside(address) == beside


COMMITS = {
    round: example.commit(round=round, digest=f"d{round}", members=() if round == 0 else ("a", "b"))
    for round in range(8)
}


def missed(*, round: int, overtaken: int, at_most: int = 4, me: str = "n", digest: str = "", **changed: Any):
    commits = {**COMMITS, **changed.pop("commits", {})}
    found = missed_rounds(
        RunSnapshot(commits=commits),
        me=me,
        round=round,
        digest=digest or f"d{round}",
        overtaken=overtaken,
        at_most=at_most,
    )
    return [commit.round for commit in found]


def test_the_averages_of_as_many_rounds_are_sought_as_were_committed_since_a_peer_came() -> None:
    assert missed(round=5, overtaken=2) == [6, 7]
    assert missed(round=5, overtaken=1) == []  # nobody kept that of round 6
    assert missed(round=3, overtaken=9) == [4, 5, 6, 7]
    assert missed(round=2, overtaken=9) == [] and missed(round=2, overtaken=9, at_most=5) == [3, 4, 5, 6, 7]
    assert missed(round=7, overtaken=9) == []
    assert missed(round=5, overtaken=2, digest="another") == []
    assert missed(round=5, overtaken=2, me="b") == []  # it was in these rounds
    back = example.commit(round=6, digest="d6", members=(), rewind_to=2)
    assert missed(round=5, overtaken=2, commits={6: back}) == []
    assert missed(round=6, overtaken=2, commits={6: back}) == [7]


@pytest.mark.parametrize(
    "of_round_6",
    [
        example.commit(round=6, digest="d6", members=("a", "b"), rewind_to=2),
        example.commit(round=6, digest="d6", members=()),
        None,
    ],
    ids=["it went back", "nobody was in it", "it is not kept"],
)
def test_no_averages_lead_over_a_round_that_has_none(of_round_6: Any) -> None:
    commits = {round: commit for round, commit in {**COMMITS, 6: of_round_6}.items() if commit is not None}
    snapshot = RunSnapshot(commits=commits)
    assert missed_rounds(snapshot, me="n", round=5, digest="d5", overtaken=2, at_most=4) == ()


class Serving:
    def __init__(self) -> None:
        self.served: dict[str, Path] = {}

    def serve_averages(self, directories: dict[str, Path]) -> None:
        self.served = dict(directories)


def test_averages_are_kept_of_the_newest_rounds_that_a_listed_peer_missed(tmp_path: Path) -> None:
    directory, states = tmp_path / "averages", Serving()
    (directory / "of an earlier process").mkdir(parents=True)
    kept = KeptAverages(directory, states, None, at_most=2)  # type: ignore[arg-type]
    assert not directory.exists()
    everybody = RunSnapshot(members={name: listed(name) for name in "abn"})
    for round in (1, 2, 3):
        places = kept.places(COMMITS[round], everybody, ranks=2)
        assert places == [directory / f"d{round}.0", directory / f"d{round}.1"]
        for place in places:
            place.touch()
    assert states.served == {"d2": directory, "d3": directory}
    assert sorted(path.name for path in directory.iterdir()) == ["d2.0", "d2.1", "d3.0", "d3.1"]
    members = RunSnapshot(members={name: listed(name) for name in "ab"})
    assert kept.places(COMMITS[4], members, ranks=2) == []
    assert states.served == {} and list(directory.iterdir()) == []
    none = KeptAverages(tmp_path / "none", states, None, at_most=0)  # type: ignore[arg-type]
    assert none.places(COMMITS[1], everybody, ranks=2) == [] and not (tmp_path / "none").exists()


def test_a_disk_that_takes_no_average_costs_a_peer_nothing_else(tmp_path: Path, caplog) -> None:
    (tmp_path / "run").touch()
    kept = KeptAverages(tmp_path / "run" / "averages", Serving(), None, at_most=2)  # type: ignore[arg-type]
    everybody = RunSnapshot(members={name: listed(name) for name in "abn"})
    assert kept.places(COMMITS[1], everybody, ranks=2) == []
    assert "the average of round 1 is not kept for those who missed it: " in caplog.text


def test_a_server_of_ranks_lets_in_processes_of_its_own_user_alone(monkeypatch, caplog) -> None:
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    with RankServer(heard.put) as server:
        assert server.path.parent.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr("bloomery.agent.rank_server.os.getuid", lambda: 12345)
        with pytest.raises(PeerError):
            client = _connected(server.path)
            client.receive(DEADLINE_S)
        assert "was refused" in caplog.text and heard.empty()


def _connected(path: Path) -> AgentClient:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(path))
    return AgentClient(connection)
