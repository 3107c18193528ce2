"""One line for each form of words by which a cause is known, and some that look like one and are none."""

from __future__ import annotations

import pytest
from tests.operate.known_words import WORDS
from tests.operate.passing_words import LASTING, OF_STORES, PASSING

from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import Cause
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.known_texts import (
    DRIVER_OUT_OF_MEMORY,
    HANDLED_ERROR,
    LINK_DOWN,
    MAYBE_TIMEOUT,
    bad_gpu_of,
    killed_process,
    transient_cause_of,
)
from bloomery.operate.last_exception import is_store_client_error

# ruff: noqa: E501  (messages as they come, in one line)


def words(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def cause_of(line: str, **evidence: object) -> Cause:
    end = RankEnd(rank=1, host="n1", status=1, error=line, step=9)
    return diagnose(FailureEvidence(ranks=[end], shm_free=0.5, **evidence)).cause  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", WORDS, ids=str)
def test_each_form_of_words_is_known(cause: Cause) -> None:
    assert {line: found for line in words(WORDS[cause]) if (found := cause_of(line)) != cause} == {}


def test_the_kernel_says_which_errors_of_a_gpu_want_a_reset() -> None:
    def is_bad(number: int, rest: str = ", it fell") -> bool:
        return bad_gpu_of(f"NVRM: Xid (PCI:0000:3b:00): {number}{rest}") is not None

    assert {number for number in range(1, 200) if is_bad(number, ", Fatal")} == {
        46, 48, 62, 63, 64, 74, 79, 94, 95, 109, 119, 120, 140, 143, 144, 145, 146, 147, 148, 149, 150, 154,
        158,
    }  # fmt: skip
    assert [number for number in range(143, 155) if is_bad(number, ", NonFatal x")] == [143, 154]
    assert not is_bad(154, ", action changed from 0x1 (Reset) to 0x0 (None) ")
    assert bad_gpu_of("NVRM: Xid (PCI:0000:3b:00): 79, x ") == ("0000:3b:00", "Xid 79 x")


KERNEL = {
    "amdgpu 0000:c1:00.0: GPU mode1 reset": ("0000:c1:00.0", "GPU mode1 reset"),
    "amdgpu 0000:c1:00.0: amdgpu: GPU Recovery Failed": ("0000:c1:00.0", "GPU Recovery Failed"),
    "amdgpu 0000:c1:00.0: GPU over temperature range": ("0000:c1:00.0", "GPU over temperature range"),
    "amdgpu 0000:c1:00.0: uncorrectable hardware error(ERREVENT)": (
        "0000:c1:00.0", "uncorrectable hardware error(ERREVENT)"),
    "amdgpu 0000:c1:00.0: Fatal error during GPU init": ("0000:c1:00.0", "Fatal error during GPU init"),
    "amdgpu 0000:c1:00.0: {12} new uncorrectable hardware errors": (
        "0000:c1:00.0", "{12} new uncorrectable hardware errors"),
    "nvidia 0000:98:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), x": (
        "0000:98:00", "PCIe Bus Error: severity=Uncorrectable (Fatal), x"),
    "pcieport 0000:97:01.0: AER: Uncorrected (Fatal) error received: 0000:98:00.0 x": (
        "0000:98:00", "AER: Uncorrected (Fatal) error received: 0000:98:00.0 x"),
    "NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62)": ("0000:a1:00", "RmInitAdapter failed! (0x62)"),
    "NVRM: GPU 0000:a1:00.0: GPU has fallen off the bus.": ("0000:a1:00", "GPU has fallen off the bus."),
    "NVRM: GPU 0000:a1:00: it is lost from the bus": ("0000:a1:00", "it is lost from the bus"),
    "NVRM: rpcSendMessage failed with status 0x0000000f": ("", "rpcSendMessage failed with status 0x0000000f"),
    "NVRM: nvAssert: GPU_IS_LOST": ("", "nvAssert: GPU_IS_LOST"),
    "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:": (
        "", "This PCI I/O region assigned to your NVIDIA device is invalid:"),
    "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 12028, Fatal, Link 32": (
        "", "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 12028, Fatal, Link 32"),
    "habanalabs hl0: device heartbeat failed": ("", "habanalabs hl0: device heartbeat failed"),
    "habanalabs hl0: PCI link is broken": ("", "habanalabs hl0: PCI link is broken"),
    "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 12028, Non-fatal, Link 32": None,
    "NVRM: loading NVIDIA UNIX Open Kernel Module": None,
}  # fmt: skip


def test_other_lines_of_the_kernel_name_the_bus_or_only_the_node() -> None:
    assert {line: bad_gpu_of(line) for line in KERNEL} == KERNEL


def test_the_process_that_the_kernel_killed_is_told_by_its_number() -> None:
    lines = {
        "Out of memory: Killed process 41 (python)": 41,
        "Memory cgroup out of memory: Killed process 42 (python)": 42,
        "oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=43,uid=0": 43,
        "Killed process 44 (python)": 0,
        "Out of memory: nothing": 0,
    }
    assert {line: killed_process(line) for line in lines} == lines


def test_the_kernel_tells_of_links_that_are_down() -> None:
    down = ("mlx5_core 0000:01:00.0 ib0: Link down", "hsn0: link is down", "ib1: carrier lost",
            "roce2: Carrier lost", "IB0: link is down")  # fmt: skip
    assert [bool(LINK_DOWN.search(line)) for line in down] == [True] * len(down)
    assert not LINK_DOWN.search("eth0: link is down") and not LINK_DOWN.search("mlx5_core a b: Link up")


def test_a_connection_of_a_stores_client_is_known_by_its_module_its_frame_or_its_address() -> None:
    modules = ("azure.core", "boto3.x", "botocore.x", "aiobotocore.x", "awscrt.x", "gcsfs.x", "oss2.x", "s3fs.x",
               "google.api_core.x", "google.cloud.x", "google.resumable_media.x")  # fmt: skip
    frames = (
        "adlfs",
        "azure/storage",
        "boto3",
        "botocore",
        "gcsfs",
        "google/cloud/storage",
        "s3fs",
        "s3transfer",
    )
    addresses = ("abfs://", "abfss://", "az://", "gs://", "hdfs://", "oss://", "s3://")
    lost = "ConnectionError: it is lost"
    for module in modules:
        assert is_store_client_error(RankEnd(rank=0, status=1, error=f"{module}.{lost}")), module
        assert not is_store_client_error(RankEnd(rank=0, status=1, error=f"my.{module}.{lost}")), module
    for frame in (*(f"site-packages/{frame}/" for frame in frames), *addresses):
        log = f'Traceback (most recent call last):\n  File "/x/{frame}a.py", line 1\n{lost}\n'
        assert is_store_client_error(RankEnd(rank=0, status=1, error=lost, log=log)), frame
    elsewhere = f'Traceback (most recent call last):\n  File "/x/site-packages/requests/a.py"\n{lost}\n'
    before = f"s3://b was read\n{elsewhere}"
    assert not is_store_client_error(RankEnd(rank=0, status=1, error=lost, log=before))


OTHERS = {
    "srun: error: n1: task 3: CUDA out of memory": Cause.EXCEPTION,
    "gpu-n1: out of memory": Cause.EXCEPTION,
    "GPU-node7: a/b: out of memory": Cause.EXCEPTION,
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory": Cause.OOM_KILLER,
    "slurmstepd: error: Detected 1 oom_kill event; CUDA out of memory": Cause.OOM_KILLER,
    "DISK QUOTA EXCEEDED": Cause.QUOTA,
    "NO SPACE LEFT ON DEVICE": Cause.NO_SPACE,
    "Disk Is Full": Cause.NO_SPACE,
    "INSUFFICIENT DISK SPACE": Cause.NO_SPACE,
    "ERRNO: 28": Cause.NO_SPACE,
    "myerrno 28": Cause.EXCEPTION,
    "errno 281": Cause.EXCEPTION,
    "Caught Collective Operation Timeout": Cause.NCCL_TIMEOUT,
    "Exceeded Memory Limit": Cause.OOM_KILLER,
    "Node Running Low On Memory": Cause.OOM_KILLER,
    "Mem 5KB Exceeded Limit": Cause.OOM_KILLER,
    "Cuda Out Of Memory": Cause.GPU_MEMORY,
    "CUBLAS error: allocation failed": Cause.GPU_MEMORY,
    "NAME OR SERVICE NOT KNOWN": Cause.NETWORK,
    "CONNECTION REFUSED": Cause.NETWORK,
    "Stale File Handle": Cause.STORAGE,
    "Lustre: x: Not Responding": Cause.STORAGE,
    "connect to 10.0.0.1<4000> failed, retrying": Cause.EXCEPTION,
    "NCCL operations have failed, a timeout": Cause.EXCEPTION,
    "/my/NCCL: a timeout": Cause.EXCEPTION,
    "nvidia-container-cli: requirement error: cuda>=12": Cause.EXCEPTION,
    "No such file [Errno 2]: Opening HDFS file": Cause.EXCEPTION,
    "[Errno 61] No data available": Cause.EXCEPTION,
    "[Errno 104] Connection reset": Cause.EXCEPTION,
    "no space left on device: '/dev/shm/a' -> '/data/b'": Cause.NO_SPACE,
    "a malloc(): corrupted top size": Cause.EXCEPTION,
    "a double free or corruption": Cause.EXCEPTION,
    "a *** stack smashing detected ***": Cause.EXCEPTION,
    "a MemoryError": Cause.EXCEPTION,
    "a fatal error: unexpected signal": Cause.EXCEPTION,
    "a CUDA error (/x/y.cu:42): invalid argument": Cause.EXCEPTION,
}


def test_words_that_look_alike_are_told_apart_and_capitals_make_no_difference() -> None:
    assert {line: cause_of(line) for line in OTHERS} == OTHERS


def test_what_may_pass_is_of_the_network_or_of_a_store() -> None:
    for cause, text in ((Cause.NETWORK, PASSING), (Cause.STORAGE, OF_STORES), (None, LASTING)):
        assert {line: found for line in words(text) if (found := transient_cause_of(line)) != cause} == {}
    assert transient_cause_of("E: try\nagain") == Cause.NETWORK
    assert transient_cause_of("x" * 4092 + " try again") is None, "only so many characters are searched"


def test_what_torch_says_of_an_abort_may_follow_from_a_time_out() -> None:
    lines = ("operations have failed or timed out", "due to a collective timeout", "due to collective timeout",
             "due to NCCL timeout", "due to a NCCL timeout", "due to CUDA watchdog hang",
             "flight recorder dump signal", "detected by watchdog at work")  # fmt: skip
    assert [bool(MAYBE_TIMEOUT.search(line)) for line in lines] == [True] * len(lines)
    driver = ("CUDA error: out of memory", "HIP error: out of memory", "CUDA driver error: out of memory",
              "Cuda failure 2 'out of memory'", "cudaErrorMemoryAllocation", "hipErrorOutOfMemory")  # fmt: skip
    assert [bool(DRIVER_OUT_OF_MEMORY.search(line)) for line in driver] == [True] * len(driver)
    assert not DRIVER_OUT_OF_MEMORY.search("CUDA out of memory. Tried to allocate 2 GiB")


def test_a_line_that_a_program_logged_is_one_that_it_dealt_with() -> None:
    handled = ("WARNING x", "2031 n1 [rank] INFO: x", "a b c d e (DEBUG) x", "INFO")
    assert [bool(HANDLED_ERROR.search(line)) for line in handled] == [True] * 4
    for line in ("a b c d e f WARNING", "NCCL WARN x", "ERROR x", "WARNINGS x"):
        assert not HANDLED_ERROR.search(line)
    assert cause_of("x WARNING connection refused") == Cause.EXCEPTION
    assert cause_of("x WARNING Input/output error") == Cause.EXCEPTION
