"""Which jobs of SLURM are a run's, what helps one that is held, and how a job of one machine begins."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.operate.test_scheduler_texts import asked
from tests.operate.test_scheduler_words import line

from bloomery.operate.run_state import RunObservation, RunStatus, judge_state
from bloomery.operate.schedulers.interface import JobState
from bloomery.operate.schedulers.machine import OneMachine
from bloomery.operate.schedulers.slurm import Slurm, parse_job, state_of


def test_jobs_are_found_by_whichever_links_lead_to_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch" / "seven"
    scratch.mkdir(parents=True)
    (tmp_path / "home").symlink_to(scratch.parent)
    answer = "\n".join([line("1", f"bloomery:{scratch}"), line("2", f"{scratch}"), line("3", "bloomery:/r")])

    def answered(*_: Any, **__: Any) -> str:
        return answer

    slurm = Slurm({})
    monkeypatch.setattr(slurm, "_run", answered)
    for run in (scratch, tmp_path / "home" / "seven", scratch / ".." / "seven"):
        assert [job.job for job in slurm.jobs(name="seven", run=run)] == ["1"], run


@pytest.mark.parametrize("word", ["RESV_DEL_HOLD", "SPECIAL_EXIT", "REQUEUE_HOLD"])
def test_a_job_whose_reservation_was_deleted_waits_and_has_not_failed(word: str) -> None:
    assert state_of(word, "ReservationDeleted") == JobState.HELD


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("PENDING", "JobHeldUser"),
        ("PENDING", "launch failed requeued held"),
        ("REQUEUE_HOLD", "job requeued in held state"),
        ("REQUEUE_HOLD", "None"),
    ],
)
def test_each_job_that_slurm_holds_is_shown_with_the_command_that_releases_it(word: str, reason: str) -> None:
    job, _ = parse_job(line("7", "bloomery:/r", state=word, reason=reason))
    verdict = judge_state(RunObservation(jobs=(job,)))
    assert (verdict.state, verdict.remedy) == (RunStatus.HELD, "scontrol release 7")


def test_an_environment_that_reads_what_nobody_has_set_ends_no_job_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "activate").write_text('OLD="$NOBODY_HAS_SET_THIS"\n')
    request = asked(section={"setup": (f"source {tmp_path}/activate",)}, command=("echo", "trains"))
    script = OneMachine(tmp_path).script(request)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "trains\n"), done.stderr
