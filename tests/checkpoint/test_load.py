"""Loading by itself and with others: what is read, by whom, and what happens to what cannot be trusted."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from tests.checkpoint.thread_ranks import Threads

from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DamagedCheckpoint,
    IndexedBox,
    manifest_text,
    read_manifest,
)
from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.checkpoint.load import load_plan
from bloomery.checkpoint.load.load_plan import WantedBox, plan_load
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import CheckpointError


def saved(directory: Path, **tensors: torch.Tensor) -> Path:
    entries = [whole(name.replace("__", "."), tensor) for name, tensor in tensors.items()]
    return save_checkpoint(directory, entries, step=1, incarnation=1)


def columns(tensor: torch.Tensor, rank: int, degree: int, *, name: str = "model.a") -> StateEntry:
    """An empty entry for a rank's share of a matrix's columns."""
    width = tensor.shape[1] // degree
    return StateEntry(
        name=name,
        global_shape=tuple(tensor.shape),
        dtype="float32",
        box=Box((0, rank * width), (tensor.shape[0], width)),
        tensor=torch.zeros(tensor.shape[0], width),
    )


def test_the_weights_alone_are_read_from_a_checkpoint_of_everything(tmp_path: Path):
    tensor = torch.randn(600, 900)
    directory = saved(tmp_path, model__a=tensor, optim__a=torch.randn(600, 900))
    mine, read = torch.zeros(600, 900), list[int]()
    load_checkpoint(directory, [whole("model.a", mine)], parts={"model"}, count=read.append)
    assert torch.equal(mine, tensor)
    assert sum(read) <= mine.nbytes + 2 * BLOCK_BYTES, "nothing of the optimizer"
    with pytest.raises(CheckpointError, match=r"only in the checkpoint:\n    optim\.a"):
        load_checkpoint(directory, [whole("model.a", mine)])
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint:\n    model\.b"):
        load_checkpoint(directory, [whole("model.a", mine), whole("model.b", mine)], parts={"model"})


def test_one_rank_may_want_several_boxes_of_a_tensor_even_overlapping_ones(tmp_path: Path):
    tensor = torch.randn(7, 5)
    directory = saved(tmp_path, model__a=tensor)
    boxes = [Box((0, 3), (1, 2)), Box((1, 0), (4, 5)), Box((5, 0), (1, 1)), Box((4, 0), (3, 5))]
    entries = [
        StateEntry(
            name="model.a", global_shape=(7, 5), dtype="float32", box=box, tensor=torch.zeros(box.shape)
        )
        for box in boxes
    ]
    load_checkpoint(directory, entries)
    for entry in entries:
        (top, left), (height, width) = entry.box.offset, entry.box.shape
        assert torch.equal(entry.tensor, tensor[top : top + height, left : left + width])


def test_rows_too_large_to_read_for_a_part_of_them_are_taken_apart(tmp_path: Path):
    """Half of the second dimension of three long rows: the other half is not read."""
    tensor = torch.randn(3, 2_400_000)
    directory = saved(tmp_path, model__a=tensor)
    mine, read = columns(tensor, 1, 2), list[int]()
    load_checkpoint(directory, [mine], count=read.append)
    assert torch.equal(mine.tensor, tensor[:, 1_200_000:])
    assert sum(read) <= mine.nbytes + 6 * BLOCK_BYTES


def test_what_several_want_is_read_by_one_and_work_is_shared_evenly(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(load_plan, "UNIT_BYTES", 1 << 20)
    tensor, replicated = torch.randn(1000, 1024), torch.randn(2000, 512)
    directory = saved(tmp_path, model__a=tensor, model__b=replicated)
    reads: list[list[int]] = [[], [], [], []]

    def load(ranks: Ranks) -> bool:
        mine, all_of_b = columns(tensor, ranks.rank, 4), torch.zeros(2000, 512)
        entries = [mine, whole("model.b", all_of_b)]
        load_checkpoint(directory, entries, ranks=ranks, count=reads[ranks.rank].append)
        there = tensor[:, ranks.rank * 256 : (ranks.rank + 1) * 256]
        return torch.equal(mine.tensor, there) and torch.equal(all_of_b, replicated)

    assert Threads(4).run(load) == [True] * 4
    by_rank = [sum(read) for read in reads]
    assert sum(by_rank) <= tensor.nbytes + replicated.nbytes + 12 * BLOCK_BYTES
    assert max(by_rank) - min(by_rank) <= 3 * BLOCK_BYTES


@pytest.mark.parametrize("block", [0, 2])  # the reader of the first goes on to blocks that are whole
def test_damage_that_one_rank_reads_is_raised_on_all_and_nobody_waits(
    tmp_path: Path, monkeypatch, block: int
):
    monkeypatch.setattr(load_plan, "UNIT_BYTES", 1 << 20)
    tensor = torch.randn(1000, 1024)
    directory = saved(tmp_path, model__a=tensor)
    (path,) = directory.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[block * BLOCK_BYTES + 7000] ^= 1
    path.write_bytes(content)

    def load(ranks: Ranks) -> None:
        load_checkpoint(directory, [columns(tensor, ranks.rank, 2)], ranks=ranks)

    for result in Threads(2).run(load):
        assert isinstance(result, DamagedCheckpoint) and f"byte {block * BLOCK_BYTES:,} " in result.message


def test_a_load_that_finds_damage_leaves_no_file_open(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(load_plan, "UNIT_BYTES", 1 << 18)  # many reads are left
    directory = saved(tmp_path, model__a=torch.randn(1000, 1024), optim__a=torch.randn(100, 10))
    victim = next(directory.glob("model-*"))
    content = bytearray(victim.read_bytes())
    content[5000] ^= 1
    victim.write_bytes(content)
    blank = [whole("model.a", torch.zeros(1000, 1024)), whole("optim.a", torch.zeros(100, 10))]
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(directory, blank)
    names = {path.name for path in directory.iterdir()}
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this listing
            opened.append(descriptor.readlink())
    assert not [path for path in opened if path.parent == directory and path.name in names]


def test_a_rank_with_another_model_stops_all_with_the_difference(tmp_path: Path):
    directory = saved(tmp_path, model__a=torch.zeros(4, 4))

    def load(ranks: Ranks) -> None:
        wanted = torch.zeros(4, 4) if ranks.rank == 0 else torch.zeros(4, 5)
        load_checkpoint(directory, [whole("model.a", wanted)], ranks=ranks)

    first, second = Threads(2).run(load)
    assert "rank 1" in str(first) and "saved 4×4, here 4×5" in str(first)
    assert "saved 4×4, here 4×5" in str(second)


def test_the_plan_reads_each_saved_byte_that_is_wanted_exactly_once():
    """A second, slow implementation: mark each element of the file, and look who gets what."""
    shape, item = (9, 6, 5), 4
    saved_boxes = [Box((0, 0, 0), (4, 6, 5)), Box((4, 0, 0), (5, 6, 5))]
    boxes, begin = [], 100
    for number, box in enumerate(saved_boxes):
        boxes.append(
            IndexedBox(
                name="model.a",
                dtype="float32",
                global_shape=shape,
                offset=box.offset,
                shape=box.shape,
                scope="shared",
                file=f"{number}.safetensors",
                begin=begin,
                end=begin + box.size * item,
            )
        )
    wishes = [
        [WantedBox("model.a", Box((1, 2, 0), (6, 2, 5)))],
        [WantedBox("model.a", Box((3, 0, 1), (2, 6, 3))), WantedBox("model.a", Box((8, 0, 0), (1, 1, 1)))],
        [],
    ]
    covered: dict[tuple[int, int], torch.Tensor] = {}
    for unit in plan_load({"model.a": boxes}, wishes).units:
        assert unit.reader in (0, 1)
        for read_item in unit.items:
            start, end = read_item.span
            assert (
                end - start == read_item.box.size * item
                and start >= read_item.saved.begin
                and end <= read_item.saved.end
            )
            for destination in read_item.destinations:
                marks = covered.setdefault(
                    (destination.rank, destination.wanted), torch.zeros(shape, dtype=torch.int)
                )
                marks[tuple(slice(o, o + s) for o, s in zip(destination.region.offset, destination.region.shape, strict=True))] += 1  # fmt: skip  # noqa: E501
    for (rank, wish), marks in covered.items():
        box = wishes[rank][wish].box
        wanted = torch.zeros(shape, dtype=torch.int)
        wanted[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))] = 1
        assert torch.equal(marks, wanted)
    assert len(covered) == 3


class Forged:
    """A checkpoint whose manifest and index were rewritten, with hashes that fit."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = saved(tmp_path, model__a=torch.randn(8, 8))
        self.index = json.loads((self.directory / "index.json").read_text())

    def write(self, **of_manifest) -> Path:
        text = json.dumps(self.index).encode()
        (self.directory / "index.json").write_bytes(text)
        manifest = read_manifest(self.directory)
        changed = {"index_bytes": len(text), "index_xxh3_128": xxhash.xxh3_128_hexdigest(text), **of_manifest}
        forged = type(manifest)(**{**vars(manifest), **changed})
        (self.directory / "manifest.json").write_text(manifest_text(forged))
        return self.directory

    @property
    def box(self) -> dict:
        return self.index["boxes"][0]


FORGERIES = {
    "a file outside": lambda it: it.box.update(file="../../secret"),
    "a huge place": lambda it: it.box.update(begin=1 << 60, end=(1 << 60) + 256),
    "a negative place": lambda it: it.box.update(begin=-256, end=0),
    "bytes that are not the shape's": lambda it: it.box.update(end=it.box["end"] - 4),
    "a box outside its tensor": lambda it: it.box.update(offset=[1 << 40, 0]),
    "a huge tensor": lambda it: it.box.update(global_shape=[1 << 40, 1 << 40], shape=[1 << 40, 1 << 40]),
    "an unknown type": lambda it: it.box.update(dtype="__class__"),
    "a shape that is none": lambda it: it.box.update(shape="wide"),
    "no boxes": lambda it: it.index.pop("boxes"),
    "no hashes": lambda it: next(iter(it.index["files"].values())).update(blocks=""),
    "a file of another size": lambda it: next(iter(it.index["files"].values())).update(bytes=1 << 50),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_index_that_lies_is_refused_before_anything_is_read_or_allocated(tmp_path: Path, forgery: str):
    forged = Forged(tmp_path)
    FORGERIES[forgery](forged)
    directory = forged.write()
    with pytest.raises(DamagedCheckpoint, match="not a valid index"):
        load_checkpoint(directory, [whole("model.a", torch.zeros(8, 8))])


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", "", "manifest.json", "index.json", ".h"]
)
def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: str):
    forged = Forged(tmp_path)
    (record,) = read_manifest(forged.directory).files
    directory = forged.write(files=(type(record)(**{**vars(record), "name": name}),))
    with pytest.raises(DamagedCheckpoint, match="cannot be named"):
        read_manifest(directory)


IMPOSSIBLE = {
    "a file of negative size": (lambda it: {"files": (replace(it, bytes=-1),)}, "cannot have -1 bytes"),
    "a file twice": (lambda it: {"files": (it, it)}, "names a file twice"),
    "an index of negative size": (lambda it: {"index_bytes": -1}, "index cannot have -1 bytes"),
    "an index too large to read": (lambda it: {"index_bytes": (64 << 30) + 1}, "index cannot have"),
    "a size that is none": (lambda it: {"files": (replace(it, bytes="many"),)}, "not a valid manifest"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_manifest_of_what_cannot_be_is_refused(tmp_path: Path, what: str):
    forged, (forge, said) = Forged(tmp_path), IMPOSSIBLE[what]
    (record,) = read_manifest(forged.directory).files
    directory = forged.write(**forge(record))
    with pytest.raises(DamagedCheckpoint, match=said):
        read_manifest(directory)


def test_boxes_that_leave_a_hole_are_refused(tmp_path: Path):
    forged = Forged(tmp_path)
    forged.box.update(global_shape=[9, 8])
    directory = forged.write()
    with pytest.raises(CheckpointError, match=r"does not hold all of model\.a"):
        load_checkpoint(directory, [whole("model.a", torch.zeros(9, 8))])


def test_the_manifest_of_another_checkpoint_is_found_out(tmp_path: Path):
    one = saved(tmp_path / "one", model__a=torch.randn(8, 8))
    other = saved(tmp_path / "other", model__a=torch.randn(8, 8))
    (one / "manifest.json").write_bytes((other / "manifest.json").read_bytes())
    with pytest.raises(DamagedCheckpoint, match=r"index\.json is damaged"):
        load_checkpoint(one, [whole("model.a", torch.zeros(8, 8))])
    (one / "index.json").write_bytes((other / "index.json").read_bytes())
    with pytest.raises(
        DamagedCheckpoint,
        match=r"safetensors: the block at byte 0 does not have the hash .*\(it holds model\.a\)",
    ):
        load_checkpoint(one, [whole("model.a", torch.zeros(8, 8))])
