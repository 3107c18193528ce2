"""What backends say when a rank is gone, word for word, and what they say when it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel.test_building import model_of

from bloomery.config.parallel import ParallelSection
from bloomery.errors import RankLost
from bloomery.parallel import axis as axis_module
from bloomery.parallel import mesh as mesh_module
from bloomery.parallel.axis import Axis, PendingCollective
from bloomery.parallel.mesh import Mesh, join_mesh, mesh_of
from bloomery.parallel.rendezvous import is_lost_rank_error, raising_rank_lost
from bloomery.plan.ranks import Degrees

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
    dist.DistStoreError("the server has other keys than before"),
    dist.DistNetworkError("no answer to a ping"),
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
    with pytest.raises(RankLost, match=r"^Another rank of this run is gone\.") as lost, raising_rank_lost():
        raise error
    assert lost.value.__cause__ is error
    assert lost.value.remedy == (
        "Its message, if any, says why. The same command goes on from the newest checkpoint."
    )


@pytest.mark.parametrize("error", OURS, ids=lambda error: str(error)[:40])
def test_an_error_of_this_rank_stays_what_it_is_though_it_speaks_of_peers(error: RuntimeError) -> None:
    assert not is_lost_rank_error(error)
    with pytest.raises(type(error)) as raised, raising_rank_lost():
        raise error
    assert raised.value is error


AXIS = Axis(index=1, ranks=(0, 1))
MESH = Mesh(device=torch.device("cpu"), rank=1, world=2)
COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "axis.all_reduce": AXIS.all_reduce,
    "axis.reduce_scatter": AXIS.reduce_scatter,
    "axis.all_gather": AXIS.all_gather,
    "axis.begin_all_reduce": AXIS.begin_all_reduce,
    "axis.begin_reduce_scatter": lambda flat: AXIS.begin_reduce_scatter(flat, range(4)),
    "axis.begin_reduce_scatter of some": lambda flat: AXIS.begin_reduce_scatter(flat, range(1, 3)),
    "axis.begin_all_gather": AXIS.begin_all_gather,
    "axis.begin_all_gather of some": lambda flat: AXIS.begin_all_gather(flat, range(1, 3)),
    "mesh.all_reduce": MESH.all_reduce,
    "mesh.broadcast": MESH.broadcast,
    "mesh.all_gather_object": lambda flat: MESH.all_gather_object("x"),
    "mesh.exchange": lambda flat: MESH.exchange({0: flat}, {}),
    "mesh.barrier": lambda flat: MESH.barrier(),
    "mesh's channels": lambda flat: mesh_of(
        Degrees(pipeline=2, data=1, tensor=1), rank=1, device=flat.device
    ),
    "rendezvous": lambda flat: join_mesh(ParallelSection(data=2)),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_collective_without_the_other_rank_says_that_it_is_gone(
    collective: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("Connection closed by peer")

    for name in ("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "batch_isend_irecv", "recv"):
        monkeypatch.setattr(dist, name, fails)
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(axis_module, name, fails)
    monkeypatch.setattr(dist, "P2POp", lambda *told: told)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: "group")
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(mesh_module, "open_rendezvous_store", fails)
    monkeypatch.setattr(mesh_module, "ask_store", lambda call, **_: call())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankLost, match="Another rank of this run is gone"):
        COLLECTIVES[collective](torch.arange(4.0))


def test_a_collective_that_was_begun_says_that_the_other_rank_is_gone_when_it_is_waited_for() -> None:
    def wait() -> None:
        raise RuntimeError("Connection closed by peer")

    work: Any = SimpleNamespace(wait=wait)
    with pytest.raises(RankLost, match="Another rank of this run is gone"):
        PendingCollective(works=(work,)).wait_for_collective()


@pytest.mark.parametrize("has_pipeline", [False, True])
def test_a_backward_without_the_other_ranks_says_that_they_are_gone(has_pipeline: bool) -> None:
    def fails(*told: Any, **more: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    pipeline: Any = SimpleNamespace(accumulate=fails) if has_pipeline else None
    model = replace(model_of(), loss=fails, pipeline=pipeline)
    batch: Any = object()
    with pytest.raises(RankLost, match="Another rank of this run is gone"):
        model.accumulate([batch], 0, weight=1.0)
