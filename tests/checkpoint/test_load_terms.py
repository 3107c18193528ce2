"""What ranks that load together wait for, say of damage, and copy where one wants the same rows twice."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.checkpoint.test_readers import FILES, readers_of, rows_of

from bloomery.checkpoint.format.data_file import BlockHasher
from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DamagedCheckpoint,
    IndexedBox,
    read_index,
    read_manifest,
)
from bloomery.checkpoint.format.source import STORED_AT, LocalCheckpoint, StoredCheckpoint
from bloomery.checkpoint.format.state import OPTIONAL_PREFIXES, Box, StateEntry, whole
from bloomery.checkpoint.format.verified_reader import VerifiedReader
from bloomery.checkpoint.load import executor, load_plan, loader
from bloomery.checkpoint.load.executor import load_on_all_ranks
from bloomery.checkpoint.load.load_plan import WantedBox, plan_load
from bloomery.checkpoint.load.loader import _by_name, load_checkpoint, read_in_pieces, read_model
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import CheckpointError


def test_who_reads_a_file_is_who_wants_it_even_where_another_has_less_to_read() -> None:
    plan = plan_load({"a": FILES[:2]}, [[], [rows_of(0, 4)]], readers={"f0": [0, 1], "f1": [0, 1]})
    assert readers_of(plan) == [("f0", 1, 0), ("f1", 1, 1)]


def test_ranks_that_load_together_read_each_file_where_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(8.0)
    saved = save_checkpoint(tmp_path, [whole("model.a", tensor)], step=3, incarnation=1)
    (file,) = read_manifest(LocalCheckpoint(saved)).files
    plans: list[load_plan.LoadPlan] = []

    def noted(source: Any, index: Any, plan: load_plan.LoadPlan, *words: Any, **how: Any) -> None:
        plans.append(plan)

    monkeypatch.setattr(loader, "load_on_all_ranks", noted)
    ranks = Ranks(rank=0, world=2, gather=lambda own: [own, own], exchange=lambda *words: None)
    wanted = [whole("model.a", torch.zeros(8))]
    load_checkpoint(saved, wanted, ranks=ranks, readers={file.name: [1]})
    assert [unit.reader for plan in plans for unit in plan.units] == [1]


@pytest.mark.parametrize("prefix", OPTIONAL_PREFIXES)
def test_state_that_only_one_side_may_have_makes_no_other_model(tmp_path: Path, prefix: str) -> None:
    entries = [whole("model.a", torch.ones(4)), whole(f"{prefix}a", torch.ones(2))]
    for saved, wanted in ((entries, entries[:1]), (entries[:1], entries)):
        directory = save_checkpoint(tmp_path / str(len(saved)), saved, step=3, incarnation=1)
        load_checkpoint(directory, wanted)


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


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A checkpoint of tensors of two parts, scopes and types, given in no order of their names."""
    entries = [
        whole("model.b", torch.arange(10.0).view(5, 2), scope="shared"),
        whole("model.a", torch.arange(3, dtype=torch.bfloat16), scope="peer"),
        whole("optim.c", torch.ones(2), scope="peer"),
    ]
    return save_checkpoint(tmp_path, entries, step=3, incarnation=1)


@pytest.fixture
def unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of an index, in the reverse of its order."""
    by_name = loader._by_name
    monkeypatch.setattr(loader, "_by_name", lambda boxes: dict(reversed(by_name(boxes).items())))


@pytest.mark.usefixtures("unordered")
def test_tensors_come_in_pieces_of_whole_rows_in_the_order_of_their_names(several: Path) -> None:
    pieces = list(read_in_pieces(several, prefix="model.", piece_bytes=16))
    assert [(piece.name, piece.scope, piece.box) for piece in pieces] == [
        ("model.a", "peer", Box((0,), (3,))),
        ("model.b", "shared", Box((0, 0), (2, 2))),
        ("model.b", "shared", Box((2, 0), (2, 2))),
        ("model.b", "shared", Box((4, 0), (1, 2))),
    ]
    assert torch.equal(torch.cat([piece.tensor for piece in pieces[1:]]), torch.arange(10.0).view(5, 2))
    with pytest.raises(CheckpointError, match="holds no tensors named head") as refused:
        list(read_in_pieces(several, prefix="head.", piece_bytes=16))
    assert refused.value.remedy == "Take another checkpoint."


def test_the_memory_of_a_piece_is_free_before_that_of_the_next_one_is_taken(
    several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def taking(*shape: Any, **how: Any) -> torch.Tensor:
        assert all(tensor() is None for tensor in held)
        taken = torch.empty(*shape, **how)
        held.append(weakref.ref(taken))
        return taken

    monkeypatch.setattr(loader, "empty", taking)
    for piece in read_in_pieces(several, prefix="model.b", piece_bytes=16):
        del piece
    assert len(held) == 3


@pytest.mark.usefixtures("unordered")
def test_tensors_of_a_model_come_by_name_and_in_full_precision(several: Path) -> None:
    read = list(read_model(several))
    assert [(name, tensor.dtype) for name, tensor in read] == [("a", torch.float32), ("b", torch.float32)]
    assert [name for name, _ in read_model(several, names=["b", "a"])] == ["b", "a"]
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensors of the model, model\.z among them"
    ) as refused:
        next(read_model(several, names=["a", "z"]))
    assert "recipe.toml beside checkpoints/" in refused.value.remedy


def test_names_of_other_ranks_are_not_missing_and_types_may_differ_only_where_asked(several: Path) -> None:
    mine = [whole("model.a", torch.zeros(3))]
    with pytest.raises(CheckpointError, match=r"model\.a: saved as bfloat16, here float32"):
        load_checkpoint(several, mine, names=["model.b", "optim.c"])
    load_checkpoint(several, mine, strict=False)
    assert mine[0].tensor.tolist() == [0.0, 1.0, 2.0]
    as_saved = [whole("model.a", torch.zeros(3, dtype=torch.bfloat16))]
    load_checkpoint(several, as_saved, names=["model.b", "optim.c"])
    with pytest.raises(CheckpointError, match=r"1 only in the checkpoint:\n    optim\.c"):
        load_checkpoint(several, as_saved, names=["model.b"])


def test_damage_names_the_tensors_of_its_block_and_not_the_one_that_begins_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(2 * BLOCK_BYTES))
    hasher = BlockHasher()
    hasher.update(memoryview(b"\1" * 2 * BLOCK_BYTES))
    boxes = [
        IndexedBox(
            name=name, dtype="int8", global_shape=(BLOCK_BYTES,), offset=(0,), shape=(BLOCK_BYTES,),
            scope="shared", file="f", begin=begin, end=begin + BLOCK_BYTES,
        )
        for name, begin in (("a", 0), ("b", BLOCK_BYTES))
    ]  # fmt: skip
    for begin, name in ((0, "a"), (BLOCK_BYTES, "b")):
        with VerifiedReader(LocalCheckpoint(tmp_path), hasher.record("f"), boxes=boxes) as reader:
            piece = memoryview(bytearray(BLOCK_BYTES))
            with pytest.raises(DamagedCheckpoint, match=rf"at byte {begin:,} .*\(it holds {name}\)\n"):
                reader.read([(begin, piece)])


@pytest.mark.parametrize(
    "read",
    [
        lambda where: read_model(where),
        lambda where: read_in_pieces(where, prefix="model.b", piece_bytes=16),
    ],
)
def test_a_shape_that_its_files_do_not_fill_is_refused_before_memory_is_taken(
    several: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(
        loader,
        "_by_name",
        lambda boxes: {
            "model.b": [structs.replace(box, global_shape=(9, 2)) for box in boxes if box.name == "model.b"]
        },
    )
    monkeypatch.setattr(loader, "empty", lambda *given, **named: pytest.fail("memory was taken"))
    with pytest.raises(CheckpointError, match=r"does not hold all of model\.b: its boxes leave a part of it"):
        next(read(several))
