"""An index without a seal that contradicts itself ends in one message, and never in other documents."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bloomery.config.data import DataSection, DatasetSection
from bloomery.data.answers import AnswerTokens
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import HEADER, idx_path
from bloomery.data.pairs import refuse_damaged
from bloomery.data.prepare import prepare
from bloomery.data.sample_layout import Packs
from bloomery.data.seal import SealFacts
from bloomery.data.tokenizer import train_tokenizer
from bloomery.data_loader.batches import held_out_batches
from bloomery.errors import DataError

COUNT = 60
POINTERS, DOCUMENTS = HEADER.size + 4 * COUNT, HEADER.size + 12 * COUNT


def written(prefix: Path, *, seal: SealFacts | None = None) -> Path:
    """60 documents of one sequence each, document n of n % 7 + 1 tokens."""
    with IndexedWriter(prefix, dtype="<u2", seal=seal) as writer:
        for number in range(COUNT):
            writer.add_document(np.full(number % 7 + 1, number))
    return prefix


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return written(tmp_path / "pair")


def put(prefix: Path, offset: int, value: int, kind: str = "<i8") -> None:
    content = bytearray(idx_path(prefix).read_bytes())
    number = np.array(value, dtype=kind).tobytes()
    content[offset : offset + len(number)] = number
    idx_path(prefix).write_bytes(content)


HARMS: dict[str, tuple[int, int, str]] = {
    "pointer behind the end": (POINTERS + 8 * 30, 1 << 40, "<i8"),
    "pointer before the beginning": (POINTERS + 8 * 30, -6, "<i8"),
    "pointer into another document": (POINTERS + 8 * 30, 20, "<i8"),
    "pointer within a token": (POINTERS + 8 * 30, 235, "<i8"),
    "first pointer": (POINTERS, 4, "<i8"),
    "huge length": (HEADER.size + 4 * 29, 1 << 30, "<i4"),
    "negative length": (HEADER.size + 4 * 29, -4, "<i4"),
    "other length": (HEADER.size + 4 * 29, 1, "<i4"),
    "document that goes back": (DOCUMENTS + 8 * 30, 3, "<i8"),
    "document without a sequence": (DOCUMENTS + 8 * 30, 10**9, "<i8"),
    "negative document": (DOCUMENTS + 8 * 30, -1, "<i8"),
}
READS: dict[str, Callable[[IndexedDataset], object]] = {
    "packs": lambda pair: Packs(pair, length=8),
    "held-out windows": lambda pair: list(held_out_batches(pair, sequence_length=8, rows=4, eod=0)),
    "lengths": lambda pair: pair.document_starts,
    "a start": lambda pair: refuse_damaged([pair.prefix]),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("harm", HARMS)
def test_what_cannot_be_right_is_told_by_what_reads_documents(prefix: Path, harm: str, read: str) -> None:
    READS[read](IndexedDataset(prefix))
    put(prefix, *HARMS[harm])
    with pytest.raises(
        DataError, match=r"pair\.idx is damaged: (sequence|document) (0|29|30) begins"
    ) as told:
        READS[read](IndexedDataset(prefix))
    assert "copy the pair of files again" in told.value.remedy


@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm != "first pointer"])
def test_a_split_is_never_made_where_the_index_cannot_be_right(prefix: Path, harm: str) -> None:
    whole = IndexedDataset(prefix)
    assert [whole.part(some).token_count for some in (range(30), range(30, 60))] == [115, 119]
    put(prefix, *HARMS[harm])
    for some in (range(30), range(30, 60)):
        with pytest.raises(DataError, match=r"pair\.idx is damaged: (sequence|document) (29|30) begins"):
            IndexedDataset(prefix).part(some)
    assert IndexedDataset(prefix).part(range(10, 20)).token_count == 43  # these are not touched by it


@pytest.mark.parametrize("column", [POINTERS, DOCUMENTS])
def test_of_a_sealed_index_what_a_split_reads_is_compared_with_the_seal(tmp_path: Path, column: int) -> None:
    sealed = written(tmp_path / "sealed", seal=SealFacts())
    put(sealed, column + 8 * 30, 1 << 40 if column == POINTERS else 3)
    with pytest.raises(DataError, match=r"sealed\.idx is not what was written"):
        IndexedDataset(sealed).part(range(30))


def test_sequences_that_do_not_adjoin_may_be_read_in_megatrons_order_alone(tmp_path: Path) -> None:
    """An index that leaves documents out: the bloomery order would read them all the same."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["a"], vocabulary=257, end_of_document="<|endoftext|>").save(path)
    prefix = written(tmp_path / "pair")
    content = idx_path(prefix).read_bytes()
    lengths, rest = content[HEADER.size : POINTERS], content[POINTERS:DOCUMENTS]
    magic, version, code, *_ = HEADER.unpack(content[: HEADER.size])
    left = HEADER.pack(magic, version, code, COUNT - 1, COUNT)
    cut = lengths[:40] + lengths[44:] + rest[:80] + rest[88:] + np.arange(COUNT, dtype="<i8").tobytes()
    idx_path(prefix).write_bytes(left + cut)
    data = {
        "sequence_length": 8,
        "tokenizer": str(path),
        "datasets": (DatasetSection(name="a", path=str(prefix)),),
    }
    with pytest.raises(DataError, match=r"sequence 10 begins at byte 76 and not where .*, byte 68"):
        prepare(DataSection(**data), tmp_path / "run")
    assert prepare(DataSection(**data, order="megatron"), tmp_path / "run").train[0].documents == 59


def test_a_pointer_within_a_token_is_refused_in_megatrons_order(prefix: Path) -> None:
    put(prefix, *HARMS["pointer within a token"])
    with pytest.raises(
        DataError, match=r"sequence 30 has 3 tokens from byte 235 on, and pair\.bin has tokens of 2"
    ):
        IndexedDataset(prefix).refuse_stray_sequences()


def test_of_answers_each_sequence_begins_where_the_one_before_it_ends(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "pair", dtype="<u2") as writer:
        lengths = np.full(COUNT // 2, 4)
        writer.add_documents(np.zeros(2 * COUNT, dtype=np.uint16), lengths, prompts=np.ones_like(lengths))
    assert AnswerTokens(IndexedDataset(tmp_path / "pair"))
    put(tmp_path / "pair", POINTERS + 8 * 31, 0)
    with pytest.raises(DataError, match="sequence 31 begins at byte 0 and not where"):
        AnswerTokens(IndexedDataset(tmp_path / "pair"))


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_an_index_is_looked_at_some_sequences_at_a_time(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.data.pair_index._CHECKED_AT_ONCE", at_once)
    with IndexedWriter(tmp_path / "pair", dtype="<u2") as writer:
        for size in (0, 3, 0, 0, 2, 0):
            writer.add_document(np.zeros(size))
    pair = IndexedDataset(tmp_path / "pair")
    assert pair.document_starts.tolist() == [0, 0, 3, 3, 3, 5, 5]
    assert pair.part(range(1, 4)).document_starts.tolist() == [0, 3, 3, 3]
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    prefix = written(tmp_path / "pair")
    IndexedDataset(prefix).refuse_contradictions()
    put(prefix, *HARMS["pointer into another document"])
    with pytest.raises(DataError, match="sequence 30 begins at byte 20"):
        IndexedDataset(prefix).refuse_contradictions()
