"""Reduces a step's tensors and the ranks' facts to one report, and finds slow ranks.

A report costs one host synchronisation.
"""

from __future__ import annotations

import math
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from bloomery.checkpoint.format.state import Json
from bloomery.data_loader.batches import QueueStatus
from bloomery.events.heartbeat import RankActivity, ignore_activity
from bloomery.events.records import StepReport
from bloomery.events.run_lock import host_name
from bloomery.parallel.host_numbers import to_device
from bloomery.parallel.inner_sizes import by_kind
from bloomery.parallel.mesh import Mesh
from bloomery.plan.parameters import TokenCost, teraflops, utilisation
from bloomery.train.control import Control, LocalFacts
from bloomery.train.state import TrainState
from bloomery.train.step import StepResult


class Interlude(Protocol):
    """Work on the model between steps that is due at some positions. Collective over the peer."""

    def due(self, state: TrainState) -> bool:
        """Whether it has to run after this step; equal on every rank."""
        ...

    def run(self, state: TrainState) -> dict[str, Any]:  # Any: of the report's fields
        """Do the work, and return facts for the report, by field name."""
        ...


class _StepNumbers(NamedTuple):
    """The numbers of a step on the host. The first eight are sums over the ranks; each rank has the others.

    ready: batches that were ready in the queues. waited_s: seconds for which ranks waited for batches.
    ranks: how many ranks there are. seconds_before: how long the step before took. memory: bytes in use.
    facts: what ranks know from outside, as `LocalFacts.numbers` orders it.
    applied: 1 where the update was made, 0 where it was refused.
    sizes: of inner tensors, flattened; [] in a step that did not measure them.
    """

    entropy_sum: float
    z_sum: float
    ready: float
    waited_s: float
    ranks: float
    seconds_before: float
    memory: float
    facts: list[float]
    norm: float
    applied: float
    loss_scale: float
    zeros: float
    sizes: list[float]


class Metrics:
    """Makes reports from step results."""

    def __init__(
        self,
        *,
        mesh: Mesh,
        control: Control,
        interludes: Sequence[Interlude],
        cost: TokenCost,
        peak_flops: float | None,
        sequence_length: int,
        queue: Callable[[], QueueStatus] = QueueStatus,
        mixture: Callable[[], int] = int,
        enter: Callable[[RankActivity], None] = ignore_activity,
    ) -> None:
        self._mesh, self._control, self._interludes = mesh, control, tuple(interludes)
        self._cost, self._peak, self._sequence_length = cost, peak_flops, sequence_length
        self._queue, self._mixture, self._enter = queue, mixture, enter
        self._last_seconds = 0.0

    def report(
        self, state: TrainState, result: StepResult, local: LocalFacts
    ) -> tuple[TrainState, StepReport]:
        """Return the state with the step's outcome counted, and the step's report, equal on every rank.

        state: the state after the step.
        local: what only this rank knows.
        Collective over the peer.
        """
        self._enter(RankActivity.REPORTING)
        numbers = self._reduce(result, local)
        seconds = time.perf_counter() - result.started
        self._last_seconds = seconds
        loss = numbers.entropy_sum / result.counted
        state = state.counting(applied=numbers.applied > 0, loss_is_nan=math.isnan(loss))
        extra = self._run_interludes(state)
        hardware, model = (
            teraflops(cost, tokens=result.tokens, seconds=seconds, accelerators=self._mesh.world)
            for cost in (self._cost.hardware, self._cost.model)
        )
        return state, StepReport(
            step=state.step,
            consumed_samples=state.consumed(),
            consumed_tokens=state.consumed() * self._sequence_length,
            cursor=state.position.cursor,
            seconds=seconds,
            learning_rate=result.learning_rate,
            global_batch=result.phase.global_batch,
            peers=state.under_way.live if state.under_way else 1,
            loss=loss,
            z_loss=numbers.z_sum / result.counted,
            loss_scale=numbers.loss_scale if result.loss_scale is not None else None,
            gradient_norm=numbers.norm,
            zero_gradients=int(numbers.zeros),
            update_applied=numbers.applied > 0,
            refused_updates=state.refused_updates,
            refused_in_a_row=state.refused_in_a_row,
            nan_losses=state.nan_losses,
            samples_per_s=result.phase.global_batch / seconds,
            tokens_per_s=result.tokens / seconds,
            hardware_tflops=hardware,
            model_tflops=model,
            mfu=utilisation(model, peak_teraflops=self._peak / 1e12) if self._peak else None,
            data_queue=numbers.ready / numbers.ranks,
            data_wait_s=numbers.waited_s / numbers.ranks,
            precision=result.phase.precision,
            mixture=self._mixture(),
            shared_seconds=numbers.seconds_before / numbers.ranks if numbers.seconds_before > 0.0 else None,
            memory_bytes=numbers.memory / numbers.ranks if numbers.memory > 0.0 else None,
            inner_sizes=by_kind(numbers.sizes) if numbers.sizes else None,
            facts=self._control.agree(numbers.facts),
            **extra,
        )

    def _reduce(self, result: StepResult, local: LocalFacts) -> _StepNumbers:
        """Sum what the ranks measured, and wait for the device: the one host synchronisation of a step."""
        gradients = result.gradients
        sums = [result.cross_entropy.double(), result.z_loss.double()]
        queue, device = self._queue(), self._mesh.device
        clock = [queue.ready, queue.waited_s, 1.0, self._last_seconds, memory_in_use(device)]
        own_numbers = to_device([*clock, *local.numbers()], dtype=torch.float64, device=device)
        shared = self._mesh.all_reduce(torch.cat([torch.stack(sums), own_numbers]))
        scale = result.loss_scale if result.loss_scale is not None else torch.ones_like(gradients.norm)
        own = torch.stack([gradients.norm, gradients.applies.float(), scale]).double()
        parts = [shared, own, gradients.zeros.reshape(1)]
        if result.inner_sizes is not None:
            parts.append(result.inner_sizes.double().flatten())
        gathered = torch.cat(parts)
        self._mesh.wait_for_device()
        numbers = gathered.tolist()
        measured, others = numbers[: len(shared)], numbers[len(shared) :]
        entropy_sum, z_sum, ready, waited_s, ranks, seconds_before, memory, *facts = measured
        norm, applied, loss_scale, zeros, *sizes = others
        return _StepNumbers(
            *(entropy_sum, z_sum, ready, waited_s, ranks, seconds_before, memory, facts),
            *(norm, applied, loss_scale, zeros, sizes),
        )

    def _run_interludes(self, state: TrainState) -> dict[str, Any]:  # Any: of the report's fields
        """Run the interludes that are due, and return what they add to the report."""
        fields: dict[str, Any] = {}
        for interlude in self._interludes:
            if interlude.due(state):
                self._enter(RankActivity.EVALUATING)
                fields |= interlude.run(state)
        return fields


def memory_in_use(device: torch.device) -> float:
    """Return the bytes that this rank holds on its device, or in its process on a CPU; 0 where unknown."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    try:
        resident_pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0.0  # not a Linux
    return float(resident_pages) * resource.getpagesize()


_COMPARED_STEPS = 3
"""The newest steps that are compared, as many as it takes to judge that steps became slower."""
_SLOW_SHARE = 0.05
"""A rank that takes more than this share longer than the others' median is named."""
_NAMED = 8
_OWN = (RankActivity.WAITING_FOR_SAMPLES, RankActivity.COMPUTING, RankActivity.UPDATING)
"""What a rank does by itself. In the other activities of a step it waits for the slowest."""


class SlowRanks:
    """Records this rank's own time in its newest steps (without waits), and compares it with other ranks'."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._own: deque[float] = deque(maxlen=_COMPARED_STEPS)

    def count(self, spent: Mapping[str, Json]) -> None:
        """Count the seconds of a step, by activity."""
        seconds = [spent.get(activity, 0.0) for activity in _OWN]
        self._own.append(sum(value for value in seconds if isinstance(value, float)))

    def compare(self) -> dict[str, Json]:
        """Return which ranks worked longer by themselves than the others, for the journal.

        `slow` is [rank, host, seconds per step] of at most eight, the slowest first; empty where all took
        alike, or where ranks wait for each other while they compute. Collective over the peer.
        """
        mean = sum(self._own) / len(self._own) if self._own else 0.0
        gathered = self._mesh.all_gather_object([host_name(), mean])
        seconds = [float(own) for _, own in gathered]
        usual = median(sorted(seconds)[: max(len(seconds) // 2, 1)])  # of the faster half
        slow = [rank for rank, own in enumerate(seconds) if own > (1.0 + _SLOW_SHARE) * usual]
        slow.sort(key=lambda rank: -seconds[rank])
        named: list[Json] = [[rank, gathered[rank][0], round(seconds[rank], 4)] for rank in slow[:_NAMED]]
        return {"slow": named, "usual_s": round(usual, 4), "ranks": len(seconds)}
