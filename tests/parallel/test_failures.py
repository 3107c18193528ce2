"""What backends say when a rank is gone, word for word, and what they say when it is not."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from bloomery.errors import RankLost
from bloomery.parallel.rendezvous import is_lost_rank_error, raising_rank_lost

LOST = [
    RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12711"),
    RuntimeError("[gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: Connection reset by peer"),
    RuntimeError("[gloo/transport/tcp/pair.cc:446] writev [127.0.0.1]:60: Broken pipe"),
    RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete"
    ),
    RuntimeError("[gloo/transport/tcp/pair.cc:150] Application timeout caused pair closure"),
    RuntimeError("Gloo connectFullMesh failed: Connect timeout [10.0.0.2]:4123"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3699, remote process exited or there was a network error, NCCL "
        "version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer node-2<40001>"
    ),
    dist.DistBackendError(
        "NCCL communicator was aborted on rank 3. Original reason for failure was: [Rank 3] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=56693, OpType=BROADCAST, Timeout(ms)=600000) ran for "
        "604371 milliseconds before timing out."
    ),
    dist.DistBackendError(
        "NCCL error: unhandled system error, NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, "
        "malloc) or external library call failed or device error.\nLast error:\nsocketStartConnect: Connect "
        "to 10.0.0.2<41427> failed : Connection refused"
    ),
    dist.DistBackendError("Last error:\nNET/IB : Got completion from peer 11.2.1.2<39138> with error 12"),
    dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
    dist.DistStoreError("wait timeout after 300000ms, keys: /verdict"),
]
OURS = [
    RuntimeError("CUDA error: peer access is not supported between these two devices"),
    RuntimeError("CUDA error: the launch timed out and was terminated"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("the peers' average has another shape than ours"),
    dist.DistBackendError(
        "NCCL error: invalid usage\nncclInvalidUsage: This usually reflects invalid usage."
    ),
    dist.DistBackendError(
        "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: str(error)[:40])
def test_what_backends_say_of_a_rank_that_is_gone_is_recognised(error: RuntimeError) -> None:
    assert is_lost_rank_error(error)
    with pytest.raises(RankLost), raising_rank_lost():
        raise error


@pytest.mark.parametrize("error", OURS, ids=lambda error: str(error)[:40])
def test_an_error_of_this_rank_stays_what_it_is_though_it_speaks_of_peers(error: RuntimeError) -> None:
    assert not is_lost_rank_error(error)
    with pytest.raises(type(error)) as raised, raising_rank_lost():
        raise error
    assert raised.value is error
