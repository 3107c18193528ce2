"""What a state says of a cancelled job, and of an error that ended a rank."""

from __future__ import annotations

from dataclasses import replace

from tests.operate.test_run_state import JOB, NOW, rank, verdict

from bloomery.errors import DataError, remedy_in
from bloomery.operate.run_state import RunStatus
from bloomery.operate.schedulers.interface import JobState


def test_a_bare_scancel_is_told_as_long_as_the_scheduler_knows_of_it() -> None:
    killed = replace(JOB, state=JobState.ENDED, state_text="CANCELLED", ends=NOW - 60.0)
    said = "; the scheduler says that somebody cancelled job 712"
    gone = verdict(rank(wrote_s_ago=61.0), job=killed)
    assert gone.state == RunStatus.GONE and gone.why.endswith(f"no `end` in the journal{said}")
    over = {"event": "end", "time": NOW - 60.0, "reason": "signal SIGTERM"}
    stopped = verdict(job=killed, last=over)
    assert stopped.why == f"saved and stopped: signal SIGTERM; nothing is queued{said}"
    well = replace(killed, state_text="COMPLETED")
    assert verdict(job=well, last=over).why == "saved and stopped: signal SIGTERM; nothing is queued"


def test_an_error_of_ours_helps_with_its_own_remedy_and_one_of_a_library_does_not() -> None:
    error = DataError("train.bin is damaged.", remedy="Copy it again.")
    told = f"DataError: {error}"
    seen = verdict(rank(wrote_s_ago=900.0, error=told), job=None, path="runs/a")
    assert seen.why == "DataError: train.bin is damaged."
    assert seen.remedy.startswith("Copy it again. Then bloomery submit runs/a, or ")
    foreign = verdict(rank(wrote_s_ago=900.0, error="RuntimeError: broke\n  at line 7"), job=None)
    assert foreign.remedy.startswith("bloomery submit")
    assert remedy_in("DataError: no remedy") == remedy_in("") == ""


def test_a_run_that_a_guard_stopped_is_told_how_to_go_on_from_an_earlier_checkpoint() -> None:
    over = {"event": "end", "time": NOW - 60.0, "failed": True, "reason": "diverging"}
    stopped = verdict(job=None, last=over, path="runs/a")
    assert (stopped.state, stopped.why) == (RunStatus.FAILED, "diverging")
    assert stopped.remedy.startswith(
        "bloomery rewind runs/a --to-step STEP (bloomery ckpt list runs/a), or other"
    )
    assert "bloomery submit runs/a" in stopped.remedy
