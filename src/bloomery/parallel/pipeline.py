"""Pipeline parallelism: runs this rank's stages over the micro-batches, in the order of a pipeline schedule.

Every rank reads the micro-batches of its data-parallel index itself (tokens, documents and targets), so
nothing but activations and their gradients is sent. Legend: b samples of a micro-batch, s tokens of a
sample, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from bloomery import torch_private
from bloomery.data_loader.batches import MicroBatch
from bloomery.model.decoder import Decoder
from bloomery.model.dropout import DropoutAddress, dropout_address
from bloomery.model.loss import LossSums
from bloomery.optim.groups import ParameterPiece
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline_schedule import Action, forwards_only, pipeline_order
from bloomery.parallel.precision import MasterWeights
from bloomery.parallel.rank_zero_task import ReportProgress
from bloomery.parallel.recompute import compiled_function
from bloomery.parallel.stage_p2p import MessageOrder, StageMessage, StageMessenger
from bloomery.plan.pipeline_stages import PipelineStage

StageBatch = tuple[int, int]
"""(stage, micro-batch)."""
StageFunction = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor | LossSums]
"""(tokens, targets, documents, dropout rows, hidden) → hidden, or the loss on the last stage."""


class Pipeline:
    """One pipeline, of which this rank runs some stages. Every method is collective over the pipeline axis.

    stages: all stages of the pipeline, in order.
    schedule: the setting `parallel.schedule`.
    computation: what this rank computes for its own stages.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: Sequence[PipelineStage],
        *,
        schedule: str,
        computation: StageComputation,
    ) -> None:
        self._mesh, self._stages, self._schedule = mesh, tuple(stages), schedule
        self._computation = computation
        self._ranks = [stage.rank for stage in self._stages]
        self._messages: dict[tuple[bool, int], MessageOrder] = {}

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], step: int, *, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward of all micro-batches: gradients of `weight` × the summed loss.

        Returns cross entropy and z term, fp32 scalars, summed on the last stage (on the first of its tensor-
        parallel ranks, which compute the same) and zero on the others.
        """
        cross_entropy = z_loss = torch.zeros((), device=self._mesh.device)
        for sums in self._run(micro_batches, step=step, weight=weight):
            if self._mesh.tensor.is_first:
                cross_entropy, z_loss = cross_entropy + sums.cross_entropy, z_loss + sums.z
        return cross_entropy, z_loss

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], report_progress: ReportProgress) -> Tensor:
        """The cross entropy summed over micro-batches, without dropout: fp64, zero but on the last stage.

        report_progress: called after each two micro-batches for each stage of this rank.
        """
        nats, at_once = torch.zeros((), dtype=torch.float64, device=self._mesh.device), 2 * len(self._stages)
        for start in range(0, len(micro_batches), at_once):
            for sums in self._run(micro_batches[start : start + at_once], step=None, weight=1.0):
                nats = nats + sums.cross_entropy.double()
            report_progress()
        return nats

    def _run(
        self, micro_batches: Sequence[MicroBatch], *, step: int | None, weight: Tensor | float
    ) -> Iterator[LossSums]:
        """Do this rank's actions in order; yield the sums of each micro-batch on the last stage."""
        messages = self._message_order(len(micro_batches), trains=torch.is_grad_enabled())
        shapes = [self._computation.activation_like(micro_batch) for micro_batch in micro_batches]
        messenger = StageMessenger(self._mesh, messages, shapes=shapes)
        batch_pass = _BatchPass(
            stages=self._stages,
            computation=self._computation,
            messenger=messenger,
            micro_batches=micro_batches,
            step=step,
            weight=weight,
        )
        for place, action in enumerate(messages.order[messages.own]):
            messenger.post_receives(place)
            sums = batch_pass.run(action)
            if sums is not None:
                yield sums
        messenger.finish()

    def _message_order(self, micro_batches: int, *, trains: bool) -> MessageOrder:
        if (trains, micro_batches) not in self._messages:
            if trains:
                pipeline = self._mesh.pipeline.degree
                chunks = len(self._stages) // pipeline
                order = pipeline_order(
                    self._schedule, pipeline=pipeline, chunks=chunks, micro_batches=micro_batches
                )
            else:
                order = forwards_only(self._ranks, micro_batches=micro_batches)
            messages = MessageOrder(order, self._ranks, own=self._mesh.pipeline.index)
            self._messages[trains, micro_batches] = messages
        return self._messages[trains, micro_batches]


class StageComputation:
    """Computes this rank's stages, each a range of the decoder's blocks.

    decoder: holds the blocks of this rank's stages.
    weights: the master weights under the decoder.
    stages: this rank's stages.
    z_loss: weight of the z term. chunk: tokens whose logits exist at one time.
    dropout_seed: None if nothing is dropped.
    compiled: whether each stage is compiled with torch.compile.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: MasterWeights,
        stages: Sequence[PipelineStage],
        *,
        z_loss: float,
        chunk: int,
        dropout_seed: int | None,
        compiled: bool,
    ) -> None:
        self._decoder, self._weights, self._dropout_seed = decoder, weights, dropout_seed
        eager = {stage: _stage_function(decoder, stage, z_loss=z_loss, chunk=chunk) for stage in stages}
        self._functions: dict[PipelineStage, StageFunction] = {
            stage: compiled_function(function, device=decoder.device) if compiled else function
            for stage, function in eager.items()
        }
        self._parameters = {stage: tuple(_stage_parameters(decoder, stage)) for stage in stages}

    def forward(
        self, stage: PipelineStage, micro_batch: MicroBatch, *, step: int | None, hidden: Tensor | None
    ) -> Tensor | LossSums:
        """Run a stage: return hidden states, or the loss on the last stage.

        step: completed steps of the run, which address dropout; None in an evaluation, without dropout.
        hidden: the result of the stage before; None on the first stage.
        """
        rows = None
        if self._dropout_seed is not None and step is not None:
            # The address is hashed here, outside of compiled code.
            rows = dropout_address(
                seed=self._dropout_seed,
                step=step,
                samples=micro_batch.samples,
                positions=range(micro_batch.tokens.shape[1]),
            ).rows
        function = self._functions[stage]
        return function(micro_batch.tokens, micro_batch.targets, micro_batch.documents, rows, hidden)

    def activation_like(self, micro_batch: MicroBatch) -> Tensor:
        """A tensor on 'meta' like what a stage sends to the next: [b, s, h] in the working precision.

        Under sequence parallelism s is this rank's part of the sequence.
        """
        samples, tokens = micro_batch.tokens.shape
        shape = (samples, tokens // self._decoder.sequence_degree, self._decoder.model.section.hidden)
        return torch.empty(shape, dtype=self._weights.dtype, device="meta")

    def parameters(self, stage: PipelineStage) -> Sequence[nn.Parameter]:
        """The parameters of a stage: of its blocks, and of embedding and head where it has them."""
        return self._parameters[stage]

    def accumulate_gradients(self, stage: PipelineStage) -> None:
        """Add the gradients that a backward without hooks left on the stage's parameters to the fp32 ones."""
        self._weights.accumulate_gradients(self._parameters[stage])


def mark_tied_embedding(pieces: Sequence[ParameterPiece], decoder: Decoder) -> list[ParameterPiece]:
    """The pieces of this rank, its embedding marked if another pipeline stage holds a copy of it.

    A tied embedding is on the first stage and, as the head, on the last one. The first stage's copy counts in
    norms and is saved; the last one's follows it.
    """
    if not decoder.model.section.tied or decoder.embeds == decoder.finishes:
        return list(pieces)
    return [
        replace(piece, share="echoed" if decoder.embeds else "echo")
        if piece.parameter_name == "embedding.weight"
        else piece
        for piece in pieces
    ]


@dataclass(kw_only=True)
class _BatchPass:
    """One pass over a batch: what is kept between a forward and its backward.

    inputs: the received hidden states, whose gradients are sent back.
    roots: the output of each forward, from which its backward begins: hidden states, or the loss.
    weight_backwards: the backwards by weights that a schedule has put off.
    """

    stages: Sequence[PipelineStage]
    computation: StageComputation
    messenger: StageMessenger
    micro_batches: Sequence[MicroBatch]
    step: int | None
    weight: Tensor | float
    inputs: dict[StageBatch, Tensor] = field(default_factory=dict)
    roots: dict[StageBatch, Tensor] = field(default_factory=dict)
    weight_backwards: dict[StageBatch, Callable[[], object]] = field(default_factory=dict)

    def run(self, action: Action) -> LossSums | None:
        stage, place = self.stages[action.stage], (action.stage, action.micro_batch)
        if action.kind == "forward":
            return self._forward(stage, place)
        if action.kind == "backward":
            self._backward(stage, place)
        elif action.kind == "backward_input":
            self._backward_input(stage, place)
        else:
            self.weight_backwards.pop(place)()
            self.computation.accumulate_gradients(stage)
        return None

    def _forward(self, stage: PipelineStage, place: StageBatch) -> LossSums | None:
        batch, trains = self.micro_batches[place[1]], torch.is_grad_enabled()
        hidden = None
        if not stage.embeds:
            hidden = self.messenger.receive(StageMessage(place[0] - 1, place[0], place[1]))
            hidden = hidden.requires_grad_(trains)
        result = self.computation.forward(stage, batch, step=self.step, hidden=hidden)
        if isinstance(result, Tensor):
            self.messenger.send(StageMessage(place[0], place[0] + 1, place[1]), result.detach())
        if trains:
            self.roots[place] = result if isinstance(result, Tensor) else result.total * self.weight
            if hidden is not None:
                self.inputs[place] = hidden
        if isinstance(result, Tensor):
            return None
        return LossSums(*(term.detach() for term in result))

    def _backward(self, stage: PipelineStage, place: StageBatch) -> None:
        torch.autograd.backward(self.roots.pop(place), self._output_gradient(stage, place))
        if not stage.embeds:
            self._send_input_gradient(place, self.inputs.pop(place).grad)

    def _backward_input(self, stage: PipelineStage, place: StageBatch) -> None:
        root, output_gradient = self.roots.pop(place), self._output_gradient(stage, place)
        if stage.embeds:
            # No stage waits for the gradient of its input, and torch cannot split a graph without one.
            self.weight_backwards[place] = lambda: torch.autograd.backward(root, output_gradient)
            return
        hidden, parameters = self.inputs.pop(place), self.computation.parameters(stage)
        gradient, groups = torch_private.backward_of_input(root, output_gradient, hidden, iter(parameters))
        self._send_input_gradient(place, gradient)
        self.weight_backwards[place] = torch_private.backward_of_weights(parameters, groups)

    def _output_gradient(self, stage: PipelineStage, place: StageBatch) -> Tensor | None:
        """The gradient of what the stage made, from the next stage; None for the loss itself."""
        if stage.finishes:
            return None
        return self.messenger.receive(StageMessage(place[0] + 1, place[0], place[1]))

    def _send_input_gradient(self, place: StageBatch, gradient: Tensor | None) -> None:
        assert gradient is not None, "a stage depends on its input"
        self.messenger.send(StageMessage(place[0], place[0] - 1, place[1]), gradient)


def _stage_function(decoder: Decoder, stage: PipelineStage, *, z_loss: float, chunk: int) -> StageFunction:
    """A stage as a function of only tensors, which torch.compile can compile."""

    def forward(
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        rows: Tensor | None,
        hidden: Tensor | None,
    ) -> Tensor | LossSums:
        address = None if rows is None else DropoutAddress(rows=rows)
        result = decoder(tokens, documents=documents, address=address, hidden=hidden, blocks=stage.blocks)
        if not stage.finishes:
            return result
        return decoder.loss(result, targets, z_loss=z_loss, chunk=chunk)

    return forward


def _stage_parameters(decoder: Decoder, stage: PipelineStage) -> Sequence[nn.Parameter]:
    blocks = [
        parameter
        for block in decoder.blocks
        if block.index in stage.blocks
        for parameter in block.parameters()
    ]
    first = [decoder.embedding, decoder.positions, decoder.embedding_norm] if stage.embeds else []
    last = [decoder.final_norm, decoder.head or decoder.embedding] if stage.finishes else []
    return [*blocks, *(p for part in (*first, *last) if part is not None for p in part.parameters())]
