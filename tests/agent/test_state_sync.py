"""Fetching the run's state, as a peer's parent sees it."""

from __future__ import annotations

import queue
from pathlib import Path

from tests.protocol import example

from bloomery.agent.state_sync import StateSync
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.state_transfer.client import FetchedState

DEADLINE_S = 60.0


def snapshot(round: int) -> RunSnapshot:
    """Round `round` is committed, and 'a' serves its state."""
    digest = f"d{round}"
    commit = example.commit(
        round=round, epoch=round, members=("a",), digest=digest, position=Position(), sources=("a",)
    )
    member = example.member(
        peer="a",
        incarnation="1",
        addresses=(),
        serves=("http://127.0.0.1:1",),
        round=round,
        digest=digest,
        lanes=1,
        recipe="r",
        samples=4,
    )
    present = ListedMember(member=member, life=1, modified=1, seen_s=0.0, said_s=0.0)
    return RunSnapshot(members={"a": present}, commits={round: commit})


def test_a_fetch_that_ends_by_an_error_nobody_foresaw_is_told_and_made_again(caplog):
    ended: queue.Queue[None] = queue.Queue()
    tries = []

    def fetch(commit, sources, *, cancelled):
        tries.append(commit)
        if len(tries) == 1:
            raise OverflowError("int too large to convert to float")
        return FetchedState(directory=Path("here"), leader=sources()[0], bytes=1)

    supply = StateSync(server=None, fetch=fetch, me="b", wake=lambda: ended.put(None))
    for now in (1e9, 2e9):
        assert supply.fetch(snapshot(1), now=now) is None
        ended.get(timeout=DEADLINE_S)
    assert supply.fetch(snapshot(1), now=3e9).directory == Path("here")
    assert "the thread 'fetch' ended" in caplog.text and "was not fetched" in caplog.text


def test_a_fetch_that_fails_again_though_nobody_overtook_it_is_told_from_one_that_was_too_slow():
    answers: queue.Queue[Path | PeerError] = queue.Queue()
    ended: queue.Queue[None] = queue.Queue()

    def fetch(commit, sources, *, cancelled):
        answer = answers.get(timeout=DEADLINE_S)
        if isinstance(answer, PeerError):
            raise answer
        return FetchedState(directory=answer, leader=sources()[0], bytes=1)

    supply = StateSync(server=None, fetch=fetch, me="b", wake=lambda: ended.put(None))
    now = 0.0

    def fetched(round: int, answer: Path | PeerError):
        nonlocal now
        now += 1e9  # the pause after a failure is over
        assert supply.fetch(snapshot(round), now=now) is None
        answers.put(answer)
        ended.get(timeout=DEADLINE_S)
        return supply.fetch(snapshot(round), now=now) if isinstance(answer, Path) else None

    for round in (1, 2, 3):  # each time the state was gone
        fetched(round, PeerError("it has not this state (any more)"))
        assert not supply.is_failing
    fetched(3, PeerError("refused"))
    fetched(4, PeerError("refused"))
    assert supply.is_failing
    assert fetched(4, Path("here")).directory == Path("here")
    assert not supply.is_failing
