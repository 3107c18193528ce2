import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.checkpoint.small_run import Run

from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.commit import commit, partial_directory
from bloomery.checkpoint.format.data_file import split_entries
from bloomery.checkpoint.format.manifest import read_index, read_manifest
from bloomery.checkpoint.format.state import Box, StateEntry, collect, whole
from bloomery.checkpoint.load.loader import load_checkpoint, read_model
from bloomery.checkpoint.save.direct import save_checkpoint, write_part
from bloomery.errors import CheckpointError


def saved(directory: Path, entries, **more) -> Path:
    return save_checkpoint(directory, entries, step=12, incarnation=3, **more)


def piece(name: str, tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> StateEntry:
    """Return the entry of one box of `tensor`; its memory is a copy."""
    cut = tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    return StateEntry(
        name=name,
        global_shape=tuple(tensor.shape),
        dtype="float32",
        box=Box(offset, shape),
        tensor=cut.clone(),
    )


def grid(name: str, tensor: torch.Tensor, cuts: tuple[list[int], list[int]]) -> list[StateEntry]:
    """Cut a matrix at the given rows and columns."""
    rows = list(zip(cuts[0], cuts[0][1:], strict=False))
    columns = list(zip(cuts[1], cuts[1][1:], strict=False))
    return [
        piece(name, tensor, (top, left), (bottom - top, right - left))
        for (top, bottom), (left, right) in product(rows, columns)
    ]


def test_a_state_comes_back_bit_for_bit_with_its_values(tmp_path: Path):
    run = Run().fill(5)
    state = collect(run.parts)
    directory = saved(tmp_path, state.entries, values=state.values, about={"consumed_tokens": 9})
    assert directory.name == "step-000012.i003"
    assert read_manifest(directory).about == {"consumed_tokens": 9}
    assert verify(directory) == []
    other = Run()
    values = load_checkpoint(directory, collect(other.parts).entries)
    other.moments.load_state_values(values["optim"])
    assert other.equals(run)


def test_safetensors_alone_reads_it(tmp_path: Path):
    run = Run().fill(5)
    directory = saved(tmp_path, collect(run.parts).entries)
    found = {}
    for path in directory.glob("model-*.safetensors"):
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + header) % 4096 == 0
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert found.keys() == run.weights.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in run.weights.tensors.items())


def test_every_element_type_survives(tmp_path: Path):
    from bloomery.checkpoint.format.state import ITEM_BYTES

    entries = [
        whole(f"model.{name}", torch.arange(11).to(getattr(torch, name)).reshape(11, 1))
        for name in ITEM_BYTES
    ]
    directory = saved(tmp_path, entries)
    blank = [whole(item.name, torch.zeros_like(item.tensor)) for item in entries]
    load_checkpoint(directory, blank)
    for before, after in zip(entries, blank, strict=True):
        assert torch.equal(before.tensor.float(), after.tensor.float())
    with safe_open(next(directory.glob("*.safetensors")), framework="pt") as file:
        assert torch.equal(file.get_tensor("model.bfloat16").float(), torch.arange(11.0).reshape(11, 1))
        types = {name: file.get_tensor(f"model.{name}").dtype for name in ITEM_BYTES}
        assert types == {name: getattr(torch, name) for name in ITEM_BYTES}


def test_a_view_is_stored_with_no_more_than_its_own_elements(tmp_path: Path):
    storage = torch.randn(1000, 100)
    view = storage[10:20, 3:7]
    directory = saved(tmp_path, [whole("model.view", view)])
    assert sum(path.stat().st_size for path in directory.iterdir()) < 4096 + 10 * 4 * 4 + 2000
    ((name, tensor),) = read_model(directory)
    assert name == "view" and torch.equal(tensor, view)


LAYOUTS = {
    "whole": ([0, 70], [0, 40]),
    "rows": ([0, 1, 33, 70], [0, 40]),
    "columns": ([0, 70], [0, 13, 40]),
    "blocks": ([0, 20, 69, 70], [0, 8, 39, 40]),
}


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_any_boxes_are_filled_from_any_boxes(tmp_path: Path, before: str, after: str):
    tensor = torch.randn(70, 40)
    directory = saved(tmp_path, grid("model.a", tensor, LAYOUTS[before]))
    blank = grid("model.a", torch.zeros(70, 40), LAYOUTS[after])
    load_checkpoint(directory, blank)
    for entry, right in zip(blank, grid("model.a", tensor, LAYOUTS[after]), strict=True):
        assert torch.equal(entry.tensor, right.tensor)
    ((_, merged),) = read_model(directory)
    assert torch.equal(merged, tensor)


def test_loading_writes_into_strided_memory_in_place(tmp_path: Path):
    tensor = torch.randn(50, 30)
    directory = saved(tmp_path, [whole("model.a", tensor)])
    storage = torch.zeros(30, 50)
    load_checkpoint(directory, [whole("model.a", storage.T)])
    assert torch.equal(storage.T, tensor)


def test_blocks_between_and_within_tensors_larger_than_a_block_are_right(tmp_path: Path):
    entries = [whole(f"model.{n}", torch.randn(3, 130_001 + n)) for n in range(3)]  # 1.5 MB each
    directory = saved(tmp_path, entries)
    index = read_index(directory, read_manifest(directory))
    (record,) = index.files.values()
    assert len(record.blocks) == 16 * -(-record.bytes // (1 << 20))
    blank = [whole(item.name, torch.zeros_like(item.tensor)) for item in entries]
    load_checkpoint(directory, blank)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(entries, blank, strict=True))


def test_two_ranks_write_their_parts_and_one_commits_them(tmp_path: Path):
    tensor = torch.randn(70, 40)
    pieces = grid("model.a", tensor, LAYOUTS["rows"])
    partial = partial_directory(tmp_path, step=1, incarnation=1)
    partial.mkdir()
    parts = [
        write_part(partial, pieces[:1], rank=0, world=2),
        write_part(partial, pieces[1:], rank=1, world=2, file_bytes=1),
    ]
    parts = [type(part).from_json(json.loads(json.dumps(part.to_json()))) for part in parts]
    directory = commit(partial, parts, step=1, incarnation=1, time=0.0, values={}, about={})
    assert len(list(directory.glob("model-*"))) == 3
    assert verify(directory) == []
    assert torch.equal(next(iter(read_model(directory)))[1], tensor)


@pytest.mark.parametrize("wrong", ["missing", "twice", "overlapping"])
def test_boxes_that_do_not_make_up_their_tensor_are_never_committed(tmp_path: Path, wrong: str):
    tensor = torch.randn(4, 4)
    boxes = {
        "missing": [((0, 0), (3, 4))],
        "twice": [((0, 0), (4, 4)), ((0, 0), (4, 4))],
        "overlapping": [((0, 0), (3, 4)), ((2, 0), (1, 4))],
    }[wrong]
    with pytest.raises(CheckpointError, match=r"model\.a"):
        saved(tmp_path, [piece("model.a", tensor, *box) for box in boxes])
    assert list(tmp_path.iterdir()) == []


def test_what_one_process_saves_is_in_the_files_of_an_only_rank(tmp_path: Path):
    entries = collect(Run().fill(5).parts).entries
    alone = saved(tmp_path, entries)
    (tmp_path / "part").mkdir()
    part = write_part(tmp_path / "part", entries, rank=0, world=1)
    assert sorted(file.name for file in alone.glob("*.safetensors")) == [file.name for file in part.files]


def test_another_model_is_refused_with_what_differs(tmp_path: Path):
    directory = saved(tmp_path, [whole("model.a", torch.zeros(4, 2)), whole("model.b", torch.zeros(3))])
    wanted = [whole("model.a", torch.zeros(4, 3)), whole("model.c", torch.zeros(3))]
    with pytest.raises(CheckpointError, match="another model") as refused:
        load_checkpoint(directory, wanted)
    assert "model.a: saved 4×2, here 4×3" in refused.value.message
    assert "1 missing in the checkpoint:\n    model.c" in refused.value.message
    assert "1 only in the checkpoint:\n    model.b" in refused.value.message


def test_a_long_difference_is_cut(tmp_path: Path):
    directory = saved(tmp_path, [whole(f"model.{n}", torch.zeros(1)) for n in range(40)])
    with pytest.raises(CheckpointError, match="and 30 more"):
        load_checkpoint(directory, [])


def test_another_element_type_is_refused_unless_asked_for(tmp_path: Path):
    directory = saved(tmp_path, [whole("model.a", torch.full((2,), 1.5))])
    half = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="saved as float32, here bfloat16"):
        load_checkpoint(directory, [whole("model.a", half)])
    load_checkpoint(directory, [whole("model.a", half)], strict=False)
    assert half.tolist() == [1.5, 1.5]


def test_a_stage_loads_its_own_when_it_names_the_rest(tmp_path: Path):
    directory = saved(tmp_path, [whole("model.a", torch.ones(2)), whole("model.b", torch.ones(3))])
    mine = torch.zeros(2)
    load_checkpoint(directory, [whole("model.a", mine)], names={"model.a", "model.b"})
    assert mine.tolist() == [1, 1]


def test_a_part_that_names_a_tensor_twice_or_without_its_prefix_is_refused():
    class Twice:
        def __init__(self, *names):
            self.names = names

        def state_entries(self):
            return [whole(name, torch.zeros(1)) for name in self.names]

        def state_values(self):
            return {}

        def load_state_values(self, values):
            pass

    with pytest.raises(ValueError, match="twice"):
        collect({"model": Twice("model.a", "model.a")})
    for name in ("optim.a", "models.a"):
        with pytest.raises(ValueError, match="must begin with 'model'"):
            collect({"model": Twice(name)})


def test_an_entry_that_contradicts_its_tensor_is_refused():
    with pytest.raises(ValueError, match="declared"):
        StateEntry(name="a", global_shape=(2,), dtype="bfloat16", box=Box((0,), (2,)), tensor=torch.zeros(2))
    with pytest.raises(ValueError, match="does not lie in"):
        StateEntry(name="a", global_shape=(2,), dtype="float32", box=Box((1,), (2,)), tensor=torch.zeros(2))


def test_no_half_finite_number_makes_the_manifest_unreadable(tmp_path: Path):
    directory = saved(tmp_path, [], values={"guards": {"loss": float("nan")}})
    json.loads((directory / "manifest.json").read_text(), parse_constant=lambda text: pytest.fail(text))
    assert read_manifest(directory).values == {"guards": {"loss": "NaN"}}


def test_a_shard_larger_than_a_file_is_split_into_boxes_at_its_own_place_in_the_tensor():
    tensor = torch.arange(40.0).reshape(10, 4)
    shard = piece("model.a", tensor, (3, 1), (6, 2))
    pieces = list(split_entries([shard], piece_bytes=2 * 2 * 4))
    assert [entry.box for entry in pieces] == [Box((row, 1), (2, 2)) for row in (3, 5, 7)]
    assert all(torch.equal(entry.tensor, tensor[entry.box.window]) for entry in pieces)
