"""Waiting for a directory: who holds it is named, and the wait ends."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from bloomery.data import storage
from bloomery.data.storage import locked_directory
from bloomery.errors import StorageError


def test_who_waits_for_a_directory_says_for_whom_and_gives_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder = rf"process {os.getpid()} on {os.uname().nodename}, which works in {tmp_path}"
    monkeypatch.setattr(storage, "_LOCK_TIMEOUT_S", 0.3)
    with locked_directory(tmp_path, name="lock"), caplog.at_level(logging.WARNING):
        with pytest.raises(StorageError, match=holder), locked_directory(tmp_path, name="lock"):
            raise AssertionError("two hold it")
        # Threads of earlier tests may warn of something else meanwhile.
        (said,) = (one.getMessage() for one in caplog.records if one.name == storage.__name__)
        assert said.startswith(f"waiting for {holder}")
    with locked_directory(tmp_path, name="lock"):
        pass


def test_the_arrays_that_were_made_last_are_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 0)
    monkeypatch.setattr(storage, "_KEPT_FILES", 2)
    for turn, key in enumerate(("first", "second", "third")):
        made = storage.shared_arrays(
            tmp_path, key, {"one": (5, np.int64)}, lambda arrays: arrays["one"].fill(7)
        )
        assert made["one"].tolist() == [7] * 5
        os.utime(tmp_path / f"{key}.arrays", (turn, turn))
    assert {path.stem for path in tmp_path.glob("*.arrays")} == {"second", "third"}
    assert {path.stem for path in tmp_path.glob("*.json")} == {"second", "third"}
