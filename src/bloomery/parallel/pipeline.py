"""Running a pipeline: this rank's stages over the micro-batches, in the order of a timetable.

Every rank reads the micro-batches of its data index itself, tokens, documents and targets alike, so that
nothing but activations and their gradients travels. What a stage's rank knows of the others are their orders.
Legend: b samples of a micro-batch, s tokens of a sample, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from bloomery.data.batches import MicroBatch
from bloomery.model.loss import LossSums
from bloomery.parallel.mail import Mail, Message, Routes
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.timetable import Action, forwards_only, timetable
from bloomery.plan.partition import Stage

Place = tuple[int, int]
"""(stage, micro-batch)."""


class StageWork(Protocol):
    """What a rank can do with its stages."""

    def forward(
        self, stage: Stage, micro_batch: MicroBatch, *, step: int | None, hidden: Tensor | None
    ) -> Tensor | LossSums:
        """Run a stage on what the stage before it made: the sums of the loss where it is the last.

        step: the run's, where dropout is on; None in evaluation.
        """
        ...

    def boundary(self, micro_batch: MicroBatch) -> Tensor:
        """Return a tensor on the device 'meta' like what one stage sends to the next."""
        ...

    def parameters(self, stage: Stage) -> Sequence[nn.Parameter]:
        """Return what has gradients in a stage."""
        ...

    def sweep(self, stage: Stage) -> None:
        """Take the gradients that a backward without hooks left on the parameters."""
        ...


class Pipeline:
    """The stages of one pipeline, of which this rank runs some. Every method is collective over the axis."""

    def __init__(self, mesh: Mesh, stages: Sequence[Stage], *, schedule: str, work: StageWork) -> None:
        self._mesh, self._stages, self._schedule, self._work = mesh, tuple(stages), schedule, work
        self._ranks = [stage.rank for stage in self._stages]
        self._routes: dict[tuple[bool, int], Routes] = {}

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], step: int, *, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of all micro-batches: gradients of `weight` × the summed loss.

        Returns cross entropy and z term, fp32 scalars, summed on the last stage (on the first of its tensor-
        parallel ranks, which compute the same) and zero on the others.
        """
        cross_entropy = z_loss = torch.zeros((), device=self._mesh.device)
        for sums in self._run(micro_batches, step=step, weight=weight):
            if self._mesh.tensor.is_first:
                cross_entropy, z_loss = cross_entropy + sums.cross_entropy, z_loss + sums.z
        return cross_entropy, z_loss

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The cross entropy summed over micro-batches, nothing dropped: fp64, zero but on the last stage."""
        nats, at_once = torch.zeros((), dtype=torch.float64, device=self._mesh.device), 2 * len(self._stages)
        for start in range(0, len(micro_batches), at_once):
            for sums in self._run(micro_batches[start : start + at_once], step=None, weight=1.0):
                nats = nats + sums.cross_entropy.double()
        return nats

    def _run(
        self, micro_batches: Sequence[MicroBatch], *, step: int | None, weight: Tensor | float
    ) -> Iterator[LossSums]:
        """Do this rank's part of the timetable; yields the sums that the last stage makes."""
        routes = self._routes_of(len(micro_batches), trains=torch.is_grad_enabled())
        shapes = [self._work.boundary(micro_batch) for micro_batch in micro_batches]
        mail = Mail(self._mesh, routes, shapes=shapes)
        run = _Run(
            stages=self._stages,
            work=self._work,
            mail=mail,
            micro_batches=micro_batches,
            step=step,
            weight=weight,
        )
        for action in routes.table[routes.own]:
            sums = run.do(action)
            if sums is not None:
                yield sums
        mail.finish()

    def _routes_of(self, micro_batches: int, *, trains: bool) -> Routes:
        if (trains, micro_batches) not in self._routes:
            if trains:
                pipeline = self._mesh.pipeline.degree
                chunks = len(self._stages) // pipeline
                table = timetable(
                    self._schedule, pipeline=pipeline, chunks=chunks, micro_batches=micro_batches
                )
            else:
                table = forwards_only(self._ranks, micro_batches=micro_batches)
            routes = Routes(table, self._ranks, own=self._mesh.pipeline.index)
            self._routes[trains, micro_batches] = routes
        return self._routes[trains, micro_batches]


@dataclass(kw_only=True)
class _Run:
    """One pass over a batch: what is kept between a forward and its backward."""

    stages: Sequence[Stage]
    work: StageWork
    mail: Mail
    micro_batches: Sequence[MicroBatch]
    step: int | None
    weight: Tensor | float
    inputs: dict[Place, Tensor] = field(default_factory=dict)
    roots: dict[Place, Tensor] = field(default_factory=dict)
    weight_parts: dict[Place, Callable[[], object]] = field(default_factory=dict)

    def do(self, action: Action) -> LossSums | None:
        stage, place = self.stages[action.stage], (action.stage, action.micro_batch)
        if action.kind == "forward":
            return self._forward(stage, place)
        if action.kind == "backward":
            self._backward(stage, place)
        elif action.kind == "backward_input":
            self._backward_input(stage, place)
        else:
            self.weight_parts.pop(place)()
            self.work.sweep(stage)
        return None

    def _forward(self, stage: Stage, place: Place) -> LossSums | None:
        batch, trains = self.micro_batches[place[1]], torch.is_grad_enabled()
        hidden = None
        if not stage.embeds:
            hidden = self.mail.receive(Message(place[0] - 1, place[0], place[1]))
            hidden = hidden.requires_grad_(trains)
        result = self.work.forward(stage, batch, step=self.step, hidden=hidden)
        if isinstance(result, Tensor):
            self.mail.send(Message(place[0], place[0] + 1, place[1]), result.detach())
        if trains:
            self.roots[place] = result if isinstance(result, Tensor) else result.total * self.weight
            if hidden is not None:
                self.inputs[place] = hidden
        if isinstance(result, Tensor):
            return None
        return LossSums(*(one.detach() for one in result))

    def _backward(self, stage: Stage, place: Place) -> None:
        torch.autograd.backward(self.roots.pop(place), self._slope(stage, place))
        if not stage.embeds:
            self._pass_back(place, self.inputs.pop(place).grad)

    def _backward_input(self, stage: Stage, place: Place) -> None:
        root, slope = self.roots.pop(place), self._slope(stage, place)
        if stage.embeds:
            # Nobody waits for its input's gradient, and without one the graph cannot be cut.
            self.weight_parts[place] = lambda: torch.autograd.backward(root, slope)
            return
        hidden, parameters = self.inputs.pop(place), self.work.parameters(stage)
        slopes = None if slope is None else [slope]
        (gradient,), groups = stage_backward_input([root], slopes, [hidden], iter(parameters))
        self._pass_back(place, gradient)
        self.weight_parts[place] = lambda: stage_backward_weight(iter(parameters), groups)

    def _slope(self, stage: Stage, place: Place) -> Tensor | None:
        """The gradient of what the stage made; None for the loss itself."""
        if stage.finishes:
            return None
        return self.mail.receive(Message(place[0] + 1, place[0], place[1]))

    def _pass_back(self, place: Place, gradient: Tensor | None) -> None:
        assert gradient is not None, "a stage depends on its input"
        self.mail.send(Message(place[0], place[0] - 1, place[1]), gradient)
