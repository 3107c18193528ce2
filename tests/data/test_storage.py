"""Waiting for a directory: who holds it is named, and the wait ends."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.disk_calls import recorded

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


SHAPES: storage.Shapes = {"wide": (5, np.int64), "none": (0, np.int64), "bytes": (3, np.uint8)}


def fill(arrays: storage.Arrays) -> None:
    arrays["wide"][:] = np.arange(5) + FILLED[0]
    arrays["bytes"].fill(FILLED[0])
    FILLED[0] += 1


FILLED = [0]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 67)  # up to the last of the three bytes behind 64
    FILLED[0] = 7
    return tmp_path / "kept"


def test_arrays_are_computed_once_and_mapped_for_reading(kept: Path) -> None:
    for _ in range(2):
        found = storage.shared_arrays(kept, "key", SHAPES, fill)
        assert found["wide"].tolist() == [7, 8, 9, 10, 11] and found["bytes"].tolist() == [7, 7, 7]
        assert found["none"].size == 0 and not found["wide"].flags.writeable
    assert FILLED[0] == 8 and (kept / "key.arrays").stat().st_size == 67
    assert storage.shared_arrays(kept, "other", SHAPES, fill)["bytes"].tolist() == [8, 8, 8]


@pytest.mark.parametrize("damage", ["bit", "cut", "no record", "torn record", "gone"])
def test_arrays_that_are_not_what_was_written_are_made_again(kept: Path, damage: str) -> None:
    storage.shared_arrays(kept, "key", SHAPES, fill)
    file, record = kept / "key.arrays", kept / "key.json"
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[3] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "no record":
        record.unlink()
    else:
        record.write_bytes(record.read_bytes()[:-3])
    found = storage.shared_arrays(kept, "key", SHAPES, fill)
    assert FILLED[0] == 9 and found["bytes"].tolist() == [8, 8, 8]


def test_arrays_get_their_name_before_their_record_and_no_record_vouches_for_others(kept: Path) -> None:
    storage.shared_arrays(kept, "key", SHAPES, fill)

    def killed(arrays: storage.Arrays) -> None:
        assert not (kept / "key.json").exists()
        raise KeyboardInterrupt

    larger: storage.Shapes = {**SHAPES, "bytes": (4, np.uint8)}
    with pytest.raises(KeyboardInterrupt):
        storage.shared_arrays(kept, "key", larger, killed)
    with recorded() as calls:
        assert storage.shared_arrays(kept, "key", larger, fill)["bytes"].tolist() == [8] * 4
    renamed = [name for call, name in calls.names if call == "rename"]
    assert renamed == ["key.arrays", "key.json"]
    assert calls.paths[0] == ("sync", kept / ".key.arrays.draft"), "its bytes are there before its name"
    assert not list(kept.glob(".*.draft"))


def test_where_nothing_can_be_kept_each_process_computes_its_own(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert storage.shared_arrays(None, "key", SHAPES, fill)["bytes"].flags.writeable
    small: storage.Shapes = {**SHAPES, "bytes": (2, np.uint8)}
    assert storage.shared_arrays(kept, "key", small, fill)["bytes"].tolist() == [8, 8]
    assert not kept.exists(), "computing so little takes no longer than reading"
    with monkeypatch.context() as patch:
        patch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=66))
        assert storage.shared_arrays(kept, "key", SHAPES, fill)["bytes"].tolist() == [9] * 3
        assert "do not fit on its disk" in caplog.text and not list(kept.glob("*.arrays"))
        patch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=67))
        storage.shared_arrays(kept, "key", SHAPES, fill)
        assert list(kept.glob("*.arrays"))
    (tmp_path / "file").write_text("in the way")
    assert (
        storage.shared_arrays(tmp_path / "file" / "deep", "key", SHAPES, fill)["bytes"].tolist() == [11] * 3
    )


def test_a_digest_depends_on_each_part_and_fact_and_not_on_how_much_is_read_at_once() -> None:
    one, other = np.arange(7), np.arange(7)[::-1]
    digests = [
        storage.digest_of(parts, facts)
        for parts, facts in (([one, other], "a"), ([other, one], "a"), ([one], "a"), ([one, other], "b"))
    ]
    assert len(set(digests)) == 4
    assert storage.digest_of([one, other], "a", at_once=2) == digests[0]
