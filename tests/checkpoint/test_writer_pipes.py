"""What goes through the pipes between a trainer and its writer, and what a writer leaves behind."""

from __future__ import annotations

import json
import os
import queue
import threading
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.checkpoint.test_partner import TOKEN
from tests.checkpoint.test_writer import Orders, orders, written_by_both
from tests.checkpoint.test_writer_terms import BUFFERS, Lines, Started

from bloomery.checkpoint.format import deadlines
from bloomery.checkpoint.format.commit import Part, read_part_record, write_part_record
from bloomery.checkpoint.format.manifest import FileRecord
from bloomery.checkpoint.writer import client, process
from bloomery.checkpoint.writer.client import WriterLost, WriterProcess
from bloomery.checkpoint.writer.shared_buffer import ABANDONED
from bloomery.errors import CheckpointError

__all__ = ["orders"]


def test_an_answer_of_many_pieces_is_taken_whole() -> None:
    reading, writing = os.pipe()
    line = json.dumps({"problem": "x" * 300_000}).encode() + b"\n"

    def say() -> None:
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            pipe.write(b'{"progress": 1}\n' + line)

    threading.Thread(target=say).start()
    with os.fdopen(reading, "rb") as stdout:
        one: Any = SimpleNamespace(stdout=stdout)
        answer = client._receive_answer(one, deadline=inf, silence_s=inf)
    assert answer == {"problem": "x" * 300_000}


def test_an_order_that_no_pipe_holds_arrives_whole() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    line, arrived = os.urandom(300_000), list[bytes]()

    def read() -> None:
        with os.fdopen(reading, "rb") as pipe:
            arrived.append(pipe.read())

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(writing, "wb", buffering=0) as stdin:
        one: Any = SimpleNamespace(stdin=stdin)
        client._send_line(one, line, deadline=inf)
    reader.join()
    assert arrived == [line]


def test_a_trainer_that_waits_for_its_writer_looks_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def poll(milliseconds: float) -> list[tuple[int, int]]:
        asked.append(milliseconds)
        return []

    polled = SimpleNamespace(register=lambda file, event: None, poll=poll)
    monkeypatch.setattr(client.select, "poll", lambda: polled)
    assert not client._is_ready(0, 1) and asked == [500.0]


def closed(writer: WriterProcess) -> Started:
    one: Any = Started()
    writer._process = one
    writer.close()
    os.close(one.reading)
    return one


def test_the_pipes_of_a_writer_are_closed_with_it_unless_somebody_still_waits_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "WRITER_END_S", 0.0)
    writer = WriterProcess(BUFFERS)
    one = closed(writer)
    assert one.done == ["kill", "wait 0.0", "stdout"] and one.stdin.closed
    taken: Any = SimpleNamespace(acquire=lambda timeout: timeout > 0.0)
    monkeypatch.setattr(writer, "_turn", taken)
    another = closed(writer)
    assert another.done == ["kill", "wait 0.0"] and not another.stdin.closed
    another.stdin.close()


def test_who_lost_a_save_is_told_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch, WriterLost("it ended"))
    with pytest.raises(CheckpointError) as died:
        lines.writer.write({}, deadline_s=60.0, tries=1)
    assert "want of memory (dmesg)" in died.value.remedy
    with lines.writer._turn, pytest.raises(CheckpointError) as late:
        lines.writer.write({}, deadline_s=0.0)
    assert "Is the disk stuck (dmesg)?" in late.value.remedy


def test_what_an_earlier_save_left_is_no_part_of_the_first_try_of_another(orders: Orders) -> None:
    stale = Part(files=(FileRecord(name="old", bytes=1, xxh3_128="", blocks=""),), boxes=())
    write_part_record(orders.partial, 1, stale)
    assert "failure" not in orders.give(1, attempt=1)
    part = read_part_record(orders.partial, 1)
    assert part is not None and [file.name for file in part.files] == [orders.orders[1]["files"][0]["name"]]


def test_of_a_part_that_could_not_be_staged_no_file_is_left(orders: Orders) -> None:
    orders.buffers[1].filled = ABANDONED
    failure = orders.give(1, attempt=1)["failure"]
    assert "could not be copied" in failure["message"]
    assert orders.data_files(orders.partial) == {}
    assert "rank 1: the state could not be copied" in orders.give(0, attempt=1)["failure"]["message"]


def test_reading_back_leaves_the_processors_to_the_training_and_shows_that_it_goes_on(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, told, rests = written_by_both(orders), list[int](), list[bool]()
    throttled = SimpleNamespace(rest=lambda: rests.append(True))
    monkeypatch.setattr(process, "CpuThrottle", lambda is_urgent: throttled)
    monkeypatch.setattr(deadlines, "REPORT_EVERY_S", 0.0)
    asked = {"verify": str(orders.partial), "rank": 1, "to_its_end": True}
    part = parts[1][str(orders.partial)]
    assert process._read_back(part, asked, orders.buffers[1], tell=told.append) == ""
    assert told[-1] >= part.files[0].bytes and rests


def test_a_writer_accepts_replicas_at_the_address_of_its_node_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"owners": [1], "world": 2, "bytes": 1000, "boxes": 5}
    settings = {"root": str(tmp_path), "run": str(tmp_path / "run"), "identity": "it", "limits": limits}
    server = process._replica_server({**settings, "rank": 0, "token": TOKEN, "host": "127.0.0.1"})
    assert server._socket.getsockname() == ("127.0.0.1", server.port)
    server.close()


def test_a_writer_that_may_not_be_nice_writes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def refused(by: int) -> None:
        raise PermissionError

    def get() -> None:
        raise Asked

    monkeypatch.setattr(process.os, "nice", refused)
    monkeypatch.setattr(process.signal, "signal", lambda *what: None)
    monkeypatch.setattr(process, "_listen", lambda orders, parent: None)
    monkeypatch.setattr(queue, "Queue", lambda: SimpleNamespace(get=get))
    with pytest.raises(Asked):
        process.main([])
