"""Failures from the field: what ranks, kernels and schedulers said, and the right verdict.

The forms of the messages are those of public reports (issues of torch, NCCL, Megatron-LM, SLURM's users, the
chronicles of the 13B model); names, numbers and addresses are others. What is right was written down before
the rules were tried on them.
"""

# ruff: noqa: E501  (messages as they come, in one line)

from __future__ import annotations

from dataclasses import dataclass

from bloomery.operate.diagnosis import Cause
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.hang import HangFinding

REMOTE = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, remote process exited or there was "
REMOTE += (
    "a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error."
)
LOST = "RankLost: Another rank of this run is gone"


@dataclass(frozen=True, kw_only=True)
class FieldFault:
    """A failure, its cause, its culprit as (host, rank), and whether the same start may succeed."""

    name: str
    evidence: FailureEvidence
    cause: Cause
    host: str = ""
    rank: int | None = None
    retries: bool


def world(
    bad: int | None = None, *, error: str = "", log: str = "", status: int = 1, **other
) -> list[RankEnd]:
    """Four ranks on two nodes; one failed, and the others ended because of it."""
    ends = []
    for rank in range(4):
        is_bad = rank == bad
        ends.append(
            RankEnd(
                rank=rank,
                host=f"gpu{rank // 2:02d}",
                device=f"cuda:{rank % 2}",
                pid=4000 + rank,
                status=status if is_bad else 71,
                error=error if is_bad else LOST,
                log=log if is_bad else "",
                step=other.get("step", 500),
            )
        )
    return ends


def said(name, cause, text, *, retries, rank=2, host="gpu01", bad=2, status=1, step=500, **evidence):
    """A failure that a rank's own words tell."""
    ranks = world(bad, log=f"Traceback (most recent call last):\n  File x\n{text}", status=status, step=step)
    return FieldFault(
        name=name,
        evidence=FailureEvidence(ranks=ranks, **evidence),
        cause=cause,
        host=host,
        rank=rank,
        retries=retries,
    )


def told(name, cause, evidence, *, retries, host="", rank=None):
    return FieldFault(name=name, evidence=evidence, cause=cause, host=host, rank=rank, retries=retries)


def watchdog(rank: int, *, sequence: int, enqueued: int) -> str:
    return (
        f"[rank{rank}]:[E807 02:07:08.408 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={sequence}, OpType=_REDUCE_SCATTER_BASE, NumelIn=544, NumelOut=68, "
        f"Timeout(ms)=600000) ran for 600061 milliseconds before timing out.\n"
        f"[rank{rank}]:[E807 02:07:08.409 ProcessGroupNCCL.cpp:1664] [PG 1 Rank {rank}] Exception (either an error "
        f"or timeout) detected by watchdog at work: {sequence}, last enqueued NCCL work: {enqueued}, last completed "
        f"NCCL work: {sequence - 1}."
    )


def all_ranks(logs: dict[int, str], *, status: int = -6) -> FailureEvidence:
    return FailureEvidence(
        ranks=[
            RankEnd(rank=rank, host=f"gpu{rank // 2:02d}", device=f"cuda:{rank % 2}", pid=4000 + rank)
            if log is None
            else RankEnd(
                rank=rank,
                host=f"gpu{rank // 2:02d}",
                device=f"cuda:{rank % 2}",
                status=status,
                log=log,
                step=500,
            )
            for rank, log in logs.items()
        ]
    )


def kernel(
    line: str, *, bad: int = 2, status: int = 1, host: str = "gpu01", error: str = ""
) -> FailureEvidence:
    return FailureEvidence(ranks=world(bad, status=status, error=error), kernel={host: [line]})


OOM_TEXT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.19 GiB is free. {}Including non-PyTorch memory, this process has 5.00 GiB memory in use."
)
IB = "NCCL WARN NET/IB : Got completion from peer 10.0.35.9<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv)"
HANG = HangFinding(culprits=(3,), hosts=("gpu01",), summary="rank 3 stands", evidence=("x",), sure=True)

FAULTS: list[FieldFault] = [
    # bad GPUs
    told(
        "fallen off the bus",
        Cause.BAD_GPU,
        kernel(
            "[81234.5] NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
        ),
        host="gpu01",
        retries=True,
    ),
    told(
        "double bit error",
        Cause.BAD_GPU,
        kernel("NVRM: Xid (PCI:0000:c6:00): 48, pid=4002, name=python3, DBE (double bit error) detected"),
        host="gpu01",
        retries=True,
    ),
    told(
        "uncontained error",
        Cause.BAD_GPU,
        kernel("NVRM: Xid (PCI:0000:5d:00): 95, pid=4002, name=python3, Uncontained: LTC TAG (0x2,0x0)"),
        host="gpu01",
        retries=True,
    ),
    told(
        "NVLink error",
        Cause.BAD_GPU,
        kernel(
            "NVRM: Xid (PCI:0000:9b:00): 74, pid=4002, name=python3, NVLink: fatal error detected on link 4"
        ),
        host="gpu01",
        retries=True,
    ),
    said(
        "ECC as torch says it",
        Cause.BAD_GPU,
        "RuntimeError: transform: failed to synchronize: "
        "cudaErrorECCUncorrectable: uncorrectable ECC error encountered\nterminate called after throwing an "
        "instance of 'c10::Error'",
        status=-6,
        retries=True,
    ),
    said(
        "GPU is lost",
        Cause.BAD_GPU,
        "RuntimeError: Unable to determine the device handle for GPU0000:3B:00.0: "
        "GPU is lost.  Reboot the system to recover this GPU",
        retries=True,
    ),
    # the kernel kills for memory
    told(
        "the rank itself",
        Cause.OOM_KILLER,
        kernel(
            "Memory cgroup out of memory: Killed process 4002 (python3) total-vm:98234kB, anon-rss:60123kB",
            status=-9,
        ),
        host="gpu01",
        rank=2,
        retries=True,
    ),
    told(
        "constraint memcg",
        Cause.OOM_KILLER,
        kernel(
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0,task=python3,pid=4002,uid=1000",
            status=-9,
        ),
        host="gpu01",
        rank=2,
        retries=True,
    ),
    told(
        "a child of the rank",
        Cause.OOM_KILLER,
        kernel(
            "Out of memory: Killed process 99123 (python3) total-vm:98234kB, anon-rss:60123kB",
            error="RuntimeError: the writer process ended with status -9",
        ),
        host="gpu01",
        rank=2,
        retries=True,
    ),
    told(
        "slurmstepd and srun",
        Cause.OOM_KILLER,
        FailureEvidence(
            ranks=world(2, status=-9),
            messages=[
                "slurmstepd: error: Detected 1 oom_kill event in StepId=440.0. Some of the step tasks have been OOM "
                "Killed.",
                "srun: error: gpu01: tasks 2-3: Out Of Memory",
            ],
        ),
        host="gpu01",
        retries=True,
    ),
    told(
        "slurmstepd of a node",
        Cause.OOM_KILLER,
        FailureEvidence(
            ranks=world(2, status=-9),
            messages=[
                "slurmstepd-gpu01: error: Detected 1 oom-kill event(s) in StepId=941.0. Some of your processes may "
                "have been killed by the cgroup out-of-memory handler."
            ],
        ),
        host="gpu01",
        retries=True,
    ),
    said(
        "a data worker killed",
        Cause.OOM_KILLER,
        "RuntimeError: DataLoader worker (pid 30882) is killed by signal: Killed.",
        retries=True,
    ),
    # shared memory
    said(
        "bus error in a worker",
        Cause.BUS_ERROR,
        "ERROR: Unexpected bus error encountered in worker. This might be "
        "caused by insufficient shared memory (shm).\nRuntimeError",
        retries=False,
    ),
    said(
        "worker killed by a bus error",
        Cause.BUS_ERROR,
        "RuntimeError: DataLoader worker (pid 30882) is killed by "
        "signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
        retries=False,
    ),
    said(
        "no space for a shared object",
        Cause.BUS_ERROR,
        "RuntimeError: unable to open shared memory object "
        "</torch_1234_567_89> in read-write mode: No space left on device (28)",
        retries=False,
    ),
    said(
        "no space for a shared file",
        Cause.BUS_ERROR,
        "RuntimeError: unable to write to file </torch_568_2388_0>: No space left on device (28)",
        retries=False,
    ),
    told(
        "SIGBUS with a full /dev/shm",
        Cause.BUS_ERROR,
        FailureEvidence(ranks=world(2, status=-7), shm_free=0.0),
        host="gpu01",
        rank=2,
        retries=False,
    ),
    # GPU memory
    said("too large", Cause.GPU_MEMORY, OOM_TEXT.format(""), retries=False),
    said(
        "too large on AMD",
        Cause.GPU_MEMORY,
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB.",
        retries=False,
    ),
    said(
        "cublas cannot allocate",
        Cause.GPU_MEMORY,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        retries=False,
    ),
    said(
        "NCCL cannot allocate",
        Cause.GPU_MEMORY,
        "torch.distributed.DistBackendError: NCCL error in: "
        "ProcessGroupNCCL.cpp:1970, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'",
        retries=False,
    ),
    # GPU memory that somebody else holds
    FieldFault(
        name="another process holds it",
        evidence=FailureEvidence(
            ranks=world(2, log=OOM_TEXT.format("Process 39182 has 71.10 GiB memory in use. "), step=0)
        ),
        cause=Cause.GPU_MEMORY_AT_START,
        host="gpu01",
        rank=2,
        retries=True,
    ),
    FieldFault(
        name="the first barrier finds no memory",
        evidence=FailureEvidence(
            ranks=world(
                2,
                log="    work = default_pg.barrier(opts=opts)\nRuntimeError: CUDA error: out of memory",
                step=0,
            )
        ),
        cause=Cause.GPU_MEMORY_AT_START,
        host="gpu01",
        rank=2,
        retries=True,
    ),
    # time-outs of collectives
    told(
        "one rank does not report",
        Cause.NCCL_TIMEOUT,
        all_ranks(
            {
                0: watchdog(0, sequence=1580, enqueued=1582),
                1: watchdog(1, sequence=1580, enqueued=1582),
                2: watchdog(2, sequence=1580, enqueued=1582),
                3: "",
            }
        ),
        host="gpu01",
        rank=3,
        retries=True,
    ),
    told(
        "one rank is behind",
        Cause.NCCL_TIMEOUT,
        all_ranks(
            {rank: watchdog(rank, sequence=7753, enqueued=7752 if rank == 1 else 7755) for rank in range(4)}
        ),
        host="gpu00",
        rank=1,
        retries=True,
    ),
    told(
        "the old form",
        Cause.NCCL_TIMEOUT,
        all_ranks(
            {
                rank: f"[E ProcessGroupNCCL.cpp:737] [Rank {rank}] Watchdog caught collective operation timeout: "
                "WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before "
                "timing out."
                if rank != 0
                else ""
                for rank in range(4)
            }
        ),
        host="gpu00",
        rank=0,
        retries=True,
    ),
    told(
        "nobody is behind",
        Cause.NCCL_TIMEOUT,
        all_ranks({rank: watchdog(rank, sequence=11, enqueued=12) for rank in range(4)}),
        retries=True,
    ),
    # networks
    told(
        "an IB completion error",
        Cause.NETWORK,
        all_ranks(
            {0: REMOTE, 1: REMOTE, 2: f"gpu01:3468:3905 [0] ib_plugin.c:1615 {IB}\n{REMOTE}", 3: REMOTE},
            status=1,
        ),
        host="gpu01",
        rank=2,
        retries=True,
    ),
    told(
        "a port error",
        Cause.NETWORK,
        all_ranks(
            {
                0: REMOTE,
                1: f"gpu00:11:22 [1] NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n{REMOTE}",
                2: REMOTE,
                3: REMOTE,
            },
            status=1,
        ),
        host="gpu00",
        rank=1,
        retries=True,
    ),
    told(
        "a link down",
        Cause.NETWORK,
        FailureEvidence(ranks=world(None), kernel={"gpu01": ["mlx5_core 0000:1a:00.0 ibp26s0: Link down"]}),
        host="gpu01",
        retries=True,
    ),
    told(
        "resets on all sides",
        Cause.NETWORK,
        all_ranks(
            {
                rank: "socketProgressOpt: Call to recv from 172.16.0.4<33759> failed : Connection reset by peer\n"
                + REMOTE
                for rank in range(4)
            },
            status=1,
        ),
        retries=True,
    ),
    said(
        "the rendezvous is not reached",
        Cause.NETWORK,
        "torch.distributed.DistNetworkError: The client socket has "
        "timed out after 600000ms while trying to connect to (gpu00, 29500).",
        retries=True,
    ),
    said(
        "no name service",
        Cause.NETWORK,
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        retries=True,
    ),
    # full disks
    said(
        "errno 28",
        Cause.NO_SPACE,
        "OSError: [Errno 28] No space left on device: '/scratch/run/step-000100'",
        retries=False,
    ),
    said(
        "torch's zip writer",
        Cause.NO_SPACE,
        "RuntimeError: [enforce fail at inline_container.cc:445] . "
        "PytorchStreamWriter failed writing file data/176: file write failed",
        retries=False,
    ),
    said(
        "no inodes",
        Cause.NO_SPACE,
        "StorageError: Saving failed at /x (no inodes are left: 3 GB free)",
        retries=False,
    ),
    # quotas
    said("errno 122", Cause.QUOTA, "OSError: [Errno 122] Disk quota exceeded: '/home/x/run'", retries=False),
    said(
        "write of a quota",
        Cause.QUOTA,
        "RuntimeError: write(): fd 29 failed with Disk quota exceeded",
        retries=False,
    ),
    # storage that went away
    said(
        "evicted by Lustre",
        Cause.STORAGE,
        "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/run/data/train.bin'",
        retries=True,
    ),
    said(
        "stale handle",
        Cause.STORAGE,
        "OSError: [Errno 116] Stale file handle: '/nfs/run/journal'",
        retries=True,
    ),
    said(
        "I/O error",
        Cause.STORAGE,
        "OSError: [Errno 5] Input/output error: '/lustre/data/train.bin'",
        retries=True,
    ),
    # what schedulers do
    told(
        "preempted",
        Cause.PREEMPTED,
        FailureEvidence(
            ranks=world(None),
            messages=[
                "slurmstepd: error: *** JOB 323917 ON gpu00 CANCELLED AT 2026-06-18T13:05:36 DUE TO PREEMPTION ***"
            ],
        ),
        host="gpu00",
        retries=True,
    ),
    told(
        "time limit",
        Cause.PREEMPTED,
        FailureEvidence(
            ranks=world(None),
            messages=[
                "slurmstepd: error: *** STEP 494.0 ON gpu01 CANCELLED AT 2026-04-20T09:09:37 DUE TO TIME LIMIT ***"
            ],
        ),
        host="gpu01",
        retries=True,
    ),
    told(
        "state TIMEOUT",
        Cause.PREEMPTED,
        FailureEvidence(ranks=world(None), scheduler="TIMEOUT"),
        retries=True,
    ),
    told(
        "all were asked to end",
        Cause.PREEMPTED,
        FailureEvidence(ranks=[RankEnd(rank=rank, host="gpu00", status=143) for rank in range(4)]),
        retries=True,
    ),
    # nodes that are gone
    told(
        "srun's node failure",
        Cause.NODE_LOST,
        FailureEvidence(ranks=world(None), messages=["srun: error: Node failure on gpu01"]),
        host="gpu01",
        retries=True,
    ),
    told(
        "the controller's node failure",
        Cause.NODE_LOST,
        FailureEvidence(
            ranks=world(None),
            messages=[
                "slurmstepd: error: *** STEP 635.0 ON gpu01 CANCELLED AT 2026-12-14T09:43:55 DUE TO NODE FAILURE, SEE "
                "SLURMCTLD LOG FOR DETAILS ***"
            ],
        ),
        host="gpu01",
        retries=True,
    ),
    told(
        "silence",
        Cause.NODE_LOST,
        FailureEvidence(ranks=world(None), silent_hosts=["gpu01"]),
        host="gpu01",
        retries=True,
    ),
    # crashes and kills
    told(
        "segmentation fault",
        Cause.CRASH,
        FailureEvidence(ranks=world(2, status=-11)),
        host="gpu01",
        rank=2,
        retries=True,
    ),
    told(
        "a shell's status 139",
        Cause.CRASH,
        FailureEvidence(ranks=world(2, status=139, log="Fatal Python error: Segmentation fault")),
        host="gpu01",
        rank=2,
        retries=True,
    ),
    said(
        "illegal memory access",
        Cause.CRASH,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        retries=True,
    ),
    told(
        "killed beside others that lost it",
        Cause.KILLED,
        FailureEvidence(ranks=world(2, status=-9)),
        host="gpu01",
        rank=2,
        retries=True,
    ),
    told(
        "a shell's status 137",
        Cause.KILLED,
        FailureEvidence(ranks=world(2, status=137)),
        host="gpu01",
        rank=2,
        retries=True,
    ),
    told(
        "a hang",
        Cause.HANG,
        FailureEvidence(ranks=world(3, status=-9), hang=HANG),
        host="gpu01",
        rank=3,
        retries=True,
    ),
    # what would fail again
    said(
        "device-side assert",
        Cause.EXCEPTION,
        "RuntimeError: CUDA error: device-side assert triggered",
        retries=False,
    ),
    said(
        "a missing module",
        Cause.EXCEPTION,
        "ModuleNotFoundError: No module named 'flash_attn'",
        retries=False,
    ),
    said(
        "a missing key", Cause.EXCEPTION, "KeyError: 'model.layers.0.self_attn.q_proj.weight'", retries=False
    ),
    said(
        "a damaged JSON",
        Cause.EXCEPTION,
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        retries=False,
    ),
    said(
        "no rights",
        Cause.EXCEPTION,
        "PermissionError: [Errno 13] Permission denied: '/data/run'",
        retries=False,
    ),
    told(
        "a refused recipe",
        Cause.BAD_RECIPE,
        FailureEvidence(
            ranks=[
                RankEnd(
                    rank=rank, host="gpu00", status=2, log="bloomery train: 1 mistake in the recipe:\n  1. x"
                )
                for rank in range(4)
            ]
        ),
        retries=False,
    ),
]
