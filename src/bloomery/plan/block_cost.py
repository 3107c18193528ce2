"""Predicts the seconds that blocks, embedding and head take on one rank, by the roofline of each operation.

Times are of one micro-batch, forward and backward; only `muon_s` is of a whole step. Work that tensor
parallelism splits is divided by t; norms and residuals are divided only under sequence parallelism. The time
of single operations (matmuls, passes over memory, collectives) comes from the hardware file.

A matmul reaches `matmul_efficiency` of the peak when it is large, and loses half of that for each side that
is as short as `matmul_half_size` (tiles that are not filled, waves that do not cover the chip). It is never
faster than the memory that it reads, nor than the start of a kernel (the roofline of Williams et al., 2009).

Legend: n tokens of a micro-batch, s sequence length, h hidden size, t tensor-parallel degree.
"""

from __future__ import annotations

from bloomery.config.model import ModelSection
from bloomery.frozen import dataclass
from bloomery.plan.hardware import Hardware
from bloomery.plan.layout import Layout
from bloomery.plan.parameters import ffn_width, head_size, kv_heads, query_width

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""The bytes of one value that flows between operations; only matmuls use fp8."""
FP8_SPEEDS = {"tensor": 1.0, "row": 0.95, "block": 0.75, "mx": 0.95}
"""The speed of products in 8 bits by what shares a scale (`train.fp8_scaling`), rounding included, as a share
of the speed with one scale a tensor: the middle of what docs/notes/gpu.md predicts, and not measured.
"""
WIDEST_TILED_HEAD = 128
"""The widest attention head that the kernels for GPUs compute (`model/fused_attention.py`)."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The seconds of some work, by what bounds it. Values can be added, and multiplied by a number."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    tensor_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        """Return the time of both, one after the other."""
        return Spent(
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
            tensor_s=self.tensor_s + other.tensor_s,
        )

    def __mul__(self, times: float) -> Spent:
        """Return the time of doing it `times` times."""
        return Spent(
            compute_s=self.compute_s * times, memory_s=self.memory_s * times, tensor_s=self.tensor_s * times
        )

    @property
    def total_s(self) -> float:
        """The time of all of it, if nothing overlaps."""
        return self.compute_s + self.memory_s + self.tensor_s


def matmul_s(
    hardware: Hardware, precision: str, *, rows: float, columns: float, inner: float, count: float = 1.0
) -> float:
    """Return the seconds of `count` matmuls [rows, inner] × [inner, columns] in one kernel."""
    accelerator = hardware.accelerator
    half = accelerator.matmul_half_size
    shape = rows / (rows + half) * columns / (columns + half) * inner / (inner + half)
    peak = hardware.peak_flops(precision) or hardware.peak_flops("bf16") or hardware.peak_flops("fp16")
    if not peak:
        peak = hardware.peak_flops("fp32")
    width = BYTES.get(precision, 2)
    share = accelerator.fp8_efficiency if precision == "fp8" else accelerator.matmul_efficiency
    moved = count * width * (rows * inner + inner * columns + rows * columns)
    arithmetic = 2 * count * rows * columns * inner / (peak * share * shape)
    return max(arithmetic, moved / hardware.memory_bytes_per_s) + accelerator.kernel_us * 1e-6


def moving_s(hardware: Hardware, moved_bytes: float, *, kernels: int = 1) -> float:
    """Return the seconds of elementwise work that reads and writes `moved_bytes` bytes."""
    return moved_bytes / hardware.memory_bytes_per_s + kernels * hardware.accelerator.kernel_us * 1e-6


def ring_bytes(size: float, ranks: int, *, passes: int) -> float:
    """Return the bytes that each rank sends in a collective of `size` bytes.

    passes: 1 for reduce_scatter or all_gather, 2 for all_reduce.
    """
    return passes * (ranks - 1) / ranks * size


def ring_s(hardware: Hardware, size: float, ranks: int, *, passes: int, per_node: int, sharing: int) -> float:
    """Return the seconds of a ring collective over `ranks` ranks.

    per_node: number of these ranks on each machine.
    sharing: number of groups that use one machine's network at the same time. Inside a machine each
    accelerator has a link of its own.
    """
    if ranks <= 1:
        return 0.0
    sent = ring_bytes(size, ranks, passes=passes)
    inside = sent / hardware.link_bytes_per_s if per_node > 1 and hardware.link_bytes_per_s else 0.0
    hops = passes * (ranks - 1)
    if ranks <= per_node:
        return inside + hops * hardware.node.link_us * 1e-6
    return (
        max(inside, sent * sharing / internode_bytes_per_s(hardware))
        + hops * hardware.network.latency_us * 1e-6
    )


def internode_bytes_per_s(hardware: Hardware) -> float:
    """Return the bytes/s that one machine sends to others; without a network, those of its links."""
    return hardware.network_bytes_per_s or hardware.link_bytes_per_s or 1e9


ACCUMULATION_BYTES = 10
"""The bytes moved for each parameter and micro-batch: its gradient is read, and added to an fp32 sum."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one rank: a model, its micro-batch, a layout, a precision and a machine. Hashable."""

    model: ModelSection
    vocabulary: int
    sequence_length: int
    micro_batch: int
    precision: str
    layout: Layout
    hardware: Hardware
    muon_iterations: int = 0
    """Muon's iterations at each step's update; 0 if AdamW updates everything."""
    masks_documents: bool = False
    """Whether a token attends only within its document."""
    fp8_scaling: str = "tensor"
    """What shares a scale in matmuls of 8 bits."""

    @property
    def tokens(self) -> int:
        """The tokens of one micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def value_bytes(self) -> int:
        """The bytes of one activation."""
        return BYTES[self.precision]

    @property
    def matmul_precision(self) -> str:
        """The precision of matmuls other than the blocks' linear layers, which alone are computed in fp8."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def forms_scores(self) -> bool:
        """Whether attention weights are written to memory: where they are dropped, and not by a kernel on the
        chip (`model/fused_attention.py`).
        """
        return self.model.attention_dropout > 0.0 and not self.attends_by_tiles

    @property
    def forms_mask(self) -> bool:
        """Whether attention adds or applies a mask that is in memory (`model/decoder.py`)."""
        needs_mask = self.model.position == "alibi" or self.model.attention_dropout > 0.0
        return (needs_mask or self.masks_documents) and not self.attends_by_tiles

    @property
    def attends_by_tiles(self) -> bool:
        """Whether attention scores stay on the chip, in tiles (`model/fused_attention.py`)."""
        return self.has_gpu_kernels and head_size(self.model) <= WIDEST_TILED_HEAD

    @property
    def overlaps_products(self) -> bool:
        """Whether exchanges of blocks overlap the products beside them (`parallel/overlapped_linear.py`)."""
        return self.layout.async_tensor and self.hardware.accelerator.kind == "gpu"

    @property
    def has_gpu_kernels(self) -> bool:
        """Whether the kernels for GPUs compute attention (`model/fused_attention.py`) and the gradient of the
        loss (`model/loss.py`). They take values of 16 bits only.
        """
        return self.hardware.accelerator.kind == "gpu" and self.value_bytes < 4


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The seconds of the forward and the backward pass of one part of the model."""

    forward: Spent
    backward: Spent


def block_passes(work: Workload) -> Passes:
    """Return the passes of one decoder block."""
    linear = _linears(work)
    attention = _attention(work)
    elementwise = elementwise_pass(work)
    exchange_s = 2 * _tensor_exchange_s(work)
    forward = linear.forward + attention.forward + elementwise
    forward += Spent(tensor_s=_exposed_exchange_s(work, exchange_s, beside_s=linear.forward.compute_s))
    backward = linear.backward + attention.backward + elementwise * 2.0
    # Of a backward's two products the one by inputs is in one operator with its exchange.
    backward += Spent(tensor_s=_exposed_exchange_s(work, exchange_s, beside_s=linear.backward.compute_s / 2))
    return Passes(forward=forward, backward=backward)


def attention_passes(work: Workload) -> Passes:
    """Return the passes of one block's attention, which selective recomputation repeats."""
    return _attention(work)


def embedding_passes(work: Workload) -> Passes:
    """Return the passes of the embedding, which scatters gradients in the backward pass."""
    moved = 2 * work.tokens * work.model.hidden * work.value_bytes
    exchange = _tensor_exchange_s(work)
    return Passes(
        forward=Spent(memory_s=moving_s(work.hardware, moved), tensor_s=exchange),
        backward=Spent(memory_s=moving_s(work.hardware, 2 * moved)),
    )


def head_passes(work: Workload) -> Passes:
    """Return the passes of the head: logits, softmax and loss, and their gradients."""
    hardware, n, h = work.hardware, work.tokens, work.model.hidden
    columns = -(-work.vocabulary // work.layout.tensor)
    product = matmul_s(hardware, work.matmul_precision, rows=n, columns=columns, inner=h)
    logits = n * columns
    softmax = moving_s(hardware, logits * (4 * 4 + 3 * work.value_bytes), kernels=6)
    softmax += logits * hardware.accelerator.exponential_ns * 1e-9
    back = matmul_s(hardware, work.matmul_precision, rows=n, columns=h, inner=columns)
    back += matmul_s(hardware, work.matmul_precision, rows=columns, columns=h, inner=n)
    return Passes(
        forward=Spent(compute_s=product, memory_s=softmax),
        backward=Spent(compute_s=back, tensor_s=_tensor_exchange_s(work)),
    )


def accumulation_s(work: Workload, parameters: float) -> float:
    """Return the seconds that adding one micro-batch's gradients to their fp32 sums takes."""
    return moving_s(work.hardware, ACCUMULATION_BYTES * parameters)


def muon_s(work: Workload, blocks: float) -> float:
    """Return the seconds of Muon's orthogonalisation in one step: three matmuls per matrix and iteration."""
    model, hardware = work.model, work.hardware
    narrow, gates = kv_heads(model) * head_size(model), 2 if model.activation == "swiglu" else 1
    hidden, t = model.hidden, work.layout.tensor
    shapes = [(query_width(model), hidden, 2), (narrow, hidden, 2), (ffn_width(model), hidden, gates + 1)]
    spent = 0.0
    for rows, columns, each in shapes:
        small, large = min(rows, columns), max(rows, columns)
        count = blocks * each / t
        wide = matmul_s(hardware, work.matmul_precision, rows=small, columns=small, inner=large, count=count)
        square = matmul_s(
            hardware, work.matmul_precision, rows=small, columns=small, inner=small, count=count
        )
        spent += work.muon_iterations * (2 * wide + square)
    return spent


def residual_bytes(work: Workload) -> float:
    """Return the bytes of the residual stream, which tensor parallelism reduces."""
    return work.tokens * work.model.hidden * work.value_bytes


def _tensor_exchange_s(work: Workload) -> float:
    layout = work.layout
    return ring_s(
        work.hardware,
        residual_bytes(work),
        layout.tensor,
        passes=2,
        per_node=min(layout.tensor, layout.per_node),
        sharing=1,
    )


def _exposed_exchange_s(work: Workload, moved_s: float, *, beside_s: float) -> float:
    """Return the seconds of an exchange that its products do not hide (`parallel/overlapped_linear.py`).

    A product is divided by ranks, and the part of one of the t ranks is exchanged beside none.
    beside_s: seconds of these products.
    """
    if not work.overlaps_products:
        return moved_s
    hidden_s = work.hardware.node.overlap * beside_s
    return max(moved_s - hidden_s, moved_s / work.layout.tensor)


def _linears(work: Workload) -> Passes:
    model, t, n = work.model, work.layout.tensor, work.tokens
    hidden, ffn = model.hidden, ffn_width(model)
    heads_and_values = query_width(model) + 2 * kv_heads(model) * head_size(model)
    gates = 2 if model.activation == "swiglu" else 1
    shapes = [
        (heads_and_values / t, hidden),
        (hidden, query_width(model) / t),
        (gates * ffn / t, hidden),
        (hidden, ffn / t),
    ]
    forward = backward = 0.0
    for columns, inner in shapes:
        forward += _linear_s(work, rows=n, columns=columns, inner=inner)
        backward += _linear_s(work, rows=n, columns=inner, inner=columns)
        backward += _linear_s(work, rows=columns, columns=inner, inner=n)
    return Passes(forward=Spent(compute_s=forward), backward=Spent(compute_s=backward))


def _linear_s(work: Workload, *, rows: float, columns: float, inner: float) -> float:
    """Return the seconds of one product of a block's linear layer, with what rounds its factors to 8 bits."""
    seconds = matmul_s(work.hardware, work.precision, rows=rows, columns=columns, inner=inner)
    return seconds / FP8_SPEEDS[work.fp8_scaling] if work.precision == "fp8" else seconds


def expansion(work: Workload) -> Spent:
    """Return the cost of the MLP's first product, which 'mlp' recomputation repeats, and of its input's
    gather under sequence parallelism; where exchanges overlap products also of the last, with its scatter.
    """
    gates = 2 if work.model.activation == "swiglu" else 1
    wide = gates * ffn_width(work.model) / work.layout.tensor
    product = _linear_s(work, rows=work.tokens, columns=wide, inner=work.model.hidden)
    gather = _tensor_exchange_s(work) / 2 if work.layout.sequence else 0.0
    if work.overlaps_products:
        inner = ffn_width(work.model) / work.layout.tensor
        product += _linear_s(work, rows=work.tokens, columns=work.model.hidden, inner=inner)
        gather = _exposed_exchange_s(work, 2 * gather, beside_s=product)
    return Spent(compute_s=product, tensor_s=gather)


def _attention(work: Workload) -> Passes:
    hardware, model, s = work.hardware, work.model, work.sequence_length
    heads = work.micro_batch * model.heads / work.layout.tensor
    size = head_size(model)
    if work.forms_scores:
        scores = matmul_s(hardware, work.matmul_precision, rows=s, columns=s, inner=size, count=heads)
        mixed = matmul_s(hardware, work.matmul_precision, rows=s, columns=size, inner=s, count=heads)
        moved = heads * s * s * work.value_bytes
        return Passes(
            forward=Spent(compute_s=scores + mixed, memory_s=moving_s(hardware, 6 * moved, kernels=3)),
            backward=Spent(compute_s=2 * (scores + mixed), memory_s=moving_s(hardware, 8 * moved, kernels=4)),
        )
    accelerator = hardware.accelerator
    peak = hardware.peak_flops(work.matmul_precision) or hardware.peak_flops("fp32")
    # A fused kernel computes the causal half only; its backward needs five matmuls where forward needs two.
    causal = 2 * heads * s * s * size / (peak * accelerator.attention_efficiency)
    weights = heads * s * s / 2 * accelerator.attention_pass_ns * 1e-9
    start = accelerator.kernel_us * 1e-6
    return Passes(
        forward=Spent(compute_s=causal + weights + start),
        backward=Spent(compute_s=2.5 * causal + 2 * weights + 2 * start),
    )


def elementwise_pass(work: Workload) -> Spent:
    """Return the cost of one block's norms, residuals, dropout, rotation and activation, forward, fused as
    a compiler fuses them.
    """
    model, t, n = work.model, work.layout.tensor, work.tokens
    split = t if work.layout.sequence else 1
    stream = n * model.hidden * work.value_bytes / split
    passes = 2 * 2 + 2 * 3 + (2 if model.hidden_dropout > 0.0 else 0)
    inner = n * ffn_width(model) * work.value_bytes / t
    passes_inner = 3 if model.activation == "swiglu" else 2
    rotated = n * (query_width(model) + kv_heads(model) * head_size(model)) * work.value_bytes / t
    moved = passes * stream + passes_inner * inner + (2 * rotated if model.position == "rotary" else 0)
    return Spent(memory_s=moving_s(work.hardware, moved, kernels=6))
