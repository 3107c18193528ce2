"""Following a training with tasks: when there is nothing more to wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.cli.evaluate_tasks import _has_ended
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("events", "ended"),
    [
        ([("start", {})], False),
        ([("start", {}), ("end", {"finished": False})], False),
        ([("start", {}), ("end", {"finished": True})], True),
        ([("start", {}), ("end", {"finished": True}), ("start", {})], False),
    ],
)
def test_a_job_that_was_stopped_is_not_the_end_of_the_run(
    tmp_path: Path, events: list[tuple[str, dict[str, bool]]], ended: bool
) -> None:
    rundir = RunDirectory(tmp_path).create()
    with Journal(rundir.journal()) as journal:
        for name, fields in events:
            journal.write(name, incarnation=1, step=0, **fields)
    assert _has_ended(rundir) is ended
