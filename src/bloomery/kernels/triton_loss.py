"""The Triton kernel that writes the cross entropy's gradient over the logits.

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
    block = min(8192, triton.next_power_of_2(vocabulary))
    _write_slopes[(rows,)](
        logits, targets, cross_entropy, z, logits.stride(0), z_loss,
        VOCABULARY=vocabulary, BLOCK=block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip


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
    largest = -float("inf")
    total = 0.0
    for first in range(0, VOCABULARY, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        part = tl.load(line + columns, mask=columns < VOCABULARY, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(part, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(part - higher), 0)
        largest = higher
    log_partition = largest + tl.log(total)
    tl.store(cross_entropy + row, tl.where(counts, log_partition - target_logit, 0.0))
    tl.store(z + row, tl.where(counts, z_loss * log_partition * log_partition, 0.0))
    pull = tl.where(counts, 1.0 + 2.0 * z_loss * log_partition, 0.0)
    for first in range(0, VOCABULARY, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        exists = columns < VOCABULARY
        part = tl.load(line + columns, mask=exists, other=0.0).to(tl.float32)
        slope = tl.exp(part - log_partition) * pull - tl.where(columns == target, 1.0, 0.0)
        tl.store(line + columns, slope.to(logits.dtype.element_ty), mask=exists)
