"""The host reads what collectives made only after a wait with a deadline, in whole runs of two ranks.

On a GPU a collective is queued and returns at once, and who then reads a number waits for the other ranks
without a deadline. Ranks are on CPUs here: each read must come after `Mesh.wait_for_device`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.train.real_ranks import train_on_ranks
from torch.overrides import TorchFunctionMode

from bloomery import torch_private
from bloomery.parallel import axis, stage_p2p
from bloomery.parallel.mesh import Mesh

READS = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "item", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
}
COLLECTIVES = (
    (dist, ("all_reduce", "reduce", "broadcast", "all_gather", "batch_isend_irecv")),
    (axis, ("_all_gather", "_reduce_scatter")),
    (torch_private, ("begin_all_reduce", "begin_all_gather", "begin_reduce_scatter")),
)
SETTINGS = (
    "optim.name=adamw",
    "train.samples=0",
    "train.steps=4",
    "train.ramp_up=[]",
    "checkpoint.every_steps=2",
    "evaluate.every_steps=2",
    "guard.growth_steps=2",
    "guard.corruption_steps=2",
)


class WatchedReads(TorchFunctionMode):
    """Writes down each place of the package that reads a tensor after a collective, and before a wait."""

    def __init__(self, record: Path) -> None:
        super().__init__()
        self._record = record
        self.unwaited = ""
        record.touch()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.unwaited and function in READS:
            with self._record.open("a") as file:
                print(f"{_place(sys._getframe(1))} after {self.unwaited}", file=file)
        return function(*args, **(kwargs or {}))


def _place(frame: FrameType) -> str:
    """The innermost function of the package in the calls of a frame."""
    while frame.f_back is not None and "/bloomery/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/bloomery/')[2]} {frame.f_code.co_name}"


def watch(record: Path, rank: int) -> None:
    """Watch what this rank's process reads, from now on."""
    reads = WatchedReads(record / str(rank))

    def noted(collective: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            reads.unwaited = collective.__name__
            return collective(*arguments, **named)

        return call

    wait = Mesh.wait_for_device

    def waited(mesh: Mesh) -> None:
        wait(mesh)
        reads.unwaited = ""

    messages = {name: noted(getattr(dist, name)) for name in ("isend", "irecv")}
    stage_p2p.dist = SimpleNamespace(**{**vars(dist), **messages})  # P2POp takes only torch's own
    for module, names in COLLECTIVES:
        for name in names:
            setattr(module, name, noted(getattr(module, name)))
    Mesh.wait_for_device = waited  # type: ignore[method-assign]
    reads.__enter__()


@pytest.mark.parametrize("layout", ["parallel.data=2", "parallel.pipeline=2"])
def test_the_host_reads_nothing_that_may_wait_for_another_rank(
    layout: str, corpus: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    record.mkdir()
    plant = partial(watch, record)
    told = train_on_ranks(2, tmp_path / "run", f"data.sources={corpus}", layout, *SETTINGS, plant=plant)
    assert told == ["the samples are done"] * 2
    assert [sorted(set((record / str(rank)).read_text().splitlines())) for rank in range(2)] == [[], []]
