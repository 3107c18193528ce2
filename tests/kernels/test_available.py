"""Triton's kernels are asked for only where they can be compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.kernels import available


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Have Triton and Python's headers installed, and no compiler; yield the directory where programs lie."""
    header = tmp_path / "Python.h"
    header.touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(available, "python_header", lambda: header)
    monkeypatch.delenv("CC", raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    available.has_triton.cache_clear()
    yield programs
    available.has_triton.cache_clear()


def test_triton_without_a_compiler_is_none(installed: Path) -> None:
    assert not available.has_triton()


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_in_the_path_is_enough(installed: Path, name: str) -> None:
    (installed / name).touch(mode=0o755)
    assert available.has_triton()


def test_a_compiler_named_in_the_environment_is_enough(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/opt/cc")
    assert available.has_triton()


def test_triton_without_headers_is_none(installed: Path) -> None:
    (installed / "gcc").touch(mode=0o755)
    (installed.parent / "Python.h").unlink()
    assert not available.has_triton()


def test_the_header_is_that_of_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available.sysconfig, "get_path", {"include": "/usr/include/python"}.__getitem__)
    assert available.python_header() == Path("/usr/include/python/Python.h")
