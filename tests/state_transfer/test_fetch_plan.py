"""Which sources a fetch asks, and what it knows of their files, with as many of both as a large run has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.served_states import make_checkpoint
from tests.protocol import example

from bloomery.checkpoint.format.manifest import FileRecord, read_index, read_manifest
from bloomery.errors import PeerError
from bloomery.state_transfer import averages
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
