"""Words of libraries, kernels and torch that say what failed, and some that only follow from it."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import Cause, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.known_texts import bad_gpu_of

ABORT = -6


def verdict_of(*ends: RankEnd, **evidence: object) -> Diagnosis:
    return diagnose(FailureEvidence(ranks=ends, **evidence))  # type: ignore[arg-type]


def lost(rank: int) -> RankEnd:
    return RankEnd(rank=rank, host="node0", status=3, error="RankLost: Another rank of this run is gone.")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("http.client.RemoteDisconnected: Remote end closed connection without response", Cause.NETWORK),
        ("requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='x', port=443)", Cause.NETWORK),
        ("ssl.SSLEOFError: EOF occurred in violation of protocol (_ssl.c:2427)", Cause.NETWORK),
        ("RuntimeError: ncclSystemError: System call (e.g. socket, malloc) or library failed", Cause.NETWORK),
        ("OSError: [Errno 61] No data available: '/lustre/run/data/train.bin'", Cause.STORAGE),
        ("GenericError: Generic S3 error: Error after 10 retries in 180.1s, source: request", Cause.STORAGE),
        ("ClientError: An error occurred (SlowDown) when calling the PutObject operation", Cause.STORAGE),
        (
            "ConnectionError: HTTPSConnectionPool(host='hub'): Max retries exceeded with url: /api",
            Cause.NETWORK,
        ),
        ("RuntimeError: StatusCode.UNAVAILABLE: failed to connect to all addresses", Cause.NETWORK),
        ("aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected", Cause.NETWORK),
        ("fsspec.exceptions.FSTimeoutError", Cause.STORAGE),
        ("ServiceUnavailable: 503 GET https://storage.example/b/x: Service Unavailable", Cause.STORAGE),
        ("HfHubHTTPError: 504 Server Error: Gateway Time-out for url: https://hub/api", Cause.NETWORK),
        ("RuntimeError: ncclInternalError: Internal check failed.", Cause.NETWORK),
        ("RuntimeError: DataLoader worker (pid(s) 17081, 17084) exited unexpectedly", Cause.CRASH),
        ("ValueError: the timeout of a connection must be positive", Cause.EXCEPTION),
        ("ValueError: timeout of 30 s exceeded the configured maximum", Cause.EXCEPTION),
        ("ValueError: config field exit code 3 is unknown", Cause.EXCEPTION),
        ("numpy._ArrayMemoryError: Unable to allocate 7.28 TiB for an array", Cause.EXCEPTION),
        ("FileNotFoundError: [Errno 2] Opening HDFS file '/data/x' failed.", Cause.EXCEPTION),
        ("ValueError: /dev/shm/cache: sequence count must increase", Cause.EXCEPTION),
        ("RuntimeError: nvidia-container-cli: requirement error: cuda>=12.6", Cause.EXCEPTION),
        ("KeyError: 'model.layers.503.weight'", Cause.EXCEPTION),
        ("RuntimeError: CUDA is unavailable, and device 0 was asked for", Cause.EXCEPTION),
        ("GenericError: Generic S3 error: Client error with status 403 Forbidden", Cause.EXCEPTION),
        ("HttpResponseError: azure.core: The server is busy. ErrorCode:ServerBusy", Cause.STORAGE),
        (
            "An error occurred (503) when calling the UploadPart operation (reached max retries: 4)",
            Cause.STORAGE,
        ),
        ("OSError: [Errno 61] No data available", Cause.EXCEPTION),  # as of a missing attribute
    ],
)
def test_what_clients_of_networks_and_stores_say_is_retried_if_it_may_pass(line: str, cause: Cause) -> None:
    verdict = verdict_of(
        lost(0), RankEnd(rank=1, host="node0", status=1, log=f"step 9\n{line}\n", error=line)
    )
    assert (verdict.cause, verdict.culprit.rank) == (cause, 1)
    assert verdict.retries == (cause != Cause.EXCEPTION)


@pytest.mark.parametrize(
    ("line", "bus"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "0000:3b:00"),
        ("NVRM: Xid (PCI:0000:3b:00): 154, action changed from 0x0 (None) to 0x1 (Reset)", "0000:3b:00"),
        ("NVRM: Xid (PCI:0000:3b:00): 154, action changed from 0x1 (Reset) to 0x0 (None)", ""),
        ("NVRM: Xid (PCI:0000:dd:00): 145, RLW_SRC_TRACK Fatal XC1 i0 Link 05", "0000:dd:00"),
        ("NVRM: Xid (PCI:0000:dd:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 05", ""),
        ("NVRM: Xid (PCI:0000:dd:00): 31, MMU Fault", ""),
        ("NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2393)", "0000:a1:00"),
        ("nvidia 0000:98:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link", "0000:98:00"),
        ("nvidia 0000:98:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction", ""),
        ("nvme 0000:01:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link Layer", ""),
        ("amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!", "0000:c1:00.0"),
        ("amdgpu 0000:c1:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc", "0000:c1:00.0"),
        ("amdgpu 0000:c1:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc", ""),
    ],
)  # fmt: skip
def test_a_gpu_is_bad_where_the_kernel_says_that_it_needs_a_reset(line: str, bus: str) -> None:
    assert (bad_gpu_of(line) or ("", ""))[0] == bus


@pytest.mark.parametrize(
    "line",
    [
        "BrokenProcessPool: A process in the process pool was terminated abruptly while it ran",
        "subprocess.CalledProcessError: Command 'pack' returned non-zero exit status 137.",
    ],
)
def test_a_killed_child_is_known_by_what_its_parent_says(line: str) -> None:
    kernel = {"node0": ["Memory cgroup out of memory: Killed process 4711 (python3)"]}
    verdict = verdict_of(lost(0), RankEnd(rank=1, host="node0", status=1, error=line), kernel=kernel)
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause.OOM_KILLER, 1, True)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("RuntimeError: cudaMalloc failed: out of memory", Cause.GPU_MEMORY),
        ("RuntimeError: Failed to allocate 8589934592 bytes on device 'cuda:0'", Cause.GPU_MEMORY),  # Warp
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", Cause.GPU_MEMORY),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", Cause.EXCEPTION),
        ("OSError: Not enough disk space. Needed: 41.26 GiB (download: 12.20 GiB)", Cause.NO_SPACE),
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", Cause.BAD_GPU),
        (
            "RuntimeError: ncclSystemError: System call failed\n"
            "Error while creating shared memory segment /dev/shm/nccl-1pQZ2b (size 9637888)",
            Cause.BUS_ERROR,
        ),
        ("UCX ERROR Please check that /dev/shm or the directory has more available memory.", Cause.BUS_ERROR),
        ("RuntimeError: RESOURCE_EXHAUSTED: Error allocating device buffer: 2.50G", Cause.GPU_MEMORY),
        ("RuntimeError: No HIP GPUs are available", Cause.EXCEPTION),  # a job without GPUs, on each node
        ("nvidia-container-cli: detection error: nvml error: gpu is lost", Cause.BAD_GPU),
        (
            "numpy._ArrayMemoryError: Unable to allocate 32.0 GiB for an array with shape (9,)",
            Cause.OOM_KILLER,
        ),
        ("pyarrow.lib.ArrowMemoryError: malloc of size 17179869184 failed", Cause.OOM_KILLER),
        ("MemoryError", Cause.OOM_KILLER),
        ("NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out", Cause.NETWORK),
        (
            "NCCL WARN socketStartConnect: Connect to 10.0.0.2<41> failed : Connection timed out",
            Cause.NETWORK,
        ),
        ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error", Cause.NETWORK),
        ("OFI poll failed (ofi_events.c:1064:handle:Input/output error - UNDELIVERABLE)", Cause.NETWORK),
        ("OSError: [Errno 255] HDFS Read failed. Detail: [errno 255] Unknown error 255", Cause.STORAGE),
        ("OSError: [Errno 16] Please reduce your request rate.", Cause.STORAGE),
        ("NOTICE: Failed to copyto: InternalError: Please try again.", Cause.STORAGE),  # rclone
        ('ValueError: UNAVAILABLE: Error reading "gs://ckpt/run9/c/0/3": HTTP response 503', Cause.STORAGE),
        ("ClientError: An error occurred (XMinioStorageFull) when calling PutObject", Cause.NO_SPACE),
        ("ClientError: An error occurred (QuotaExceeded) when calling UploadPart: Unknown", Cause.QUOTA),
        ("HfHubHTTPError: 403 Forbidden: Private repository storage limit reached", Cause.QUOTA),
        ("It appears as if there is not enough space for /dev/shm/vader_segment.n14.1", Cause.BUS_ERROR),
        ("ValueError: The object store (200 GB) exceeds /dev/shm size (64 GB)", Cause.BUS_ERROR),
        ("ValueError: Free memory on device cuda:3 (11/79 GiB) on startup is less than 47", Cause.GPU_MEMORY),
        ("RuntimeError: error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", Cause.GPU_MEMORY),
        ("RuntimeError: error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", Cause.BAD_GPU),
        ("RuntimeError: device >= 0 && device < num_gpus INTERNAL ASSERT FAILED at x.cpp", Cause.BAD_GPU),
        ("pynvml.NVMLError_DriverNotLoaded: Driver Not Loaded", Cause.BAD_GPU),
        ("RuntimeError: HIP error: no ROCm-capable device is detected", Cause.BAD_GPU),
        ("RuntimeError: HBM MULTI BIT ECC ERROR", Cause.BAD_GPU),
        ("nvidia-container-cli: initialization error: driver rpc error: timed out", Cause.BAD_GPU),
        ("ray.exceptions.OutOfMemoryError: killed due to the node running low on memory.", Cause.OOM_KILLER),
        ("=>> PBS: job killed: mem 529424384kb exceeded limit 524288000kb", Cause.OOM_KILLER),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", Cause.OOM_KILLER),
        ("LLVM ERROR: out of memory", Cause.OOM_KILLER),
        ("ClientConnectorError: Cannot connect to host data-3:8443 ssl:default", Cause.NETWORK),
        ('RuntimeError: status: Unavailable, message: "error trying to connect"', Cause.NETWORK),
        ("botocore.exceptions.ResponseStreamingError: Connection broken: IncompleteRead", Cause.STORAGE),
        ("OSError: When reading a key: AWS Error NETWORK_CONNECTION: curlCode: 28", Cause.STORAGE),
        ("oss2.exceptions.ServerError: {'status': 500, 'x-oss-request-id': '67'}", Cause.STORAGE),
        ("OSError: [Errno 37] No locks available", Cause.STORAGE),
        ("sqlite3.OperationalError: disk I/O error", Cause.STORAGE),
        ("RetryError: Timeout of 120.0s exceeded: 504 GET https://storage.googleapis.com/x", Cause.STORAGE),
        ("ProcessExitedException: process 2 terminated with signal SIGABRT", Cause.CRASH),
        ("CalledProcessError: Command 'pack' died with <Signals.SIGSEGV: 11>.", Cause.CRASH),
        ("MPIDU_Init_shm_init(180): unable to allocate shared memory", Cause.BUS_ERROR),
        ("MemoryError: std::bad_alloc: out_of_memory: RMM failure at: pool.hpp:257", Cause.GPU_MEMORY),
        ("NCCL WARN NET/OFI Request 0x7f completed with error. RC: 103. Error: 4126", Cause.NETWORK),
        ('Usage of EmptyDir volume "dshm" exceeds the limit "16Gi".', Cause.BUS_ERROR),
        ("The node was low on resource: ephemeral-storage. Threshold quantity: 638", Cause.NO_SPACE),
        ("The node was low on resource: memory. Threshold quantity: 100Mi", Cause.OOM_KILLER),
        ("OpenBLAS error: Memory allocation still failed after 10 retries, giving up.", Cause.OOM_KILLER),
        ("CUDA error (/w/flash_bwd_launch_template.h:147): out of memory", Cause.GPU_MEMORY),
        ("RuntimeError: miopenStatusAllocFailed", Cause.GPU_MEMORY),
        ("CUDA error (/w/flash_fwd_launch_template.h:190): invalid argument", Cause.EXCEPTION),
        ("RuntimeError: CUDA driver error: system not yet initialized", Cause.BAD_GPU),
        ("CUDA error: an illegal instruction was encountered", Cause.CRASH),
        ("srun: error: Unable to contact slurm controller (connect failure)", Cause.NETWORK),
        ("socket.gaierror: [Errno -5] No address associated with hostname", Cause.NETWORK),
        ("botocore.exceptions.IncompleteReadError: 3407872 read, but 8388608 expected", Cause.STORAGE),
        ("RuntimeError: PytorchStreamReader failed reading file data/2: file read failed", Cause.STORAGE),
        ("socketPollConnect: connect to 10.0.0.7<4813> returned Connection timed out(110)", Cause.NETWORK),
        ("UCX  ERROR UD endpoint 0x5 to <no debug data>: unhandled timeout error", Cause.NETWORK),
        ("httpx.RemoteProtocolError: Server disconnected without sending a response.", Cause.NETWORK),
        ("fatal: unable to access 'https://git/x': Could not resolve host: git", Cause.NETWORK),
        ("cos_exception.CosServiceError: {'message': 'Reduce your request rate.'}", Cause.STORAGE),
        ("OSError: [Errno 255] HDFS open file failed, errno: 255", Cause.STORAGE),
        ("ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing", Cause.CRASH),
        ("earlyoom: sending SIGKILL to process 40118 uid 1001", Cause.OOM_KILLER),
        ("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException: The DiskSpace quota of /d", Cause.QUOTA),
    ],
)
def test_words_that_a_blind_draw_found_missing(words: str, cause: Cause) -> None:
    end = RankEnd(rank=1, host="a", status=1, error=words, step=9)
    diagnosis = diagnose(FailureEvidence(ranks=[end], shm_free=0.0, shm_free_gib=0.0))
    assert (diagnosis.cause, diagnosis.culprit.rank) == (cause, 1)


@pytest.mark.parametrize(("shm_free", "cause"), [(0.0, Cause.BUS_ERROR), (0.9, Cause.CRASH)])
@pytest.mark.parametrize(
    "error",
    [
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGBUS",
        "RuntimeError: reader process 31897 was killed by signal 7: Bus error",
        "subprocess.CalledProcessError: Command 'decode' returned non-zero exit status 135.",
        "RuntimeError: worker 3 ended with exit code -7",
    ],
)
def test_a_child_that_a_bus_error_ended_shows_a_full_shared_memory(
    error: str, shm_free: float, cause: Cause
) -> None:
    ended = RankEnd(rank=1, host="a", status=1, error=error)
    verdict = verdict_of(lost(0), ended, shm_free=shm_free)
    assert (verdict.cause, verdict.culprit.rank) == (cause, 1)


@pytest.mark.parametrize(
    ("number", "cause"),
    [(-4, Cause.CRASH), (-6, Cause.CRASH), (139, Cause.CRASH), (1, Cause.EXCEPTION), (-1, Cause.EXCEPTION)],
)
def test_a_child_that_a_signal_ended_has_crashed(number: int, cause: Cause) -> None:
    error = f"subprocess.CalledProcessError: Command 'pack' returned non-zero exit status {number}."
    ended = RankEnd(rank=1, host="a", status=1, error=error)
    verdict = verdict_of(lost(0), ended)
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (cause, 1, cause == Cause.CRASH)


@pytest.mark.parametrize(
    ("line", "bus"),
    [
        (
            "pcieport 0000:4a:01.0: AER: Uncorrectable (Fatal) error message received from 0000:4b:00.0",
            "0000:4b:00",
        ),
        ("NVRM: _issueRpcAndWait: rpcSendMessage failed with status 0x0000000f for fn 78!", ""),
        ("habanalabs hl5: Device heartbeat failed! PCI link is broken", ""),
        ("amdgpu 0000:b3:00.0: amdgpu: GPU Recovery Failed: -110", "0000:b3:00.0"),
        (
            "amdgpu 0000:c1:00.0: amdgpu: uncorrectable hardware error(ERREVENT_ATHUB) detected!",
            "0000:c1:00.0",
        ),
        ("nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 28 LTSSM Fault Up", ""),
    ],
)
def test_other_lines_of_the_kernel_that_call_a_gpu_bad(line: str, bus: str) -> None:
    found = bad_gpu_of(line)
    assert found is not None and found[0] == bus and found[1] in line


def test_what_the_kernel_says_of_a_disk_or_of_systemd_explains_a_signal() -> None:
    bus_error = RankEnd(rank=1, host="node0", status=-signal.SIGBUS, log="Fatal Python error: Bus error")
    disk = ["nvme1n1: I/O Cmd(0x2) @ LBA 3126441984, 256 blocks, I/O Error (sct 0x2 / sc 0x81)"]
    verdict = verdict_of(lost(0), bus_error, kernel={"node0": disk})
    assert (verdict.cause, verdict.culprit.rank) == (Cause.STORAGE, 1)
    verdict = verdict_of(lost(0), bus_error, kernel={"node1": disk})
    assert verdict.cause == Cause.BUS_ERROR
    oomd = {"node0": ["systemd-oomd[1123]: Killed /system.slice/slurmstepd.scope/task_2 due to memory used"]}
    killed = RankEnd(rank=1, host="node0", status=-signal.SIGKILL)
    verdict = verdict_of(lost(0), killed, kernel=oomd)
    assert (verdict.cause, verdict.culprit.rank) == (Cause.OOM_KILLER, 1)
    ended = replace(killed, is_killed_here=True)
    assert verdict_of(lost(0), ended, kernel=oomd).cause != Cause.OOM_KILLER


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:c9:00): 79, GPU has fallen off the bus.",
        "amdgpu 0000:c9:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
    ],
)
def test_a_rank_is_known_by_the_bus_of_its_gpu(line: str) -> None:
    there = RankEnd(
        rank=1, host="node0", device="cuda:3", bus="0000:c9:00", status=1, error="RuntimeError: x"
    )
    verdict = verdict_of(lost(0), there, kernel={"node0": [line]})
    assert (str(verdict.culprit), verdict.cause) == ("node0, GPU 3, rank 1", Cause.BAD_GPU)
    verdict = verdict_of(lost(0), there, kernel={"node1": [line]})
    assert verdict.culprit.rank is None and verdict.culprit.host == "node1"


ECC = (
    "[rank0]:[E1127 02:14:51 ProcessGroupNCCL.cpp:1896] [PG ID 0 Rank 0] Process group watchdog thread "
    "terminated with exception: CUDA error: uncorrectable ECC error encountered\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'"
)


def test_a_rank_that_torch_aborts_for_its_own_bad_gpu_is_the_culprit() -> None:
    aborted = RankEnd(rank=0, host="node0", device="cuda:0", status=ABORT, log=ECC)
    verdict = verdict_of(aborted, lost(1))
    assert (verdict.cause, verdict.culprit.rank, verdict.culprit.gpu) == (Cause.BAD_GPU, 0, "0")


def test_a_gpu_that_the_kernel_has_lost_without_saying_which_leaves_the_node_the_culprit() -> None:
    line = "NVRM: nvAssertOkFailedNoLog: Assertion failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST]"
    ends = [RankEnd(rank=rank, host="node0", status=71, error="RankLost: gone") for rank in (0, 1)]
    verdict = verdict_of(*ends, kernel={"node0": [line]})
    assert (verdict.cause, verdict.culprit.host, verdict.culprit.rank) == (Cause.BAD_GPU, "node0", None)


@pytest.mark.parametrize(
    ("words", "cause", "retries"),
    [
        (
            "S3Exception: Client error: Unknown CRT error: AWS_ERROR_S3_INTERNAL_ERROR, Response code",
            "STORAGE",
            True,
        ),
        ("S3Exception: Client error: Unknown CRT error: AWS_ERROR_S3_INVALID_REGION", "EXCEPTION", False),
        ("S3Exception: Client error: Unknown CRT error: aws-c-io: AWS_IO_SOCKET_TIMEOUT", "STORAGE", True),
        ("S3Exception: Service error: The object was not found", "EXCEPTION", False),
        ("RuntimeError: write to /scratch: the file system is full", "NO_SPACE", False),
        ("OutOfDiskError: Local disk is full", "NO_SPACE", False),
        ("Error out of memory at line 380 in file /build/csrc/pythonInterface.c", "GPU_MEMORY", False),
        ("OSError: [Errno 28] No space left on device: '/data/x' -> '/dev/shm/x'", "BUS_ERROR", False),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x' -> '/data/x'", "NO_SPACE", False),
        (
            "RuntimeError: cublaslt_gemm.cu:315: cuBLAS Error: the resource allocation failed",
            "GPU_MEMORY",
            False,
        ),
        (
            "DistBackendError: ncclUnhandledCudaError\nFailed to CUDA calloc async 608 bytes",
            "GPU_MEMORY",
            False,
        ),
        ("RuntimeError: write /lustre/home/u1/run.wandb: disk quota exceeded", "QUOTA", False),
        ("RuntimeError: write /lustre/home/u1/run.wandb: no space left on device", "NO_SPACE", False),
        (
            "HttpResponseError: azure.core: Operation could not be completed within the specified time.",
            "STORAGE",
            True,
        ),
        (
            "InvalidResponse: google.resumable_media.common: ('Request failed with status code', 503, 'OK')",
            "STORAGE",
            True,
        ),
        (
            "ClientError: An error occurred (InternalError) when calling the PutObject operation",
            "STORAGE",
            True,
        ),
        (
            "ConnectionError: ('Connection aborted.', ConnectionResetError(104)), (Request ID: 1c)",
            "NETWORK",
            True,
        ),
        (
            "DistBackendError: ncclRemoteError: a network error or a remote process exiting\n"
            "NET/IB: Got completion from peer 10.2.1.1<54862> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=x",
            "NETWORK",
            True,
        ),
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", "BAD_GPU", True),
        ("ValueError: the status code of a model is 503 layers", "EXCEPTION", False),
    ],
)
def test_words_that_a_tenth_draw_found_missing(words: str, cause: str, *, retries: bool) -> None:
    verdict = verdict_of(lost(0), RankEnd(rank=1, host="a", status=1, error=words, log=words, step=9))
    assert (verdict.cause, verdict.culprit.rank, verdict.retries) == (Cause[cause], 1, retries)


def test_a_rank_that_alone_fails_by_itself_is_named_though_its_words_are_unknown() -> None:
    ends = RankEnd(rank=1, host="node1", status=1, log="it went wrong, said the library"), lost(0)
    verdict = verdict_of(*ends)
    assert (verdict.cause, verdict.culprit.rank, verdict.culprit.host) == (Cause.UNKNOWN, 1, "node1")
    assert verdict_of(*ends, replace(ends[0], rank=2)).culprit.rank is None  # it may be either of two
