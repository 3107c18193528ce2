"""The exception that ended a rank, what stands behind it, and what was dealt with before it."""

from __future__ import annotations

import pytest

from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import Cause, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.last_exception import log_of_exception


def verdict_of(*ends: RankEnd) -> Diagnosis:
    return diagnose(FailureEvidence(ranks=ends))


def lost(rank: int) -> RankEnd:
    return RankEnd(rank=rank, host="node0", status=3, error="RankLost: Another rank of this run is gone.")


CHAINED = """\
Traceback (most recent call last):
  File "loader.py", line 3, in read
botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL: "https://minio/corpus/1"

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "loader.py", line 9, in shard
RuntimeError: shard 311 cannot be read
"""
AFTER = (
    CHAINED
    + """\
Traceback (most recent call last):
  File "train.py", line 1, in step
KeyError: 'loss'
"""
)
PIPE = """\
download failed: s3://mirror/shard-77.tar to - An error occurred (503) when calling GetObject: Slow Down
Traceback (most recent call last):
  File "gopen.py", line 83, in wait_for_child
OSError: (('aws s3 cp s3://mirror/shard-77.tar -',), {}): exit 1 (read) {}
"""
NO_TRACEBACK = "gcs_client.cc:178: The service is unreachable.\nThe program will terminate.\n"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (CHAINED, Cause.STORAGE),
        (AFTER, Cause.EXCEPTION),
        (PIPE, Cause.STORAGE),
        (NO_TRACEBACK, Cause.NETWORK),
    ],
)
def test_what_stands_behind_the_last_exception_decides_whether_to_retry(log: str, cause: Cause) -> None:
    *_, last = log.splitlines()
    error = last if "Error" in last else ""
    verdict = verdict_of(lost(0), RankEnd(rank=1, host="node0", status=1, error=error, log=log))
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (cause, 1, cause != Cause.EXCEPTION)


PROBE = "WARNING batch-size probe: caught torch.OutOfMemoryError at mbs=8, falling back to mbs=4 (ok)\n"
ADAPTER = "n1:20:21 [3] NCCL WARN NET/IB : mlx5_2:1 Got async event : port error\n"
TRACE = "Traceback (most recent call last):\n  File 'x.py', line 1, in step\n"


@pytest.mark.parametrize(
    ("before", "error", "cause"),
    [
        (PROBE, "httpx.ReadTimeout: The read operation timed out", Cause.NETWORK),
        (PROBE, "KeyError: 'loss'", Cause.EXCEPTION),
        (ADAPTER, "RuntimeError: tensors on two devices, cuda:3 and cpu!", Cause.EXCEPTION),
        (ADAPTER, "torch.distributed.DistBackendError: NCCL error: unhandled system error", Cause.NETWORK),
        ("ld: No space left on device\n", "RuntimeError: Error building extension 'fused'", Cause.NO_SPACE),
        (f"{CHAINED}\n", "KeyError: 'loss'", Cause.EXCEPTION),
    ],
)
def test_what_was_dealt_with_before_an_exception_is_not_to_blame(
    before: str, error: str, cause: Cause
) -> None:
    """Of an exception that another library's trouble may have caused, what was printed before counts."""
    ended = RankEnd(rank=1, host="a", status=1, error=error, log=f"{before}{TRACE}{error}\n", step=9)
    verdict = verdict_of(lost(0), ended)
    assert (verdict.cause, verdict.culprit.rank) == (cause, 1)


def test_exceptions_that_were_raised_one_from_another_are_kept_together() -> None:
    prefixed = "".join(f"[rank1]: {line}\n" for line in CHAINED.splitlines())
    for log in (CHAINED, prefixed):
        error = "RuntimeError: shard 311 cannot be read"
        end = RankEnd(rank=1, host="a", status=1, error=error, log=PROBE + log)
        assert "ReadTimeoutError" in log_of_exception(end) and PROBE not in log_of_exception(end)


def test_a_connection_to_a_store_is_known_by_the_frames_of_its_client() -> None:
    frame = '  File "/v/site-packages/gcsfs/core.py", line 1121, in _cat_file\n'
    error = "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected"
    for extra, cause in ((frame, Cause.STORAGE), ("", Cause.NETWORK)):
        ended = RankEnd(rank=1, host="a", status=1, error=error, log=f"{TRACE}{extra}{error}\n")
        assert verdict_of(lost(0), ended).cause == cause


def test_a_lost_connection_to_a_store_is_of_storage_whatever_was_printed_before() -> None:
    log = "urllib3.exceptions.ProtocolError: ('Connection aborted.', RemoteDisconnected('closed'))\n"
    error = "botocore.exceptions.ConnectionClosedError: Connection was closed before a valid response"
    verdict = verdict_of(lost(0), RankEnd(rank=1, host="a", status=1, error=error, log=log + error))
    assert (verdict.cause, verdict.culprit.rank) == (Cause.STORAGE, 1)


IGNORED = """\
Exception ignored in: <function Writer.__del__ at 0x7f>
Traceback (most recent call last):
  File "w.py", line 9, in __del__
AttributeError: 'NoneType' object has no attribute 'close'
"""
NO_ROOM_IGNORED = IGNORED.replace("AttributeError: 'NoneType'", "OSError: [Errno 28] No space left: '/a'")
IN_THREAD = "Exception in thread Thread-3:\n" + TRACE + "OSError: [Errno 5] Input/output error: '/data/a'\n"
CHILD = "ServiceException: 503 Backend Error\nCommandException: 1 file/object could not be transferred.\n"
CHILD_FAILED = "subprocess.CalledProcessError: Command 'gsutil cp' returned non-zero exit status 1."
COMPILER = "fused.cu(12): warning #111-D: statement is unreachable\nfused.cu(14): error: expected a ;\n"
WANDB = "wandb: Network error (ReadTimeout), entering retry loop.\nthe tokenizer has too few words\n"


@pytest.mark.parametrize(
    ("log", "error", "cause"),
    [
        (f"{TRACE}OSError: [Errno 28] No space left on device: '/a'\n{IGNORED}", "", Cause.NO_SPACE),
        (f"{TRACE}torch.OutOfMemoryError: CUDA out of memory.\n{IGNORED}", "", Cause.GPU_MEMORY),
        (f"{IN_THREAD}{TRACE}RuntimeError: it has ended\n", "RuntimeError: it has ended", Cause.STORAGE),
        ("[rank0]: requests.exceptions.ConnectionError: HTTPSConnectionPool\n", "", Cause.NETWORK),
        (f"{CHILD}{TRACE}{CHILD_FAILED}\n", CHILD_FAILED, Cause.STORAGE),
        (f"{COMPILER}{TRACE}RuntimeError: Error building extension 'f'\n", "", Cause.EXCEPTION),
        (WANDB, "", Cause.UNKNOWN),
        (f"{NO_ROOM_IGNORED}{TRACE}KeyError: 'loss'\n", "KeyError: 'loss'", Cause.EXCEPTION),
        (f"epoch 1\n{NO_ROOM_IGNORED}{TRACE}KeyError: 'loss'\n", "KeyError: 'loss'", Cause.EXCEPTION),
        (f"{PROBE}{TRACE}KeyError: 'profile_name'\n", "KeyError: 'profile_name'", Cause.EXCEPTION),
    ],
)
def test_what_python_ignored_and_what_others_warned_of_hides_no_cause(
    log: str, error: str, cause: Cause
) -> None:
    ended = RankEnd(rank=1, host="a", status=1, error=error, log=log, step=9)
    verdict = verdict_of(lost(0), ended)
    assert (verdict.cause, verdict.culprit.rank) == (cause, 1)


def test_a_crash_counts_more_than_connections_that_the_program_did_without() -> None:
    logged = "WARNING:statsd:metrics are dropped: [Errno 111] Connection refused\n"
    shown = "2026-11-28 03:41:12,207 root [WARNING] Input/output error, reading again\n"
    for log in (
        logged,
        shown,
        "n1:12:90 [3] NCCL INFO Call to connect returned Connection refused, retrying\n",
        f"{logged}*** stack smashing detected ***: terminated\n",
        "[Errno 111] Connection refused\nfree(): invalid pointer\n",
    ):
        verdict = verdict_of(lost(0), RankEnd(rank=1, host="a", status=-6, log=log))
        assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause.CRASH, 1, True)
    terminated = "terminate called\n  what():  connect() failed: Connection refused\n"
    assert verdict_of(RankEnd(rank=1, status=-6, log=logged + terminated)).cause == Cause.NETWORK


def test_who_alone_loses_a_connection_of_python_is_named_and_of_several_none_is() -> None:
    """Ranks are connected by gloo and NCCL, which say it otherwise."""
    words = "ConnectionResetError: [Errno 104] Connection reset by peer"
    reset = RankEnd(rank=1, host="a", status=1, error=words)
    pipe = RankEnd(rank=2, host="b", status=1, error="BrokenPipeError: [Errno 32] Broken pipe")
    gloo = RankEnd(rank=3, host="c", status=1, error="RuntimeError: pair.cc:547 Connection reset by peer")
    for ends, culprit in (((lost(0), reset, gloo), 1), ((reset, pipe, gloo), None), ((lost(0), gloo), None)):
        verdict = verdict_of(*ends)
        assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause.NETWORK, culprit, True)


@pytest.mark.parametrize(
    ("log", "status", "cause"),
    [
        ("srun: error: gpu-114: task 21: Out Of Memory", -9, Cause.OOM_KILLER),
        ("[gpu-0031:2211] mm_posix.c:233 UCX ERROR failed to allocate: Out of memory", 1, Cause.UNKNOWN),
        ("gpu-12 [1] NCCL WARN Cuda failure 2 'out of memory'", 1, Cause.GPU_MEMORY),
        ("mem_heap.cpp:1509: non-zero status: 2 cuMemCreate failed", 1, Cause.GPU_MEMORY),
        ("OSError: [Errno 28] inotify watch limit reached", 1, Cause.EXCEPTION),
        ("==4750==ERROR: AddressSanitizer: heap-use-after-free on address 0x60", 1, Cause.CRASH),
        ("fatal error: unexpected signal during runtime execution", 2, Cause.CRASH),
        ("fatal error: runtime: out of memory", 2, Cause.OOM_KILLER),
        ("ClientException: Object PUT failed: 413 b'Upload exceeds quota.'", 1, Cause.QUOTA),
        ("swiftclient.exceptions.ClientException: GET failed: 502 Bad Gateway", 1, Cause.STORAGE),
    ],
)
def test_the_names_of_nodes_and_the_words_of_other_runtimes_are_told_apart(
    log: str, status: int, cause: Cause
) -> None:
    verdict = verdict_of(lost(0), RankEnd(rank=1, host="gpu-114", status=status, log=f"{log}\n", step=9))
    assert (verdict.cause, verdict.culprit.rank) == (cause, 1)


def test_a_name_that_cannot_be_resolved_is_of_the_network_whoever_asked_for_it() -> None:
    frame = '  File "/v/site-packages/s3fs/core.py", line 9, in _call\n'
    for error, cause in (
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", Cause.NETWORK),
        ("ConnectionError: connection refused", Cause.STORAGE),
    ):
        ended = RankEnd(rank=1, host="a", status=1, log=f"{TRACE}{frame}{error}\n")
        assert verdict_of(lost(0), ended).cause == cause
