"""Who writes what and where, what a load says and opens, and what marks, copies and epochs are on record."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery import errors
from bloomery.checkpoint.format import catalogue, suspects
from bloomery.checkpoint.format.catalogue import (
    CommittedCheckpoint,
    RemoteCopy,
    checkpoints,
    record_copy,
    remote_copies,
)
from bloomery.checkpoint.format.deadlines import Deadlines
from bloomery.checkpoint.format.manifest import IndexedBox, read_index, read_manifest
from bloomery.checkpoint.format.retention import _last_of_first_epochs
from bloomery.checkpoint.format.source import LocalCheckpoint
from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.checkpoint.format.suspects import (
    SUSPECT,
    mark_of,
    mark_suspects,
    newest_trusted,
    refuse_if_only_suspects,
)
from bloomery.checkpoint.load import executor, load_plan
from bloomery.checkpoint.load.executor import _Reader
from bloomery.checkpoint.load.load_plan import WantedBox, plan_load
from bloomery.checkpoint.load.loader import _by_name, load_checkpoint, refuse_another_model
from bloomery.checkpoint.save import direct
from bloomery.checkpoint.save.direct import (
    MARGIN_BYTES,
    already_saved,
    save_checkpoint,
    save_streamed,
    tensor_bytes,
    write_part,
)
from bloomery.checkpoint.save.verification import OwnFilesCheck
from bloomery.checkpoint.save.write_plan import (
    FilePlan,
    HeldBox,
    RankWritePlan,
    WriteItem,
    WritePlanner,
    assign_writers,
    held_boxes,
)
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory


def entry(
    name: str, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32, **more: Any
) -> StateEntry:
    return whole(name, torch.ones(shape, dtype=dtype), **more)


def test_files_of_a_plan_begin_at_pages_and_hold_each_part_apart() -> None:
    planner = WritePlanner(Ranks(), file_bytes=1000)
    entries = [
        entry("optim.a", (3,)),
        entry("model.b", (2, 5), dtype=torch.bfloat16),
        entry("model.a", (300,)),
    ]
    plan = planner.agree(entries, [planner.digest(entries)])
    places = (("model", 0), ("model", 1), ("optim", 0))
    names = [f"{part}-r00000-of-00001-00{number}.safetensors" for part, number in places]
    headers = [file.header for file in plan.files]
    assert all(len(header) == 4096 for header in headers)
    items = [
        (WriteItem(entry=2, rows=slice(0, 150)),),
        (WriteItem(entry=2, rows=slice(150, 300)), WriteItem(entry=1, rows=None)),
        (WriteItem(entry=0, rows=None),),
    ]
    sizes = [4096 + 600, 4096 + 600 + 20, 4096 + 12]
    each = list(zip(names, headers, sizes, items, strict=True))
    assert plan == RankWritePlan(
        files=tuple(
            FilePlan(name=name, header=header, bytes=size, offset=8192 * number, items=held)
            for number, (name, header, size, held) in enumerate(each)
        ),
        bytes=3 * 8192,
        file_bytes=sum(sizes),
        boxes=plan.boxes,
        box_count=4,
    )
    boxes = [(box["name"], box["file"], box["offset"], box["begin"]) for box in json.loads(plan.boxes)]
    assert boxes == [
        ("model.a", names[0], [0], 4096),
        ("model.a", names[1], [150], 4096),
        ("model.b", names[1], [0, 0], 4696),
        ("optim.a", names[2], [0], 4096),
    ]
    assert planner.file_bytes == [sum(sizes)] and planner.buffer_bytes == [3 * 8192]


def test_each_thing_that_a_layout_says_makes_another_plan() -> None:
    planner = WritePlanner(Ranks(), file_bytes=1000)
    base, empty_digest = entry("model.a", (4, 6)), planner.digest([])
    whole_digest = planner.digest([base])
    assert len(empty_digest) == 32 and planner.digest([]) == empty_digest != whole_digest
    assert planner.digest([entry("model.a", (4, 6))]) == whole_digest, "the values count for nothing"
    place: dict[str, Any] = {"name": "model.a", "dtype": "float32", "tensor": torch.ones(2, 6)}
    place["box"] = Box((2, 0), (2, 6))
    for other in (
        entry("model.b", (4, 6)),
        entry("model.a", (4, 6), dtype=torch.int32),
        entry("model.a", (6, 4)),
        entry("model.a", (4, 6), scope="peer"),
        StateEntry(**place, global_shape=(4, 6)),
        StateEntry(**place, global_shape=(5, 6)),
    ):
        assert planner.digest([other]) != whole_digest
    first_rows = StateEntry(**place | {"box": Box((0, 0), (2, 6))}, global_shape=(4, 6))
    assert planner.digest([first_rows]) != planner.digest([StateEntry(**place, global_shape=(4, 6))])
    plan = planner.agree([base], [whole_digest])
    assert planner.agree([base], [whole_digest]) is plan
    assert planner.agree([base], [whole_digest, "another rank's"]) is not plan


def test_replicas_go_the_largest_first_to_whoever_has_the_least() -> None:
    def box(name: str, size: int) -> HeldBox:
        return HeldBox(name, (0,), (size,), size)

    shared = [box("s1", 1), box("s2", 5), box("s3", 5), box("s4", 9)]
    assigned = assign_writers([[*shared, box("t", 3)], shared])
    names = [sorted(key[0] for key in keys) for keys in assigned]
    assert names == [["s2", "s3", "t"], ["s1", "s4"]], "what one rank alone holds counts first"
    assert [sorted(key[0] for key in keys) for keys in assign_writers([shared[:1], shared[:1]])] == [
        ["s1"],
        [],
    ]
    assert held_boxes([entry("model.a", (2, 3))]) == [HeldBox("model.a", (0, 0), (2, 3), 24)]


def saved_as(name: str, shape: tuple[int, ...]) -> IndexedBox:
    place = {"global_shape": shape, "offset": (0,) * len(shape), "shape": shape, "file": "f", "begin": 0}
    return IndexedBox(name=name, dtype="float32", scope="shared", end=4, **place)


@pytest.mark.parametrize(("count", "more"), [(10, []), (11, ["    and 1 more"]), (12, ["    and 2 more"])])
def test_ten_of_what_differs_are_listed_and_the_rest_counted(count: int, more: list[str]) -> None:
    saved = {f"model.{number:02d}": [saved_as("a", (1,))] for number in range(count)}
    with pytest.raises(CheckpointError) as refused:
        refuse_another_model("there", [], saved, strict=True, names=None)
    assert refused.value.message.splitlines() == [
        "there is a checkpoint of another model:",
        f"  {count} only in the checkpoint:",
        *[f"    model.{number:02d}" for number in range(10)],
        *more,
    ]
    assert "the recipe of its run" in refused.value.remedy
    optional = {"optim.limit.x": [saved_as("a", (1,))], "outer.residual.x": [saved_as("a", (1,))]}
    refuse_another_model("there", [], optional, strict=True, names=None)
    refuse_another_model("there", [entry("optim.limit.y", (1,))], {}, strict=True, names=None)
    wanted, scalar = [entry("model.s", (2, 3))], {"model.s": [saved_as("a", ())]}
    with pytest.raises(CheckpointError, match=r"model\.s: saved scalar, here 2×3"):
        refuse_another_model("there", wanted, scalar, strict=False, names=None)


def test_each_file_is_opened_for_its_first_unit_and_closed_after_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plan, "UNIT_BYTES", 400)
    entries = [whole(f"{part}.a", torch.arange(500.0)) for part in ("model", "optim")]
    saved = save_checkpoint(tmp_path, entries, step=3, incarnation=1)
    source = LocalCheckpoint(saved)
    index = read_index(source, read_manifest(source))
    log: list[tuple[str, str]] = []

    class Watched(executor.VerifiedReader):
        def __init__(self, source: Any, record: Any, **how: Any) -> None:
            self.kind = record.name.partition("-")[0]
            log.append(("open", self.kind))
            super().__init__(source, record, **how)

        def __exit__(self, *error: Any) -> None:
            log.append(("close", self.kind))
            super().__exit__(*error)

    monkeypatch.setattr(executor, "VerifiedReader", Watched)
    blank = [whole(item.name, torch.zeros(500)) for item in entries]
    wanted = [[WantedBox(item.name, item.box) for item in blank]]
    units = plan_load(_by_name(index.boxes), wanted).units
    assert len(units) > 8
    read: list[int] = []
    with _Reader(source, index, blank, rank=0, count=read.append) as reading:
        assert list(reading.messages(units)) == [({}, None)] * len(units)
        assert sorted(log) == sorted(
            (what, kind) for what in ("open", "close") for kind in ("model", "optim")
        )
        for kind in ("model", "optim"):
            assert log.index(("open", kind)) < log.index(("close", kind))
    assert len(log) == 4 and len(read) == len(units)
    assert all(torch.equal(found.tensor, torch.arange(500.0)) for found in blank)


def test_ranks_that_cannot_exchange_bytes_read_all_that_they_want_themselves(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, [whole("model.a", torch.arange(8.0))], step=3, incarnation=1)
    blank, read = whole("model.a", torch.zeros(8)), list[int]()
    ranks = Ranks(rank=1, world=2, gather=lambda value: [value, value])
    load_checkpoint(saved, [blank], ranks=ranks, count=read.append)
    assert torch.equal(blank.tensor, torch.arange(8.0)) and sum(read) == read_manifest(saved).files[0].bytes


def test_a_part_needs_its_files_and_a_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 4096 + 12 + MARGIN_BYTES
    free = [needed - 1]
    monkeypatch.setattr(errors, "free_bytes", lambda path: free[0])
    with pytest.raises(StorageError, match="no space"):
        write_part(tmp_path, [entry("model.a", (3,))])
    assert list(tmp_path.iterdir()) == []
    free[0] = needed
    part = write_part(tmp_path, [entry("model.a", (3,))], rank=2, world=7, first=4)
    assert [file.name for file in part.files] == ["model-r00002-of-00007-004.safetensors"]
    assert [box.name for box in part.boxes] == ["model.a"]
    with pytest.raises(StorageError, match="Saving a checkpoint failed"):
        write_part(tmp_path, [entry("model.a", (3,))], rank=2, world=7, first=4)


def test_bytes_of_a_tensor_come_in_pieces_only_where_they_do_not_lie_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct, "PIECE_BYTES", 32)
    base = torch.arange(24, dtype=torch.int32).view(6, 4)
    assert [len(piece) for piece in tensor_bytes(base)] == [96]
    turned = base.t()
    assert [len(piece) for piece in tensor_bytes(turned)] == [24] * 4
    assert b"".join(map(bytes, tensor_bytes(turned))) == turned.contiguous().numpy().tobytes()
    assert [len(piece) for piece in tensor_bytes(base[:, :2])] == [32, 16]
    assert list(tensor_bytes(base[:0])) == [] and [len(p) for p in tensor_bytes(base[0, 0])] == [4]


def test_a_streamed_save_says_when_it_was_and_numbers_its_files_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "STREAM_BYTES", 20)
    monkeypatch.setattr(direct, "now", lambda: 9.0)
    entries = [entry(f"model.{name}", (3,)) for name in "abcde"]
    values: Any = {"train": {"at": 1}}
    saved = save_streamed(
        tmp_path, iter(entries), step=3, incarnation=2, time=5.0, values=values, about={"told": 1}
    )
    manifest = read_manifest(saved)
    assert (manifest.step, manifest.incarnation, manifest.time, manifest.world) == (3, 2, 5.0, 1)
    assert manifest.values == values and manifest.about == {"told": 1}
    names = [f"model-r00000-of-00001-00{number}.safetensors" for number in range(3)]
    assert [file.name for file in manifest.files] == names
    boxes = [(box.name, box.file) for box in read_index(saved, manifest).boxes]
    assert boxes == [(f"model.{name}", names[number // 2]) for number, name in enumerate("abcde")]
    assert read_manifest(save_streamed(tmp_path, [], step=4, incarnation=2)).time == 9.0
    assert read_manifest(save_streamed(tmp_path, [], step=5, incarnation=2, time=0.0)).time == 0.0
    backend, files = direct.DirectoryBackend(), manifest.files
    assert backend.read_back(saved, files, is_first=True) == ""
    (saved / "index.json").write_text("{")
    assert "index" in backend.read_back(saved, files, is_first=True)
    assert backend.read_back(saved, files, is_first=False) == "", "another rank reads its own files alone"
    assert already_saved(tmp_path, step=3, incarnation=2) == saved
    assert already_saved(tmp_path, step=3, incarnation=1) is None
    (saved / "manifest.json").write_text("{")
    assert already_saved(tmp_path, step=3, incarnation=2) is None


def test_a_mark_says_why_and_when_and_is_noted_for_the_backups(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "now", lambda: 7.5)
    begin(rundir, base=None, reason="start")
    saved = [
        save_checkpoint(rundir.checkpoints, [entry("model.a", (2,))], step=step, incarnation=1)
        for step in (10, 20)
    ]
    for step in (5, 10, 15, 20):
        record_copy(rundir, f"step-0000{step:02d}.i001", url="s3://b", what="all", bytes=1)
    found = mark_suspects(rundir, checkpoints(rundir), clean_step=10, why="rank 3 erred: ß")
    assert found == ["step-000020.i001"]
    mark = '{"why": "rank 3 erred: ß", "time": 7.5}\n'.encode()
    assert (saved[1] / SUSPECT).read_bytes() == mark == mark_of(LocalCheckpoint(saved[1]))
    assert mark_of(LocalCheckpoint(saved[0])) is None
    noted = {path.name: path.read_bytes() for path in rundir.backups.glob("*.mark")}
    assert noted == dict.fromkeys(("step-000015.i001.mark", "step-000020.i001.mark"), mark)
    refuse_if_only_suspects(iter([]))
    with pytest.raises(CheckpointError) as refused:
        refuse_if_only_suspects(iter(["a", "b"]))
    assert refused.value.message == "every checkpoint is suspect of silent corruption: a, b"
    (rundir.backups / "step-000020.i001.mark").unlink()
    (rundir.backups / "step-000020.i001.mark").mkdir()
    with pytest.raises(StorageError, match="Marking a checkpoint failed"):
        mark_suspects(rundir, checkpoints(rundir), clean_step=10, why="another")


def test_where_all_are_marked_none_is_taken_and_no_run_begins_anew(tmp_path: Path) -> None:
    checkpoints = []
    for step in (5, 10):
        directory = tmp_path / str(step)
        directory.mkdir()
        checkpoints.append(CommittedCheckpoint(step=step, incarnation=0, directory=directory))
    assert newest_trusted(checkpoints) is checkpoints[1] and newest_trusted([]) is None
    (tmp_path / "10" / SUSPECT).write_text('{"why": "a flip"}')
    assert newest_trusted(checkpoints) is checkpoints[0]
    (tmp_path / "5" / SUSPECT).write_text('{"why": "a flip"}')
    with pytest.raises(CheckpointError, match="every checkpoint is suspect"):
        newest_trusted(checkpoints)


def test_a_copy_is_on_record_with_all_that_is_known_of_it(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "now", lambda: 7.5)
    name = "step-000010.i001"
    record_copy(rundir, name, url="s3://b", what="model", bytes=9)
    record_copy(rundir, name, url="s3://c", what="all", bytes=8, place="second")
    copies = (
        RemoteCopy(url="s3://b", what="model", bytes=9, time=7.5),
        RemoteCopy(url="s3://c", what="all", bytes=8, time=7.5),
    )
    assert remote_copies(rundir) == {name: copies}
    assert sorted(path.name for path in rundir.backups.iterdir()) == [f"{name}.json", f"{name}.second.json"]
    (rundir.backups / f"{name}.json").unlink()
    (rundir.backups / f"{name}.json").mkdir()
    with pytest.raises(StorageError, match="Recording a backup failed"):
        record_copy(rundir, name, url="s3://b", what="model", bytes=9)


def test_the_last_before_a_first_epoch_ends_is_found_by_the_next_ones_cursor(rundir: RunDirectory) -> None:
    begin(rundir, base=None, reason="start")
    abouts: list[dict[str, Any]] = [
        {"cursor": 4, "epoch_end_ahead": 10},
        {"cursor": 9, "epoch_end_ahead": 10},
        {"cursor": 10, "epoch_end_ahead": 30},
        {"cursor": 29, "epoch_end_ahead": 30},
        {"cursor": 31, "epoch_end_ahead": None},
        {"cursor": 99},
    ]
    for number, about in enumerate(abouts, 1):
        save_checkpoint(rundir.checkpoints, [], step=10 * number, incarnation=1, about=about)
    assert _last_of_first_epochs(checkpoints(rundir)) == {20, 40}
    (rundir.checkpoints / "step-000030.i001" / "manifest.json").write_text("{}")
    assert _last_of_first_epochs(checkpoints(rundir)) == {20, 40}, "the next one that can be read counts"


def test_a_writer_that_cannot_read_back_is_logged_and_leaves_the_outcome_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def refused(*_: object, **__: object) -> None:
        raise CheckpointError("the writer died", remedy="")

    waits = Deadlines(part_bytes=0, largest_part_bytes=0)
    saving: Any = SimpleNamespace(
        name="a", order={"partial": "p", "store": "", "rank": 0}, buffer=0, deadlines=waits
    )
    check, writer = OwnFilesCheck(), SimpleNamespace(write=refused)
    check.run(saving, writer=writer, buffer=SimpleNamespace(), is_free=lambda: True)  # type: ignore[arg-type]
    assert check.take() == {} and caplog.messages == ["a was not read back: the writer died"]
