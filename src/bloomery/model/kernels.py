"""Causal self-attention in the native library, on a CPU's matrix units: torch's own takes six times as long.

Legend: b batch, s positions, d head width.
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
    """bloomery_attention of native/include/bloomery.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("samples", "length", "heads", "kv_heads", "width")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
        *((name, _Vectors) for name in ("query", "key", "value", "out")),
        ("log_partition", ctypes.c_void_p),
        *((name, _Vectors) for name in ("out_gradient", "query_gradient", "key_gradient", "value_gradient")),
    )


@functools.cache
def has_units() -> bool:
    """Whether the native library is there, and this processor has the units for it."""
    native = library()
    return native is not None and bool(native.bloomery_attention_units())


def attends(query: Tensor, key: Tensor) -> bool:
    """Whether `causal_attention` can take these, where the processor `has_units`."""
    suits = query.dtype == torch.bfloat16 and query.device.type == "cpu" and query.shape[3] % 2 == 0
    return suits and query.shape[2] == key.shape[2]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Query [b, heads, s, d], key and value [b, kv_heads, s, d] → [b, heads, s, d], where `attends`.

    Scores and their softmax are fp32, and no bit depends on the number of threads. The result lies in memory
    as [b, s, heads, d].
    """
    mixed: Tensor = _CausalAttention.apply(query, key, value)
    return mixed


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        mixed, log_partition = torch.ops.bloomery.attend(query, key, value)
        ctx.save_for_backward(query, key, value, mixed, log_partition)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.bloomery.attend_backward(
            gradient, *ctx.saved_tensors
        )
        return found


# Operators, so that torch.compile leaves them whole; see `embedding.py` for why they are made like this.
torch.library.define(
    "bloomery::attend", "(Tensor query, Tensor key, Tensor value) -> (Tensor mixed, Tensor log_partition)"
)
torch.library.define(
    "bloomery::attend_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor mixed, Tensor log_partition)"
    " -> (Tensor query, Tensor key, Tensor value)",
)


@torch.library.impl("bloomery::attend", "default")
def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = _readable(query), _readable(key), _readable(value)
    mixed, log_partition = _like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    call = _call(query, key, value, mixed, log_partition)
    _run("attend", call)
    return mixed, log_partition


@torch.library.impl("bloomery::attend_backward", "default")
def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, log_partition: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, mixed = _readable(gradient), _readable(mixed)
    query, key, value = _readable(query), _readable(key), _readable(value)
    slopes = _like(query), _like(key), _like(value)
    call = _call(query, key, value, mixed, log_partition.contiguous())
    call.out_gradient = _vectors(gradient)
    call.query_gradient, call.key_gradient, call.value_gradient = (_vectors(one) for one in slopes)
    _run("attend_backward", call)
    return slopes


@torch.library.register_fake("bloomery::attend")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return _like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.register_fake("bloomery::attend_backward")  # type: ignore[untyped-decorator]
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, log_partition: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(query), _like(key), _like(value)


def _like(heads: Tensor) -> Tensor:
    """Room for [b, heads, s, d], in memory [b, s, heads, d]."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)


def _readable(heads: Tensor) -> Tensor:
    """The same values, each position's heads side by side."""
    if heads.stride(3) == 1 and heads.stride(1) == heads.shape[3]:
        return heads
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _vectors(heads: Tensor) -> _Vectors:
    return _Vectors(heads.data_ptr(), heads.stride(0), heads.stride(2))


def _call(query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, log_partition: Tensor) -> _Attention:
    samples, heads, length, width = query.shape
    return _Attention(
        samples=samples,
        length=length,
        heads=heads,
        kv_heads=key.shape[1],
        width=width,
        scale=width**-0.5,
        threads=torch.get_num_threads(),
        parallel=_parallel(),
        query=_vectors(query),
        key=_vectors(key),
        value=_vectors(value),
        out=_vectors(mixed),
        log_partition=log_partition.data_ptr(),
    )


@functools.cache
def _parallel() -> int | None:
    """Where torch's own threads are asked to work; None: they cannot be found, and one thread computes."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


def _run(name: str, call: _Attention) -> None:
    native: Any = library()
    assert native is not None, "asked for only where `attends`"
    status = getattr(native, f"bloomery_{name}")(ctypes.byref(call))
    if status == -3:
        raise MemoryError(f"no memory for {name} of {call.length} positions")
    assert status == 0, f"bloomery_{name} returned {status}"
