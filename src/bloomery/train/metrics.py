"""From a step's tensors to a report: a step's one host sync, and its one reduction of what ranks know."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bloomery.data.batches import Queue
from bloomery.events.records import StepReport
from bloomery.parallel.mesh import Mesh
from bloomery.plan.compute import TokenCost, teraflops, utilisation
from bloomery.train.control import Control, LocalFacts
from bloomery.train.state import TrainState
from bloomery.train.step import StepResult


class Interlude(Protocol):
    """Work on the model between steps, due at a position. Collective over the peer."""

    def due(self, state: TrainState) -> bool:
        """Whether it has to run after this step: equal on every rank."""
        ...

    def run(self, state: TrainState) -> dict[str, float]:
        """Facts for the report, by field name."""
        ...


class Metrics:
    """Turns step results into reports."""

    def __init__(
        self,
        *,
        mesh: Mesh,
        control: Control,
        interludes: Sequence[Interlude],
        cost: TokenCost,
        peak_flops: float | None,
        sequence_length: int,
        queue: Callable[[], Queue] = Queue,
    ) -> None:
        self._mesh, self._control, self._interludes = mesh, control, tuple(interludes)
        self._cost, self._peak, self._sequence_length = cost, peak_flops, sequence_length
        self._queue = queue

    def report(
        self, state: TrainState, result: StepResult, local: LocalFacts
    ) -> tuple[TrainState, StepReport]:
        """The report of the step that led to `state`, equal on every rank; and the state with it counted.

        Collective over the peer.
        """
        gradients = result.gradients
        sums = [result.cross_entropy.double(), result.z_loss.double()]
        mine = torch.tensor(local.numbers(), dtype=torch.float64, device=self._mesh.device)
        queue = self._queue()
        reading = torch.tensor([queue.ready, queue.waited_s, 1.0], dtype=torch.float64, device=mine.device)
        shared = self._mesh.sum(torch.cat([torch.stack(sums), reading, mine]))
        scale = result.loss_scale if result.loss_scale is not None else torch.ones_like(gradients.norm)
        own = torch.stack([gradients.norm, gradients.finite.float(), scale]).double()
        numbers = torch.cat([shared, own, gradients.zeros.reshape(1)]).tolist()
        seconds = time.perf_counter() - result.started
        entropy_sum, z_sum, ready, waited_s, told, *facts = numbers[: len(shared)]
        norm, finite, loss_scale, zeros = numbers[len(shared) :]
        loss = entropy_sum / result.tokens
        state = state.counting(applied=finite > 0, loss_is_nan=math.isnan(loss))
        extra: dict[str, float] = {}
        for interlude in self._interludes:
            if interlude.due(state):
                extra |= interlude.run(state)
        tokens_per_s = result.tokens / seconds
        ranks = self._mesh.world
        hardware, model = (
            teraflops(cost, tokens=result.tokens, seconds=seconds, accelerators=ranks)
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
            z_loss=z_sum / result.tokens,
            loss_scale=loss_scale if result.loss_scale is not None else None,
            gradient_norm=norm,
            zero_gradients=int(zeros),
            update_applied=finite > 0,
            refused_updates=state.refused_updates,
            refused_in_a_row=state.refused_in_a_row,
            nan_losses=state.nan_losses,
            samples_per_s=result.phase.global_batch / seconds,
            tokens_per_s=tokens_per_s,
            hardware_tflops=hardware,
            model_tflops=model,
            mfu=utilisation(model, peak_teraflops=self._peak / 1e12) if self._peak else None,
            data_queue=ready / told,
            data_wait_s=waited_s / told,
            facts=self._control.agree(facts),
            **extra,
        )
