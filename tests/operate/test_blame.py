"""Verdicts on injected faults: 12 kinds of 5 variants each, with real processes where a fault can be had."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import REMEDIES, Cause
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.hang import HangFinding

LOST = "RankLost: Another rank of this run is gone."


@dataclass(frozen=True, kw_only=True)
class Fault:
    cause: Cause
    evidence: FailureEvidence
    host: str = ""
    rank: int | None = None
    retries: bool


def ranks(world: int = 8, *, culprit: int | None = None, **of_culprit: object) -> list[RankEnd]:
    """The ends of all ranks, 4 on a node: the others lost the culprit."""
    usual = [
        RankEnd(
            rank=rank,
            host=f"node{rank // 4}",
            device=f"cuda:{rank % 4}",
            pid=900 + rank,
            status=3,
            error=LOST,
            step=40,
        )
        for rank in range(world)
    ]
    if culprit is not None:
        usual[culprit] = replace(usual[culprit], **{"status": 1, "error": "", **of_culprit})
    return usual


def real(code: str) -> tuple[int, str]:
    """How a process ends that runs `code`, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


LIMIT = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
REAL_EXCEPTIONS = (
    "raise ZeroDivisionError('a term of the loss')",
    "{}['missing']",
    "import json; json.loads('{')",
    "open('/no/such/file')",
    "assert False, 'a shape differs'",
)
REAL_WANT_OF_MEMORY = (
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); b'0' * (1 << 30)"
)
REAL_KILLS = tuple(f"import os; print('step {n}'); os.kill(os.getpid(), 9)" for n in range(5))
REAL_FULL = tuple(
    f"{LIMIT} resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    "import tempfile; f = tempfile.TemporaryFile(buffering=0)\n"
    "while True: f.write(b'0' * 4096)"
    for size in (4096, 8192, 12288)
)
DECOYS = {
    "node0": [
        "NVRM: Xid (PCI:0000:07:00): 13, Graphics Exception",
        "Out of memory: Killed process 31 (rsync)",
    ],
    "node1": ["NVRM: Xid (PCI:0000:0a:00): 92, high single-bit ECC error rate"],
}


def bad_gpu() -> list[Fault]:
    faults = []
    for number, words in (
        (48, "DBE (double bit error)"),
        (79, "GPU has fallen off the bus."),
        (95, "uncontained"),
    ):
        line = f"[Mon] NVRM: Xid (PCI:0000:1b:00): {number}, pid=907, {words}"
        log = "RuntimeError: CUDA error: unspecified launch failure"
        there = [
            replace(end, bus="0000:1b:00") if (end.host, end.device) == ("node1", "cuda:3") else end
            for end in ranks(culprit=7, log=log)
        ]
        evidence = FailureEvidence(ranks=there, kernel={**DECOYS, "node1": [line]})
        faults.append(Fault(cause=Cause.BAD_GPU, evidence=evidence, host="node1", rank=7, retries=True))
    for text in (
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: uncorrectable NVLink error detected",
    ):
        evidence = FailureEvidence(ranks=ranks(culprit=2, log=f"RuntimeError: {text}"), kernel=DECOYS)
        faults.append(Fault(cause=Cause.BAD_GPU, evidence=evidence, host="node0", rank=2, retries=True))
    return faults


def of_logs(cause: Cause, texts: tuple[str, ...], *, retries: bool, status: int = 1) -> list[Fault]:
    return [
        Fault(
            cause=cause,
            evidence=FailureEvidence(
                ranks=ranks(culprit=number, log=f"step 40 | loss 3\n{text}\n", status=status), kernel=DECOYS
            ),
            host=f"node{number // 4}",
            rank=number,
            retries=retries,
        )
        for number, text in enumerate(texts)
    ]


def of_processes(cause: Cause, programs: tuple[str, ...], *, retries: bool) -> list[Fault]:
    faults = []
    for number, program in enumerate(programs):
        status, log = real(program)
        evidence = FailureEvidence(ranks=ranks(culprit=number + 3, status=status, log=log), kernel=DECOYS)
        host = f"node{(number + 3) // 4}"
        faults.append(Fault(cause=cause, evidence=evidence, host=host, rank=number + 3, retries=retries))
    return faults


def no_space() -> list[Fault]:
    texts = (
        "StorageError: Saving a checkpoint failed at /scratch/run: No space left on device (3 MB free)",
        "OSError: [Errno 28] No space left on device: '/scratch/run/journal/0-0.jsonl'",
    )
    logged = of_logs(Cause.NO_SPACE, texts, retries=False)
    return of_processes(Cause.NO_SPACE, REAL_FULL, retries=False) + logged


def out_of_memory() -> list[Fault]:
    faults = []
    for rank, line in enumerate(
        (
            "Out of memory: Killed process 900 (python) total-vm:1kB",
            "Memory cgroup out of memory: Killed process 901 (python)",
            "oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=902,uid=1",
        )
    ):
        evidence = FailureEvidence(ranks=ranks(culprit=rank, status=-9), kernel={"node0": [line]})
        faults.append(Fault(cause=Cause.OOM_KILLER, evidence=evidence, host="node0", rank=rank, retries=True))
    evidence = FailureEvidence(ranks=ranks(culprit=5, status=-9), scheduler="OUT_OF_MEMORY")
    faults.append(Fault(cause=Cause.OOM_KILLER, evidence=evidence, retries=True))
    text = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. on node1"
    evidence = FailureEvidence(ranks=ranks(culprit=5, status=-9), messages=[text])
    return [*faults, Fault(cause=Cause.OOM_KILLER, evidence=evidence, host="node1", retries=True)]


def preempted() -> list[Fault]:
    asked = [replace(end, status=143, error="") for end in ranks()]
    line = "slurmstepd: error: *** STEP 7.0 ON node0 CANCELLED AT 2026-11-23T10:00:00 DUE TO {} ***"
    found = [
        FailureEvidence(ranks=asked, scheduler="PREEMPTED"),
        FailureEvidence(ranks=asked, scheduler="TIMEOUT"),
        FailureEvidence(ranks=asked, kernel=DECOYS),
    ]
    faults = [Fault(cause=Cause.PREEMPTED, evidence=evidence, retries=True) for evidence in found]
    for why in ("PREEMPTION", "TIME LIMIT"):
        evidence = FailureEvidence(ranks=asked, messages=[line.format(why)])
        faults.append(Fault(cause=Cause.PREEMPTED, evidence=evidence, host="node0", retries=True))
    return faults


def node_lost() -> list[Fault]:
    others = [replace(end, status=None, error="") if end.rank > 3 else end for end in ranks()]
    text = "the launcher on node1 has been silent for 10 s; ending the ranks here"
    failure = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT now DUE TO NODE FAILURE ***"
    found = [
        FailureEvidence(ranks=others, silent_hosts=["node1"]),
        FailureEvidence(ranks=others, silent_hosts=["node1"], scheduler="NODE_FAIL"),
        FailureEvidence(ranks=others, messages=[text]),
        FailureEvidence(ranks=others, silent_hosts=["node1"], kernel={"node0": DECOYS["node0"]}),
        FailureEvidence(ranks=others, silent_hosts=["node1"], messages=[failure], scheduler="NODE_FAIL"),
    ]
    return [Fault(cause=Cause.NODE_LOST, evidence=one, host="node1", retries=True) for one in found]


def nccl_timeouts() -> list[Fault]:
    faults = []
    for absent in range(1, 6):
        text = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=40, OpType=ALLREDUCE)"
        ends = [replace(end, status=-6, error="", log=text.format(end.rank)) for end in ranks()]
        ends[absent] = replace(ends[absent], log="step 40 | loss 3", status=-15)
        evidence = FailureEvidence(ranks=ends, kernel=DECOYS)
        host = f"node{absent // 4}"
        faults.append(
            Fault(cause=Cause.NCCL_TIMEOUT, evidence=evidence, host=host, rank=absent, retries=True)
        )
    return faults


def hangs() -> list[Fault]:
    faults = []
    for rank in range(5):
        finding = HangFinding(
            culprits=(rank,), hosts=("node0",), summary="", evidence=("rank stands",), sure=True
        )
        ends = [replace(end, status=-9, error="") for end in ranks()]
        evidence = FailureEvidence(ranks=ends, hang=finding, kernel=DECOYS)
        host = "node0"
        faults.append(Fault(cause=Cause.HANG, evidence=evidence, host=host, rank=rank, retries=True))
    return faults


def gpu_memory_at_start() -> list[Fault]:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total of "
        "79 GiB of which 1 GiB is free. Process {} has 77.11 GiB memory in use."
    )
    ends = [ranks(culprit=rank, step=100, log=text.format(rank + 1)) for rank in range(5)]
    return [
        Fault(
            cause=Cause.GPU_MEMORY_AT_START,
            evidence=FailureEvidence(ranks=end, first_step=100, kernel=DECOYS),
            host=f"node{rank // 4}",
            rank=rank,
            retries=True,
        )
        for rank, end in enumerate(ends)
    ]


def gpu_memory() -> list[Fault]:
    texts = tuple(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n}.00 GiB." for n in range(1, 6)
    )
    return of_logs(Cause.GPU_MEMORY, texts, retries=False)


def bus_errors() -> list[Fault]:
    text = (
        "RuntimeError: unable to write to file </torch_1>: DataLoader worker is killed by signal: Bus error. "
        "It is possible that dataloader's workers are out of shared memory."
    )
    logged = of_logs(Cause.BUS_ERROR, (text, "ERROR: insufficient shared memory (shm)"), retries=False)
    for rank in range(3):
        evidence = FailureEvidence(ranks=ranks(culprit=rank, status=-signal.SIGBUS), shm_free=0.001 * rank)
        logged.append(Fault(cause=Cause.BUS_ERROR, evidence=evidence, host="node0", rank=rank, retries=False))
    return logged


QUOTA = tuple(f"OSError: [Errno 122] Disk quota exceeded: '/work/run/{n}'" for n in range(5))

KINDS: dict[str, Callable[[], list[Fault]]] = {
    "bad GPU": bad_gpu,
    "exception": lambda: of_processes(Cause.EXCEPTION, REAL_EXCEPTIONS, retries=False),
    "killed": lambda: of_processes(Cause.KILLED, REAL_KILLS, retries=True),
    "no space": no_space,
    "quota": lambda: of_logs(Cause.QUOTA, QUOTA, retries=False),
    "out of memory": out_of_memory,
    "preempted": preempted,
    "node lost": node_lost,
    "NCCL time-out": nccl_timeouts,
    "hang": hangs,
    "GPU memory": lambda: gpu_memory_at_start()[:2] + gpu_memory()[:3],
    "bus error": bus_errors,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_the_culprit_and_whether_to_retry_are_right(kind: str) -> None:
    faults = KINDS[kind]()
    assert len(faults) == 5
    for fault in faults:
        diagnosis = diagnose(fault.evidence)
        assert diagnosis.cause == fault.cause, diagnosis
        assert diagnosis.retries == fault.retries, diagnosis
        assert (diagnosis.culprit.host, diagnosis.culprit.rank) == (fault.host, fault.rank), diagnosis
        assert diagnosis.evidence and diagnosis == diagnose(fault.evidence)


def test_every_cause_has_a_remedy() -> None:
    assert set(REMEDIES) == set(Cause)


def test_a_bad_gpu_is_named_with_its_node_and_the_line_that_shows_it() -> None:
    diagnosis = diagnose(bad_gpu()[0].evidence)
    assert (diagnosis.culprit.host, diagnosis.culprit.gpu, diagnosis.sure) == ("node1", "3", True)
    assert str(diagnosis).startswith("node1, GPU 3, rank 7: Xid 48") and str(diagnosis).endswith("sure")


def test_ranks_that_only_lost_each_other_blame_the_network_as_likely() -> None:
    diagnosis = diagnose(FailureEvidence(ranks=ranks()))
    assert diagnosis.cause == Cause.NETWORK and not diagnosis.sure


def test_nothing_known_is_said_to_be_unknown() -> None:
    assert diagnose(FailureEvidence()).cause == Cause.UNKNOWN


def told_by(line: str, **evidence: object) -> FailureEvidence:
    return FailureEvidence(ranks=ranks(culprit=5, log=line), **evidence)  # type: ignore[arg-type]


def test_a_bus_error_beside_a_large_shared_memory_is_tried_again() -> None:
    """The 13B model of BigScience: once in five weeks, with 1% of 94 GB of /dev/shm in use."""
    line = "RuntimeError: DataLoader worker (pid 30882) is killed by signal: Bus error."
    roomy = diagnose(told_by(line, shm_free=0.99, shm_free_gib=93.0))
    assert (roomy.cause, roomy.retries, roomy.sure, roomy.culprit.rank) == (Cause.CRASH, True, False, 5)
    assert "Bus error" in roomy.summary and "93 GiB free" in roomy.summary
    small = diagnose(told_by(line, shm_free=1.0, shm_free_gib=0.06))
    assert (small.cause, small.retries) == (Cause.BUS_ERROR, False)
    assert diagnose(told_by(line)).cause == Cause.BUS_ERROR


def test_what_torch_says_of_a_full_disk_is_no_fault_of_the_program() -> None:
    line = "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
    assert diagnose(told_by(line)).cause == Cause.NO_SPACE


def test_no_space_without_a_path_is_that_of_a_full_shared_memory() -> None:
    full = diagnose(told_by("OSError: [Errno 28] No space left on device", shm_free=0.0))
    assert (full.cause, full.retries, full.culprit.rank) == (Cause.BUS_ERROR, False, 5)
    named = told_by("OSError: [Errno 28] No space left on device: '/scratch/run/x'", shm_free=0.0)
    assert diagnose(named).cause == Cause.NO_SPACE
    line = "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left (28)"
    assert diagnose(told_by(line)).cause == Cause.BUS_ERROR


def test_a_rank_that_waits_for_a_child_which_the_kernel_killed_is_out_of_memory() -> None:
    finding = HangFinding(
        culprits=(5,), hosts=("node1",), summary="rank 5 stands", evidence=("x",), sure=True
    )
    killed = "Memory cgroup out of memory: Killed process 99123 (python3) total-vm:98234kB"
    one = [replace(end, status=-9, is_killed_here=True, error="") for end in ranks()]
    verdict = diagnose(FailureEvidence(ranks=one, hang=finding, kernel={"node1": [killed]}))
    assert (verdict.cause, verdict.culprit.rank, verdict.sure) == (Cause.OOM_KILLER, 5, False)
    elsewhere = diagnose(FailureEvidence(ranks=one, hang=finding, kernel={"node0": [killed]}))
    assert elsewhere.cause == Cause.HANG


@pytest.mark.parametrize(("children", "cause"), [((99123,), Cause.OOM_KILLER), ((99124,), Cause.HANG)])
def test_a_neighbours_process_that_the_kernel_killed_says_nothing_of_a_rank_that_hangs(
    children: tuple[int, ...], cause: Cause
) -> None:
    finding = HangFinding(
        culprits=(5,), hosts=("node1",), summary="rank 5 stands", evidence=("x",), sure=True
    )
    killed = "Memory cgroup out of memory: Killed process 99123 (python3) total-vm:98234kB"
    ended = [replace(end, status=-9, is_killed_here=True, error="", children=children) for end in ranks()]
    verdict = diagnose(FailureEvidence(ranks=ended, hang=finding, kernel={"node1": [killed]}))
    assert (verdict.cause, verdict.culprit.rank) == (cause, 5)


@pytest.mark.parametrize(
    "line",
    [
        "OSError: [Errno 121] Remote I/O error: '/scratch/run/data/train.bin'",
        "OSError: [Errno 112] Host is down: '/scratch/run/data/train.bin'",
        "TimeoutError: [Errno 110] Connection timed out: '/scratch/run/data/train.bin'",
        "OSError: [Errno 113] No route to host: '/mnt/nfs/run/journal'",
    ],
)
def test_an_error_of_the_network_that_names_a_file_is_one_of_the_storage(line: str) -> None:
    verdict = diagnose(told_by(line))
    assert (verdict.cause, verdict.retries, verdict.culprit.rank) == (Cause.STORAGE, True, 5)


def test_an_error_of_the_network_that_names_no_file_is_none_of_the_storage() -> None:
    assert diagnose(told_by("OSError: [Errno 113] No route to host")).cause == Cause.NETWORK


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: HIP error: out of memory",
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.06 GB, max allowed: 9.07 GB)",
        "RuntimeError: [1] is setting up NCCL communicator: cudaErrorMemoryAllocation",
        "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources.",
    ],
)
def test_memory_of_an_accelerator_is_told_by_whatever_library_says_it(line: str) -> None:
    assert diagnose(told_by(line)).cause in (Cause.GPU_MEMORY, Cause.GPU_MEMORY_AT_START)


@pytest.mark.parametrize("status", [-5, 128 + 5, -31])
def test_every_signal_of_a_fault_in_native_code_is_a_crash(status: int) -> None:
    ended = [replace(end, status=status if end.rank == 5 else 1, error="") for end in ranks()]
    verdict = diagnose(FailureEvidence(ranks=ended))
    assert (verdict.cause, verdict.retries, verdict.culprit.rank) == (Cause.CRASH, True, 5)


def test_what_numpy_says_of_a_full_disk_is_no_fault_of_the_program() -> None:
    verdict = diagnose(told_by("OSError: 1048576 requested and 0 written"))
    assert (verdict.cause, verdict.retries) == (Cause.NO_SPACE, False)


def test_the_name_of_a_run_is_no_cause() -> None:
    log = "00:18:26 step 0 of 50, incarnation 1 of /tmp/NCCL-timeout/run\nValueError: invalid literal"
    assert diagnose(told_by(log)).cause == Cause.EXCEPTION


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1])
def test_a_rank_that_a_signal_from_outside_has_ended_was_killed(number: signal.Signals) -> None:
    verdict = diagnose(FailureEvidence(ranks=ranks(culprit=5, status=-number, error="", log="")))
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause.KILLED, 5, True)
    assert signal.Signals(number).name in verdict.summary


def test_a_rank_that_finds_no_memory_may_find_it_when_it_is_started_again() -> None:
    (fault,) = of_processes(Cause.OOM_KILLER, (REAL_WANT_OF_MEMORY,), retries=True)
    verdict = diagnose(fault.evidence)
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (fault.cause, fault.rank, True)


def test_a_model_that_is_too_large_for_the_gpu_at_its_first_step_is_no_fault_of_the_node() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total of 79 GiB "
        "of which 1 GiB is free. Including non-PyTorch memory, this process has 77.1 GiB memory in use."
    )
    ends = ranks(culprit=2, step=100, log=text)
    verdict = diagnose(FailureEvidence(ranks=ends, first_step=100))
    assert (verdict.cause, verdict.retries) == (Cause.GPU_MEMORY, False)
