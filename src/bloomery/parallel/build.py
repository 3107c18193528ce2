"""Builds a training model: a decoder on this rank's part of the mesh, its master weights and its loss.

`build_training_model` is the one place that decides in which order the parallel layouts are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bloomery.config.model import ModelSection
from bloomery.config.optim import LossSection, OptimSection
from bloomery.config.parallel import SPLIT_BACKWARD, ParallelSection
from bloomery.data_loader.batches import MicroBatch
from bloomery.evaluate.scoring import Entropy, entropy
from bloomery.events.machine import processors_of_a_rank
from bloomery.model.decoder import Decoder, build
from bloomery.model.fp8_scaling import Scaling
from bloomery.model.initial_filling import InitialBox, fill_initial
from bloomery.model.initial_values import bigram_factors
from bloomery.model.layers import matmul_mode_for, set_matmul_mode, use_fp8_matmuls
from bloomery.model.loss import IGNORED
from bloomery.model.shape import logical_shapes
from bloomery.optim.clip import GradientFacts
from bloomery.optim.groups import lay_out
from bloomery.parallel.flat import WeightStorage
from bloomery.parallel.inner_sizes import InnerSizes
from bloomery.parallel.local_loss import LocalLoss, micro_batch_loss, tensor_loss_of
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import QueryKeyClip
from bloomery.parallel.overlapped_linear import can_overlap_products
from bloomery.parallel.pipeline import Pipeline, StageComputation, mark_tied_embedding
from bloomery.parallel.precision import DTYPES, MasterWeights
from bloomery.parallel.rank_zero_task import ReportProgress
from bloomery.parallel.recompute import compile_by_block, set_recompute
from bloomery.parallel.rendezvous import raising_rank_lost
from bloomery.parallel.scaled_weights import NarrowWeights, narrow_weights
from bloomery.parallel.tensor import split_decoder
from bloomery.plan.pipeline_stages import PipelineStage, stages_of


@dataclass(kw_only=True)
class SettingsInForce:
    """The settings that a training model computes with at present; they change with the phase."""

    precision: str = "fp32"
    recompute: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """A decoder, its fp32 master weights and its loss, compiled if that was asked for.

    loss: the loss of a micro-batch; not used with a pipeline.
    recompute: what blocks compute again, by their index, where it differs from what the phase says.
    splits_backward: whether the pipeline schedule runs the backward by inputs and by weights apart.
    pipeline: None if the model is on one pipeline stage.
    current: what the recipe's phase sets at present.
    query_key_clip: rescales heads with large attention logits; None where `model.qk_norm` bounds them.
    inner_sizes: measures inner tensors where that is asked for.
    compiled: whether any part of it is compiled with torch.compile.
    compiles_blocks: whether each block is compiled by itself (`compile_by_block`).
    fp8_scaling: what shares a scale where matmuls have factors of 8 bits.
    """

    decoder: Decoder
    weights: MasterWeights
    fp8_weights: NarrowWeights
    loss: LocalLoss
    mesh: Mesh
    recompute: Mapping[int, str]
    splits_backward: bool
    pipeline: Pipeline | None
    query_key_clip: QueryKeyClip | None
    inner_sizes: InnerSizes | None
    compiled: bool
    compiles_blocks: bool
    fp8_scaling: Scaling = "tensor"
    current: SettingsInForce = field(default_factory=SettingsInForce)

    def clip_queries(self, limit: float) -> None:
        """Rescale heads with attention logits above this from now on, beside `optim.qk_clip`; 0: no more."""
        if self.query_key_clip is not None:
            self.query_key_clip.clamp(limit)

    def begin_sizes(self, *, wanted: bool, later: bool = False) -> None:
        """Measure inner tensors in the forwards that follow, or no longer; call it before each step.

        later: whether some later step measures them.
        """
        if self.inner_sizes is not None:
            self.inner_sizes.begin(wanted=wanted, later=later)

    def after_update(self, facts: GradientFacts) -> None:
        """Change the masters as an update wants it afterwards; their working copies come next.

        facts: of the update's gradients. Collective over the peer.
        """
        if self.query_key_clip is not None:
            self.query_key_clip.apply(facts.applies)

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], step: int, *, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward over this rank's micro-batches: gradients of `weight` × the summed loss.

        Returns this rank's part of the summed cross entropy and z term, fp32 scalars: over all ranks of the
        peer they add up to the global batch's. Collective over the peer; `weights.reduce` comes next.
        """
        self.weights.begin_accumulation(backwards=len(micro_batches))
        sums = self._backward(micro_batches, step, weight=weight)
        self.weights.end_accumulation()
        return sums

    def digest_gradients(self, micro_batch: MicroBatch, step: int, *, weight: Tensor | float) -> int:
        """Compute a micro-batch once more and return a digest of its gradients, which are then dropped.

        The digest is that of `weights.tapped` while the micro-batch was trained on, bit for bit, on whichever
        rank of the data axis. Collective over the peer.
        """
        with self.weights.tapped(discards=True) as tap:
            self._backward([micro_batch], step, weight=weight)
        self.mesh.wait_for_device()
        return tap.digest

    def entropy(
        self, batches: Sequence[MicroBatch], *, report_progress: ReportProgress = lambda: None
    ) -> Entropy:
        """The entropy of text under the model, without dropout, computed eagerly. Collective over the peer.

        With a pipeline the last stage's ranks have it, and the others have zeros.

        report_progress: called after each batch, with a pipeline after some.
        """
        if not self.compiled:
            return self._entropy(batches, report_progress)
        # 8-bit copies of updated weights are made by compiled code, as before a step: others could differ.
        self.weights.updated.finish()
        # Held-out batches have up to 8 widths. Each would be compiled anew, up to a limit at which it fails.
        with torch.compiler.set_stance("force_eager"):
            return self._entropy(batches, report_progress)

    def set_phase(self, *, precision: str, recompute: str) -> None:
        """Compute in this precision, and with this recomputation, from now on. Masters stay as they are.

        Collective over the peer if it changes something.
        """
        if self.current.precision != precision:
            dtype = DTYPES[precision]
            if self.weights.dtype != dtype:
                self.weights.set_working_dtype(dtype)
            set_matmul_mode(self.decoder, matmul_mode_for(self.decoder.device, dtype))
            if precision == "fp8":
                use_fp8_matmuls(self.decoder.blocks, self.fp8_scaling)
            self.fp8_weights.use(wanted=precision == "fp8")
        if self.current.recompute != recompute:
            modes = dict.fromkeys(range(self.decoder.model.section.layers), recompute) | dict(self.recompute)
            set_recompute(
                self.decoder, modes, splits_backward=self.splits_backward, compiles=self.compiles_blocks
            )
        self.current.precision, self.current.recompute = precision, recompute

    def initialise(self, *, seed: int, bigrams: Callable[[], Tensor]) -> None:
        """Give every weight its initial value, which depends on neither the layout nor the precision.

        bigrams: makes the bigram counts [v, v] of the training text; called only on rank 0, and only if
        model.embedding_init asks for them. Collective over the peer.
        """
        model = self.decoder.model
        from_bigrams = model.section.embedding_init == "bigram"
        counted = ("embedding.weight", "head.weight") if from_bigrams else ()
        boxes = (
            InitialBox(
                tensor=entry.tensor,
                name=entry.name.removeprefix("model."),
                global_shape=entry.global_shape,
                offset=entry.box.offset,
            )
            for entry in self.weights.state_entries()
        )
        fill_initial(
            (box for box in boxes if box.name not in counted),
            model=model,
            seed=seed,
            threads=round(processors_of_a_rank()),
        )
        if counted:
            self._fill_from_bigrams(
                counted,
                lambda report_progress: bigram_factors(bigrams(), hidden=model.section.hidden, seed=seed),
            )
        self.weights.copy_masters_to_working()

    def _entropy(self, batches: Sequence[MicroBatch], report_progress: ReportProgress) -> Entropy:
        if self.weights.gathers_weights:
            # Each forward gathers weights from all replicas, which may have different numbers of batches.
            most = max(self.mesh.all_gather_object(len(batches)))
            batches = [*batches, *[_empty_batch(self.decoder)] * (most - len(batches))]
        if self.pipeline is None:
            return entropy(
                self.decoder,
                batches,
                report_progress=report_progress,
                wait_for_device=self.mesh.wait_for_device,
            )
        moved = [batch.to(self.decoder.device) for batch in batches]
        nats = self.pipeline.evaluate(moved, report_progress)
        self.mesh.wait_for_device()
        tokens = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        return Entropy(nats=float(nats), tokens=tokens if self.decoder.finishes else 0)

    def _backward(
        self, micro_batches: Sequence[MicroBatch], step: int, *, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        if self.pipeline is not None:
            with raising_rank_lost():
                return self.pipeline.accumulate(micro_batches, step, weight=weight)
        cross_entropy = z_loss = torch.zeros((), device=self.decoder.device)
        for micro_batch in micro_batches:
            with raising_rank_lost():
                sums = self.loss(micro_batch, step)
                (sums.total * weight).backward()
            cross_entropy, z_loss = cross_entropy + sums.cross_entropy, z_loss + sums.z
        return cross_entropy, z_loss

    def _fill_from_bigrams(
        self, names: Sequence[str], factorise: Callable[[ReportProgress], Sequence[Tensor]]
    ) -> None:
        """Fill the tensors `names` with the factors that rank 0 computes.

        A factorisation depends on the number of threads and on libraries, so one that each rank made for
        itself would give copies of one weight different values.
        """
        model, device = self.decoder.model, self.decoder.device
        factors = self.mesh.run_on_rank_zero(factorise, doing="counting bigrams for the initial embedding")
        for number, name in enumerate(names):
            # Rows beyond the tokenizer's vocabulary stand for no token, and stay zero.
            whole = torch.zeros((model.vocabulary, model.section.hidden), device=device)
            if factors is not None:
                whole[: len(factors[number])].copy_(factors[number])
            self.mesh.broadcast(whole)
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
    fp8_scaling: Scaling = "tensor",
) -> TrainingModel:
    """Build this rank's part of the model on its device. Collective over the peer.

    Weights hold no values yet: initialise or restore them.

    vocabulary: the tokenizer's. sequence_length: tokens of a sample.
    loss_chunk: tokens whose logits exist at one time.
    seed: the seed of dropout.
    compiled: whether to use torch.compile.
    resets_positions: whether learned positions count within documents.
    precision: the first phase's, so that the working weights are not made twice.
    fp8_scaling: what shares a scale in phases of 'fp8'.
    """
    padded_vocabulary = vocabulary if model.vocabulary == "auto" else model.vocabulary
    stages = stages_of(model, parallel, vocabulary=padded_vocabulary, sequence_length=sequence_length)
    own_stages = [stage for stage in stages if stage.rank == mesh.pipeline.index]
    decoder = build(
        model,
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        device="meta",
        blocks=[block for stage in own_stages for block in stage.blocks],
    )
    decoder.resets_positions = resets_positions
    weights = _split_into_masters(decoder, optim, mesh=mesh, parallel=parallel, precision=precision)
    by_block = compiled and compile_by_block(decoder, mesh=mesh, parallel=parallel)
    as_a_whole = compiled and not by_block
    drops = model.hidden_dropout > 0.0 or model.attention_dropout > 0.0
    dropout_seed = seed if drops else None
    pipeline = None
    if mesh.pipeline.degree > 1:
        computation = StageComputation(
            decoder,
            weights,
            own_stages,
            z_loss=loss.z_loss,
            chunk=loss_chunk,
            dropout_seed=dropout_seed,
            compiled=as_a_whole,
        )
        pipeline = Pipeline(mesh, stages, schedule=parallel.schedule, computation=computation)
    compiles = "whole" if as_a_whole else "loss" if compiled and mesh.tensor.degree == 1 else ""
    tensor_loss = tensor_loss_of(decoder, z_loss=loss.z_loss, chunk=loss_chunk, compiles=compiles)
    training_model = TrainingModel(
        decoder=decoder,
        weights=weights,
        fp8_weights=narrow_weights(
            decoder, weights, mesh=mesh, parallel=parallel, scaling=fp8_scaling, compiled=compiled
        ),
        loss=micro_batch_loss(tensor_loss, dropout_seed=dropout_seed, reports=mesh.tensor.is_first),
        mesh=mesh,
        recompute=_recompute_by_block(own_stages, parallel),
        splits_backward=pipeline is not None and parallel.schedule in SPLIT_BACKWARD,
        pipeline=pipeline,
        query_key_clip=None if model.qk_norm else QueryKeyClip(decoder, weights, mesh=mesh, optim=optim),
        inner_sizes=InnerSizes(
            decoder, weights, mesh=mesh, sequence_length=sequence_length, stays_on=compiled
        ),
        compiled=compiled,
        compiles_blocks=by_block,
        fp8_scaling=fp8_scaling,
    )
    training_model.set_phase(precision=precision, recompute="none")
    return training_model


def _split_into_masters(
    decoder: Decoder, optim: OptimSection, *, mesh: Mesh, parallel: ParallelSection, precision: str
) -> MasterWeights:
    """Split the decoder's weights over the tensor axis, and put them into flat buffers with fp32 masters."""
    overlaps = parallel.async_tensor and can_overlap_products(mesh.tensor, mesh.device)
    pieces = split_decoder(
        decoder, mesh.tensor, sequence=parallel.sequence, device=mesh.device, overlaps=overlaps
    )
    pieces = mark_tied_embedding(pieces, decoder)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
    layouts = lay_out(
        shapes,
        pieces,
        optim,
        shards=mesh.shard.degree,
        shard=mesh.shard.index,
        by_block=(parallel.zero >= 2 and mesh.shard.degree > 1) or parallel.working == "by-block",
    )
    return MasterWeights(
        decoder,
        layouts,
        DTYPES[precision],
        mesh=mesh,
        storage=WeightStorage(
            zero=parallel.zero,
            offload=parallel.offload == "cpu",
            rounds_by_block=parallel.working == "by-block",
        ),
        names=tuple(logical_shapes(decoder.model)),
        bucket_bytes=round(parallel.bucket_mb * 1e6),
        overlaps=parallel.overlap,
        prefetch_blocks=parallel.prefetch_blocks,
    )


def _recompute_by_block(stages: Sequence[PipelineStage], parallel: ParallelSection) -> dict[int, str]:
    if not parallel.recompute_per_stage:
        return {}
    return {block: parallel.recompute_per_stage[stage.index] for stage in stages for block in stage.blocks}


def _empty_batch(decoder: Decoder) -> MicroBatch:
    """The smallest batch that a forward accepts; none of its tokens counts."""
    tokens = torch.zeros(1, decoder.sequence_degree, dtype=torch.int64)
    samples = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        tokens=tokens, targets=torch.full_like(tokens, IGNORED), documents=None, samples=samples
    )
