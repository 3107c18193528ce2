"""A sixth draw of sixty faults of the same twelve kinds: written after the fifth had mended the rules."""

# ruff: noqa: E501  (messages as they come, in one line)

from __future__ import annotations

import signal

from tests.soak.fault_kinds import PlantedFault, at, errno_at, of_kind

from bloomery.operate.diagnosis import Cause

NORM = "bloomery.model.layers:RMSNorm.forward"
LOSS = "bloomery.model.loss:NextTokenLoss.forward"
REQUESTS = "bloomery.train.trainer:Trainer.apply_requests"
STEP_PARTS = "bloomery.train.trainer:Trainer.step_parts"
TENSOR = "bloomery.data_loader.batches:Batches._tensor"

TIMEOUT_AT = (
    "[rank{0}]:[E131 16:15:16.701112233 ProcessGroupNCCL.cpp:1785] [PG ID 1 PG GUID 2 Rank {0}] Timeout at NCCL work: 5123, "
    "last enqueued NCCL work: 5125, last completed NCCL work: 5122."
)
SOME_FAILED = (
    "[rank{0}]:[E807 02:07:08.409 ProcessGroupNCCL.cpp:621] Some NCCL operations have failed or timed out. Due to the "
    "asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data."
)
GLOO = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
    "operation to complete"
)

SIXTH: list[PlantedFault] = [
    *of_kind(
        "kill",
        *at(
            NORM,
            "import multiprocessing as m; m.get_context('fork').Process(target=os.kill, args=(os.getpid(), 9)).start(); time.sleep(9)",
        ),
        *at(LOSS, "os.fork() or os.kill(os.getppid(), 9); time.sleep(9)"),
        *at(REQUESTS, "os.kill(os.getpid(), 9)"),
        *at(TENSOR, "import subprocess; subprocess.run(f'kill -9 {os.getpid()}', shell=True); time.sleep(9)"),
        {"signal": signal.SIGKILL},
    ),
    *of_kind(
        "crash",
        *at(
            NORM, "import numpy as n; n.lib.stride_tricks.as_strided(n.ones(2), (1 << 40,), (1 << 20,)).sum()"
        ),
        *at(LOSS, "import ctypes; ctypes.string_at(8)"),
        *at(REQUESTS, "import signal as s; s.raise_signal(s.SIGFPE)"),
        *at(STEP_PARTS, "import ctypes; ctypes.CDLL(None).abort()"),
        {"signal": signal.SIGSEGV},
    ),
    *of_kind(
        "hang",
        *at(NORM, "import subprocess; subprocess.run(['sleep', '9999'])"),
        *at(LOSS, "c = threading.Condition(); c.acquire(); c.wait()"),
        *at(REQUESTS, "socket.create_server(('127.0.0.1', 0)).accept()"),
        *at(STEP_PARTS, "import select; a, b = socket.socketpair(); select.select([a], [], [])"),
        *at(TENSOR, "x = 1\nwhile x: x = x * 3 % 1000003"),
    ),
    *of_kind(
        "exception",
        *at(NORM, "import torch; torch.load('/etc/hostname')"),
        *at(
            LOSS,
            "raise RuntimeError('CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously reported')",
        ),
        *at(REQUESTS, "raise ValueError('the tokenizer has 50257 entries and the model 50304')"),
        *at(
            STEP_PARTS,
            "raise ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')",
        ),
        *at(
            TENSOR,
            "raise RuntimeError('Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!')",
        ),
    ),
    *of_kind(
        "disk",
        *at(NORM, "raise OSError(28, 'No space left on device', '/tmp/torchinductor_root/cabc.so')"),
        *at(
            LOSS,
            "raise OSError('Can\\'t write data (file write failed: filename = \\'/data/a.h5\\', errno = 28, error message = \\'No space left on device\\')')",
        ),
        *at(
            REQUESTS,
            "raise RuntimeError('Os { code: 28, kind: StorageFull, message: \"No space left on device\" }')",
        ),
        *at(
            STEP_PARTS,
            "raise RuntimeError('[enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file data/12: file write failed')",
        ),
        errno_at(TENSOR, 122) | {"cause": Cause.QUOTA},
    ),
    *of_kind(
        "shared memory",
        *at(NORM, "fill_shared_memory(); touch_missing_page()"),
        *at(
            LOSS,
            "import multiprocessing as m; fill_shared_memory(); a = m.Array('d', 1 << 21, lock=False); a[:] = [1.0] * (1 << 21)",
        ),
        *at(REQUESTS, "import torch; fill_shared_memory(); torch.ones(1 << 22).share_memory_()"),
        *at(STEP_PARTS, "fill_shared_memory(); load_with_worker(memory=False)"),
        *at(TENSOR, "fill_shared_memory(); open('/dev/shm/next', 'w').write('x' * (1 << 22))"),
    ),
    *of_kind(
        "GPU memory",
        *at(
            NORM,
            "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1.95 GiB. GPU 5 has a total capacity of 79.11 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use.')",
        ),
        *at(
            LOSS,
            "raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtCreate(handle)`')",
        ),
        *at(
            REQUESTS,
            "raise RuntimeError('NPU out of memory. Tried to allocate 512.00 MiB (NPU 0; 60.97 GiB total capacity)')",
        ),
        *at(STEP_PARTS, "raise RuntimeError('Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY')"),
        *at(TENSOR, "raise RuntimeError('HIP error: hipErrorOutOfMemory')"),
    ),
    *of_kind(
        "bad GPU",
        *at(
            NORM,
            "raise RuntimeError('CUDA error: uncorrectable ECC error encountered (cudaErrorECCUncorrectable)')",
        ),
        *at(
            LOSS,
            "raise RuntimeError('Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized')",
        ),
        {
            **at(REQUESTS, "raise RuntimeError('CUDA error: the launch timed out and was terminated')")[0],
            "kernel": "NVRM: Xid (PCI:0000:9a:00): 109, pid=31337, name=python, Ch 00000008, errorString CTX SWITCH TIMEOUT",
            "names_rank": False,
        },
        {
            "signal": signal.SIGABRT,
            "kernel": "NVRM: Xid (PCI:0000:18:00): 62, pid='<unknown>', name=<unknown>, 32ca(3170) 00000000 00000000",
            "names_rank": False,
        },
        {
            **at(TENSOR, "time.sleep(9999)")[0],
            "kernel": "NVRM: Xid (PCI:0000:5d:00): 120, pid='<unknown>', name=<unknown>, GSP task exception",
            "names_rank": False,
        },
    ),
    *of_kind(
        "NCCL time-out",
        {"place": NORM, "code": "time.sleep(9999)", "others": TIMEOUT_AT},
        {"place": LOSS, "code": "threading.Event().wait()", "others": SOME_FAILED},
        {"place": REQUESTS, "code": "os.read(os.pipe()[0], 1)", "others": GLOO},
        {"place": STEP_PARTS, "code": "while True: pass", "others": SOME_FAILED},
        {"place": TENSOR, "code": "time.sleep(9999)", "others": TIMEOUT_AT},
    ),
    *of_kind(
        "network",
        {**at(LOSS, "cut_connections()")[0], "names_rank": False},
        {**at(REQUESTS, "cut_connections()")[0], "names_rank": False},
        *at(
            NORM,
            "raise RuntimeError('StatusCode.UNAVAILABLE: failed to connect to all addresses; last error: connections to all backends failing')",
        ),
        *at(STEP_PARTS, "raise_errno(101, None)"),
        *at(
            TENSOR,
            "raise ConnectionError('HTTPSConnectionPool(host=\\'hub\\', port=443): Max retries exceeded with url: /api (Caused by NameResolutionError())')",
        ),
    ),
    *of_kind(
        "storage",
        errno_at(NORM, 116),
        errno_at(LOSS, 107),
        *at(
            REQUESTS,
            "raise RuntimeError('An error occurred (InternalError) when calling the GetObject operation (reached max retries: 4): We encountered an internal error. Please try again.')",
        ),
        *at(
            STEP_PARTS,
            "raise RuntimeError('503 GET https://storage.googleapis.com/b/x/o: Service Unavailable')",
        ),
        errno_at(TENSOR, 5),
    ),
    *of_kind(
        "out of memory",
        *at(NORM, "use_up_memory()"),
        *at(LOSS, "load_with_worker(memory=True)"),
        *at(REQUESTS, "import numpy; held = numpy.ones(1 << 30)"),
        *at(STEP_PARTS, "held = ['x' * (1 << 20) + str(n) for n in range(10**6)]"),
        *at(
            TENSOR,
            "import subprocess; subprocess.run([sys.executable, '-c', 'x = bytearray(1 << 30)'], check=True)",
        ),
    ),
]
