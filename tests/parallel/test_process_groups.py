"""The process groups of a mesh: on GPUs one split for all groups of an axis, whatever the number of ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bloomery.config.load import load_recipe
from bloomery.errors import TrainingFailed
from bloomery.events.timeouts import COLLECTIVE_TIMEOUT_S, WATCHDOG_MARGIN_S
from bloomery.parallel import mesh as mesh_module
from bloomery.parallel.mesh import mesh_of
from bloomery.parallel.pipeline_schedule import p2p_channels
from bloomery.plan.ranks import Degrees, degrees_of


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The ranks of each split of the default group; no communicator is made."""
    made: list[list[list[int]]] = []

    def split(*, split_ranks: list[list[int]], timeout: object) -> object:
        assert timeout == timedelta(seconds=COLLECTIVE_TIMEOUT_S + WATCHDOG_MARGIN_S)
        made.append(split_ranks)
        return object()

    monkeypatch.setattr(dist, "split_group", split)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: pytest.fail("a group was made by itself"))
    monkeypatch.setattr(mesh_module, "_connect", lambda channels, device: None)
    return made


def test_384_ranks_split_the_world_some_twenty_times_and_agree_on_each_split(
    splits: list[list[list[int]]],
) -> None:
    degrees = degrees_of(load_recipe("tr11-176b").recipe.parallel, world=384)
    assert degrees is not None and degrees.world == 384
    of_rank = []
    for rank in (0, 5, 383):
        splits.clear()
        mesh = mesh_of(degrees, rank=rank, device=torch.device("cuda"))
        assert all(axis.group is not None for axis in (mesh.tensor, mesh.pipeline, mesh.data))
        of_rank.append([[list(ranks) for ranks in split] for split in splits])
    assert of_rank[0] == of_rank[1] == of_rank[2]
    assert len(of_rank[0]) <= 30
    for split in of_rank[0]:
        members = [rank for ranks in split for rank in ranks]
        assert len(members) == len(set(members)), "groups of one split share no rank"


def test_a_rank_outside_of_all_groups_of_a_split_has_no_group(splits: list[list[list[int]]]) -> None:
    degrees = Degrees(pipeline=4, data=1, tensor=1)
    middle = mesh_of(degrees, rank=1, device=torch.device("cuda"))
    assert middle.embedding.group is None and middle.embedding.ranks == (1,)
    last = mesh_of(degrees, rank=3, device=torch.device("cuda"))
    assert last.embedding.group is not None and last.embedding.ranks == (0, 3)


@pytest.mark.parametrize(
    ("ties", "schedule", "chunks", "pairs"),
    [(True, "1f1b", 1, 1), (False, "1f1b", 1, 0), (True, "zbv", 2, 0), (True, "interleaved", 2, 1)],
)
def test_the_ends_of_a_pipeline_have_a_group_only_where_they_share_an_embedding(
    ties: bool, schedule: str, chunks: int, pairs: int, splits: list[list[list[int]]]
) -> None:
    mesh = mesh_of(
        Degrees(pipeline=3, data=1, tensor=1),
        rank=0,
        device=torch.device("cuda"),
        schedule=schedule,
        chunks=chunks,
        ties_embedding=ties,
    )
    assert mesh.embedding.ranks == ((0, 2) if pairs else (0,))
    assert (mesh.embedding.group is not None) == bool(pairs)
    # Beside it one for the pipeline, and one for each channel between its ranks.
    assert len(splits) == 1 + len(p2p_channels(pipeline=3, chunks=chunks, schedule=schedule)) + pairs


def test_a_rank_has_a_gpu_of_its_own_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for local in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert mesh_module._device() == torch.device("cuda", local)
    for local in (2, 5):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        with pytest.raises(TrainingFailed, match=f"Rank {local} of this machine has no GPU") as refused:
            mesh_module._device()
        assert refused.value.message.endswith("there are 2.")
        assert refused.value.remedy == (
            "Start at most --nproc 2 here, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    assert chosen == [0, 1]
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("RANK", "1")
    assert mesh_module._device() == torch.device("cuda", 0), "without a launcher of ours it is the first"


@pytest.mark.parametrize("has_groups", [True, False])
def test_a_mesh_that_closes_leaves_its_process_groups(
    has_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[bool] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: has_groups)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(True))
    mesh_module.Mesh(device=torch.device("cpu")).close()
    assert left == [True] * has_groups


def test_a_group_of_cpus_has_the_time_out_of_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[int], object]] = []

    def new_group(ranks: list[int], *, timeout: object = None) -> str:
        made.append((ranks, timeout))
        return f"group of {ranks}"

    monkeypatch.setattr(dist, "new_group", new_group)
    axis = mesh_module._axis([(0, 1), (2, 3), (4,)], 3, torch.device("cpu"))
    assert (axis.index, axis.ranks, axis.group) == (1, (2, 3), "group of [2, 3]")
    assert made == [(ranks, timedelta(seconds=COLLECTIVE_TIMEOUT_S)) for ranks in ([0, 1], [2, 3])]
    alone = mesh_module._axis([(0, 1), (2, 3), (4,)], 4, torch.device("cpu"))
    assert (alone.index, alone.ranks, alone.group) == (0, (4,), None)


def test_the_channels_are_those_of_the_pipelines_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def channels(**how: object) -> list[object]:
        asked.append(how)
        return []

    monkeypatch.setattr(mesh_module, "p2p_channels", channels)
    pipelines = [(0, 2, 4), (1, 3, 5)]
    device = torch.device("meta")
    assert mesh_module._open_channels(pipelines, 0, device, chunks=2, schedule="zero-bubble") == {}
    assert asked == [{"pipeline": 3, "chunks": 2, "schedule": "zero-bubble"}]
