"""Attention and the loss's gradient in the native library, for bf16 on CPUs with matrix units (AMX).

torch's own kernels take several times as long there. Legend: b batch, s positions, d head width; n tokens, v
vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bloomery.native import library


class _Vectors(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sample_stride", ctypes.c_int64),
        ("position_stride", ctypes.c_int64),
    )


class _Attention(ctypes.Structure):
    """The arguments of bloomery_attention, see native/include/bloomery.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("samples", "length", "heads", "kv_heads", "width")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("parallel", "cosines", "sines")),
        *((name, _Vectors) for name in ("query", "key", "value", "out")),
        ("log_partition", ctypes.c_void_p),
        *((name, _Vectors) for name in ("out_gradient", "query_gradient", "key_gradient", "value_gradient")),
    )


class _Entropy(ctypes.Structure):
    """The arguments of bloomery_entropy, see native/include/bloomery.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary")),
        ("z_loss", ctypes.c_float),
        ("threads", ctypes.c_int32),
        *(
            (name, ctypes.c_void_p)
            for name in ("parallel", "logits", "targets", "slopes", "cross_entropy", "z")
        ),
    )


@functools.cache
def has_amx() -> bool:
    """Whether the native library is present, and this processor has the units for it."""
    native = library()
    return native is not None and bool(native.bloomery_attention_units())


def supports_attention(qkv: Tensor) -> bool:
    """Whether `causal_attention` can take these arguments, if the processor `has_amx`."""
    return qkv.dtype == torch.bfloat16 and qkv.device.type == "cpu" and qkv.shape[3] % 2 == 0


def causal_attention(qkv: Tensor, *, heads: int, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return [b, s, heads, d] from queries, keys and values [b, s, heads + 2·kv_heads, d], if `attends`.

    rotary: cosines and sines [s, d/2] by which queries and keys are rotated first; None for no rotation.
    Scores and their softmax are fp32, and no bit depends on the number of threads.
    """
    cosines, sines = (None, None) if rotary is None else (part.float() for part in rotary)
    mixed: Tensor = _CausalAttention.apply(qkv, cosines, sines, heads)
    return mixed


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, qkv: Tensor, cosines: Tensor | None, sines: Tensor | None, heads: int
    ) -> Tensor:
        mixed, log_partition = torch.ops.bloomery.attend(qkv, cosines, sines, heads)
        ctx.save_for_backward(qkv, cosines, sines, mixed, log_partition)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        return torch.ops.bloomery.attend_backward(gradient, *ctx.saved_tensors), None, None, None


# They are operators, so that torch.compile leaves them whole; see `layers.py` for why they are made like
# this.
torch.library.define(
    "bloomery::attend",
    "(Tensor qkv, Tensor? cosines, Tensor? sines, int heads) -> (Tensor mixed, Tensor log_partition)",
)
torch.library.define(
    "bloomery::attend_backward",
    "(Tensor gradient, Tensor qkv, Tensor? cosines, Tensor? sines, Tensor mixed, Tensor log_partition)"
    " -> Tensor",
)


@torch.library.impl("bloomery::attend", "default")
def _attend(qkv: Tensor, cosines: Tensor | None, sines: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    mixed, log_partition = _room(qkv, heads)
    qkv = qkv.contiguous()  # a call holds addresses alone: a copy must outlive it
    _run("attend", _call(qkv, cosines, sines, mixed, log_partition))
    return mixed, log_partition


@torch.library.impl("bloomery::attend_backward", "default")
def _attend_backward(
    gradient: Tensor,
    qkv: Tensor,
    cosines: Tensor | None,
    sines: Tensor | None,
    mixed: Tensor,
    log_partition: Tensor,
) -> Tensor:
    gradient, qkv = gradient.contiguous(), qkv.contiguous()
    mixed, log_partition = mixed.contiguous(), log_partition.contiguous()
    slopes = torch.empty_like(qkv)
    call = _call(qkv, cosines, sines, mixed, log_partition)
    call.out_gradient = _vectors(gradient)
    call.query_gradient, call.key_gradient, call.value_gradient = _parts(slopes, mixed.shape[2])
    _run("attend_backward", call)
    return slopes


@torch.library.register_fake("bloomery::attend")  # type: ignore[untyped-decorator]
def _(qkv: Tensor, cosines: Tensor | None, sines: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    return _room(qkv, heads)


@torch.library.register_fake("bloomery::attend_backward")  # type: ignore[untyped-decorator]
def _(
    gradient: Tensor,
    qkv: Tensor,
    cosines: Tensor | None,
    sines: Tensor | None,
    mixed: Tensor,
    log_partition: Tensor,
) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _room(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Allocate the output [b, s, heads, d] and the scores' log-partitions, fp32 [b, heads, s]."""
    samples, length, _, width = qkv.shape
    mixed = qkv.new_empty(samples, length, heads, width)
    return mixed, qkv.new_empty(samples, heads, length, dtype=torch.float32)


def _parts(qkv: Tensor, heads: int) -> tuple[_Vectors, _Vectors, _Vectors]:
    kv_heads = (qkv.shape[2] - heads) // 2
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=2)
    return _vectors(query), _vectors(key), _vectors(value)


def _vectors(heads: Tensor) -> _Vectors:
    return _Vectors(heads.data_ptr(), heads.stride(0), heads.stride(1))


def _call(
    qkv: Tensor, cosines: Tensor | None, sines: Tensor | None, mixed: Tensor, log_partition: Tensor
) -> _Attention:
    samples, length, heads, width = mixed.shape
    query, key, value = _parts(qkv, heads)
    return _Attention(
        samples=samples,
        length=length,
        heads=heads,
        kv_heads=(qkv.shape[2] - heads) // 2,
        width=width,
        scale=width**-0.5,
        threads=torch.get_num_threads(),
        parallel=_parallel(),
        cosines=_table(cosines),
        sines=_table(sines),
        query=query,
        key=key,
        value=value,
        out=_vectors(mixed),
        log_partition=log_partition.data_ptr(),
    )


def _table(part: Tensor | None) -> int | None:
    if part is None:
        return None
    assert part.is_contiguous() and part.dtype == torch.float32, "made so by causal_attention"
    return part.data_ptr()


def entropy_gradient(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return slopes [n, v] in bf16 of the sum of both terms, with each token's cross entropy and z term, fp32
    [n].

    logits: bf16 [n, v] on a CPU that `has_amx`.
    targets: a target outside of the vocabulary counts nothing.
    """
    slopes: tuple[Tensor, Tensor, Tensor] = torch.ops.bloomery.entropy_gradient(logits, targets, z_loss)
    return slopes


torch.library.define(
    "bloomery::entropy_gradient",
    "(Tensor logits, Tensor targets, float z_loss) -> (Tensor slopes, Tensor cross_entropy, Tensor z)",
)


@torch.library.impl("bloomery::entropy_gradient", "default")
def _entropy_gradient(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets = logits.contiguous(), targets.contiguous()
    slopes, cross_entropy, z = _terms(logits)
    call = _Entropy(
        rows=logits.shape[0],
        vocabulary=logits.shape[1],
        z_loss=z_loss,
        threads=torch.get_num_threads(),
        parallel=_parallel(),
        logits=logits.data_ptr(),
        targets=targets.data_ptr(),
        slopes=slopes.data_ptr(),
        cross_entropy=cross_entropy.data_ptr(),
        z=z.data_ptr(),
    )
    _run("slope_entropy", call)
    return slopes, cross_entropy, z


@torch.library.register_fake("bloomery::entropy_gradient")  # type: ignore[untyped-decorator]
def _(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    return _terms(logits)


def _terms(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return logits.new_empty(logits.shape), rows, torch.empty_like(rows)


@functools.cache
def _parallel() -> int | None:
    """Return the address of the function that runs work on torch's threads; None if it is missing.

    Without it one thread computes.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _run(name: str, call: _Attention | _Entropy) -> None:
    native: Any = library()
    assert native is not None, "asked for only where `attends`"
    status = getattr(native, f"bloomery_{name}")(ctypes.byref(call))
    if status == -3:
        raise MemoryError(f"no memory for bloomery_{name}")
    assert status == 0, f"bloomery_{name} returned {status}"
