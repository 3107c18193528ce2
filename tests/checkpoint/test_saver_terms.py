"""When a saver saves beside the training, what it orders, and what it does where a rank cannot."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.checkpoint.test_save_and_load_steps import NAME, snapshot

from bloomery.checkpoint.format.commit import partial_directory
from bloomery.checkpoint.format.deadlines import Deadlines
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.state import SaveResult
from bloomery.checkpoint.save import saver as saver_module
from bloomery.checkpoint.save.saver import Saver
from bloomery.checkpoint.save.staging import PendingSave
from bloomery.checkpoint.save.write_plan import WritePlanner
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import StorageError


class Background:
    """A stand-in for the saver beside the training: it notes what it is asked, and answers as it is told."""

    def __init__(self) -> None:
        self.bytes, self.is_busy, self.throttled = 1 << 30, False, True
        self.under_way: list[str] = []
        self.refusal: str | None = None
        self.late: list[str] = []
        self.outcomes: dict[str, str] = {}
        self.carried: list[str] = []
        self.check = SimpleNamespace(take=lambda: self.outcomes, given_up=0, carry_to_end=self.carried.append)
        self.asked: list[tuple[str, Any]] = []
        self.orders: list[dict[str, Any]] = []

    def unavailable_reason(self) -> str | None:
        return self.refusal

    def endpoint(self) -> tuple[str, int]:
        return "here", 7

    def begin(self, entries: object, plan: object, **how: Any) -> Any:
        self.orders.append({"entries": entries, "plan": plan, **how})
        unused: Any = None
        return PendingSave(
            name=how["name"],
            step=how["step"],
            order=how["order"],
            run_length_steps=how["run_length_steps"],
            plan=unused,
            texts={},
            buffer=0,
            pace=unused,
            window_s=0.0,
            deadlines=unused,
        )

    def wait(self, *, deadline_s: float) -> list[str]:
        self.asked.append(("wait", deadline_s))
        return self.late

    def wait_staged(self) -> None:
        self.asked.append(("staged", None))

    def close(self) -> None:
        self.asked.append(("close", None))

    def remove_replicas(self) -> None:
        self.asked.append(("remove", None))

    def run_in_save_thread(self, act: Any) -> None:
        self.asked.append(("run", None))
        act()


class Told:
    """A saver with a stand-in beside it. facts: what the second of two ranks differs in, if there is one."""

    def __init__(self, directory: Path, *, others: list[dict[str, Any]] | None = None, rank: int = 0) -> None:
        self.committed, self.intact = list[tuple[str, int | None]](), list[str]()
        self.others = others or []
        self.ranks = Ranks(rank=rank, world=1 + len(self.others), gather=self._gather)
        self.saver = Saver(
            directory,
            self.ranks,
            CheckpointSection(),
            committed=lambda *what: self.committed.append(what),
            intact=self.intact.append,
        )
        self.background: Any = Background()
        self.saver._background = self.background
        self.directory = directory

    def _gather(self, value: Any) -> list[Any]:
        more = [
            {**value, **other} if isinstance(value, dict) and "layout" in value else value
            for other in self.others
        ]
        return [*more[: self.ranks.rank], value, *more[self.ranks.rank :]]


def test_an_order_says_where_who_and_what_and_its_texts_are_as_the_state_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "now", lambda: 5.0)
    told = Told(tmp_path)
    given = snapshot(1.0)
    assert told.saver.begin(given)
    (order,) = told.background.orders
    planner = WritePlanner(Ranks(), file_bytes=1 << 30)
    plan = planner.agree(given.state.entries, [planner.digest(given.state.entries)])
    size = plan.file_bytes
    assert order == {
        "entries": given.state.entries,
        "plan": plan,
        "step": 3,
        "name": NAME,
        "run_length_steps": 77,
        "order": {
            "partial": str(partial_directory(tmp_path, step=3, incarnation=2)),
            "store": "",
            "rank": 0,
            "world": 1,
            "time": 5.0,
            "checkpoint": {"step": 3, "incarnation": 2, "about": {"told": 1}},
        },
        "texts": {"values": json.dumps({"train": {"position": 9}}), "boxes": plan.boxes},
        "deadlines": Deadlines(part_bytes=size, largest_part_bytes=size),
        "partner": None,
    }
    assert partial_directory(tmp_path, step=3, incarnation=2).is_dir()


def test_all_ranks_read_the_next_checkpoint_back_to_its_end_after_one_has_given_up(tmp_path: Path) -> None:
    other = {"given_up": 0}
    told = Told(tmp_path, others=[other])
    for step, given_up in ((3, 0), (4, 1), (5, 1), (6, 4)):
        other["given_up"] = given_up
        assert told.saver.begin(snapshot(1.0, step=step))
    assert told.background.carried == ["step-000004.i002", "step-000006.i002"]
    told.background.is_busy, other["given_up"] = True, 5
    assert not told.saver.begin(snapshot(1.0, step=7))
    told.background.is_busy = False
    assert told.saver.begin(snapshot(1.0, step=8)) and told.background.carried[2:] == ["step-000008.i002"]


def test_a_rank_is_given_the_address_of_its_partner_and_of_nobody_else(tmp_path: Path) -> None:
    told = Told(tmp_path, others=[{"endpoint": ["there", 8]}, {"endpoint": None}])
    for partner, expected in ((0, None), (1, ["there", 8]), (2, None)):
        told.saver._partner = partner
        assert told.saver.begin(snapshot(1.0, step=partner + 1))
        assert told.background.orders[-1]["partner"] == expected


def test_no_save_begins_while_a_rank_is_busy_or_the_same_one_is_under_way(tmp_path: Path) -> None:
    told = Told(tmp_path, others=[{"is_busy": True}])
    assert not told.saver.begin(snapshot(1.0)) and told.background.orders == []
    told.others[:] = [{"under_way": [NAME]}]
    assert not told.saver.begin(snapshot(1.0)) and told.background.orders == []
    told.others[:] = [{"under_way": ["step-000009.i002"]}]
    assert told.saver.begin(snapshot(1.0)) and len(told.background.orders) == 1
    assert told.saver.take_background_failures() == []


def test_what_is_saved_already_is_not_saved_again_and_its_directory_stays(tmp_path: Path) -> None:
    saved = Told(tmp_path)
    saved.saver._background = None
    saved.saver.save(snapshot(1.0))
    told = Told(tmp_path)
    before = (tmp_path / NAME / "manifest.json").read_bytes()
    assert told.saver.begin(snapshot(2.0)) and told.background.orders == []
    assert told.saver.take_save_results() == [SaveResult(step=3, name=NAME)]
    assert (tmp_path / NAME / "manifest.json").read_bytes() == before


def degraded(told: Told, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    saved: list[Any] = []
    monkeypatch.setattr(told.saver, "save", saved.append)
    given = snapshot(1.0)
    assert told.saver.begin(given) and saved == [given] and told.background.orders == []
    assert told.saver.background is None and [what for what, _ in told.background.asked] == ["wait", "close"]
    return told.saver.take_background_failures()


def test_ranks_that_cannot_save_beside_the_training_are_named_and_all_save_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(tmp_path, others=[{"refusal": "no memory"}, {}, {"refusal": "no process"}])
    why = ["rank 1: no memory; rank 3: no process"]
    assert degraded(told, monkeypatch) == why and told.saver.take_background_failures() == []
    assert f"the training waits for each save: {why[0]}" in caplog.text
    many = Told(tmp_path, others=[{"refusal": f"no {number}"} for number in range(5)])
    assert degraded(many, monkeypatch) == ["rank 1: no 0; rank 2: no 1; rank 3: no 2"]


def test_a_state_that_fits_its_memory_to_the_byte_is_saved_and_one_byte_more_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = WritePlanner(Ranks(), file_bytes=1 << 30)
    entries = snapshot(1.0).state.entries
    needed = planner.agree(entries, [planner.digest(entries)]).bytes
    told = Told(tmp_path)
    told.background.bytes = needed
    assert told.saver.begin(snapshot(1.0)) and len(told.background.orders) == 1
    small = Told(tmp_path)
    small.background.bytes = needed - 1
    assert degraded(small, monkeypatch) == [
        f"rank 0: its state has grown to {needed:,} bytes, beyond the memory taken"
    ]
    other = Told(tmp_path, others=[{"buffer_bytes": 0, "refusal": "no memory"}])
    monkeypatch.setattr(WritePlanner, "buffer_bytes", [1, 1], raising=False)
    assert degraded(other, monkeypatch) == ["rank 1: no memory"], "its size is not the reason"


def test_older_checkpoints_go_when_all_ranks_have_read_a_newer_one_back(tmp_path: Path) -> None:
    told = Told(tmp_path, others=[{"read_back": {"a": "", "b": "", "c": "damaged"}}])
    told.background.outcomes = {"a": "", "b": "", "c": ""}
    told.saver.begin(snapshot(1.0))
    assert told.intact == ["a", "b"] and told.committed == [("b", 77)]
    assert told.background.asked == [("run", None)]
    told.background.outcomes = {}
    told.others[:] = [{"read_back": {}}]
    told.saver.begin(snapshot(1.0, step=4))
    assert told.committed == [("b", 77)]


@pytest.mark.parametrize("is_busy", [False, True])
def test_older_checkpoints_go_after_a_save_has_begun_and_also_where_none_can(
    tmp_path: Path, is_busy: bool
) -> None:
    told = Told(tmp_path)
    told.background.is_busy, told.background.outcomes = is_busy, {"a": ""}
    begun: list[int] = []
    told.background.run_in_save_thread = lambda act: (begun.append(len(told.background.orders)), act())
    assert told.saver.begin(snapshot(1.0)) is not is_busy
    assert told.committed == [("a", 77)] and begun == [0 if is_busy else 1]


def test_a_save_that_ended_is_told_with_how_it_ended_and_what_failed_is_cleared(tmp_path: Path) -> None:
    told, failure = Told(tmp_path), StorageError("no space", remedy="")
    for step in (3, 4, 5):
        told.saver.begin(snapshot(1.0, step=step))
    first, second, third = told.saver._pending
    first.seconds, first.bytes, second.failure = 2.5, 700, failure
    for saving in (first, second):
        saving.over.set()
    assert told.saver.take_save_results() == [
        SaveResult(step=3, name=first.name, seconds=2.5, bytes=700),
        SaveResult(step=4, name=second.name, failure=failure),
    ]
    assert told.saver._pending == [third]
    partials = [Path(saving.order["partial"]) for saving in (first, second, third)]
    assert all(path.is_dir() for path in partials)
    told.others[:] = []
    told.background.under_way = [second.name]
    told.saver.begin(snapshot(1.0, step=6))
    assert partials[1].is_dir(), "a rank still writes there"
    told.background.under_way = []
    told.saver.begin(snapshot(1.0, step=7))
    assert [path.is_dir() for path in partials] == [True, False, True]
    assert told.saver._failed_partials == set()
    told.saver._pending[-1].failure = failure
    told.saver._pending[-1].over.set()
    left = Path(told.saver._pending[-1].order["partial"])
    assert left.is_dir() and told.saver.wait_for_saves() == -1 and not left.exists()


def test_the_end_of_a_run_waits_as_long_as_it_was_told_and_names_what_is_late(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for wait_s, removes, expected in (
        (None, True, 2 * (2 * 300 + 60 + 60 + 60) + 660),
        (2.5, False, 2.5),
        (0.0, False, 0.0),
    ):
        told = Told(tmp_path)
        told.background.late = ["a", "b"]
        told.saver.close(wait_s=wait_s, remove_replicas=removes)
        asked = [("wait", expected), ("close", None), ("remove", None)]
        assert told.background.asked == asked[: 3 if removes else 2] and told.saver.background is None
        assert caplog.messages == ["not saved, because the run ends: a, b"]
        caplog.clear()
        told.saver.close()
        assert len(told.background.asked) == (3 if removes else 2)


def test_a_save_that_does_not_end_is_an_error_with_its_name_and_the_time(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.background.late = ["a", "b"]
    with pytest.raises(StorageError, match=r"Saving a, b took longer than 2,220 s(?s:.*)are untouched"):
        told.saver.wait_for_saves()
    told.background.late = []
    told.saver.committed_step = 9
    assert told.saver.wait_for_saves() == 9
    told.saver.wait_staged()
    assert told.background.asked[-1] == ("staged", None)
    told.saver.follow(CheckpointSection(throttle=False))
    assert told.background.throttled is False


def test_the_newest_checkpoint_is_the_one_that_the_first_rank_knows(tmp_path: Path) -> None:
    told = Told(tmp_path, others=[{}], rank=1)
    told.saver._ranks = replace(
        told.ranks, gather=lambda value: [5, value] if isinstance(value, int) else told._gather(value)
    )
    told.saver.committed_step = 9
    assert told.saver.wait_for_saves() == 5


def test_a_save_that_is_waited_for_raises_its_own_failure_and_no_others(tmp_path: Path) -> None:
    told, failure = Told(tmp_path), StorageError("no space", remedy="")
    told.saver.begin(snapshot(1.0, step=8))
    told.saver._pending[0].failure = StorageError("another's", remedy="")

    def begin(entries: object, plan: object, **how: Any) -> Any:
        return SimpleNamespace(name=how["name"], over=threading.Event(), failure=failure, order=how["order"])

    told.background.begin = begin
    with pytest.raises(StorageError, match="no space"):
        told.saver.save(snapshot(1.0))


def test_a_save_that_is_waited_for_begins_when_those_before_it_are_over(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.background.is_busy = True

    def wait(*, deadline_s: float) -> list[str]:
        told.background.is_busy = False
        return []

    told.background.wait = wait
    assert told.saver.save(snapshot(1.0)) == tmp_path / NAME
    assert [order["name"] for order in told.background.orders] == [NAME]


def test_what_failed_is_cleared_by_the_first_rank_alone(tmp_path: Path) -> None:
    for rank, is_left in ((0, False), (1, True)):
        told = Told(tmp_path, others=[{}], rank=rank)
        partial = partial_directory(tmp_path, step=3, incarnation=2)
        partial.mkdir(exist_ok=True)
        assert told.saver.begin(snapshot(1.0))
        (saving,) = told.saver._pending
        saving.failure = StorageError("no space", remedy="")
        saving.over.set()
        told.saver.wait_for_saves()
        assert partial.exists() is is_left


def test_a_save_has_the_time_of_the_largest_part_and_not_of_all(tmp_path: Path) -> None:
    told = Told(tmp_path, others=[{}, {}])
    assert told.saver.begin(snapshot(1.0))
    (order,) = told.background.orders
    size = order["plan"].file_bytes
    assert order["deadlines"] == Deadlines(part_bytes=size, largest_part_bytes=size)
    told = Told(tmp_path, others=[{}, {}], rank=1)
    told.saver._planner.file_bytes = [100, 7, 300]
    told.saver._update_deadlines()
    assert told.saver._deadlines == Deadlines(part_bytes=7, largest_part_bytes=300)


def test_a_save_at_once_bounds_how_long_the_first_rank_reads_back_and_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: dict[str, float] = {}
    poll = Ranks.poll_on_all

    def watched(
        ranks: Ranks, act: Any, *, deadline_s: float = inf, doing: str = "", **more: Any
    ) -> list[Any]:
        bounds[doing] = deadline_s
        return poll(ranks, act, deadline_s=deadline_s, doing=doing, **more)

    monkeypatch.setattr(Ranks, "poll_on_all", watched)
    told = Told(tmp_path)
    told.saver._background = None
    told.saver.save(snapshot(1.0))
    (size,) = told.saver._planner.file_bytes
    prune_s = Deadlines(part_bytes=size, largest_part_bytes=size).prune_s
    assert bounds[f"reading back {NAME}"] == bounds[f"pruning after {NAME}"] == prune_s


def test_room_is_asked_for_all_parts_of_a_save_before_it_begins(tmp_path: Path) -> None:
    told, asked = Told(tmp_path, others=[{}, {}]), list[tuple[Path, int]]()
    told.saver._place.begin = lambda partial, *, bytes: asked.append((partial, bytes))  # type: ignore[method-assign]
    assert told.saver.begin(snapshot(1.0))
    size = told.background.orders[0]["plan"].file_bytes
    assert asked == [(partial_directory(tmp_path, step=3, incarnation=2), 3 * size)]


def test_what_a_failed_save_at_once_left_goes_by_the_first_rank_alone(tmp_path: Path) -> None:
    def fail(*where: object, **how: object) -> None:
        raise StorageError("no space", remedy="")

    for rank, is_left in ((0, False), (1, True)):
        told = Told(tmp_path, others=[{}], rank=rank)
        told.saver._background = None
        told.saver._place.write = fail  # type: ignore[method-assign, assignment]
        partial = partial_directory(tmp_path, step=3, incarnation=2)
        partial.mkdir(exist_ok=True)
        with pytest.raises(StorageError, match="no space"):
            told.saver.save(snapshot(1.0))
        assert partial.exists() is is_left


def test_a_rank_that_is_not_the_first_notes_its_step_and_commits_nothing(tmp_path: Path) -> None:
    for rank, committed in ((0, [(NAME, 77)]), (1, [])):
        told = Told(tmp_path, others=[{}], rank=rank)
        saving: Any = SimpleNamespace(step=3, name=NAME, run_length_steps=77)
        told.saver._on_written(saving)
        assert told.committed == committed and told.saver.committed_step == 3


def test_a_save_at_once_makes_the_checkpoint_with_all_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.checkpoint.save.direct.now", lambda: 6.0)
    told = Told(tmp_path)
    told.saver._background = None
    told.saver.save(snapshot(1.0))
    manifest = read_manifest(tmp_path / NAME)
    assert (manifest.step, manifest.incarnation, manifest.time, manifest.world) == (3, 2, 6.0, 1)
    assert manifest.values == {"train": {"position": 9}} and manifest.about == {"told": 1}
    assert told.intact == [NAME] and told.saver.take_save_results() == [SaveResult(step=3, name=NAME)]
