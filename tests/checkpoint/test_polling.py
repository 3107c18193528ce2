"""Ranks that wait for one of them: how often they ask each other, and who is named when one is late."""

from __future__ import annotations

import concurrent.futures
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.checkpoint.format.manifest import DamagedCheckpoint
from bloomery.checkpoint.writer import ranks as ranks_module
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import BloomeryError, CheckpointError, StorageError

OK = {"result": None, "failure": None}


def test_ranks_that_wait_ask_each_other_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, states = list[float](), [False] * 11 + [True]
    gathered: list[Any] = []

    def wait(futures: list[Any], *, timeout: float) -> None:
        waits.append(timeout)

    def gather(value: Any) -> list[Any]:
        gathered.append(value)
        if isinstance(value, dict):
            return [value, {"result": 7, "failure": None}]
        return [[True, ""], [states.pop(0), ""]]

    monkeypatch.setattr(ranks_module, "wait", wait)
    ranks = Ranks(rank=0, world=2, gather=gather)
    assert ranks.poll_on_all(lambda: 4) == [4, 7]
    assert waits == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.0, 5.0, 5.0, 5.0])
    assert gathered[-1] == {"result": 4, "failure": None}


def test_a_rank_names_itself_to_all_once_it_is_past_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[Any]()

    def wait(futures: list[Any], *, timeout: float) -> None:
        now[0] += 30.0

    def gather(value: Any) -> list[Any]:
        said.append(value)
        return [value, [False, ""]]

    class Never:
        def done(self) -> bool:
            return False

    monkeypatch.setattr(ranks_module, "wait", wait)
    monkeypatch.setattr(ranks_module, "Future", Never)
    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(ranks_module, "threading", SimpleNamespace(Thread=lambda **_: thread))
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(StorageError, match="rank 0 has been busy with pruning for 60 s") as late:
        Ranks(rank=0, world=2, gather=gather).poll_on_all(lambda: 4, deadline_s=60.0, doing="pruning")
    assert "dmesg" in late.value.remedy and "What was saved is safe" in late.value.remedy
    assert said == [[False, ""], [False, ""], [False, "pruning for 60 s"]]


def test_a_rank_that_is_done_is_not_late_however_long_it_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, others = [100.0], [False, False, True]

    def wait(futures: list[Any], *, timeout: float) -> None:
        concurrent.futures.wait(futures)
        now[0] += 100.0

    def gather(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [value, {"result": 5, "failure": None}]
        return [value, [others.pop(0), ""]]

    monkeypatch.setattr(ranks_module, "wait", wait)
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks = Ranks(rank=0, world=2, gather=gather)
    assert ranks.poll_on_all(lambda: 4, deadline_s=60.0, doing="pruning") == [4, 5] and others == []


def test_what_is_asked_of_the_first_rank_no_other_one_does() -> None:
    def gather(value: Any) -> list[Any]:
        return [{"result": 4, "failure": None} if isinstance(value, dict) else [True, ""], value]

    second, done = Ranks(rank=1, world=2, gather=gather), list[int]()
    assert second.poll_on_first(lambda: done.append(1)) == 4 == second.run_on_first(lambda: done.append(1))
    assert done == []


@pytest.mark.parametrize(
    "error",
    [
        DamagedCheckpoint("a block is wrong"),
        StorageError("it is full", remedy="make room"),
        CheckpointError("another model", remedy="take its own"),
    ],
)
def test_an_error_is_raised_as_it_is_on_its_rank_and_by_its_kind_on_the_others(error: BloomeryError) -> None:
    said: list[Any] = []

    def act() -> None:
        raise error

    with pytest.raises(type(error)) as own:
        Ranks(rank=1, world=2, gather=lambda value: said.append(value) or [OK, value]).run_on_all(act)
    assert own.value is error
    failed = {"result": None, "failure": {"kind": "", "message": "another", "remedy": ""}}
    with pytest.raises(type(error)) as own:
        Ranks(rank=1, world=2, gather=lambda value: [failed, value]).run_on_all(act)
    assert own.value is error, "each rank tells what it knows best"
    with pytest.raises(BloomeryError) as other:
        Ranks(rank=0, world=2, gather=lambda value: [value, *said]).run_on_all(lambda: 4)
    assert type(other.value) is type(error)
    assert (other.value.message, other.value.remedy) == (f"rank 1: {error.message}", error.remedy)


def test_whatever_ends_the_work_of_a_rank_ends_its_wait() -> None:
    def act() -> None:
        raise SystemExit(3)

    def gather(value: Any) -> list[Any]:
        return [value, OK if isinstance(value, dict) else [True, ""]]

    with pytest.raises(SystemExit):
        Ranks(rank=0, world=2, gather=gather).poll_on_all(act, deadline_s=20.0)
