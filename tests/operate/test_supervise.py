"""`bloomery launch --supervise`: real ranks that are killed, stopped, and fail by themselves."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.faults.commands import bloomery, running, wait_for
from tests.faults.test_disk import fill_beside_others
from tests.machine import may_mount, mounted

from bloomery import durable
from bloomery.cli import ranks as ranks_module
from bloomery.cli.ranks import RankRange, run_ranks
from bloomery.events.heartbeat import Heartbeat, RankActivity, RankBeat, read_beat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import newest_checkpoint as newest_checkpoint_module
from bloomery.operate import standstill as standstill_module
from bloomery.operate import supervise as supervise_module
from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import GAVE_UP, REPEATING_STATUSES, Cause, Culprit, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.ledger.run_ledger import read_ledger
from bloomery.operate.ledger.time_class import TimeClass
from bloomery.operate.standstill import StandstillLimits
from bloomery.operate.supervise import AttemptWatch, JobReactions, RestartBudget, why_no_restart

Train = Callable[..., list[str]]


@pytest.fixture
def supervised(train_command: Train) -> Train:
    return lambda *more: ["launch", *train_command(*more)[1:], "--nproc", "2", "--supervise"]


def told(run: RunDirectory, event: str) -> list[dict]:
    return [record for record in read_journal(run.operations) if record["event"] == event]


def beat_of(run: RunDirectory, *, attempt: int, from_step: int) -> RankBeat:
    """Wait until rank 1 of an attempt has made so many steps, and return its heartbeat."""
    path = run.heartbeat(rank=1)

    def has_come() -> bool:
        beat = read_beat(path)
        return beat is not None and beat.attempt.endswith(f"-{attempt}") and beat.step >= from_step

    wait_for(has_come)
    beat = read_beat(path)
    assert beat is not None
    return beat


def test_a_killed_and_a_stopped_rank_are_named_and_the_run_starts_again(
    supervised: Train, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    with running(*supervised("train.samples=4000"), log=tmp_path / "log") as launcher:
        os.kill(beat_of(run, attempt=0, from_step=6).pid, signal.SIGKILL)
        stopped = beat_of(run, attempt=1, from_step=12)
        os.kill(stopped.pid, signal.SIGSTOP)
        wait_for(lambda: len(told(run, "diagnosis")) == 2)
        wait_for(lambda: len(told(run, "attempt")) == 3)
        wait_for(lambda: run.chronicle.exists() and "· hang" in run.chronicle.read_text())
        said = launcher.said()
    (nodes,) = told(run, "preflight")
    assert nodes["versions"].keys() >= {"bloomery", "torch", "python"} and nodes["differ"] == {}
    killed, hang = told(run, "diagnosis")
    assert (killed["cause"], killed["culprit"]["rank"], killed["retries"]) == ("killed", 1, True)
    assert (hang["cause"], hang["culprit"]["rank"], hang["sure"]) == ("hang", 1, True), hang
    assert "rank 0 waits in " in said.err and "for rank 1 on" in said.err  # a collective, or a save
    assert "the process is stopped" in said.err and said.err.count("starting again") == 2
    ledger = read_ledger(run)
    assert ledger is not None and [incident.cause for incident in ledger.history.incidents] == [
        "killed",
        "hang",
    ]
    assert ledger.total_s == pytest.approx(2 * (ledger.end - ledger.begin))
    seconds = ledger.seconds
    assert seconds.get(TimeClass.UNEXPLAINED, 0.0) < 0.005 * ledger.total_s
    # Both ranks stood still for as long as a process may at least be silent.
    assert seconds[TimeClass.HANG] > 2 * StandstillLimits().silence_s
    assert seconds[TimeClass.TRAINING] > 0


def test_a_failure_that_would_repeat_is_not_started_again(supervised: Train, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.checkpoints.rmdir()
    run.checkpoints.write_text("a file is where a directory is needed")
    said = bloomery(*supervised("--nproc", "1"))
    assert said.status == 65, said
    (diagnosis,) = told(run, "diagnosis")
    assert diagnosis["cause"] == "exception" and not diagnosis["retries"]
    assert "not started again: the same start would fail again" in said.err
    assert len(told(run, "attempt")) == 1


def test_a_closed_watch_looks_at_no_heartbeat_any_more(tmp_path: Path) -> None:
    run, before = RunDirectory(tmp_path / "run").create(), set(threading.enumerate())
    limits = StandstillLimits()
    watch = AttemptWatch(run, world=1, host="node0", name="first", limits=limits, measured_s={})
    assert set(threading.enumerate()) - before
    watch.close()
    assert not set(threading.enumerate()) - before


def test_a_killed_rank_is_the_cause_however_long_the_others_stand_still_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dies as soon as both have heartbeats; rank 0 ignores SIGTERM, and its launcher kills it."""
    run = RunDirectory(tmp_path / "run").create()
    for rank in (0, 1):
        beat = RankBeat(rank=rank, world=2, step=7, activity="forward and backward", attempt="first")
        run.heartbeat(rank=rank).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"beat{rank}").write_text(json.dumps(asdict(beat)))
    copies = "; ".join(f"cp {tmp_path}/beat{rank} {run.heartbeat(rank=rank)}" for rank in (0, 1))
    script = f'if [ "$RANK" = 1 ]; then {copies}; kill -KILL $$; fi; trap "" TERM; exec sleep 60'
    monkeypatch.setattr(ranks_module, "GRACE_AFTER_SIGNAL_S", 1.6)
    monkeypatch.setattr(standstill_module, "interval_of", lambda world: 0.05)
    monkeypatch.setattr(supervise_module, "_POLL_S", 0.05)
    limits = StandstillLimits(silence_s=0.6)
    watch = AttemptWatch(run, world=2, host="node0", name="first", limits=limits, measured_s={})
    share = RankRange(count=2, world=2)
    status = run_ranks(["sh", "-c", script], share, environment=dict(os.environ), supervisor=watch)
    watch.close()
    evidence = watch.evidence(first_step=0)
    assert status == 137 and watch.hang is None
    assert [(end.status, end.is_killed_here) for end in evidence.ranks] == [(-9, True), (-9, False)]
    diagnosis = diagnose(evidence)
    assert (diagnosis.cause, diagnosis.culprit.rank) == (Cause.KILLED, 1)


@pytest.fixture
def watched_at_short_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunDirectory], AttemptWatch]:
    """Returns a watch of one rank that counts as silent after 0.6 s."""
    monkeypatch.setattr(standstill_module, "interval_of", lambda world: 0.05)
    monkeypatch.setattr(supervise_module, "_POLL_S", 0.05)
    limits = StandstillLimits(silence_s=0.6)
    return lambda run: AttemptWatch(run, world=1, host="node0", name="", limits=limits, measured_s={})


@pytest.mark.needs(may_mount, rights="root, to mount a file system")
@pytest.mark.parametrize("is_written_over", [True, False])
def test_a_full_disk_makes_no_rank_silent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watched_at_short_limits: Callable[[RunDirectory], AttemptWatch],
    is_written_over: bool,
) -> None:
    """Some file systems let a file's blocks be written again when they are full, and others do not."""
    if not is_written_over:
        monkeypatch.setattr(durable, "refresh", durable.write_whole_unsynced)
    with mounted(tmp_path / "disk", "size=200k") as disk:
        run = RunDirectory(disk / "run").create()
        with Heartbeat(run.heartbeat(rank=0), interval_s=0.05).start() as heartbeat:
            watch = watched_at_short_limits(run)
            wait_for(lambda: watch._progress._seen)
            filler = fill_beside_others(disk)
            before = read_beat(run.heartbeat(rank=0))
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                heartbeat.enter(RankActivity.COMPUTING)
                time.sleep(0.02)
            after = read_beat(run.heartbeat(rank=0))
            assert before is not None and after is not None and watch.why_to_end() == ""
            assert (after.moves > before.moves) == is_written_over
            filler.unlink()
            wait_for(lambda: read_beat(run.heartbeat(rank=0)) != after)
        watch.close()


def test_a_watch_that_fails_once_finds_a_standstill_after_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    watched_at_short_limits: Callable[[RunDirectory], AttemptWatch],
) -> None:
    run, looks = RunDirectory(tmp_path / "run").create(), itertools.count()
    run.heartbeat(rank=0).write_text(json.dumps(asdict(RankBeat(step=7, activity="forward and backward"))))
    read = supervise_module.read_beats

    def failing(*run: RunDirectory, **more: object) -> dict[int, RankBeat]:
        if next(looks) < 3:
            raise RuntimeError("can't start new thread")
        return read(*run, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(supervise_module, "read_beats", failing)
    watch = watched_at_short_limits(run)
    wait_for(watch.why_to_end)
    watch.close()
    assert "no rank has moved" in watch.why_to_end() and caplog.text.count("can't start new thread") == 1


def test_a_disk_that_does_not_list_the_checkpoints_ends_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file server fails over when the first attempt has ended, and is back after the second."""
    run, statuses, said = RunDirectory(tmp_path / "run").create(), [137, 137, 0], list[str]()
    listed = newest_checkpoint_module.checkpoints

    def refusing(rundir: RunDirectory) -> tuple:
        if len(statuses) in (1, 2):
            raise OSError(errno.ESTALE, "Stale file handle")
        return listed(rundir)

    monkeypatch.setattr(newest_checkpoint_module, "checkpoints", refusing)

    def attempt(watch: AttemptWatch) -> int:
        watch.ended({0: -9}, killed=())
        return statuses.pop(0)

    status = supervise_module.supervise(run, attempt, world=1, host="node0", say=said.append)
    assert status == 0 and statuses == []
    assert [event["step"] for event in told(run, "attempt_end")] == [-1, -1, -1]


def test_a_rank_that_its_launcher_killed_hides_no_exception() -> None:
    failed = RankEnd(rank=0, host="node0", status=1, error="ValueError: no")
    killed = RankEnd(rank=1, host="node0", status=-9, is_killed_here=True)
    diagnosis = diagnose(FailureEvidence(ranks=[failed, killed]))
    assert (diagnosis.cause, diagnosis.culprit.rank) == (Cause.EXCEPTION, 0)


def test_a_bad_gpu_that_strikes_while_the_job_leaves_is_named_before_the_next_job_begins(
    tmp_path: Path,
) -> None:
    """The 13B model's day as a soak: the node would have been handed to the next job."""
    run, bad, said = RunDirectory(tmp_path).create(), [], []

    def attempt(watch: AttemptWatch) -> int:
        log = run.log(host="node1", rank=0)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
        watch.started({0: 1})
        watch.ended({0: 1}, killed=())
        return 1

    reactions = JobReactions(on_bad_node=bad.append, on_repeating=bad.append)
    leaves = SimpleNamespace(reason="the job ends in 24 s")
    status = supervise_module.supervise(
        run, attempt, world=1, host="node1", say=said.append, reactions=reactions, departure=leaves
    )  # fmt: skip
    assert (status, [diagnosis.culprit.host for diagnosis in bad]) == (67, ["node1"])
    (record,) = told(run, "diagnosis")
    assert (record["cause"], record["gives_up"]) == ("bad GPU", "the job ends in 24 s")


def test_a_launcher_of_the_same_host_and_process_number_gives_its_attempt_a_name_of_its_own(
    tmp_path: Path,
) -> None:
    """A pod that Kubernetes starts again has both; the heartbeats before it are none of its ranks'."""
    run = RunDirectory(tmp_path).create()
    for _ in range(2):
        supervise_module.supervise(run, lambda watch: 0, world=1, host="pod-0", say=print)
    assert len({record["attempt"] for record in told(run, "attempt")}) == 2


def test_restarts_without_a_newer_checkpoint_come_to_an_end() -> None:
    killed = diagnose(FailureEvidence(ranks=[RankEnd(rank=0, host="node0", status=-9)]))
    budget = RestartBudget(without_progress=3, in_all=10)
    assert why_no_restart(killed, budget=budget, in_a_row=2, in_all=2) == ""
    assert "no newer checkpoint" in why_no_restart(killed, budget=budget, in_a_row=3, in_all=3)
    assert "10 times" in why_no_restart(killed, budget=budget, in_a_row=0, in_all=10)


def test_the_guide_has_what_follows_each_cause() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "supervising.md").read_text()
    table = guide.partition("| cause | starts again |")[2].partition("\n\n")[0]
    told: dict[Cause, tuple[bool, int]] = {}
    for line in table.splitlines()[2:]:
        causes, again, status = (cell.strip() for cell in line.strip("|").split("|"))
        for words in causes.split(", "):
            cause = max((cause for cause in Cause if words.startswith(cause)), key=len)
            told[cause] = (again == "yes", int(status))
    done = {
        cause: Diagnosis(cause=cause, culprit=Culprit(), summary="", evidence=(), sure=True)
        for cause in Cause
    }
    assert told == {cause: (diagnosis.retries, diagnosis.exit_status) for cause, diagnosis in done.items()}
    assert f"given up with status {GAVE_UP}" in guide and GAVE_UP not in REPEATING_STATUSES
