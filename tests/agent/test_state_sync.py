"""Fetching the run's state, as a peer's parent sees it."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec import structs
from tests.agent.test_ring_attempt import no_thread
from tests.protocol import example

from bloomery.agent.agent import Agent
from bloomery.agent.state_sync import Behind, StateSync, SyncedState
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.state_transfer.averages import SOURCES, FetchedAverage
from bloomery.state_transfer.client import FetchedState

DEADLINE_S = 60.0


def snapshot(round: int) -> RunSnapshot:
    """Round `round` is committed, and 'a' serves its state, and still those of the rounds before."""
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
        ranks=1,
        recipe="r",
        samples=4,
        copies=tuple(f"d{earlier}" for earlier in range(1, round + 1)),
    )
    present = ListedMember(member=member, life=1, modified=1, seen_s=0.0, said_s=0.0)
    return RunSnapshot(members={"a": present}, commits={round: commit})


def test_a_source_that_can_be_dialled_comes_before_one_behind_a_relay_which_is_reached_by_its_name():
    ended: queue.Queue[None] = queue.Queue()
    reached, seen = [], []

    def fetch(commit, sources, *, cancelled):
        seen.extend(sources())
        return FetchedState(directory=Path("here"), leader=sources()[0], bytes=1)

    run = snapshot(1)
    dialled = run.members["a"]
    relayed = replace(dialled, member=structs.replace(dialled.member, serves=("relay:",)))
    run = replace(run, members={"a": relayed, "z": dialled})
    sync = StateSync(fetch, me="b", wake=lambda: ended.put(None), reach=reached.append)
    assert sync.fetch(run, now=1e9) is None
    ended.get(timeout=DEADLINE_S)
    assert [(source.peer, source.url) for source in seen] == [("z", "http://127.0.0.1:1"), ("a", "relay:")]
    for source in seen:
        source.reach()
    assert reached == ["z", "a"]


def test_a_state_is_removed_once_the_ranks_have_loaded_it_and_not_before(tmp_path: Path):
    ended: queue.Queue[None] = queue.Queue()
    state = tmp_path / "fetched" / "step-000001.i001"
    state.mkdir(parents=True)
    (state / "manifest.json").write_text("{}")
    sync = StateSync(
        lambda commit, sources, *, cancelled: FetchedState(directory=state, leader=sources()[0], bytes=1),
        me="b",
        wake=lambda: ended.put(None),
    )
    sync.stop()
    assert sync.fetch(snapshot(1), now=1e9) is None
    ended.get(timeout=DEADLINE_S)
    given = sync.fetch(snapshot(1), now=2e9)
    assert given is not None and (given.directory / "manifest.json").exists()
    sync.stop()
    for thread in threading.enumerate():
        if thread.name == "remove fetched":
            thread.join(DEADLINE_S)
    assert not state.exists()


def test_a_fetch_that_ends_by_an_error_nobody_foresaw_is_told_and_made_again(caplog):
    ended: queue.Queue[None] = queue.Queue()
    tries = []

    def fetch(commit, sources, *, cancelled):
        tries.append(commit)
        if len(tries) == 1:
            raise OverflowError("int too large to convert to float")
        return FetchedState(directory=Path("here"), leader=sources()[0], bytes=1)

    supply = StateSync(fetch, me="b", wake=lambda: ended.put(None))
    for now in (1e9, 2e9):
        assert supply.fetch(snapshot(1), now=now) is None
        ended.get(timeout=DEADLINE_S)
    assert supply.fetch(snapshot(1), now=3e9).directory == Path("here")
    assert "the thread 'fetch' ended" in caplog.text and "was not fetched" in caplog.text


def test_a_fetch_for_which_no_thread_is_left_is_made_later_and_a_state_is_left_where_it_is(
    monkeypatch, caplog, tmp_path
):
    ended: queue.Queue[None] = queue.Queue()
    state = FetchedState(directory=tmp_path, leader=SimpleNamespace(peer="a"), bytes=1)
    sync = StateSync(lambda *asked, **how: state, me="b", wake=lambda: ended.put(None))
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        assert sync.fetch(snapshot(1), now=1e9) is None and sync.next_moment() is not None
        ended.get_nowait()
    assert sync.fetch(snapshot(1), now=2e9) is None
    ended.get(timeout=DEADLINE_S)
    assert sync.fetch(snapshot(1), now=3e9) is not None
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    sync.stop()
    assert f"{tmp_path} is not removed" in caplog.text and tmp_path.exists()


def test_a_fetch_that_fails_again_though_nobody_overtook_it_is_told_from_one_that_was_too_slow():
    answers: queue.Queue[Path | PeerError] = queue.Queue()
    ended: queue.Queue[None] = queue.Queue()

    def fetch(commit, sources, *, cancelled):
        answer = answers.get(timeout=DEADLINE_S)
        if isinstance(answer, PeerError):
            raise answer
        return FetchedState(directory=answer, leader=sources()[0], bytes=1)

    supply = StateSync(fetch, me="b", wake=lambda: ended.put(None))
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


def test_a_fetch_that_has_begun_is_finished_though_rounds_go_on_and_their_averages_are_fetched_then():
    """The others commit rounds 2 and 3 while the state of round 1 is on its way."""
    answers: queue.Queue[Path] = queue.Queue()
    asked: list[tuple[str, int]] = []
    ended: queue.Queue[None] = queue.Queue()

    def fetch(commit, sources, *, cancelled):
        asked.append(("state", commit.round))
        answer = answers.get(timeout=DEADLINE_S)
        assert not cancelled()
        return FetchedState(directory=answer, leader=sources()[0], bytes=1)

    def fetch_average(commit, sources, *, ranks, at_once, cancelled):
        asked.append(("average", commit.round))
        if commit.round == 3:
            raise PeerError("nobody has it")
        return FetchedAverage(directory=Path(f"average {commit.round}"), peers=("a",), bytes=1)

    averages: Any = SimpleNamespace(fetch=fetch_average, at_most=4)
    supply = StateSync(fetch, me="b", wake=lambda: ended.put(None), averages=averages)
    runs = [
        replace(snapshot(n), commits={r: snapshot(r).commits[r] for r in range(1, n + 1)}) for n in (1, 2, 3)
    ]

    def fetched(n: int, held: int, overtaken: int, now: float):
        behind = Behind(round=held, digest=f"d{held}" if held else "own", overtaken=overtaken, ranks=1)
        return supply.fetch(runs[n - 1], now=now, behind=behind)

    assert fetched(1, 0, 0, 1e9) is None
    assert fetched(2, 0, 1, 2e9) is None and supply.needs_no_waiting
    answers.put(Path("state 1"))
    ended.get(timeout=DEADLINE_S)
    state = fetched(3, 0, 2, 3e9)
    assert (state.commit.round, state.is_average, state.directory) == (1, False, Path("state 1"))
    assert fetched(3, 1, 2, 4e9) is None and not supply.needs_no_waiting
    ended.get(timeout=DEADLINE_S)
    average = fetched(3, 1, 2, 5e9)
    assert (average.commit.round, average.is_average, average.directory) == (2, True, Path("average 2"))
    assert fetched(3, 2, 2, 6e9) is None
    ended.get(timeout=DEADLINE_S)  # nobody has the next one, so a whole state is fetched
    assert fetched(3, 2, 2, 7e9) is None
    answers.put(Path("state 3"))
    ended.get(timeout=DEADLINE_S)
    assert fetched(3, 2, 2, 8e9).directory == Path("state 3")
    assert asked == [("state", 1), ("average", 2), ("average", 3), ("state", 3)]


def test_what_cannot_be_made_up_for_is_fetched_whole():
    """Rounds of before this peer came, a rewind, and more rounds than averages are kept of."""
    asked: list[str] = []

    def fetch(commit, sources, *, cancelled):
        asked.append(commit.digest)
        raise PeerError("not today")

    averages: Any = SimpleNamespace(fetch=None, at_most=4)
    rounds = {n: snapshot(n).commits[n] for n in range(1, 8)}
    rewound = rounds | {7: example.commit(round=7, digest="d7", members=(), rewind_to=3)}
    for commits, held, overtaken in ((rounds, 6, 0), (rounds, 2, 5), (rewound, 6, 1), (rounds, 0, 7)):
        ended: queue.Queue[None] = queue.Queue()
        supply = StateSync(fetch, me="b", wake=lambda ended=ended: ended.put(None), averages=averages)
        behind = Behind(round=held, digest=f"d{held}", overtaken=overtaken, ranks=1)
        assert supply.fetch(replace(snapshot(7), commits=commits), now=1e9, behind=behind) is None
        ended.get(timeout=DEADLINE_S)
    assert asked == ["d7"] * 4


def test_what_was_fetched_while_its_sources_serve_nothing_is_not_waited_for_twice():
    """Between a commit and its copy for newcomers a peer serves nothing, and that may be just then."""
    ended: queue.Queue[None] = queue.Queue()

    def fetch_average(commit, sources, *, ranks, at_once, cancelled):
        return FetchedAverage(directory=Path(f"average {commit.round}"), peers=("a",), bytes=1)

    averages: Any = SimpleNamespace(fetch=fetch_average, at_most=4)
    supply = StateSync(None, me="b", wake=lambda: ended.put(None), averages=averages)
    run = replace(snapshot(2), commits={n: snapshot(n).commits[n] for n in (1, 2)})
    behind = Behind(round=1, digest="d1", overtaken=1, ranks=1)
    assert supply.fetch(run, now=1e9, behind=behind) is None
    ended.get(timeout=DEADLINE_S)
    silent = replace(run.members["a"], member=example.member(peer="a", round=2, digest="d2"))
    synced = supply.fetch(replace(run, members={"a": silent}), now=2e9, behind=behind)
    assert synced.is_average and synced.commit.round == 2
    supply.refuse(
        synced
    )  # it led to another state, and nobody else has it: a whole state, and never this again
    for now in (3e9, 4e9):
        assert not supply._next(run, behind).is_average
        supply.fetch(replace(run, members={"a": silent}), now=now, behind=behind)


def test_an_average_stays_where_it_is_once_the_ranks_hold_what_it_led_to(tmp_path: Path):
    ended: queue.Queue[None] = queue.Queue()

    def fetch_average(commit, sources, *, ranks, at_once, cancelled):
        return FetchedAverage(directory=tmp_path, peers=("a",), bytes=1)

    averages: Any = SimpleNamespace(fetch=fetch_average, at_most=4)
    sync = StateSync(None, me="b", wake=lambda: ended.put(None), averages=averages)
    run = replace(snapshot(2), commits={n: snapshot(n).commits[n] for n in (1, 2)})
    behind = Behind(round=1, digest="d1", overtaken=1, ranks=1)
    assert sync.fetch(run, now=1e9, behind=behind) is None
    ended.get(timeout=DEADLINE_S)
    assert sync.fetch(run, now=2e9, behind=behind).is_average
    sync.stop()
    for thread in threading.enumerate():
        if thread.name == "remove fetched":
            thread.join(DEADLINE_S)
    assert tmp_path.exists()


def test_a_state_is_removed_too_where_averages_led_on_from_it_to_the_runs(tmp_path: Path):
    ended: queue.Queue[None] = queue.Queue()
    state = tmp_path / "fetched"
    state.mkdir()

    def fetch_average(commit, sources, *, ranks, at_once, cancelled):
        return FetchedAverage(directory=tmp_path, peers=("a",), bytes=1)

    averages: Any = SimpleNamespace(fetch=fetch_average, at_most=4)
    sync = StateSync(
        lambda commit, sources, *, cancelled: FetchedState(directory=state, leader=sources()[0], bytes=1),
        me="b",
        wake=lambda: ended.put(None),
        averages=averages,
    )
    run = replace(snapshot(2), commits={n: snapshot(n).commits[n] for n in (1, 2)})
    for begun, held, overtaken in ((snapshot(1), 0, 0), (run, 1, 1)):
        behind = Behind(round=held, digest=f"d{held}", overtaken=overtaken, ranks=1)
        assert sync.fetch(begun, now=1e9, behind=behind) is None
        ended.get(timeout=DEADLINE_S)
        assert sync.fetch(run, now=2e9, behind=replace(behind, overtaken=1)).is_average is bool(held)
    sync.stop()
    for thread in threading.enumerate():
        if thread.name == "remove fetched":
            thread.join(DEADLINE_S)
    assert not state.exists() and tmp_path.exists()


def test_a_peer_whose_ranks_hold_the_runs_state_no_longer_wants_one():
    ended: queue.Queue[None] = queue.Queue()

    def fetch(commit, sources, *, cancelled):
        return FetchedState(directory=Path("here"), leader=sources()[0], bytes=1)

    sync = StateSync(fetch, me="b", wake=lambda: ended.put(None), reach=lambda peer: None)
    run = snapshot(3)
    assert sync.fetch(run, now=1e9) is None and sync.wants == "d3"
    ended.get(timeout=DEADLINE_S)
    assert sync.fetch(run, now=1e9) is not None and sync.wants == "d3"
    agent: Any = SimpleNamespace(_round_driver=SimpleNamespace(held=(3, "d3"), seen=3), _state_sync=sync)
    Agent._replace(agent, run, 1e9)
    assert sync.wants == ""


def test_an_average_of_which_several_peers_sent_parts_is_fetched_from_one_when_it_was_refused():
    ended: queue.Queue[None] = queue.Queue()
    asked = []

    def fetch_average(commit, sources, *, ranks, at_once, cancelled):
        asked.append((at_once, ranks))
        peers = tuple(source.peer for source in sources())[:at_once]
        return FetchedAverage(directory=Path("average"), peers=peers, bytes=1)

    averages: Any = SimpleNamespace(fetch=fetch_average, at_most=4)
    sync = StateSync(None, me="b", wake=lambda: ended.put(None), averages=averages)
    commits = {n: snapshot(n).commits[n] for n in (1, 2)}
    commits[2] = structs.replace(commits[2], members=("a", "c"))
    listed = snapshot(2).members["a"]
    other = replace(listed, member=structs.replace(listed.member, peer="c"))
    run = replace(snapshot(2), commits=commits, members={"a": listed, "c": other})
    behind = Behind(round=1, digest="d1", overtaken=1, ranks=3)

    def fetched(now: float):
        assert sync.fetch(run, now=now, behind=behind) is None
        ended.get(timeout=DEADLINE_S)
        return sync.fetch(run, now=now, behind=behind)

    for now, sources in ((1e9, ("c", "a")), (2e9, ("c",)), (3e9, ("a",))):
        synced = fetched(now)
        assert synced.sources == sources and sync._next(run, behind).is_average
        sync.refuse(synced)
    assert asked == [(SOURCES, 3), (1, 3), (1, 3)]
    assert not sync._next(run, behind).is_average  # no peer is left that was not refused


def test_while_nobody_has_a_copy_of_the_newest_state_the_newest_is_fetched_that_averages_lead_on_from():
    averages: Any = SimpleNamespace(fetch=None, at_most=5)
    sync = StateSync(None, me="b", wake=lambda: None, averages=averages)
    commits = {n: snapshot(n).commits[n] for n in range(1, 8)}
    listed, behind = snapshot(7).members["a"], Behind(round=0, digest="own", overtaken=5, ranks=1)
    for copies, round, is_earlier in (
        (("d1", "d3", "d4"), 4, True),
        (("d1",), 7, False),
        (("d3", "d7"), 7, False),
    ):
        holder = replace(listed, member=structs.replace(listed.member, copies=copies))
        sought = sync._next(replace(snapshot(7), commits=commits, members={"a": holder}), behind)
        assert (sought.commit.round, sought.is_average, sought.is_earlier) == (round, False, is_earlier)


def test_who_gave_another_state_than_it_said_is_not_asked_for_it_again_but_for_others():
    averages: Any = SimpleNamespace(fetch=None, at_most=4)
    sync = StateSync(None, me="b", wake=lambda: None, averages=averages)
    run = replace(snapshot(2), commits={n: snapshot(n).commits[n] for n in (1, 2)})
    behind = Behind(round=1, digest="d1", overtaken=1, ranks=1)
    for round, asked in ((1, ["a"]), (2, [])):
        synced = SyncedState(commit=run.commits[round], directory=Path("x"), sources=("a",), seconds=1.0)
        sync.refuse(synced)
        sought = sync._next(run, behind)
        assert sought.is_average is bool(asked)
        assert [source.peer for source in sync._sources_of(sought, run.members)] == asked
    sync.fetch(replace(snapshot(5), members={}), now=0.0)
    assert sync._next(run, behind).is_average, "its refusal went with its commit"
