"""A pair on the disk after a power cut, a kill or a refusal: whole, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.disk_calls import recorded

from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import bin_path, idx_path
from bloomery.data.seal import SealFacts
from bloomery.data.sealing import seal
from bloomery.errors import BloomeryError

FACTS = SealFacts(vocabulary_size=300, end_of_document_id=0, engine="an engine")


def write(prefix: Path, documents: list[list[int]]) -> None:
    with IndexedWriter(prefix, dtype="<u2", seal=FACTS) as writer:
        for document in documents:
            writer.add_document(document)


def test_each_file_of_a_sealed_pair_is_synced_before_it_gets_its_name(tmp_path: Path) -> None:
    with recorded() as calls:
        write(tmp_path / "pair", [[1, 2], [3]])
    renamed = [(at, name) for at, (call, name) in enumerate(calls.names) if call == "rename"]
    names = ["pair.bin", "pair.idx", "pair.seal.sums", "pair.seal.json"]
    assert [name for _, name in renamed] == names  # what another file speaks of is there before it
    for at, name in renamed:
        assert any(calls.synced_before(written, at=at) for written in (name, name + ".partial"))


def test_what_a_killed_writer_left_is_no_obstacle(tmp_path: Path) -> None:
    for ending in ("bin", "idx", "seal.sums"):
        (tmp_path / f"pair.{ending}.partial").write_bytes(b"torn")
    write(tmp_path / "pair", [[1, 2], [3]])
    dataset = IndexedDataset(tmp_path / "pair")
    assert [dataset.document(number).tolist() for number in range(2)] == [[1, 2], [3]]
    assert not list(tmp_path.glob("*.partial"))


def test_a_pair_that_cannot_be_sealed_has_no_part_of_a_seal(tmp_path: Path) -> None:
    write(tmp_path / "pair", [[1, 2], [3]])
    for path in tmp_path.glob("*.seal.*"):
        path.unlink()
    idx_path(tmp_path / "pair").unlink()
    with pytest.raises((BloomeryError, OSError)):
        seal(tmp_path / "pair", vocabulary_size=300, end_of_document_id=0)
    assert list(tmp_path.iterdir()) == [bin_path(tmp_path / "pair")]
