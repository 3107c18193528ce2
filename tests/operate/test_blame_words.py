"""Words and statuses by which it is told who failed by itself, whose child died, and who followed."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import Cause, Culprit, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.hang import HangFinding

OWN = RankEnd(rank=1, host="n1", status=1, error="ValueError: of its own")


def found(*ends: RankEnd, **evidence: Any) -> Diagnosis:
    return diagnose(FailureEvidence(ranks=ends, **evidence))


@pytest.mark.parametrize(
    "error",
    [
        "RankLost: x",
        "ReportedElsewhere: x",
        "RuntimeError: Connection closed by peer [10.0.0.1]:1",
        "RuntimeError: Connection reset by peer",
        "DistBackendError: ncclRemoteError: x",
        "RuntimeError: Broken pipe",
        "RuntimeError: Another rank of this run is gone",
        "RuntimeError: remote process exited or there was a network error",
        "RuntimeError: a network error or a remote process exiting prematurely",
        "RuntimeError: NCCL communicator was aborted on rank 3.",
        "RuntimeError: NCCL communicator was aborted on rank 3",
    ],
)
def test_a_rank_that_lost_another_one_only_follows(error: str) -> None:
    follows = RankEnd(rank=0, host="n0", status=1, error=error)
    assert (found(follows, OWN).cause, found(follows, OWN).culprit.rank) == (Cause.EXCEPTION, 1)
    lost = found(follows)
    assert (lost.cause, lost.culprit, lost.sure) == (Cause.NETWORK, Culprit(), False)
    assert (lost.summary, lost.evidence) == (
        "ranks lost each other and none failed by itself",
        ("1 ranks ended as lost",),
    )


def test_ranks_whose_agent_is_gone_start_again_with_another() -> None:
    gone = [
        RankEnd(
            rank=rank, host="n0", status=1, error="PeerError: The agent of this rank is gone (Broken pipe)."
        )
        for rank in range(2)
    ]
    verdict = found(*gone)
    assert verdict.retries and not verdict.culprit.host
    assert verdict.summary == "the agent of this peer ended before its ranks; it has logged why"
    assert found(gone[0], OWN).culprit.rank == 1


@pytest.mark.parametrize(
    "client",
    ["ProtocolError", "HTTPConnection", "HTTPSConnectionPool", "urllib3", "aiohttp", "httpx", "botocore",
     "Request ID"],
)  # fmt: skip
def test_a_connection_to_a_server_is_no_connection_to_a_rank(client: str) -> None:
    """Its loss is a failure of the rank's own, which others only follow."""
    own = RankEnd(rank=0, host="n0", status=1, error=f"ReadError: {client}: Connection reset by peer")
    follows = RankEnd(rank=1, host="n1", status=1, error="RuntimeError: Connection reset by peer")
    verdict = found(follows, own)
    assert (verdict.culprit.rank, verdict.retries) == (0, verdict.cause != Cause.EXCEPTION)


@pytest.mark.parametrize(
    "log",
    [
        "watchdog thread terminated with exception: NCCL error",
        "taking the entire process down",
        "Terminating the process after attempting to dump debug info",
        "NCCL operations have failed or timed out",
        "dump signal due to a collective timeout",
        "detected by watchdog at work",
    ],
)
def test_a_rank_that_torch_aborts_has_not_crashed(log: str) -> None:
    aborted = RankEnd(rank=0, host="n0", status=-signal.SIGABRT, log=log)
    verdict = found(aborted, OWN)
    assert (verdict.cause, verdict.culprit.rank) == (Cause.EXCEPTION, 1)
    crashed = RankEnd(rank=0, host="n0", status=-signal.SIGABRT, log="Aborted (core dumped)")
    assert (found(crashed, OWN).cause, found(crashed, OWN).culprit.rank) == (Cause.CRASH, 0)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_a_rank_that_crashed_has_crashed_whatever_else_its_log_says(number: signal.Signals) -> None:
    end = RankEnd(rank=0, host="n0", status=-number, log="BrokenPipeError: Broken pipe")
    verdict = found(end, RankEnd(rank=1, host="n1", status=1, error="RankLost: x"))
    assert verdict.cause in (Cause.CRASH, Cause.BUS_ERROR) and verdict.culprit.rank == 0


@pytest.mark.parametrize(
    "words",
    [
        "exit status -4", "exit code: -11", "exitcode -9", "status -6", "code: -8", "status 132", "code 134",
        "exit code 135", "exit code 136", "status 137", "status 139", "signal 9", "SIGKILL",
        "the worker was killed", "died with <Signals.SIGTERM", "terminated with signal 7",
        "{SIGKILL(-9)}", "was terminated abruptly", "died unexpectedly", "exited unexpectedly",
    ],
)  # fmt: skip
def test_a_child_that_a_signal_ended_is_known_by_what_its_rank_says(words: str) -> None:
    end = RankEnd(rank=2, host="n1", status=1, error=f"RuntimeError: it ended with {words}")
    verdict = found(end)
    assert (verdict.cause, verdict.culprit.rank, verdict.sure) == (Cause.CRASH, 2, False)
    line = "Out of memory: Killed process 77 (python)"
    killed = found(end, kernel={"n1": [line]})
    assert (killed.cause, killed.evidence, killed.sure) == (Cause.OOM_KILLER, (f"n1: {line}",), False)
    assert killed.summary == "the kernel killed a process of the rank for want of memory"
    assert found(end, kernel={"n2": [line]}).cause == Cause.CRASH, "that is another machine"
    assert found(end, shm_free=0.01).cause == (
        Cause.BUS_ERROR if any(sign in words for sign in ("135", "signal 7")) else Cause.CRASH
    )


@pytest.mark.parametrize(
    "words", ["exit status 1", "exit code 3", "status -15", "status 130", "code 138", "code 1333"]
)
def test_a_child_that_ended_by_itself_is_no_crash(words: str) -> None:
    end = RankEnd(rank=2, host="n1", status=1, error=f"ValueError: it ended with {words}")
    assert found(end).cause == Cause.EXCEPTION


@pytest.mark.parametrize(
    ("state", "cause", "host"),
    [
        ("PREEMPTED", Cause.PREEMPTED, ""),
        ("TIMEOUT", Cause.PREEMPTED, ""),
        ("NODE_FAIL", Cause.NODE_LOST, "n7"),
        ("OUT_OF_MEMORY", Cause.OOM_KILLER, ""),
    ],
)
def test_the_word_of_the_scheduler_counts_before_what_ranks_say(state: str, cause: Cause, host: str) -> None:
    verdict = found(OWN, scheduler=state, silent_hosts=("n7", "n8"))
    assert verdict == Diagnosis(
        cause=cause, culprit=Culprit(host=host), summary=f"the scheduler says {state}",
        evidence=(f"scheduler: {state}",), sure=True,
    )  # fmt: skip
    assert found(OWN, scheduler=state).culprit.host == ""
    assert found(OWN, scheduler="FAILED").cause == Cause.EXCEPTION


@pytest.mark.parametrize(
    ("status", "number"), [(132, 4), (133, 5), (134, 6), (135, 7), (136, 8), (137, 9), (139, 11), (159, 31)]
)
def test_a_shell_adds_128_to_the_signal_that_ended_its_child(status: int, number: int) -> None:
    by_shell = found(RankEnd(rank=0, host="n0", status=status), shm_free=0.5)
    itself = found(RankEnd(rank=0, host="n0", status=-number), shm_free=0.5)
    assert by_shell == itself and by_shell.cause != Cause.UNKNOWN
    cut = ": a file that it had mapped became shorter, or its disk failed" if number == signal.SIGBUS else ""
    assert by_shell.summary == f"rank 0 was ended by {signal.Signals(number).name}{cut}"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("blk_update_request: I/O error, dev nvme0n1", Cause.STORAGE),
        ("nvme0: I/O Cmd(0x2) has an error", Cause.STORAGE),
        ("nfs: server filer not responding, still trying", Cause.STORAGE),
        ("eth0: up", Cause.BUS_ERROR),
    ],
)
def test_a_page_that_the_disk_did_not_give_ends_a_rank_by_sigbus(line: str, cause: Cause) -> None:
    verdict = found(
        RankEnd(rank=3, host="n1", status=-7), kernel={"n1": [line], "n2": ["I/O error"]}, shm_free=0.0
    )
    assert verdict.cause == cause
    assert verdict.summary == "rank 3 was ended by SIGBUS" + (f": {line}" if cause == Cause.STORAGE else "")


def test_all_ranks_that_were_asked_to_end_were_preempted_unless_one_failed_by_itself() -> None:
    ends = [RankEnd(rank=rank, host="n0", status=status) for rank, status in enumerate((143, -15))]
    assert found(*ends) == Diagnosis(
        cause=Cause.PREEMPTED, culprit=Culprit(), summary="all ranks were asked to end (SIGTERM)",
        evidence=("status 143",), sure=False,
    )  # fmt: skip
    assert found(*ends, OWN).cause == Cause.EXCEPTION
    assert found(RankEnd(rank=0, host="n0", status=-2)).cause == Cause.UNKNOWN
    killed = RankEnd(rank=0, host="n0", status=-9)
    assert found(killed).evidence == ("rank 0 was ended by SIGKILL",)


def test_a_hang_has_the_kernels_word_only_of_its_own_culprits() -> None:
    hang = HangFinding(culprits=(2,), hosts=("n1",), summary="rank 2 stands", evidence=("e",), sure=False)
    end = RankEnd(rank=2, host="n1", status=-9, is_killed_here=True, children=(77,))
    plain = Diagnosis(cause=Cause.HANG, culprit=Culprit(host="n1", rank=2), summary="rank 2 stands",
                      evidence=("e",), sure=False)  # fmt: skip
    assert found(end, hang=hang) == plain
    line = "Out of memory: Killed process 77 (cc1plus)"
    told = "the kernel killed a process for want of memory, and rank 2 stands"
    assert found(end, hang=hang, kernel={"n1": [line]}) == Diagnosis(
        cause=Cause.OOM_KILLER, culprit=Culprit(host="n1", rank=2), summary=told,
        evidence=(f"n1: {line}", "e"), sure=False,
    )  # fmt: skip
    assert found(end, hang=hang, kernel={"n1": [line.replace("77", "78")], "n2": [line]}) == plain
    several = HangFinding(culprits=(2, 3), hosts=("n1", "n2"), summary="s", evidence=(), sure=True)
    assert found(end, hang=several).culprit == Culprit()


def test_a_bus_error_beside_much_room_says_so() -> None:
    line = "ERROR: Unexpected bus error encountered in worker: insufficient shared memory (shm)."
    end = RankEnd(rank=5, host="n1", status=1, error=f"RuntimeError: {line}")
    room = "/dev/shm has 94 GiB free, so its size is not the cause"
    shown = f"RuntimeError: {line}"
    assert found(end, shm_free=0.99, shm_free_gib=94.4) == Diagnosis(
        cause=Cause.CRASH, culprit=Culprit(host="n1", rank=5), summary=f"{shown} ({room})",
        evidence=(f"log of rank 5: {shown}", room), sure=False,
    )  # fmt: skip
    assert found(end, shm_free=0.99, shm_free_gib=4.0).cause == Cause.CRASH
    assert found(end, shm_free=0.99, shm_free_gib=3.9).cause == Cause.BUS_ERROR


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", Cause.BUS_ERROR),
        ("OSError: [Errno 28] No space left on device: '/data/x'", Cause.NO_SPACE),
        ('OSError: [Errno 28] No space left on device: "/data/x"', Cause.NO_SPACE),
        ("OSError: No space left on device (/data/x)", Cause.NO_SPACE),
        ("OSError: No space left on device: /data/x", Cause.NO_SPACE),
        ("OSError: not enough disk space", Cause.NO_SPACE),
        ("E: StorageFull", Cause.NO_SPACE),
        ("Evicted: The node was low on resource: ephemeral-storage", Cause.NO_SPACE),
    ],
)
def test_what_is_full_is_shared_memory_where_no_path_is_named(line: str, cause: Cause) -> None:
    end = RankEnd(rank=0, host="n0", status=1, error=line)
    assert found(end, shm_free=0.01).cause == cause
    assert found(end, shm_free=0.02).cause == Cause.NO_SPACE


def test_a_message_of_the_scheduler_names_the_host_that_it_speaks_of() -> None:
    ends = [RankEnd(rank=0, host="n1"), RankEnd(rank=1, host="n11")]
    verdict = found(*ends, messages=["srun: x", "JOB 7 ON n11 CANCELLED DUE TO NODE FAILURE"])
    assert (verdict.cause, verdict.culprit, verdict.sure) == (Cause.NODE_LOST, Culprit(host="n11"), True)
    assert verdict.summary == "JOB 7 ON n11 CANCELLED DUE TO NODE FAILURE" == verdict.evidence[0]
    told = ["srun: error: n7: task 3: Killed", "slurmstepd: error: Detected 1 oom_kill event"]
    assert found(messages=told).culprit == Culprit(host="n7")


def test_gpu_memory_that_something_else_holds_at_the_start_is_the_nodes_fault() -> None:
    own = "torch.OutOfMemoryError: CUDA out of memory."
    others = f"{own} Process 9 has 77.1 GiB memory in use."
    driver = "RuntimeError: CUDA error: out of memory"
    for error, step, cause in (
        (own, 0, Cause.GPU_MEMORY), (others, 0, Cause.GPU_MEMORY_AT_START),
        (others, 5, Cause.GPU_MEMORY_AT_START),
        (others, 6, Cause.GPU_MEMORY), (driver, 5, Cause.GPU_MEMORY_AT_START), (driver, 6, Cause.GPU_MEMORY),
    ):  # fmt: skip
        end = RankEnd(rank=0, host="n0", status=1, error=error, step=step)
        assert found(end, first_step=5).cause == cause, (error, step)


def test_a_recipe_that_was_refused_blames_no_rank_and_the_first_line_tells_why() -> None:
    end = RankEnd(rank=3, host="n1", status=2, log="\n \nfirst words\nsecond\n")
    assert found(end) == Diagnosis(
        cause=Cause.BAD_RECIPE, culprit=Culprit(), summary="first words",
        evidence=("rank 3 ended with status 2",), sure=True,
    )  # fmt: skip
    silent = RankEnd(rank=3, host="n1", status=2)
    assert found(silent).summary == "refused at its start"


def test_a_rank_that_alone_failed_is_named_though_nothing_is_known_of_it() -> None:
    unknown = Diagnosis(cause=Cause.UNKNOWN, culprit=Culprit(host="n1", rank=3),
                        summary="nothing that was collected names a cause", evidence=(),
                        sure=False)  # fmt: skip
    alone = RankEnd(rank=3, host="n1", status=1)
    assert found(RankEnd(rank=0, host="n0", status=0), alone) == unknown
    assert found(alone, RankEnd(rank=0, host="n0", status=1)).culprit == Culprit()


def test_who_alone_lost_a_socket_of_python_is_named_as_likely() -> None:
    for error in (
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: Broken pipe",
    ):
        end = RankEnd(rank=3, host="n1", status=1, error=error)
        lost = RankEnd(rank=0, host="n0", status=3)
        assert found(lost, end) == Diagnosis(
            cause=Cause.NETWORK, culprit=Culprit(host="n1", rank=3), summary=error,
            evidence=(f"rank 3: {error}",), sure=False,
        )  # fmt: skip
        assert found(end, RankEnd(rank=0, host="n0", status=1, error=error)).culprit == Culprit()


def test_a_rank_that_torch_aborts_for_its_own_bad_gpu_is_named() -> None:
    log = "CUDA error: uncorrectable ECC error encountered\nNCCL operations have failed or timed out\n"
    bad = RankEnd(rank=1, host="n1", device="cuda:3", status=-signal.SIGABRT, log=log)
    verdict = found(RankEnd(rank=0, host="n0", status=3, error="RankLost: x"), bad)
    assert (verdict.cause, verdict.culprit) == (Cause.BAD_GPU, Culprit(host="n1", rank=1, gpu="3"))


def test_a_time_out_counts_though_a_rank_that_was_ended_had_dealt_with_an_exception() -> None:
    log = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=40, OpType=ALLREDUCE)\n"
    reports = RankEnd(rank=0, host="n0", status=-signal.SIGABRT, log=log)
    ended = RankEnd(rank=1, host="n1", status=-signal.SIGTERM, log="KeyError: 'cached'\nstep 7\n")
    assert found(reports, ended).cause == Cause.NCCL_TIMEOUT
    raised = RankEnd(rank=1, host="n1", status=1, log="KeyError: 'loss'\n")
    assert (found(reports, raised).cause, found(reports, raised).culprit.rank) == (Cause.EXCEPTION, 1)
