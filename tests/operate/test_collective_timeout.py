"""Time-outs of collectives and aborts by torch: which rank the others waited for, or failed by itself."""

from __future__ import annotations

import signal

import pytest

from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import Cause, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd

ABORT = -6
PREFIX = "[rank{0}]:[E1016 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank {0}] "
TERMINATING = "Terminating the process after attempting to dump debug info, due to {}."


def verdict_of(*ends: RankEnd) -> Diagnosis:
    return diagnose(FailureEvidence(ranks=ends))


def lost(rank: int) -> RankEnd:
    return RankEnd(rank=rank, host="node0", status=3, error="RankLost: Another rank of this run is gone.")


def test_ranks_that_torch_aborts_beside_an_exception_hide_it_not() -> None:
    said = "DistBackendError: NCCL error: remote process exited or there was a network error"
    aborted = RankEnd(rank=0, host="node0", status=ABORT, log=said)
    also = RankEnd(rank=2, host="node0", status=ABORT, log=PREFIX + TERMINATING.format("collective timeout"))
    raised = RankEnd(rank=1, host="node0", status=1, error="ValueError: no", log="ValueError: no")
    verdict = verdict_of(aborted, raised, also)
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause.EXCEPTION, 1, False)
    assert verdict_of(aborted).cause == Cause.NETWORK  # nobody is left who failed by itself


@pytest.mark.parametrize(
    "said",
    [
        "Some NCCL operations have failed or timed out. To avoid data inconsistency, we are taking the "
        "entire process down.\n  what():  NCCL error: remote process exited or there was a network error",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    ],
)
def test_an_exception_is_the_cause_and_not_what_waiting_ranks_report_of_it(said: str) -> None:
    waiting = [RankEnd(rank=rank, host="node0", status=ABORT, log=said) for rank in (0, 2, 3)]
    raised = RankEnd(rank=1, host="node0", status=1, error="ValueError: no", log="ValueError: no")
    verdict = verdict_of(waiting[0], raised, *waiting[1:])
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause.EXCEPTION, 1, False)


@pytest.mark.parametrize("why", ["collective timeout or exception", "ProcessGroupNCCL watchdog hang"])
def test_ranks_that_torch_aborts_after_a_time_out_name_the_one_that_says_nothing(why: str) -> None:
    ends = [
        RankEnd(rank=rank, host="node0", status=ABORT, log=PREFIX.format(rank) + TERMINATING.format(why))
        for rank in range(4)
    ]
    ends[2] = RankEnd(rank=2, host="node0", status=-9, is_killed_here=True)
    verdict = verdict_of(*ends)
    assert (verdict.cause, verdict.culprit.rank) == (Cause.NCCL_TIMEOUT, 2)


def test_a_watchdog_that_caught_a_time_out_is_believed_though_torch_aborts_its_rank() -> None:
    caught = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"
    log = caught + "To avoid data inconsistency, we are taking the entire process down."
    verdict = verdict_of(RankEnd(rank=0, host="node0", status=ABORT, log=log), RankEnd(rank=1, status=-15))
    assert (verdict.cause, verdict.culprit.rank) == (Cause.NCCL_TIMEOUT, 1)


WATCHDOG_ENDED = (
    "[rank1]:[E1 ProcessGroupNCCL.cpp:2] Process group watchdog thread terminated with exception: "
)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("CUDA error: an illegal memory access was encountered", Cause.CRASH),
        ("CUDA error: device-side assert triggered", Cause.EXCEPTION),
    ],
)
def test_a_watchdog_that_ends_by_an_error_of_its_own_gpu_names_its_rank(words: str, cause: Cause) -> None:
    waited = "[rank0]:[E1 ProcessGroupNCCL.cpp:3] [Rank 0] Watchdog caught collective operation timeout"
    for others in (lost(0), RankEnd(rank=0, host="node0", status=ABORT, log=waited)):
        verdict = verdict_of(others, RankEnd(rank=1, host="node0", status=ABORT, log=WATCHDOG_ENDED + words))
        assert (verdict.cause, verdict.culprit.rank) == (cause, 1)


def test_a_connection_that_is_tried_again_says_nothing_of_a_time_out() -> None:
    retry = (
        "NCCL INFO socketPollConnect: connect to 10.0.0.2<43> returned Connection refused, retrying (1/34)\n"
    )
    waited = "[rank0]:[E1 ProcessGroupNCCL.cpp:3] [Rank 0] Watchdog caught collective operation timeout"
    reporter = RankEnd(rank=0, host="n0", status=ABORT, log=retry + waited)
    verdict = verdict_of(reporter, RankEnd(rank=1, host="n1", status=-9, is_killed_here=True))
    assert (verdict.cause, verdict.culprit.rank) == (Cause.NCCL_TIMEOUT, 1)


def test_a_barrier_that_names_a_rank_and_a_watchdog_that_stood_still_name_the_culprit() -> None:
    barrier = "RuntimeError: Rank 1 failed to pass monitoredBarrier in 1800000 ms"
    verdict = verdict_of(
        *(RankEnd(rank=rank, host="a", status=1, error=barrier) for rank in (0, 2)),
        RankEnd(rank=1, host="b", status=-9, is_killed_here=True),
        RankEnd(rank=3, host="b", status=-9, is_killed_here=True),
    )
    assert (verdict.cause, verdict.culprit.rank) == (Cause.NCCL_TIMEOUT, 1)
    waits = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 600061 ms"
    stuck = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    verdict = verdict_of(
        RankEnd(rank=0, host="a", status=ABORT, log=waits), RankEnd(rank=1, host="b", status=ABORT, log=stuck)
    )
    assert (verdict.cause, verdict.culprit.rank) == (Cause.NCCL_TIMEOUT, 1)


@pytest.mark.parametrize(
    "log",
    [
        "[rank0]: taking the entire process down: collective timed out on work ALLREDUCE.",
        "[PG ID 2 Rank 0] Received a dump signal due to a collective timeout from  rank 5 and we will try",
        "[Rank 0] Exception (either an error or timeout) detected by watchdog at work: 7753, last enqueued",
        "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: k",
    ],
)
def test_an_abort_of_torch_that_tells_of_a_timeout_names_the_rank_that_tells_of_none(log: str) -> None:
    ends = [
        RankEnd(rank=0, host="a", status=-signal.SIGABRT, log=log),
        RankEnd(rank=1, host="b", status=-signal.SIGKILL, is_killed_here=True),
    ]
    diagnosis = diagnose(FailureEvidence(ranks=ends))
    assert (diagnosis.cause, diagnosis.culprit.rank) == (Cause.NCCL_TIMEOUT, 1)


@pytest.mark.parametrize(
    "log",
    [
        "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//barrier/7753",
        "[Rank 0] Caught collective operation timeout: WorkNCCL(SeqNum=7753, Timeout(ms)=1800000) ran on",
    ],
)
def test_the_witness_of_a_time_out_is_not_the_rank_that_did_not_come(log: str) -> None:
    hung = RankEnd(rank=1, host="a", status=-9, is_killed_here=True)
    verdict = verdict_of(RankEnd(rank=0, host="a", status=ABORT, log=log), hung)
    assert (verdict.cause, verdict.culprit.rank) == (Cause.NCCL_TIMEOUT, 1)


def test_a_communicator_that_was_aborted_says_nothing_of_its_own_rank() -> None:
    said = "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0."
    aborted = RankEnd(rank=0, host="node0", status=1, error=said, log=said)
    raised = RankEnd(rank=1, host="node0", status=1, error="ValueError: no", log="ValueError: no")
    verdict = verdict_of(aborted, raised)
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause.EXCEPTION, 1, False)
    assert verdict_of(aborted).cause == Cause.NETWORK


def test_an_error_of_cuda_that_nccl_does_not_name_is_a_crash_of_its_rank() -> None:
    said = (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 719 'unspecified'"
    )
    failed = RankEnd(rank=1, host="node0", status=1, error=said, log=said)
    waiting = RankEnd(
        rank=0, host="node0", status=ABORT, log="Watchdog caught collective operation timeout: "
    )
    verdict = verdict_of(waiting, failed)
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause.CRASH, 1, True)
