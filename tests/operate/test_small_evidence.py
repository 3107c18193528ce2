"""Facts on which a diagnosis, a drill or a probe of the storage turns, one at a time."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from bloomery import durable
from bloomery.errors import StorageError, TrainingFailed
from bloomery.events.heartbeat import RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import blame, storage_probe
from bloomery.operate.blame import _host_in, _host_of_srun, diagnose
from bloomery.operate.collective_timeout import diagnose_timeout
from bloomery.operate.diagnosis import Cause, Culprit
from bloomery.operate.drill import faults
from bloomery.operate.drill.allocation import DrillNodes
from bloomery.operate.drill.faults import DrillFault, DrillTarget, inject, strike, strike_on
from bloomery.operate.drill.phases import RecoveryPhases, phases_of
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.hang import HangFinding
from bloomery.operate.storage_probe import measure_storage
from bloomery.operate.timeouts import run_timeouts

KILLED = RankEnd(rank=3, host="n2", pid=77, status=-9)


def cause(*ends: RankEnd, **more: object) -> tuple[Cause, str]:
    found = diagnose(FailureEvidence(ranks=ends, **more))  # type: ignore[arg-type]
    return found.cause, found.culprit.host


def test_the_kernel_speaks_of_the_processes_of_its_own_machine() -> None:
    line = "Out of memory: Killed process 77 (python)"
    assert cause(KILLED, kernel={"n2": [line]}) == (Cause.OOM_KILLER, "n2")
    assert cause(KILLED, kernel={"n1": [line]}) == (Cause.KILLED, "n2")
    assert cause(KILLED, kernel={"n2": [line.replace("77", "78")]}) == (Cause.KILLED, "n2")
    by_systemd = {"n2": ["systemd-oomd[9]: Killed /user.slice/x due to memory pressure"]}
    assert cause(KILLED, kernel=by_systemd)[0] == Cause.OOM_KILLER
    assert cause(replace(KILLED, is_killed_here=True), kernel=by_systemd)[0] != Cause.OOM_KILLER
    assert cause(replace(KILLED, is_killed_here=True)) == (Cause.UNKNOWN, "n2")


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    verdict = diagnose(FailureEvidence(ranks=[replace(KILLED, status=-37)]))
    assert (verdict.cause, verdict.summary) == (Cause.KILLED, "rank 3 was ended by signal 37")


def test_the_logs_of_hundreds_of_ranks_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, is_consequence = list[int](), blame._is_consequence
    monkeypatch.setattr(blame, "_is_consequence", lambda end: judged.append(end.rank) or is_consequence(end))
    ends = [RankEnd(rank=rank, host="n1", status=1, log="nothing that names a cause") for rank in range(9)]
    assert cause(*ends)[0] == Cause.UNKNOWN
    assert sorted(judged) == sorted([*range(9), *range(9)])  # once more for whether all lost another


@pytest.mark.parametrize(
    ("free", "found"),
    [(0.019, Cause.BUS_ERROR), (0.02, Cause.CRASH), (0.021, Cause.CRASH), (None, Cause.BUS_ERROR)],
)
def test_a_bus_error_is_blamed_on_shared_memory_that_is_full(free: float | None, found: Cause) -> None:
    bus_error = RankEnd(rank=0, host="n1", status=-7)
    assert cause(bus_error, shm_free=free)[0] == found
    verdict = diagnose(FailureEvidence(ranks=[bus_error], shm_free=free))
    assert verdict.sure == (free == 0.019)


def test_an_adapter_that_a_rank_complained_of_and_lived_with_is_no_cause() -> None:
    line = "NET/IB : Got async event : port error"
    log = f"node1:7:8 [0] misc/ibvwrap.cc:34 NCCL WARN {line}\nNCCL WARN NET/IB: Got completion with error 12"
    failed = RankEnd(rank=1, host="n2", status=1, log="Traceback (most recent call last):\nKeyError: 'a'\n")
    assert cause(RankEnd(rank=0, host="n1", status=0, log=log), failed) == (Cause.EXCEPTION, "n2")


def test_a_drill_starts_ranks_again_after_faults_that_end_them() -> None:
    lived_through = {fault for fault in DrillFault if not fault.ends_attempt}
    assert lived_through == {DrillFault.SLOW, DrillFault.STORE, DrillFault.DISK}


@pytest.mark.parametrize(
    ("fault", "number"),
    [("kill", 9), ("crash", 11), ("hang", 19), ("flip", 9), ("shm", 7), ("launcher", 9)],
)
def test_each_fault_sends_its_signal(monkeypatch: pytest.MonkeyPatch, fault: str, number: int) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, int(number))))
    strike(DrillFault(fault), 77)
    assert sent == [(77, number)]


def test_what_is_damaged_or_full_is_so_before_a_rank_is_killed_and_a_launcher_is_struck_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(faults, "flip_checkpoint_bit", lambda rundir, rng: done.append("flip"))
    monkeypatch.setattr(faults, "_fill", lambda directory, *, for_s: done.append(directory))
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append(pid))
    beats, shm = [RankBeat(host="n1", pid=5)], tmp_path / "shm"
    target = DrillTarget(rundir=RunDirectory(tmp_path), beats=beats, launcher=66, shm=shm)
    for fault in (DrillFault.FLIP, DrillFault.SHM, DrillFault.LAUNCHER, DrillFault.KILL):
        inject(fault, target, Random(0))
    assert done == ["flip", 5, shm, 5, 66, 5]


def test_a_fault_that_did_not_reach_its_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [SimpleNamespace(returncode=0, stderr=""), SimpleNamespace(returncode=1, stderr="no step")]
    commands: list[list[str]] = []
    monkeypatch.setattr(
        faults.subprocess, "run", lambda command, **more: commands.append(command) or answers.pop(0)
    )
    nodes = DrillNodes(count=2, here="n1", is_allocation=True)
    strike_on("n2", DrillFault.HANG, 77, nodes=nodes)
    assert commands[0][0] == "srun" and "--nodelist=n2" in commands[0]
    assert commands[0][-3:] == ["--strike", "hang", "77"]
    with pytest.raises(TrainingFailed, match="no step"):
        strike_on("n2", DrillFault.HANG, 77, nodes=nodes)
    assert nodes.reach("n1") == [] == DrillNodes().reach("n2")


def test_the_launcher_of_the_newest_job_is_struck(tmp_path: Path) -> None:
    for number, (job, pid) in enumerate((("b", 1), ("a", 2), ("c", 3))):
        card = tmp_path / "launchers" / job / "n1.json"
        card.parent.mkdir(parents=True)
        card.write_text(json.dumps({"pid": pid}))
        os.utime(card, (1000.0 + number % 2, 1000.0 + number % 2))
    assert faults._launcher_on("n1", RunDirectory(tmp_path)) == 2


def test_the_phases_of_a_recovery_begin_with_the_attempt_that_follows() -> None:
    operations = [{"event": "attempt_end", "time": 110.0}, {"event": "attempt", "time": 112.0}]
    late = [{"event": "start", "time": 111.0}, {"event": "step", "time": 111.5}]
    events = [*late, {"event": "start", "time": 120.0}, {"event": "step", "time": 121.0}]
    told = phases_of(100.0, noticed=115.0, operations=operations, events=events)
    assert told == RecoveryPhases(
        noticed=15.0, ended=0.0, restarted=0.0, started=5.0, loaded=0.0, stepped=1.0
    ), "what a rank of before wrote is none of it, and no second counts twice"
    assert told.total_s == 21.0


def test_storage_that_returns_something_else_and_syncs_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_probe, "_BLOCK", 64)
    synced: list[int] = []
    contents: list[bytes] = []
    sync, read = durable.sync_file, storage_probe._read

    def noted(path: Path) -> str:
        contents.append(path.read_bytes())
        return read(path)

    monkeypatch.setattr(durable, "sync_file", lambda file: synced.append(file) or sync(file))
    monkeypatch.setattr(storage_probe, "_read", noted)
    assert measure_storage(tmp_path / "probe", total=400, writers=2).is_equal and len(synced) == 2
    for content in contents:
        blocks = [content[begin : begin + 64] for begin in range(0, 200, 64)]
        assert len(content) == 200 and len(set(blocks)) == 4, "no file system can store a block once"
    monkeypatch.setattr(storage_probe, "_read", lambda path: "something else")
    assert not measure_storage(tmp_path / "probe", total=400, writers=2).is_equal


def test_what_was_written_is_dropped_from_memory_before_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    advised, read, sync = os.posix_fadvise, storage_probe._read, durable.sync_file

    def advise(file: int, begin: int, size: int, advice: int) -> None:
        assert (begin, size, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        done.append("dropped")
        advised(file, begin, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(durable, "sync_file", lambda file: done.append("synced") or sync(file))
    monkeypatch.setattr(storage_probe, "_read", lambda path: done.append("read") or read(path))
    (tmp_path / "left" / "probe").mkdir(parents=True)  # of a measurement that was killed
    for run in ("new", "left"):
        done.clear()
        measure_storage(tmp_path / run / "probe", total=8, writers=1)
        assert done == ["synced", "dropped", "read"]


def test_a_save_takes_until_all_is_written_and_a_load_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 13.0, 18.0])
    monkeypatch.setattr(storage_probe, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    times = measure_storage(tmp_path / "probe", total=8, writers=2)
    assert (times.save_s, times.load_s) == (3.0, 5.0)


def test_a_measurement_is_not_taken_for_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = storage_probe._read

    def looked_after(path: Path) -> str:
        os.utime(path.parent, (0.0, 0.0))
        durable.remove_abandoned(tmp_path, "probe")
        return read(path)

    monkeypatch.setattr(storage_probe, "_read", looked_after)
    assert measure_storage(tmp_path / "probe", total=8, writers=1).is_equal


def test_a_disk_that_refuses_a_file_is_told_and_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = storage_probe._write

    def refusing(path: Path, size: int) -> str:
        if path.name == "writer-0":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, size)

    monkeypatch.setattr(storage_probe, "_write", refusing)
    with pytest.raises(StorageError, match="Measuring the storage"):
        measure_storage(tmp_path / "probe", total=8, writers=2)
    assert not (tmp_path / "probe").exists()


def test_ranks_that_write_rarely_are_silent_later() -> None:
    table = {row.name: row.seconds for row in run_timeouts({0: RankBeat(world=1000)})}
    assert table["silence of a process"] == 30.0


def timed_out(
    *texts: str, hosts: str = "aabb", flights: dict[int, int] | None = None
) -> tuple[str, int | None]:
    """Return host and rank of whom ranks of these logs waited for."""
    ends = [
        RankEnd(
            rank=rank,
            host=hosts[rank],
            status=-6,
            log=text,
            flight={"0": (flights[rank], "all_reduce")} if flights else {},
        )
        for rank, text in enumerate(texts)
    ]
    found = diagnose_timeout(FailureEvidence(ranks=ends), ends[0], "a time-out").culprit
    return found.host, found.rank


REPORTS = "Watchdog caught collective operation timeout"


def test_who_did_not_come_is_named_by_the_surest_sign() -> None:
    named = f"{REPORTS}\nRank 3 failed to pass monitoredBarrier in 9 ms"
    assert timed_out(REPORTS, named, "nothing", REPORTS) == ("b", 3), "a barrier names it"
    reached = f"{REPORTS}\n[Rank 0]: rank 3 failed to reach monitoredBarrier"
    assert timed_out(reached, "nothing", REPORTS, REPORTS) == ("b", 3)
    stuck = "watchdog got stuck for 600 seconds"
    assert timed_out(REPORTS, stuck, REPORTS, REPORTS) == ("a", 1)
    assert timed_out(REPORTS, stuck, "nothing", REPORTS) == ("a", 1), "a watchdog knows better than silence"
    for hung in ("Terminating due to ProcessGroupNCCL watchdog hang", "This may be a GIL-induced hang"):
        assert timed_out(REPORTS, f"{hung}\n{REPORTS}", "nothing", REPORTS) == ("a", 1)
    assert timed_out(stuck, named, REPORTS, REPORTS) == ("b", 3), "a barrier knows better than a watchdog"
    assert timed_out(REPORTS, REPORTS, "nothing", REPORTS) == ("b", 2)
    behind = [f"{REPORTS}, last enqueued NCCL work: {number}" for number in (9, 9, 9, 7)]
    assert timed_out(*behind) == ("b", 3), "it had enqueued less than all others"
    assert timed_out(behind[0], behind[3], "nothing", "nothing") == ("", None), "two are missing"
    assert timed_out(REPORTS, REPORTS) == ("", None)


def test_collectives_are_counted_for_each_process_group_by_itself() -> None:
    def told(rank: int, *works: tuple[str, int]) -> str:
        lines = [
            f"[rank{rank}]:[E1206 ProcessGroupNCCL.cpp:1785] [PG ID {place} PG GUID {group} Rank {rank}] "
            f"Exception (either an error or timeout) detected by watchdog at work: 5, "
            f"last enqueued NCCL work: {number}, last completed NCCL work: 4."
            for place, (group, number) in enumerate(works)
        ]
        return "\n".join([REPORTS, *lines])

    whole, left, right = "0(default_pg)", "1(tensor)", "2(tensor)"
    others = [told(1, (left, 500), (whole, 31)), told(2, (whole, 31), (right, 700))]
    assert timed_out(told(0, (whole, 31), (left, 500)), *others, told(3, (right, 700), (whole, 30))) == (
        "b",
        3,
    )
    waits = told(0, (left, 499), (whole, 31))
    assert timed_out(waits, *others, told(3, (right, 700), (whole, 30))) == ("b", 3), "rank 0 waits for it"
    both = [waits, told(1, (left, 500), (whole, 30))]
    assert timed_out(*both, others[1], told(3, (right, 700))) == ("", None), "each waits for the other"
    assert timed_out(told(0, (whole, 31)), REPORTS, REPORTS, REPORTS) == ("", None), "one alone is not behind"
    old = [f"{REPORTS}\n[PG {group} Rank 0] x, last enqueued NCCL work: {n}" for group, n in ((1, 9), (2, 3))]
    assert timed_out(*old, *reversed(old)) == ("", None)


def test_ranks_of_one_host_that_did_not_come_name_their_host() -> None:
    assert timed_out(*[REPORTS] * 4, flights={0: 7, 1: 7, 2: 5, 3: 5}) == ("b", None)
    assert timed_out(*[REPORTS] * 4, flights={0: 7, 1: 5, 2: 5, 3: 7}) == ("", None)
    assert timed_out(*[REPORTS] * 4, flights={0: 7, 1: 7, 2: 5, 3: 7}) == ("b", 2)


def test_what_the_flight_recorder_and_the_log_say_of_a_time_out_are_both_shown() -> None:
    ends = [
        RankEnd(rank=rank, host="a", status=-6, flight={"0": (5 + rank, "all_reduce")}) for rank in (0, 1)
    ]
    found = diagnose_timeout(FailureEvidence(ranks=ends), ends[1], "a time-out")
    assert found.evidence == (f"flight recorder: {found.summary}", "log of rank 1: a time-out")
    assert found.culprit.rank == 0 and found.sure


def test_a_kill_counts_where_it_is_not_known_whose_process_it_was() -> None:
    hang = HangFinding(culprits=(0, 1), hosts=("n1",), summary="they stand", evidence=(), sure=True)
    line = "Out of memory: Killed process 55 (python)"

    def found(*children: tuple[int, ...] | None) -> Cause:
        ends = [
            RankEnd(rank=rank, host="n1", status=-9, is_killed_here=True, children=own)
            for rank, own in enumerate(children)
        ]
        return cause(*ends, hang=hang, kernel={"n1": [line]})[0]

    assert found((7,), None) == Cause.OOM_KILLER == found((7,), (55,)) and found((7,), (8,)) == Cause.HANG


def test_a_host_is_read_from_a_message_as_a_whole() -> None:
    ends = [RankEnd(rank=0, host="n1"), RankEnd(rank=1, host="n11")]
    assert _host_in("lost n11 and more", FailureEvidence(ranks=ends)) == "n11"
    assert _host_in("lost n2", FailureEvidence(ranks=ends, silent_hosts=["n2"])) == "n2"
    failed = ["srun: error: n1: task 0: Killed", "srun: error: n1: tasks 1-3: Exited"]
    assert _host_of_srun(FailureEvidence(messages=failed)) == "n1"
    assert _host_of_srun(FailureEvidence(messages=[*failed, "srun: error: n2: task 4: Killed"])) == ""


def test_a_rank_that_ended_well_tells_of_no_failure() -> None:
    well = RankEnd(
        rank=0, host="n1", status=0, log="RuntimeError: CUDA error: uncorrectable ECC error encountered"
    )
    assert cause(well, KILLED) == (Cause.KILLED, "n2")
    assert cause(replace(well, status=1), KILLED) == (Cause.BAD_GPU, "n1")


@pytest.mark.parametrize(
    ("free_gib", "found"), [(3.9, Cause.BUS_ERROR), (4.0, Cause.CRASH), (None, Cause.BUS_ERROR)]
)
def test_four_gibibytes_of_shared_memory_are_enough(free_gib: float | None, found: Cause) -> None:
    line = "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error."
    assert cause(RankEnd(rank=0, host="n1", status=1, log=line), shm_free_gib=free_gib) == (found, "n1")


def test_a_fault_of_the_node_that_names_no_gpu_blames_no_rank_whose_gpu_is_unknown() -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    found = diagnose(FailureEvidence(ranks=[RankEnd(rank=3, host="n1", status=1)], kernel={"n1": [line]}))
    assert (found.cause, found.culprit) == (Cause.BAD_GPU, Culprit(host="n1"))


def test_a_rank_that_reports_a_time_out_has_not_waited_in_vain_for_itself() -> None:
    watchdog = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    raised = (
        "Traceback (most recent call last):\ntorch.distributed.DistBackendError: NCCL communicator failed"
    )
    end = RankEnd(rank=0, host="n1", status=1, log=f"{watchdog}\n{raised}\n")
    assert cause(end)[0] == Cause.NCCL_TIMEOUT
    other = RankEnd(rank=1, host="n2", status=1, log="Traceback (most recent call last):\nKeyError: 'a'\n")
    assert cause(end, other)[0] == Cause.EXCEPTION


def test_a_recipe_that_is_wrong_is_no_nodes_fault() -> None:
    end = RankEnd(rank=0, host="n1", status=1, log="bloomery train: 2 mistakes in the recipe\n")
    found = diagnose(FailureEvidence(ranks=[end]))
    assert (found.cause, found.culprit, found.sure) == (Cause.BAD_RECIPE, Culprit(), True)


def test_what_a_rank_says_of_its_adapter_is_likely_and_what_the_kernel_says_of_a_link_is_sure() -> None:
    warned = RankEnd(rank=1, host="n2", status=1, log="NCCL WARN NET/IB: Got completion with error 12\n")
    found = diagnose(FailureEvidence(ranks=[warned]))
    assert (found.cause, found.culprit.rank, found.sure) == (Cause.NETWORK, 1, False)
    down = "mlx5_core 0000:0c:00.0 ib0: Link down"
    found = diagnose(FailureEvidence(ranks=[replace(warned, log="")], kernel={"n1": [down]}))
    assert (found.cause, found.culprit, found.sure) == (Cause.NETWORK, Culprit(host="n1"), True)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_measurement_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    held: list[int | None] = []
    hold = durable.hold_directory

    def noted(directory: Path) -> int | None:
        held.append(hold(directory) if has_locks else None)
        return held[0]

    monkeypatch.setattr(durable, "hold_directory", noted)
    assert measure_storage(tmp_path / "probe", total=8, writers=1).is_equal
    (lock,) = held
    assert (lock is not None) == has_locks
    if lock is not None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(lock)
