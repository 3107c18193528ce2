"""Which collective of torch a reduce_scatter becomes, and what collectives of one rank are: nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.config.parallel import ParallelSection
from bloomery.errors import RankLost, TrainingFailed
from bloomery.parallel import axis
from bloomery.parallel.axis import SINGLE_RANK_AXIS, Axis, PendingCollective
from bloomery.parallel.mesh import Mesh, join_mesh


@pytest.mark.parametrize(("backend", "called"), [("gloo", "all_reduce"), ("nccl", "reduce_scatter")])
def test_gloo_sums_whole_tensors_and_other_backends_the_shard_alone(
    backend: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(axis.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(axis.dist, "all_reduce", lambda flat, group: calls.append("all_reduce"))
    monkeypatch.setattr(axis, "_reduce_scatter", lambda own, flat, group: calls.append("reduce_scatter"))
    own = Axis(index=1, ranks=(0, 1)).reduce_scatter(torch.arange(6.0))
    assert calls == [called] and own.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("elements", "called"), [(range(6), ["own"]), (range(2, 5), [0, 1]), (range(3, 5), [1])]
)
def test_a_part_of_a_tensor_is_summed_where_its_shards_are(
    elements: range, called: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    parts: list[list[float]] = []

    def reduce(part: torch.Tensor, *, dst: int, group: object, async_op: bool) -> None:
        calls.append(dst)
        parts.append(part.tolist())

    monkeypatch.setattr(axis.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(axis.dist, "reduce", reduce)
    monkeypatch.setattr(
        axis, "_reduce_scatter", lambda own, flat, group, async_op: calls.append("own") or parts.append(own)
    )
    flat = torch.arange(6.0)
    Axis(index=1, ranks=(0, 1)).begin_reduce_scatter(flat, elements)
    assert calls == called
    if called != ["own"]:
        assert [number for part in parts for number in part] == flat[elements.start : elements.stop].tolist()


def test_a_rank_alone_waits_for_nobody_and_keeps_its_numbers() -> None:
    """There is no process group, so any collective of torch would raise."""
    flat = torch.arange(6.0)
    pending = [
        SINGLE_RANK_AXIS.begin_all_reduce(flat),
        SINGLE_RANK_AXIS.begin_reduce_scatter(flat, range(2, 4)),
        SINGLE_RANK_AXIS.begin_all_gather(flat),
    ]
    for each in pending:
        each.wait_for_collective()
    SINGLE_RANK_AXIS.all_gather(flat)
    assert (
        SINGLE_RANK_AXIS.all_reduce(flat) is flat and SINGLE_RANK_AXIS.all_reduce(flat, maximum=True) is flat
    )
    assert SINGLE_RANK_AXIS.reduce_scatter(flat).tolist() == flat.tolist() == list(range(6))
    assert SINGLE_RANK_AXIS.is_first and SINGLE_RANK_AXIS.is_last and SINGLE_RANK_AXIS.degree == 1


def test_a_mesh_of_one_rank_asks_nobody() -> None:
    mesh, tensor = Mesh(device=torch.device("cpu")), torch.arange(3.0)
    assert mesh.all_reduce(tensor) is tensor is mesh.broadcast(tensor) and tensor.tolist() == [0.0, 1.0, 2.0]
    assert mesh.all_gather_object({"a": 1}) == [{"a": 1}]
    mesh.exchange({}, {})
    mesh.barrier()
    mesh.close()
    told: list[str] = []
    assert mesh.run_on_rank_zero(lambda report: report() or told.append("done") or 5, doing="it") == 5
    assert told == ["done"] and mesh.is_first


def test_a_rank_alone_that_the_recipe_wants_more_of_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainingFailed):
        join_mesh(ParallelSection(data=2))
    assert join_mesh(ParallelSection()).world == 1


@pytest.mark.parametrize("degree", [2, 3])
def test_the_shards_of_an_axis_are_the_tensor_in_the_order_of_its_ranks(degree: int) -> None:
    flat = torch.arange(6.0)
    members = [Axis(index=index, ranks=tuple(range(degree))) for index in range(degree)]
    assert torch.cat([member.local_shard(flat) for member in members]).equal(flat)
    assert [member.is_first for member in members] == [True] + [False] * (degree - 1)
    assert [member.is_last for member in members] == [False] * (degree - 1) + [True]


def test_a_collective_that_ends_because_a_rank_is_gone_says_so_when_it_is_waited_for() -> None:
    def gone() -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    def wrong() -> None:
        raise RuntimeError("sizes differ")

    for wait, raised in ((gone, RankLost), (wrong, RuntimeError)):
        works: Any = (SimpleNamespace(wait=wait),)
        with pytest.raises(Exception) as failed:
            PendingCollective(works=works).wait_for_collective()
        assert type(failed.value) is raised


def test_all_parts_of_a_collective_are_waited_for() -> None:
    waited: list[int] = []
    works: Any = tuple(SimpleNamespace(wait=lambda number=number: waited.append(number)) for number in (1, 2))
    PendingCollective(works=works).wait_for_collective()
    assert waited == [1, 2]
