"""Data files, their headers and the room for them, and which directories count as checkpoints."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from bloomery.checkpoint.format import data_file
from bloomery.checkpoint.format.catalogue import (
    CommittedCheckpoint,
    Problem,
    checkpoints,
    listing_changed,
    refusal_of_damage,
)
from bloomery.checkpoint.format.commit import (
    Part,
    abandon_part,
    begin_partial,
    commit,
    commit_texts,
    part_or_failure,
    part_record_path,
    sweep,
    write_part_record,
)
from bloomery.checkpoint.format.data_file import HashingWriter, safetensors_header, shortened, write_image
from bloomery.checkpoint.format.manifest import (
    DamagedCheckpoint,
    FileRecord,
    IndexedBox,
    Manifest,
    index_bytes,
    manifest_text,
)
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory


def test_a_header_is_padded_to_its_alignment_and_names_types_shapes_and_places() -> None:
    header, spans = safetensors_header(
        [("a", "float32", (2, 3)), ("b", "bool", ()), ("c", "int16", (0,))], alignment=256
    )
    assert len(header) == 256 and int.from_bytes(header[:8], "little") == 248
    assert spans == [(256, 280), (280, 281), (281, 281)]
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BOOL", "shape": [], "data_offsets": [24, 25]},
        "c": {"dtype": "I16", "shape": [0], "data_offsets": [25, 25]},
    }
    assert header.rstrip(b" ").endswith(b"}}")


def test_a_list_of_names_is_cut_where_it_is_long() -> None:
    names = [str(number) for number in range(12)]
    assert shortened(names[:2]) == "0, 1" and shortened([]) == "no tensor"
    assert shortened(names[:10]) == ", ".join(names[:10])
    assert shortened(names) == ", ".join(names[:10]) + " and 2 more"
    assert shortened(names[:3], most=1) == "0 and 2 more"


def image(content: bytes) -> memoryview:
    return memoryview(bytearray(content.ljust(4096, b"\0")))


def test_a_file_system_without_direct_writes_gets_plain_ones_and_other_refusals_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, tried = os.open, list[int]()
    refusal = [errno.EINVAL]

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".bin"):
            tried.append(flags)
            if flags & os.O_DIRECT:
                opened_first = opened(path, flags & ~os.O_DIRECT, mode)
                os.close(opened_first)  # some systems make the file and then refuse
                raise OSError(refusal[0], "refused")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    for number in (errno.EINVAL, errno.EOPNOTSUPP):
        refusal[0] = number
        record = write_image(tmp_path / f"{number}.bin", image(b"abc"), length=3)
        assert (tmp_path / f"{number}.bin").read_bytes() == b"abc" and record.bytes == 3
    refusal[0] = errno.EACCES
    with pytest.raises(OSError, match="refused"):
        write_image(tmp_path / "c.bin", image(b"abc"), length=3)
    assert len(tried) == 5


@pytest.mark.parametrize("is_direct", [False, True])
def test_what_goes_through_the_page_cache_is_synced_on_the_way_so_that_progress_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    events: list[str] = []
    monkeypatch.setattr(data_file, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(data_file, "_SYNC_BYTES", 3 * 4096)
    monkeypatch.setattr(data_file, "_is_direct", lambda file: is_direct)
    monkeypatch.setattr(data_file.durable, "sync_file", lambda file: events.append("sync"))
    content = memoryview(mmap.mmap(-1, 20 * 4096))
    write_image(tmp_path / "a", content, length=20 * 4096, wrote=lambda count: events.append("wrote"))
    assert events.count("wrote") == 20 and events.count("sync") == (1 if is_direct else 7)
    longest = max(len(run) for run in "".join(name[0] for name in events).split("s"))
    assert is_direct or longest <= 6, "what is written at once, and what is pending at the end"


def test_room_for_a_file_is_taken_first_and_only_a_full_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    status, number = [0], [0]

    def allocate(file: int, *what: int) -> int:
        asked.append(what)
        return status[0]

    libraries: list[Any] = [SimpleNamespace(fallocate64=allocate)]
    monkeypatch.setattr(
        data_file,
        "ctypes",
        SimpleNamespace(
            CDLL=lambda name, *, use_errno: libraries[0],
            get_errno=lambda: number[0],
            c_int=ctypes.c_int,
            c_int64=ctypes.c_int64,
        ),
    )
    write_image(tmp_path / "a", image(b"abc"), length=3)
    assert asked == [(0, 0, 3)]
    status[0], number[0] = -1, errno.EOPNOTSUPP
    write_image(tmp_path / "b", image(b"abc"), length=3)
    for full in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        number[0] = full
        with pytest.raises(OSError) as refused:
            write_image(tmp_path / f"full{full}", image(b"abc"), length=3)
        assert refused.value.errno == full
    count = len(asked)
    assert write_image(tmp_path / "empty", image(b""), length=0).bytes == 0 and len(asked) == count
    libraries[0] = SimpleNamespace()
    assert write_image(tmp_path / "c", image(b"abc"), length=3).bytes == 3


def test_a_file_that_is_there_is_not_written_over_and_the_writer_closes_its_own(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RuntimeError), HashingWriter(tmp_path / "a") as writer:
        writer.write(memoryview(b"abc"))
        raise RuntimeError
    with pytest.raises(FileExistsError):
        HashingWriter(tmp_path / "a")
    write_image(tmp_path / "b", image(b"abc"), length=3)
    with pytest.raises(ZeroDivisionError):
        write_image(tmp_path / "c", image(b"abc"), length=3, until_filled=lambda count: 1 / 0)  # type: ignore[arg-type, return-value]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_is_left_of_saves_is_swept_by_name_and_told(tmp_path: Path) -> None:
    for name in ("step-000002.i001.partial", "step-000001.i001.partial", "step-000003.i001", "a.partial"):
        (tmp_path / name).mkdir()
    assert [path.name for path in sweep(tmp_path)] == ["step-000001.i001.partial", "step-000002.i001.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.partial", "step-000003.i001"]


def test_checkpoints_are_listed_by_step_then_life_and_a_change_is_seen(rundir: RunDirectory) -> None:
    begin(rundir, base=None, reason="start")
    before = listing_changed(rundir)
    assert before == tuple(path.stat().st_mtime_ns for path in (rundir.checkpoints, rundir.incarnations))
    for step in (20, 100, 3):
        partial = rundir.checkpoints / f"step-{step:06d}.i001.partial"
        begin_partial(partial)
        commit(partial, [], step=step, incarnation=1, time=0.0, values={}, about={})
    for name in ("step-000004.i001", "step-x"):
        (rundir.checkpoints / name).mkdir()
    (rundir.checkpoints / "step-x" / "manifest.json").touch()
    found = checkpoints(rundir)
    assert found == tuple(
        CommittedCheckpoint(step=step, incarnation=1, directory=rundir.checkpoints / f"step-{step:06d}.i001")
        for step in (3, 20, 100)
    )
    assert (found[0].base, found[0].name) == ((3, 1), "step-000003.i001")
    assert CommittedCheckpoint(step=3, incarnation=2, directory=Path()) > found[0]
    damage = refusal_of_damage(DamagedCheckpoint("it is spoiled"), "")
    assert damage.message == "it is spoiled" and "backup" in damage.remedy
    many = Problem(file="f", offset=1 << 20, text="damaged", tensors=("a", "b"))
    assert str(many) == "f at byte 1,048,576: damaged (it holds a, b)"


def test_a_rank_that_gives_up_says_why_and_what_it_has_recorded_before_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    why = {"kind": "storage", "message": "it broke", "remedy": "Mend it."}
    abandon_part(tmp_path, 1, files=["mine"], why=why)
    record = part_record_path(tmp_path, 1)
    with pytest.raises(StorageError) as told:
        part_or_failure(record.read_bytes(), rank=1, place="there")
    assert (told.value.message, told.value.remedy) == ("rank 1: it broke", "Mend it.")
    (tmp_path / "mine").touch()
    write_part_record(tmp_path, 1, Part(files=(), boxes=()))
    before = record.read_bytes()
    abandon_part(tmp_path, 1, files=["mine"], why=why)
    assert (tmp_path / "mine").exists() and record.read_bytes() == before


def test_the_texts_of_a_commit_are_of_all_ranks_and_only_of_whole_tensors(tmp_path: Path) -> None:
    record = FileRecord(name="f", bytes=2, xxh3_128="ab", blocks="cd" * 8)
    box = IndexedBox(
        **{"name": "a", "dtype": "int8", "global_shape": (2,), "offset": (0,), "shape": (2,)},
        **{"scope": "shared", "file": "f", "begin": 0, "end": 2},
    )
    parts = [Part(files=(), boxes=()), Part(files=(record,), boxes=(box,))]
    how: dict[str, Any] = {"step": 3, "incarnation": 2, "time": 5.0, "values": {"v": {}}, "about": {"t": 1}}
    index, text = commit_texts(parts, **how)
    assert index == index_bytes([box], [record])
    made = Manifest(
        **how,
        world=2,
        files=(FileRecord(name="f", bytes=2, xxh3_128="ab", blocks=""),),
        index_bytes=len(index),
        index_xxh3_128=xxhash.xxh3_128_hexdigest(index),
    )
    assert text == manifest_text(made).encode()
    with pytest.raises(CheckpointError, match="not filled exactly"):
        commit_texts([Part(files=(), boxes=(box,)), Part(files=(), boxes=(box,))], **how)
    assert Part.from_json(json.loads(json.dumps(parts[1].to_json()))) == parts[1]
