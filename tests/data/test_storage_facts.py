"""What is shared between processes: under which lock, under which name, and what is said of it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from bloomery import durable
from bloomery.data import fair_quotas, mixture, native_kernels, storage
from bloomery.data.fair_quotas import FairQuotas
from bloomery.data.mixture import Quotas
from bloomery.data.storage import as_storage_error, digest_of, locked_directory, shared_arrays, write_whole
from bloomery.errors import StorageError

SHAPES: storage.Shapes = {"a": (3, np.int64), "c": (0, np.int64), "b": (5, np.uint16)}


def fill(arrays: storage.Arrays) -> None:
    arrays["a"][:] = [7, 8, 9]
    arrays["b"][:] = 5


class Locks:
    """Who took which lock; `held` while it is held."""

    def __init__(self) -> None:
        self.taken: list[tuple[Path, str, float]] = []
        self.held = False
        self.on_wait: Callable[[str], None] = lambda owner: None

    @contextmanager
    def locked(
        self, path: Path, *, owner: str, timeout_s: float, on_wait: Callable[[str], None]
    ) -> Iterator[int]:
        self.taken.append((path, owner, timeout_s))
        self.on_wait, self.held = on_wait, True
        try:
            yield 17
        finally:
            self.held = False


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    made = Locks()
    monkeypatch.setattr(durable, "locked", made.locked)
    return made


def test_arrays_are_filled_under_the_lock_of_their_directory_and_laid_out_by_64_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: Locks, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 74)
    directory, filled = tmp_path / "deep" / "orders", list[bool]()

    def watched(arrays: storage.Arrays) -> None:
        filled.append(locks.held)
        assert {name: array.shape for name, array in arrays.items()} == {"a": (3,), "b": (5,), "c": (0,)}
        fill(arrays)

    for _ in range(2):
        found = shared_arrays(directory, "key", SHAPES, watched)
        assert [found[name].tolist() for name in "abc"] == [[7, 8, 9], [5] * 5, []]
        assert (found["a"].dtype, found["b"].dtype, found["c"].dtype) == (np.int64, np.uint16, np.int64)
    assert filled == [True]
    assert locks.taken == [(directory / "lock", f"process {os.getpid()}", 3600.0)] * 2
    content = np.array([7, 8, 9], "<i8").tobytes() + bytes(40) + np.full(5, 5, "<u2").tobytes()
    assert (directory / "key.arrays").read_bytes() == content
    assert json.loads((directory / "key.json").read_text()) == {
        "bytes": 74,
        "xxh3_128": xxhash.xxh3_128_hexdigest(content),
    }
    with caplog.at_level(logging.INFO, logger=storage.__name__):
        locks.on_wait("process 9")
    assert caplog.records[-1].getMessage() == (
        "waiting for process 9, which computes the order of the samples"
    )


def test_who_waits_for_arrays_too_long_computes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 1)

    def held(path: Path, **_: object) -> None:
        raise durable.LockHeld(path, "process 9")

    monkeypatch.setattr(durable, "locked", held)
    assert shared_arrays(tmp_path, "key", SHAPES, fill)["a"].tolist() == [7, 8, 9]
    told = [record.getMessage() for record in caplog.records if record.name == storage.__name__]
    assert told == [
        f"the order of samples is computed in memory: {tmp_path} cannot keep it: {tmp_path / 'lock'} is held "
        "by process 9"
    ]


def test_of_kept_files_the_four_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 1)
    for turn in range(6):
        shared_arrays(tmp_path, f"key-{turn}", SHAPES, fill)
        os.utime(tmp_path / f"key-{turn}.arrays", (turn, turn))
    kept = {f"key-{turn}" for turn in range(2, 6)}
    assert {path.stem for path in tmp_path.glob("*.arrays")} == kept
    assert {path.stem for path in tmp_path.glob("*.json")} == kept


def test_a_directory_is_held_by_who_names_itself_and_the_wait_is_told(
    tmp_path: Path, locks: Locks, caplog: pytest.LogCaptureFixture
) -> None:
    with locked_directory(tmp_path, name="a.lock") as file:
        assert file == 17 and locks.held
    owner = f"process {os.getpid()} on {os.uname().nodename}"
    assert locks.taken == [(tmp_path / "a.lock", owner, 3600.0)] and not locks.held
    with caplog.at_level(logging.WARNING, logger=storage.__name__):
        for holder in ("process 9", ""):
            locks.on_wait(holder)
    told = [record.getMessage() for record in caplog.records if record.name == storage.__name__]
    end = f", which works in {tmp_path} (at most 3600 s)"
    assert told == [f"waiting for process 9{end}", f"waiting for another process{end}"]


@pytest.mark.parametrize(("holder", "named"), [("process 9", "process 9"), ("", "another process")])
def test_a_directory_that_is_never_free_is_told_with_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str, named: str
) -> None:
    def held(path: Path, **_: object) -> None:
        raise durable.LockHeld(path, holder)

    monkeypatch.setattr(durable, "locked", held)
    with pytest.raises(StorageError) as refused, locked_directory(tmp_path, name="a.lock"):
        pass
    assert refused.value.message == f"Waited 3600 s for {named}, which works in {tmp_path}."
    assert refused.value.remedy == (
        f"Find out what holds {tmp_path / 'a.lock'} (fuser -v), or choose another directory."
    )


def test_an_error_of_the_disk_names_the_path_and_others_pass(tmp_path: Path) -> None:
    said = r"Writing data failed at /x/y: No space left"
    with pytest.raises(StorageError, match=said), as_storage_error(Path("/x/y")):
        raise OSError(28, "No space left on device")
    with pytest.raises(ValueError, match="other"), as_storage_error(Path("/x/y")):
        raise ValueError("other")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=rf"failed at {tmp_path}/file/deep: "):
        write_whole(tmp_path / "file" / "deep", b"x")
    write_whole(tmp_path / "deep" / "new", b"x")
    assert (tmp_path / "deep" / "new").read_bytes() == b"x"


def test_a_digest_is_of_the_facts_and_then_of_the_parts() -> None:
    parts = [np.arange(5, dtype="<i4"), np.arange(3, dtype="<i8")[::-1]]
    content = b"facts" + b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    assert digest_of(parts, "facts") == xxhash.xxh3_128_hexdigest(content)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shares", [[5, 3, 1], [100_000, 1, 0, 2]])
def test_quotas_are_the_same_whichever_blocks_were_asked_for_before(
    monkeypatch: pytest.MonkeyPatch, shares: list[int], native: bool
) -> None:
    if not native:
        monkeypatch.setattr(native_kernels, "_functions", dict)
    monkeypatch.setattr(fair_quotas, "_SNAPSHOT_EVERY", 4)
    monkeypatch.setattr(mixture, "_SNAPSHOT_EVERY", 4)
    for length in (0, 300, 303):
        fresh = [FairQuotas(shares, block=10, length=length).before(block).tolist() for block in range(34)]
        walked = FairQuotas(shares, block=10, length=length)
        for block in (33, 0, 31, 9, 8, 7, 30, 12, 29, 4, 5, 3, 32):
            assert walked.before(block).tolist() == fresh[block]
        ends = [sum(counts) for counts in fresh]
        assert ends == [min(10 * block, length or 10**9) for block in range(34)]
        for block, (before, after) in enumerate(pairwise(fresh)):
            if length and 10 * block >= length:
                break
            datasets, turns = walked.samples_of(block)
            assert datasets.size == sum(after) - sum(before)
            for dataset, (low, high) in enumerate(zip(before, after, strict=True)):
                assert turns[datasets == dataset].tolist() == list(range(low, high))
    old = [Quotas(shares, block=10).before(block).tolist() for block in range(34)]
    jumping = Quotas(shares, block=10)
    for block in (33, 0, 31, 9, 8, 7, 30, 12, 4, 5):
        assert jumping.before(block).tolist() == old[block]


def test_arrays_that_another_process_made_while_its_lock_was_waited_for_are_not_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 1)
    filled, lock = list[int](), durable.locked

    def watched(arrays: storage.Arrays) -> None:
        filled.append(1)
        fill(arrays)

    @contextmanager
    def waiting(path: Path, **how: object) -> Iterator[int]:
        monkeypatch.setattr(durable, "locked", lock)
        shared_arrays(tmp_path, "key", SHAPES, watched)
        with lock(path, **how) as file:  # type: ignore[arg-type]
            yield file

    monkeypatch.setattr(durable, "locked", waiting)
    assert shared_arrays(tmp_path, "key", SHAPES, watched)["a"].tolist() == [7, 8, 9] and filled == [1]
