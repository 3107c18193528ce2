"""Measures which kernel computes plain causal attention the quickest, and has torch use it.

Which of torch's kernels (cuDNN's, flash, memory-efficient) or our own is the quickest depends on the sizes
and on the GPU. torch has an order of its own and measures nothing.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.compiler.config
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bloomery.model.attention import Attention
from bloomery.model.decoder import Decoder
from bloomery.model.fused_attention import Visibility, supports_tiled_attention, tiled_attention

MEASURED = ("cudnn", "flash", "efficient", "triton")
"""The kernels of a GPU that hold no scores in memory."""
REPEATABLE = ("flash", "efficient", "triton", "math")
"""The kernels whose backward can give the same bits each time, in the order in which they are tried. torch
refuses cuDNN's where deterministic kernels are wanted.
"""
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Timer = Callable[[Callable[[], None]], float]
"""Returns the seconds that a function takes on the device."""


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """What a rank's attention computes in one micro-batch.

    samples: of a micro-batch. heads, kv_heads: those of this rank. length: tokens of a sample. width: of a
    head. dtype: of queries, keys and values.
    """

    samples: int
    heads: int
    kv_heads: int
    length: int
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.samples} × {self.length} tokens, {self.heads} heads of queries "
            f"and {self.kv_heads} of keys of {self.width}, {kind}"
        )


def measure(
    kernels: Sequence[str],
    sizes: AttentionSizes,
    device: torch.device,
    *,
    time_s: Timer,
    on_progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of a forward and backward by each kernel that can run, and why others cannot.

    on_progress: called after each kernel; the first call of a kernel may compile it for some seconds.
    """
    seconds: dict[str, float] = {}
    refusals: dict[str, str] = {}
    for kernel in kernels:
        refusal = refusal_of(kernel, sizes, device)
        if refusal:
            refusals[kernel] = refusal
        else:
            with attention_kernel(kernel, alone=True):
                seconds[kernel] = time_s(forward_and_backward(kernel, sizes, device))
        on_progress()
    return seconds, refusals


def quickest(seconds: Mapping[str, float]) -> str:
    """Return the kernel that took the least time; 'math', which runs everywhere, where none was measured."""
    return min(seconds, key=lambda kernel: seconds[kernel], default="math")


def refusal_of(kernel: str, sizes: AttentionSizes, device: torch.device) -> str:
    """Return why `kernel` cannot compute attention of these sizes here, as it says itself; '' if it can."""
    if kernel == "triton" and not supports_tiled_attention(device, sizes.dtype, sizes.width):
        return "needs a GPU with Triton, bf16 or fp16, and heads of at most 128"
    if device.type == "cpu" and kernel in ("cudnn", "efficient"):
        return "needs a GPU"
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            with attention_kernel(kernel, alone=True):
                forward_and_backward(kernel, sizes, device)()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as error:  # what torch raises for sizes that a kernel does not know
            # torch warns of what it misses, kernel by kernel, and the error says only that none is left.
            told = [*(str(reason.message) for reason in reasons), str(error)]
            return " ".join(text.partition("\n")[0].partition(" (Triggered")[0] for text in told)
    return ""


def forward_and_backward(kernel: str, sizes: AttentionSizes, device: torch.device) -> Callable[[], None]:
    """Return a function that computes attention of random numbers and its gradients once.

    The tensors lie in memory as those of `Attention` do: heads of queries, keys and values side by side.
    """
    parts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    shape = (sizes.samples, sizes.length, sum(parts), sizes.width)
    qkv = torch.randn(shape, device=device, dtype=sizes.dtype, requires_grad=True)
    gradient = torch.randn_like(qkv[:, :, : sizes.heads])

    def run() -> None:
        query, key, value = qkv.split(parts, dim=2)
        if kernel == "triton":
            mixed = tiled_attention(query, key, value, Visibility(starts=None, ends=None, slopes=None))
        else:
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                is_causal=True,
                enable_gqa=sizes.heads != sizes.kv_heads,
            ).transpose(1, 2)
        torch.autograd.grad(mixed, qkv, gradient)

    return run


WARM_UPS, REPETITIONS = 2, 5


def device_time_s(run: Callable[[], None]) -> float:
    """Return the median of a few calls of `run` in seconds, by the clock of the current GPU."""
    for _ in range(WARM_UPS):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(before.elapsed_time(after) / 1e3 for before, after in pairwise(marks))


@contextmanager
def attention_kernel(kernel: str, *, alone: bool = False) -> Iterator[None]:
    """Have torch compute attention by `kernel` until the end, in all threads and compiled code.

    kernel: one of `BACKENDS`; '' and 'triton' change nothing.
    alone: whether torch raises where this kernel cannot run. Otherwise it takes another for sizes that this
        one does not know, as of held-out text.
    torch decides while it compiles, so code that was compiled before keeps its kernel. What it compiled in
    earlier processes it finds by a key that does not tell of the kernel, so that is added.
    """
    if kernel not in BACKENDS:
        yield
        return
    caches = torch.compiler.config
    tag = caches.cache_key_tag
    others = (
        [] if alone or kernel == "math" else [BACKENDS[other] for other in ("flash", "efficient", "math")]
    )
    with sdpa_kernel([BACKENDS[kernel], *others], set_priority=True):
        caches.cache_key_tag = f"{tag} attention={kernel}"
        try:
            yield
        finally:
            caches.cache_key_tag = tag


def use_attention(decoder: Decoder, kernel: str) -> None:
    """Have `decoder` compute plain causal attention as `kernel` says, as far as torch does not decide.

    kernel: '' for what the device does best; with another name our kernel for CPUs with AMX is left out.
    """
    decoder.tiles_plain_attention = kernel == "triton"
    for module in decoder.modules():
        if isinstance(module, Attention) and kernel:
            module.has_units = False
