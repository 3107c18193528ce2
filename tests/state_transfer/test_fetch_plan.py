"""Which sources a fetch asks, and what it knows of their files, with as many of both as a large run has."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.served_states import MIB, files_of, make_checkpoint, write_checkpoint
from tests.protocol import example

from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    INDEX,
    MANIFEST,
    FileRecord,
    read_index,
    read_manifest,
)
from bloomery.errors import PeerError
from bloomery.state_transfer import averages, partial_checkpoint
from bloomery.state_transfer.averages import AverageFetcher
from bloomery.state_transfer.client import _Fetch
from bloomery.state_transfer.partial_checkpoint import FetchPlan, FetchSource, PartialCheckpoint
from bloomery.state_transfer.source import PeerSource
from bloomery.transport.trust import Trust

TRUST = Trust(token=b"a secret")


class Compared(frozenset[FileRecord]):
    """The files of a source, which counts how often they are compared with those of others."""

    count = 0

    def __and__(self, other: Any) -> frozenset[FileRecord]:
        Compared.count += 1
        return super().__and__(other)


def source_of(name: str, *files: str) -> FetchSource:
    origin = PeerSource(peer=name, url="http://127.0.0.1:8")
    records = [FileRecord(name=file, bytes=1, xxh3_128=file, blocks="") for file in files]
    return FetchSource(
        state=SimpleNamespace(origin=origin),  # type: ignore[arg-type]
        manifest=None,  # type: ignore[arg-type]
        text=b"",
        records=Compared(records),
    )


def test_the_files_of_sources_are_compared_once_however_many_runs_are_fetched() -> None:
    leader = source_of("a", "common", "mine", "both")
    others = [source_of("b", "common", "both", "theirs"), source_of("c", "common")]
    plan = FetchPlan(leader=leader, partial=None, index=b"")  # type: ignore[arg-type]
    Compared.count = 0
    for _ in range(100):
        assert plan.files_of(others[0]) == {"common", "both"}
        assert plan.files_only_of(leader, others) == {"mine"}
        assert plan.files_only_of(leader, others[1:]) == {"mine", "both"}, "the other one was given up"
        assert plan.files_only_of(others[0], others[1:]) == {"both"}
    assert Compared.count == 3


def urls_of(peer: str, count: int) -> list[PeerSource]:
    return [PeerSource(peer=peer, url=f"http://127.0.0.1:{1 + port}") for port in range(count)]


def test_of_a_peer_that_lists_thousands_of_places_few_are_asked_for_a_state(tmp_path: Path) -> None:
    bad, good = urls_of("bad", 8000), urls_of("good", 2)
    listed, asked, looks = [*bad[:4000], *good, *good], list[PeerSource](), iter([False, False, True])
    fetch = _Fetch(lambda: listed, "ab12", tmp_path, TRUST, stall_s=1.0, streams=1)
    fetch._thread = lambda function, origin: asked.append(origin)  # type: ignore[method-assign, assignment]

    def is_cancelled() -> bool:
        listed[:] = [*bad[4000:], *good]  # it lists others each time
        return next(looks)

    with pytest.raises(PeerError, match="given up"):
        fetch.run(progress_s=1e9, leader_s=1e9, cancelled=is_cancelled, progress=None)
    assert asked == [*bad[:4], *good]


def test_of_a_peer_that_lists_thousands_of_places_few_are_asked_for_an_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good, asked = urls_of("bad", 4000), urls_of("good", 2), list[PeerSource]()

    def fetch_once(self: Any, sources: list[PeerSource], *given: object, **more: object) -> bool:
        asked.extend(sources)
        return good[-1] in sources

    monkeypatch.setattr(averages._Download, "fetch", fetch_once)
    commit = example.commit(round=7, digest="cd34" * 10)
    AverageFetcher(tmp_path, TRUST)(commit, lambda: [*bad, *good], ranks=1, cancelled=lambda: False)
    assert asked == [*bad[:4], *good]


def test_another_leaders_files_are_not_hashed_again_where_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (make_checkpoint(tmp_path / name, own=own) for own, name in enumerate("ab"))
    hashed, here = list[str](), tmp_path / "here"
    wrong = PartialCheckpoint._wrong
    monkeypatch.setattr(
        PartialCheckpoint,
        "_wrong",
        lambda self, name, size: hashed.append(name) or wrong(self, name, size),  # type: ignore[func-returns-value]
    )

    def begun(checkpoint: Path, before: PartialCheckpoint | None, *, spoilt: str = "") -> PartialCheckpoint:
        manifest = read_manifest(checkpoint)
        index = read_index(checkpoint, manifest)
        files = {
            name: replace(record, blocks=record.blocks[::-1]) if name == spoilt else record
            for name, record in index.files.items()
        }
        return PartialCheckpoint(here, manifest, replace(index, files=files), before=before)

    before = begun(first, None)
    common, own = sorted(path.name for path in first.glob("*.safetensors"))
    run, fetching = before.missing.take([common], timeout_s=0.0), before.missing.take([common], timeout_s=0.0)
    assert run is not None and fetching is not None and hashed == []
    before.write(run, memoryview((first / common).read_bytes())[run.begin : run.end])
    before.close()
    after = begun(second, before)
    after.close()
    assert hashed == [own], "which the second has otherwise"
    left = (second / common).stat().st_size - (run.end - run.begin)
    assert sum(each.end - each.begin for each in after.missing.runs_of(common)) == left
    assert after.bytes == read_manifest(second).bytes - left - (second / own).stat().st_size
    hashed.clear()
    begun(second, after, spoilt=common).close()
    assert hashed == [common], "of which this index says other blocks"


def begun_at(
    directory: Path, checkpoint: Path, *, before: PartialCheckpoint | None = None
) -> PartialCheckpoint:
    manifest = read_manifest(checkpoint)
    return PartialCheckpoint(directory, manifest, read_index(checkpoint, manifest), before=before)


def test_a_block_of_which_the_disk_gives_less_is_missing_though_it_is_like_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"same" * (3 * MIB // 4)
    checkpoint = write_checkpoint(tmp_path / "there", {"model": content}, step=1)
    (name,) = (path.name for path in checkpoint.glob("*.safetensors"))
    here = tmp_path / "here"
    here.mkdir()
    (here / name).write_bytes((checkpoint / name).read_bytes())
    preadv, cut_at = os.preadv, 2 * BLOCK_BYTES

    def short(descriptor: int, buffers: list[memoryview], at: int) -> int:
        return preadv(descriptor, [buffers[0][:1]] if at == cut_at else buffers, at)

    monkeypatch.setattr(partial_checkpoint.os, "preadv", short)
    partial = begun_at(here, checkpoint)
    partial.close()
    assert [run.begin for run in partial.missing.runs_of(name)] == [cut_at]


def test_a_file_that_was_not_fetched_before_is_fetched_beside_those_that_were(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "a", {"model": b"m" * 99}, step=1)
    second = write_checkpoint(tmp_path / "b", {"model": b"m" * 99, "optim": b"o" * 99}, step=2)
    before = begun_at(tmp_path / "here", first)
    before.close()
    after = begun_at(tmp_path / "here", second, before=before)
    after.close()
    assert after.missing.files() == {path.name for path in second.glob("*.safetensors")}


def test_what_was_fetched_takes_the_place_of_what_had_its_name(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "there", {"model": b"m" * 99}, step=1)
    partial = begun_at(tmp_path / "here", checkpoint)
    run = partial.missing.take(partial.missing.files(), timeout_s=0.0)
    assert run is not None
    partial.write(run, memoryview((checkpoint / run.file).read_bytes()))
    final = tmp_path / "final"
    final.mkdir()
    (final / "of another").write_bytes(b"old")
    partial.finish(
        final, index=(checkpoint / INDEX).read_bytes(), manifest=(checkpoint / MANIFEST).read_bytes()
    )
    assert files_of(final) == files_of(checkpoint)
