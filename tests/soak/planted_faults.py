"""Sixty faults of twelve kinds and twelve hangs, caused within real ranks, and the right verdict of each."""

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

FAULTS: list[PlantedFault] = [
    *of_kind("kill", *([{"signal": signal.SIGKILL}] * 5)),
    *of_kind(
        "crash",
        {"signal": signal.SIGSEGV},
        {"signal": signal.SIGFPE},
        *at(FORWARD, "import ctypes; ctypes.string_at(0)", "os.abort()"),
        *at(READ, "import ctypes; ctypes.string_at(0)"),
    ),
    *of_kind(
        "hang",
        {"signal": signal.SIGSTOP},
        *at(READ, "time.sleep(9999)"),
        *at(FORWARD, "while True: pass", "lock = threading.Lock(); lock.acquire(); lock.acquire()"),
        *at(REPORT, "pair = socket.socketpair(); pair[0].recv(1)"),
    ),
    *of_kind(
        "exception",
        *at(READ, "{}['model.layers.0.weight']", "json.loads('')"),
        *at(FORWARD, "import torch; torch.ones(2, 3) @ torch.ones(2, 3)", "import flash_attn_of_nobody"),
        *at(REPORT, "int('nan')"),
    ),
    *of_kind(
        "disk",
        *at(READ, "Path('/dev/full').write_bytes(b'x')"),
        *at(FORWARD, "import torch; torch.save(torch.ones(1 << 20), '/dev/full')"),
        *at(
            REPORT,
            "import resource, tempfile; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
            "Path(tempfile.mkdtemp(), 'x').write_bytes(b'x' * 8192)",
        ),
        errno_at(READ, 122) | {"cause": Cause.QUOTA},
        errno_at(REPORT, 122) | {"cause": Cause.QUOTA},
    ),
    *of_kind(
        "shared memory",
        *at(FORWARD, "fill_shared_memory(); touch_missing_page()"),
        *at(READ, "fill_shared_memory(); touch_missing_page()"),
        *at(REPORT, "fill_shared_memory(); touch_missing_page()"),
        *at(REPORT, "import torch; fill_shared_memory(); torch.ones(1 << 22).share_memory_()"),
        *at(READ, "fill_shared_memory(); load_with_worker(memory=False)"),
    ),
    *of_kind(
        "GPU memory",
        *(
            at(
                FORWARD,
                "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
                "a total capacity of 79.15 GiB of which 1.19 GiB is free.')",
                "import torch; raise torch.OutOfMemoryError('HIP out of memory. Tried to allocate 2.00 GiB.')",
                "raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')",
            )
            + at(
                REPORT,
                "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB.')",
                "import torch; raise torch.OutOfMemoryError('XPU out of memory. Tried to allocate 1.00 GiB.')",
            )
        ),
    ),
    *of_kind(
        "bad GPU",
        *at(
            FORWARD,
            "raise RuntimeError('transform: failed to synchronize: cudaErrorECCUncorrectable: uncorrectable "
            "ECC error encountered')",
            "raise RuntimeError('CUDA error: uncorrectable NVLink error detected during the execution')",
        ),
        *at(REPORT, "raise RuntimeError('GPU is lost.  Reboot the system to recover this GPU')"),
        {
            "signal": signal.SIGABRT,
            "kernel": "NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', GPU has fallen off the bus.",
            "names_rank": False,
        },
        {
            **at(FORWARD, "raise RuntimeError('CUDA error: unspecified launch failure')")[0],
            "kernel": "NVRM: Xid (PCI:0000:c6:00): 48, pid=4002, name=python3, DBE (double bit error) detected",
            "names_rank": False,
        },
    ),
    *of_kind(
        "NCCL time-out",
        *[
            {"place": place, "code": "time.sleep(9999)", "others": "watchdog"}
            for place in (FORWARD, READ, REPORT, JOURNAL, BATCH)
        ],
    ),
    *of_kind(
        "network",
        {"code": "cut_connections()", "names_rank": False},
        {**at(FORWARD, "cut_connections()")[0], "names_rank": False},
        *at(READ, "socket.getaddrinfo('nowhere.invalid', 80)"),
        *at(REPORT, "socket.create_connection(('127.0.0.1', 1))"),
        *at(
            REPORT,
            "import datetime, torch; torch.distributed.TCPStore('127.0.0.1', 1, is_master=False, "
            "timeout=datetime.timedelta(seconds=2))",
        ),
    ),
    *of_kind(
        "storage",
        *at(READ, "Path('/proc/self/mem').open('rb').read(1)", "socket.socket().getpeername()"),
        errno_at(READ, 116),
        errno_at(READ, 108),
        errno_at(FORWARD, 5),
    ),
    *of_kind(
        "out of memory",
        *at(FORWARD, "use_up_memory()"),
        *at(READ, "use_up_memory()"),
        *at(REPORT, "use_up_memory()"),
        *at(READ, "load_with_worker(memory=True)"),
        *at(
            REPORT,
            "import subprocess; subprocess.run([sys.executable, '-c', 'x = bytearray(1 << 30)'], check=True)",
        ),
    ),
]

HANGS: dict[str, PlantedFault] = {
    name: of_kind("hang", fault)[0]
    for name, fault in {
        "a data loader that sleeps": at(READ, "time.sleep(9999)")[0],
        "a data loader that reads": at(READ, "os.read(os.pipe()[0], 1)")[0],
        "a receive that nobody answers": at(
            FORWARD,
            "import torch; import torch.distributed as d; d.recv(torch.zeros(1), src=(d.get_rank() + 1) % 4)",
        )[0],
        "a write of the journal": at(JOURNAL, "os.read(os.pipe()[0], 1)")[0],
        "a lock": at(REPORT, "lock = threading.Lock(); lock.acquire(); lock.acquire()")[0],
        "a thread": at(
            FORWARD, "t = threading.Thread(target=time.sleep, args=(9999,), daemon=True); t.start(); t.join()"
        )[0],
        "a condition": at(REPORT, "threading.Event().wait()")[0],
        "a sleep": at(FORWARD, "time.sleep(9999)")[0],
        "a loop": at(FORWARD, "while True: pass")[0],
        "a loop in native code that keeps the interpreter": at(
            FORWARD, "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')"
        )[0],
        "a save": at(SAVE, "time.sleep(9999)")[0],
        "a stop": {"signal": signal.SIGSTOP},
    }.items()
}
