"""A line for each form of words by which the cause of a failure is known."""

from __future__ import annotations

from bloomery.operate.diagnosis import Cause

WORDS: dict[Cause, str] = {
    Cause.RUN_BUSY: """
        RunBusy: runs/demo
        /runs/demo is being trained by process 7 on n1 since 07:00
    """,
    Cause.BAD_GPU: """
        uncorrectable NVLink error detected
        uncorrectable ECC error encountered
        CUDA error: an ECC thing
        hardware error
        hardware stack error
        the GPU is lost
        GPU requires reset
        fallen off the bus
        lost from the bus
        Unable to determine the device handle for GPU 0000:3B:00.0
        double-bit ECC error
        Double Bit error
        row-remapping failure
        row remap failed
        NV_ERR_GPU_IS_LOST
        cudaErrorDevicesUnavailable
        cudaErrorECCUncorrectable
        hipErrorHardwareStackError
        cudaErrorNoDevice
        cudaErrorSystemNotReady
        cudaErrorSystemDriverMismatch
        no CUDA-capable device is detected
        no ROCm-capable device is detected
        HW Exception by GPU node-1
        num_gpus INTERNAL ASSERT FAILED
        pynvml.NVMLError_DriverNotLoaded
        pynvml.NVMLError_GpuIsLost
        nvidia-container-cli: initialization error
        HBM double thing is uncorrectable
        HBM multi-bit upset
        NRT_EXEC_HW_ERR_NC_UE
        DEVICE_LOST
        Device acquire failed
        Failed to initialize NVML: Driver/library version mismatch
        CUDA driver initialization failed, you might not have a CUDA gpu
        Error 802: system not yet initialized
        CUDA driver error: system not yet initialized
        CUDA error: system not yet initialized
        NVSwitch fatal error
        in the Fabric Manager or NVSwitches
        DRIVER_NOT_LOADED
        no healthy devices present
        CUDA unknown error - this may be due to an incorrectly set up environment
        CUDA-capable device(s) is/are busy or unavailable
        RmInitAdapter failed! (0x62)
        NVLink: fatal error
        HSA_STATUS_ERROR_HARDWARE
        HSA_STATUS_ERROR_EXCEPTION
    """,
    Cause.QUOTA: """
        Disk quota exceeded
        EDQUOT
        errno 122
        errno: 122
        (os error 122)
        DSQuotaExceededException: The DiskSpace quota is exceeded
        NSQuotaExceededException: The NameSpace quota is exceeded
        (QuotaExceeded) when calling PutObject
        Storage limit reached
        storage limit is reached
        upload exceeds quota
    """,
    Cause.BUS_ERROR: """
        insufficient shared memory (shm)
        Unexpected bus error encountered in worker. This might be caused by insufficient shared memory
        Bus error: a matter of shared memory
        bus error: a matter of shared memory
        out of shared memory
        killed by signal: Bus error
        unable to open shared memory object </torch_1_2_3>: No space left on device
        unable to write to file </torch_1_2_3>: No space left on device
        /dev/shm/x: no space left on device
        No space left on device: '/dev/shm/y'
        unable to allocate shared memory(shm) for file
        creating shared memory segment /dev/shm/nccl-1
        EmptyDir volume "shm-volume" exceeds its limit
        /dev/shm needs more available memory
        /dev/shm wants more space
        /dev/shm wants more free space
        /dev/shm is too small
        /dev/shm is full
        /dev/shm: increase its size
        /dev/shm: please increasing the shm
        not enough space in /dev/shm
        not enough memory in /dev/shm
        the object exceeds what /dev/shm has
    """,
    Cause.NO_SPACE: """
        No space left on device
        no inodes are left
        ENOSPC
        refused at /runs/x: no space
        File too large
        Not enough disk space
        insufficient free storage space
        disk is full
        the file system is full
        the filesystem is full
        Volume is full
        StorageFull
        minimum free drive threshold
        The node was low on resource: ephemeral-storage
        errno = 28
        (os error 28)
        OSError: 100 requested and 50 written
        PytorchStreamWriter failed writing file data/1
        inline_container.cc:778 unexpected pos 64 vs 0
    """,
    Cause.NETWORK: """
        Connect to 10.0.0.1<4000> failed : Connection oddity
        connect to 10.0.0.1<4000> returned nothing
        ibv_create_qp failed
        Transport retry count exceeded on mlx5_0
        IBV_WC_RETRY_EXC_ERR
        IBV_WC_RNR_RETRY_EXC_ERR
        OFI poll failed
        UNDELIVERABLE
        UCX  ERROR a timeout
        UCX WARN it timed out
        unhandled timeout error
        Gloo connectFullMesh failed with an oddity
        lost communication with a remote daemon
        Failed to connect to GCS
        Cannot establish the connection
        Unable to contact slurm controller (connect failure)
        client socket has timed out after 60000ms
        The client socket has failed to connect
        Temporary failure in name resolution
        Name or service not known
        No route to host
        Network is unreachable
        network is down
        Connection refused
        Connection timed out
        connection aborted
        Host is unreachable
        [Errno 100] x
        [Errno 101] x
        [Errno 110] x
        [Errno 111] x
        [Errno 113] x
        ncclSystemError: System call
        ncclInternalError: Internal check failed
        Software caused connection abort
        Proxy Call to rank 3 failed
        NET/OFI Request completed with error
        NET/IB : Got completion from peer with status=12 opcode=0
        NET/IB: Got completion from peer with status=IBV_WC(5 opcode=0
        NET/IB : Got completion with error 12, opcode 32
        NET/IB : mlx5_0:1 Got async event
        mlx5: n1: got completion with error
    """,
    Cause.STORAGE: """
        [Errno 5] x
        [Errno 6] x
        [Errno 19] x
        [Errno 30] x
        [Errno 37] x
        [Errno 67] x
        [Errno 70] x
        [Errno 71] x
        [Errno 74] x
        [Errno 78] x
        [Errno 107] x
        [Errno 108] x
        [Errno 112] x
        [Errno 116] x
        [Errno 117] x
        [Errno 121] x
        [Errno 61] No data available: '/x'
        [Errno 62] Timer expired: '/x'
        [Errno 103] x: '/x'
        [Errno 104] x: '/x'
        [Errno 110] x: '/x'
        [Errno 111] x: '/x'
        [Errno 113] x: '/x'
        PytorchStreamReader failed reading file data/1: file read failed
        Input/output error
        disk I/O error
        Remote I/O error
        Structure needs cleaning
        Read-only file system
        HDFS open file failed
        Opening HDFS file '/x'
        BlockMissingException: Could not obtain block
        StandbyException
        SafeModeException
        RetriableException
        Transport endpoint is not connected
        transport endpoint is shut
        Stale file handle
        stale NFS file handle
        lustre: server not responding
        GPFS daemon timed out
        beegfs: handle is stale
        ceph: mds is down
        nfs: server x not responding
        fuse: it timed out
    """,
    Cause.NCCL_TIMEOUT: """
        Watchdog caught collective operation timeout
        DistStoreError: Timeout waiting
        DistStoreError: it timed out
        wait timeout after 600000 ms
        wait timeout after 600000ms
        NCCL communicator timed out
        NCCL timeout
        watchdog got stuck for 600 seconds
        Timed out waiting 1800000ms for recv operation to complete
        Timed out waiting 1800000ms for send operation to complete
        timeout at NCCL work: 5
        Timeout at NCCL work: 5
        Heartbeat monitor timed out!
        timed out in monitoredBarrier
        failed to pass monitoredBarrier in 300000 ms
        Timed out initializing process group in store based barrier on rank: 3
    """,
    Cause.OOM_KILLER: """
        Detected 1 oom_kill event in StepId=7.0
        oom-kill event(s)
        n1: tasks 0-3: Out Of Memory
        n1: task 3: Out Of Memory
        Detected 2 oom kill
        Detected 3 oom_kill
        killed by signal: Killed.
        Cannot allocate memory
        Can't allocate memory
        cannot allocate memory
        std::bad_alloc
        MemoryError
        memory allocation of 1024 bytes failed
        LLVM ERROR: out of memory
        node running low on memory
        Job exceeded memory limit
        step exceeded virtual memory limit
        it exceeded memory usage limit
        exceeded mem limit
        reaching LSF memory usage limit
        mem 1048576kb exceeded limit
        mem 1048576 kb exceeded limit
        OOMKilled
        TERM_MEMLIMIT
        earlyoom: sending SIGKILL to process 7
        The node was low on resource: memory
        Allocation error : not enough memory
        Memory allocation still failed after 10 retries
        Error: Unable to allocate 7.28 GiB for an array
        Error: Unable to allocate 728 bytes for an array
        malloc of size 1024 failed
        fatal error: runtime: out of memory
        fatal error: runtime: cannot allocate memory
        insufficient memory for the Java Runtime Environment
    """,
    Cause.NODE_LOST: """
        JOB 7 ON n1 CANCELLED DUE TO NODE FAILURE
        Node failure on n1
        node failure on n1
        the launcher on n1 has been silent for 6 s
    """,
    Cause.PREEMPTED: """
        JOB 7 DUE TO PREEMPTION
        JOB 7 DUE TO TIME LIMIT
        JOB 7 ON n1 CANCELLED AT 2031-05-06T07:08:09 DUE TO something
    """,
    Cause.CRASH: """
        *** stack smashing detected *** terminated
        pure virtual method called
        malloc(): corrupted top size
        free(): invalid pointer
        realloc(): invalid next size
        munmap_chunk(): invalid pointer
        malloc_consolidate(): unaligned chunk
        double free or corruption (out)
        corrupted size vs. prev_size
        corrupted double-linked list
        corrupted unsorted chunks
        CUDA error: an illegal memory access was encountered
        CUDA error: an illegal instruction was encountered
        CUDA error: misaligned address
        CUDA error: unspecified launch failure
        unhandled cuda error
        ncclUnhandledCudaError: Call to CUDA function failed.
        killed by signal: Segmentation fault.
        ERROR: AddressSanitizer: heap-use-after-free
        ERROR: ThreadSanitizer: x
        ERROR: MemorySanitizer: x
        fatal error: unexpected signal during runtime execution
        SIGSEGV: segmentation violation
    """,
    Cause.EXCEPTION: """
        CUDA error: device-side assert triggered
        CUDA error (/x/y.cu:42): invalid argument
        an inotify watch: no space left on device
        ValueError: something of ours
    """,
    Cause.BAD_RECIPE: """
        1 mistake in the recipe
        3 mistakes in the recipe
        ConfigError: x
    """,
    Cause.GPU_MEMORY: """
        CUDA out of memory. Tried to allocate 2 GiB
        HIP out of memory
        ROCm is out of memory
        XPU out of memory
        MPS backend out of memory
        NPU out of memory
        GPU 0 out of memory
        Triton: out of memory
        device 3: out of memory
        NCCL: out of memory
        RCCL: out of memory
        CUDNN_STATUS_DEVICE_ALLOCATION_FAILED
        CUBLAS_STATUS_ALLOC_FAILED
        CL_OUT_OF_MEMORY
        CL_OUT_OF_RESOURCES
        HSA_MEMORY_ERROR
        cudaErrorMemoryAllocation
        hipErrorOutOfMemory
        Failed to CUDA calloc async 608 bytes
        Failed to CUDA malloc 608 bytes
        cuBLAS Error: an allocation failed
        cuDNN Error: the allocation failed
        cuSPARSE Error: the allocation failed
        cuSOLVER Error: the allocation failed
        cuFFT Error: the allocation failed
        RESOURCE_EXHAUSTED: Failed to allocate request
        RESOURCE_EXHAUSTED: out of memory
        Failed to alloc DEVICE memory
        (usage: tensors) on ND 3
        cuda failure at /x/y: out of memory
        hip error at /x/y: out of memory
        miopenStatusAllocFailed
        OOM when allocating tensor with shape[8] on /job/device:GPU:0
        No executable batch size found, reached zero.
        OUT_OF_DEVICE_MEMORY
        PT_DEVMEM Allocation failed
        BFCArena::Alloc Failed to allocate memory for requested buffer
        RMM failure at: x
        Free memory on device cuda:0 (1 GiB) on startup is less than desired
        Failed to allocate 1024 bytes on device 'cuda:0'
        cuMemCreate failed
        cuMemAlloc failed
        cuMemAllocAsync failed
        torch.OutOfMemoryError: x
        Error out of memory at line 380 in file /x/ops.cu
    """,
}  # fmt: skip
