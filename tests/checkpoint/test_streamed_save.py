"""States that are too large to be held: saved from an iterator, a little at a time."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bloomery.checkpoint.format.catalogue import disk_bytes_per_tensor_byte, verify
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.checkpoint.load.loader import read_in_pieces, read_tensors
from bloomery.checkpoint.save import direct
from bloomery.checkpoint.save.direct import save_checkpoint, save_streamed
from bloomery.errors import CheckpointError

ITEMS = 1000
COUNT = 30


class Stream:
    """Tensors that are made one at a time. most: how many of them there were at once."""

    def __init__(self) -> None:
        self.most, self._made = 0, list[weakref.ref[torch.Tensor]]()

    def __iter__(self) -> Iterator[StateEntry]:
        for number in range(COUNT):
            part = "model" if number % 3 else "optim"
            tensor = torch.full((ITEMS,), float(number))
            self._made.append(weakref.ref(tensor))
            self.most = max(self.most, sum(made() is not None for made in self._made))
            yield whole(f"{part}.{number:02d}", tensor)
            del tensor


def test_a_streamed_save_holds_one_tensor_and_so_many_bytes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(direct, "STREAM_BYTES", 4 * ITEMS * 4)
    stream = Stream()
    saved = save_streamed(tmp_path, stream, step=3, incarnation=2, time=7.5, about={"told": 1})
    assert stream.most == 4
    read: list[int] = []
    assert saved.name == "step-000003.i002" and verify(saved, progress=read.append) == []
    assert sum(read) == sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    manifest = read_manifest(saved)
    assert (manifest.time, manifest.about, manifest.world) == (7.5, {"told": 1}, 1)
    found = {name: tensor[0].item() for name, tensor in read_tensors(saved)}
    assert len(manifest.files) == 15, (
        "one of each part for each four tensors, and of the model for the last two"
    )
    assert found == {f"{'model' if n % 3 else 'optim'}.{n:02d}": n for n in range(COUNT)}


def test_a_stream_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct, "STREAM_BYTES", ITEMS * 4)

    def breaks_off() -> Iterator[StateEntry]:
        yield from list(Stream())[:3]
        raise CheckpointError("the other checkpoint is damaged")

    with pytest.raises(CheckpointError, match="is damaged"):
        save_streamed(tmp_path, breaks_off(), step=3, incarnation=2)
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_that_a_checkpoint_takes_beyond_its_tensors_are_told(tmp_path: Path):
    few = save_checkpoint(tmp_path, list(Stream()), step=3, incarnation=1)
    many = save_checkpoint(
        tmp_path, [whole(f"model.{n}", torch.ones(1)) for n in range(99)], step=4, incarnation=1
    )
    assert [disk_bytes_per_tensor_byte(saved) for saved in (few, many)] == [1.0, 1.0], (
        "however long the headers are"
    )
    (few / "beside").write_bytes(bytes(ITEMS * 4 * COUNT // 2))
    assert disk_bytes_per_tensor_byte(few) == 1.5


@pytest.mark.parametrize("piece_bytes", [1, 40, 41, 79, 80, 1 << 20])
def test_tensors_are_read_in_pieces_of_whole_rows_that_are_no_larger_than_asked(
    tmp_path: Path, piece_bytes: int
):
    tensors = {
        "model.a": torch.randn(7, 10),
        "model.b": torch.tensor(3.0),
        "model.c": torch.zeros(0, 4),
        "model.d": torch.randn(5).bfloat16(),
        "model.e": torch.zeros(3, 0),
    }
    entries = [whole(name, tensor) for name, tensor in tensors.items()]
    saved = save_checkpoint(tmp_path, [*entries, whole("optim.a", torch.zeros(3))], step=3, incarnation=1)
    pieces = list(read_in_pieces(saved, prefix="model.", piece_bytes=piece_bytes))
    assert sorted({piece.name for piece in pieces}) == [piece for piece in tensors]
    assert [piece.name for piece in pieces] == sorted(piece.name for piece in pieces)
    for name, tensor in tensors.items():
        of_tensor = [piece for piece in pieces if piece.name == name]
        for piece in of_tensor:
            row = piece.nbytes // piece.box.shape[0] if piece.box.size and piece.box.shape else 0
            assert piece.nbytes <= max(piece_bytes, row) or not piece.box.shape
            assert piece.global_shape == tuple(tensor.shape)
            assert torch.equal(piece.tensor, tensor[piece.box.window])
        assert sum(piece.box.size for piece in of_tensor) == tensor.numel()
    rows = max(1, piece_bytes // 40)
    assert len([piece for piece in pieces if piece.name == "model.a"]) == -(-7 // rows)
    with pytest.raises(CheckpointError, match=r"(?s)no tensors named outer\.\*.*Take another checkpoint"):
        next(read_in_pieces(saved, prefix="outer.", piece_bytes=1))


def test_tensors_come_in_the_order_that_is_asked_for_and_one_that_is_not_there_is_told(tmp_path: Path):
    entries = [whole(name, torch.ones(2)) for name in ("model.a", "model.b", "optim.c")]
    saved = save_checkpoint(tmp_path, entries, step=3, incarnation=1)
    assert [name for name, _ in read_tensors(saved, names=["optim.c", "model.a"])] == ["optim.c", "model.a"]
    assert [name for name, _ in read_tensors(saved, prefix="model.")] == ["model.a", "model.b"]
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors of the model, model\.x among them"):
        next(read_tensors(saved, names=["model.x", "model.a", "model.y"]))
    with pytest.raises(CheckpointError, match=r"no tensors named outer\.\*"):
        next(read_tensors(saved, prefix="outer."))


def test_a_tensor_of_which_rows_are_missing_is_not_read_as_if_it_were_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bloomery.checkpoint.format.commit.check_coverage", lambda *given: None)
    rows = torch.ones(3, 2)
    half = StateEntry(
        name="model.a", global_shape=(6, 2), dtype="float32", box=Box((0, 0), (3, 2)), tensor=rows
    )
    saved = save_checkpoint(tmp_path, [half], step=3, incarnation=1)
    with pytest.raises(CheckpointError, match=r"does not hold all of model\.a"):
        list(read_tensors(saved))
    with pytest.raises(CheckpointError, match=r"does not hold all of model\.a"):
        next(read_in_pieces(saved, prefix="", piece_bytes=24))


@pytest.mark.parametrize("rows", [10**13, (1 << 62) - 1])
def test_a_shape_that_the_files_do_not_fill_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
):
    monkeypatch.setattr("bloomery.checkpoint.format.commit.check_coverage", lambda *given: None)
    none = StateEntry(
        name="model.a",
        global_shape=(rows, 2),
        dtype="float32",
        box=Box((0, 0), (0, 2)),
        tensor=torch.ones(0, 2),
    )
    saved = save_checkpoint(tmp_path, [none], step=3, incarnation=1)
    for read in (read_tensors(saved), read_in_pieces(saved, prefix="", piece_bytes=24)):
        with pytest.raises(
            CheckpointError, match=r"does not hold all of model\.a: its boxes leave a part of"
        ):
            next(read)


def test_pieces_of_a_tensor_belong_to_what_the_tensor_belongs_to(tmp_path: Path):
    entries = [whole("model.a", torch.ones(4)), whole("model.b", torch.ones(4), scope="peer")]
    saved = save_checkpoint(tmp_path, entries, step=3, incarnation=1)
    pieces = read_in_pieces(saved, prefix="model.", piece_bytes=8)
    assert [(piece.name, piece.scope) for piece in pieces] == [
        *[("model.a", "shared")] * 2,
        *[("model.b", "peer")] * 2,
    ]
