"""The one place that decides in which order a model becomes a training model on this mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bloomery.config.model import ModelSection
from bloomery.config.optim import LossSection, OptimSection
from bloomery.config.parallel import SPLIT_BACKWARD, ParallelSection
from bloomery.data.batches import MicroBatch
from bloomery.evaluate.heldout import Entropy, entropy
from bloomery.model.bigram import bigram_factors
from bloomery.model.decoder import Decoder, build
from bloomery.model.dropout import DropoutAddress, dropout_address
from bloomery.model.init import fill_initial
from bloomery.model.linear import narrow_products, products_for, set_products
from bloomery.model.loss import IGNORED, LossSums
from bloomery.optim.groups import lay_out
from bloomery.parallel.errands import Tick
from bloomery.parallel.mesh import Mesh, lost_ranks_told
from bloomery.parallel.pipeline import Pipeline
from bloomery.parallel.precision import DTYPES, MasterWeights
from bloomery.parallel.recompute import set_recompute
from bloomery.parallel.stages import DecoderStages, with_tied_ends
from bloomery.parallel.tensor import split_decoder
from bloomery.plan.partition import stages_of

LocalLoss = Callable[[MicroBatch, int], LossSums]
"""(micro-batch, completed steps) → sums over its tokens."""
TensorLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], LossSums]


@dataclass(kw_only=True)
class Now:
    """How a training model computes at present."""

    precision: str = "fp32"
    recompute: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """A decoder, its fp32 masters, and its loss, compiled where that was decided."""

    decoder: Decoder
    weights: MasterWeights
    loss: LocalLoss
    mesh: Mesh
    recompute: Mapping[int, str] = field(default_factory=dict)
    """What blocks compute again, by their index, where that is not what the phase says."""
    splits_backward: bool = False
    """Whether a schedule makes gradients of weights apart from those of activations."""
    pipeline: Pipeline | None = None
    """What passes micro-batches where the model is split into stages; `loss` is then of no use."""
    now: Now = field(default_factory=Now)

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], step: int, *, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward over this rank's micro-batches; gradients of `weight` × the summed loss.

        Returns this rank's share of the summed cross entropy and z term, fp32 scalars: over all ranks of the
        peer they add up to the global batch's. Collective over the peer; `weights.reduce` comes next.
        """
        self.weights.begin_accumulation()
        if self.pipeline is None:
            sums = self._accumulate(micro_batches, step, weight=weight)
        else:
            with lost_ranks_told():
                sums = self.pipeline.accumulate(micro_batches, step, weight=weight)
        self.weights.end_accumulation()
        return sums

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch], step: int, *, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        cross_entropy = z_loss = torch.zeros((), device=self.decoder.device)
        for micro_batch in micro_batches:
            with lost_ranks_told():
                sums = self.loss(micro_batch, step)
                (sums.total * weight).backward()
            cross_entropy, z_loss = cross_entropy + sums.cross_entropy, z_loss + sums.z
        return cross_entropy, z_loss

    def entropy(self, batches: Sequence[MicroBatch]) -> Entropy:
        """The entropy of text under the model, nothing dropped. Collective over the peer.

        Where the model is split into stages, the last one's rank has it, and the others have zeros.
        """
        if self.weights.are_gathered:
            # Each pass gathers weights from all replicas, which may have different numbers of batches.
            most = max(self.mesh.gather(len(batches)))
            batches = [*batches, *[_nothing(self.decoder)] * (most - len(batches))]
        if self.pipeline is None:
            return entropy(self.decoder, batches)
        nats = self.pipeline.evaluate([batch.to(self.decoder.device) for batch in batches])
        tokens = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        return Entropy(nats=float(nats), tokens=tokens if self.decoder.finishes else 0)

    def set_phase(self, *, precision: str, recompute: str) -> None:
        """Compute in this precision, keeping these activations, from now on; the masters stay as they are.

        Collective over the peer where it changes something.
        """
        if self.now.precision != precision:
            dtype = DTYPES[precision]
            if self.weights.dtype != dtype:
                self.weights.recast(dtype)
            set_products(self.decoder, products_for(self.decoder.device, dtype))
            if precision == "fp8":
                narrow_products(self.decoder.blocks)
        if self.now.recompute != recompute:
            of_all = dict.fromkeys(range(self.decoder.model.section.layers), recompute)
            set_recompute(self.decoder, of_all | dict(self.recompute), in_parts=self.splits_backward)
        self.now.precision, self.now.recompute = precision, recompute

    def initialise(self, *, seed: int, bigrams: Callable[[], Tensor]) -> None:
        """Give every weight its initial value, exactly, whatever the working precision.

        Collective over the peer. bigrams: counts [v, v] of the training text, made on the first rank alone
        when the model's embedding_init asks for them.
        """
        model = self.decoder.model
        counted = ("embedding.weight", "head.weight") if model.section.embedding_init == "bigram" else ()
        for entry in self.weights.state_entries():
            if entry.name.removeprefix("model.") not in counted:
                fill_initial(
                    entry.tensor,
                    entry.name.removeprefix("model."),
                    global_shape=entry.global_shape,
                    offset=entry.box.offset,
                    model=model,
                    seed=seed,
                )
        if counted:
            self._fill_counted(
                counted, lambda tick: bigram_factors(bigrams(), hidden=model.section.hidden, seed=seed)
            )
        self.weights.publish()

    def _fill_counted(self, names: Sequence[str], factorise: Callable[[Tick], Sequence[Tensor]]) -> None:
        """Fill embedding and head with the first rank's factors. A factorisation is a matter of threads and
        libraries: made anew on each rank, copies of one weight would differ.
        """
        model, device = self.decoder.model, self.decoder.device
        made = self.mesh.first(factorise, doing="counting bigrams for the initial embedding")
        for number, name in enumerate(names):
            shape = (model.vocabulary, model.section.hidden)
            whole = torch.empty(shape, device=device)
            if made is not None:
                whole.copy_(made[number])
            self.mesh.spread(whole)
            for entry in self.weights.state_entries():
                if entry.name == f"model.{name}":
                    entry.tensor.copy_(whole[entry.box.window])


def build_training_model(
    model: ModelSection,
    *,
    vocabulary: int,
    sequence_length: int,
    optim: OptimSection,
    loss: LossSection,
    loss_chunk: int,
    seed: int,
    mesh: Mesh,
    parallel: ParallelSection,
    compiled: bool,
    resets_positions: bool = False,
    precision: str = "fp32",
) -> TrainingModel:
    """Build the decoder on this rank's device, put masters under it, and compile its loss.

    Weights hold no values yet: initialise or restore them. Every rank builds its own part. precision: of the
    first phase, so that the working weights are not made twice.
    """
    held = vocabulary if model.vocabulary == "auto" else model.vocabulary
    stages = stages_of(model, parallel, vocabulary=held, sequence_length=sequence_length)
    own = [stage for stage in stages if stage.rank == mesh.pipeline.index]
    decoder = build(
        model,
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        device="meta",
        blocks=[block for stage in own for block in stage.blocks],
    )
    decoder.resets_positions = resets_positions
    pieces = split_decoder(decoder, mesh.tensor, sequence=parallel.sequence, device=mesh.device)
    pieces = with_tied_ends(pieces, decoder)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
    layouts = lay_out(
        shapes,
        pieces,
        optim,
        shards=mesh.shard.degree,
        shard=mesh.shard.index,
        by_block=parallel.zero >= 2 and mesh.shard.degree > 1,
    )
    weights = MasterWeights(
        decoder,
        layouts,
        DTYPES[precision],
        mesh=mesh,
        zero=parallel.zero,
        offload=parallel.offload == "cpu",
    )
    # As a whole: block by block compiles in a third of the time, but a block is compiled anew for each index
    # that its dropout is addressed by, and the loss would stay eager.
    as_a_whole = compiled and mesh.tensor.degree == 1
    if compiled and not as_a_whole:
        compile_blocks(decoder)
    drops = model.hidden_dropout > 0.0 or model.attention_dropout > 0.0
    dropout_seed = seed if drops else None
    pipeline = None
    if mesh.pipeline.degree > 1:
        work = DecoderStages(
            decoder,
            weights,
            own,
            z_loss=loss.z_loss,
            chunk=loss_chunk,
            dropout_seed=dropout_seed,
            compiled=as_a_whole,
        )
        pipeline = Pipeline(mesh, stages, schedule=parallel.schedule, work=work)
    eager = _tensor_loss(decoder, z_loss=loss.z_loss, chunk=loss_chunk)
    trained = torch.compile(eager, dynamic=False, fullgraph=True) if as_a_whole else eager
    made = TrainingModel(
        decoder=decoder,
        weights=weights,
        loss=_of_batch(trained, dropout_seed=dropout_seed, reports=mesh.tensor.is_first),
        mesh=mesh,
        recompute={
            block: parallel.recompute_per_stage[stage.index]
            for stage in own
            for block in stage.blocks
            if parallel.recompute_per_stage
        },
        splits_backward=pipeline is not None and parallel.schedule in SPLIT_BACKWARD,
        pipeline=pipeline,
    )
    made.set_phase(precision=precision, recompute="none")
    return made


def _nothing(decoder: Decoder) -> MicroBatch:
    """The smallest batch that runs, of which no token counts."""
    tokens = torch.zeros(1, decoder.sequence_shares, dtype=torch.int64)
    samples = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        tokens=tokens, targets=torch.full_like(tokens, IGNORED), documents=None, samples=samples
    )


def compile_blocks(decoder: Decoder) -> None:
    """Compile each block as a whole, its collectives inside. Blocks of one shape share their code."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(decoder.blocks))
    for block in decoder.blocks:
        block.compile(dynamic=False, fullgraph=True)


def _tensor_loss(decoder: Decoder, *, z_loss: float, chunk: int) -> TensorLoss:
    """The loss as a function of tensors alone: what torch.compile sees."""

    def loss(tokens: Tensor, targets: Tensor, documents: Tensor | None, rows: Tensor | None) -> LossSums:
        address = None if rows is None else DropoutAddress(rows=rows)
        hidden = decoder(tokens, documents=documents, address=address)
        return decoder.loss(hidden, targets, z_loss=z_loss, chunk=chunk)

    return loss


def _of_batch(loss: TensorLoss, *, dropout_seed: int | None, reports: bool) -> LocalLoss:
    """The loss of a micro-batch. With a seed, dropout is on, its address hashed outside compiled code.

    reports: whether its terms are this rank's to report; ranks of one tensor-parallel line compute the same.
    """

    def of_batch(batch: MicroBatch, step: int) -> LossSums:
        rows = None
        if dropout_seed is not None:
            positions = range(batch.tokens.shape[1])
            rows = dropout_address(
                seed=dropout_seed, step=step, samples=batch.samples, positions=positions
            ).rows
        sums = loss(batch.tokens, batch.targets, batch.documents, rows)
        nothing = torch.zeros_like(sums.z)
        return sums if reports else LossSums(sums.total, nothing, nothing)

    return of_batch
