"""What a writer process is given, and what it answers to orders that are out of the ordinary."""

import os
import subprocess
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
from tests.checkpoint.test_background import wait_for
from tests.checkpoint.test_partner import LIMITS, TOKEN, Kept, kept  # noqa: F401

from bloomery.checkpoint.format.commit import begin_partial, error_to_json, read_part_record
from bloomery.checkpoint.writer import client as client_module
from bloomery.checkpoint.writer import process as writer
from bloomery.checkpoint.writer.client import WriterProcess
from bloomery.checkpoint.writer.memory_replica import label_of, read_replica
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer
from bloomery.errors import CheckpointError, RunBusy, StorageError


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[WriterProcess]:
    monkeypatch.setattr(client_module, "WRITER_END_S", 60.0)  # the machine may be busy
    one = WriterProcess(())
    yield one
    one.close()


def test_a_writer_gets_the_environment_but_for_what_only_suits_the_trainers_memory(
    process: WriterProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOCATED", "this is another matter")
    process.start()
    told = Path(f"/proc/{process.pid}/environ")
    wait_for(lambda: told.read_bytes())  # the kernel has it a moment after the program was started
    environment = told.read_bytes().split(b"\0")
    names = {entry.partition(b"=")[0].decode() for entry in environment if entry}
    assert set(os.environ) - names == {"MALLOC_ARENA_MAX"} and "MALLOCATED" in names


def test_a_writer_that_is_alive_is_not_started_again_and_a_closed_one_takes_no_order(process: WriterProcess):
    assert process.pid is None
    process.start()
    pid = process.pid
    process.start()
    assert process.pid == pid is not None
    process.close()
    assert process.pid is None and not Path(f"/proc/{pid}").exists()
    with pytest.raises(CheckpointError, match="died while it was writing"):
        process.write({}, deadline_s=60.0)
    assert process.pid is None, "no other one is started"


def answering(*lines: str) -> subprocess.Popen[bytes]:
    said = "".join(lines)
    script = (
        f"import sys\nsys.stdin.readline()\nsys.stdout.write({said!r})\nsys.stdout.flush()\nsys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )


@pytest.mark.parametrize(
    ("kind", "raised"), [("storage", StorageError), ("busy", RunBusy), ("checkpoint", CheckpointError)]
)
def test_a_writers_error_is_raised_as_what_it_is_and_its_signs_of_progress_are_passed_over(
    process: WriterProcess, kind: str, raised: type[CheckpointError]
):
    failure = f'{{"failure": {{"kind": "{kind}", "message": "it failed", "remedy": "Mend it."}}}}\n'
    process._process = answering('{"progress": 1}\n{"progress": 2}\n', failure)
    with pytest.raises(raised, match="it failed") as told:
        process.write({"rank": 0}, deadline_s=60.0, silence_s=inf)
    assert type(told.value) is raised and told.value.remedy == "Mend it."


def ordered(tmp_path: Path, one: Kept, contents: list[bytes], buffer: SharedBuffer) -> dict[str, object]:
    """The order of rank 1 of 3 to write these files, which are staged, with a copy for its partner."""
    partial = tmp_path / "step-000007.i002.partial"
    begin_partial(partial)
    (tmp_path / "slot").touch()
    files = []
    for number, content in enumerate(contents):
        buffer.view[number * 8192 : number * 8192 + len(content)] = content
        name = f"model-r00001-of-00003-{number:03d}.safetensors"
        files.append({"name": name, "offset": number * 8192, "bytes": len(content)})
    buffer.filled = 8192 * len(contents)
    return {
        "partial": str(partial),
        "rank": 1,
        "world": 3,
        "time": 5.0,
        "attempt": 1,
        "checkpoint": {"step": 7, "incarnation": 2, "about": {"told": 1}},
        "values": {"train": {"at": 1}},
        "boxes": [],
        "files": files,
        "memory": {"slot": str(tmp_path / "slot"), "token": TOKEN, "partner": one.address},
    }


@pytest.mark.parametrize("contents", [[], [b"a" * 5000], [b"a" * 5000, b"b" * 300]])
def test_a_partner_keeps_what_was_staged_to_its_last_byte_and_nothing_of_a_rank_that_writes_nothing(
    tmp_path: Path,
    kept: Kept,  # noqa: F811
    contents: list[bytes],
):
    buffer = SharedBuffer.create(1 << 16, name="test")
    try:
        order = ordered(tmp_path, kept, contents, buffer)
        answer = writer._answer(order, buffer)
        assert answer["copy_failure"] is None and answer["bytes"] == sum(map(len, contents))
        (held,) = kept.replicas.complete()
        assert (held.rank, held.world, held.base, held.time) == (1, 3, (7, 2), 5.0)
        assert held.values == {"train": {"at": 1}} and held.about == {"told": 1}
        assert held.part == read_part_record(tmp_path / "step-000007.i002.partial", 1)
        copy = held.path.read_bytes()
        assert len(copy) == (8192 * (len(contents) - 1) + len(contents[-1]) if contents else 0)
        for number, file in enumerate(held.part.files):
            begin = held.offsets[file.name]
            assert copy[begin : begin + file.bytes] == contents[number]
        own = read_replica(label_of(tmp_path / "slot"))
        assert own is not None and own.part == held.part and own.path == tmp_path / "slot"
    finally:
        buffer.close()


def test_a_partner_that_keeps_nothing_is_told_and_the_save_is_made(tmp_path: Path, kept: Kept):  # noqa: F811
    buffer = SharedBuffer.create(1 << 16, name="test")
    try:
        order = ordered(tmp_path, kept, [b"a" * 5000], buffer)
        order["world"] = LIMITS.world + 1
        answer = writer._answer(order, buffer)
        assert answer["copy_failure"] and answer["bytes"] == 5000
        assert read_part_record(tmp_path / "step-000007.i002.partial", 1) is not None
        assert kept.listed() == []
    finally:
        buffer.close()


def test_an_error_is_told_with_its_kind_and_one_that_nobody_expected_with_where_it_was_raised():
    told = StorageError("no space", remedy="Free some."), RunBusy("taken", remedy="Wait.")
    kinds = [error_to_json(error)["kind"] for error in (*told, CheckpointError("spoiled"))]
    assert kinds == ["storage", "busy", "checkpoint"]
    assert error_to_json(told[0]) == {"kind": "storage", "message": "no space", "remedy": "Free some."}
    assert error_to_json(OSError(5, "Input/output error")) == {
        "kind": "storage",
        "message": "[Errno 5] Input/output error",
        "remedy": "Look at the disk (dmesg, df).",
    }
    try:
        raise KeyError("files")
    except KeyError as error:
        unexpected = error_to_json(error)
    assert unexpected["kind"] == "checkpoint" and "KeyError: 'files'" in unexpected["message"]
    assert Path(__file__).name in unexpected["message"] and "report" in unexpected["remedy"]
