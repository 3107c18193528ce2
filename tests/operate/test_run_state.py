"""The one word that a run's state has, from jobs, heartbeats and journals as they can be."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm
from bloomery.operate import run_state, standstill
from bloomery.operate.run_state import RunObservation, RunStatus, RunVerdict, judge_state, observe_run
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


def test_a_run_that_used_all_its_samples_is_finished_when_its_last_process_has_gone() -> None:
    end = {"event": "end", "finished": True, "reason": "all samples used"}
    assert verdict(rank(), job=None, last=end).state == RunStatus.RUNNING
    gone = verdict(rank(wrote_s_ago=130.0), job=None, last=end)
    assert (gone.state, gone.why) == (RunStatus.FINISHED, "all samples used")


def test_a_time_of_another_year_is_told_with_its_date() -> None:
    today = time.localtime()
    moment = time.mktime((today.tm_year + 1, today.tm_mon, today.tm_mday, 12, 0, 0, 0, 0, -1))
    waits = replace(JOB, state=JobState.PENDING, expected_start=moment)
    assert f"expected to start {today.tm_year + 1}-" in verdict(job=waits).why


def test_a_cause_that_the_summary_names_is_not_told_twice() -> None:
    attempt = {"cause": "hang", "summary": "a hang of rank 1", "gives_up": "3 restarts"}
    assert verdict(job=None, attempt=attempt).why == "a hang of rank 1; not started again: 3 restarts"


def test_a_heartbeat_that_goes_while_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = RunDirectory(tmp_path).create(), standstill.read_beat
    for number in range(2):
        run.heartbeat(rank=number).parent.mkdir(parents=True, exist_ok=True)
        run.heartbeat(rank=number).write_text(json.dumps(asdict(RankBeat(rank=number, world=2))))

    def vanishing(path: Path) -> RankBeat | None:
        beat = read(path)
        if beat is not None and beat.rank == 1:
            path.unlink()
        return beat

    monkeypatch.setattr(standstill, "read_beat", vanishing)
    assert list(observe_run(run, ()).ranks) == [0]


def test_ranks_that_a_supervisor_has_replaced_are_not_those_that_hang(tmp_path: Path) -> None:
    """The frozen rank was killed; its heartbeat stays until the new one has loaded torch."""
    run, now = RunDirectory(tmp_path).create(), time.time()
    beat = RankBeat(world=1, time=now - 30.0, attempt="a-0", activity=RankActivity.COMPUTING, host="far")
    run.heartbeat().parent.mkdir(parents=True, exist_ok=True)
    run.heartbeat().write_text(json.dumps(asdict(beat)))
    started = {"event": "attempt", "attempt": "a-0", "time": now - 90.0}
    again = {**started, "attempt": "a-1", "time": now - 5.0}
    ended = {"event": "attempt_end", "attempt": "a-0", "time": now - 6.0, "status": 1}

    def state_after(*events: dict[str, object]) -> RunVerdict:
        run.operations.write_text("".join(f"{json.dumps(event)}\n" for event in events))
        return judge_state(observe_run(run, ()))

    assert state_after(started).state == RunStatus.HUNG
    assert state_after(started, ended).state == RunStatus.HUNG, "nobody has begun again"
    restarted = state_after(started, ended, again)
    assert restarted.state == RunStatus.STARTING and "none has written a heartbeat" in restarted.why
    assert observe_run(run, ()).begun["attempt"] == "a-1" and observe_run(run, ()).starts == "launch"
    run.rounds.write_text("")
    assert observe_run(run, ()).starts == "peer"
    run.heartbeat().write_text(json.dumps(asdict(replace(beat, attempt="a-1", time=now, since=now))))
    os.utime(run.heartbeat(), (now, now))
    assert state_after(started, ended, again).state == RunStatus.RUNNING
    later = {**again, "time": now - 130.0}
    run.heartbeat().write_text(json.dumps(asdict(replace(beat, time=now - 200.0))))
    assert state_after(started, ended, later).state == RunStatus.GONE, "its launcher was killed, too"


def test_a_job_that_starts_its_ranks_again_is_judged_from_then_on() -> None:
    begun = {"event": "attempt", "attempt": "a-1", "time": NOW - 100.0}
    seen = verdict(begun=begun)
    assert seen.state == RunStatus.STARTING
    assert verdict(begun={**begun, "time": NOW - 700.0}).state == RunStatus.HUNG
    assert verdict(rank(wrote_s_ago=110.0, moved_s_ago=110.0), begun=begun).state == RunStatus.STARTING


def test_what_a_run_left_behind_says_how_it_ended() -> None:
    ended = {"event": "end", "reason": "the samples are done"}
    assert verdict(job=None, last={**ended, "finished": True}).state == RunStatus.FINISHED
    stopped = verdict(job=None, last={**ended, "reason": "signal SIGTERM"}, path="runs/a")
    assert stopped.state == RunStatus.STOPPED and "signal SIGTERM" in stopped.why
    assert "bloomery submit runs/a" in stopped.remedy
    assert "bloomery launch runs/a --supervise" in stopped.remedy
    peer = verdict(job=None, last=ended, path="runs/a", starts="peer")
    assert "bloomery peer runs/a --supervise" in peer.remedy
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


@pytest.mark.parametrize(
    ("state", "reason", "status", "remedy"),
    [
        (JobState.HELD, "JobHeldUser", RunStatus.HELD, "scontrol release 712"),
        (JobState.HELD, "suspended: kubectl patch", RunStatus.HELD, "suspended: kubectl patch"),
        (JobState.NEVER, "DependencyNeverSatisfied", RunStatus.NEVER, "bloomery cancel"),
        (JobState.SUSPENDED, "", RunStatus.SUSPENDED, "scontrol resume 712"),
        (JobState.COMPLETING, "", RunStatus.COMPLETING, ""),
    ],
)
def test_each_state_of_a_job_is_one_of_the_run(
    state: JobState, reason: str, status: RunStatus, remedy: str
) -> None:
    seen = verdict(job=replace(JOB, state=state, reason=reason))
    assert (seen.state, seen.job.job if seen.job else "") == (status, "712") and remedy in seen.remedy
    assert seen.why == f"job 712 on n1: {reason or state}"
    assert seen.state.is_bad == (status != RunStatus.COMPLETING)


def test_a_heartbeat_of_the_second_in_which_its_job_began_is_the_jobs_own() -> None:
    young = replace(JOB, started=NOW - 60.0)
    assert verdict(rank(wrote_s_ago=60.9, moved_s_ago=60.9), job=young).state == RunStatus.HUNG
    assert verdict(rank(wrote_s_ago=61.1), job=young).state == RunStatus.STARTING


def test_a_job_that_failed_before_heartbeats_were_written_does_not_speak_for_those() -> None:
    failed = replace(JOB, state=JobState.FAILED, state_text="TIMEOUT", reason="TimeLimit", ends=NOW - 500.0)
    assert verdict(rank(wrote_s_ago=900.0), job=failed).state == RunStatus.GONE
    assert verdict(job=failed).state == RunStatus.FAILED


def test_a_job_that_failed_before_its_ranks_began_is_not_hidden_by_the_good_end_of_the_one_before() -> None:
    ended = {"event": "end", "reason": "the stop switch", "time": NOW - 300.0}
    before = rank(wrote_s_ago=300.0, activity=RankActivity.ENDED)
    failed = replace(JOB, state=JobState.FAILED, state_text="FAILED", started=NOW - 60.0, ends=NOW - 50.0)
    seen = verdict(before, job=replace(failed, reason="NonZeroExitCode"), last=ended)
    assert (seen.state, seen.why) == (RunStatus.FAILED, "job 712: FAILED NonZeroExitCode")
    of_it = replace(failed, started=NOW - 900.0, ends=NOW - 290.0)
    assert verdict(before, job=of_it, last=ended).state == RunStatus.STOPPED, "it was the one that trained"
    assert verdict(before, job=failed, last=ended | {"finished": True}).state == RunStatus.FINISHED


def written(run: RunDirectory, *, world: int = 1, **more: object) -> RankBeat:
    beat = RankBeat(world=world, activity=RankActivity.COMPUTING, **more)  # type: ignore[arg-type]
    path = run.heartbeat(rank=beat.rank)
    path.write_text(json.dumps(asdict(beat)))
    os.utime(path, (beat.time, beat.time))
    return beat


def test_what_is_observed_of_the_ranks_is_as_old_as_they_say(tmp_path: Path) -> None:
    run, now = RunDirectory(tmp_path).create(), time.time()
    written(run, world=3, time=now - 10.0, since=now - 50.0)
    written(run, world=3, rank=1, time=now + 500.0, since=now + 500.0)  # its clock is ahead
    run.heartbeat(rank=2).write_text("{")
    written(run, world=9, rank=5, time=now)  # of a larger start before
    ranks = observe_run(run, ()).ranks
    assert set(ranks) == {0, 1}
    assert (now - ranks[0].written_s, now - ranks[0].moved_s) == (pytest.approx(10.0), pytest.approx(50.0))
    assert ranks[1].written_s == ranks[1].moved_s == pytest.approx(now, abs=5.0)
    ended = RankBeat(activity=RankActivity.ENDED, time=now - 10.0, since=now - 50.0)
    run.heartbeat().write_text(json.dumps(asdict(ended)))
    os.utime(run.heartbeat(), (now - 10.0, now - 10.0))
    assert now - observe_run(run, ()).ranks[0].moved_s == pytest.approx(10.0)


@pytest.mark.parametrize(("attempt", "died"), [("", (0,)), ("x-1", ())])
def test_a_rank_that_a_launcher_started_has_not_died_before_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str, died: tuple[int, ...]
) -> None:
    run = RunDirectory(tmp_path).create()
    written(run, time=time.time(), attempt=attempt)
    monkeypatch.setattr(run_state, "has_died_here", lambda beat, *, now: True)
    assert observe_run(run, ()).died == died


@pytest.mark.parametrize(
    ("since_s", "then", "state"),
    [
        (0.0, [], RunStatus.FAILED),
        (30.0, [], RunStatus.FAILED),  # by another clock
        (3600.0, [], RunStatus.STOPPED),  # somebody went on by `bloomery train`
        (0.0, [("attempt", "b", {}), ("attempt_end", "b", {"status": 143})], RunStatus.STOPPED),
    ],
)
def test_a_failure_counts_until_the_run_begins_again(
    tmp_path: Path, since_s: float, then: list[tuple[str, str, dict[str, object]]], state: RunStatus
) -> None:
    run = RunDirectory(tmp_path).create()
    gave_up = {"cause": "hang", "summary": "rank 1 stands still", "gives_up": "3 restarts"}
    told = [("attempt", "a", {}), ("attempt_end", "a", {"status": 68}), ("diagnosis", "a", gave_up), *then]
    events = [{"event": event, "attempt": name, "time": NOW, **more} for event, name, more in told]
    run.operations.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    end = {"event": "end", "finished": False, "time": NOW + since_s, "reason": "signal SIGTERM"}
    run.journal().write_text(json.dumps(end) + "\n")
    assert judge_state(observe_run(run, ())).state == state


def test_a_start_beside_a_run_that_trains_does_not_make_it_fail(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    busy = {"cause": "run in use", "summary": "it is being trained", "gives_up": "the same start would fail"}
    told = [("attempt", "a", {}), ("attempt", "b", {}), ("attempt_end", "b", {"status": 1})]
    told += [("diagnosis", "b", busy), ("attempt_end", "a", {"status": 0})]
    run.journal().write_text('{"event": "end", "finished": false, "reason": "signal SIGTERM"}\n')
    for length, state in ((4, RunStatus.STOPPED), (5, RunStatus.STOPPED)):
        events = [{"event": event, "attempt": name, **more} for event, name, more in told[:length]]
        run.operations.write_text("".join(f"{json.dumps(event)}\n" for event in events))
        assert judge_state(observe_run(run, ())).state == state


def test_what_the_journals_tell_last_is_observed(tmp_path: Path) -> None:
    run, elsewhere = RunDirectory(tmp_path / "my run").create(), tmp_path / "switches"
    elsewhere.mkdir()
    events = [{"event": "start"}, {"event": "end", "failed": True}, {"event": "step"}]
    run.journal().write_text("".join(f"{json.dumps(event)}\n" for event in events))
    failed = [{"event": "attempt", "attempt": "a"}, {"event": "attempt_end", "attempt": "a", "status": 1}]
    failed += [{"event": "diagnosis", "attempt": "a", "cause": "hang"}]
    run.operations.write_text("".join(f"{json.dumps(event)}\n" for event in failed))
    seen = observe_run(run, (JOB,), switches=[elsewhere], silent="down")
    assert (seen.last["event"], seen.last["failed"], seen.switch, seen.silent) == ("end", True, "", "down")
    assert (seen.attempt["cause"], seen.attempt["status"], seen.jobs) == ("hang", 1, (JOB,))
    assert seen.path == f"'{run.path}'"
    arm(elsewhere / "stop", why="maintenance")
    with run.operations.open("a") as operations:
        operations.write('{"event": "attempt", "attempt": "b"}\n')
    seen = observe_run(run, (), switches=[elsewhere], last={"event": "start"})
    assert (seen.last, seen.attempt) == ({"event": "start"}, {})
    assert seen.switch.startswith(f"{elsewhere / 'stop'} (") and "maintenance" in seen.switch


def left(why: str = "", *, attempt: str = "n1-7-a-0") -> list[dict]:
    """What a launcher writes of an attempt that ended well. why: why its job left; "" where it did not."""
    return [
        {"event": "attempt", "attempt": attempt},
        {"event": "attempt_end", "attempt": attempt, "status": 143, "left": why},
    ]


CANCELLED = {"event": "job", "state": "cancelled"}
AT_LIMIT = "the job ends in 24 s"


@pytest.mark.parametrize(
    ("operations", "reason", "is_at_limit"),
    [
        (left(AT_LIMIT), "signal SIGTERM", True),
        (left(), "signal SIGTERM", False),
        ([], "signal SIGTERM", False),
        ([], "guard.stop_after_minutes = 5", True),
        ([], "guard.stop_at_step = 5", False),
        ([*left(AT_LIMIT), CANCELLED], "signal SIGTERM", False),
        ([CANCELLED], "guard.stop_after_minutes = 5", False),
        # `cancel --queued` during the job, of which one attempt more is another life
        ([*left(), CANCELLED, *left(AT_LIMIT, attempt="n1-7-a-1")], "signal SIGTERM", False),
        ([*left(), CANCELLED, *left(AT_LIMIT, attempt="n1-8-b-0")], "signal SIGTERM", True),
        ([*left(AT_LIMIT), {"event": "job", "state": "pending"}], "signal SIGTERM", True),
    ],
)
def test_a_run_that_its_time_limit_stopped_is_told_from_one_that_somebody_stopped(
    tmp_path: Path, operations: list[dict], reason: str, is_at_limit: bool
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    end = {"event": "end", "reason": reason, "finished": False, "failed": False}
    run.journal().write_text(json.dumps(end) + "\n")
    run.operations.write_text("".join(f"{json.dumps(event)}\n" for event in operations))
    seen = judge_state(observe_run(run, ()))
    assert (seen.state, seen.is_at_limit) == (RunStatus.STOPPED, is_at_limit)
    if operations and operations[-1].get("left"):
        assert seen.why == f"saved and stopped: {AT_LIMIT}; nothing is queued"
    waits = replace(JOB, state=JobState.PENDING)
    assert not judge_state(observe_run(run, (waits,))).is_at_limit, "the next job is queued"
    run.journal().write_text(json.dumps(end | {"finished": True}) + "\n")
    assert not judge_state(observe_run(run, ())).is_at_limit, "it is finished"
    run.journal().write_text(json.dumps(end) + "\n")
    arm(run.control_dir / "stop", why="ann")
    assert not judge_state(observe_run(run, ())).is_at_limit, "somebody stopped it"


def test_ranks_that_stand_still_are_hung_though_a_switch_asks_them_to_stop() -> None:
    assert verdict(rank(moved_s_ago=50.0), switch="control/stop").state == RunStatus.HUNG


def test_a_finished_run_is_finished_whatever_is_armed_and_whoever_is_silent() -> None:
    end = {"event": "end", "finished": True, "reason": "the samples are done"}
    assert verdict(job=None, last=end, silent="squeue: down").state == RunStatus.FINISHED
    assert verdict(job=None, last=end, switch="control/stop").state == RunStatus.FINISHED
    gave_up = {"cause": "hang", "summary": "rank 1 stands still", "gives_up": "3 restarts"}
    waits = verdict(job=None, attempt=gave_up, silent="squeue: down")
    assert waits.state == RunStatus.UNKNOWN and "squeue: down" in waits.why, "another job may wait"


def test_the_last_of_several_jobs_that_are_over_says_which_heartbeats_are_of_none_of_them() -> None:
    over = [replace(JOB, job=str(ago), state=JobState.ENDED, ends=NOW - ago) for ago in (4.0, 500.0)]
    for jobs in (over, over[::-1]):
        seen = RunObservation(jobs=tuple(jobs), ranks={0: rank(wrote_s_ago=3.0)}, now=NOW)
        assert judge_state(seen, limits=LIMITS).state == RunStatus.GONE


def test_of_several_jobs_the_one_that_has_most_of_the_run_decides() -> None:
    states = (JobState.PENDING, JobState.COMPLETING, JobState.SUSPENDED)
    jobs = [replace(JOB, state=state) for state in states]
    for count, state in ((3, RunStatus.SUSPENDED), (2, RunStatus.COMPLETING), (1, RunStatus.PENDING)):
        assert judge_state(RunObservation(jobs=tuple(jobs[:count]), now=NOW), limits=LIMITS).state == state


def test_a_run_that_is_gone_is_told_since_its_last_sign_of_life() -> None:
    def since(moment: float) -> str:
        return f"no process since {time.strftime('%Y-%m-%d %H:%M', time.localtime(moment))}, no job"

    ranks = (rank(wrote_s_ago=9000.0), rank(wrote_s_ago=5000.0))
    begun = {"event": "attempt", "attempt": "a-1", "time": NOW - 2000.0}
    assert verdict(*ranks, job=None).why.startswith(since(NOW - 5000.0))
    assert verdict(job=None, begun=begun).why.startswith(since(NOW - 2000.0))
    started = verdict(job=None, last={"event": "start"})
    assert (started.state, started.why) == (RunStatus.GONE, "no process, no job, and no `end` in the journal")


def test_a_person_should_look_at_these_states_and_at_no_others() -> None:
    assert {state for state in RunStatus if state.is_bad} == {
        RunStatus.HUNG, RunStatus.HELD, RunStatus.NEVER, RunStatus.FAILED, RunStatus.GONE,
        RunStatus.SUSPENDED,
    }  # fmt: skip
