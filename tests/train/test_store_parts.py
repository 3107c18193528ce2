"""What a store does around a restore, an adoption and the end of a run, and in which order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.test_store_choice import Backup, Saved, store_of

from bloomery.checkpoint.format.deadlines import ABORT_S, LOST_RANK_S
from bloomery.checkpoint.format.manifest import DamagedCheckpoint
from bloomery.checkpoint.format.state import StateSnapshot
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import CheckpointError, RankLost, ReportedElsewhere, StorageError
from bloomery.train import checkpoint_store
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import Restored, RunStateToSave

RESTORED = Restored(step=6, incarnation=2, directory=Path("step-000006.i002"), values={}, about={})
Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def store(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose parts note what is asked of them; it begins incarnation 8 in its fifth."""

    def noted(name: str, answer: Any = None) -> Any:
        return lambda *told, **more: calls.append((name, *told, *([more] if more else []))) or answer

    made = store_of(4, 6, monkeypatch=monkeypatch)
    made.incarnation = 5
    made._saver = SimpleNamespace(  # type: ignore[assignment]
        wait_for_saves=noted("waited"),
        prepare=noted("prepared"),
        close=noted("saver closed"),
        follow=noted("followed"),
        committed_step=0,
    )
    made._peer_snapshots = SimpleNamespace(  # type: ignore[assignment]
        close=noted("copies closed"), add=noted("added", Path("copy")), remove=noted("removed")
    )
    made._place = SimpleNamespace(  # type: ignore[assignment]
        refresh=noted("refreshed"),
        begin=noted("begun", 8),
        mark=noted("marked", ["a"]),
        source=lambda name: ("here", name),
    )
    made._backup = SimpleNamespace(wake=noted("woken"), newer=lambda: [])  # type: ignore[assignment]
    return made


def test_a_restore_begins_an_incarnation_from_what_it_found_and_prepares_the_next_save(
    store: Store, calls: Calls
) -> None:
    store._from_memory = lambda names, parts: calls.append(("memory", names)) or None  # type: ignore[method-assign,func-returns-value]
    store._first_that_loads = (  # type: ignore[method-assign]
        lambda names, parts, *, up_to_step, fallback: (
            calls.append(("loaded", names, parts, fallback)) or RESTORED
        )
    )
    assert store.restore({}, fallback=True) is RESTORED
    names = [["", Saved(6).name], ["", Saved(4).name]]
    assert calls == [
        ("waited",),
        ("refreshed",),
        ("memory", names),
        ("loaded", names, {}, True),
        ("begun", {"base": (6, 2), "reason": "start"}),
        ("woken",),
        ("prepared", {}),
    ]
    assert store.incarnation == 8 and store._saver.committed_step == 6


def test_a_rewind_does_not_look_into_memory_and_a_run_may_have_nothing(store: Store, calls: Calls) -> None:
    store._from_memory = lambda names, parts: pytest.fail("memory holds the newest alone")  # type: ignore[method-assign]
    store._first_that_loads = lambda names, parts, *, up_to_step, fallback: calls.append((names, fallback))  # type: ignore[method-assign,assignment]
    assert store.restore({}, reason="rewind: spike", up_to_step=5) is None
    assert ([["", Saved(4).name]], False) in calls
    assert ("begun", {"base": None, "reason": "rewind: spike"}) in calls
    assert store._saver.committed_step == -1


def test_what_memory_holds_is_taken_before_the_disk_is_read(store: Store, calls: Calls) -> None:
    store._from_memory = lambda names, parts: RESTORED  # type: ignore[method-assign]
    store._first_that_loads = lambda *told, **more: pytest.fail("it is there")  # type: ignore[method-assign]
    assert store.restore({}) is RESTORED and store._saver.committed_step == 6


def test_an_adoption_goes_on_from_its_step_in_this_runs_own_life_once_it_was_checked(
    store: Store, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "source_of", lambda directory: f"source of {directory}")
    store._load = lambda source, parts, is_ours: (  # type: ignore[method-assign,assignment]
        calls.append(("loaded", source, parts, is_ours)) or RESTORED
    )
    theirs = Path("theirs")
    store.adopt({}, theirs, reason="replaced", check=lambda: calls.append(("checked",)))
    assert calls == [
        ("waited",),
        ("loaded", "source of theirs", {}, False),
        ("checked",),
        ("begun", {"base": (6, 5), "reason": "replaced"}),
    ]
    assert store.incarnation == 8 and store._saver.committed_step == -1

    def refuse() -> None:
        raise CheckpointError("it is another model's", remedy="")

    calls.clear()
    with pytest.raises(CheckpointError):
        store.adopt({}, theirs, reason="replaced", check=refuse)
    assert store.incarnation == 8 and not any(call[0] == "begun" for call in calls)


def test_checkpoints_are_marked_after_every_save_is_over_and_copies_learn_of_it(
    store: Store, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "mark_suspects", lambda *told, **more: (told, more))
    assert store.mark_suspects(clean_step=5, why="other bits") == ["a"]
    marking = ((store._rundir, (Saved(4), Saved(6))), {"clean_step": 5, "why": "other bits"})
    assert calls == [("waited",), ("marked", marking), ("woken",)]
    store._backup = None
    calls.clear()
    assert store.mark_suspects(clean_step=5, why="other bits") == ["a"] and len(calls) == 2


@pytest.mark.parametrize(
    ("error", "wait_s", "removes"),
    [
        (None, None, True),
        (ValueError("x"), ABORT_S, False),
        (RankLost("rank 3", remedy=""), LOST_RANK_S, False),
        (ReportedElsewhere(), ABORT_S, False),
    ],
)
def test_after_an_error_saves_are_waited_for_a_moment_and_what_memory_holds_stays(
    error: BaseException | None, wait_s: float | None, removes: bool, store: Store, calls: Calls
) -> None:
    with store as entered:
        assert entered is store
        calls.clear()
        store.__exit__(type(error) if error else None, error, None)
        found = list(calls)
    assert found == [("saver closed", {"wait_s": wait_s, "remove_replicas": removes}), ("copies closed",)]


def test_a_store_that_is_closed_releases_its_writer_and_its_copies(store: Store, calls: Calls) -> None:
    store.close(wait_s=2.5)
    assert calls == [("saver closed", {"wait_s": 2.5}), ("copies closed",)]


def test_a_save_reads_other_settings_once_they_were_replaced(store: Store, calls: Calls) -> None:
    store.section = "other"  # type: ignore[assignment]
    assert store.section == "other" and calls == [("followed", "other")]


def test_whether_a_run_can_go_back_to_a_step_is_asked_once_its_saves_are_over(
    store: Store, calls: Calls
) -> None:
    assert store.reaches_back_to(4) and calls == [("waited",)]
    store._backup = None
    assert not store.reaches_back_to(3)


def test_who_writes_the_state_waits_for_the_save_that_reads_it(store: Store, calls: Calls) -> None:
    store._saver.wait_staged = lambda: calls.append(("staged",))  # type: ignore[method-assign]
    store.wait_staged()
    store.remove_copy(Path("copy"))
    assert calls == [("staged",), ("removed", Path("copy"))]


def test_a_checkpoint_that_is_passed_over_is_named_with_what_is_wrong_with_it(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def load(source: Any, parts: Any) -> Restored:
        if source[1] == "newest":
            raise DamagedCheckpoint("a bit flipped")
        return RESTORED

    store._load = load  # type: ignore[method-assign,assignment]
    names = [["", "newest"], ["", "older"]]
    assert store._first_that_loads(names, {}, up_to_step=None, fallback=True) is RESTORED
    assert "newest was passed over: a bit flipped" in caplog.text


def test_at_a_start_who_went_on_elsewhere_is_told_and_suspects_are_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, asked = list[Any](), list[Any]()
    newer: Any = SimpleNamespace(place=lambda: "s3://b", name="step-000009.i003")
    store._backup = SimpleNamespace(newer=lambda: [newer])  # type: ignore[assignment]
    monkeypatch.setattr(checkpoint_store, "tell_of_newer", lambda *given, here: told.append((*given, here)))
    trusted = checkpoint_store.trusted

    def noted(items: Any, *, warns: bool) -> Any:
        asked.append(warns)
        return trusted(items, warns=warns)

    monkeypatch.setattr(checkpoint_store, "trusted", noted)
    assert store._restorable(None)[0] == ["s3://b", "step-000009.i003"]
    assert told == [([newer], Saved(6).name)] and asked == [True]


def test_a_checkpoint_is_read_where_it_is(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "place_at", lambda url: f"place of {url}")
    monkeypatch.setattr(checkpoint_store, "RemoteCheckpoint", lambda *told: told)
    assert store._source("", "step-000004.i001") == ("here", "step-000004.i001")
    assert store._source("s3://bucket/x", "x") == ("place of s3://bucket/x", "")


def test_the_newest_whole_checkpoint_is_looked_for_among_those_that_are_here(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def newest_intact(items: Any) -> Any:
        asked.append([item.step for item in items])
        return Saved(4) if asked[-1] else None

    monkeypatch.setattr(checkpoint_store, "newest_intact", newest_intact)
    assert store._newest_intact(["elsewhere", Saved(6).name, Saved(4).name]) == Saved(4).name
    assert store._newest_intact(["elsewhere"]) == ""
    assert asked == [[6, 4], []]


@pytest.mark.parametrize(
    ("readers", "is_ours", "intact"), [(None, True, {"x"}), ({}, True, set()), (None, False, set())]
)
def test_what_was_read_whole_from_the_disk_of_the_run_is_known_to_be_intact(
    readers: Any, is_ours: bool, intact: set[str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    manifest = SimpleNamespace(step=6, incarnation=2, about={"loss": 2.5})
    monkeypatch.setattr(checkpoint_store, "collect", lambda parts: SimpleNamespace(entries="entries"))
    monkeypatch.setattr(
        checkpoint_store,
        "load_checkpoint",
        lambda source, entries, **told: loaded.append((source, entries, told)) or {"model": {"a": 1}},
    )
    monkeypatch.setattr(checkpoint_store, "read_manifest", lambda source: manifest)
    store._rundir = SimpleNamespace(checkpoints=Path("run/checkpoints"))  # type: ignore[assignment]
    store._intact = set()
    source: Any = SimpleNamespace(name="x", place=lambda: "the place")
    values: list[Any] = []
    parts: Any = {"model": SimpleNamespace(load_state_values=values.append)}
    assert store._load(source, parts, readers=readers, is_ours=is_ours) == Restored(
        step=6,
        incarnation=2,
        directory=Path("run/checkpoints/x"),
        values={"model": {"a": 1}},
        about={"loss": 2.5},
    )
    assert loaded == [(source, "entries", {"ranks": store._ranks, "readers": readers})]
    assert values == [{"a": 1}] and store._intact == intact
    store._intact.clear()
    with pytest.raises(
        CheckpointError, match="the place holds nothing of 'outer', which this run has"
    ) as other:
        store._load(source, parts | {"outer": None}, is_ours=True)
    assert "by another version, or with another recipe: use another --run" in other.value.remedy
    assert store._intact == set()


def test_a_backup_is_the_first_ranks_and_what_it_copied_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[Any] = []
    for name in ("Saver", "PeerSnapshots"):
        monkeypatch.setattr(
            checkpoint_store, name, lambda *told, name=name, **more: given.append((name, told, more))
        )
    rundir: Any = SimpleNamespace(checkpoints=tmp_path / "checkpoints", path=tmp_path)
    section: Any = SimpleNamespace(memory_directory="/dev/shm/copies")
    place: Any = SimpleNamespace(url="s3://bucket/run")
    backup: Any = Backup()
    backup.on_all_copied = None
    later = Store(rundir, section, rank=1, world=2, backup=backup, place=place)
    assert later._backup is None and backup.on_all_copied is None
    given.clear()
    gather: Any = object()
    exchange: Any = object()
    first = Store(
        rundir,
        section,
        world=2,
        gather=gather,
        exchange=exchange,
        backup=backup,
        place=place,
        reach_steps=(5,),
    )
    assert first._ranks == Ranks(rank=0, world=2, gather=gather, exchange=exchange)
    assert (first.incarnation, first.reach_steps, first.section) == (0, (5,), section)
    (_, told, more), (_, copies, _) = given
    assert told == (rundir.checkpoints, first._ranks, section)
    assert more == {
        "committed": first._committed,
        "intact": first._intact.add,
        "store": "s3://bucket/run",
    }
    assert copies == (Path("/dev/shm/copies"), tmp_path, first._ranks)

    refusals = [StorageError("the disk is read-only", remedy=""), OSError(116, "Stale file handle")]

    def refuse(run_length_steps: int | None) -> None:
        assert run_length_steps == 250
        raise refusals.pop(0)

    first._run_length_steps = 250
    first._prune = refuse  # type: ignore[method-assign]
    for why in ("the disk is read-only", r"[Errno 116] Stale file handle"):
        backup.on_all_copied()
        assert f"older checkpoints were not removed: {why}" in caplog.text


def test_a_rewind_to_the_beginning_finds_nothing_that_was_made_after_it(store: Store, calls: Calls) -> None:
    store._from_memory = lambda names, parts: pytest.fail("memory holds the newest alone")  # type: ignore[method-assign]
    store._first_that_loads = lambda names, parts, *, up_to_step, fallback: calls.append((names,))  # type: ignore[method-assign,assignment]
    store._backup = None
    assert store.restore({}, reason="rewind: spike", up_to_step=0) is None
    assert ([],) in calls


def test_what_is_saved_beside_the_training_at_once_or_for_peers_is_the_state_of_this_life(
    store: Store, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = SimpleNamespace(values={"guards": {"a": 1}, "train": {"step": 0}})
    monkeypatch.setattr(checkpoint_store, "collect", lambda parts: {"parts": collected}[parts])
    store._saver.save = lambda state: calls.append(("saved", state)) or Path("saved")  # type: ignore[method-assign]
    store._saver.begin = lambda state: calls.append(("begun", state)) or True  # type: ignore[method-assign]
    state = RunStateToSave(
        "parts",  # type: ignore[arg-type]
        step=9,
        values={"train": {"step": 9}, "data": {"text": "x"}},
        about={"loss": 2.5},
        run_length_steps=250,
    )
    assert store.save(state) == Path("saved")
    assert store.begin_save(state) is True and store.copy_for_peers(state) == Path("copy")
    snapshot = StateSnapshot(
        step=9,
        incarnation=5,
        state=collected,  # type: ignore[arg-type]
        values={"guards": {"a": 1}, "train": {"step": 9}, "data": {"text": "x"}},
        about={"loss": 2.5},
        run_length_steps=250,
    )
    assert calls == [("saved", snapshot), ("begun", snapshot), ("added", snapshot)]
