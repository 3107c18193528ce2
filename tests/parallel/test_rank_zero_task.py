"""Work of the first rank that others wait for: hours if need be, and not for ever."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore

from bloomery.errors import DataError, RankLost, ReportedElsewhere
from bloomery.events.timeouts import RANK_ZERO_SILENCE_S, RANK_ZERO_STALL_S
from bloomery.parallel import rank_zero_task
from bloomery.parallel.rank_zero_task import (
    ReportProgress,
    TaskStatus,
    run_as_rank_zero,
    wait_for_rank_zero,
)

KEY, DOING = "rank_zero_task/0", "preparing the data"
EVERY_S = 100.0


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Iterator[TaskStatus]], None]:
    """Waits on a clock of its own, on which the first rank gives its next status every 100 s."""

    def waits(statuses: Iterator[TaskStatus]) -> None:
        store, now = FileStore(str(tmp_path / "store"), 1), [0.0]

        def sleep(_: float) -> None:
            now[0] += EVERY_S
            status = next(statuses, None)
            if status is not None:
                store.set(KEY, json.dumps(asdict(status)))

        monkeypatch.setattr(rank_zero_task, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        wait_for_rank_zero(store, KEY, doing=DOING)

    return waits


@pytest.mark.parametrize("grows", ["steps", "processor_s"])
def test_whoever_gets_on_is_waited_for_for_hours(
    wait: Callable[[Iterator[TaskStatus]], None], grows: str
) -> None:
    count = int(10 * RANK_ZERO_STALL_S / EVERY_S)
    usual = {"steps": 0, "processor_s": 0}
    statuses = [TaskStatus(count=number, **(usual | {grows: number // 30})) for number in range(1, count)]
    wait(iter([*statuses, TaskStatus(count=-1, outcome="done", **usual)]))


def test_whoever_lives_and_does_not_get_on_is_given_up_and_named(
    wait: Callable[[Iterator[TaskStatus]], None],
) -> None:
    statuses = (TaskStatus(count=number, steps=3, processor_s=4) for number in range(1, 10**6))
    with pytest.raises(RankLost) as given_up:
        wait(statuses)
    assert given_up.value.message == (
        "Rank 0, which was preparing the data, is alive, but has made no progress for "
        f"{RANK_ZERO_STALL_S:.0f} s."
    )
    assert given_up.value.remedy == (
        "Look what it waits for: a disk or a network that does not answer, perhaps."
    )


@pytest.mark.parametrize("statuses", [0, 5])
def test_whoever_falls_silent_is_given_up_and_named(
    wait: Callable[[Iterator[TaskStatus]], None], statuses: int
) -> None:
    given = (TaskStatus(count=number, steps=number, processor_s=0) for number in range(1, statuses + 1))
    silence = f"no sign of life for {RANK_ZERO_SILENCE_S:.0f} s"
    with pytest.raises(RankLost) as given_up:
        wait(given)
    assert given_up.value.message == f"Rank 0, which was preparing the data, has given {silence}."
    assert given_up.value.remedy == "Look at its log and its machine. The same command goes on."


def test_a_status_that_comes_within_the_time_for_silence_is_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, now = FileStore(str(tmp_path / "store"), 1), [0.0]
    seconds = iter([RANK_ZERO_SILENCE_S] * 3)

    def sleep(_: float) -> None:
        now[0] += next(seconds)
        count = int(now[0] / RANK_ZERO_SILENCE_S)
        status = TaskStatus(count=count, steps=count, processor_s=0, outcome="done" if count == 3 else "")
        store.set(KEY, json.dumps(asdict(status)))

    monkeypatch.setattr(rank_zero_task, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    wait_for_rank_zero(store, KEY, doing=DOING)


def test_whoever_waits_says_that_the_store_is_gone() -> None:
    def check(keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")

    store: Any = SimpleNamespace(check=check)
    with pytest.raises(RankLost, match="The store where the ranks meet is gone"):
        wait_for_rank_zero(store, KEY, doing=DOING)


def test_whoever_waits_asks_less_often_with_time_and_at_least_every_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, pauses = FileStore(str(tmp_path / "store"), 1), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 30:
            store.set(KEY, json.dumps(asdict(TaskStatus(count=-1, steps=0, processor_s=0, outcome="done"))))

    monkeypatch.setattr(rank_zero_task, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    wait_for_rank_zero(store, KEY, doing=DOING)
    assert len(pauses) == 30 and pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.02, 1.0)


def test_what_the_first_made_is_its_own_and_the_others_go_on(tmp_path: Path) -> None:
    def task(report_progress: ReportProgress) -> str:
        report_progress()
        return "made"

    assert both(tmp_path, task) == ["made", None]


def test_when_the_first_fails_it_says_why_and_the_others_end_without_a_word(tmp_path: Path) -> None:
    def task(report_progress: ReportProgress) -> str:
        raise DataError("nowhere.txt does not exist")

    first, second = both(tmp_path, task)
    assert isinstance(first, DataError) and isinstance(second, ReportedElsewhere)


def both(directory: Path, task: Callable[[ReportProgress], str]) -> list[object]:
    """What became of two ranks."""

    def one(rank: int) -> object:
        store = FileStore(str(directory / "store"), 2)
        try:
            return (
                run_as_rank_zero(store, KEY, task)
                if rank == 0
                else wait_for_rank_zero(store, KEY, doing=DOING)
            )
        except (DataError, ReportedElsewhere) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_a_status_that_was_on_its_way_when_the_task_ended_does_not_hide_its_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, began, is_told = list[str](), threading.Event(), threading.Event()
    times = os.times

    def slow_for_the_status() -> os.times_result:
        if threading.current_thread().name == "slow":
            began.set()
            is_told.wait(60)
        return times()

    def keep(key: str, value: str) -> None:
        written.append(json.loads(value)["outcome"])
        is_told.set()

    store: Any = SimpleNamespace(set=keep)
    monkeypatch.setattr(rank_zero_task.os, "times", slow_for_the_status)
    assert run_as_rank_zero(store, "slow", lambda report_progress: began.wait(60))
    for thread in threading.enumerate():
        if thread.name == "slow":
            thread.join()
    assert written == ["done"]
