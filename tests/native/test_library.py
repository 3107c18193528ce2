from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bloomery import native
from bloomery.data.native_kernels import mix_block

HEADER = Path(__file__).parents[2] / "native/include/bloomery.h"


@pytest.mark.needs("g++", package="g++")
def test_the_library_is_built_and_of_the_version_that_python_expects() -> None:
    library = native.library()
    assert library is not None, "python setup.py build_ext --inplace"
    assert library.bloomery_abi_version() == native.ABI_VERSION


def test_header_and_loader_name_one_version() -> None:
    (version,) = re.findall(r"define BLOOMERY_ABI_VERSION (\d+)", HEADER.read_text())
    assert int(version) == native.ABI_VERSION


def test_the_switch_turns_the_library_off() -> None:
    code = "import bloomery.native as n; print(n.library())"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={"BLOOMERY_NATIVE": "0", "PYTHONPATH": str(Path(native.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.strip() == "None"


_WITHOUT_MEMORY = """
import ctypes, resource
from pathlib import Path
from bloomery import native

library, i64, far = native.library(), ctypes.c_int64, ctypes.c_int64(1 << 50)
one, least, none = i64(1), i64(0), None
nothing, all_of_it = ctypes.byref(least), ctypes.byref(far)
print(library.bloomery_walk_quotas(far, none, i64(0), i64(0), none, none, none))
print(library.bloomery_mix_block(least, none, none, far, ctypes.c_uint64(0), none, none))
print(library.bloomery_windows(far, none, i64(0), i64(0), none, none, i64(0), none))
print(library.bloomery_fair_counts(far, none, one, least, one, one, none))
print(library.bloomery_fair_block(one, ctypes.byref(one), one, least, far, nothing, all_of_it, none, none))
many = none, none, one, far, none, none, none, none, least, none, none
print(library.bloomery_gather_documents(none, 1, far, *many))
most = 65536  # datasets of a blend
weights, counts = (ctypes.c_double * most)(), (i64 * most)()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
print(library.bloomery_blend(i64(most), weights, least, one, counts, (ctypes.c_uint16 * 1)()))
"""


@pytest.mark.needs("g++", package="g++")
def test_a_function_that_finds_no_memory_says_so_and_the_process_goes_on() -> None:
    """Each of them keeps tables as large as its arguments say."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_MEMORY],
        env={"PYTHONPATH": str(Path(native.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["-4"] * 7), done.stderr


@pytest.mark.needs("g++", package="g++")
def test_no_memory_in_a_native_function_is_a_memory_error() -> None:
    none = np.empty(0, np.int64)
    with pytest.raises(MemoryError, match="bloomery_mix_block"):
        mix_block(none, none, 1 << 50, 0, np.empty(0, np.int32), none)
