"""Steps that nothing else would miss: what is synced, checked, closed or let go, and in which order."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.data.test_block_cache import Line, cache_at, one
from tests.disk_calls import recorded

from bloomery.config.data import DataSection, DatasetSection
from bloomery.data import block_cache, megatron_order, storage, streaming
from bloomery.data.indexed import IndexedWriter
from bloomery.data.megatron_order import Blend
from bloomery.data.mixture import BLOCK
from bloomery.data.order import Order
from bloomery.data.pair_files import bin_path
from bloomery.data.pairs import replace_pair
from bloomery.data.prepare import prepare, prepared_of_run
from bloomery.data.readers import SourceFile
from bloomery.data.seal import SealFacts
from bloomery.data.streaming import CacheLocation, mount
from bloomery.data.tokenize_corpus import _corpus_digest, _identity
from bloomery.data.tokenize_worker import Job, TextPiece
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import DataError, StorageError

EOD = "<|endoftext|>"


def pair(prefix: Path, tokens: int = 100) -> Path:
    with IndexedWriter(prefix, dtype="<u2", seal=SealFacts(vocabulary_size=300)) as writer:
        writer.add_document(np.arange(tokens) % 250)
    return prefix


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "given" / "tokenizer.json"
    train_tokenizer(["a"], vocabulary=257, end_of_document=EOD).save(path)
    return path


def test_a_block_that_was_fetched_is_hashed_on_its_way_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[bytes] = []
    sum_of = block_cache._sum
    monkeypatch.setattr(block_cache, "_sum", lambda content: hashed.append(content) or sum_of(content))
    cache = cache_at(tmp_path / "here.bin", Line())
    for _ in range(3):
        one(cache, tmp_path / "here.bin", 4)
    assert len(hashed) == 1


def test_a_writer_that_fails_leaves_no_part_of_a_seal(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        IndexedWriter(tmp_path / "pair", dtype="<u2", seal=SealFacts()) as writer,
    ):
        writer.add_document([4])
        _ = 1 // 0
    assert list(tmp_path.iterdir()) == []


def test_an_older_seal_and_index_are_gone_from_the_disk_before_other_tokens_come(tmp_path: Path) -> None:
    old, new = pair(tmp_path / "old"), pair(tmp_path / "new" / "pair", 50)
    with recorded() as calls:
        replace_pair(new, old)
    assert calls.paths[:2] == [("sync", tmp_path), ("rename", tmp_path / "old.bin")]


def test_an_older_manifest_is_gone_from_the_disk_before_other_files_come(
    tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("some text " * 9)
    data = DataSection(
        sources=(str(tmp_path / "a.txt"),), sequence_length=8, tokenizer=str(tokenizer), held_out_every=0
    )
    out = tmp_path / "out"
    prepare(data, out)
    (tmp_path / "a.txt").write_text("other text " * 9)
    with recorded() as calls:
        prepare(data, out)
    first = next(at for at, (call, path) in enumerate(calls.paths) if call == "rename" and path.parent == out)
    moved = [path.name for call, path in calls.paths[first:] if call == "rename" and path.parent == out]
    assert moved[-1] == "prepared.json" and "tokenizer.json" in moved
    at = calls.paths.index(("rename", out / "tokenizer.json"))
    assert calls.paths[at - 1] == ("sync", out)
    damage(bin_path(out / "train"))
    for act in (lambda: prepare(data, out), lambda: prepared_of_run(data, out)):
        with pytest.raises(DataError, match=r"train\.bin is not what was written"):
            act()
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"train\.bin is not what was written"):
        prepare(data, out, is_trained_on=True)


def test_given_pairs_are_checked_for_damage_and_for_fetches_that_did_not_end(
    tokenizer: Path, tmp_path: Path
) -> None:
    train, kept = pair(tmp_path / "raw" / "train"), pair(tmp_path / "kept")
    data = DataSection(
        sequence_length=8,
        tokenizer=str(tokenizer),
        datasets=(DatasetSection(name="a", path=str(train)),),
        held_out_datasets=(DatasetSection(name="b", path=str(kept)),),
    )
    prepare(data, tmp_path / "run")
    damage(bin_path(kept))
    with pytest.raises(DataError, match=r"kept\.bin is not what was written"):
        prepare(data, tmp_path / "run")
    damage(bin_path(train))
    with pytest.raises(DataError, match=r"train\.bin is not what was written"):
        prepare(replace(data, held_out_datasets=()), tmp_path / "run")
    record = {"format": 1, "files_wanted": 3, "bytes_wanted": 9, "share": 0, "shares": 1}
    (tmp_path / "raw" / "fetched.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="its fetch did not end"):
        prepare(data, tmp_path / "run")


def test_pieces_depend_on_text_settings_and_tokenizer_and_so_do_parts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for name in ("one.json", "same.json", "other.json"):
        (tmp_path / name).write_text("1" if name != "other.json" else "2")
    job = Job(directory="d", tokenizer=str(tmp_path / "one.json"), end_of_document="e")
    files = [SourceFile(key="a", path=tmp_path / "a.txt")]
    piece = TextPiece(number=0, files=(SourceFile(key="a", path=Path("/x")),), size_bytes=1)
    alike = [
        replace(job, tokenizer=str(tmp_path / "same.json")),
        replace(job, directory="other"),
        replace(job, fast=False),
        replace(job, engine="one"),
    ]
    unlike = [
        replace(job, tokenizer=str(tmp_path / "other.json")),
        replace(job, text_field="q"),
        replace(job, prompt_field="q"),
        replace(job, separator="%"),
        replace(job, longest_line_mib=3),
        replace(job, fail=True),
        replace(job, held_out_every=3),
        replace(job, end_of_document="f"),
    ]
    for digest in (lambda one: _identity(files, one), lambda one: _corpus_digest([piece], one)):
        assert {digest(one) for one in alike} == {digest(job)}
        assert len({digest(one) for one in [job, *unlike]}) == 1 + len(unlike)
    moved = replace(piece, files=(replace(piece.files[0], path=Path("/y")),))
    assert _corpus_digest([moved], job) == _corpus_digest([piece], job)
    others = [
        replace(piece, number=1),
        replace(piece, size_bytes=2),
        *(replace(piece, files=(replace(piece.files[0], **{name: 1}),)) for name in ("key", "start", "stop")),
    ]
    assert len({_corpus_digest([one], job) for one in [piece, *others]}) == 6


def test_few_blocks_of_an_order_are_kept_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order([9, 9], [1.0, 1.0], 3)
    for block in range(6):
        order.locate_samples(np.array([block * BLOCK]))
    assert list(order._blocks) == [2, 3, 4, 5]
    monkeypatch.setattr(megatron_order, "_BLOCK", 2)
    blend = Blend([1, 1], 12)
    blend.locate(np.arange(12))
    assert list(blend._turns) == [2, 3, 4, 5]


def test_a_file_system_without_holes_is_refused_when_a_pair_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = pair(tmp_path / "there" / "corpus").as_uri()
    location = CacheLocation(directory=tmp_path / "cache", limit_bytes=1000)

    def refused(file: int, start: int, length: int, *, path: Path) -> None:
        raise StorageError(f"no holes in {path.name}", remedy="")

    monkeypatch.setattr(streaming, "punch_hole", refused)
    with pytest.raises(StorageError, match=r"no holes in corpus\.bin"):
        mount([address], location)


def test_a_draft_of_a_killed_process_is_no_obstacle_and_room_is_taken_before_a_file_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 1)
    (tmp_path / ".key.arrays.draft").write_bytes(b"torn")
    taken, allocate = list[tuple[int, int]](), os.posix_fallocate

    def watched(file: int, begin: int, size: int) -> None:
        taken.append((begin, size))
        allocate(file, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", watched)
    made = storage.shared_arrays(tmp_path, "key", {"a": (3, np.int64)}, lambda arrays: arrays["a"].fill(5))
    assert made["a"].tolist() == [5] * 3 and (tmp_path / "key.arrays").exists() and taken == [(0, 24)]
