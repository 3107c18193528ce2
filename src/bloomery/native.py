"""Loads the native library, built from native/; without it every caller takes a slower path in Python."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

ABI_VERSION = 9
SWITCH = "BLOOMERY_NATIVE"


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, loaded once; None if it was not built, has another ABI, or BLOOMERY_NATIVE=0."""
    if os.environ.get(SWITCH) == "0":
        return None
    path = Path(__file__).with_name("libbloomery.so")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        log.info("going on without the native library: %s", error)
        return None
    version = loaded.bloomery_abi_version()
    if version != ABI_VERSION:
        log.warning(
            "%s is of ABI %d, not %d, and is not used: install bloomery again.", path, version, ABI_VERSION
        )
        return None
    return loaded
