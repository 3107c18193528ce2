"""The texts by which ranks, launchers and schedulers name a cause, those that count most first."""

from __future__ import annotations

from bloomery.operate.diagnosis import Cause

_SHARED_MEMORY = (
    r"insufficient shared memory",
    r"[Bb]us error.*shared memory",
    r"out of shared memory",
    r"killed by signal: Bus error",
    r"(?:shared memory object|write to file) </torch_\S+>.*No space left",
    r"/dev/shm.*No space left",
    r"unable to allocate shared memory\(shm\)",
)
_BAD_GPU = (
    r"uncorrectable (?:NVLink|ECC) error|CUDA error: .*ECC|hardware (?:stack )?error",
    r"GPU is lost|GPU requires reset|fallen off the bus|Unable to determine the device handle",
    r"RmInitAdapter failed|NVLink: fatal error|HSA_STATUS_ERROR_(?:HARDWARE|EXCEPTION)",
)
_STORAGE_AWAY = (
    # EIO, ENXIO, ENODEV, EROFS, ENOLINK, ECOMM, EPROTO, EBADMSG, EREMCHG, ENOTCONN, ESHUTDOWN, EHOSTDOWN,
    # ESTALE, EUCLEAN, EREMOTEIO
    r"Errno (?:5|6|19|30|67|70|71|74|78|107|108|112|116|117|121)\]",
    # ECONNABORTED, ECONNRESET, ETIMEDOUT, ECONNREFUSED and EHOSTUNREACH of a file; connections end so too
    r"Errno (?:103|104|110|111|113)\] [^:]+: '/",
    r"Input/output error|Remote I/O error|Structure needs cleaning|Read-only file system",
    r"[Tt]ransport endpoint|Stale (?:NFS )?file handle",
)
_COLLECTIVE_TIMEOUT = (
    r"Watchdog caught collective operation timeout|(?<![/\w])NCCL\b[^/]*(?:timed out|timeout)",
    r"watchdog got stuck for \d+ seconds|Timed out waiting \d+ms for (?:recv|send) operation",
)
KNOWN_TEXTS: tuple[tuple[Cause, str], ...] = (
    (Cause.RUN_BUSY, r"^RunBusy: |is being \w[\w ]* by process \S+ on \S+ since "),
    (Cause.BAD_GPU, "|".join(_BAD_GPU)),
    (Cause.QUOTA, r"Disk quota exceeded|EDQUOT|(?i:\berrno[ =:]+122\b)|os error 122"),
    # torch's shared memory lies in /dev/shm: what is full there is not the run's disk
    (Cause.BUS_ERROR, "|".join(_SHARED_MEMORY)),
    (
        Cause.NO_SPACE,
        r"No space left on device|no inodes are left|ENOSPC|refused at \S+: no space|File too large"
        r"|database or disk is full|(?i:\berrno[ =:]+28\b)|os error 28"
        r"|OSError: \d+ requested and \d+ written"  # numpy
        r"|PytorchStreamWriter failed writing|inline_container.*unexpected pos \d+ vs \d+",
    ),
    (
        Cause.STORAGE,
        "|".join(_STORAGE_AWAY),
    ),
    (Cause.NCCL_TIMEOUT, "|".join(_COLLECTIVE_TIMEOUT)),
    (
        Cause.OOM_KILLER,
        r"oom[-_]kill event|Detected \d+ oom.kill|killed by signal: Killed"
        r"|[Cc]an(?:no|')t allocate memory|std::bad_alloc",
    ),
    (Cause.NODE_LOST, r"DUE TO NODE FAILURE|[Nn]ode failure on|launcher on \S+ has been silent"),
    (Cause.PREEMPTED, r"DUE TO (?:PREEMPTION|TIME LIMIT)|CANCELLED AT .* DUE TO"),
    (
        Cause.NETWORK,
        r"client socket has (?:timed out|failed)|name resolution|Name or service not known|No route to host"
        r"|Network is (?:unreachable|down)|Connection (?:refused|timed out|aborted)|Host is unreachable"
        r"|Errno (?:100|101|110|111|113)\]",
    ),
    # an access that is not allowed may come from a race or a bad GPU; an assert on the device repeats
    (
        Cause.CRASH,
        r"CUDA error: (?:an illegal memory access|unspecified launch failure|misaligned address)"
        r"|killed by signal: Segmentation fault",
    ),
    (Cause.BAD_RECIPE, r"mistakes? in the recipe|ConfigError"),
)
"""Each cause with the pattern of the lines that name it."""
