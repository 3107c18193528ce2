"""Patterns of log lines that name a failure's cause, by priority: of ranks, kernels and schedulers."""

from __future__ import annotations

import re

from bloomery.operate.diagnosis import Cause

MOST_CHARACTERS = 4096
"""The most characters of a line that are searched: some patterns take time quadratic in its length."""
_BAD_XIDS = frozenset({46, 48, 62, 63, 64, 74, 79, 94, 95, 109, 119, 120, 140, 143, 158})
"""NVIDIA's error numbers after which its catalogue wants the GPU reset or exchanged. 13, 31, 43 and 45 are
mostly faults of the program, and 92 is harmless."""
_XIDS_OF_LINKS = range(144, 151)
"""Those of NVLink 5, which say themselves whether they are fatal."""
_XID_OF_RECOVERY = 154
"""It says what the GPU needs from now on: a reset, a restart of the node, or nothing any more."""
_XID = re.compile(r"NVRM: Xid \((?P<bus>[^)]*)\): (?P<number>\d+),?(?P<rest>.*)")
_AMD = re.compile(
    r"amdgpu (?P<bus>[0-9a-f:.]+): (?:amdgpu: )?"
    r"(?P<rest>.*(?:GPU (?:mode1 )?reset|GPU Recovery Failed|GPU over temperature range"
    r"|uncorrectable hardware error\(|Fatal error during GPU init"
    r"|\b[1-9]\d*\}? ?(?:new )?uncorrectable hardware error).*)"
)

_KILLED = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+)|oom-kill:.*pid=(?P<pid2>\d+)"
)
_PCI_EXPRESS = re.compile(
    r"\bnvidia (?P<bus>[0-9a-f:]+)(?:\.\d)?: (?P<rest>PCIe Bus Error: severity=Uncorrect\w+ \(Fatal\).*)"
)
_PORT = re.compile(
    r"(?P<rest>AER: Uncorrect\w+ \(Fatal\) error .*\b(?P<bus>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})\.\d.*)"
)
"""What a port says of a device behind it, which may also be a network adapter: the node is bad either way."""
_NOT_INITIALISED = re.compile(r"NVRM: GPU (?P<bus>[0-9a-f:]+)(?:\.\d)?: (?P<rest>RmInitAdapter failed.*)")
_LOST = re.compile(
    r"NVRM: (?:GPU (?P<bus>[0-9a-f:]+)(?:\.\d)?: )?"
    r"(?P<rest>.*(?:GPU_IS_LOST|(?:lost from|fallen off) the bus|rpcSendMessage failed"
    r"|I/O region assigned to your NVIDIA device is invalid).*)"
)
_OF_THE_NODE = re.compile(
    r"(?P<bus>)(?P<rest>nvidia-nvswitch\d+: SXid.*, Fatal.*"
    r"|habanalabs \w+: .*(?:heartbeat failed|link is broken).*)"
)
_OF_OTHER_LINES = (_AMD, _NOT_INITIALISED, _PCI_EXPRESS, _PORT, _LOST, _OF_THE_NODE)

_SHARED_MEMORY = (
    r"insufficient shared memory",
    r"[Bb]us error.*shared memory",
    r"out of shared memory",
    r"killed by signal: Bus error",
    r"(?:shared memory object|write to file) </torch_\S+>.*(?i:no space left)",
    r"/dev/shm.*(?i:no space left)|(?i:no space left).*'/dev/shm/[^']*'(?! ->)",
    r"unable to allocate shared memory|creating shared memory segment /dev/shm/",
    r"EmptyDir volume \S*shm\S* exceeds",  # Kubernetes
    r"/dev/shm\b.*(?i:more (?:available |free )?(?:memory|space)|too small|is full)",
    r"/dev/shm\b.*(?i:increas\w+ (?:its|the) (?:size|shm))",
    r"(?i:not enough (?:space|memory)|exceeds).*/dev/shm\b",
)
_BAD_GPU = (
    r"uncorrectable (?:NVLink|ECC) error|CUDA error: .*ECC|hardware (?:stack )?error",
    r"(?i:GPU is lost)|GPU requires reset",
    r"(?:fallen off|lost from) the bus|Unable to determine the device handle",
    r"(?i:double[- ]bit (?:ECC )?error)|(?i:row[- ]remap\w* (?:failure|failed))|NV_ERR_GPU_IS_LOST",
    r"(?:cuda|hip)Error(?:DevicesUnavailable|ECC\w+|Hardware\w+|NoDevice|SystemNotReady|SystemDriverMismatch)",
    r"no (?:CUDA|ROCm)-capable device|HW Exception by GPU",
    r"num_gpus INTERNAL ASSERT|NVMLError_(?:DriverNotLoaded|GpuIsLost)",
    r"nvidia-container-cli: (?!requirement).*error",
    r"(?i:\bHBM\b.*\b(?:uncorrect\w+|multi.?bit))|_HW_ERR_|DEVICE_LOST\b|Device acquire failed",
    r"Failed to initialize NVML|CUDA driver initialization failed",
    # the fabric manager of NVSwitch is down, or the driver's state is lost
    r"(?:Error 802|CUDA driver error|CUDA error): system not yet initialized|NVSwitch fatal error",
    r"in the Fabric Manager or NVSwitches|DRIVER_NOT_LOADED",
    r"no healthy devices present|CUDA unknown error",
    r"CUDA-capable device\(s\) is/are busy or unavailable",
    r"RmInitAdapter failed|NVLink: fatal error|HSA_STATUS_ERROR_(?:HARDWARE|EXCEPTION)",
)
_STORAGE_AWAY = (
    # EIO, ENXIO, ENODEV, EROFS, ENOLINK, ECOMM, EPROTO, EBADMSG, EREMCHG, ENOTCONN, ESHUTDOWN, EHOSTDOWN,
    # ESTALE, EUCLEAN, EREMOTEIO
    r"Errno (?:5|6|19|30|37|67|70|71|74|78|107|108|112|116|117|121)\]",
    r"Errno (?:61|62)\] [^:]+: '/",  # ENODATA and ETIME of a file
    # ECONNABORTED, ECONNRESET, ETIMEDOUT, ECONNREFUSED and EHOSTUNREACH of a file; connections end so too
    r"Errno (?:103|104|110|111|113)\] [^:]+: '/",
    r"PytorchStreamReader failed reading file .*file read failed",
    r"Input/output error|disk I/O error|Remote I/O error|Structure needs cleaning|Read-only file system",
    r"^(?!.*[Ee]rrno:? (?:2|13)\b).*(?:\bHDFS [\w ]+ failed|Opening HDFS file)",
    r"BlockMissingException|StandbyException|SafeModeException|RetriableException",
    r"[Tt]ransport endpoint|(?i:stale (?:NFS )?file handle)",
    r"(?i:\b(?:lustre|gpfs|beegfs|ceph|nfs|fuse)\b.{0,60}\b(?:not responding|timed out|stale|is down))",
)
CAUGHT_TIMEOUT = (
    r"(?i:caught collective operation timeout)|DistStoreError: .*[Tt]ime(?:out|d out)"
    r"|\bwait timeout after \d+ ?ms"
)
"""How a rank says that a collective which it waited for has timed out."""
_COLLECTIVE_TIMEOUT = (
    CAUGHT_TIMEOUT,
    r"(?<![/\w])NCCL\b(?! operations have failed)[^/]*(?:timed out|timeout)",
    r"watchdog got stuck for \d+ seconds|Timed out waiting \d+ms for (?:recv|send) operation",
    r"[Tt]imeout at NCCL work|Heartbeat monitor timed out|(?:timed out in|failed to pass) monitoredBarrier",
    r"Timed out initializing process group in store based barrier",
)
_LINKS = (
    r"[Cc]onnect to \S+<\d+> (?:failed|returned)(?!.*retrying)",
    r"\bibv_\w+ failed|Transport retry count exceeded|IBV_WC_\w*RETRY_EXC_ERR|OFI poll failed|UNDELIVERABLE",
    r"UCX +\w+ .*(?:timeout|timed out)|unhandled timeout error",
    r"Gloo connectFullMesh failed|lost communication with a remote daemon",
    r"Failed to connect to GCS",
)
"""What libraries of collectives say of links, in words that may also name a time-out or an input error."""
_CORRUPTED = (
    r"^\*\*\* [\w ]+ detected \*\*\*|^pure virtual method called",
    r"^(?:malloc|free|realloc|munmap_chunk|malloc_consolidate)\(\): ",
    r"^(?:double free or corruption|corrupted (?:size vs|double-linked|unsorted))",
)
"""What the C and C++ libraries print where they abort a process that has damaged its own memory."""
_CONNECTIONS = (
    r"Cannot establish the connection|Unable to contact slurm controller",
    r"client socket has (?:timed out|failed)|name resolution|(?i:name or service not known|no route to host)",
    r"(?i:network is (?:unreachable|down)|connection (?:refused|timed out|aborted)|host is unreachable)",
    r"Errno (?:100|101|110|111|113)\]",
    r"nccl(?:System|Internal)Error|Software caused connection abort|Proxy Call to rank \d+ failed",
)
KNOWN_TEXTS: tuple[tuple[Cause, str], ...] = (
    (Cause.RUN_BUSY, r"^RunBusy: |is being \w[\w ]* by process \S+ on \S+ since "),
    (Cause.BAD_GPU, "|".join(_BAD_GPU)),
    (
        Cause.QUOTA,
        r"(?i:disk quota exceeded)|EDQUOT|(?i:\berrno[ =:]+122\b)|os error 122|\b[DN]SQuotaExceededException"
        r"|\(QuotaExceeded\)|(?i:storage limit (?:is )?reached|upload exceeds quota)",
    ),
    # torch's shared memory lies in /dev/shm: what is full there is not the run's disk
    (Cause.BUS_ERROR, "|".join(_SHARED_MEMORY)),
    (
        Cause.NO_SPACE,
        r"^(?!.*\binotify).*(?:"  # its watches are full, not a disk
        r"(?i:no space left on device)|no inodes are left|ENOSPC|refused at \S+: no space|File too large"
        r"|(?i:(?:not enough|insufficient) (?:free )?(?:disk|storage) space)"  # of datasets and of clients
        r"|(?i:\b(?:disk|file ?system|volume) is full)|StorageFull\b|minimum free drive threshold"
        r"|low on resource: ephemeral-storage"  # Kubernetes
        r"|(?i:\berrno[ =:]+28\b)|os error 28"
        r"|OSError: \d+ requested and \d+ written"  # numpy
        r"|PytorchStreamWriter failed writing|inline_container.*unexpected pos \d+ vs \d+)",
    ),
    (Cause.NETWORK, "|".join(_LINKS)),
    (Cause.STORAGE, "|".join(_STORAGE_AWAY)),
    (Cause.NCCL_TIMEOUT, "|".join(_COLLECTIVE_TIMEOUT)),
    (
        Cause.OOM_KILLER,
        r"oom[-_]kill event|: tasks? [\d,-]+: Out Of Memory|Detected \d+ oom.kill|killed by signal: Killed"
        r"|[Cc]an(?:no|')t allocate memory|std::bad_alloc|^MemoryError\b"
        r"|\bmemory allocation of \d+ bytes failed|LLVM ERROR: out of memory"  # Rust, LLVM
        r"|(?i:node running low on memory|\bexceeded (?:\w+ )?mem(?:ory)? (?:usage )?limit)"
        r"|reaching LSF memory usage limit"
        r"|(?i:\bmem \d+ ?kb exceeded limit|\bOOMKilled\b)|TERM_MEMLIMIT"  # PBS, Kubernetes, LSF
        r"|earlyoom: sending SIGKILL|low on resource: memory"  # Kubernetes
        r"|Allocation error : not enough memory|Memory allocation still failed"  # zstd, OpenBLAS
        r"|Error: Unable to allocate [\d.]+ (?:[KMG]iB|bytes) for an array"  # numpy
        r"|\bmalloc of size \d+ failed"  # Arrow
        r"|^fatal error: runtime: (?:out of|cannot allocate) memory|insufficient memory for the Java Runtime",
    ),
    (Cause.NODE_LOST, r"DUE TO NODE FAILURE|[Nn]ode failure on|launcher on \S+ has been silent"),
    (Cause.PREEMPTED, r"DUE TO (?:PREEMPTION|TIME LIMIT)|CANCELLED AT .* DUE TO"),
    (Cause.CRASH, "|".join(_CORRUPTED)),
    (Cause.NETWORK, "|".join(_CONNECTIONS)),
    # an access that is not allowed may come from a race or a bad GPU; an assert on the device repeats
    (
        Cause.CRASH,
        r"CUDA error: (?:an illegal memory access|an illegal instruction|misaligned address)"
        r"|CUDA error: unspecified launch failure|unhandled cuda error|ncclUnhandledCudaError"
        r"|killed by signal: Segmentation fault|ERROR: (?:Address|Thread|Memory)Sanitizer"
        r"|^fatal error: unexpected signal|^SIG\w+: segmentation violation",  # Go
    ),
    (Cause.EXCEPTION, r"device-side assert triggered|^CUDA error \(\S+:\d+\): invalid"),
    (Cause.BAD_RECIPE, r"mistakes? in the recipe|ConfigError"),
)
"""Each cause with the pattern of the lines that name it."""

_PASSING_TYPES = (  # of exceptions, without their modules
    r"^(?:[\w.]+\.)?\w*(?:Timeout|Connection|Disconnected|Unreachable|Unavailable|MaxRetry)\w*(?::|$)",
    r"^(?:[\w.]+\.)?\w*(?:ClientConnector|ClientPayload|ResponseStreaming|SSLEOF|gaierror)\w*(?::|$)",
    r"^(?:[\w.]+\.)?(?:IncompleteRead\w*|\w*ProtocolError|ChunkedEncodingError)\b",
)
_PASSING_WORDS = (
    r"\b(?:cannot|can't|couldn't|could not|unable to|trying to|failed to) connect\b|\bconnect call failed\b",
    r"\bconnections? (?:failed|broken)\b|\bcould not resolve\b",
    r"\b(?:host|network|server|service|endpoint) (?:is )?unreachable\b|\berror sending request\b",
    r"\btimed ?out\b",
    r"\btimeout was reached\b|\btimeout of [\d.]+ ?s exceeded(?! the)|\bwithin the specified time",
    r"\bdeadline[_ ](?:has )?(?:exceeded|elapsed)|\bafter \d+ retries\b|\bmax(?:imum)? retries\b",
    r"\b(?:temporarily|service) unavailable\b|\bstatus: unavailable\b|\btry again\b|\bserver ?(?:is )?busy\b",
    r"\bslow ?down\b|\breduce your request\b|\bindicates throttling\b|\binternal server error\b",
)
_PASSING_STATUSES = (  # of HTTP
    r"\b50[0234]\b.{0,40}Backend Error",
    r"\b(?:429|50[0234])\b.{0,40}(?:Server Error|Bad Gateway|Gateway Time-?out|Too Many Requests)",
    r"\b(?:429|50[0234]) (?:GET|HEAD|PUT|POST|PATCH|DELETE)\b",
    r"(?i:\bstatus(?: ?code)?['\"]?[:=, ]+\(?(?:429|50[0234])\b)",
)
_PASSING_CODES = (  # of gRPC, AWS, curl
    r"\bUNAVAILABLE\b|\bOperationTimedOut\b|\bcurlCode: (?:6|7|28|35|52|55|56)\b",
    r"\bAWS Error (?:NETWORK|SLOW|INTERNAL|SERVICE|REQUEST_TIME)\w+",
    r"\bAWS_ERROR_S3_(?:INTERNAL|SLOW|REQUEST_TIME)\w+|\bAWS_(?:ERROR_HTTP|IO)_\w*(?:TIMEOUT|CLOSED)",
    r"\bAn error occurred \((?:5\d\d|InternalError|ServiceUnavailable|RequestTime\w+|Throttl\w+|SlowDown)\)",
)
_TRANSIENT = re.compile(
    "|".join((*_PASSING_TYPES, f"(?i:{'|'.join(_PASSING_WORDS)})", *_PASSING_STATUSES, *_PASSING_CODES))
)
_OF_STORES = re.compile(
    r"(?i:\b(?:s3|gcs|azure|blob|bucket|put ?object|get ?object|upload ?part|storage|FSTimeoutError)\b)"
    r"|\bServiceException\b|\b(?:gs|az|abfss?|oss)://|\boss2?\b|object_?storage|\bAWS Error\b"
    r"|(?i:reduce your request rate)|\bFailed to copy(?:to)?: "  # of rclone
    r"|\bS3\w*(?:Exception|Error)\b|google\.resumable_media|awscrt|s3transfer|swiftclient|googleapis|gcsfs|s3fs|botocore|boto3|fsspec|minio|hdfs"
)
STORE_CLIENT = re.compile(
    r"^(?:azure|boto3|botocore|aiobotocore|awscrt|gcsfs|google\.(?:api_core|cloud|resumable_media)|oss2|s3fs)\."
    r"|site-packages/(?:adlfs|azure/storage|boto3|botocore|gcsfs|google/cloud/storage|s3fs|s3transfer)/"
    r"|\b(?:abfss?|az|gs|hdfs|oss|s3)://",
    re.M,
)
"""An exception, a frame of a traceback or an address that belongs to an object store."""
NCCL_NETWORK = re.compile(
    r"NET/OFI .*completed with error"
    r"|NET/IB\s?: .*(?:Got completion .*(?:status=(?:\w+\()?|error )\d+|Got async event)|ibv_\w+ failed"
    r"|mlx\d: \S+: got completion with error"
)
"""What NCCL says of its own network adapter."""
GPU_MEMORY = re.compile(
    r"(?i:^(?!srun: |slurmstepd: ).*"
    r"\b(?!gpu-\w*\d:)(?:CUDA|HIP|ROCm|XPU|MPS|NPU|GPU|Triton|device|NCCL|RCCL)\w*\b[^/]*out of memory)"
    r"|_(?:(?:DEVICE_ALLOCATION|ALLOC)_FAILED|OUT_OF_MEMORY|OUT_OF_RESOURCES|MEMORY_ERROR)\b|cudaErrorMemoryAllocation"
    r"|hipErrorOutOfMemory|Failed to CUDA [cm]alloc"
    r"|(?i:\bcu(?:BLAS|DNN|SPARSE|SOLVER|FFT)\w* Error: .*allocation failed)"
    r"|\bRESOURCE_EXHAUSTED: .*(?i:alloc|memory)|Failed to alloc DEVICE memory|\(usage: tensors\) on ND \d"
    r"|(?i:\b(?:cuda|hip) (?:error|failure)\b.{0,200}\bout of memory\b)|miopenStatusAllocFailed"
    r"|OOM when allocating tensor.*GPU"
    r"|No executable batch size found|OUT_OF_DEVICE_MEMORY|PT_DEVMEM Allocation failed"
    r"|BFCArena.*Failed to allocate memory|RMM failure"
    r"|(?i:free memory on device \S+ .* is less than)|Failed to allocate \d+ bytes on device 'cuda"
    r"|\bcuMem(?:Create|Alloc\w*) failed"
    r"|(?<!ray\.exceptions\.)\bOutOfMemoryError\b|^Error out of memory at line \d+ in file "  # bitsandbytes
)
"""What says that a device has no memory left."""
DRIVER_OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP)(?: driver)? error: out of memory|Cuda failure.* 'out of memory'"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
)
"""What the driver says of it, which also sees the memory of other processes."""
LINK_DOWN = re.compile(
    r"mlx5_core \S+ \S+: Link down|(?:ib|hsn|roce)\w*: (?:link is down|carrier lost)", re.I
)
"""What the kernel says of a link of InfiniBand or Slingshot."""
HANDLED_ERROR = re.compile(r"^(?:\S+\s+){0,5}?\W{0,3}(?:WARNING|INFO|DEBUG)\b")
"""A line by which a program logged what it then dealt with. NCCL's WARN is none: it comes before an error."""
MAYBE_TIMEOUT = re.compile(
    r"operations have failed or timed out|"
    r"due to (?:a )?(?:collective timeout|NCCL timeout|\w+ watchdog hang)"
    r"|flight recorder dump signal|detected by watchdog at work"
)
"""What torch prints where it aborts a rank for a time-out or for an error of another rank."""


def transient_cause_of(exception: str) -> Cause | None:
    """Return STORAGE or NETWORK for an exception that may pass by itself; None for any other.

    Such are time-outs, lost connections, and answers of a service that it is busy or failed (429, 50x).

    Retrying a failure that repeats costs some restarts, and not retrying one that passes costs the night.

    exception: its type and message.
    """
    exception = exception[:MOST_CHARACTERS].replace("\n", " ")
    if _TRANSIENT.search(exception) is None:
        return None
    return Cause.STORAGE if _OF_STORES.search(exception) else Cause.NETWORK


def bad_gpu_of(line: str) -> tuple[str, str] | None:
    """Return the bus of the GPU that a line of the kernel's log calls bad, and its words; None for none.

    The bus is "" where the line does not say which GPU it is.
    """
    match = _XID.search(line)
    if match is None:
        found = next(filter(None, (pattern.search(line) for pattern in _OF_OTHER_LINES)), None)
        return (found["bus"] or "", found["rest"].strip()) if found else None
    number, rest = int(match["number"]), match["rest"]
    is_bad = number in _BAD_XIDS
    if number in _XIDS_OF_LINKS:
        is_bad = "nonfatal" not in rest.lower()
    elif number == _XID_OF_RECOVERY:
        is_bad = not rest.rstrip().endswith("(None)")
    return (match["bus"].removeprefix("PCI:"), f"Xid {number}{rest}".rstrip()) if is_bad else None


def killed_process(line: str) -> int:
    """Return the number of the process that the kernel killed for want of memory; 0 for other lines."""
    killed = _KILLED.search(line)
    return int(killed["pid"] or killed["pid2"]) if killed else 0
