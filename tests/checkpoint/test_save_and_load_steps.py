"""A save at once and a load, step by step: who is told of what, what is read back, and what is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.deadlines import Deadlines
from bloomery.checkpoint.format.manifest import IndexedBox, read_index, read_manifest
from bloomery.checkpoint.format.state import Box, CollectedState, StateEntry, StateSnapshot, whole
from bloomery.checkpoint.format.verified_reader import GivenUp, read_back, read_back_index
from bloomery.checkpoint.load.loader import (
    load_checkpoint,
    read_model,
    read_tensors,
    refuse_another_model,
    refuse_incomplete,
)
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.checkpoint.save.saver import Saver
from bloomery.checkpoint.save.verification import OwnFilesCheck, VerificationResults
from bloomery.checkpoint.writer import client
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import CheckpointError, StorageError

NAME = "step-000003.i002"


def snapshot(value: float, *, step: int = 3) -> StateSnapshot:
    entries = (whole("model.a", torch.full((5,), value)), whole("optim.a", torch.full((7,), value)))
    return StateSnapshot(
        step=step,
        incarnation=2,
        state=CollectedState(entries=entries, values={}),
        values={"train": {"position": 9}},
        about={"told": 1},
        run_length_steps=77,
    )


class Told:
    """What a saver told of checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.committed, self.intact = list[tuple[str, int | None]](), list[str]()
        self.saver = Saver(
            directory,
            Ranks(),
            CheckpointSection(background="off"),
            committed=lambda *what: self.committed.append(what),
            intact=self.intact.append,
        )


def test_a_save_at_once_is_told_read_back_and_made_once(tmp_path: Path) -> None:
    told = Told(tmp_path)
    saver = told.saver
    saver.prepare({})
    assert saver.background is None and saver.committed_step == -1
    assert saver.begin(snapshot(1.0))
    assert told.committed == [(NAME, 77)] and told.intact == [NAME] and saver.committed_step == 3
    assert [(result.name, result.step, result.failure) for result in saver.take_save_results()] == [
        (NAME, 3, None)
    ]
    assert saver.take_save_results() == []
    assert saver.save(snapshot(2.0)) == tmp_path / NAME
    assert told.committed == [(NAME, 77)], "what is there is not saved again"
    assert len(saver.take_save_results()) == 1 and saver.wait_for_saves() == 3
    manifest = read_manifest(tmp_path / NAME)
    assert manifest.values == {"train": {"position": 9}} and manifest.about == {"told": 1}
    assert dict(read_tensors(tmp_path / NAME))["model.a"].tolist() == [1.0] * 5
    (tmp_path / NAME / "manifest.json").write_text("{")
    saver.save(snapshot(3.0))
    assert verify(tmp_path / NAME) == [] and len(told.committed) == 2, "what was damaged is saved again"
    saver.close()


def test_a_save_that_fails_leaves_nothing_and_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(tmp_path)

    def refused(*given: object, **named: object) -> None:
        raise StorageError("no space", remedy="")

    monkeypatch.setattr("bloomery.checkpoint.save.direct.commit", refused)
    with pytest.raises(StorageError, match="no space"):
        told.saver.save(snapshot(1.0))
    assert list(tmp_path.iterdir()) == [] and told.committed == told.intact == []
    assert told.saver.committed_step == -1 and told.saver.take_save_results() == []


def test_a_save_that_is_damaged_on_the_disk_counts_as_committed_and_not_as_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(tmp_path)
    monkeypatch.setattr(
        "bloomery.checkpoint.save.direct.read_back", lambda *given: "a file is not what was written"
    )
    told.saver.save(snapshot(1.0))
    assert told.committed == [(NAME, 77)] and told.intact == []
    assert f"{NAME} is damaged: rank 0: a file is not what was written" in caplog.text


class Writer:
    """A stand-in for the writer process: it notes its orders and gives the answers that it is told."""

    def __init__(self, *answers: str | CheckpointError | None) -> None:
        self._answers = list(answers)
        self.orders: list[dict[str, Any]] = []

    def write(self, order: dict[str, Any], **how: Any) -> dict[str, Any]:
        self.orders.append({**order, **how})
        answer = self._answers.pop(0)
        if isinstance(answer, CheckpointError):
            raise answer
        return {"problem": answer}


def test_reading_back_is_given_up_once_for_a_save_and_then_carried_to_its_end() -> None:
    waits = Deadlines(part_bytes=10**9, largest_part_bytes=3 * 10**9)
    order = {"partial": "/there/a.partial", "store": "s3://b", "rank": 3}
    saving: Any = SimpleNamespace(name="a", order=order, buffer=1, deadlines=waits)
    buffer: Any = SimpleNamespace(stops_reading=True)
    check, free = OwnFilesCheck(), [False]
    writer: Any = Writer("", None, "damaged", CheckpointError("died"), "")

    def run() -> None:
        check.run(saving, writer=writer, buffer=buffer, is_free=lambda: free[0])

    run()
    assert writer.orders == [] and buffer.stops_reading is False
    run()
    assert writer.orders == [
        {
            **{"verify": "/there/a.partial", "store": "s3://b", "rank": 3, "buffer": 1, "to_its_end": True},
            **{"deadline_s": waits.answer_s, "silence_s": waits.silence_s, "tries": 1},
        }
    ]
    assert check.take() == {"a": ""} and check.take() == {}
    free[0] = True
    for expected, ends in (({}, False), ({"a": "damaged"}, True), ({}, False)):
        run()
        assert check.take() == expected and writer.orders[-1]["to_its_end"] is ends
    free[0] = False
    run()
    assert len(writer.orders) == 4, "it was not given up before: the save goes first"
    assert check.given_up == 3
    writer = Writer("", None)
    check = OwnFilesCheck()
    check.carry_to_end("a")
    run()
    assert check.take() == {"a": ""} and writer.orders[0]["to_its_end"] is True
    free[0] = True
    run()
    assert writer.orders[1]["to_its_end"] is False and check.given_up == 1, "it is carried once"


def test_a_checkpoint_is_intact_once_each_rank_has_said_so() -> None:
    intact: list[str] = []
    results = VerificationResults(world=2, intact=intact.append)
    assert results.add(0, {"c": "damaged", "a": "", "b": ""}) == []
    assert results.add(0, {"a": ""}) == [], "one rank counts once"
    assert results.add(1, {"c": "", "b": "", "d": ""}) == ["b"] == intact
    assert results.add(0, {"c": ""}) == ["c"]
    assert results.add(1, {"b": ""}) == [] and intact == ["b", "c"], "what is known is told once"
    results.add(0, {f"given up {number}": "" for number in range(1_000)})
    assert len(results._ranks_done) == 16 and results.add(1, {"given up 999": ""}) == ["given up 999"]


def test_what_was_written_is_read_back_in_chunks_until_somebody_needs_the_writer(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, [whole("model.a", torch.zeros(3_000_000))], step=3, incarnation=2)
    partial, files = saved.with_name(f"{saved.name}.partial"), read_manifest(saved).files
    records = list(read_index(saved, read_manifest(saved)).files.values())
    read, rests = list[int](), list[int]()
    assert read_back(partial, records, read=read.append, rest=lambda: rests.append(1)) == ""
    assert sum(read) == files[0].bytes and len(read) == 2 == len(rests) and read[0] == 8 << 20
    answers = iter([True, False])
    with pytest.raises(GivenUp):
        read_back(partial, records, go_on=lambda: next(answers))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    path = saved / files[0].name
    with path.open("r+b") as file:
        file.seek((2 << 20) + 3)
        file.write(b"!")
    assert read_back(partial, records).endswith("is not what was written, from byte 2,097,152 on")
    assert read_back(partial, files).endswith("is not what was written"), "where blocks are not known"
    os.truncate(path, 1000)
    assert f"has 1,000 bytes of the {files[0].bytes:,} that were written" in read_back(partial, records)
    path.unlink()
    assert "cannot be read back: No such file" in read_back(partial, records)
    assert read_back_index(partial) == ""
    (saved / "index.json").write_text("{}")
    assert read_back_index(partial).startswith("index.json has 2 bytes of the")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def answered(*lines: bytes, deadline_s: float = 60.0, silence_s: float = 60.0) -> dict[str, Any]:
    reading, writing = os.pipe()
    for line in lines:
        os.write(writing, line)
    process: Any = SimpleNamespace(stdout=SimpleNamespace(fileno=lambda: reading))
    if lines and not lines[-1]:
        os.close(writing)
    try:
        return client._receive_answer(process, deadline=time.monotonic() + deadline_s, silence_s=silence_s)
    finally:
        os.close(reading)


def test_a_writers_answer_comes_after_its_signs_of_progress_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = os.read
    monkeypatch.setattr(client, "_TICK_S", 0.001)
    monkeypatch.setattr(os, "read", lambda file, most: read(file, 10))
    assert answered(b'{"progress": 1}\n{"pro', b'gress": 2}\n{"bytes": 7}\n') == {"bytes": 7}
    with pytest.raises(OSError, match="the writer has ended"):
        answered(b'{"progress": 1}\n{"byt', b"")
    with pytest.raises(TimeoutError, match="made no progress for 0 s"):
        answered(b'{"progress": 1}\n', silence_s=0.0)
    with pytest.raises(TimeoutError) as late:
        answered(b'{"progress": 1}\n', deadline_s=0.0)
    assert not str(late.value)


def test_each_sign_of_progress_allows_a_writer_to_be_silent_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b'{"progress": 1}\n', b'{"progress": 2}\n', b'{"bytes": 7}\n']
    clock, reads = [0.0], iter(lines)

    def is_ready(file: int, event: int) -> bool:
        clock[0] += 2.5
        return clock[0] % 5.0 == 0.0  # every second time

    monkeypatch.setattr(client, "_is_ready", is_ready)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(os, "read", lambda file, most: next(reads))
    process: Any = SimpleNamespace(stdout=SimpleNamespace(fileno=lambda: 0))
    answer = client._receive_answer(process, deadline=60.0, silence_s=6.0)
    assert answer == {"bytes": 7} and clock[0] == 15.0


def boxed(name: str, *rows: tuple[int, int], dtype: str = "float32") -> list[IndexedBox]:
    place = {"name": name, "dtype": dtype, "global_shape": (10, 2), "scope": "shared", "file": "f"}
    return [
        IndexedBox(**place, offset=(start, 0), shape=(stop - start, 2), begin=0, end=8 * (stop - start))
        for start, stop in rows
    ]


def wanted(name: str, start: int, stop: int, *, rows: int = 10) -> StateEntry:
    tensor = torch.zeros(stop - start, 2)
    box = Box((start, 0), (stop - start, 2))
    return StateEntry(name=name, global_shape=(rows, 2), dtype="float32", box=box, tensor=tensor)


def test_a_box_that_is_saved_in_part_is_refused_and_what_others_lack_is_not() -> None:
    saved = {"model.a": boxed("model.a", (0, 4), (6, 10))}
    refuse_incomplete("there", [wanted("model.a", 0, 4), wanted("model.a", 6, 9), wanted("b", 0, 9)], saved)
    for start, stop in ((3, 5), (4, 6), (0, 10)):
        with pytest.raises(
            CheckpointError, match=r"(?s)does not hold all of.*incompletely: use another checkpoint"
        ):
            refuse_incomplete("there", [wanted("b", 0, 9), wanted("model.a", start, stop)], saved)


def differences(
    entries: Sequence[StateEntry], *, strict: bool = True, names: Sequence[str] = ()
) -> list[str]:
    saved = {
        "model.a": boxed("model.a", (0, 10)),
        "model.half": boxed("model.half", (0, 10), dtype="float16"),
        "model.only": boxed("model.only", (0, 10)),
    }
    try:
        refuse_another_model("there", entries, saved, strict=strict, names=names)
    except CheckpointError as refused:
        return refused.message.splitlines()[1:]
    return []


def test_all_that_differs_from_the_checkpoint_is_told_at_once() -> None:
    here = [wanted("model.a", 0, 10, rows=12), wanted("model.half", 0, 10), wanted("model.new", 0, 10)]
    told = differences(here)
    assert [line for line in told if line.endswith(":")] == [
        "  1 missing in the checkpoint:",
        "  1 only in the checkpoint:",
        "  2 different:",
    ]
    assert "    model.new" in told and "    model.only" in told
    shapes, types = (next(line for line in told if name in line) for name in ("model.a", "model.half"))
    assert "10×2" in shapes and "12×2" in shapes and "float16" in types and "float32" in types
    assert [line for line in differences(here, strict=False) if line.endswith(":")] == ["  1 different:"]
    same = [wanted("model.a", 0, 3)]
    assert differences(same, strict=False) == [] == differences(same[:0], strict=False)
    assert len(differences(same, names=["model.half", "model.only"])) == 0
    many = [wanted(f"model.{letter}", 0, 3) for letter in "zyxwvutsrq"]
    assert differences(many)[1:11] == [f"    model.{letter}" for letter in "qrstuvwxyz"]


def test_what_is_read_is_counted_named_and_refused_where_it_is_not_there(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(6, 2)
    entries = [whole("model.b", tensor), whole("model.a", tensor.half()), whole("optim.a", tensor + 1)]
    values = {"train": {"position": 4}}
    saved = save_checkpoint(tmp_path, entries, step=3, incarnation=2, values=values)
    assert [(name, found.dtype) for name, found in read_model(saved)] == [
        ("a", torch.float32),
        ("b", torch.float32),
    ]
    assert [name for name, _ in read_model(saved, names=["b"])] == ["b"]
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensors of the model, model.c among(?s:.*)recipe of its run"
    ):
        next(read_model(saved, names=["b", "c"]))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)holds no tensors named outer.\*.*without its model: use another checkpoint",
    ):
        next(read_tensors(saved, prefix="outer."))
    read: list[int] = []
    target = whole("model.b", torch.zeros(6, 2))
    with pytest.raises(CheckpointError, match="only in the checkpoint"):
        load_checkpoint(saved, [target])
    assert load_checkpoint(saved, [target], strict=False, count=read.append) == values
    assert torch.equal(target.tensor, tensor) and sum(read) >= 48
    more = ["model.a"]
    assert load_checkpoint(saved, [target], names=more, parts={"model"}) == values
    with pytest.raises(CheckpointError, match="only in the checkpoint"):
        load_checkpoint(saved, [target], parts={"model"})
    half = replace(target, name="model.a")
    with pytest.raises(CheckpointError, match="different"):
        load_checkpoint(saved, [half, target], parts={"model"})
    load_checkpoint(saved, [half, target], parts={"model"}, strict=False)
    assert torch.equal(half.tensor, tensor)


def test_parts_are_named_in_full_and_of_no_names_nothing_is_read(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    saved = save_checkpoint(
        tmp_path, [whole("model.a", tensor), whole("models.a", tensor)], step=3, incarnation=2
    )
    target = whole("model.a", torch.zeros(3))
    load_checkpoint(saved, [target], parts={"model"})
    assert torch.equal(target.tensor, tensor)
    assert list(read_model(saved, names=[])) == []
