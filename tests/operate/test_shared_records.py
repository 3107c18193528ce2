"""The record of a run that several processes write: each waits for the others, so that no line is torn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery import durable
from bloomery.events import journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.node_facts import NodeFacts
from bloomery.operate.start_check import StartCheck
from bloomery.operate.submission import note_cancelled
from bloomery.operate.supervise import supervise


def check(run: RunDirectory) -> None:
    made = StartCheck(gpus=0, disk_gb=0.0, environment={})
    made.unfit_hosts(run, {"n1": NodeFacts(host="n1")}, say=print, reactions=None)


@pytest.mark.parametrize(
    "write",
    [
        check,
        lambda run: note_cancelled(run, ["7"]),
        lambda run: supervise(run, lambda watch: 0, world=1, host="n1", say=print),
    ],
    ids=["a start", "a person", "a supervisor"],
)
def test_whoever_writes_to_the_operations_of_a_run_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[RunDirectory], object]
) -> None:
    run, waited = RunDirectory(tmp_path / "run").create(), list[int]()

    def wait_for_lock(file: int, *, timeout_s: float) -> bool:
        waited.append(file)
        return durable.try_lock(file)

    monkeypatch.setattr(journal.durable, "wait_for_lock", wait_for_lock)
    write(run)
    assert len(waited) >= len(run.operations.read_text().splitlines()) > 0
