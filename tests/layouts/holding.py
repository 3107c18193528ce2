"""What one rank holds of a sharded model: run on ranks by test_memory.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.layouts.counted_memory import counted_memory
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import batches, build, step_parts
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bloomery import torch_private
from bloomery.config.load import LoadedRecipe
from bloomery.config.recipe import Recipe
from bloomery.data.position import EVERYTHING
from bloomery.data_loader.batches import MicroBatch
from bloomery.parallel.flat import FlatGroup
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.mesh import mesh_of
from bloomery.parallel.optimizers import Optimizers
from bloomery.plan.hardware import Accelerator, Hardware, Node
from bloomery.plan.layout import layout_of
from bloomery.plan.overview import base_workload
from bloomery.plan.ranks import degrees_of
from bloomery.plan.recomputation import memory_of
from bloomery.plan.request import Request
from bloomery.plan.schedule import phase_at
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import train_step


def held(settings: tuple[str, ...], rank: int) -> tuple[int, int, int, int]:
    """Elements of masters, of gradients after a batch, of blocks' weights then, and at most on the way."""
    recipe = recipe_of(LLAMA, settings)
    degrees = degrees_of(recipe.parallel, world=2)
    assert degrees is not None
    mesh = mesh_of(degrees, rank=rank, device=torch.device("cpu"))
    model = build(recipe, mesh)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    groups: list[FlatGroup] = model.weights._groups
    blocks = [group for group in groups if group.layout.bucket]

    def gathered() -> int:
        return sum(group.working.untyped_storage().size() // 4 for group in blocks)

    most = [gathered()]
    for block in model.decoder.blocks:
        block.register_full_backward_pre_hook(lambda *_: most.append(gathered()))
        block.mlp.register_forward_hook(lambda *_: most.append(gathered()))
    order, data = batches(recipe, mesh)
    phase = phase_at(recipe.train, 0)
    span = order.next_span(TrainState(goal=Goal(steps=1)).position, phase.global_batch, EVERYTHING)
    model.accumulate(data.batch(span, phase.micro_batch), 0, weight=1.0)
    gradients = sum(flat.untyped_storage().size() // 4 for flat in model.weights.gradient)
    return sum(flat.numel() for flat in model.weights.master), gradients, gathered(), max(most)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Bytes. most: alive at once until the model had its first values; held: then."""

    most: int
    held: int
    block: int
    nats: float
    tokens: int
    most_blocks: float
    """Working weights of blocks, gathered at once while rank 0 evaluated three batches and rank 1 none."""


def started(zero: int, rank: int) -> Start:
    """Build a model of many blocks in two shards, give it its values and evaluate it."""
    settings = ("parallel.data=2", f"parallel.zero={zero}", "model.layers=16", "model.vocabulary=96")
    recipe = recipe_of(LLAMA, settings)
    degrees = degrees_of(recipe.parallel, world=2)
    assert degrees is not None
    mesh = mesh_of(degrees, rank=rank, device=torch.device("cpu"))
    with LiveBytes() as live:
        model = build(recipe, mesh)
        model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
        held, most = live.now(), live.most
    block = sum(parameter.numel() for parameter in model.decoder.blocks[0].parameters()) * 4
    groups = [group for group in model.weights._groups if group.layout.bucket]
    gathered: list[int] = []
    for one in model.decoder.blocks:
        one.mlp.register_forward_hook(
            lambda *_: gathered.append(sum(group.working.untyped_storage().size() for group in groups))
        )
    text = torch.arange(2 * 32).view(2, 32) % 96
    batches = [MicroBatch(tokens=text, targets=text, documents=None, samples=torch.arange(2))] * 3
    entropy = model.entropy(batches if rank == 0 else [])
    return Start(
        most=most,
        held=held,
        block=block,
        nats=entropy.nats,
        tokens=entropy.tokens,
        most_blocks=max(gathered, default=0) / block,
    )


SIZES = (
    "model.hidden=256", "model.heads=4", "model.vocabulary=1024", "data.sequence_length=256",
    "train.loss_chunk=256",
)  # fmt: skip
"""Of a model whose activations, logits and state are each a good part of the whole."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of one rank. counted: alive at once in two steps; held: after them; planned: by the planner."""

    counted: int
    held: int
    planned: int
    parameters: int


@contextmanager
def collectives_without_peers(world: int) -> Iterator[None]:
    """Make collectives return at once, and leave what they were given, as if NCCL had the other ranks' part.

    gloo gathers into copies, and its threads drop what they summed whenever the machine lets them: what is
    alive at once would differ from run to run.
    """
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        if world > 1:
            dist.destroy_process_group()


def peak(style: str, settings: tuple[str, ...], rank: int) -> Peak:
    """Train two steps as the first rank of the layout, whose other ranks are not there."""
    recipe = recipe_of(style, (*SIZES, *settings))
    world = recipe.parallel.data if isinstance(recipe.parallel.data, int) else 1
    # A CPU without units for bf16 keeps copies in fp32 for its products, which no plan of a GPU counts.
    units = patch.object(torch_private, "has_bf16_matmul", lambda: True)
    with units, collectives_without_peers(world):
        return _peak(recipe, world, rank)


def _peak(recipe: Recipe, world: int, rank: int) -> Peak:
    degrees = degrees_of(recipe.parallel, world=world)
    assert degrees is not None
    mesh = mesh_of(degrees, rank=rank, device=torch.device("cpu"))
    with counted_memory() as counted:
        model = build(recipe, mesh)
        model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
        optimizers = Optimizers(model.weights, recipe.optim, precision=recipe.train.precision)
        order, data = batches(recipe, mesh)
        state = TrainState(goal=Goal(steps=2))
        for _ in range(2):
            phase = phase_at(recipe.train, state.position.consumed)
            step = step_parts(recipe, phase, model, optimizers, LossScale(mesh.device))
            span = order.next_span(state.position, phase.global_batch, EVERYTHING)
            train_step(step, data.batch(span, phase.micro_batch), state)
            state = state.after(span)
    layout = layout_of(recipe, accelerators=mesh.world, per_node=8, vocabulary=1024)
    machine = Hardware(
        name="a machine",
        accelerator=Accelerator(kind="cpu", memory_gib=1.0, memory_gb_per_s=1.0, fp32_teraflops=1.0),
        node=Node(accelerators=8),
    )
    request = Request(loaded=LoadedRecipe(recipe=recipe, sources={}), hardware=machine)
    planned = memory_of(recipe, base_workload(request, layout))[0]
    return Peak(
        counted=counted.most,
        held=counted.held,
        planned=planned.total,
        parameters=sum(parameter.numel() for parameter in model.decoder.parameters()),
    )


@dataclass(frozen=True, kw_only=True)
class GatheredBlocks:
    """order: the blocks in the order in which their gathers began. most_blocks: that had weights at once."""

    order: list[str]
    most_blocks: int


def gathered_blocks(settings: tuple[str, ...], rank: int) -> GatheredBlocks:
    """Train on two micro-batches and evaluate one, with six blocks in two shards; note each gather."""
    recipe = recipe_of(LLAMA, ("parallel.data=2", "parallel.zero=3", "model.layers=6", *settings))
    degrees = degrees_of(recipe.parallel, world=2)
    assert degrees is not None
    mesh = mesh_of(degrees, rank=rank, device=torch.device("cpu"))
    model = build(recipe, mesh)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="fp32", recompute=recipe.train.recompute)
    groups = [group for group in model.weights._groups if group.layout.bucket]
    firsts = {group.layout.bucket: group for group in reversed(groups)}
    begin, order, most = FlatGroup.begin_gathering, list[str](), 0

    def noted(group: FlatGroup) -> None:
        nonlocal most
        was_freed = group.working.untyped_storage().size() == 0
        begin(group)
        if was_freed and firsts.get(group.layout.bucket) is group:
            order.append(group.layout.bucket)
        most = max(
            most, len({each.layout.bucket for each in groups if each.working.untyped_storage().size()})
        )

    tokens = torch.arange(64).reshape(2, 32) % 90
    batch = MicroBatch(tokens=tokens, targets=tokens, documents=None, samples=torch.arange(2))
    with patch.object(FlatGroup, "begin_gathering", noted):
        model.accumulate([batch, batch], 0, weight=1.0)
        model.weights.reduce()
        model.entropy([batch])
    return GatheredBlocks(order=order, most_blocks=most)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that are alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._known: dict[int, StorageWeakRef] = {}

    def now(self) -> int:
        sizes = {key: _size(weak) for key, weak in self._known.items()}
        self._known = {key: weak for key, weak in self._known.items() if sizes[key] is not None}
        return sum(size or 0 for size in sizes.values())

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        result = operation(*arguments, **(keywords or {}))
        for one in tree_iter(result):
            if isinstance(one, Tensor) and one.device.type != "meta":
                storage = one.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage)
        self.most = max(self.most, self.now())
        return result


def _size(weak: StorageWeakRef) -> int | None:
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return None if storage is None else storage.nbytes()
