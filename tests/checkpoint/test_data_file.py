"""Data files: what is laid out in them, and that every byte of it is written, however it is written."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.checkpoint.test_verified_reader import record_of

from bloomery.checkpoint.format import data_file
from bloomery.checkpoint.format.data_file import (
    PAGE_BYTES,
    BlockHasher,
    HashingWriter,
    lay_out,
    split_entries,
    write_image,
)
from bloomery.checkpoint.format.manifest import BLOCK_BYTES
from bloomery.checkpoint.format.state import ITEM_BYTES, StateEntry, whole

CHUNK = 4 * PAGE_BYTES


def image_of(content: bytes) -> memoryview:
    """A staged file: it begins at a page, and fills whole ones."""
    buffer = torch.zeros(len(content) + 2 * PAGE_BYTES, dtype=torch.uint8)
    start = -buffer.data_ptr() % PAGE_BYTES
    view = memoryview(buffer.numpy()).cast("B")[start : start + len(content) + -len(content) % PAGE_BYTES]
    view[: len(content)] = content
    return view


@pytest.mark.parametrize("length", [1, PAGE_BYTES, CHUNK - 1, CHUNK, CHUNK + 1, 11 * CHUNK + 5])
def test_an_image_is_written_as_it_fills_up_and_told_of_to_the_last_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
):
    monkeypatch.setattr(data_file, "_CHUNK_BYTES", CHUNK)
    content = os.urandom(length)
    awaited, wrote, rests = list[int](), list[int](), list[int]()
    record = write_image(
        tmp_path / "a.bin",
        image_of(content),
        length=length,
        until_filled=awaited.append,
        rest=lambda: rests.append(len(awaited)),
        wrote=wrote.append,
    )
    assert (tmp_path / "a.bin").read_bytes() == content and record == record_of("a.bin", content)
    assert awaited == [min(stop, length) for stop in range(CHUNK, length + CHUNK, CHUNK)]
    assert rests == list(range(1, len(awaited)))
    assert sum(wrote) == length + -length % PAGE_BYTES and len(wrote) == len(awaited)


class AtOnce:
    """Does each task when it is submitted."""

    def __init__(self, threads: int) -> None:
        pass

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, act: Callable[..., int], *given: object) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(act(*given))
        return done


def test_no_byte_is_written_or_hashed_before_it_has_been_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_file, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(data_file, "ThreadPoolExecutor", AtOnce)
    content = os.urandom(3 * CHUNK + 5)
    image = image_of(bytes(len(content)))

    def fill(stop: int) -> None:
        image[:stop] = content[:stop]

    record = write_image(tmp_path / "a.bin", image, length=len(content), until_filled=fill)
    assert (tmp_path / "a.bin").read_bytes() == content and record == record_of("a.bin", content)


def test_a_write_of_which_the_system_takes_only_a_part_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    content = os.urandom(9 * PAGE_BYTES + 17)
    pwrite, write, taken = os.pwrite, os.write, list[int]()

    def some(file: int, data: memoryview, offset: int) -> int:
        taken.append(pwrite(file, data[: 2 * PAGE_BYTES], offset))
        return taken[-1]

    monkeypatch.setattr(os, "pwrite", some)
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:1000]))
    record = write_image(tmp_path / "a.bin", image_of(content), length=len(content))
    assert len(taken) == 5 and (tmp_path / "a.bin").read_bytes() == content
    assert record == record_of("a.bin", content)
    with HashingWriter(tmp_path / "b.bin") as writer:
        writer.write(memoryview(content))
        assert writer.finish() == record_of("b.bin", content)
    assert (tmp_path / "b.bin").read_bytes() == content


def test_a_file_system_that_refuses_direct_writes_after_it_opened_the_file_so_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All threads are refused at once, and only one of them is the first to clear the flag."""
    monkeypatch.setattr(data_file, "_CHUNK_BYTES", CHUNK)
    content, pwrite = os.urandom(9 * CHUNK), os.pwrite
    together, refused = threading.Barrier(4), list[int]()

    def plain_only(file: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            together.wait(60)
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", plain_only)
    record = write_image(tmp_path / "a.bin", image_of(content), length=len(content))
    assert (tmp_path / "a.bin").read_bytes() == content and record == record_of("a.bin", content)
    assert len(refused) in (0, 4), "none where the disk of this test knows no direct I/O"


def test_a_file_that_is_there_already_is_in_the_way_unless_a_dead_writer_left_it(tmp_path: Path):
    path, content = tmp_path / "a.bin", os.urandom(PAGE_BYTES)
    path.write_bytes(b"of another")
    with pytest.raises(FileExistsError):
        write_image(path, image_of(content), length=len(content))
    assert path.read_bytes() == b"of another"
    with path.open("r+b") as late:
        write_image(path, image_of(content), length=len(content), anew=True)
        late.write(b"what the dead writer still had on its way")
    assert path.read_bytes() == content


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0, 1, 77, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]), max_size=4))
def test_hashes_do_not_depend_on_the_pieces_in_which_the_bytes_come(sizes: list[int]):
    content = bytes(range(256)) * (sum(sizes) // 256 + 1)
    hasher, position = BlockHasher(), 0
    for size in sizes:
        hasher.update(memoryview(content)[position : position + size])
        position += size
        assert hasher.bytes == position
    assert hasher.record("a.bin") == record_of("a.bin", content[:position])


@st.composite
def states(draw: st.DrawFn) -> list[StateEntry]:
    """Tensors of two parts, of several element types, also without dimensions or elements."""
    found = []
    for number in range(draw(st.integers(1, 8))):
        part = draw(st.sampled_from(["model", "optim"]))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=2)))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8"]))
        tensor = torch.full(shape, number, dtype=getattr(torch, dtype))
        found.append(whole(f"{part}.{number}", tensor))
    return found


@settings(max_examples=40)
@given(states(), st.sampled_from([1, 100, 1000]), st.integers(0, 3))
def test_each_tensor_is_in_a_file_of_its_part_that_is_no_larger_than_asked(
    tmp_path_factory: pytest.TempPathFactory, state: list[StateEntry], file_bytes: int, first: int
):
    files = lay_out(state, rank=2, world=5, file_bytes=file_bytes, first=first)
    laid_out = [entry for file in files for entry in file.entries]
    assert sorted(entry.name for entry in laid_out) == sorted(entry.name for entry in state)
    for part in ("model", "optim"):
        names = [file.name for file in files if file.name.startswith(part)]
        numbers = range(first, first + len(names))
        assert names == [f"{part}-r00002-of-00005-{number:03d}.safetensors" for number in numbers]
        assert bool(names) == any(entry.name.startswith(part) for entry in state)
    directory = tmp_path_factory.mktemp("files")
    for file in files:
        assert {entry.name.partition(".")[0] for entry in file.entries} == {file.name.partition("-")[0]}
        held = [entry.nbytes for entry in file.entries]
        assert held and (len(held) == 1 or sum(held) <= file_bytes)
        assert file.bytes == len(file.header) + sum(held) and len(file.header) % 4096 == 0
        content = bytearray(file.header)
        for entry, box in zip(file.entries, file.boxes, strict=True):
            assert (box.begin, box.name, box.file) == (len(content), entry.name, file.name)
            assert box.begin % ITEM_BYTES[box.dtype] == 0
            content += bytes(entry.tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
            assert box.end == len(content)
        (directory / file.name).write_bytes(content)
        with safe_open(directory / file.name, framework="pt") as opened:
            for entry in file.entries:
                assert torch.equal(opened.get_tensor(entry.name), entry.tensor)
    for earlier, later in pairwise(files):
        if earlier.name.partition("-")[0] == later.name.partition("-")[0]:
            together = sum(entry.nbytes for entry in earlier.entries) + later.entries[0].nbytes
            assert together > file_bytes, "no file is begun while the next tensor fits in the last"


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 300))
def test_a_tensor_is_cut_into_rows_about_equally_and_only_where_it_is_too_large(
    rows: int, width: int, piece_bytes: int
):
    tensor = torch.arange(float(rows * width)).reshape(rows, width)
    pieces = list(split_entries([whole("model.a", tensor)], piece_bytes=piece_bytes))
    assert torch.equal(torch.cat([piece.tensor for piece in pieces]), tensor)
    for piece in pieces:
        assert torch.equal(piece.tensor, tensor[piece.box.window])
        assert piece.nbytes <= piece_bytes or len(piece.tensor) == 1
    heights = [len(piece.tensor) for piece in pieces]
    assert len(set(heights[:-1])) <= 1 and heights[-1] <= heights[0]
    fitting = max(1, piece_bytes // (4 * width)) if width else rows
    assert len(pieces) == -(-rows // min(rows, fitting)), "no more pieces than are needed"
    assert heights[0] == -(-rows // len(pieces))
