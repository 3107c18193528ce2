"""Which fault does what, and when it is undone, on peers that only note what is done to them."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bloomery.chaos import scenario
from bloomery.chaos.faults import EXTRA_DELAY_S, Fault, FaultInjector
from bloomery.chaos.scenario import ScenarioOutcome
from bloomery.config.trial import WITHIN_ITS_DIRECTORY


class NotedProcess:
    """A peer of a parent and two ranks; its ranks may not have been started yet."""

    def __init__(self, name: str, notes: list[Any]) -> None:
        self.name, self.alive, self.notes, self.has_ranks = name, True, notes, True

    def ranks(self) -> list[str]:
        return ["rank0", "rank1"] if self.has_ranks else []

    def family(self) -> list[str]:
        return ["parent", *self.ranks()]

    def signal(self, number: int, *, whom: Sequence[str]) -> None:
        self.notes.append((signal.Signals(number).name, list(whom)))

    def kill(self) -> None:
        self.notes.append("killed")
        self.alive = False

    def leave(self) -> None:
        self.notes.append("asked to leave")

    def start(self) -> None:
        self.notes.append("started")
        self.alive = True


class NotedNetwork:
    def __init__(self, notes: list[Any]) -> None:
        self._notes = notes

    def __getattr__(self, what: str) -> Any:
        return lambda *given, **more: self._notes.append((what, *given, *more.values()))


class Stage:
    def __init__(self) -> None:
        self.now, self.notes = 100.0, list[Any]()
        self.peer, self.coordinator = NotedProcess("a", self.notes), NotedProcess("c", self.notes)
        self.hand = FaultInjector(
            peers={"a": self.peer},  # type: ignore[dict-item]
            coordinator=self.coordinator,  # type: ignore[arg-type]
            internet=NotedNetwork(self.notes),  # type: ignore[arg-type]
            back_s=5.0,
            seed=3,
            clock=lambda: self.now,
        )

    def strikes(self, kind: str, *, seconds: float = 0.0, peer: str = "a") -> bool:
        return self.hand.inject(Fault(after_s=0.0, kind=kind, peer=peer, seconds=seconds))

    def after(self, seconds: float) -> list[Any]:
        """Return what was noted until then, and forget it."""
        self.now += seconds
        self.hand.revert_due()
        notes, self.notes[:] = list(self.notes), []
        return notes


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("cut", ("cut", "a", 7.0)),
        ("slow", ("slow", "a", EXTRA_DELAY_S, 7.0)),
        ("sever", ("sever", "a")),
        ("corrupt", ("corrupt", "a")),
    ],
)
def test_a_fault_of_a_link_is_one_of_the_network(stage: Stage, kind: str, note: tuple) -> None:
    assert stage.strikes(kind, seconds=7.0)
    assert stage.after(100.0) == [note] and stage.hand.away == set()


def test_a_peer_stands_still_with_all_its_ranks_and_goes_on_with_the_same(stage: Stage) -> None:
    assert stage.strikes("stop-peer", seconds=7.0)
    stage.peer.has_ranks = False
    family = ["parent", "rank0", "rank1"]
    assert stage.after(6.9) == [("SIGSTOP", family)] and stage.hand.next_s == pytest.approx(0.1)
    assert stage.after(0.1) == [("SIGCONT", family)] and stage.hand.next_s == float("inf")


@pytest.mark.parametrize("kind", ["kill-rank", "stop-rank"])
def test_a_peer_without_ranks_has_none_to_strike(stage: Stage, kind: str) -> None:
    stage.peer.has_ranks = False
    assert not stage.strikes(kind, seconds=7.0)
    assert stage.after(100.0) == [] and stage.hand.away == set()


def test_a_rank_is_drawn_by_the_seed(stage: Stage) -> None:
    struck = []
    for _ in range(20):
        assert stage.strikes("kill-rank")
        ((name, (rank,)),) = stage.after(0.0)
        assert name == "SIGKILL"
        struck.append(rank)
    assert set(struck) == {"rank0", "rank1"}
    again = Stage()
    assert [again.strikes("kill-rank") for _ in range(20)] and [note[1][0] for note in again.notes] == struck


def test_a_peer_that_ends_slowly_is_started_once_it_has_ended(stage: Stage) -> None:
    assert stage.strikes("leave")
    assert stage.after(5.0) == ["asked to leave"] and stage.hand.away == {"a"}
    stage.peer.alive = False
    assert stage.after(4.9) == [] and stage.after(0.1) == ["started"] and stage.hand.away == set()


def test_the_coordinator_is_away_for_as_long_as_its_fault_lasts(stage: Stage) -> None:
    assert stage.strikes("kill-coordinator", seconds=8.0, peer="")
    assert not stage.strikes("kill-coordinator", seconds=1.0, peer="")
    assert stage.after(7.9) == ["killed"] and stage.after(0.2) == ["started"]


def test_faults_that_end_together_are_undone_together_in_the_order_of_their_ends(stage: Stage) -> None:
    assert stage.strikes("kill-coordinator", seconds=6.0, peer="")
    assert stage.strikes("stop-peer", seconds=4.0)
    stopped, continued = [(name, ["parent", "rank0", "rank1"]) for name in ("SIGSTOP", "SIGCONT")]
    assert stage.after(6.0) == ["killed", stopped, continued, "started"]


def test_a_slow_link_is_slow_beside_any_link_between_continents() -> None:
    assert 0.3 <= EXTRA_DELAY_S <= 1.0


def test_a_fault_that_is_overdue_is_undone_at_once(stage: Stage) -> None:
    assert stage.strikes("stop-rank", seconds=2.0)
    stage.now += 50.0
    assert stage.hand.next_s == 0.0


def test_what_nobody_knows_is_refused(stage: Stage) -> None:
    with pytest.raises(ValueError, match="meteor"):
        stage.strikes("meteor")


def outcome(statuses: dict[str, int | None], *leftover: str) -> ScenarioOutcome:
    return ScenarioOutcome(seconds=1.0, statuses=statuses, commits=(), injected=(), leftover=leftover)


def test_a_scenario_has_failed_where_a_peer_did_or_something_was_left() -> None:
    assert not outcome({"a": 0, "b": 0}).failed
    assert outcome({"a": 0, "b": 3}).failed and outcome({"a": 0}, "process 7").failed


def test_the_memory_of_a_scenario_is_its_owners_alone() -> None:
    place = scenario._memory_directory("of-this-test")
    try:
        assert place.parent == Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
        assert place.stat().st_mode & 0o777 == 0o700 and place.name == "bloomery-scenario-of-this-test"
    finally:
        place.rmdir()


def test_a_fault_is_told_at_the_seconds_of_its_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers run for a moment and know their names, their number and the place of their checkpoints."""
    commands: dict[str, tuple[str, ...]] = {}

    def stand_in(word: str, *words: str) -> list[str]:
        commands[word if word == "coordinate" else Path(words[2]).name] = words
        return ["sleep", "60"] if word == "coordinate" else ["sleep", "0.1"]

    monkeypatch.setattr(scenario, "_bloomery", stand_in)
    monkeypatch.setattr(scenario, "_wait_for_port", lambda port, process: None)
    monkeypatch.setattr(scenario, "read_commits", lambda endpoint, run: ())
    settings = scenario.ScenarioSettings(
        recipe="mine.toml", overrides=("train.steps=8",), run="r", peers=3, shape=scenario.Shape(), ranks=2,
        directory=tmp_path, deadline_s=30.0, faults=(Fault(after_s=0.0, kind="sever", peer="peer1"),),
    )  # fmt: skip
    told = scenario.run_scenario(settings, watch=lambda *_: None)
    (injected,) = told.injected
    assert 0.0 <= injected.at_s <= told.seconds and injected.done
    assert set(commands) == {"coordinate", "peer0", "peer1", "peer2"}
    recipe, _, run, _, ranks, _, peers, memory, *overrides = commands["peer1"]
    assert (recipe, run, ranks, peers) == ("mine.toml", str(tmp_path / "peer1"), "2", "elastic.peers=3")
    assert memory.endswith("/peer1") and overrides == ["train.steps=8", *WITHIN_ITS_DIRECTORY]
    assert told.leftover == []
