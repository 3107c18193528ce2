"""A third draw of sixty faults of the same twelve kinds, at places of the program that no other draw uses.

It was written after the second draw had mended the rules, and before it was run once.
"""

# ruff: noqa: E501  (messages as they come, in one line)

from __future__ import annotations

import signal

from tests.soak.fault_kinds import PlantedFault, at, errno_at, of_kind

from bloomery.operate.diagnosis import Cause

ATTENTION = "bloomery.model.attention:Attention.forward"
LOSS = "bloomery.model.loss:NextTokenLoss.forward"
UPDATE = "bloomery.parallel.optimizers:Optimizers.step"
AGREE = "bloomery.train.control:Control.agree"
FACTS = "bloomery.train.control:Control.local_facts"
PLACES = (ATTENTION, LOSS, UPDATE, AGREE, FACTS)

KILL = "os.kill(os.getpid(), 9); time.sleep(9)"
TERMINATED = (
    "[rank{0}]:[E131 16:15:16.707598872 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Process "
    "group watchdog thread terminated with exception: [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=BROADCAST, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800004 milliseconds"
)
COALESCED = (
    "[rank{0}]:[E802 11:18:52.5311 ProcessGroupNCCL.cpp:684] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=COALESCED, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600093 milliseconds"
)
REDUCE_SCATTER = (
    "[E ProcessGroupNCCL.cpp:475] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, "
    "OpType=_REDUCE_SCATTER_BASE, NumelIn=16384000, NumelOut=2048000, Timeout(ms)=1800000) ran for 1800447 ms."
)
IN_A_CHILD = (
    "import multiprocessing as m; p = m.get_context('fork').Process(target=time.sleep, args=(9999,)); "
    "p.daemon = True; p.start(); p.join()"
)
SQL = (
    "import sqlite3, tempfile; name = tempfile.mktemp(); a = sqlite3.connect(name, isolation_level=None); "
    "b = sqlite3.connect(name, timeout=9999, isolation_level=None); a.execute('begin exclusive'); "
    "b.execute('begin exclusive')"
)

THIRD: list[PlantedFault] = [
    *of_kind("kill", *[at(place, KILL)[0] for place in PLACES]),
    *of_kind(
        "crash",
        *at(ATTENTION, "import ctypes; ctypes.cast(64, ctypes.POINTER(ctypes.c_int)).contents.value"),
        *at(LOSS, "os.kill(os.getpid(), 11); time.sleep(9)"),
        *at(UPDATE, "os.kill(os.getpid(), 4); time.sleep(9)"),
        *at(AGREE, "import faulthandler; faulthandler._fatal_error('heap is damaged')"),
        *at(FACTS, "os.kill(os.getpid(), 8); time.sleep(9)"),
    ),
    *of_kind(
        "hang",
        *at(ATTENTION, IN_A_CHILD),
        *at(LOSS, "import select; select.poll().poll()"),
        *at(UPDATE, "threading.Barrier(2).wait()"),
        *at(AGREE, SQL),
        *at(FACTS, "import asyncio; asyncio.run(asyncio.Event().wait())"),
    ),
    *of_kind(
        "exception",
        *at(ATTENTION, "import torch; torch.zeros(3)[5]"),
        *at(LOSS, "raise NotImplementedError('this loss')"),
        *at(UPDATE, "import torch; torch.ones(2).view(3)"),
        *at(AGREE, "[][0]"),
        *at(FACTS, "Path('/nowhere/at/all').read_text()"),
    ),
    *of_kind(
        "disk",
        *at(LOSS, "import gzip; f = gzip.open('/dev/full', 'wb', 0); f.write(b'x' * (1 << 20)); f.close()"),
        *at(AGREE, "import subprocess; subprocess.run(['sh', '-c', 'echo x > /dev/full'], check=True)"),
        *at(FACTS, "import numpy; numpy.ones(1 << 18).tofile('/dev/full')"),
        errno_at(UPDATE, 28),
        errno_at(ATTENTION, 122) | {"cause": Cause.QUOTA},
    ),
    *of_kind(
        "shared memory",
        *at(ATTENTION, "fill_shared_memory(); touch_missing_page()"),
        *at(
            LOSS,
            "import numpy; from multiprocessing.shared_memory import SharedMemory; fill_shared_memory(); "
            "numpy.ndarray((1 << 22,), buffer=SharedMemory(create=True, size=1 << 25).buf)[:] = 1",
        ),
        *at(UPDATE, "fill_shared_memory(); load_with_worker(memory=False)"),
        *at(AGREE, "import torch; fill_shared_memory(); torch.ones(1 << 24).share_memory_()"),
        *at(FACTS, "fill_shared_memory(); Path('/dev/shm/block').write_bytes(b'x' * (1 << 20))"),
    ),
    *of_kind(
        "GPU memory",
        *at(
            ATTENTION,
            "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 384.00 MiB. GPU 3 has a "
            "total capacity of 93.12 GiB of which 98.69 MiB is free. Including non-PyTorch memory, this process has "
            "92.99 GiB memory in use.')",
        ),
        *at(LOSS, "raise RuntimeError('CUDA driver error: out of memory')"),
        *at(UPDATE, "raise RuntimeError('Triton Error [CUDA]: out of memory')"),
        *at(AGREE, "raise RuntimeError('CUBLAS_STATUS_ALLOC_FAILED')"),
        *at(FACTS, "raise MemoryError('std::bad_alloc: cudaErrorMemoryAllocation: out of memory')"),
    ),
    *of_kind(
        "bad GPU",
        *at(
            ATTENTION,
            "raise RuntimeError('CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error')",
        ),
        *at(
            LOSS,
            "raise RuntimeError('Unable to determine the device handle for GPU0000:8A:00.0: GPU is lost.')",
        ),
        {
            **at(UPDATE, "raise RuntimeError('CUDA error: unspecified launch failure')")[0],
            "kernel": "NVRM: Xid (PCI:0000:0f:00): 119, pid=2222, name=python3, Timeout after 6s of waiting for RPC response from GSP!",
            "names_rank": False,
        },
        {
            "signal": signal.SIGABRT,
            "kernel": "NVRM: Xid (PCI:0000:b7:00): 94, pid=77, name=python3, Contained: CE User Channel (0x9). RST: No",
            "names_rank": False,
        },
        {
            **at(FACTS, "time.sleep(9999)")[0],
            "kernel": "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
            "names_rank": False,
        },
    ),
    *of_kind(
        "NCCL time-out",
        {"place": ATTENTION, "code": "threading.Event().wait()", "others": TERMINATED},
        {"place": LOSS, "code": "time.sleep(9999)", "others": COALESCED},
        {"place": UPDATE, "code": "while True: pass", "others": REDUCE_SCATTER},
        {"place": AGREE, "code": "os.read(os.pipe()[0], 1)", "others": TERMINATED},
        {"place": FACTS, "code": SQL, "others": COALESCED},
    ),
    *of_kind(
        "network",
        {**at(ATTENTION, "cut_connections()")[0], "names_rank": False},
        {**at(AGREE, "cut_connections()")[0], "names_rank": False},
        *at(LOSS, "raise ConnectionRefusedError(111, 'Connection refused')"),
        *at(UPDATE, "raise_errno(101, None)"),
        *at(FACTS, "raise socket.gaierror(-3, 'Temporary failure in name resolution')"),
    ),
    *of_kind(
        "storage",
        errno_at(ATTENTION, 121),
        errno_at(LOSS, 5),
        errno_at(UPDATE, 111),
        errno_at(AGREE, 108),
        errno_at(FACTS, 70),
    ),
    *of_kind(
        "out of memory",
        *at(ATTENTION, "use_up_memory()"),
        *at(LOSS, "load_with_worker(memory=True)"),
        *at(UPDATE, "import torch; held = [torch.ones(1 << 22) for _ in range(10**6)]"),
        *at(
            AGREE,
            "import subprocess; subprocess.run([sys.executable, '-c', 'x = bytearray(1 << 30)'], check=True)",
        ),
        *at(FACTS, "use_up_memory()"),
    ),
]
