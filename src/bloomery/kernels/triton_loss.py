"""The Triton kernels that write the cross entropy's gradient over the logits, whole or split by columns.

Legend: n tokens, v vocabulary, tp ranks that each hold some columns of the logits, v/tp columns of one rank,
padding included.

Import this module only where `available.has_triton()`.
"""

# No `from __future__ import annotations`: Triton reads the annotations of its kernels.
import triton
import triton.language as tl
from torch import Tensor


def write_loss_gradient(
    logits: Tensor, targets: Tensor, z_loss: float, cross_entropy: Tensor, z: Tensor
) -> None:
    """Replace logits [n, v] by the gradient of the summed loss by them, and write each token's two terms.

    targets: int64 [n]; a token with a negative one counts nothing.
    cross_entropy, z: fp32 [n], written.
    """
    rows, vocabulary = logits.shape
    _write_slopes[(rows,)](
        logits, targets, cross_entropy, z, logits.stride(0), z_loss,
        VOCABULARY=vocabulary, **_block(vocabulary),
    )  # fmt: skip


def measure_logits(logits: Tensor, targets: Tensor, rows: range, own: Tensor) -> None:
    """Write what a rank's logits [n, v/tp] tell the others to `own`, fp32 [2, n], contiguous.

    v/tp is a multiple of 8 (`padded_rows`), so that threads read eight logits at once. What is told is the
    log-partition of this rank's columns, and the target's logit where that is among them, else 0.
    rows: the rows of the vocabulary that these columns stand for; further columns are padding.
    """
    assert logits.stride(0) % 8 == 0, "a rank's part of the vocabulary is padded"
    _measure_rows[(logits.shape[0],)](
        logits, targets, own, logits.stride(0), logits.shape[0], rows.start,
        OWN=len(rows), WIDTH=logits.shape[1], **_block(logits.shape[1]),
    )  # fmt: skip


def write_split_gradient(
    logits: Tensor, targets: Tensor, rows: range, told: Tensor, z_loss: float, terms: Tensor
) -> None:
    """Replace logits [n, v/tp] by the gradient of the summed loss by them, and write each token's two terms.

    rows: see `measure_logits`; padding's gradient is 0. told: what all ranks measured, fp32 [tp, 2, n],
    contiguous. terms: fp32 [2, n], written: cross entropy and z term.
    """
    ranks, width = told.shape[0], logits.shape[1]
    _write_split_slopes[(logits.shape[0],)](
        logits, targets, told, terms[0], terms[1], logits.stride(0), logits.shape[0], rows.start, z_loss,
        OWN=len(rows), WIDTH=width, RANKS=ranks, PADDED=triton.next_power_of_2(ranks), **_block(width),
    )  # fmt: skip


def _block(columns: int) -> dict[str, int]:
    """Return how many columns a program reads at once, and by how many warps."""
    block = min(8192, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": 8 if block > 2048 else 4}


@triton.jit
def _write_slopes(
    logits, targets, cross_entropy, z, row_stride, z_loss, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    """Treat one token: a pass over its logits for their log-partition, and one that writes the gradient."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    target = tl.load(targets + row)
    counts = target >= 0
    # Read before the first reduction, which all threads of the program wait for, and so before it is written.
    target_logit = tl.load(line + target, mask=counts, other=0.0).to(tl.float32)
    log_partition = _log_partition(line, VOCABULARY, VOCABULARY, BLOCK)
    tl.store(cross_entropy + row, tl.where(counts, log_partition - target_logit, 0.0))
    tl.store(z + row, tl.where(counts, z_loss * log_partition * log_partition, 0.0))
    pull = tl.where(counts, 1.0 + 2.0 * z_loss * log_partition, 0.0)
    for first in range(0, VOCABULARY, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        exists = columns < VOCABULARY
        part = tl.load(line + columns, mask=exists, other=0.0).to(tl.float32)
        slope = tl.exp(part - log_partition) * pull - tl.where(columns == target, 1.0, 0.0)
        tl.store(line + columns, slope.to(logits.dtype.element_ty), mask=exists)


@triton.jit
def _log_partition(line, OWN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the log of the sum of exponentials of a token's first OWN logits, in one pass over all WIDTH.

    Padding is loaded too, since a width that is a multiple of 8 lets threads read several logits at once.
    """
    largest = -float("inf")
    total = 0.0
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        part = tl.load(line + columns, mask=columns < WIDTH, other=-float("inf")).to(tl.float32)
        part = tl.where(columns < OWN, part, -float("inf"))
        higher = tl.maximum(largest, tl.max(part, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(part - higher), 0)
        largest = higher
    return largest + tl.log(total)


@triton.jit
def _measure_rows(
    logits, targets, own, row_stride, tokens, start,
    OWN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Treat one token: the log-partition of this rank's columns, and the target's logit if it has that."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + tl.multiple_of(row * row_stride, 8)
    column = tl.load(targets + row) - start
    is_own = (column >= 0) & (column < OWN)
    target_logit = tl.load(line + column, mask=is_own, other=0.0).to(tl.float32)
    tl.store(own + row, _log_partition(line, OWN, WIDTH, BLOCK))
    tl.store(own + tokens + row, target_logit)


@triton.jit
def _write_split_slopes(
    logits, targets, told, cross_entropy, z, row_stride, tokens, start, z_loss,
    OWN: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Treat one token: put together what the ranks measured, and write the gradient over its logits."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + tl.multiple_of(row * row_stride, 8)
    target = tl.load(targets + row)
    counts = target >= 0
    column = target - start
    column = tl.where((column >= 0) & (column < OWN), column, -1)
    ranks = tl.arange(0, PADDED)
    measured = told + 2 * ranks * tokens + row
    parts = tl.load(measured, mask=ranks < RANKS, other=-float("inf"))
    target_logit = tl.sum(tl.load(measured + tokens, mask=ranks < RANKS, other=0.0), 0)
    largest = tl.max(parts, 0)
    log_partition = largest + tl.log(tl.sum(tl.exp(parts - largest), 0))
    tl.store(cross_entropy + row, tl.where(counts, log_partition - target_logit, 0.0))
    tl.store(z + row, tl.where(counts, z_loss * log_partition * log_partition, 0.0))
    pull = tl.where(counts, 1.0 + 2.0 * z_loss * log_partition, 0.0)
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        exists = columns < WIDTH
        part = tl.load(line + columns, mask=exists, other=0.0).to(tl.float32)
        part = tl.where(columns < OWN, part, -float("inf"))  # padding has no probability
        slope = tl.exp(part - log_partition) * pull - tl.where(columns == column, 1.0, 0.0)
        tl.store(line + columns, slope.to(logits.dtype.element_ty), mask=exists)
