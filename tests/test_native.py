"""The native library is taken only where it was built, is of this version, and is not switched off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery import native


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_a_library_of_another_version_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(native.SWITCH, raising=False)
    if native.library() is None:
        pytest.skip("the native library is not built")
    assert native.library() is native.library()
    native.library.cache_clear()
    own = native.ABI_VERSION
    monkeypatch.setattr(native, "ABI_VERSION", own + 1)
    assert native.library() is None
    assert f"is of ABI {own}, not {own + 1}, and is not used" in caplog.text


def test_without_a_library_or_with_the_switch_python_does_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.library() is None
    native.library.cache_clear()
    monkeypatch.setenv(native.SWITCH, "1")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert native.library() is None and not caplog.text, "that is no cause for a warning"
