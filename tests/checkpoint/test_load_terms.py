"""What ranks that load together wait for, say of damage, and copy where one wants the same rows twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.test_readers import FILES, readers_of, rows_of

from bloomery.checkpoint.format.manifest import read_index, read_manifest
from bloomery.checkpoint.format.source import STORED_AT, LocalCheckpoint, StoredCheckpoint
from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.checkpoint.load import executor, load_plan
from bloomery.checkpoint.load.executor import load_on_all_ranks
from bloomery.checkpoint.load.load_plan import WantedBox, plan_load
from bloomery.checkpoint.load.loader import _by_name, load_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.checkpoint.writer.ranks import Ranks


def test_who_reads_a_file_is_who_wants_it_even_where_another_has_less_to_read() -> None:
    plan = plan_load({"a": FILES[:2]}, [[], [rows_of(0, 4)]], readers={"f0": [0, 1], "f1": [0, 1]})
    assert readers_of(plan) == [("f0", 1, 0), ("f1", 1, 1)]


@dataclass(frozen=True, kw_only=True)
class Polling(Ranks):
    """One rank that says how often it polled."""

    polled: list[bool]

    def poll_on_all(self, act: Callable[[], Any], **how: Any) -> list[Any]:
        self.polled.append(True)
        return [act()]


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_read_from_a_store_is_waited_for_by_polling_and_one_from_the_disk_is_not(
    tmp_path: Path, is_stored: bool
) -> None:
    saved = save_checkpoint(tmp_path / "store", [whole("model.a", torch.arange(8.0))], step=3, incarnation=1)
    source: LocalCheckpoint | StoredCheckpoint = LocalCheckpoint(saved)
    if is_stored:
        entry = tmp_path / saved.name
        entry.mkdir()
        (entry / STORED_AT).write_text(json.dumps({"url": f"file://{saved}"}))
        (entry / "manifest.json").write_bytes((saved / "manifest.json").read_bytes())
        source = StoredCheckpoint(entry)
    blank, ranks = whole("model.a", torch.zeros(8)), Polling(exchange=lambda sends, receives: None, polled=[])
    index = read_index(source, read_manifest(source))
    plan = plan_load(_by_name(index.boxes), [[WantedBox("model.a", blank.box)]])
    assert load_on_all_ranks(source, index, plan, [blank], ranks=ranks) is None
    assert torch.equal(blank.tensor, torch.arange(8.0)) and ranks.polled == [True] * is_stored


def test_of_several_damages_that_a_rank_reads_the_first_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [whole(f"{part}.a", torch.arange(8.0)) for part in ("model", "optim")]
    saved = save_checkpoint(tmp_path, entries, step=3, incarnation=1)
    for path in saved.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    source = LocalCheckpoint(saved)
    index = read_index(source, read_manifest(source))
    plan = plan_load(_by_name(index.boxes), [[WantedBox(item.name, item.box) for item in entries]])
    assert [unit.file.partition("-")[0] for unit in plan.units] == ["model", "optim"]
    ranks = Ranks(exchange=lambda sends, receives: None)
    failure = load_on_all_ranks(source, index, plan, entries, ranks=ranks)
    assert failure is not None and "model-r00000" in failure.message


def test_rows_that_one_rank_wants_twice_are_read_once_and_are_in_both_places(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, [whole("model.a", torch.arange(8.0))], step=3, incarnation=1)
    read: list[int] = []
    twice = [whole("model.a", torch.zeros(8)) for _ in range(2)]
    part = StateEntry(
        name="model.a", global_shape=(8,), dtype="float32", box=Box((2,), (3,)), tensor=torch.zeros(3)
    )
    load_checkpoint(saved, [*twice, part], count=read.append)
    assert all(torch.equal(entry.tensor, torch.arange(8.0)) for entry in twice)
    assert part.tensor.tolist() == [2.0, 3.0, 4.0] and len(read) == 1


def test_no_more_units_are_read_ahead_than_there_are_threads_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plan, "UNIT_BYTES", 4)
    saved = save_checkpoint(tmp_path, [whole("model.a", torch.arange(40.0))], step=3, incarnation=1)
    source, blank = LocalCheckpoint(saved), whole("model.a", torch.zeros(40))
    index = read_index(source, read_manifest(source))
    units = plan_load(_by_name(index.boxes), [[WantedBox("model.a", blank.box)]]).units
    assert len(units) == 40
    with executor._Reader(source, index, [blank], rank=0, count=None) as reading:
        messages = reading.messages(units)
        for number in range(30):
            next(messages)
            assert sum(reading._units_left.values()) >= 40 - number - 1 - executor.THREADS
