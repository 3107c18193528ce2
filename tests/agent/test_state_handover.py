"""How ranks are told to hold what was fetched, and which fetches no round waits for."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from tests.agent.agent_parts import Ranks
from tests.agent.test_state_sync import DEADLINE_S, snapshot
from tests.protocol import example

from bloomery.agent import state_sync
from bloomery.agent.state_sync import Behind, KeptAverages, StateSync, SyncedState
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import CatchUp, ReplaceState
from bloomery.state_transfer.averages import FetchedAverage
from bloomery.state_transfer.client import FetchedState

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

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[list[str]] = []
        self.daemons: list[bool] = []
        self._error = error or PeerError("not today")
        self.ended: queue.Queue[None] = queue.Queue()
        self.sync = StateSync(self._fetch, me="b", wake=lambda: self.ended.put(None))

    def fetch(self, run: Any, now: float) -> None:
        assert self.sync.fetch(run, now=now) is None
        self.ended.get(timeout=DEADLINE_S)

    def _fetch(self, commit: Any, sources: Any, *, cancelled: Any) -> Any:
        self.asked.append([source.peer for source in sources()])
        self.daemons.append(threading.current_thread().daemon)
        raise self._error


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


def listed(run: RunSnapshot, **members: dict[str, Any]) -> RunSnapshot:
    """The run with copies of its member 'a' by these names, each with these fields."""
    entry = run.members["a"]
    named = {name: structs.replace(entry.member, peer=name, **own) for name, own in members.items()}
    return replace(run, members={name: replace(entry, member=member) for name, member in named.items()})


def test_a_state_is_asked_of_those_that_have_a_copy_and_no_others() -> None:
    peer = Failing()
    copies: tuple[tuple[str, ...], ...] = (("d1",), (), ("d0",))
    run = listed(snapshot(1), **{name: {"copies": own} for name, own in zip("acd", copies, strict=True)})
    peer.fetch(run, now=1e9)
    assert peer.asked == [["a"]]


class Averaging:
    """A peer 'b' with the state of round 1, in a run at round 3 in whose rounds 'a' and 'c' were."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[str]]] = []
        self.ended: queue.Queue[None] = queue.Queue()
        averages: Any = SimpleNamespace(fetch=self._fetch, at_most=4)
        wake = lambda: self.ended.put(None)  # noqa: E731
        self.sync = StateSync(None, me="b", wake=wake, averages=averages)  # type: ignore[arg-type]
        commits = {n: structs.replace(snapshot(n).commits[n], members=("a", "c")) for n in (1, 2, 3)}
        self.run = listed(replace(snapshot(3), commits=commits), a={}, c={}, d={})

    def fetch(self, *, held: int) -> SyncedState | None:
        """What comes of the average after round `held`."""
        behind = Behind(round=held, digest=f"d{held}", overtaken=2, ranks=1)
        assert self.sync.fetch(self.run, now=1e9, behind=behind) is None
        self.ended.get(timeout=DEADLINE_S)
        return self.sync.fetch(self.run, now=1e9, behind=behind)

    def _fetch(
        self, commit: Any, sources: Any, *, ranks: int, at_once: int, cancelled: Any
    ) -> FetchedAverage:
        self.asked.append((commit.round, [source.peer for source in sources()]))
        return FetchedAverage(directory=Path("/average"), peers=("a",), bytes=1)


def test_an_average_is_asked_of_those_that_were_in_its_round_whatever_they_gave_of_another() -> None:
    peer = Averaging()
    synced = peer.fetch(held=1)
    assert synced is not None and (synced.commit.round, synced.is_average) == (2, True)
    for source in ("a", "c"):
        peer.sync.refuse(replace(synced, sources=(source,)))
    synced = peer.fetch(held=2)
    assert synced is not None and (synced.commit.round, synced.is_average) == (3, True)
    assert peer.asked == [(2, ["c", "a"]), (3, ["c", "a"])]


def test_a_peer_that_fetches_no_averages_wants_the_newest_state_and_nothing_before_it_fetches() -> None:
    sync = StateSync(None, me="b", wake=lambda: None)  # type: ignore[arg-type]
    assert sync.wants == "" and not sync.is_failing and not sync.needs_no_waiting
    run = replace(snapshot(2), commits={n: snapshot(n).commits[n] for n in (1, 2)})
    behind = Behind(round=1, digest="d1", overtaken=1, ranks=1)
    assert str(sync._next(run, behind)) == "the state of round 2"


def test_a_state_from_which_averages_no_longer_lead_on_is_given_up_for_the_newest() -> None:
    averages: Any = SimpleNamespace(fetch=None, at_most=4)
    sync = StateSync(None, me="b", wake=lambda: None, averages=averages)  # type: ignore[arg-type]
    run = replace(snapshot(3), commits={n: snapshot(n).commits[n] for n in (1, 2, 3)})
    behind = Behind(round=0, digest="own", overtaken=2, ranks=1)
    sync._sought = sync._next(replace(run, commits={1: run.commits[1]}), behind)  # its fetch has begun
    assert str(sync._next(run, behind)) == "the state of round 1"
    assert str(sync._next(run, replace(behind, overtaken=1))) == "the state of round 3"


@pytest.mark.parametrize("error", [PeerError("not today"), OSError("not today")])
def test_a_fetch_that_fails_is_told_with_what_was_sought_and_not_as_the_end_of_a_thread(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Failing(error)
    peer.fetch(snapshot(1), now=1e9)
    assert [record.getMessage() for record in caplog.records] == [
        "the state of round 1 was not fetched: not today"
    ]
    assert peer.daemons == [True], "it never holds up the end of a peer"


def test_the_failure_of_a_fetch_that_was_stopped_is_nobodys_concern(caplog: pytest.LogCaptureFixture) -> None:
    peer = Failing()
    sought = peer.sync._next(snapshot(1), None)
    for _ in range(2):
        peer.sync._give_up(sought, PeerError("too late"))
    assert caplog.text == "" and peer.sync.next_moment() is None and not peer.sync.needs_no_waiting


@pytest.mark.parametrize("sources", [("a",), ("a", "c")])
def test_what_one_or_several_peers_sent_is_forgotten_with_its_commit(sources: tuple[str, ...]) -> None:
    peer = Failing()
    run = snapshot(1)
    peer.sync.refuse(SyncedState(commit=run.commits[1], directory=Path("/got"), sources=sources, seconds=1.0))
    assert peer.sync._refused or peer.sync._mixed
    peer.fetch(snapshot(2), now=1e9)
    assert not peer.sync._refused and not peer.sync._mixed


def test_a_state_that_a_later_commit_replaced_is_neither_fetched_on_nor_handed_over() -> None:
    begun: queue.Queue[Any] = queue.Queue()
    ended: queue.Queue[None] = queue.Queue()
    answers: dict[int, queue.Queue[Path]] = {round: queue.Queue() for round in (1, 2, 3)}

    def fetch(commit: Any, sources: Any, *, cancelled: Any) -> FetchedState:
        begun.put((commit.round, cancelled))
        directory = answers[commit.round].get(timeout=DEADLINE_S)
        return FetchedState(directory=directory, leader=sources()[0], bytes=1)

    sync = StateSync(fetch, me="b", wake=lambda: ended.put(None))
    cancelled = []
    for round in (1, 2):
        assert sync.fetch(snapshot(round), now=1e9) is None
        asked, is_cancelled = begun.get(timeout=DEADLINE_S)
        assert asked == round
        cancelled.append(is_cancelled)
    assert [is_cancelled() for is_cancelled in cancelled] == [True, False]
    answers[1].put(Path("/first"))
    ended.get(timeout=DEADLINE_S)
    assert sync.fetch(snapshot(2), now=1e9) is None and begun.empty()
    answers[2].put(Path("/second"))
    ended.get(timeout=DEADLINE_S)
    assert sync.fetch(snapshot(3), now=1e9) is None, "the state of the round before"
    assert begun.get(timeout=DEADLINE_S)[0] == 3
    answers[3].put(Path("/third"))
    ended.get(timeout=DEADLINE_S)
    synced = sync.fetch(snapshot(3), now=1e9)
    assert synced is not None and (synced.commit.round, synced.directory) == (3, Path("/third"))
    assert synced.sources == ("a",) and 0.0 <= synced.seconds < DEADLINE_S


@pytest.mark.parametrize(
    ("copies", "overtaken", "wanted"),
    [
        (("d1", "d2"), 2, 2),  # the averages of round 3 lead on from it
        (("d1",), 2, 1),
        (("d1",), 1, 3),  # nobody kept the average of round 2 for this peer
        (("d1", "d2", "d3"), 2, 3),
        (("of another run",), 2, 3),
        ((), 2, 3),
    ],
)
def test_an_earlier_state_is_fetched_where_somebody_has_a_copy_and_averages_lead_on_from_it(
    copies: tuple[str, ...], overtaken: int, wanted: int
) -> None:
    averages: Any = SimpleNamespace(fetch=None, at_most=4)
    sync = StateSync(None, me="b", wake=lambda: None, averages=averages)  # type: ignore[arg-type]
    run = replace(snapshot(3), commits={n: snapshot(n).commits[n] for n in (0, 1, 2, 3)})
    member = structs.replace(run.members["a"].member, copies=copies, serves=())
    run = replace(run, members={"a": replace(run.members["a"], member=member)})
    behind = Behind(round=0, digest="d0", overtaken=overtaken, ranks=1)
    assert sync.fetch(run, now=1e9, behind=behind) is None
    assert sync.wants == f"d{wanted}" and not sync.needs_no_waiting
    sought = sync._next(run, behind)
    assert (sought.commit.round, sought.is_average, sought.is_earlier) == (wanted, False, wanted < 3)
    sync._sought = sought  # as when its fetch has begun
    assert sync.needs_no_waiting is (wanted < 3)
    assert sync._next(run, None).commit.round == 3, "whoever holds nothing fetches the newest"


def test_an_average_whose_fetch_failed_is_not_fetched_again_but_that_of_another_round_is() -> None:
    averages: Any = SimpleNamespace(fetch=None, at_most=4)
    sync = StateSync(None, me="b", wake=lambda: None, averages=averages)  # type: ignore[arg-type]
    run = replace(snapshot(2), commits={n: snapshot(n).commits[n] for n in (0, 1, 2)})
    behind = Behind(round=0, digest="d0", overtaken=2, ranks=1)
    first = sync._next(run, behind)
    assert (first.commit.round, first.is_average) == (1, True) and str(first) == "the average of round 1"
    served = replace(run.members["a"], member=structs.replace(run.members["a"].member, serves=()))
    assert sync.fetch(replace(run, members={"a": served}), now=1e9, behind=behind) is None
    assert sync.wants == "", "nobody has to copy its state for an average"
    sync._failed = first
    assert str(sync._next(run, behind)) == "the state of round 2"
    assert str(sync._next(run, replace(behind, round=1, digest="d1"))) == "the average of round 2"
    gone = replace(run, members={})
    assert str(sync._next(gone, replace(behind, round=1, digest="d1"))) == "the state of round 2"


def test_a_state_whose_fetch_fails_after_that_of_its_average_has_failed_once() -> None:
    averages: Any = SimpleNamespace(fetch=None, at_most=4)
    sync = StateSync(None, me="b", wake=lambda: None, averages=averages)  # type: ignore[arg-type]
    run = replace(snapshot(2), commits={n: snapshot(n).commits[n] for n in (1, 2)})
    behind = Behind(round=1, digest="d1", overtaken=1, ranks=1)
    for told in ("the average of round 2", "the state of round 2"):
        sync._sought = sought = sync._next(run, behind)
        assert str(sought) == told
        sync._give_up(sought, PeerError("not today"))
        assert not sync.is_failing
    sync._sought = sought
    sync._give_up(sought, PeerError("not today"))
    assert sync.is_failing


def test_the_place_of_averages_is_made_with_all_above_it(tmp_path: Path) -> None:
    served: list[Any] = []
    states: Any = SimpleNamespace(serve_averages=served.append)
    fetch: Any = object()
    kept = KeptAverages(tmp_path / "run" / "averages", states, fetch, at_most=2)
    assert kept.fetch is fetch
    commit = example.commit(round=3, digest="d3", members=("b",))
    (place,) = kept.places(commit, snapshot(1), ranks=1)
    assert place.parent.is_dir() and served == [{"d3": place.parent}] and kept.at_most == 2
