"""Fetching the run's state, as a peer's parent sees it."""

from __future__ import annotations

import queue
from pathlib import Path

from bloomery.data.position import Position
from bloomery.elastic.control.snapshot import Present, Snapshot
from bloomery.elastic.peer.supply import Supply
from bloomery.elastic.records import Commit, Member
from bloomery.errors import PeerError

DEADLINE_S = 60.0


def snapshot(round: int) -> Snapshot:
    """Round `round` is committed, and 'a' serves its state."""
    digest = f"d{round}"
    commit = Commit(
        round=round, epoch=round, members=("a",), digest=digest, position=Position(), sources=("a",)
    )
    member = Member(
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
    present = Present(member=member, life=1, modified=1, seen_s=0.0, said_s=0.0)
    return Snapshot(members={"a": present}, commits={round: commit})


def test_a_fetch_that_fails_again_though_nobody_overtook_it_is_told_from_one_that_was_too_slow():
    answers: queue.Queue[Path | PeerError] = queue.Queue()
    ended: queue.Queue[None] = queue.Queue()

    def fetch(commit, sources, *, cancelled):
        answer = answers.get(timeout=DEADLINE_S)
        if isinstance(answer, PeerError):
            raise answer
        return answer

    supply = Supply(server=None, fetch=fetch, me="b", poke=lambda: ended.put(None))
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
