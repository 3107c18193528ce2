"""Smaller copies, and the weights that a run begins with: what is kept, counted, asked and refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bloomery import durable
from bloomery.checkpoint.format.manifest import read_index, read_manifest
from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.checkpoint.save import direct
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange import initial_weights, slim
from bloomery.interchange.families.family import HfTensor
from bloomery.interchange.initial_weights import _fill_match, load_initial_weights
from bloomery.interchange.quantised_weights import Scheme
from bloomery.interchange.slim import Slimmed, slim_checkpoint, slim_file
from bloomery.interchange.tensor_matching import Match
from bloomery.interchange.weight_files import open_weights


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entries = [whole(f"{part}.a", torch.arange(100.0)) for part in ("model", "model2", "optim")]
    values: Any = {"train": {"step": 3}, "data": {"at": 4}, "guards": {"x": 5}, "outer": {}}
    with monkeypatch.context() as at:
        at.setattr(direct, "now", lambda: 5.0)
        return save_checkpoint(
            tmp_path / "checkpoints", entries, step=3, incarnation=2, values=values, about={"loss": 1.5}
        )


def test_a_slim_checkpoint_is_of_the_same_step_life_and_time(checkpoint: Path, tmp_path: Path) -> None:
    told: list[tuple[Any, ...]] = []
    done = slim_checkpoint(checkpoint, tmp_path / "slim", progress=lambda *what: told.append(what))
    before, after = read_manifest(checkpoint), read_manifest(tmp_path / "slim" / checkpoint.name)
    assert done == Slimmed(
        path=tmp_path / "slim" / checkpoint.name, before=before.bytes, after=after.bytes, repaired=0
    )
    assert (after.step, after.incarnation, after.time, after.about) == (3, 2, 5.0, {"loss": 1.5})
    assert after.values == {"train": {"step": 3}, "data": {"at": 4}}
    assert [box.name for box in read_index(done.path, after).boxes] == ["model.a"]
    assert told[-1][:2] == ("slimming", 400) and told[-1][2] == 4096 + 400, "of the file of the model"
    with pytest.raises(CheckpointError, match=r"(?s)exists already.*Choose another directory, or remove it"):
        slim_checkpoint(checkpoint, tmp_path / "slim")


def test_a_slim_copy_that_fails_leaves_what_was_there_before(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise StorageError("no space", remedy="")

    monkeypatch.setattr(slim, "save_streamed", refused)
    for exists in (False, True):
        directory = tmp_path / f"slim{exists}"
        if exists:
            directory.mkdir()
        with pytest.raises(StorageError, match="no space"):
            slim_checkpoint(checkpoint, directory)
        assert directory.exists() is exists
    run = RunDirectory(tmp_path / "run").create()
    begin(run, base=None, reason="start")
    run.recipe.touch()
    for inside in (run.path, run.checkpoints):
        with pytest.raises(CheckpointError, match=f"{inside} belongs to a run"):
            slim_checkpoint(checkpoint, inside)


def test_a_slim_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt")

    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "publish", refused)
    with pytest.raises(StorageError, match="Writing a slimmed file"):
        slim_file(tmp_path / "old.pt", tmp_path / "new.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["old.pt"]


def test_a_run_begins_with_the_model_alone_of_the_newest_checkpoint_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    begin(run, base=None, reason="start")
    run.recipe.touch()
    saved = [
        save_checkpoint(run.checkpoints, [whole("model.a", torch.ones(2))], step=step, incarnation=1)
        for step in (5, 10)
    ]
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(initial_weights, "load_checkpoint", lambda *given, **how: asked.append((given, how)))
    entries, ranks, model = [whole("model.a", torch.zeros(2))], Ranks(), SimpleNamespace()
    for place, checkpoint in ((run.path, saved[1]), (saved[0], saved[0])):
        found = load_initial_weights(str(place), iter(entries), model=model, ranks=ranks)  # type: ignore[arg-type]
        assert found == str(checkpoint)
        assert asked.pop() == ((checkpoint, tuple(entries)), {"parts": {"model"}, "ranks": ranks})
    first = str(saved[0])
    others = Ranks(rank=1, world=2, gather=lambda value: [{"result": first, "failure": None}, value])
    found = load_initial_weights(str(run.path), iter(entries), model=model, ranks=others)  # type: ignore[arg-type]
    assert found == first, "the first rank says which"


def test_of_a_transformers_directory_checksums_come_first_and_then_each_rank_fills_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    section, model = object(), SimpleNamespace(section=None)
    model.section = section
    filled: list[Any] = []
    matched = [
        Match(entry=HfTensor(name="one", parts=("a", "b")), stored="one"),
        Match(entry=HfTensor(name="two", parts=("c",)), stored="two"),
    ]

    def opened(directory: Path, *, section: object) -> Any:
        asked.append(("open", directory, section))
        return SimpleNamespace(matched=matched)

    monkeypatch.setattr(
        initial_weights, "check_checksums", lambda directory: asked.append(("sums", directory))
    )
    monkeypatch.setattr(initial_weights, "open_model", opened)
    monkeypatch.setattr(initial_weights, "_fill_match", lambda *given: filled.append(given[:2]))
    entries = [
        whole("model.b", torch.zeros(2)),
        whole("model.x", torch.zeros(2)),
        whole("model.b", torch.ones(2)),
    ]
    found = load_initial_weights(str(tmp_path), entries, model=model, ranks=Ranks())  # type: ignore[arg-type]
    assert found == str(tmp_path)
    assert asked == [("sums", tmp_path), ("open", tmp_path, section)]
    assert filled == [(matched[0], {"b": [entries[0], entries[2]]})]


def test_a_box_is_filled_with_its_own_rows_and_columns(tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(6, 4)
    save_file({"plain": values, "turned": values.t().contiguous()}, tmp_path / "model.safetensors")
    opened: Any = SimpleNamespace(files=open_weights(tmp_path), resolved=None)
    for name, layout in (("plain", "plain"), ("turned", "transposed")):
        held = [
            StateEntry(
                name="model.w", global_shape=(6, 4), dtype="float32", box=box, tensor=torch.zeros(box.shape)
            )
            for box in (Box((1, 2), (3, 2)), Box((5, 0), (1, 4)))
        ]
        entry = HfTensor(name=name, parts=("w",), layout=layout)  # type: ignore[arg-type]
        _fill_match(Match(entry=entry, stored=name), {"w": held}, opened)
        assert torch.equal(held[0].tensor, values[1:4, 2:4]) and torch.equal(held[1].tensor, values[5:])


def test_a_box_of_a_matrix_of_codes_is_filled_with_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    codes = torch.tensor([[127, 0], [-127, 127], [0, 127]], dtype=torch.int8)
    save_file({"w.weight": codes, "w.SCB": torch.tensor([2.0, 4.0, 8.0])}, tmp_path / "model.safetensors")
    scheme = Scheme(kind="int8", dtype="I8")
    opened: Any = SimpleNamespace(files=open_weights(tmp_path, scheme=scheme), resolved=None)
    box = Box((1, 0), (2, 2))
    held = StateEntry(
        name="model.w", global_shape=(3, 2), dtype="float32", box=box, tensor=torch.zeros(box.shape)
    )
    match = Match(entry=HfTensor(name="w.weight", parts=("w",)), stored="w.weight")
    _fill_match(match, {"w": [held]}, opened)
    assert held.tensor.tolist() == [[-4.0, 4.0], [0.0, 8.0]]
