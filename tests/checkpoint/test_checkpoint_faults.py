import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoint.small_run import Run
from tests.machine import may_mount, mounted

from bloomery import errors
from bloomery.checkpoint.format import catalogue
from bloomery.checkpoint.format import manifest as manifest_module
from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.manifest import BLOCK_BYTES, Index, IndexedBox, read_index, read_manifest
from bloomery.checkpoint.format.state import collect, whole
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.save import direct as place_module
from bloomery.checkpoint.save import direct as save_module
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

KEEP_TWO = CheckpointSection(keep_last=2, keep_tenths=False)
CALLS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


def in_a_child(act: Callable[[], None]) -> int:
    """Run something in a forked process and return how it ended."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def die_at_call(number: int) -> None:
    """Let this process be killed just before its nth call that could change the disk."""
    left = [number]

    def dying(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_of_save_and_prune_loses_nothing_committed(tmp_path: Path, stride: int):
    """Killed before each change of the disk in turn, or each fourth, until a save gets through."""
    rundir = RunDirectory(tmp_path / "run").create()
    run = Run(size=64)
    store = Store(rundir, KEEP_TWO)
    store.restore(run.parts)
    for step in (1, 2):
        store.save(RunStateToSave(run.fill(step).parts, step=step))
    kept = tmp_path / "kept"
    shutil.copytree(rundir.path, kept)

    def save_then_say_so(moment: int) -> None:
        die_at_call(moment)
        store.save(RunStateToSave(run.fill(3).parts, step=3))

    ends = []
    for moment in range(0, 500, stride):
        shutil.rmtree(rundir.path)
        shutil.copytree(kept, rundir.path)
        ends.append(in_a_child(lambda moment=moment: save_then_say_so(moment)))
        other = Run(size=64)
        restored = Store(rundir, KEEP_TWO).restore(other.parts)
        assert restored is not None and restored.step in (2, 3)
        assert other.equals(Run(size=64).fill(restored.step))
        assert all(
            path.name.startswith("step-") and not verify(path) for path in rundir.checkpoints.iterdir()
        )
        if ends[-1] == 0:
            assert restored.step == 3
            break
    assert ends[-1] == 0 and len(ends) > 24 // stride
    assert set(ends[:-1]) == {signal.SIGKILL}


def regions(path: Path) -> list[int]:
    """Return an offset in every region of a file: both ends, and every so often between."""
    size = path.stat().st_size
    return sorted({0, 9, size // 3, size // 2, size - 1})


def test_a_flipped_bit_in_any_region_of_any_file_is_found_and_named(tmp_path: Path):
    directory = save_checkpoint(tmp_path, collect(Run().fill(1).parts).entries, step=1, incarnation=1)
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        for offset in regions(path):
            if content[offset : offset + 1].isspace():
                continue  # the space between two words of JSON means nothing
            flipped = bytearray(content)
            flipped[offset] ^= 16
            path.write_bytes(flipped)
            problems = verify(directory)
            assert problems and problems[0].file == path.name, (path.name, offset)
        path.write_bytes(content)
    assert verify(directory) == []


def test_of_a_file_of_zeros_each_block_is_named_with_its_tensors_in_one_look_at_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Looked(tuple[IndexedBox, ...]):
        times = 0

        def __iter__(self) -> Iterator[IndexedBox]:
            Looked.times += 1
            return super().__iter__()

    sizes = [0, 7, BLOCK_BYTES // 4, 100, 3 * BLOCK_BYTES // 4, 0, *[BLOCK_BYTES // 16] * 9]
    entries = [whole(f"model.w{number}", torch.ones(size)) for number, size in enumerate(sizes)]
    directory = save_checkpoint(tmp_path, entries, step=1, incarnation=1)
    index = read_index(directory, read_manifest(directory))
    monkeypatch.setattr(
        catalogue, "read_index", lambda *about: Index(boxes=Looked(index.boxes), files=index.files)
    )
    (path,) = directory.glob("model-*")
    path.write_bytes(bytes(path.stat().st_size))
    problems = verify(directory)
    assert [problem.offset for problem in problems] == list(range(0, path.stat().st_size, BLOCK_BYTES))
    for problem in problems:
        start, stop = problem.offset or 0, (problem.offset or 0) + BLOCK_BYTES
        touched = {box.name for box in index.boxes if box.begin < stop and start < box.end}
        assert {*problem.tensors} == touched
    assert Looked.times == 1


def test_a_damaged_block_is_named_with_its_file_place_and_tensors(tmp_path: Path):
    tensors = {f"model.{name}": torch.randn(300_000) for name in "abc"}  # 1.2 MB each
    directory = save_checkpoint(tmp_path, [whole(*item) for item in tensors.items()], step=1, incarnation=1)
    (path,) = directory.glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(3 << 20)
        file.write(b"\xff\xff\xff\xff")
    (problem,) = verify(directory)
    assert (problem.file, problem.offset, problem.tensors) == (path.name, 3 << 20, ("model.c",))
    with pytest.raises(CheckpointError, match=r"byte 3,145,728 does not have the hash.*model\.c"):
        load_checkpoint(directory, [whole(name, torch.zeros_like(t)) for name, t in tensors.items()])


def test_truncated_and_missing_files_are_found_with_and_without_reading_all(tmp_path: Path):
    directory = save_checkpoint(tmp_path, collect(Run().fill(1).parts).entries, step=1, incarnation=1)
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-10])
        for contents in (True, False):
            assert path.name in {problem.file for problem in verify(directory, contents=contents)}
        path.unlink()
        for contents in (True, False):
            assert path.name in {problem.file for problem in verify(directory, contents=contents)}
        path.write_bytes(content)


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="not a finished checkpoint"):
        load_checkpoint(tmp_path, [])
    (tmp_path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(CheckpointError, match="not the manifest"):
        load_checkpoint(tmp_path, [])


def test_a_later_version_of_the_format_is_refused_as_such_and_not_as_damage(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(manifest_module, "VERSION", 99)
    directory = save_checkpoint(tmp_path, [], step=1, incarnation=1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version 99") as refused:
        load_checkpoint(directory, [])
    assert not isinstance(refused.value, manifest_module.DamagedCheckpoint)


def test_a_save_that_would_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(errors, "free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match="needed") as refused:
        save_checkpoint(tmp_path, collect(Run().parts).entries, step=1, incarnation=1)
    assert "Free some space" in refused.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_limit_met_while_writing_leaves_nothing_behind(tmp_path: Path):
    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(StorageError, match=r"needed, .* free") as refused:
            save_checkpoint(tmp_path, collect(Run().parts).entries, step=1, incarnation=1)
        assert "ulimit" in refused.value.remedy

    assert in_a_child(act) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs(may_mount, rights="root, to mount a file system")
def test_a_full_disk_is_told_and_the_checkpoints_on_it_stay_whole(tmp_path: Path, monkeypatch):
    with mounted(tmp_path / "small", "size=1500k") as small:
        rundir = RunDirectory(small / "run").create()
        run = Run()
        store = Store(rundir, KEEP_TWO)
        store.restore(run.parts)
        for module in (save_module, place_module):  # the first rank looks, and then each rank
            monkeypatch.setattr(module, "MARGIN_BYTES", 0)
        store.save(RunStateToSave(run.fill(1).parts, step=1))
        (small / "other").write_bytes(b"x" * (errors.free_bytes(small) - 50_000))
        with pytest.raises(StorageError, match="no space"):
            store.save(RunStateToSave(run.fill(2).parts, step=2))
        monkeypatch.setattr(errors, "free_bytes", lambda path: 1 << 40)  # it fills up while we write
        with pytest.raises(StorageError, match="No space left"):
            store.save(RunStateToSave(run.fill(2).parts, step=2))
        assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-000001.i001"]
        assert verify(rundir.checkpoints / "step-000001.i001") == []


@pytest.mark.needs(may_mount, rights="root, to mount a file system")
def test_a_read_only_disk_is_told(tmp_path: Path):
    with mounted(tmp_path / "fixed", "ro") as fixed, pytest.raises(StorageError, match="Read-only"):
        save_checkpoint(fixed, collect(Run().parts).entries, step=1, incarnation=1)


def test_a_place_that_cannot_hold_a_directory_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for place in (Path("/proc/checkpoints"), tmp_path / "file"):
        with pytest.raises(StorageError) as refused:
            save_checkpoint(place, [], step=1, incarnation=1)
        assert str(place) in refused.value.message and refused.value.remedy


def test_a_directory_that_vanishes_during_a_save_is_told(tmp_path: Path, monkeypatch):
    real = save_module._write

    def vanishing(partial, file, wrote):
        record = real(partial, file, wrote)
        shutil.rmtree(partial, ignore_errors=True)
        return record

    monkeypatch.setattr(save_module, "_write", vanishing)
    with pytest.raises(StorageError, match=os.strerror(errno.ENOENT)) as refused:
        save_checkpoint(tmp_path / "run", collect(Run().parts).entries, step=1, incarnation=1)
    assert "mounted" in refused.value.remedy


def test_loading_never_unpickles():
    """Others' files are another matter: see `foreign`, and its tests with files that try to run something."""
    import ast

    package = Path(save_module.__file__).parent
    for path in package.glob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        attributes = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert not {"pickle", "marshal", "eval", "exec"} & names and "torch.load" not in attributes, path.name
