"""What `train.recompute = "auto"` means on the machines of a run: chosen by the planned memory of a rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from bloomery.config.load import LoadedRecipe
from bloomery.config.recipe import Recipe
from bloomery.events.run_lock import host_name
from bloomery.parallel.mesh import Mesh
from bloomery.plan.block_cost import Workload
from bloomery.plan.hardware import GIB, load_hardware, this_machine
from bloomery.plan.layout import layout_of
from bloomery.plan.main_memory import main_memory_gib
from bloomery.plan.overview import base_workload
from bloomery.plan.recomputation import AUTO, Recomputation, choose_recomputation
from bloomery.plan.request import Request

_ANY_GPU = "h100-80g"  # of whose file only the driver's reservation and the order of step times count here


class AutoRecompute:
    """Chooses the recomputation of a run's recipe; each rank and each start on equal machines choose alike.

    room_bytes: memory that the rank with the least may use.
    """

    def __init__(
        self, loaded: LoadedRecipe, mesh: Mesh, *, vocabulary: int, compiled: bool, room_bytes: float
    ) -> None:
        self._loaded, self._mesh, self._vocabulary = loaded, mesh, vocabulary
        self._compile = "on" if compiled else "off"
        self._room_bytes = room_bytes
        self._last: tuple[Recipe, Recomputation] | None = None

    def __call__(self, recipe: Recipe) -> Recomputation:
        """Return the choice for a recipe, which may differ from the run's first one in free settings."""
        if recipe.train.recompute != AUTO:
            return Recomputation(mode=recipe.train.recompute, why="")
        if self._last is None or self._last[0] is not recipe:
            self._last = (recipe, self._choose(recipe))
        return self._last[1]

    def _choose(self, recipe: Recipe) -> Recomputation:
        known = replace(recipe, train=replace(recipe.train, compile=self._compile))
        work = workload_of_rank(replace(self._loaded, recipe=known), self._mesh, vocabulary=self._vocabulary)
        return choose_recomputation(known, work, room_bytes=self._room_bytes)


def least_room_bytes(mesh: Mesh) -> float:
    """Return the memory that one rank may use, on the rank that has the least. Collective over the peer.

    Ranks without GPUs share the main memory of their machine.
    """
    host = host_name()
    if mesh.device.type == "cuda":
        own = float(torch.cuda.get_device_properties(mesh.device).total_memory)
    else:
        own = main_memory_gib() * GIB
    known = mesh.all_gather_object([host, own])
    sharing = Counter(name for name, _ in known) if mesh.device.type != "cuda" else Counter()
    return min(room / max(1, sharing[name]) for name, room in known)


def workload_of_rank(loaded: LoadedRecipe, mesh: Mesh, *, vocabulary: int) -> Workload:
    """Return the workload that a plan gives the ranks of this mesh.

    vocabulary: the number of rows of the embedding, which the recipe may leave to the tokenizer.
    """
    hardware = this_machine() or load_hardware(_ANY_GPU)
    layout = layout_of(
        loaded.recipe,
        accelerators=mesh.world,
        per_node=hardware.node.accelerators,
        vocabulary=vocabulary,
    )
    request = Request(loaded=loaded, hardware=hardware, accelerators=mesh.world)
    return replace(base_workload(request, layout), vocabulary=vocabulary)
