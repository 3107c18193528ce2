"""Predicts the peak memory of one rank of each pipeline stage in a step, in bytes, by part.

Activations follow Korthikanti et al., 2022: they are what forward made and backward needs. Legend: n tokens
of a micro-batch, s sequence, h hidden, f ffn, t tensor degree, a bytes of a value.
"""

from __future__ import annotations

import math

from bloomery.frozen import dataclass
from bloomery.plan.block_cost import Workload
from bloomery.plan.layout import StageParameters
from bloomery.plan.moments import Moment, moments_of_shards
from bloomery.plan.parameters import ModelParameters, ffn_width, head_size, kv_heads, query_width

BIGRAM_BYTES = 24
"""The bytes for each pair of tokens while an embedding is made from bigrams: 64-bit counts and fp32
matrices.
"""

SCORE_BYTES_BESIDE = 1
"""The bytes for each attention weight that the mask of its dropout takes."""


OFFLOADED_PIECE_BYTES = 2**26
"""The bytes of offloaded masters that go to the device at a time (`parallel/host_copies.py`)."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes of one rank, by part.

    `total` is their sum and also the peak, because all activations exist at once when the first backward of a
    steady pipeline begins. What exists only before or only after that is counted at the larger moment: with
    ZeRO 2 and 3 `logits` is 0 if the first block's backward takes more than the loss.
    """

    weights: int
    gradients: int
    master: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    reserved: int

    @property
    def total(self) -> int:
        """The peak, in bytes."""
        state = self.weights + self.gradients + self.master + self.optimizer
        return state + self.activations + self.logits + self.buffers + self.reserved


@dataclass(frozen=True, kw_only=True)
class Training:
    """What determines memory besides the model and its layout."""

    micro_batches: int
    recompute: str
    optimizer: str
    loss_chunk: int
    fused: bool = True
    """Whether the compiler fuses what lies between matmuls. Eager blocks keep each intermediate value for
    backward.
    """


def stage_memory(
    work: Workload,
    parameters: ModelParameters,
    stages: tuple[StageParameters, ...],
    index: int,
    training: Training,
) -> StageMemory:
    """Return the memory of one rank of stage `index` at its peak."""
    layout, stage = work.layout, stages[index]
    parameters_held = rank_parameters(parameters, stage, work)
    sharded = parameters_held / layout.shards
    width = 4 if work.precision == "fp32" else 2
    state = _optimizer_bytes(parameters, stage, training.optimizer)
    kept, again = _activations(work, stage, index, training)
    logits = _logits(work, training) if stage.has_head else 0.0
    more = max(0.0, again - logits)  # the logits are gone when the first block is recomputed
    freed = (kept + more) / in_flight(work, index, training) + logits
    at_once = width * _gradients_at_once(work, parameters, stage, fused=training.fused, freed=freed / width)
    if layout.zero >= 2:
        moments = moments_of_shards(
            work,
            parameters,
            stage,
            has_more_micro_batches=training.micro_batches > 1,
            beside=Moment(activations=again, logits=logits, buffers=at_once),
        )
        briefly = max(moments, key=lambda moment: moment.total)
    else:
        briefly = Moment(activations=more, logits=logits, buffers=at_once)
    activations, buffers = kept + briefly.activations, _messages(work) + briefly.buffers
    if work.model.embedding_init == "bigram":
        # Bigrams are counted before the first step, and their memory is used again afterwards.
        later = parameters_held * 4 + activations + briefly.logits + buffers
        buffers += max(0.0, BIGRAM_BYTES * work.vocabulary**2 - later)
    one_block = parameters.block.total / layout.tensor
    ends = parameters_held - stage.blocks * one_block
    # ZeRO 3 keeps embedding and head for the whole step, and no other shard of the working weights than the
    # masters.
    weights = ends if layout.zero == 3 else parameters_held
    if layout.rounds_by_block and width < 4:
        weights = ends + min(stage.blocks, 1) * one_block
    gradients = sharded if layout.zero >= 2 else parameters_held
    are_masters = width == 4 and not layout.zero
    updated_here = sharded
    if layout.offload:
        # Of a GPU's memory masters and moments take nothing, and gradients what they take without offload. A
        # CPU has no other memory, where masters are then apart and gradients twice.
        is_apart = work.hardware.accelerator.kind == "gpu"
        # Masters come in fp32 and are rounded on the device: a block's, or a piece of the update.
        by_block = layout.rounds_by_block or layout.zero == 3
        piece = one_block / (layout.shards if layout.zero == 3 else 1) if by_block else sharded
        buffers += min(4 * piece, math.inf if by_block else OFFLOADED_PIECE_BYTES) if is_apart else 0.0
        updated_here = 0.0 if is_apart else sharded
        are_masters = False
        gradients += 0.0 if is_apart else sharded
    return StageMemory(
        weights=round(weights * width + briefly.weights + fp8_copy_bytes(work, parameters, stage)),
        gradients=round(4 * gradients + briefly.gradients),
        master=0 if are_masters else round(4 * updated_here),
        optimizer=round(state * updated_here),
        activations=round(activations),
        logits=round(briefly.logits),
        buffers=round(buffers),
        reserved=int(work.hardware.accelerator.reserved_gib * 2**30),
    )


@dataclass(frozen=True, kw_only=True)
class OffloadedMemory:
    """The bytes of main memory that one rank's offloaded state takes.

    pinned: masters and gradients, which a GPU copies by itself; moments: the optimizer's, which stay.
    """

    pinned: int
    moments: int


def offloaded_memory(
    work: Workload, parameters: ModelParameters, stage: StageParameters, optimizer: str
) -> OffloadedMemory:
    """Return what `parallel.offload = "cpu"` takes of main memory for one rank of a stage."""
    held = rank_parameters(parameters, stage, work) / work.layout.shards
    return OffloadedMemory(
        pinned=round(2 * 4 * held), moments=round(_optimizer_bytes(parameters, stage, optimizer) * held)
    )


def rank_parameters(parameters: ModelParameters, stage: StageParameters, work: Workload) -> float:
    """Return the number of parameters that one rank of a stage computes with.

    A head that is tied to an embedding on another stage is a second copy.
    """
    t = work.layout.tensor
    block = parameters.block
    norms = block.attention_norm + block.query_key_norm + block.mlp_norm
    count = stage.blocks * (norms + (block.total - norms) / t)
    if stage.has_embedding:
        count += parameters.embedding / t + parameters.positions + parameters.embedding_norm
    if stage.has_head:
        count += parameters.final_norm + parameters.head / t
        if work.model.tied and not stage.has_embedding:
            count += parameters.embedding / t
    return count


def fp8_copy_bytes(work: Workload, parameters: ModelParameters, stage: StageParameters) -> float:
    """Return the bytes of the 8-bit copies of one rank's matrices (`parallel/fp8_weights.py`).

    They may be kept where working weights are: one copy, and its transpose for units that multiply 8 bits.
    """
    layout = work.layout
    if work.precision != "fp8" or not layout.keeps_fp8 or layout.zero == 3 or layout.rounds_by_block:
        return 0.0
    copies = 2 if work.hardware.accelerator.fp8_teraflops else 1
    return copies * stage.blocks * parameters.block.matrices / layout.tensor


def in_flight(work: Workload, index: int, training: Training) -> float:
    """Return how many micro-batches' activations stage `index` holds at once, in units of whole stages.

    1F1B holds p − index. Interleaved schedules hold (p − 1)/(p·v) more on the first stage (Korthikanti et
    al., §4.2.3).
    """
    layout = work.layout
    p, m = layout.pipeline, training.micro_batches
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(m)
    if layout.schedule == "zbv":
        return float(min(m, p))
    alive = float(p - index)
    if layout.chunks > 1:
        alive += (p - 1) / layout.chunks * (1 - index / p)
    return min(float(m), alive)


def block_activation_bytes(work: Workload, recompute: str) -> float:
    """Return the bytes that one block keeps of one micro-batch for backward.

    For the GPT shape without recomputation this is s·b·h·(10 + 24/t + 5·a·s/(h·t)) in 16 bits. Sequence
    parallelism divides the 10 by t, except for the two streams that enter the split columns: backward needs
    them of the whole sequence, and they are kept rather than gathered again.
    'elementwise' and 'mlp' keep the block's input, the MLP's, and what products return.
    """
    model, t, n, a = work.model, work.layout.tensor, work.tokens, work.value_bytes
    split = t if work.layout.sequence else 1
    stream = n * model.hidden * a / split
    if recompute == "full":
        return stream
    gates = 2 if model.activation == "swiglu" else 1
    values = 2 * kv_heads(model) * head_size(model)
    if recompute == "elementwise":
        return 2 * stream + _attention_products_bytes(work) + n * gates * ffn_width(model) * a / t
    masks = 2 * n * model.hidden / split if model.hidden_dropout > 0.0 else 0.0
    if recompute == "mlp":
        return 2 * stream + _attention_products_bytes(work) + masks
    entering = 2 * n * model.hidden * a
    # Of an RMSNorm in fp32 the compiler keeps the values before its weight, too, as an eager one does.
    normed = 2 * stream if model.norm == "rmsnorm" and a == 4 else 0.0
    kept_bytes = 2 * stream + entering + masks + normed
    kept_bytes += n * (2 * query_width(model) + values) * a / t + n * (gates + 1) * ffn_width(model) * a / t
    if recompute == "none":
        kept_bytes += _scores_bytes(work) if work.forms_scores else n * model.heads * 4 / t
    return kept_bytes


def _attention_products_bytes(work: Workload) -> float:
    """Return the bytes of what the matmuls of a block's attention return, the last one left out."""
    model, t, n, a = work.model, work.layout.tensor, work.tokens, work.value_bytes
    values = 2 * kv_heads(model) * head_size(model)
    kept_bytes = n * (2 * query_width(model) + values) * a / t
    scores = work.micro_batch * model.heads * work.sequence_length**2 / t
    # Without a fused kernel the matmuls of attention return the scores.
    return kept_bytes + (scores * a if work.forms_scores else n * model.heads * 4 / t)


def eager_activation_bytes(work: Workload, recompute: str = "none") -> float:
    """Return the bytes that one block keeps besides `block_activation_bytes` if nothing is fused.

    Without recomputation these are the intermediate values in norms (fp32) and in the gated activation, and
    queries and keys before rotation. A block that keeps products keeps its last one, which no backward reads.
    """
    model, t, n, a = work.model, work.layout.tensor, work.tokens, work.value_bytes
    stream = n * model.hidden / (t if work.layout.sequence else 1)
    if recompute in ("elementwise", "mlp"):
        return stream * a
    if recompute == "full":
        return 0.0
    # The two streams are kept in fp32 instead of the 16 bits in which they come.
    norms = 2 * stream * (4 - a + (4 if model.norm == "rmsnorm" else 0)) if a < 4 else 0.0
    gated = n * ffn_width(model) * a / t if model.activation == "swiglu" else 0.0
    turned = n * (query_width(model) + kv_heads(model) * head_size(model)) * a / t
    # Two more copies of queries and keys: normalised in fp32, and rounded back.
    head_norms = turned * (1 + 4 / a) if model.qk_norm else 0.0
    return norms + gated + head_norms + (turned if model.position == "rotary" else 0.0)


def _scores_bytes(work: Workload) -> float:
    model, s = work.model, work.sequence_length
    weights = work.micro_batch * model.heads * s * s / work.layout.tensor
    return weights * (2 * work.value_bytes + SCORE_BYTES_BESIDE)


def mask_bytes(work: Workload) -> float:
    """Return the bytes of one micro-batch's attention mask, which all blocks share; 0 where none is formed.

    It holds what is added to the scores, for each head with ALiBi and for each sample if documents are
    masked. Without ALiBi it is boolean where attention weights are dropped; with it, it is fp32 there.
    """
    if not work.forms_mask:
        return 0.0
    places = work.sequence_length**2 * (work.micro_batch if work.masks_documents else 1)
    drops, has_bias = work.model.attention_dropout > 0.0, work.model.position == "alibi"
    if drops:
        return places * (work.model.heads / work.layout.tensor * 4 if has_bias else 1)
    return places * (work.model.heads / work.layout.tensor if has_bias else 1) * work.value_bytes


def _activations(
    work: Workload, stage: StageParameters, index: int, training: Training
) -> tuple[float, float]:
    """Return the bytes that are kept for backward, and those that exist while a block is computed again."""
    recompute = stage.recompute or training.recompute
    alive = in_flight(work, index, training)

    def of_block(mode: str) -> float:
        eager = 0.0 if training.fused else eager_activation_bytes(work, mode)
        return block_activation_bytes(work, mode) + eager

    kept_bytes = alive * (stage.blocks * of_block(recompute) + mask_bytes(work))
    if stage.has_embedding:
        kept_bytes += alive * work.tokens * 8
    if recompute in ("elementwise", "mlp", "full"):
        return kept_bytes, of_block("none") - (of_block(recompute) if recompute != "full" else 0.0)
    if recompute == "selective" and work.forms_scores:
        kept_bytes += _scores_bytes(work)
    return kept_bytes, 0.0


def _logits(work: Workload, training: Training) -> float:
    """Return the bytes of one chunk's logits, their fp32 form and gradient, and the head's fp32 gradient.

    A GPU's kernels write the gradient over the logits, which have no fp32 form then; with a split vocabulary
    the logits of the next chunk are computed beside them. Without kernels the loss over a split vocabulary
    computes the gradient in place, beside the chunk before; compiled code makes it from the logits.
    """
    columns = -(-work.vocabulary // work.layout.tensor)
    rows = min(training.loss_chunk, work.tokens)
    hidden = work.tokens * work.model.hidden * work.value_bytes
    split = work.layout.tensor > 1
    if work.has_gpu_kernels:
        chunks = (2 if split else 1) * rows * columns * work.value_bytes
        return chunks + columns * work.model.hidden * (4 + work.value_bytes) + (2 if split else 1) * hidden
    if split:
        narrow = work.value_bytes if work.value_bytes < 4 else 0
        return rows * columns * 2 * (4 + narrow) + columns * work.model.hidden * (4 + narrow) + 2 * hidden
    if training.fused:
        return (
            rows * columns * work.value_bytes
            + columns * work.model.hidden * (4 + work.value_bytes)
            + 2 * hidden
        )
    of_logit = 2 * 4 + (work.value_bytes if work.value_bytes < 4 else 3 * 4)
    return rows * columns * of_logit + columns * work.model.hidden * (4 + work.value_bytes) + 2 * hidden


def _gradients_at_once(
    work: Workload, parameters: ModelParameters, stage: StageParameters, *, fused: bool, freed: float
) -> float:
    """Return how many elements of gradients exist before they are added to the fp32 ones, beyond the peak.

    An eager backward gives them one by one, so that the largest counts. A compiled one gives all of its
    region at its end: those of a block, or of the whole model where it is compiled as one (on a CPU, without
    tensor and data parallelism, `parallel.working = "kept"`). By then the activations and logits of a
    micro-batch are gone.
    freed: the number of elements that would fit in their place.
    """
    layout, model = work.layout, work.model
    gates = 2 if model.activation == "swiglu" else 1
    attention = (query_width(model) + 2 * kv_heads(model) * head_size(model)) * model.hidden
    largest = max(gates * ffn_width(model) * model.hidden, attention) / layout.tensor
    if stage.has_embedding or (stage.has_head and not model.tied):
        largest = max(largest, parameters.embedding / layout.tensor)
    if not fused:
        return largest
    is_cpu = work.hardware.accelerator.kind == "cpu"
    if is_cpu and layout.tensor == layout.data == 1 and not layout.rounds_by_block:
        return max(largest, rank_parameters(parameters, stage, work) - freed)
    return max(largest, min(stage.blocks, 1) * parameters.block.total / layout.tensor)


def _messages(work: Workload) -> float:
    """Return the bytes of messages between ranks."""
    stream = work.tokens * work.model.hidden * work.value_bytes
    between_stages = 4 * stream if work.layout.pipeline > 1 else 0
    return between_stages + (2 * stream if work.layout.tensor > 1 else 0)


def _optimizer_bytes(parameters: ModelParameters, stage: StageParameters, optimizer: str) -> float:
    """Return the bytes of the optimizer's moments for each parameter: two in fp32 for AdamW, one for
    Muon's matrices.
    """
    if optimizer != "muon":
        return 8.0
    matrices = stage.blocks * parameters.block.matrices
    count = stage.blocks * parameters.block.total
    count += parameters.embedding if stage.has_embedding else 0
    count += parameters.head if stage.has_head else 0
    return (4.0 * matrices + 8.0 * (count - matrices)) / count
