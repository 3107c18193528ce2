"""A pair on the disk after a power cut, a kill or a refusal: whole, or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.disk_calls import recorded

from bloomery import durable
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import bin_path, idx_path, seal_path
from bloomery.data.pairs import replace_pair, verify_pair
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


def test_all_bytes_of_a_sealed_pair_are_in_its_files_when_these_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, sync = dict[str, int](), durable.sync_file

    def watched(file: int) -> None:
        name = Path(f"/proc/self/fd/{file}").readlink().name
        sizes[name.removesuffix(".partial")] = os.fstat(file).st_size
        sync(file)

    monkeypatch.setattr(durable, "sync_file", watched)
    write(tmp_path / "pair", [[1, 2], [3]])
    for name in ("pair.bin", "pair.idx", "pair.seal.sums"):
        assert sizes[name] == (tmp_path / name).stat().st_size > 0, name


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


@pytest.mark.parametrize("moved", range(2))
def test_a_writer_that_is_killed_leaves_no_index_on_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    write(tmp_path / "pair", [[1, 2], [3]])
    replace, done = durable.replace, list[Path]()

    def killed(source: Path, target: Path) -> None:
        if len(done) == moved:
            raise KeyboardInterrupt
        replace(source, target)
        done.append(target)

    monkeypatch.setattr(durable, "replace", killed)
    with recorded() as calls, pytest.raises(KeyboardInterrupt):
        write(tmp_path / "pair", [[4, 5, 6]])
    assert not idx_path(tmp_path / "pair").exists() and not seal_path(tmp_path / "pair").exists()
    assert calls.synced_before(tmp_path.name, at=len(calls.names)), "the index is gone before tokens come"


@pytest.mark.parametrize("moved", range(4))
def test_a_replacement_that_is_cut_short_leaves_no_seal_of_other_tokens_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    pair, staged = tmp_path / "pair", tmp_path / "new" / "pair"
    write(pair, [[1, 2], [3]])
    write(staged, [[4, 5, 6]])
    replace, done = durable.replace, list[Path]()

    def killed(source: Path, target: Path) -> None:
        if len(done) == moved:
            raise KeyboardInterrupt
        replace(source, target)
        done.append(target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(durable, "replace", killed)
        replace_pair(staged, pair)
    assert not seal_path(pair).exists()
    assert moved > 1 or not idx_path(pair).exists(), "an index never lies on other tokens"
    replace_pair(staged, pair)
    assert IndexedDataset(pair).document(0).tolist() == [4, 5, 6] and verify_pair(pair).findings == ()
