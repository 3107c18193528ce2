"""The one word that a run's state has, from jobs, heartbeats and journals as they can be."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.operate.run_state import RunObservation, RunStatus, RunVerdict, judge_state
from bloomery.operate.schedulers.interface import JobState, QueuedJob
from bloomery.operate.standstill import RankObservation, StandstillLimits

NOW = 1_000_000.0
LIMITS = StandstillLimits(least_s=10.0, unmeasured_s=600.0, ending_s=300.0, silence_s=15.0)
JOB = QueuedJob(job="712", state=JobState.RUNNING, state_text="RUNNING", nodes=("n1",), started=NOW - 1000.0)


def rank(*, wrote_s_ago: float = 1.0, moved_s_ago: float = 1.0, **more: object) -> RankObservation:
    """A rank that was measured to compute for at most a second."""
    usual = {"activity": RankActivity.COMPUTING, "longest_s": {str(RankActivity.COMPUTING): 1.0}}
    beat = RankBeat(time=NOW - wrote_s_ago, **usual | more)  # type: ignore[arg-type]
    return RankObservation(beat=beat, written_s=NOW - wrote_s_ago, moved_s=NOW - moved_s_ago)


def verdict(*ranks: RankObservation, job: QueuedJob | None = JOB, **more: object) -> RunVerdict:
    jobs = () if job is None else (job,)
    seen = RunObservation(jobs=jobs, ranks=dict(enumerate(ranks)), now=NOW, **more)  # type: ignore[arg-type]
    return judge_state(seen, limits=LIMITS)


def test_a_job_whose_ranks_have_not_spoken_is_starting_until_it_has_taken_too_long() -> None:
    young = replace(JOB, started=NOW - 599.0)
    assert verdict(job=young).state == RunStatus.STARTING
    hung = verdict()
    assert (hung.state, hung.job) == (RunStatus.HUNG, JOB)
    assert "17 minutes ago" in hung.why and "712" in hung.remedy
    assert verdict(job=replace(JOB, started=None)).state == RunStatus.STARTING, "nobody says since when"


def test_heartbeats_of_the_job_before_say_nothing_of_this_one() -> None:
    young = replace(JOB, started=NOW - 60.0)
    assert verdict(rank(wrote_s_ago=90.0), job=young).state == RunStatus.STARTING
    assert verdict(rank(wrote_s_ago=2.0), job=young).state == RunStatus.RUNNING


def test_jobs_of_a_time_that_is_still_to_come_hide_no_process_that_lives() -> None:
    """The clock was set back by an hour since they started, or ended."""
    runs = replace(JOB, started=NOW + 3600.0)
    assert verdict(rank(), job=runs).state == RunStatus.RUNNING
    assert verdict(rank(moved_s_ago=50.0), job=runs).state == RunStatus.HUNG
    assert verdict(job=runs).state == RunStatus.STARTING
    over = replace(JOB, state=JobState.ENDED, ends=NOW + 3600.0)
    assert verdict(rank(), job=over).state == RunStatus.RUNNING
    assert verdict(rank(), job=replace(over, ends=NOW + 5.0)).state == RunStatus.GONE, "clocks differ a bit"


def test_a_job_that_goes_on_after_all_its_ranks_have_ended_is_hung_at_last() -> None:
    ended = {"activity": RankActivity.ENDED}
    just = verdict(rank(wrote_s_ago=299.0, **ended), rank(wrote_s_ago=500.0, **ended))
    assert just.state == RunStatus.COMPLETING and "299 s ago" in just.why
    assert verdict(rank(wrote_s_ago=301.0, **ended)).state == RunStatus.HUNG
    assert verdict(rank(wrote_s_ago=301.0, **ended), rank()).state == RunStatus.RUNNING, "one rank lives"


@pytest.mark.parametrize("job", [JOB, None])
def test_ranks_that_write_and_do_not_move_are_hung_with_a_scheduler_and_without(
    job: QueuedJob | None,
) -> None:
    stuck = rank(moved_s_ago=50.0)
    seen = verdict(stuck, stuck, job=job)
    assert seen.state == RunStatus.HUNG and "moved for 50 s (10 s allowed)" in seen.why and seen.remedy
    assert verdict(stuck, rank(), job=job).state == RunStatus.RUNNING
    silent = rank(wrote_s_ago=50.0, moved_s_ago=50.0)
    assert "silent: ranks [0, 1]" in verdict(silent, silent, job=job).why


def test_a_running_job_with_an_armed_switch_is_about_to_stop() -> None:
    seen = verdict(rank(), switch="control/stop (by ann)")
    assert seen.state == RunStatus.COMPLETING and "control/stop (by ann)" in seen.why


def test_a_job_that_waits_says_why_and_when_it_is_expected_to_start() -> None:
    waits = replace(JOB, state=JobState.PENDING, nodes=(), reason="Resources", started=None)
    assert verdict(job=waits).why == "job 712: Resources"
    noon = time.mktime((2031, 5, 6, 12, 0, 0, 0, 0, -1))
    assert verdict(job=replace(waits, expected_start=noon)).why.endswith("start 2031-05-06 12:00")
    soon = replace(waits, reason="", expected_start=time.time())
    assert verdict(job=soon).why == f"job 712: waits, expected to start {time.strftime('%H:%M')}"


def test_a_job_that_runs_decides_before_one_that_waits_and_that_before_one_that_is_held() -> None:
    held = replace(JOB, job="1", state=JobState.HELD, reason="JobHeldUser")
    waits = replace(JOB, job="2", state=JobState.PENDING)
    seen = RunObservation(jobs=(held, waits, JOB), ranks={0: rank()}, now=NOW)
    assert judge_state(seen, limits=LIMITS).state == RunStatus.RUNNING
    assert judge_state(replace(seen, jobs=(held, waits)), limits=LIMITS).state == RunStatus.PENDING
    alone = judge_state(replace(seen, jobs=(held,)), limits=LIMITS)
    assert (alone.state, alone.remedy) == (RunStatus.HELD, "scontrol release 1")


def test_processes_without_a_job_count_while_their_heartbeats_are_fresh() -> None:
    assert verdict(rank(wrote_s_ago=5.0), job=None).state == RunStatus.RUNNING
    assert verdict(rank(wrote_s_ago=121.0, moved_s_ago=121.0), job=None).state == RunStatus.GONE
    assert verdict(rank(), job=None, died=(0,)).state == RunStatus.GONE
    ended = replace(JOB, state=JobState.ENDED, ends=NOW - 4.0)
    assert verdict(rank(wrote_s_ago=3.0), job=ended).state == RunStatus.GONE, "it wrote as the job ended"
    assert verdict(rank(wrote_s_ago=1.0), job=ended).state == RunStatus.RUNNING, "another start"


def test_what_a_run_left_behind_says_how_it_ended() -> None:
    ended = {"event": "end", "reason": "the samples are done"}
    assert verdict(job=None, last={**ended, "finished": True}).state == RunStatus.FINISHED
    stopped = verdict(job=None, last={**ended, "reason": "signal SIGTERM"}, path="runs/a")
    assert stopped.state == RunStatus.STOPPED and "signal SIGTERM" in stopped.why
    assert "bloomery submit runs/a" in stopped.remedy
    assert verdict(job=None, last=ended, silent="squeue: down").state == RunStatus.UNKNOWN
    armed = verdict(job=None, last=ended, switch="control/stop", path="runs/a")
    assert armed.state == RunStatus.STOPPED and "bloomery stop runs/a --disarm; then" in armed.remedy
    assert verdict(job=None).state == RunStatus.NEW


def test_a_run_that_failed_says_why_from_its_heartbeat_its_diagnosis_or_its_last_job() -> None:
    erred = rank(wrote_s_ago=900.0, error="ValueError: no such dataset\nmore")
    seen = verdict(erred, job=None)
    assert (seen.state, seen.why) == (RunStatus.FAILED, "ValueError: no such dataset")
    failed = replace(JOB, state=JobState.FAILED, state_text="TIMEOUT", reason="TimeLimit")
    older = replace(failed, job="711", state_text="NODE_FAIL", submitted=1.0)
    newer = replace(failed, submitted=2.0)
    seen = judge_state(RunObservation(jobs=(newer, older), now=NOW, path="runs/a"), limits=LIMITS)
    assert (seen.state, seen.why) == (RunStatus.FAILED, "job 712: TIMEOUT TimeLimit")
    assert "runs/a/logs" in seen.remedy
    attempt = {"cause": "hang", "summary": "rank 1 stands still", "gives_up": "3 restarts", "remedy": "Look"}
    seen = verdict(job=None, attempt=attempt, switch="control/stop", path="runs/a")
    assert (seen.state, seen.why) == (
        RunStatus.FAILED,
        "hang: rank 1 stands still; not started again: 3 restarts",
    )
    assert seen.remedy == "Look; then bloomery stop runs/a --disarm"
    assert verdict(job=None, last={"event": "end", "failed": True, "reason": "it broke"}).why == "it broke"
