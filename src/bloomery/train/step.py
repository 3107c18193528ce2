"""One optimizer step: forward and backward over the micro-batches, reduction, clipping, update.

`decide_compilation` says before the first step whether it is compiled.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from bloomery.data_loader.batches import MicroBatch
from bloomery.events.heartbeat import RankActivity, ignore_activity
from bloomery.kernels.available import python_header
from bloomery.optim.clip import NO_CLAMPS, Clamps, GradientFacts
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.optimizers import Optimizers
from bloomery.plan.schedule import Phase
from bloomery.train.state import TrainState
from bloomery.train.time_by_part import UPDATE


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step returns, still on the device. Losses are this rank's sums.

    tokens: those of the global batch. counted: how many of them count in the loss.
    """

    phase: Phase
    cross_entropy: Tensor
    z_loss: Tensor
    tokens: int
    counted: int
    gradients: GradientFacts
    loss_scale: Tensor | None
    learning_rate: float
    started: float
    inner_sizes: Tensor | None = None
    """[kinds, layers] from `InnerSizes.collect`, equal on all ranks; None in a step that measured none."""


class StepCheck(Protocol):
    """Computes a step's gradients, may look at them before the update, and may refuse it."""

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], step: int, *, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Do what `TrainingModel.accumulate` does, on the same terms."""
        ...

    def screen(self) -> None:
        """Look at the reduced gradients before other peers get them. Called before each average."""
        ...

    def admit(self, facts: GradientFacts) -> GradientFacts:
        """Return the facts to make the update with. Called once the gradients were reduced and examined."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What the step of one phase works with."""

    phase: Phase
    model: TrainingModel
    optimizers: Optimizers
    loss_scale: LossScale | None
    clip: Callable[[TrainState], float]
    sequence_length: int
    learning_rate: Callable[[TrainState], float]
    wait_staged: Callable[[], None]
    average_gradients: Callable[[TrainState], None] = lambda state: None
    """Averages the reduced gradients over all peers; does nothing in a run of one peer."""
    enter: Callable[[RankActivity], None] = ignore_activity
    """Is called with the activity that this rank begins."""
    clamps: Callable[[TrainState], Clamps] = lambda state: NO_CLAMPS
    """Returns the limits that hold beside those of the recipe."""
    sizes_every: Callable[[], int] = lambda: 0
    """Returns the steps between two measurements of the sizes of inner tensors; 0: none."""
    check: StepCheck | None = None
    """None: every step is computed once, and its update is made if the gradients are finite."""


def train_step(parts: StepParts, micro_batches: Sequence[MicroBatch], state: TrainState) -> StepResult:
    """Train on one global batch. Collective over the peer; `micro_batches` are this rank's.

    The loss is the mean over the tokens of the global batch that count, so every split of it gives the same
    update.
    """
    started = time.perf_counter()
    tokens = parts.phase.global_batch * parts.sequence_length
    counted = micro_batches[0].global_targets or tokens
    scale: Tensor | float = parts.loss_scale.scale if parts.loss_scale else 1.0
    weights = parts.model.weights
    parts.enter(RankActivity.COMPUTING)
    parts.model.clip_queries(parts.clamps(state).qk_clip)
    every = parts.sizes_every()
    measures = every > 0 and (state.step + 1) % every == 0
    parts.model.begin_sizes(wanted=measures, later=every > 0)
    accumulate = parts.check.accumulate if parts.check else parts.model.accumulate
    cross_entropy, z_loss = accumulate(micro_batches, state.step, weight=scale / counted)
    sizes = parts.model.inner_sizes.collect() if measures and parts.model.inner_sizes else None
    parts.enter(RankActivity.REDUCING)
    weights.reduce()
    if parts.check:
        parts.check.screen()
    parts.average_gradients(state)
    parts.enter(RankActivity.UPDATING)
    with record_function(UPDATE):
        facts, rate = _update(parts, state, scale)
    used_scale = None
    if parts.loss_scale:
        used_scale = parts.loss_scale.scale.clone()
        parts.loss_scale.update(facts.finite)
    return StepResult(
        phase=parts.phase,
        cross_entropy=cross_entropy,
        z_loss=z_loss,
        tokens=tokens,
        counted=counted,
        gradients=facts,
        loss_scale=used_scale,
        learning_rate=rate,
        started=started,
        inner_sizes=sizes,
    )


def follow_update(parts: StepParts, state: TrainState) -> TrainState:
    """Make the update that other peers make with the gradients of all, without a batch of this peer."""
    _update(parts, state, 1.0)
    return replace(state, step=state.step + 1)


def _update(parts: StepParts, state: TrainState, scale: Tensor | float) -> tuple[GradientFacts, float]:
    """Clip and gate the gradients, and update.

    scale: the factor by which the gradients were multiplied.
    """
    weights = parts.model.weights
    facts = weights.examine(limit=parts.clip(state), unscale=scale)
    parts.wait_staged()  # what follows changes what a checkpoint holds: the histories of norms first
    facts = parts.optimizers.limit(facts, unscale=scale, clamps=parts.clamps(state))
    if parts.check:
        facts = parts.check.admit(facts)
    rate = parts.learning_rate(state)
    parts.optimizers.step(facts, learning_rate=rate)
    parts.model.after_update(facts)
    weights.copy_masters_to_working()
    return facts, rate


CPU_BREAK_EVEN_FLOPS = 2e13
GPU_BREAK_EVEN_FLOPS = 2e16
"""A compilation takes 15 to 130 s and saves about a third of a step, so it never pays below this much
work.
"""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The decision and its reason, as a person would say it."""

    on: bool
    why: str


def decide_compilation(choice: str, *, device: torch.device, run_flops: float) -> Compilation:
    """Resolve train.compile from the recipe and what is installed, so that a resume decides alike."""
    if choice == "off":
        return Compilation(on=False, why="train.compile = off")
    lacking = lacking_toolchain()
    if lacking:
        return Compilation(on=False, why=f"{lacking}: training eagerly, which is slower")
    if choice == "on":
        return Compilation(on=True, why="train.compile = on")
    threshold = GPU_BREAK_EVEN_FLOPS if device.type == "cuda" else CPU_BREAK_EVEN_FLOPS
    if run_flops < threshold:
        return Compilation(on=False, why="the run is shorter than a compilation would pay for")
    return Compilation(on=True, why="the run is long enough to pay for it")


@contextmanager
def deterministic_kernels(*, wanted: bool) -> Iterator[None]:
    """Have PyTorch use only kernels that give the same bits each time, if that is wanted, until the end.

    cuBLAS reads its variable when it is first used, so begin before the first product.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module: Any = torch.utils.deterministic  # whose attribute the type stubs do not know
    fills, module.fill_uninitialized_memory = module.fill_uninitialized_memory, False  # costs time alone
    # Whoever trains from a program of their own may have asked for the same before.
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=mode, warn_only=warn_only)
        module.fill_uninitialized_memory = fills


def lacking_toolchain() -> str:
    """Return what torch.compile would miss on this machine, as a phrase; '' if nothing."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "no C++ compiler (install g++)"
    if not python_header().exists():
        return f"no Python headers at {python_header()} (install python3-dev)"
    return ""
