"""Which checkpoint a start or a rewind takes: here, in memory or in the backup, whole or damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.checkpoint.format.manifest import DamagedCheckpoint
from bloomery.checkpoint.writer.ranks import Ranks, alone
from bloomery.errors import CheckpointError, StorageError
from bloomery.parallel.pipeline import mark_tied_embedding
from bloomery.train import checkpoint_store
from bloomery.train.checkpoint_store import Store


@dataclass(frozen=True)
class Saved:
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:06d}.i001"

    def place(self) -> str:
        return f"s3://backup/{self.name}"


class Backup:
    def __init__(self, *, newer: Sequence[int] = (), restorable: Sequence[int] = ()) -> None:
        self._newer, self._restorable = newer, restorable
        self.asked: dict[str, Any] = {}
        self.woken = 0

    def newer(self) -> list[Saved]:
        return [Saved(step) for step in self._newer]

    def restorable(self, **asked: Any) -> list[Saved]:
        self.asked = asked
        return [Saved(step) for step in self._restorable]

    def wake(self) -> None:
        self.woken += 1

    def in_use(self) -> list[Saved]:
        return [Saved(3)]


def store_of(
    *here: int, suspects: Sequence[int] = (), backup: Backup | None = None, monkeypatch: pytest.MonkeyPatch
) -> Store:
    store = object.__new__(Store)
    store._backup = backup  # type: ignore[assignment]
    store._ranks = Ranks(rank=0, world=1, gather=alone, exchange=None)
    store._rundir = SimpleNamespace(path="run")  # type: ignore[assignment]
    store._section = SimpleNamespace(partner_copies=1, memory_directory="/memory")  # type: ignore[assignment]
    monkeypatch.setattr(checkpoint_store, "checkpoints", lambda rundir: tuple(map(Saved, here)))
    monkeypatch.setattr(
        checkpoint_store,
        "trusted",
        lambda items, warns: [item for item in items if item.step not in suspects],
    )
    return store


def steps(found: list[list[str]]) -> list[tuple[bool, int]]:
    """(whether it is elsewhere, its step) of each."""
    return [(bool(url), int(name[5:11])) for url, name in found]


def test_a_start_takes_a_newer_copy_of_others_before_what_is_here_and_a_rewind_does_not(monkeypatch) -> None:
    backup = Backup(newer=[9], restorable=[3])
    store = store_of(4, 6, backup=backup, monkeypatch=monkeypatch)
    assert steps(store._restorable(None)) == [(True, 9), (False, 6), (False, 4)]
    assert steps(store._restorable(5)) == [(False, 4)] and not backup.asked
    assert steps(store._restorable(3)) == [(True, 3)]
    assert backup.asked == {"instead_of": [Saved(4).name, Saved(6).name], "up_to_step": 3}
    assert store._restorable(3)[0] == [Saved(3).place(), Saved(3).name]
    assert store.newest().step == 6 and store.newest(up_to_step=4).step == 4  # type: ignore[union-attr]
    assert store.newest(up_to_step=3) is None
    backup.asked.clear()
    assert store.newest(up_to_step=0) is None and steps(store._restorable(0)) == [(True, 3)]
    assert backup.asked["up_to_step"] == 0, "the beginning of the run is a step to go back to"


def test_an_empty_machine_takes_what_the_backup_has(monkeypatch) -> None:
    backup = Backup(restorable=[8, 5])
    store = store_of(backup=backup, monkeypatch=monkeypatch)
    assert steps(store._restorable(None)) == [(True, 8), (True, 5)]
    assert backup.asked == {"instead_of": [], "up_to_step": None}


def test_suspects_are_passed_over_and_a_start_is_refused_where_there_is_nothing_else(monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(checkpoint_store, "refuse_if_only_suspects", lambda names: asked.append(list(names)))
    store = store_of(4, 6, suspects=[6], monkeypatch=monkeypatch)
    assert steps(store._restorable(None)) == [(False, 4)] and asked == [[]]
    asked.clear()
    all_suspect = store_of(4, 6, suspects=[4, 6], monkeypatch=monkeypatch)
    assert all_suspect._restorable(None) == [] and asked == [[Saved(4).name, Saved(6).name]]
    assert all_suspect._restorable(5) == [] and asked[-1] == []  # a rewind stops by itself


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "is_taken"), [(7, 6, True), (6, 6, True), (5, 6, False), (5, None, True)]
)
def test_memory_is_taken_where_it_is_at_least_as_new_as_the_disk(
    in_memory, on_disk, is_taken, monkeypatch
) -> None:
    store = store_of(monkeypatch=monkeypatch)
    found = SimpleNamespace(base=(in_memory, 1), source=SimpleNamespace(name="memory"), readers={})
    monkeypatch.setattr(checkpoint_store, "identity", lambda rundir: "life")
    asked: list[Any] = []

    def find(replicas: Any, ranks: Any, visible: Any) -> Any:
        asked.append((replicas, visible("bases")))
        return found

    monkeypatch.setattr(checkpoint_store, "MemoryReplicas", lambda *told: told)
    monkeypatch.setattr(checkpoint_store, "unmarked", lambda rundir, bases: (f"of {rundir.path}", bases))
    monkeypatch.setattr(checkpoint_store, "find_in_memory", find)
    store._load = lambda source, parts, readers: "restored"  # type: ignore[method-assign,assignment]
    names = [] if on_disk is None else [["", Saved(on_disk).name], ["", Saved(4).name]]
    assert (store._from_memory(names, {}) == "restored") is is_taken
    assert asked == [((Path("/memory"), "run", "life"), ("of run", "bases"))]
    monkeypatch.setattr(checkpoint_store, "identity", lambda rundir: "")
    assert store._from_memory(names, {}) is None  # what memory holds for this path is another run's
    monkeypatch.setattr(checkpoint_store, "identity", lambda rundir: "life")
    store._section.partner_copies = 0
    assert store._from_memory(names, {}) is None


def test_a_damaged_copy_in_memory_is_passed_over(monkeypatch) -> None:
    store = store_of(monkeypatch=monkeypatch)
    found = SimpleNamespace(base=(7, 1), source=SimpleNamespace(name="memory"), readers={})
    monkeypatch.setattr(checkpoint_store, "identity", lambda rundir: "life")
    monkeypatch.setattr(checkpoint_store, "MemoryReplicas", lambda *told: told)
    monkeypatch.setattr(checkpoint_store, "find_in_memory", lambda replicas, ranks, visible: found)
    store._load = damaged  # type: ignore[method-assign,assignment]
    assert store._from_memory([], {}) is None


def damaged(source: Any, parts: Any, **more: Any) -> Any:
    raise DamagedCheckpoint("a block has another hash")


@pytest.mark.parametrize(("fallback", "tried"), [(False, ["a"]), (True, ["a", "b"])])
def test_of_damaged_checkpoints_the_next_one_is_loaded_only_where_that_is_asked(
    fallback, tried, monkeypatch
) -> None:
    store, loaded = store_of(monkeypatch=monkeypatch), list[str]()
    monkeypatch.setattr(
        checkpoint_store, "refusal_of_damage", lambda damage, name: CheckpointError(f"use {name}", remedy="")
    )
    store._source = lambda url, name: name  # type: ignore[method-assign,assignment]
    store._newest_intact = lambda names: names[0] if names else ""  # type: ignore[method-assign]

    def load(name: str, parts: Any) -> Any:
        loaded.append(name)
        return damaged(name, parts) if name == "a" else name

    store._load = load  # type: ignore[method-assign,assignment]
    names = [["", "a"], ["", "b"], ["", "c"]]
    if fallback:
        assert store._first_that_loads(names, {}, up_to_step=None, fallback=True) == "b"
    else:
        with pytest.raises(CheckpointError, match="use b"):
            store._first_that_loads(names, {}, up_to_step=None, fallback=False)
    assert loaded == tried
    assert store._first_that_loads([], {}, up_to_step=None, fallback=fallback) is None


def test_a_commit_wakes_the_backup_and_removes_what_need_not_be_kept_however_the_disk_refuses(
    monkeypatch, caplog
) -> None:
    backup = Backup()
    store = store_of(3, 6, backup=backup, monkeypatch=monkeypatch)
    removed, saved = list[str](), list[int]()
    store._place = SimpleNamespace(saved=lambda: saved.append(1), remove=removed.append)  # type: ignore[assignment]
    store._intact, store.reach_steps = {Saved(6).name}, (5,)
    store._pruning = checkpoint_store.threading.Lock()
    asked: dict[str, Any] = {}

    def plan(rundir: Any, **given: Any) -> list[Any]:
        asked.update(given)
        fates = [(Saved(3), ""), (Saved(6), "it is the newest")]
        return [
            SimpleNamespace(checkpoint=SimpleNamespace(directory=item.name), why=why) for item, why in fates
        ]

    monkeypatch.setattr(checkpoint_store, "prune_plan", plan)
    store._committed("step-000006.i001", 250)
    assert (backup.woken, saved, removed) == (1, [1], [Saved(3).name])
    assert asked["run_length_steps"] == 250 and asked["reach_steps"] == (5,)
    assert asked["not_backed_up"] == {Saved(3).name} and asked["section"] is store._section
    assert asked["is_intact"](Saved(6)) and not asked["is_intact"](Saved(3))

    def refused(rundir: Any, **given: Any) -> list[Any]:
        raise StorageError("the disk is read-only", remedy="")

    monkeypatch.setattr(checkpoint_store, "prune_plan", refused)
    store._committed("step-000006.i001", 250)
    assert "older checkpoints were not removed" in caplog.text
    assert store._pruning.acquire(blocking=False)


@dataclass(frozen=True)
class Piece:
    parameter_name: str
    share: str = "whole"


@pytest.mark.parametrize(
    ("tied", "embeds", "finishes", "share"),
    [
        (True, True, False, "echoed"),
        (True, False, True, "echo"),
        (True, True, True, "whole"),
        (True, False, False, "whole"),
        (False, True, False, "whole"),
    ],
)
def test_a_tied_embedding_counts_on_the_first_stage_and_is_followed_on_the_last(
    tied, embeds, finishes, share
) -> None:
    decoder: Any = SimpleNamespace(
        model=SimpleNamespace(section=SimpleNamespace(tied=tied)), embeds=embeds, finishes=finishes
    )
    pieces: Any = [Piece("embedding.weight"), Piece("blocks.0.mlp.up.weight")]
    marked = mark_tied_embedding(pieces, decoder)
    assert [piece.share for piece in marked] == [share, "whole"]
