"""What becomes of a peer's part in a ring: it goes well, or is called off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.protocol import example

from bloomery.agent.agent import Agent
from bloomery.agent.rank_server import RankSent
from bloomery.agent.rank_state import LocalRanks, RankProgress
from bloomery.agent.round_driver import RoundDriver
from bloomery.agent.timeouts import timeouts_of
from bloomery.config.elastic import ElasticSection
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.protocol.keys import Keys
from bloomery.protocol.rank_messages import (
    Abort,
    AbortAck,
    AgentMessage,
    Committed,
    Hello,
    Moving,
    RankReady,
    RankRingDone,
    StopTraining,
)
from bloomery.protocol.records import Commit, Done, ProposedAttempt
from bloomery.transport.connection_pool import Cancelled

DEADLINE_S = 60.0
EPOCH, DIGEST = 5, "d1"


class Links:
    """Stands for the pool of connections: none ever comes, and who waits is told when that is over."""

    def __init__(self) -> None:
        self.changed, self.is_waited_for = threading.Condition(), threading.Event()
        self.released, self.discarded = list[int](), list[int]()

    def gather(self, hops: object, *, cancelled: threading.Event, **more: object) -> None:
        with self.changed:
            self.is_waited_for.set()
            while not cancelled.is_set():
                assert self.changed.wait(DEADLINE_S), "nobody told that the attempt is over"
        raise Cancelled

    def check_cancelled(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def release(self, epoch: int) -> None:
        self.released.append(epoch)

    def discard(self, epoch: int) -> None:
        self.discarded.append(epoch)


class Ringing:
    """The driver of peer 'a' in an attempt with 'b', whose connections are waited for."""

    def __init__(self) -> None:
        limits = timeouts_of(ElasticSection())
        self.told, self.links = list[AgentMessage](), Links()
        self.written = list[str]()
        self.local = LocalRanks(RankProgress(limits))
        self.hear(Hello(rank=0, world=1, process=1))
        self.hear(RankReady(ready=example.ready(round=1), number=0))
        context: Any = SimpleNamespace(
            me="a",
            local=self.local,
            keys=Keys("r"),
            settings=SimpleNamespace(timeouts=limits, streams=1),
            connection_manager=SimpleNamespace(pool=self.links),
            rank_server=SimpleNamespace(send=lambda message, rank=None: self.told.append(message)),
            writer=SimpleNamespace(write=lambda name, run: self.written.append(name)),
            events=SimpleNamespace(write=lambda name, **fields: None),
            wake=lambda: None,
        )
        self.driver = RoundDriver(context, registration=None, membership=None)  # type: ignore[arg-type]
        self.driver.follow(RunSnapshot(commits={0: example.commit(round=0, epoch=0, digest="d0")}))
        members = {
            name: ListedMember(
                member=example.member(peer=name), life=life, modified=life, seen_s=0.0, said_s=0.0
            )
            for life, name in enumerate("ab", start=1)
        }
        attempt = example.attempt(round=1, epoch=EPOCH, members=("a", "b"), weights=(0.5, 0.5))
        tried = ProposedAttempt(attempt=attempt, lives=(1, 2), offers=(1, 1))
        self.snapshot = RunSnapshot(members=members, tried=tried)
        before = set(threading.enumerate())
        self.driver.ring(self.snapshot)
        assert self.links.is_waited_for.wait(DEADLINE_S)
        (self.connecting,) = (
            thread for thread in set(threading.enumerate()) - before if thread.name == "connect"
        )

    def hear(self, message: Any) -> None:
        self.local.take(RankSent(rank=0, message=message), now=0.0)

    def is_called_off(self) -> bool:
        """Whether the ranks were told, the connections ended and nobody waits for them any more."""
        self.connecting.join(DEADLINE_S)
        aborts = [message.epoch for message in self.told if isinstance(message, Abort)]
        return (
            (aborts, self.links.discarded, self.links.released) == ([EPOCH], [EPOCH], [])
            and not self.driver.is_ringing
            and not self.connecting.is_alive()
        )


@pytest.fixture
def ringing() -> Iterator[Ringing]:
    parts = Ringing()
    yield parts
    parts.driver.stop()  # else its thread waits for connections until long after the test
    parts.connecting.join(DEADLINE_S)


def commit(*members: str, **fields: Any) -> Commit:
    return example.commit(round=1, members=members, **{"epoch": EPOCH, "digest": DIGEST} | fields)


def test_after_a_round_that_went_well_the_connections_are_kept_and_the_ranks_go_on(ringing: Ringing) -> None:
    ringing.hear(RankRingDone(epoch=EPOCH, digest=DIGEST))
    ringing.driver.ring(ringing.snapshot)
    decided = commit("a", "b")
    ringing.driver.follow(RunSnapshot(commits={1: decided}))
    assert (ringing.links.released, ringing.links.discarded) == ([EPOCH], [])
    assert ringing.told == [Committed(commit=decided, included=True)]
    assert ringing.driver.held == (1, DIGEST) and ringing.driver.overtaken == 0


def test_ranks_for_which_all_other_members_wait_have_a_deadline(ringing: Ringing) -> None:
    ringing.hear(Moving(activity="ring", step=1))
    ringing.driver.ring(ringing.snapshot)
    assert ringing.local.progress.next_deadline() is None
    done = Done(peer="b", round=1, epoch=EPOCH, digest=DIGEST)
    ringing.driver.ring(replace(ringing.snapshot, dones={"b": done}))
    assert ringing.local.progress.next_deadline() is not None


@pytest.mark.parametrize(
    "decided",
    [
        commit("b"),
        commit("a", "b", epoch=EPOCH + 1),
        commit("a", "b", digest="another"),
        commit(digest="d0", rewind_to=0),
    ],
    ids=["without it", "in a later attempt", "with another result", "to go back"],
)
@pytest.mark.parametrize("is_done", [False, True])
def test_a_ring_whose_round_was_decided_otherwise_is_called_off_before_the_ranks_hear_of_that(
    ringing: Ringing, decided: Commit, is_done: bool
) -> None:
    if is_done:
        ringing.hear(RankRingDone(epoch=EPOCH, digest=DIGEST))
        ringing.driver.ring(ringing.snapshot)
    ringing.driver.follow(RunSnapshot(commits={1: decided}))
    assert ringing.is_called_off() and ringing.driver.overtaken == 1
    assert ringing.told[1:] == [Committed(commit=decided, included=False)]


def test_a_peer_that_is_taken_off_the_list_calls_its_ring_off_and_does_not_begin_it_again(
    ringing: Ringing,
) -> None:
    ringing.driver.stop()
    assert ringing.is_called_off()
    ringing.driver.ring(ringing.snapshot)
    assert not ringing.driver.is_ringing and len(ringing.told) == 1


def test_an_attempt_that_is_followed_by_another_is_called_off(ringing: Ringing) -> None:
    ringing.driver.ring(RunSnapshot(members=ringing.snapshot.members))
    assert ringing.is_called_off()


def test_a_failure_is_told_once_no_rank_uses_the_ring_any_more(ringing: Ringing) -> None:
    snapshot = replace(
        ringing.snapshot, failures=(example.failed(peer="b", round=1, epoch=EPOCH, kind="closed"),)
    )
    ringing.driver.ring(snapshot)
    assert isinstance(ringing.told[-1], Abort) and ringing.links.discarded == [EPOCH]
    assert ringing.written == []
    ringing.hear(AbortAck(epoch=EPOCH))
    ringing.driver.ring(snapshot)
    assert ringing.written == ["failed"]


def test_a_peer_that_ends_calls_its_ring_off_and_tells_its_ranks_once(ringing: Ringing) -> None:
    agent: Any = SimpleNamespace(
        _ending=None,
        _round_driver=ringing.driver,
        _rank_server=SimpleNamespace(send=ringing.told.append),
    )
    Agent._end(agent, "another run", failed=True, saves=True)
    Agent._end(agent, "the samples are done", failed=False)
    assert ringing.is_called_off()
    assert ringing.told[1:] == [StopTraining(why="another run", failed=False)], "its state is right: it saves"
    assert (agent._ending.why, agent._ending.failed) == ("another run", True)
