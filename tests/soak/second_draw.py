"""A second draw of sixty faults of the same twelve kinds: other places, messages and calls than the first.

It was written without a look at the rules, and after the first draw had mended them.
"""

# ruff: noqa: E501  (messages as they come, in one line)

from __future__ import annotations

import signal

from tests.soak.fault_kinds import (
    BATCH,
    FORWARD,
    JOURNAL,
    READ,
    REPORT,
    SAVE,
    PlantedFault,
    at,
    errno_at,
    of_kind,
)

from bloomery.operate.diagnosis import Cause

KILL = "os.kill(os.getpid(), 9); time.sleep(9)"
OLD_WATCHDOG = (
    "[E ProcessGroupNCCL.cpp:828] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, "
    "OpType=BROADCAST, Timeout(ms)=1800000) ran for 1807415 milliseconds before timing out."
)
GATHER_WATCHDOG = (
    "[rank{0}]:[E521 11:40:02.120 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=_ALLGATHER_BASE, NumelIn=1, NumelOut=2, Timeout(ms)=600000) ran for 600091 ms"
)
TAKE_LOCK_TWICE = (
    "import fcntl, tempfile; name = tempfile.mktemp(); first, second = open(name, 'w'), open(name, 'w'); "
    "fcntl.flock(first, fcntl.LOCK_EX); fcntl.flock(second, fcntl.LOCK_EX)"
)
CHILD_IS_KILLED = (
    "import subprocess; subprocess.run([sys.executable, '-c', 'x = bytearray(1 << 30)'], check=True)"
)
RELEASED_LOADER = (
    "from multiprocessing.shared_memory import SharedMemory; fill_shared_memory(); "
    "block = SharedMemory(create=True, size=1 << 25); block.buf[:] = bytes(1 << 25)"
)

SECOND: list[PlantedFault] = [
    *of_kind("kill", *at(FORWARD, KILL)),
    *of_kind("kill", *at(READ, KILL)),
    *of_kind("kill", *at(REPORT, KILL)),
    *of_kind("kill", *at(JOURNAL, KILL)),
    *of_kind("kill", *at(SAVE, KILL)),
    *of_kind(
        "crash",
        {"signal": signal.SIGILL},
        {"signal": signal.SIGTRAP},
        *at(JOURNAL, "import ctypes; ctypes.memset(8, 0, 64)"),
        *at(REPORT, "import faulthandler; faulthandler._sigsegv()"),
        *at(BATCH, "import ctypes; ctypes.CDLL(None).abort()"),
    ),
    *of_kind(
        "hang",
        *at(READ, "import select; select.select([], [], [])"),
        *at(FORWARD, "import subprocess; subprocess.run(['sleep', '9999'])"),
        *at(REPORT, "import queue; queue.Queue().get()"),
        *at(JOURNAL, TAKE_LOCK_TWICE),
        *at(BATCH, "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); s.accept()"),
    ),
    *of_kind(
        "exception",
        *at(FORWARD, "assert arguments is None, 'shapes differ'"),
        *at(READ, "b'\\xff\\xfe'.decode()"),
        *at(
            FORWARD,
            "import torch; torch.nn.functional.embedding(torch.tensor([9]), torch.ones(2, 2))",
        ),
        *at(BATCH, "None.shape"),
        *at(REPORT, "json.dumps(object())"),
    ),
    *of_kind(
        "disk",
        *at(READ, "import numpy; numpy.ones(1 << 20).tofile('/dev/full')"),
        *at(
            FORWARD,
            "raise RuntimeError('Error while serializing: I/O error: No space left on device (os error 28)')",
        ),
        *at(REPORT, "import shutil; shutil.copyfile('/bin/true', '/dev/full')"),
        errno_at(JOURNAL, 28),
        errno_at(FORWARD, 122) | {"cause": Cause.QUOTA},
    ),
    *of_kind(
        "shared memory",
        *at(READ, RELEASED_LOADER),
        *at(
            FORWARD,
            "import numpy; fill_shared_memory(); numpy.memmap('/dev/shm/map', mode='w+', shape=(1 << 25,))[:] = 1",
        ),
        *at(
            REPORT,
            "import multiprocessing as m; fill_shared_memory(); a = m.Array('b', 1 << 24); a[:] = b'1' * (1 << 24)",
        ),
        *at(FORWARD, "fill_shared_memory(); load_with_worker(memory=False)"),
        *at(BATCH, "import torch; fill_shared_memory(); torch.zeros(1 << 23).share_memory_()"),
    ),
    *of_kind(
        "GPU memory",
        *(
            at(
                FORWARD,
                "raise RuntimeError('CUDA error: out of memory\\nCUDA kernel errors might be asynchronously reported')",
                "raise RuntimeError('HIP error: out of memory')",
                "raise RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED')",
            )
            + at(
                REPORT,
                "import torch; raise torch.OutOfMemoryError('Allocation on device 0 would exceed allowed memory. (out of "
                "memory)\\nCurrently allocated     : 77.12 GiB')",
                "raise RuntimeError('NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\\nLast error:"
                "\\nFailed to CUDA calloc async 4 bytes: Cuda failure 2 \\'out of memory\\'')",
            )
        ),
    ),
    *of_kind(
        "bad GPU",
        *at(
            FORWARD,
            "raise RuntimeError('CUDA error: uncorrectable ECC error encountered\\nCUDA kernel errors might be "
            "asynchronously reported at some other API call, so the stacktrace below might be incorrect.')",
        ),
        *at(REPORT, "raise RuntimeError('pynvml.NVMLError_GpuIsLost: GPU is lost')"),
        {
            "signal": signal.SIGABRT,
            "kernel": "NVRM: Xid (PCI:0000:1a:00): 95, pid=40217, name=python, Uncontained ECC error. RST: Yes",
            "names_rank": False,
        },
        {
            **at(FORWARD, "raise RuntimeError('CUDA error: unknown error')")[0],
            "kernel": "NVRM: Xid (PCI:0000:5e:00): 74, pid=9, name=python, NVLink: fatal error detected on link 7",
            "names_rank": False,
        },
        {
            **at(READ, "raise RuntimeError('CUDA error: an illegal instruction was encountered')")[0],
            "kernel": "NVRM: Xid (PCI:0000:9d:00): 64, pid='<unknown>', name=<unknown>, Row Remapper: failed",
            "names_rank": False,
        },
    ),
    *of_kind(
        "NCCL time-out",
        {"place": FORWARD, "code": "threading.Event().wait()", "others": OLD_WATCHDOG},
        {"place": READ, "code": "while True: pass", "others": OLD_WATCHDOG},
        {"place": REPORT, "code": "os.read(os.pipe()[0], 1)", "others": GATHER_WATCHDOG},
        {"place": BATCH, "code": TAKE_LOCK_TWICE, "others": GATHER_WATCHDOG},
        {"place": JOURNAL, "code": "import queue; queue.Queue().get()", "others": "watchdog"},
    ),
    *of_kind(
        "network",
        {**at(REPORT, "cut_connections()")[0], "names_rank": False},
        {**at(READ, "cut_connections()")[0], "names_rank": False},
        *at(FORWARD, "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1/')"),
        *at(READ, "raise_errno(113, None)"),
        *at(REPORT, "raise ConnectionResetError(104, 'Connection reset by peer')"),
    ),
    *of_kind(
        "storage",
        errno_at(REPORT, 5),
        errno_at(FORWARD, 107),
        errno_at(READ, 112),
        errno_at(READ, 110),
        errno_at(JOURNAL, 121),
    ),
    *of_kind(
        "out of memory",
        *at(JOURNAL, "use_up_memory()"),
        *at(BATCH, "use_up_memory()"),
        *at(FORWARD, "import numpy; [numpy.ones(1 << 22) for _ in range(10**6)]"),
        *at(FORWARD, "load_with_worker(memory=True)"),
        *at(READ, CHILD_IS_KILLED),
    ),
]
