"""What one block, the embedding and the head cost one rank for one micro-batch, forward and backward.

Legend: n tokens of a micro-batch, s sequence, h hidden, f ffn, v vocabulary, t tensor degree, a bytes of a
value. Work that tensor parallelism splits is divided by t; norms and residuals only under sequence
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.model import ModelSection
from bloomery.plan.hardware import Hardware
from bloomery.plan.kernels import BYTES, Spent, matmul_s, moving_s, ring_s
from bloomery.plan.layout import Layout
from bloomery.plan.shapes import ffn_width, head_size, kv_heads

ACCUMULATION_BYTES = 10
"""Moved for each parameter and micro-batch: its gradient is read, and added to an fp32 sum."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one rank is given: a model, its micro-batch, a layout, a precision, a machine. Hashable."""

    model: ModelSection
    vocabulary: int
    sequence_length: int
    micro_batch: int
    precision: str
    layout: Layout
    hardware: Hardware
    muon_iterations: int = 0
    """Of each step's update; 0 where AdamW updates everything."""

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return BYTES[self.precision]

    @property
    def products(self) -> str:
        """The precision of products; fp8 multiplies the blocks' matrices alone."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def forms_scores(self) -> bool:
        """Whether attention weights are written out: dropout on them needs it."""
        return self.model.attention_dropout > 0.0


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward and backward of one part."""

    forward: Spent
    backward: Spent


def block_passes(work: Workload) -> Passes:
    """One decoder block for one micro-batch."""
    linear = _linears(work)
    attention = _attention(work)
    elementwise = _elementwise(work)
    exchange = Spent(tensor_s=2 * _tensor_exchange_s(work))
    forward = linear.forward + attention.forward + elementwise + exchange
    backward = linear.backward + attention.backward + elementwise * 2.0 + exchange
    return Passes(forward=forward, backward=backward)


def attention_passes(work: Workload) -> Passes:
    """The attention of one block alone: what selective recomputation repeats."""
    return _attention(work)


def embedding_passes(work: Workload) -> Passes:
    """Looking tokens up; in backward their gradients are scattered."""
    moved = 2 * work.tokens * work.model.hidden * work.value_bytes
    exchange = _tensor_exchange_s(work)
    return Passes(
        forward=Spent(memory_s=moving_s(work.hardware, moved), tensor_s=exchange),
        backward=Spent(memory_s=moving_s(work.hardware, 2 * moved)),
    )


def head_passes(work: Workload) -> Passes:
    """Logits, softmax and loss over the vocabulary, and their gradients."""
    hardware, n, h = work.hardware, work.tokens, work.model.hidden
    columns = -(-work.vocabulary // work.layout.tensor)
    product = matmul_s(hardware, work.products, rows=n, columns=columns, inner=h)
    logits = n * columns
    softmax = moving_s(hardware, logits * (4 * 4 + 3 * work.value_bytes), kernels=6)
    softmax += logits * hardware.accelerator.exponential_ns * 1e-9
    back = matmul_s(hardware, work.products, rows=n, columns=h, inner=columns)
    back += matmul_s(hardware, work.products, rows=columns, columns=h, inner=n)
    return Passes(
        forward=Spent(compute_s=product, memory_s=softmax),
        backward=Spent(compute_s=back, tensor_s=_tensor_exchange_s(work)),
    )


def accumulation_s(work: Workload, parameters: float) -> float:
    """Adding one micro-batch's gradients of this rank's parameters to their fp32 sums."""
    return moving_s(work.hardware, ACCUMULATION_BYTES * parameters)


def muon_s(work: Workload, blocks: float) -> float:
    """Orthogonalising the matrices of so many blocks: three products for each matrix and iteration."""
    model, hardware = work.model, work.hardware
    narrow, gates = kv_heads(model) * head_size(model), 2 if model.activation == "swiglu" else 1
    hidden, t = model.hidden, work.layout.tensor
    shapes = [(hidden, hidden, 2), (narrow, hidden, 2), (ffn_width(model), hidden, gates + 1)]
    spent = 0.0
    for rows, columns, each in shapes:
        small, large = min(rows, columns), max(rows, columns)
        count = blocks * each / t
        wide = matmul_s(hardware, work.products, rows=small, columns=small, inner=large, count=count)
        square = matmul_s(hardware, work.products, rows=small, columns=small, inner=small, count=count)
        spent += work.muon_iterations * (2 * wide + square)
    return spent


def tensor_bytes(work: Workload) -> float:
    """What one all-reduce takes in, or a reduce-scatter and its all-gather: the residual stream."""
    return work.tokens * work.model.hidden * work.value_bytes


def _tensor_exchange_s(work: Workload) -> float:
    layout = work.layout
    return ring_s(
        work.hardware,
        tensor_bytes(work),
        layout.tensor,
        passes=2,
        per_node=min(layout.tensor, layout.per_node),
        sharing=1,
    )


def _linears(work: Workload) -> Passes:
    model, t, n = work.model, work.layout.tensor, work.tokens
    hidden, ffn = model.hidden, ffn_width(model)
    heads_and_values = hidden + 2 * kv_heads(model) * head_size(model)
    gates = 2 if model.activation == "swiglu" else 1
    shapes = [
        (heads_and_values / t, hidden),
        (hidden, hidden / t),
        (gates * ffn / t, hidden),
        (hidden, ffn / t),
    ]
    forward = backward = 0.0
    for columns, inner in shapes:
        forward += matmul_s(work.hardware, work.precision, rows=n, columns=columns, inner=inner)
        backward += matmul_s(work.hardware, work.precision, rows=n, columns=inner, inner=columns)
        backward += matmul_s(work.hardware, work.precision, rows=columns, columns=inner, inner=n)
    return Passes(forward=Spent(compute_s=forward), backward=Spent(compute_s=backward))


def _attention(work: Workload) -> Passes:
    hardware, model, s = work.hardware, work.model, work.sequence_length
    heads = work.micro_batch * model.heads / work.layout.tensor
    size = head_size(model)
    if work.forms_scores:
        scores = matmul_s(hardware, work.products, rows=s, columns=s, inner=size, count=heads)
        mixed = matmul_s(hardware, work.products, rows=s, columns=size, inner=s, count=heads)
        moved = heads * s * s * work.value_bytes
        return Passes(
            forward=Spent(compute_s=scores + mixed, memory_s=moving_s(hardware, 6 * moved, kernels=3)),
            backward=Spent(compute_s=2 * (scores + mixed), memory_s=moving_s(hardware, 8 * moved, kernels=4)),
        )
    one = hardware.accelerator
    peak = hardware.peak_flops(work.products) or hardware.peak_flops("fp32")
    # A fused kernel computes the causal half alone; its backward needs five products where forward needs two.
    causal = 2 * heads * s * s * size / (peak * one.attention_efficiency)
    weights = heads * s * s / 2 * one.attention_pass_ns * 1e-9
    start = one.kernel_us * 1e-6
    return Passes(
        forward=Spent(compute_s=causal + weights + start),
        backward=Spent(compute_s=2.5 * causal + 2 * weights + 2 * start),
    )


def _elementwise(work: Workload) -> Spent:
    """Norms, residuals, dropout, rotation, activation of one block, forward, fused as a compiler does."""
    model, t, n = work.model, work.layout.tensor, work.tokens
    split = t if work.layout.sequence else 1
    stream = n * model.hidden * work.value_bytes / split
    passes = 2 * 2 + 2 * 3 + (2 if model.hidden_dropout > 0.0 else 0)
    inner = n * ffn_width(model) * work.value_bytes / t
    passes_inner = 3 if model.activation == "swiglu" else 2
    rotated = n * (model.hidden + kv_heads(model) * head_size(model)) * work.value_bytes / t
    moved = passes * stream + passes_inner * inner + (2 * rotated if model.position == "rotary" else 0)
    return Spent(memory_s=moving_s(work.hardware, moved, kernels=6))
