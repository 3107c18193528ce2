"""How ranks are told to hold what was fetched, and which fetches no round waits for."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs
from tests.agent.agent_parts import Ranks
from tests.agent.test_state_sync import DEADLINE_S, snapshot
from tests.protocol import example

from bloomery.agent import state_sync
from bloomery.agent.state_sync import StateSync, SyncedState
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import CatchUp, ReplaceState

COMMIT = example.commit(round=6, digest="d6", position=Position(consumed=9))
STATE = SyncedState(commit=COMMIT, directory=Path("/got"), sources=("b",), seconds=1.0)


def told(synced: SyncedState) -> list[Any]:
    ranks = Ranks(lambda event: None, [])
    synced.hand_over(ranks, count=2, why="it was behind")  # type: ignore[arg-type]
    return ranks.sent


def test_a_state_is_loaded_by_all_ranks_and_of_an_average_each_has_its_own_file() -> None:
    assert told(STATE) == [
        (
            None,
            ReplaceState(
                round=6,
                digest="d6",
                position=Position(consumed=9),
                directory=Path("/got"),
                why="it was behind",
            ),
        )
    ]
    common: dict[str, Any] = dict(round=6, digest="d6", position=Position(consumed=9))
    files = [state_sync.average_file(rank) for rank in range(2)]
    assert files[0] != files[1]
    assert told(replace(STATE, is_average=True)) == [
        (rank, CatchUp(**common, file=Path("/got") / files[rank])) for rank in range(2)
    ]


class Failing:
    """A peer 'b' whose fetches fail, and from whom it asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.ended: queue.Queue[None] = queue.Queue()
        self.sync = StateSync(self._fetch, me="b", wake=lambda: self.ended.put(None))

    def fetch(self, run: Any, now: float) -> None:
        assert self.sync.fetch(run, now=now) is None
        self.ended.get(timeout=DEADLINE_S)

    def _fetch(self, commit: Any, sources: Any, *, cancelled: Any) -> Any:
        self.asked.append([source.peer for source in sources()])
        raise PeerError("not today")


def test_a_fetch_that_failed_is_made_again_after_half_a_second() -> None:
    peer = Failing()
    assert peer.sync.next_moment() is None and not peer.sync.needs_no_waiting
    began_s = time.monotonic()
    peer.fetch(snapshot(1), now=1e9)
    again_s = peer.sync._again_s
    assert began_s + 0.5 <= again_s <= time.monotonic() + 0.5
    assert peer.sync.fetch(snapshot(1), now=again_s - 0.001) is None and len(peer.asked) == 1
    peer.sync._again_s = time.monotonic() + 1e6
    assert peer.sync.next_moment() == peer.sync._again_s
    peer.fetch(snapshot(1), now=peer.sync._again_s)
    assert len(peer.asked) == 2 and peer.sync.needs_no_waiting, "it failed a second time"


def test_a_peer_does_not_fetch_from_itself_and_begins_with_the_peer_after_it() -> None:
    run = snapshot(1)
    entry = run.members["a"]
    members = {
        name: replace(entry, member=structs.replace(entry.member, peer=name)) for name in ("c", "b", "a", "d")
    }
    peer = Failing()
    peer.fetch(replace(run, members=members), now=1e9)
    assert peer.asked == [["c", "d", "a"]]


def test_what_was_refused_is_refused_for_as_long_as_its_commit_is_kept() -> None:
    peer = Failing()
    run = snapshot(1)
    state = SyncedState(commit=run.commits[1], directory=Path("/got"), sources=("a",), seconds=1.0)
    mixed = SyncedState(commit=run.commits[1], directory=Path("/got"), sources=("a", "c"), seconds=1.0)
    peer.sync.refuse(state)
    peer.sync.refuse(mixed)
    assert peer.sync.fetch(run, now=1e9) is None
    assert (peer.sync._refused, peer.sync._mixed) == ({("d1", "a")}, {"d1"}) and peer.sync.is_failing
    assert peer.asked == [], "nobody else has it"
    peer.fetch(snapshot(2), now=1e9)
    assert (peer.sync._refused, peer.sync._mixed) == (set(), set()) and peer.asked == [["a"]]
