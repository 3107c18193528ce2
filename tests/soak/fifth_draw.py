"""A fifth draw of sixty faults of the same twelve kinds: written after the fourth had mended the rules."""

# ruff: noqa: E501  (messages as they come, in one line)

from __future__ import annotations

import signal

from tests.soak.fault_kinds import PlantedFault, at, errno_at, of_kind

from bloomery.operate.diagnosis import Cause

MLP = "bloomery.model.layers:MLP.forward"
LINEAR = "bloomery.model.layers:Linear.forward"
EMBED = "bloomery.model.decoder:Decoder._embed"
RECORD = "bloomery.train.trainer:Trainer.record"
PREFETCH = "bloomery.train.trainer:Trainer.prefetch"

AFTER_DUMP = (
    "[rank{0}]:[F1016 09:12:44.102334 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Terminating "
    "the process after attempting to dump debug info, due to collective timeout or exception."
)
MONITOR = (
    "[rank{0}]:[F527 18:00:21.771234 ProcessGroupNCCL.cpp:1306] [PG 0 Rank {0}] Heartbeat monitor timed out! Process will "
    "be terminated after dumping debug info. workMetaList_.size()=3"
)
ABORTED = (
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank {0}.  Original reason for failure was: "
    "[Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, Timeout(ms)=1800000)"
)

FIFTH: list[PlantedFault] = [
    *of_kind(
        "kill",
        *at(MLP, "import signal as s; s.raise_signal(s.SIGKILL)"),
        *at(LINEAR, "import ctypes; getattr(ctypes.CDLL(None), 'raise')(9)"),
        *at(EMBED, "import subprocess; subprocess.run(['kill', '-KILL', str(os.getpid())]); time.sleep(9)"),
        *at(RECORD, "import resource as r; r.setrlimit(r.RLIMIT_CPU, (1, 1)); [0 for _ in iter(int, 1)]"),
        {"signal": signal.SIGKILL},
    ),
    *of_kind(
        "crash",
        *at(MLP, "import ctypes; ctypes.CDLL(None).strlen(1)"),
        *at(LINEAR, "import signal as s; s.raise_signal(s.SIGILL)"),
        *at(EMBED, "import ctypes; ctypes.pythonapi.Py_FatalError(b'planted')"),
        *at(RECORD, "import ctypes, torch; ctypes.memset(torch.ones(4).data_ptr() + (1 << 44), 1, 64)"),
        *at(PREFETCH, "import ctypes; ctypes.CDLL(None).free(ctypes.c_void_p(123456))"),
    ),
    *of_kind(
        "hang",
        *at(MLP, "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0)); s.recv(1)"),
        *at(LINEAR, "import signal as s; s.sigwait([s.SIGUSR1])"),
        *at(EMBED, "import tempfile; n = tempfile.mktemp(); os.mkfifo(n); os.open(n, os.O_RDONLY)"),
        *at(RECORD, "import multiprocessing as m; m.Queue().get()"),
        *at(PREFETCH, "[time.sleep(0.01) for _ in iter(int, 1)]"),
    ),
    *of_kind(
        "exception",
        *at(MLP, "import math; math.sqrt(-1)"),
        *at(LINEAR, "import torch; torch.linalg.inv(torch.zeros(2, 2))"),
        *at(EMBED, "next(iter([]))"),
        *at(RECORD, "raise SystemExit('the number of layers is odd')"),
        *at(
            PREFETCH,
            "raise RuntimeError('out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.')",
        ),
    ),
    *of_kind(
        "disk",
        *at(MLP, "import numpy; numpy.save(open('/dev/full', 'wb'), numpy.ones(1 << 18))"),
        *at(
            LINEAR,
            "import subprocess; subprocess.run(['dd', 'if=/dev/zero', 'of=/dev/full', 'bs=1M', 'count=1'], check=True)",
        ),
        *at(EMBED, "import json as j; j.dump(list(range(10**6)), open('/dev/full', 'w'))"),
        *at(
            RECORD,
            "raise OSError('[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device')",
        ),
        *[
            fault | {"cause": Cause.QUOTA}
            for fault in at(
                PREFETCH,
                "raise RuntimeError('Error while serializing: I/O error: Disk quota exceeded (os error 122)')",
            )
        ],
    ),
    *of_kind(
        "shared memory",
        *at(
            MLP,
            "from multiprocessing import shared_memory as s; fill_shared_memory(); s.ShareableList([b'x' * (1 << 20)] * 8)",
        ),
        *at(LINEAR, "import torch; fill_shared_memory(); torch.UntypedStorage._new_shared(1 << 24).fill_(1)"),
        *at(EMBED, "fill_shared_memory(); touch_missing_page()"),
        *at(RECORD, "fill_shared_memory(); load_with_worker(memory=False)"),
        *at(
            PREFETCH, "import numpy; fill_shared_memory(); numpy.save('/dev/shm/a.npy', numpy.ones(1 << 20))"
        ),
    ),
    *of_kind(
        "GPU memory",
        *at(
            MLP,
            "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 17.06 MiB is free. Process 12345 has 23.66 GiB memory in use.')",
        ),
        *at(
            LINEAR,
            "raise RuntimeError('CUDA error: out of memory\\nSearch for `cudaErrorMemoryAllocation in the documentation')",
        ),
        *at(
            EMBED,
            "raise RuntimeError('NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, unhandled cuda error, NCCL version 2.21.5\\nncclUnhandledCudaError: Call to CUDA function failed.\\nLast error:\\nCuda failure 2 \\'out of memory\\'')",
        ),
        *at(RECORD, "raise RuntimeError('cuFFT error: CUFFT_ALLOC_FAILED')"),
        *at(
            PREFETCH,
            "raise RuntimeError('CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`')",
        ),
    ),
    *of_kind(
        "bad GPU",
        *at(MLP, "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"),
        *at(
            LINEAR,
            "raise RuntimeError('NVML_ERROR_GPU_IS_LOST: the GPU has fallen off the bus or has otherwise become inaccessible')",
        ),
        {
            **at(EMBED, "raise RuntimeError('CUDA error: unspecified launch failure')")[0],
            "kernel": "NVRM: Xid (PCI:0000:3b:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            "names_rank": False,
        },
        {
            "signal": signal.SIGABRT,
            "kernel": "NVRM: Xid (PCI:0000:dd:00): 145, RLW_SRC_TRACK Fatal XC1 i0 Link 05 (0x00000084 0x00000000)",
            "names_rank": False,
        },
        {
            **at(PREFETCH, "raise RuntimeError('CUDA error: unknown error')")[0],
            "kernel": "amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!",
            "names_rank": False,
        },
    ),
    *of_kind(
        "NCCL time-out",
        {"place": MLP, "code": "time.sleep(9999)", "others": AFTER_DUMP},
        {"place": LINEAR, "code": "threading.Event().wait()", "others": MONITOR},
        {"place": EMBED, "code": "while True: pass", "others": ABORTED},
        {"place": RECORD, "code": "os.read(os.pipe()[0], 1)", "others": MONITOR},
        {"place": PREFETCH, "code": "time.sleep(9999)", "others": "watchdog"},
    ),
    *of_kind(
        "network",
        {**at(MLP, "cut_connections()")[0], "names_rank": False},
        *at(
            LINEAR,
            "import http.client; raise http.client.RemoteDisconnected('Remote end closed connection without response')",
        ),
        *at(
            EMBED,
            "raise RuntimeError('[c10d] The client socket has failed to connect to any network address of (node0, 29500). The client socket has failed to connect to node0:29500 (errno: 113 - No route to host).')",
        ),
        *at(
            RECORD,
            "import ssl; raise ssl.SSLEOFError(8, 'EOF occurred in violation of protocol (_ssl.c:2427)')",
        ),
        *at(
            PREFETCH,
            "raise RuntimeError('ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\\nLast error:\\nsocketStartConnect: Connect to 10.0.0.2<43333> failed : Software caused connection abort')",
        ),
    ),
    *of_kind(
        "storage",
        errno_at(MLP, 61),
        errno_at(LINEAR, 5),
        *at(
            EMBED,
            "raise OSError('Can\\'t synchronously read data (file read failed: time = Wed Nov 12 01:02:03 2025, filename = /data/a.h5, errno = 5, error message = \\'Input/output error\\')')",
        ),
        *at(
            RECORD,
            "raise RuntimeError('Generic S3 error: Error after 10 retries in 180.1s, max_retries:10, retry_timeout:180s, source:error sending request')",
        ),
        *at(
            PREFETCH,
            "raise RuntimeError('An error occurred (SlowDown) when calling the PutObject operation (reached max retries: 4): Please reduce your request rate.')",
        ),
    ),
    *of_kind(
        "out of memory",
        *at(MLP, "use_up_memory()"),
        *at(LINEAR, "import torch; held = [torch.zeros(1 << 24) for _ in range(10**4)]"),
        *at(EMBED, "import io; held = io.BytesIO(); [held.write(b'x' * (1 << 22)) for _ in iter(int, 1)]"),
        *at(
            RECORD,
            "import concurrent.futures as c; c.ProcessPoolExecutor(1).submit(bytearray, 1 << 30).result()",
        ),
        *at(
            PREFETCH,
            "import subprocess; subprocess.check_call('python3 -c \"x = bytearray(1 << 30)\" || exit $?', shell=True)",
        ),
    ),
]
