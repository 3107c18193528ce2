"""What a supervisor of one machine does after each attempt: starts again, gives up, ends as it was asked."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.operate.test_wrong_bits import faulty, words_of_the_guard

from bloomery.errors import CheckpointError
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import newest_checkpoint as newest_module
from bloomery.operate import share_log
from bloomery.operate import supervise as supervise_module
from bloomery.operate.diagnosis import GAVE_UP, Cause, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence
from bloomery.operate.newest_checkpoint import NO_CHECKPOINT, NewestCheckpoint, newest_checkpoint, newest_step
from bloomery.operate.stacks import RankStack
from bloomery.operate.standstill import Standstill, StandstillLimits
from bloomery.operate.supervise import AttemptWatch, JobReactions, RestartBudget, supervise

SAVING = str(RankActivity.SAVING)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


class Supervised:
    """A supervisor of one rank on node0; its attempts end with a status each, after which there is a save."""

    def __init__(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.said, self.bad, self.repeating = run, list[str](), list[Diagnosis](), list[Diagnosis]()
        self.watches, self.saved = list[AttemptWatch](), [-1]
        self.during: Callable[[AttemptWatch], None] = lambda watch: None
        monkeypatch.setattr(supervise_module, "newest_checkpoint", self.newest)

    def newest(self, rundir: RunDirectory, *, known: NewestCheckpoint = NO_CHECKPOINT) -> NewestCheckpoint:
        return NewestCheckpoint(step=self.saved[-1])

    def ends(self, *attempts: tuple[int, int], **more) -> int:
        """Return the exit status. attempts: the status of the rank, and the newest checkpoint after it."""
        left: Iterator[tuple[int, int]] = iter(attempts)

        def attempt(watch: AttemptWatch) -> int:
            self.watches.append(watch)
            self.during(watch)
            status, saved = next(left)
            self.saved.append(saved)
            watch.ended({0: status}, killed=())
            return 128 - status if status < 0 else status

        reactions = JobReactions(on_bad_node=self.bad.append, on_repeating=self.repeating.append)
        given = {"reactions": reactions, "world": 1, "host": "node0", "say": self.said.append, **more}
        status = supervise(self.run, attempt, **given)
        assert list(left) == []
        return status

    def told(self, *names: str) -> list[dict]:
        return [event for event in read_journal(self.run.operations) if event["event"] in names]


@pytest.fixture
def supervised(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    return Supervised(run, monkeypatch)


def test_restarts_in_a_row_are_counted_from_the_newest_checkpoint(supervised: Supervised) -> None:
    budget = RestartBudget(without_progress=2, in_all=9)
    status = supervised.ends((-9, 5), (-9, 5), (-9, 8), (-9, 8), (-9, 7), budget=budget)
    assert status == GAVE_UP and supervised.repeating == [] == supervised.bad
    assert "not started again: 2 restarts in a row brought no newer checkpoint" in supervised.said
    assert "starting again from the newest checkpoint (restart 4)" in supervised.said
    assert [event["step"] for event in supervised.told("attempt")] == [0, 5, 5, 8, 8]
    assert [event["step"] for event in supervised.told("attempt_end")] == [5, 5, 8, 8, 7]
    assert [bool(event["gives_up"]) for event in supervised.told("diagnosis")] == [False] * 4 + [True]


def test_restarts_in_all_are_counted_though_each_attempt_saves(supervised: Supervised) -> None:
    budget = RestartBudget(without_progress=1, in_all=2)
    assert supervised.ends((-9, 5), (-9, 6), (-9, 7), budget=budget) == GAVE_UP
    assert "not started again: it has been restarted 2 times" in supervised.said


def test_a_disk_that_does_not_list_the_checkpoints_keeps_what_it_listed_before(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newest(rundir: RunDirectory, *, known: NewestCheckpoint = NO_CHECKPOINT) -> NewestCheckpoint:
        return known if len(supervised.saved) > 2 else supervised.newest(rundir)

    monkeypatch.setattr(supervise_module, "newest_checkpoint", newest)
    assert supervised.ends((-9, 5), (-9, 6), (0, 7)) == 0
    assert [event["step"] for event in supervised.told("attempt_end")] == [5, 5, 5]


@pytest.mark.parametrize(("status", "ends_with"), [(0, 0), (130, 130), (143, 143), (1, 143)])
def test_an_attempt_that_was_asked_to_end_is_not_repeated(
    supervised: Supervised, status: int, ends_with: int
) -> None:
    supervised.during = lambda watch: watch.signalled(signal.SIGTERM)
    assert supervised.ends((status, -1)) == ends_with
    assert supervised.told("diagnosis") == [] and supervised.told("attempt_end")[0]["left"] == ""


def test_the_warning_of_the_scheduler_asks_for_no_end(supervised: Supervised) -> None:
    warned: list[int] = []
    departure = SimpleNamespace(reason="", warned=lambda: warned.append(1))
    supervised.during = lambda watch: watch.signalled(signal.SIGUSR1)
    assert supervised.ends((-9, 1), (0, 2), departure=departure) == 0
    assert warned == [1, 1] and [watch.asked for watch in supervised.watches] == [0, 0]


def test_what_only_the_launcher_knows_of_a_failure_is_told_where_the_ranks_name_no_cause(
    supervised: Supervised,
) -> None:
    statuses, why = iter([(1, 0), (1, -9), (0, 0)]), "another process is listed as the peer 'oslo'"

    def attempt(watch: AttemptWatch) -> int:
        status, of_rank = next(statuses)
        watch.ended({0: of_rank}, killed=())
        watch.failure = why if status else ""
        return status

    assert supervise(supervised.run, attempt, world=1, host="node0", say=supervised.said.append) == 0
    told = [(event["cause"], event["summary"]) for event in supervised.told("diagnosis")]
    assert told == [("unknown", why), ("killed", "rank 0 was ended by SIGKILL")]


@pytest.mark.parametrize(("status", "ends_with"), [(143, 0), (-9, GAVE_UP)])
def test_a_run_that_must_leave_is_not_started_again(
    supervised: Supervised, status: int, ends_with: int
) -> None:
    departure = SimpleNamespace(reason="the job ends in 24 s")
    assert supervised.ends((status, 3), departure=departure) == ends_with
    assert supervised.watches[0].why_to_stop() == "the job ends in 24 s"
    told = "saved and stopped" if ends_with == 0 else "not started again"
    assert supervised.said[-1] == f"{told}: the job ends in 24 s"
    (ended,) = supervised.told("attempt_end")
    assert ended["left"] == "the job ends in 24 s"


@pytest.mark.parametrize("has_job", [True, False])
def test_a_failure_that_would_repeat_is_told_to_the_job_and_never_tried_again(
    supervised: Supervised, has_job: bool
) -> None:
    log = supervised.run.log(host="node0", rank=0)
    log.parent.mkdir(parents=True, exist_ok=True)
    supervised.during = lambda watch: log.write_text("KeyError: 'loss'\n") and None
    assert supervised.ends((1, 3), **({} if has_job else {"reactions": None})) == 65
    assert [one.cause for one in supervised.repeating] == ([Cause.EXCEPTION] if has_job else [])
    assert supervised.bad == []


def test_a_bad_machine_is_left_by_the_job_and_used_on_where_there_is_none(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"
    kernel = [[], [xid]]
    monkeypatch.setattr(share_log, "kernel_lines", lambda: kernel[0])
    supervised.during = lambda watch: kernel.reverse()
    assert supervised.ends((-9, 3)) == 67
    assert "not started again: node0 is in quarantine, and the next job starts elsewhere" in supervised.said
    assert [(one.cause, one.culprit.host) for one in supervised.bad] == [(Cause.BAD_GPU, "node0")]
    kernel.reverse()
    assert supervised.ends((-9, 4), (0, 4), reactions=None) == 0


def test_each_attempt_has_the_limits_and_what_was_measured_before_it(supervised: Supervised) -> None:
    def measure(watch: AttemptWatch) -> None:
        number = len(supervised.watches)
        beat = RankBeat(rank=0, world=1, pid=number, activity=SAVING, longest_s={SAVING: 6.0 - number})
        watch._progress.look({0: beat}, watch.measured_s)

    limits, supervised.during = StandstillLimits(least_s=99.0), measure
    assert supervised.ends((-9, 3), (-9, 4), (0, 5), limits=limits) == 0
    assert [watch._measured_s for watch in supervised.watches] == [{}, {SAVING: 5.0}, {SAVING: 5.0}]
    assert all(watch._progress._limits is limits for watch in supervised.watches)


def test_the_evidence_names_the_step_from_which_the_attempt_began(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[FailureEvidence] = []
    diagnose = supervise_module.diagnose
    monkeypatch.setattr(
        supervise_module, "diagnose", lambda evidence: seen.append(evidence) or diagnose(evidence)
    )
    monkeypatch.setattr(share_log, "kernel_lines", lambda: ["a line"] if supervised.watches else [])
    monkeypatch.setattr(
        supervise_module, "free_share", lambda path: 0.25 if path == Path("/dev/shm") else 0.0
    )
    monkeypatch.setattr(supervise_module, "free_gib", lambda path: 7.5 if path == Path("/dev/shm") else 0.0)
    supervised.ends((-9, 3), (-9, 8), (0, 9))
    assert [evidence.first_step for evidence in seen] == [0, 3]
    assert seen[0].kernel == {"node0": ["a line"]}
    assert (seen[0].shm_free, seen[0].shm_free_gib) == (0.25, 7.5)


def test_a_machine_that_the_journal_blames_for_wrong_bits_is_in_quarantine(supervised: Supervised) -> None:
    faulty(supervised.run, (0, "node0", True), (0, "node0", True))
    log = supervised.run.log(host="node0", rank=0)
    log.parent.mkdir(parents=True, exist_ok=True)
    supervised.during = lambda watch: log.write_text(words_of_the_guard(0)) and None
    assert supervised.ends((1, 3)) == 67
    assert [one.cause for one in supervised.bad] == [Cause.SILENT_CORRUPTION]


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = NewestCheckpoint(incarnation=1, step=4)
    assert newest_checkpoint(run, known=known) == NO_CHECKPOINT and newest_step(run) == -1
    listed = [SimpleNamespace(step=step, incarnation=7) for step in (5, 12, 9)]
    monkeypatch.setattr(newest_module, "checkpoints", lambda rundir: listed)
    assert newest_checkpoint(run, known=known) == NewestCheckpoint(incarnation=7, step=12)
    assert newest_step(run) == 12

    def damaged(rundir: RunDirectory) -> list:
        raise CheckpointError("damaged", remedy="")

    monkeypatch.setattr(newest_module, "checkpoints", damaged)
    assert newest_checkpoint(run, known=known) == known


def test_a_standstill_names_the_host_of_the_only_rank_that_the_others_wait_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeats of an attempt before are none of its ranks'."""
    for rank, activity in enumerate((RankActivity.REDUCING, RankActivity.COMPUTING, RankActivity.SAVING)):
        attempt = "before" if rank == 2 else "now"
        beat = RankBeat(rank=rank, world=3, host=f"n{rank}", activity=activity, attempt=attempt)
        run.heartbeat(rank=rank).write_text(json.dumps(asdict(beat)))
    looked: list[set[int]] = []
    noted: list[int] = []
    monkeypatch.setattr(supervise_module, "take_stacks", lambda beats: dict[int, RankStack]())
    monkeypatch.setattr(supervise_module, "_POLL_S", 60.0)
    watch = AttemptWatch(run, world=3, host="n0", name="now", limits=StandstillLimits(), measured_s={})
    monkeypatch.setattr(watch._share, "note_children", lambda: noted.append(1))

    def stands(beats: dict[int, RankBeat], measured_s: dict[str, float]) -> Standstill:
        looked.append(set(beats))
        return Standstill(kind="stuck", silent=(), still_s=30.0, allowed_s=10.0)

    monkeypatch.setattr(watch._progress, "look", stands)
    watch._look()
    assert looked == [{0, 1}] and noted == [1]
    assert watch.hang is not None and (watch.hang.culprits, watch.hang.hosts) == ((1,), ("n1",))
    assert watch.evidence(first_step=0).hang == watch.hang
    assert watch.why_to_end().startswith("no rank has moved for 30 s (10 s allowed): ")
    watch.ending()
    assert watch.hang is None, "a rank had failed before"
    watch.close()


def test_what_an_attempt_waits_for_before_its_ranks_is_no_silence_of_theirs(run: RunDirectory) -> None:
    """A peer that starts again waits for its coordinator for up to an hour."""
    limits = StandstillLimits(unmeasured_s=0.0)
    watch = AttemptWatch(run, world=1, host="n0", name="now", limits=limits, measured_s={})
    for _ in range(2):
        watch._look()
    assert watch.why_to_end() == ""
    watch.started({0: os.getpid()})
    for _ in range(2):
        watch._look()
    watch.close()
    assert "no rank has moved" in watch.why_to_end()


def test_an_attempt_and_its_diagnosis_are_recorded_by_one_name_with_its_ranks_and_host(
    supervised: Supervised,
) -> None:
    assert supervised.ends((-9, 3), (0, 4), world=3) == 0
    attempts, ends = supervised.told("attempt"), supervised.told("attempt_end")
    assert [(one["ranks"], one["host"]) for one in attempts] == [(3, "node0")] * 2
    names = [one["attempt"] for one in attempts]
    assert len(set(names)) == 2 and all(name.startswith(f"node0-{os.getpid()}-") for name in names)
    assert [watch.name for watch in supervised.watches] == names == [one["attempt"] for one in ends]
    assert [one["status"] for one in ends] == [137, 0]
    (diagnosis,) = supervised.told("diagnosis")
    assert (diagnosis["attempt"], diagnosis["step"]) == (names[0], 3)


def test_a_watch_is_closed_where_its_attempt_is_broken_off(supervised: Supervised) -> None:
    def breaks(watch: AttemptWatch) -> None:
        raise KeyboardInterrupt

    supervised.during = breaks
    with pytest.raises(KeyboardInterrupt):
        supervised.ends((0, 1))
    (watch,) = supervised.watches
    assert not watch._thread.is_alive()


def test_a_run_is_given_up_after_three_restarts_in_a_row_and_a_hundred_in_all(supervised: Supervised) -> None:
    assert supervised.ends((-9, 5), (-9, 5), (-9, 5), (-9, 5)) == GAVE_UP
    assert supervised.said[-1] == "not started again: 3 restarts in a row brought no newer checkpoint"
    assert RestartBudget().in_all == 100


def test_what_the_launcher_saw_of_its_ranks_is_evidence(run: RunDirectory) -> None:
    watch = AttemptWatch(run, world=2, host="n0", name="now", limits=StandstillLimits(), measured_s={})
    watch.started({0: 70, 1: 71})
    watch.unlogged(1, "OSError: [Errno 28] No space left on device\n")
    watch.ended({0: -9, 1: 1}, killed=(0,))
    watch.close()
    first, second = watch.evidence(first_step=0).ranks
    assert (first.rank, first.host, first.pid, first.status, first.is_killed_here) == (0, "n0", 70, -9, True)
    assert (second.rank, second.pid, second.status, second.is_killed_here) == (1, 71, 1, False)
    assert "No space left" in second.log and "No space left" not in first.log


def test_ranks_that_fell_silent_are_suspects_of_a_standstill(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        beat = RankBeat(rank=rank, world=3, host="n0", activity=RankActivity.REDUCING, attempt="now")
        run.heartbeat(rank=rank).write_text(json.dumps(asdict(beat)))
    monkeypatch.setattr(supervise_module, "take_stacks", lambda beats: dict[int, RankStack]())
    monkeypatch.setattr(supervise_module, "_POLL_S", 60.0)
    watch = AttemptWatch(run, world=3, host="n0", name="now", limits=StandstillLimits(), measured_s={})
    silent = Standstill(kind="silent", silent=(2,), still_s=30.0, allowed_s=10.0)
    monkeypatch.setattr(watch._progress, "look", lambda beats, measured_s: silent)
    watch._look()
    watch.close()
    assert watch.hang is not None and watch.hang.culprits == (2,)
