"""Quantizes float32 arrays for the all_reduce between peers: int8 or int4 with a scale per block, bf16.

The native library, whose functions for the codec and the ring are declared first, and the NumPy code here
give equal bytes. A block of int8 is its scale (fp32, largest / 127) and 512 codes; of int4 its scale
(largest / 7) and 128 codes in 64 bytes, byte j holding value j in its low nibble and value j + 64 in its high
one. The last block may be shorter. Codes are rounded to nearest, ties to even. A block whose values are all
below 2^-100 is sent as zeros.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
from ctypes import c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery.native import library

TEXT_BYTES = 256

_ARGUMENTS: dict[str, tuple[type[Any], ...]] = {
    "encode": (c_int32, c_void_p, c_int64, c_int32, c_void_p),
    "decode": (c_int32, c_void_p, c_int64, c_int32, c_void_p),
    "accumulate": (c_int32, c_void_p, c_int64, c_int32, c_void_p),
    "largest": (c_void_p, c_int64, c_int32, c_void_p),
    "siphash128": (c_char_p, c_char_p, c_int64, c_void_p),
    "seal_frame": (c_char_p, c_uint64, c_void_p),
    "ring_create": (c_void_p,),
    "ring_all_reduce": (c_void_p, c_void_p, c_void_p),
    "ring_grace": (c_void_p, c_double),
    "ring_cancel": (c_void_p,),
    "ring_destroy": (c_void_p,),
}


class RingOptions(ctypes.Structure):
    """The C structure `bloomery_ring_options`: what a ring is created with."""

    _fields_ = (
        ("size", c_uint32),
        ("index", c_int32),
        ("members", c_int32),
        ("streams", c_int32),
        ("codec", c_int32),
        ("lane", c_int32),
        ("threads", c_int32),
        ("gather", c_int32),
        ("chunk", c_int64),
        ("next", c_void_p),
        ("previous", c_void_p),
        ("send_keys", c_void_p),
        ("receive_keys", c_void_p),
    )


class RingCall(ctypes.Structure):
    """The C structure `bloomery_ring_call`: the arguments of one all_reduce."""

    _fields_ = (
        ("size", c_uint32),
        ("weight", c_float),
        ("values", c_void_p),
        ("out", c_void_p),
        ("residual", c_void_p),
        ("count", c_int64),
        ("round", c_uint64),
        ("epoch", c_uint64),
        ("stall_s", c_double),
        ("deadline_s", c_double),
        ("rate_limit_bytes_s", c_double),
    )


class RingReport(ctypes.Structure):
    """The C structure `bloomery_ring_report`: what an all_reduce fills in."""

    _fields_ = (
        ("size", c_uint32),
        ("kind", c_int32),
        ("culprit", c_int32),
        ("reserved", c_int32),
        ("sent_bytes", c_int64),
        ("received_bytes", c_int64),
        ("seconds", c_double),
        ("blocked_s", c_double),
        ("delivered_bytes", c_int64),
        ("lost_bytes", c_int64),
        ("best_bytes_s", c_double),
        ("text", c_char * TEXT_BYTES),
    )


@functools.cache
def functions() -> dict[str, Any]:
    """Return each function by its name without `bloomery_`; an empty dict if the library was not built.

    A library that was built earlier lacks those that were added since.
    """
    native_library = library()
    callables = {}
    for name, types in _ARGUMENTS.items() if native_library else ():
        function = getattr(native_library, f"bloomery_{name}", None)
        if function is None:
            continue
        function.argtypes = types
        function.restype = c_void_p if name == "ring_create" else c_int32
        callables[name] = function
    return callables


Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LARGEST = np.float32(2.0**120)
"""The largest magnitude that any codec sends."""
TINY = np.float32(2.0**-100)
"""A block whose largest magnitude is below this is sent as zeros."""


class Codec(enum.StrEnum):
    """The number format in which values are sent."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def number(self) -> int:
        """The codec's number in the native library and in the frames on the wire."""
        return list(Codec).index(self)

    @property
    def block(self) -> int:
        """How many values share a scale; 1 where there is none."""
        return {Codec.INT8: 512, Codec.INT4: 128}.get(self, 1)


def encoded_size(count: int, codec: str) -> int:
    """Return the size of `count` encoded values, in bytes."""
    match Codec(codec):
        case Codec.FP32:
            return 4 * count
        case Codec.BF16:
            return 2 * count
        case Codec.INT8:
            return count + 4 * -(-count // 512)
        case Codec.INT4:
            blocks, remainder = divmod(count, 128)
            return 68 * blocks + (4 + (remainder + 1) // 2 if remainder else 0)


def encode(values: Float32, codec: str, *, threads: int | None = None) -> Bytes:
    """Return the encoded bytes of an array, which is flattened.

    threads: of the native library; None: one per core. Raises ValueError if a value is not finite or its
    magnitude is above 2^120.
    """
    kind = Codec(codec)
    values = _flat(values)
    out = np.empty(encoded_size(values.size, kind), np.uint8)
    if native := functions().get("encode"):
        status = native(kind.number, values.ctypes.data, values.size, _threads(threads), out.ctypes.data)
        if status == 0:
            return out
    elif bool(np.all(np.abs(values) <= LARGEST)):
        return _encode(values, kind)
    raise ValueError("a value is not finite, or beyond 2^120")


def decode(
    encoded: Bytes | bytes | memoryview, codec: str, out: Float32, *, threads: int | None = None
) -> None:
    """Decode into `out`, a contiguous float32 array.

    Raises ValueError if the number of bytes does not fit `out`, or a decoded value is not finite or above
    2^127.
    """
    kind = Codec(codec)
    source = np.frombuffer(encoded, np.uint8)
    if not (out.flags.c_contiguous and out.dtype == np.float32 and out.flags.writeable):
        raise ValueError("values are decoded into a contiguous float32 array")
    if source.size != encoded_size(out.size, kind):
        raise ValueError(f"{source.size} bytes are not {out.size} values of {kind}")
    if native := functions().get("decode"):
        is_finite = native(kind.number, source.ctypes.data, out.size, _threads(threads), out.ctypes.data) == 0
    else:
        flat = out.reshape(-1)
        flat[:] = _decode(source, kind, out.size)
        is_finite = bool(np.all(np.abs(flat) <= 128 * LARGEST))
    if not is_finite:
        raise ValueError("a decoded value is not finite, or too large")


def largest_magnitude(values: Float32) -> float:
    """Return the largest magnitude of the values; inf or NaN if a value is inf or NaN."""
    values = _flat(values)
    if native := functions().get("largest"):
        bits = np.zeros(1, np.uint32)
        native(values.ctypes.data, values.size, _threads(None), bits.ctypes.data)
        return float(bits.view(np.float32)[0])
    return float(np.abs(values).max(initial=0.0))


def _flat(values: Float32) -> Float32:
    if values.dtype != np.float32:
        raise ValueError(f"values are float32, not {values.dtype}")
    return np.ascontiguousarray(values).reshape(-1)


def _threads(threads: int | None) -> int:
    return len(os.sched_getaffinity(0)) if threads is None else threads


def _encode(values: Float32, kind: Codec) -> Bytes:
    match kind:
        case Codec.FP32:
            return values.view(np.uint8).copy()
        case Codec.BF16:
            bits = values.view(np.uint32)
            rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
            return rounded.astype(np.uint16).view(np.uint8)
        case Codec.INT8:
            scales, codes = _codes(values, 512, 127.0)
            joined = np.concatenate([scales, codes.view(np.uint8)], axis=1)
            return np.ascontiguousarray(joined).reshape(-1)[: encoded_size(values.size, kind)]
        case Codec.INT4:
            whole = values.size // 128 * 128
            return np.concatenate(
                [_encode_int4(values[:whole], 128), _encode_int4(values[whole:], values.size - whole)]
            )


def _encode_int4(values: Float32, block: int) -> Bytes:
    if not values.size:
        return np.empty(0, np.uint8)
    scales, codes = _codes(values, block, 7.0)
    half = (block + 1) // 2
    nibbles = np.zeros((len(codes), 2 * half), np.uint8)
    nibbles[:, :block] = codes.view(np.uint8) & 15
    return np.concatenate([scales, nibbles[:, :half] | (nibbles[:, half:] << 4)], axis=1).reshape(-1)


def _codes(values: Float32, block: int, largest_code: float) -> tuple[Bytes, npt.NDArray[np.int8]]:
    padded = np.zeros(-(-values.size // block) * block, np.float32)
    padded[: values.size] = values
    blocks = padded.reshape(-1, block)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    empty = largest < TINY
    divisor = np.where(empty, np.float32(1), largest)
    factor = np.where(empty, np.float32(0), np.float32(largest_code) / divisor)
    scales = np.where(empty, np.float32(0), divisor / np.float32(largest_code))
    return scales.view(np.uint8), np.rint(blocks * factor).astype(np.int8)


def _decode(source: Bytes, kind: Codec, count: int) -> Float32:
    match kind:
        case Codec.FP32:
            return source.view(np.float32)
        case Codec.BF16:
            return (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case Codec.INT8:
            padded = np.zeros(-(-count // 512) * 516, np.uint8)
            padded[: source.size] = source
            rows = padded.reshape(-1, 516)
            scales = np.ascontiguousarray(rows[:, :4]).view(np.float32)
            return (rows[:, 4:].view(np.int8).astype(np.float32) * scales).reshape(-1)[:count]
        case Codec.INT4:
            whole = count // 128
            body = _decode_int4(source[: 68 * whole], 128)
            return np.concatenate([body, _decode_int4(source[68 * whole :], count - 128 * whole)])


def _decode_int4(source: Bytes, block: int) -> Float32:
    if not source.size:
        return np.empty(0, np.float32)
    rows = source.reshape(-1, 4 + (block + 1) // 2)
    scales = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    nibbles = np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1)[:, :block]
    codes = (nibbles ^ 8).astype(np.float32) - 8
    return (codes * scales).reshape(-1)
