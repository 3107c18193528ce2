"""Declares, for ctypes, the native library's functions for the ring all_reduce and its codec."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

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
    """Return each function by its name without `bloomery_`; an empty dict if the library was not built."""
    native_library = library()
    callables = {}
    for name, types in _ARGUMENTS.items() if native_library else ():
        function = getattr(native_library, f"bloomery_{name}")
        function.argtypes = types
        function.restype = c_void_p if name == "ring_create" else c_int32
        callables[name] = function
    return callables
