"""What is wrong with a checkpoint, found by size, block and file, and told with its place and tensors."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format import catalogue
from bloomery.checkpoint.format.catalogue import (
    Problem,
    RemoteCopy,
    checkpoints,
    disk_bytes_per_tensor_byte,
    is_copied,
    listing_changed,
    newest_intact,
    refusal_of_damage,
    remote_copies,
    samples_consumed,
    verify,
    with_its_run,
)
from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    INDEX,
    MANIFEST,
    FileRecord,
    Index,
    IndexedBox,
    read_manifest,
)
from bloomery.checkpoint.format.source import LocalCheckpoint, RangedFile, Source, source_of
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.checkpoint.writer.store_place import enter_stored
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import StoreUnreachable

ROWS = BLOCK_BYTES // 4096


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of the model of 4096 bytes of header, five blocks and some bytes, and one of the optimizer."""
    entries = [
        whole("model.a", torch.zeros(3 * ROWS, 1024)),
        whole("model.b", torch.ones(2 * ROWS, 1024)),
        whole("optim.a", torch.ones(99)),
    ]
    return save_checkpoint(tmp_path, entries, step=3, incarnation=1)


def flip(path: Path, *places: int) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))


def one(saved: Path, kind: str) -> Path:
    (path,) = saved.glob(f"{kind}-*")
    return path


def told(saved: Path, **how: bool) -> list[tuple[str, int | None, tuple[str, ...]]]:
    return [(item.file.partition("-")[0], item.offset, item.tensors) for item in verify(saved, **how)]


def test_each_damaged_block_is_named_whichever_window_it_lies_in_and_all_bytes_are_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_WINDOW_BYTES", 2 * BLOCK_BYTES)
    read: list[int] = []
    assert verify(saved, progress=read.append) == []
    assert sum(read) == read_manifest(saved).bytes - read_manifest(saved).index_bytes
    assert max(read) == 2 * BLOCK_BYTES
    size = one(saved, "model").stat().st_size
    flip(one(saved, "model"), 2 * BLOCK_BYTES + 5, 3 * BLOCK_BYTES + 7, size - 1)
    assert told(saved) == [
        ("model", 2 * BLOCK_BYTES, ("model.a",)),
        ("model", 3 * BLOCK_BYTES, ("model.a", "model.b")),
        ("model", 5 * BLOCK_BYTES, ("model.b",)),
    ]
    assert told(saved, contents=False) == []


def test_a_file_that_becomes_shorter_while_it_is_read_is_damaged_from_there_on(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_WINDOW_BYTES", BLOCK_BYTES)
    opened, end = LocalCheckpoint.open, 2 * BLOCK_BYTES

    @contextmanager
    def cut(source: LocalCheckpoint, name: str) -> Iterator[Any]:
        with opened(source, name) as file:
            yield SimpleNamespace(
                read_into=lambda views, *, begin: file.read_into(views, begin=begin) if begin < end else 0
            )

    monkeypatch.setattr(LocalCheckpoint, "open", cut)
    # The third block has the bytes of the second, which are still in memory.
    assert [offset for kind, offset, _ in told(saved) if kind == "model"] == [
        n * BLOCK_BYTES for n in (2, 3, 4, 5)
    ]


def test_sizes_are_told_without_reading_and_what_is_missing_is_told_too(saved: Path) -> None:
    optim = one(saved, "optim")
    content = optim.read_bytes()
    for wrong, said in ((content[:-1], "truncated"), (content + b"x", "too long"), (None, "missing")):
        optim.unlink() if wrong is None else optim.write_bytes(wrong)
        for how in (True, False):
            (problem,) = verify(saved, contents=how)
            assert problem.text.startswith(said) and problem.file == optim.name and problem.offset is None
    optim.write_bytes(content)
    index = (saved / INDEX).read_bytes()
    (saved / INDEX).write_bytes(index + b" ")
    assert told(saved, contents=False) == [(INDEX, None, ())]
    (saved / INDEX).unlink()
    assert told(saved, contents=False) == [(INDEX, None, ())] == told(saved)
    (saved / MANIFEST).write_text("{}")
    assert told(saved) == [(MANIFEST, None, ())]


def test_where_the_index_is_damaged_each_file_is_still_held_against_its_hash(saved: Path) -> None:
    flip(saved / INDEX, 40)
    assert told(saved) == [(INDEX, None, ())]
    flip(one(saved, "optim"), 4100)
    assert told(saved) == [(INDEX, None, ()), ("optim", None, ())]
    assert "it has another hash" in str(verify(saved)[1])


def test_a_header_that_claims_more_than_the_file_has_is_told_as_that(saved: Path) -> None:
    flip(one(saved, "optim"), 6)
    header, block = verify(saved)
    assert header.offset == 0 and "its header claims" in header.text
    assert block.offset == 0 and block.tensors == ("optim.a",)
    record = FileRecord(name="f", bytes=100, xxh3_128="", blocks="")
    for length, count in ((92, 0), (93, 1)):
        assert len(catalogue._wrong_header(record, length.to_bytes(8, "little"))) == count
    assert len(catalogue._wrong_header(record, bytes(7))) == 1


def box(name: str, begin: int, end: int, *, file: str = "f") -> IndexedBox:
    size = end - begin
    place = {"global_shape": (size,), "offset": (0,), "shape": (size,)}
    return IndexedBox(name=name, dtype="int8", **place, scope="shared", file=file, begin=begin, end=end)


def test_a_block_holds_the_tensors_that_have_a_byte_in_it_and_no_neighbours() -> None:
    record = FileRecord(name="f", bytes=3 * BLOCK_BYTES, xxh3_128="", blocks="")
    boxes = (
        box("d", BLOCK_BYTES + 10, 2 * BLOCK_BYTES),
        box("e", 2 * BLOCK_BYTES, 3 * BLOCK_BYTES),
        box("other", 0, 3 * BLOCK_BYTES, file="g"),
        box("a", 0, BLOCK_BYTES),
        box("c", BLOCK_BYTES, BLOCK_BYTES + 10),
        box("empty", 0, 0),
    )
    index = Index(boxes=boxes, files={})
    found = catalogue._damaged_blocks(record, [0, BLOCK_BYTES, 2 * BLOCK_BYTES], index)
    assert [(item.offset, item.tensors) for item in found] == [
        (0, ("a",)),
        (BLOCK_BYTES, ("c", "d")),
        (2 * BLOCK_BYTES, ("e",)),
    ]


def test_a_problem_is_one_line_with_its_place_and_what_it_holds() -> None:
    assert str(Problem(file="f", offset=None, text="missing")) == "f: missing"
    shown = str(Problem(file="f", offset=1048576, text="damaged", tensors=("model.a",)))
    assert shown == "f at byte 1,048,576: damaged (it holds model.a)"


class Broken(LocalCheckpoint):
    """A checkpoint whose data files raise an error when they are opened."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(path)
        self._error = error

    def open(self, file: str) -> RangedFile:
        raise self._error


def test_what_cannot_be_reached_is_not_called_damaged_and_what_cannot_be_read_is(saved: Path) -> None:
    source: Source = Broken(saved, StoreUnreachable(5, "no answer"))
    with pytest.raises(StorageError, match=r"Verifying model-.* failed: no answer"):
        verify(source)
    problems = verify(Broken(saved, OSError(5, "Input/output error")))
    assert [item.text for item in problems] == ["cannot be read: Input/output error"] * 2


class Sizeless(Broken):
    """A checkpoint whose data files do not even tell their sizes."""

    def size(self, file: str) -> int:
        raise self._error


@pytest.mark.parametrize("contents", [True, False])
def test_a_file_whose_size_cannot_be_had_is_unreadable_once_and_in_a_store_that_is_away_no_damage(
    saved: Path, contents: bool
) -> None:
    problems = verify(Sizeless(saved, OSError(5, "Input/output error")), contents=contents)
    assert [item.text for item in problems] == ["cannot be read: Input/output error"] * (2 if contents else 3)
    with pytest.raises(StorageError, match=r"Verifying model-.* failed: no answer"):
        verify(Sizeless(saved, StoreUnreachable(5, "no answer")), contents=contents)


def test_a_checkpoint_takes_the_bytes_of_its_tensors_unless_something_lies_beside(saved: Path) -> None:
    assert disk_bytes_per_tensor_byte(saved) == 1.0
    tensors = 5 * BLOCK_BYTES + 4 * 99
    (saved / "deep").mkdir()
    (saved / "deep" / "core").write_bytes(bytes(tensors))
    assert disk_bytes_per_tensor_byte(saved) == 2.0
    assert source_of(saved).size(MANIFEST) == (saved / MANIFEST).stat().st_size


def test_a_checkpoint_elsewhere_is_held_against_the_manifest_there(saved: Path, tmp_path: Path) -> None:
    there = tmp_path / "there" / saved.name
    shutil.copytree(saved, there)
    draft = tmp_path / "run" / f"{saved.name}.partial"
    entry = enter_stored(draft, (saved / MANIFEST).read_bytes(), url=f"file://{there}")
    assert verify(entry, contents=False) == []
    flip(there / MANIFEST, 40)
    (problem,) = verify(entry, contents=False)
    assert problem.file == MANIFEST and (entry / MANIFEST).read_bytes() == (saved / MANIFEST).read_bytes()


def test_the_newest_that_is_intact_is_taken_whatever_the_order_it_is_given_in(rundir: RunDirectory) -> None:
    for step in (3, 12, 5):
        save_checkpoint(rundir.checkpoints, [whole("model.a", torch.ones(9))], step=step, incarnation=1)
    listed = checkpoints(rundir)
    assert [item.step for item in listed] == [3, 5, 12]
    flip(one(listed[-1].directory, "model"), 8)
    for given in (listed, listed[::-1]):
        assert newest_intact(given) == listed[1]
    assert newest_intact(listed[-1:]) is None is newest_intact(())


def test_the_samples_of_a_run_are_those_of_its_newest_checkpoint_that_can_be_read(
    rundir: RunDirectory,
) -> None:
    assert samples_consumed(rundir) == 0
    for step, consumed in ((3, 24), (12, 96), (5, 40)):
        entries = [whole("model.a", torch.ones(9))]
        about = {"consumed_samples": consumed}
        save_checkpoint(rundir.checkpoints, entries, step=step, incarnation=1, about=about)
    assert samples_consumed(rundir) == 96
    flip(checkpoints(rundir)[-1].directory / MANIFEST, 40)
    assert samples_consumed(rundir) == 40
    save_checkpoint(rundir.checkpoints, [whole("model.a", torch.ones(9))], step=13, incarnation=1)
    assert samples_consumed(rundir) == 0, "whoever saved it said nothing of samples"


def test_a_list_of_checkpoints_is_read_again_after_a_save_and_after_a_new_start(rundir: RunDirectory) -> None:
    before = listing_changed(rundir)
    assert listing_changed(rundir) == before
    for directory in (rundir.checkpoints, rundir.incarnations):
        os.utime(directory, ns=(1, 1))
        changed = listing_changed(rundir)
        assert changed != before
        before = changed


@pytest.mark.parametrize(
    ("intact", "helps"),
    [
        ("step-000003.i001", "one is step-000003.i001: continue from it with --fallback."),
        ("", "No older checkpoint is intact: restore one from a backup, or start anew in another --run."),
    ],
)
def test_the_refusal_of_a_damaged_checkpoint_says_what_to_go_on_from(intact: str, helps: str) -> None:
    refused = refusal_of_damage(CheckpointError("damaged", remedy="none"), intact)
    assert refused.message == "damaged" and helps in refused.remedy


def test_a_copy_counts_for_what_it_holds_where_it_is() -> None:
    copy = RemoteCopy(url="s3://b/run/checkpoints/step-000003.i001", what="model", bytes=1, time=1.0)
    for url, what, counts in (
        ("s3://b/run", "model", True),
        ("s3://b/run/", "model", True),
        ("s3://b/run", "all", False),
        ("s3://b", "model", False),
    ):
        assert is_copied([copy], name="step-000003.i001", url=url, what=what) is counts
    assert is_copied([replace(copy, what="all")], name="step-000003.i001", url="s3://b/run", what="model")
    assert not is_copied([copy], name="step-000004.i001", url="s3://b/run", what="model")


def test_records_of_copies_are_read_in_their_first_form_too_and_others_are_passed_over(
    rundir: RunDirectory,
) -> None:
    first, second = ({"url": f"s3://{n}", "what": "all", "bytes": 5, "time": 1.0} for n in "ab")
    for name, content in {
        "step-000001.i001.json": first,
        "step-000001.i001.second.json": {"copies": [second]},
        "step-000002.i001.json": [],
        "step-000003.i001.json": {"copies": [{"url": "s3://a"}]},
        "step-000004.i001.json": {"copies": 5},
    }.items():
        (rundir.backups / name).parent.mkdir(exist_ok=True)
        (rundir.backups / name).write_text(json.dumps(content))
    assert remote_copies(rundir) == {"step-000001.i001": (RemoteCopy(**first), RemoteCopy(**second))}


def test_a_checkpoint_that_is_given_from_within_its_run_is_named_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "mine").create()
    inside = run.checkpoints / "step-000005.i001"
    inside.mkdir()
    for place, given in ((run.checkpoints, inside.name), (inside, "."), (inside, "../step-000005.i001")):
        monkeypatch.chdir(place)
        assert with_its_run(Path(given)) == inside
    monkeypatch.chdir(run.path)
    for named in (Path("checkpoints") / inside.name, inside):
        assert with_its_run(named) == named, "a path that names its run is shown as it was given"
    monkeypatch.chdir(tmp_path)
    assert with_its_run(Path("copies/step-000005")) == Path("copies/step-000005"), "it lies in no run"
