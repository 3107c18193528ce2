from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery import native

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
