"""Waiting for a directory: who holds it is named, and the wait ends."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from bloomery.data import storage
from bloomery.data.storage import alone_in
from bloomery.errors import StorageError


def test_who_waits_for_a_directory_says_for_whom_and_gives_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder = rf"process {os.getpid()} on {os.uname().nodename}, which works in {tmp_path}"
    monkeypatch.setattr(storage, "_LOCK_TIMEOUT_S", 0.3)
    with alone_in(tmp_path, name="lock"), caplog.at_level(logging.WARNING):
        with pytest.raises(StorageError, match=holder), alone_in(tmp_path, name="lock"):
            raise AssertionError("two hold it")
        # Threads of earlier tests may warn of something else meanwhile.
        (said,) = (one.getMessage() for one in caplog.records if one.name == storage.__name__)
        assert said.startswith(f"waiting for {holder}")
    with alone_in(tmp_path, name="lock"):
        pass
