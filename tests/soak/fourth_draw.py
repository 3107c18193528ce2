"""A fourth draw of faults, fifty-five of eleven kinds: written after the third had mended the rules."""

# ruff: noqa: E501  (messages as they come, in one line)

from __future__ import annotations

import signal

from tests.soak.fault_kinds import PlantedFault, at, errno_at, of_kind

from bloomery.operate.diagnosis import Cause

DECODER = "bloomery.model.decoder:Decoder.forward"
LIMIT = "bloomery.parallel.optimizers:Optimizers.limit"
STOP = "bloomery.train.control:LocalFacts.numbers"
BEAT = "bloomery.events.heartbeat:Heartbeat.enter"
FIRST = "bloomery.data_loader.batches:Batches.batch"

WATCHDOG_STUCK = (
    "[rank{0}]:[E626 05:14:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {0}] "
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."
)
ENQUEUED = (
    "[rank{0}]:[E1016 03:33:45.319844411 ProcessGroupNCCL.cpp:1583] [PG 0 Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={1}, OpType=ALLGATHER, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600011 ms"
)

FOURTH: list[PlantedFault] = [
    *of_kind(
        "kill",
        *(
            [
                at(place, "signal = 9; os.kill(os.getpid(), signal); time.sleep(9)")[0]
                for place in (DECODER, LIMIT, STOP, FIRST)
            ]
            + [{"signal": signal.SIGKILL}]
        ),
    ),
    *of_kind(
        "crash",
        *at(DECODER, "import ctypes; ctypes.memmove(16, 32, 8)"),
        *at(LIMIT, "import ctypes; ctypes.CFUNCTYPE(None)(1)()"),
        *at(STOP, "os.abort()"),
        *at(FIRST, "import sys; sys.setrecursionlimit(10**9); f = lambda f: f(f); f(f)"),
        {"signal": signal.SIGSYS},
    ),
    *of_kind(
        "hang",
        *at(DECODER, "threading.Semaphore(0).acquire()"),
        *at(LIMIT, "import subprocess; subprocess.Popen(['cat'], stdin=subprocess.PIPE).wait()"),
        *at(STOP, "pair = os.pipe(); os.write(pair[1], b'x' * (1 << 22))"),
        *at(FIRST, "import concurrent.futures as c; c.Future().result()"),
        *at(BEAT, "time.sleep(9999)"),
    ),
    *of_kind(
        "exception",
        *at(DECODER, "import torch; torch.ones(2).reshape(3, 5)"),
        *at(LIMIT, "raise KeyError('optim.first')"),
        *at(STOP, "float('one')"),
        *at(FIRST, "import numpy; numpy.ones(3) + numpy.ones(4)"),
        *at(DECODER, "raise PermissionError(13, 'Permission denied', '/data/run')"),
    ),
    *of_kind(
        "disk",
        *at(DECODER, "import sqlite3; raise sqlite3.OperationalError('database or disk is full')"),
        *at(LIMIT, "os.write(os.open('/dev/full', os.O_WRONLY), b'x')"),
        *at(STOP, "import torch; torch.save({'w': torch.ones(1 << 18)}, open('/dev/full', 'wb'))"),
        *at(FIRST, "print('x' * (1 << 20), file=open('/dev/full', 'w'), flush=True)"),
        errno_at(STOP, 122) | {"cause": Cause.QUOTA},
    ),
    *of_kind(
        "shared memory",
        *at(DECODER, "fill_shared_memory(); load_with_worker(memory=False)"),
        *at(LIMIT, "fill_shared_memory(); touch_missing_page()"),
        *at(STOP, "import torch; fill_shared_memory(); torch.empty(1 << 23).share_memory_().fill_(1)"),
        *at(
            FIRST,
            "fill_shared_memory(); f = open('/dev/shm/more', 'wb'); f.write(b'x' * (1 << 22)); f.close()",
        ),
        *at(
            DECODER,
            "import multiprocessing as m; fill_shared_memory(); a = m.RawArray('b', 1 << 24); memoryview(a).cast('B')[:] = b'1' * (1 << 24)",
        ),
    ),
    *of_kind(
        "GPU memory",
        *at(
            DECODER,
            "raise RuntimeError('CUDA out of memory. Tried to allocate 96.00 MiB (GPU 0; 39.59 GiB total capacity)')",
        ),
        *at(LIMIT, "raise RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED')"),
        *at(
            STOP,
            "import torch; raise torch.cuda.OutOfMemoryError('HIP out of memory. Tried to allocate 14.00 GiB.')",
        ),
        *at(
            FIRST,
            "raise RuntimeError('ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2 \\'out of memory\\'')",
        ),
        *at(
            DECODER,
            "raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')",
        ),
    ),
    *of_kind(
        "bad GPU",
        *at(DECODER, "raise RuntimeError('CUDA error: hardware stack error')"),
        *at(LIMIT, "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"),
        *at(
            STOP,
            "raise RuntimeError('Unable to determine the device handle for GPU 0000:41:00.0: Unknown Error')",
        ),
        {
            "signal": signal.SIGSEGV,
            "kernel": "NVRM: Xid (PCI:0000:41:00): 140, pid=5, name=python3, Unrecovered ECC error",
            "names_rank": False,
        },
        {
            **at(FIRST, "raise RuntimeError('CUDA error: an illegal memory access was encountered')")[0],
            "kernel": "NVRM: Xid (PCI:0000:d8:00): 63, pid=1, name=python3, Row Remapper: New row marked for remapping",
            "names_rank": False,
        },
    ),
    *of_kind(
        "NCCL time-out",
        {"place": LIMIT, "code": "time.sleep(9999)", "others": ENQUEUED},
        {"place": STOP, "code": "threading.Event().wait()", "others": WATCHDOG_STUCK},
        {"place": FIRST, "code": "while True: pass", "others": ENQUEUED},
        {"place": LIMIT, "code": "os.read(os.pipe()[0], 1)", "others": WATCHDOG_STUCK},
        {"place": STOP, "code": "import queue; queue.SimpleQueue().get()", "others": "watchdog"},
    ),
    *of_kind(
        "network",
        {**at(LIMIT, "cut_connections()")[0], "names_rank": False},
        {**at(STOP, "cut_connections()")[0], "names_rank": False},
        *at(DECODER, "raise TimeoutError(110, 'Connection timed out')"),
        *at(FIRST, "raise OSError(113, 'No route to host')"),
        *at(DECODER, "socket.getaddrinfo('no-such-node.invalid', 29500)"),
    ),
    *of_kind(
        "storage",
        errno_at(DECODER, 117),
        errno_at(LIMIT, 74),
        errno_at(STOP, 30),
        errno_at(FIRST, 116),
        *at(DECODER, "raise RuntimeError('I/O error: Input/output error (os error 5)')"),
    ),
]
