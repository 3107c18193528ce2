"""How a trainer and its writer speak with each other: the process, each line, each wait and each end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.format.manifest import FileRecord
from bloomery.checkpoint.writer import client, process
from bloomery.checkpoint.writer.client import WriterLost, WriterProcess
from bloomery.errors import CheckpointError


class Started:
    """A stand-in for a process that was started."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "wb", buffering=0)
        self.stdout = SimpleNamespace(close=lambda: self.done.append("stdout"))
        self.pid, self.done = 4711, list[str]()
        self.ended: int | None = None

    def poll(self) -> int | None:
        return self.ended

    def kill(self) -> None:
        self.done.append("kill")

    def wait(self, seconds: float) -> None:
        self.done.append(f"wait {seconds}")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The processes that were started, with their arguments."""
    found: list[tuple[Any, ...]] = []

    def start(command: list[str], **how: Any) -> Started:
        found.append((Started(), command, how))
        return found[-1][0]

    monkeypatch.setattr(client.subprocess, "Popen", start)
    return found


BUFFERS: Any = [SimpleNamespace(file=5, bytes=700), SimpleNamespace(file=8, bytes=900)]


def test_a_writer_is_started_with_its_buffers_alone_and_apart_from_the_terminal(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.os, "environ", {"A": "1", "MALLOC_ARENA_MAX": "2", "XMALLOC_": "3"})
    writer = WriterProcess(BUFFERS)
    writer.start()
    ((one, command, how),) = started
    assert command == [
        sys.executable, "-m", "bloomery.checkpoint.writer.process", "5", "700", "8", "900"
    ]  # fmt: skip
    assert how == {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "bufsize": 0,
        "pass_fds": [5, 8],
        "start_new_session": True,
        "env": {"A": "1", "XMALLOC_": "3"},
    }
    assert not os.get_blocking(one.stdin.fileno()) and writer.port is None and writer.pid == 4711
    writer.start()
    assert len(started) == 1
    one.ended = -9
    writer.start()
    assert len(started) == 2, "one that has ended is replaced"


def test_a_writer_that_keeps_replicas_says_at_which_port_within_a_minute(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, asked = WriterProcess(BUFFERS, replica_server={"rank": 3}), list[object]()

    def exchange(line: bytes, **how: object) -> dict[str, Any]:
        asked.append((line, how))
        return {"port": 99}

    monkeypatch.setattr(writer, "_exchange", exchange)
    writer.start()
    assert asked == [(b'{"replica_server": {"rank": 3}}\n', {"deadline_s": 60.0})] and writer.port == 99


def test_a_process_that_cannot_be_started_is_told_with_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(client.subprocess, "Popen", refused)
    with pytest.raises(
        CheckpointError, match=r"could not be started: Resource temporarily unavailable(?s:.*)ulimit -u"
    ):
        WriterProcess(BUFFERS).start()


class Lines:
    """A writer whose exchanges are noted, and answered or refused one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.writer, self.answers = WriterProcess(BUFFERS), list(answers)
        self.sent: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.now = 100.0
        monkeypatch.setattr(self.writer, "start", lambda: None)
        monkeypatch.setattr(self.writer, "_exchange", self._exchange)
        monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _exchange(self, line: bytes, **how: Any) -> dict[str, Any]:
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        self.sent.append((json.loads(line), how))
        self.now += 10.0
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


def test_an_order_is_one_line_with_its_texts_and_a_second_writer_has_what_is_left_of_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = Lines(monkeypatch, WriterLost("the writer has ended"), {"bytes": 5})
    texts = {"values": '{"train": 1}', "boxes": "[]"}
    answer = lines.writer.write({"rank": 3}, texts=texts, deadline_s=60.0, silence_s=7.0)
    assert answer == {"bytes": 5}
    sent = {"rank": 3, "values": {"train": 1}, "boxes": []}
    assert lines.sent == [
        ({**sent, "attempt": 1}, {"deadline_s": 60.0, "silence_s": 7.0}),
        ({**sent, "attempt": 2}, {"deadline_s": 50.0, "silence_s": 7.0}),
    ]
    assert caplog.messages == ["the writer has ended (attempt 1 of 2)"]
    lines.answers[:] = [{"bytes": 6}]
    assert lines.writer.write({"rank": 3}, deadline_s=60.0) == {"bytes": 6}
    assert lines.sent[-1] == ({"rank": 3, "attempt": 1}, {"deadline_s": 60.0, "silence_s": inf})


def test_writers_that_die_one_after_the_other_are_given_up_after_so_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = Lines(monkeypatch, *[WriterLost("it ended")] * 3)
    for tries, messages in ((2, ["it ended (attempt 1 of 2)", "it ended (attempt 2 of 2)"]), (1, [])):
        caplog.clear()
        with pytest.raises(CheckpointError, match="died while it was writing this one"):
            lines.writer.write({}, deadline_s=60.0, tries=tries)
        assert caplog.messages == (messages or ["it ended (attempt 1 of 1)"])
    assert lines.answers == []
    caplog.clear()

    def ended(line: bytes, **how: Any) -> dict[str, Any]:
        lines.writer._closing.set()
        raise WriterLost("it was ended")

    monkeypatch.setattr(lines.writer, "_exchange", ended)
    with pytest.raises(CheckpointError):
        lines.writer.write({}, deadline_s=60.0)
    assert caplog.messages == [], "who closes it knows"


def test_an_order_behind_another_waits_for_its_turn_so_long_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = Lines(monkeypatch, {"bytes": 5}, {"failure": {"kind": "", "message": "no", "remedy": ""}})
    lines.writer._turn.acquire()
    said = "The writer is still busy with an earlier checkpoint in time; the save was abandoned."
    with pytest.raises(CheckpointError) as late:
        lines.writer.write({}, deadline_s=0.0)
    assert late.value.message == said and lines.sent == []
    lines.writer._turn.release()
    lines.writer.write({}, deadline_s=60.0)
    with pytest.raises(CheckpointError, match="no"):
        lines.writer.write({}, deadline_s=60.0)
    assert lines.writer._turn.acquire(blocking=False), "whatever came of an order, the next has its turn"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError("it has made no progress for 7 s"), ": it has made no progress for 7 s;"),
        (TimeoutError(), " in time; the save"),
        (OSError("broken"), None),
        (ValueError("closed file"), None),
    ],
)
def test_a_writer_that_is_late_or_gone_is_ended_and_not_asked_again(
    error: Exception, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error

    one: Any = Started()
    writer = WriterProcess(BUFFERS)
    writer._process = one
    sent: list[object] = []
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(client, "_send_line", lambda *given, **how: sent.append((given, how)))
    monkeypatch.setattr(client, "_receive_answer", refused)
    with pytest.raises(Exception) as told:
        writer._exchange(b"line\n", deadline_s=50.0, silence_s=7.0)
    assert sent == [((one, b"line\n"), {"deadline": 107.0})]
    if said is None:
        assert isinstance(told.value, WriterLost) and str(told.value) == "the writer (process 4711) has ended"
    else:
        assert isinstance(told.value, CheckpointError) and said in told.value.message
        assert "The writer (process 4711) did not finish a checkpoint in time" in told.value.message
    assert one.done == ["kill", "wait 3.0", "stdout"] and one.stdin.closed and writer.pid is None
    with pytest.raises(WriterLost, match="was ended"):
        writer._exchange(b"line\n", deadline_s=50.0)


def test_the_first_deadline_counts_while_an_order_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, sent = WriterProcess(BUFFERS), list[object]()
    writer._process = Started()  # type: ignore[assignment]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(client, "_send_line", lambda *given, deadline: sent.append(deadline))
    monkeypatch.setattr(client, "_receive_answer", lambda *given, **how: sent.append(how) or {})
    writer._exchange(b"line\n", deadline_s=5.0, silence_s=7.0)
    assert sent == [105.0, {"deadline": 105.0, "silence_s": 7.0}]


class Ended(Exception):
    """The loop of the writer came to its end."""


def test_a_writer_carries_out_its_orders_and_forgets_what_an_earlier_one_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = Part(files=(FileRecord(name="f", bytes=1, xxh3_128="", blocks=""),), boxes=())
    asked: list[tuple[str, Any]] = []
    ignored: list[tuple[int, object]] = []
    nice: list[int] = []
    answers: list[Any] = []
    orders = iter(
        [
            {"replica_server": {"it": 1}},
            {"partial": "a", "buffer": 1},
            {"verify": "a", "buffer": 0},
            {"verify": "a", "buffer": 1},
            {"partial": "b", "buffer": 0},
            {"partial": "c", "buffer": 0},
            {"verify": "b", "buffer": 0},
            {"verify": "c", "buffer": 0},
        ]
    )

    def answer(order: Any, buffer: Any, *, tell: Any, written: dict[str, Part]) -> dict[str, Any]:
        assert tell is process._tell_progress and written == {}, "what was written before is forgotten"
        written[order["partial"]] = part
        asked.append(("write", (order["partial"], buffer)))
        return {"bytes": 5}

    def read_back(found: Part | None, order: Any, buffer: Any, *, tell: Any) -> str | None:
        assert tell is process._tell_progress
        asked.append(("verify", (order["verify"], buffer, found)))
        return None if found is None else ""

    def write(file: int, content: bytes) -> None:
        assert file == 1 and content.endswith(b"\n")
        answers.append(json.loads(content))
        if len(answers) == 8:
            raise BrokenPipeError

    monkeypatch.setattr(process, "_answer", answer)
    monkeypatch.setattr(process, "_read_back", read_back)
    monkeypatch.setattr(process, "_replica_server", lambda settings: SimpleNamespace(port=settings["it"] + 8))
    monkeypatch.setattr(process, "SharedBuffer", lambda file, *, bytes: (file, bytes))
    waiting = SimpleNamespace(get=lambda: next(orders))
    monkeypatch.setattr(process, "queue", SimpleNamespace(Queue=lambda: waiting))
    threads: list[Any] = []

    def thread(**how: Any) -> Any:
        threads.append(how)
        return SimpleNamespace(start=lambda: threads.append("started"))

    monkeypatch.setattr(process, "threading", SimpleNamespace(Thread=thread))
    monkeypatch.setattr(process.signal, "signal", lambda *what: ignored.append(what))
    monkeypatch.setattr(process.os, "nice", nice.append)
    monkeypatch.setattr(process.os, "write", write)
    process.main(["5", "700", "8", "900"])
    assert ignored == [
        (number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    ]
    assert nice == [10] and threads[1] == "started" and threads[0]["daemon"] is True
    assert threads[0]["target"] is process._listen and threads[0]["args"][1] == os.getppid()
    assert asked == [
        ("write", ("a", (8, 900))),
        ("verify", ("a", (5, 700), part)),
        ("verify", ("a", (8, 900), None)),
        ("write", ("b", (5, 700))),
        ("write", ("c", (5, 700))),
        ("verify", ("b", (5, 700), None)),
        ("verify", ("c", (5, 700), part)),
    ]
    told = [{"port": 9}, {"bytes": 5}, {"problem": ""}, {"problem": None}, {"bytes": 5}, {"bytes": 5}]
    assert answers == [*told, {"problem": None}, {"problem": ""}]


@pytest.mark.parametrize("end", ["closed", "orphaned"])
def test_orders_are_taken_line_by_line_until_the_trainer_is_gone(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Any] = []
    received = [b'{"a": 1}\n{"b"', b": 2}\n", b'{"c": 3}\n{"d": 4}\n{"e"', b""]
    ready = [True, False, True, True, True]
    parents = [7] * (6 if end == "closed" else 3) + [1]

    def leave(status: int) -> None:
        raise Ended(status)

    waits: list[Any] = []

    def select(*given: Any) -> Any:
        waits.append(given)
        return ([0] if ready.pop(0) else [], [], [])

    monkeypatch.setattr(process, "select", SimpleNamespace(select=select))
    monkeypatch.setattr(process.os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(process.os, "read", lambda file, most: received.pop(0))
    monkeypatch.setattr(process.os, "_exit", leave)
    queue: Any = SimpleNamespace(put=orders.append)
    with pytest.raises(Ended) as ended:
        process._listen(queue, 7)
    assert ended.value.args == (0,) and waits[0] == ([0], [], [], 0.5)
    listed = [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}]
    assert orders == (listed if end == "closed" else listed[:2])


def test_signs_of_progress_are_lines_of_their_own_and_nobody_need_hear_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[tuple[int, bytes]] = []
    monkeypatch.setattr(process.os, "write", lambda *what: written.append(what))
    process._tell_progress(4096)
    assert written == [(1, b'{"progress": 4096}\n')]

    def broken(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(process.os, "write", broken)
    process._tell_progress(4096)


def test_what_a_writer_writes_is_on_record_under_the_directory_it_went_to(tmp_path: Path) -> None:
    part = Part(files=(FileRecord(name="f", bytes=3, xxh3_128="", blocks=""),), boxes=())
    order = {"partial": str(tmp_path / "step-000001.i001.partial"), "store": "", "rank": 1, "verify": "x"}
    assert process._read_back(None, {**order, "to_its_end": True}, None) is None  # type: ignore[arg-type]
    final = tmp_path / "step-000001.i001"
    final.mkdir()
    (final / "f").write_bytes(b"abc")
    asked = {**order, "verify": order["partial"]}
    for to_its_end, stops, problem in (
        (True, True, "f is not what was written"),
        (False, False, "f is not what was written"),
        (False, True, None),
    ):
        buffer: Any = SimpleNamespace(stops_reading=stops)
        assert process._read_back(part, {**asked, "to_its_end": to_its_end}, buffer) == problem


def test_a_writer_that_reads_back_shows_that_it_goes_on_and_rests_until_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told, rests, places = [100.0], list[int](), list[bool](), list[object]()
    buffer: Any = SimpleNamespace(stops_reading=False)

    def read_back(part: Part, rank: int, *, read: Any, rest: Any, go_on: Any) -> str:
        read(10)
        now[0] += 1.0
        read(20)
        rest()
        buffer.stops_reading = True
        rest()
        return f"rank {rank} has lost {part.files[0].name}"

    def place_of(order: dict[str, Any]) -> Any:
        places.append((order["partial"], order["store"]))
        return SimpleNamespace(read_back=read_back)

    throttle = lambda is_urgent: SimpleNamespace(rest=lambda: rests.append(is_urgent()))  # noqa: E731
    monkeypatch.setattr(process, "CpuThrottle", throttle)
    monkeypatch.setattr(process, "part_writer_for", place_of)
    monkeypatch.setattr(
        "bloomery.checkpoint.format.deadlines.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    part = Part(files=(FileRecord(name="f", bytes=3, xxh3_128="", blocks=""),), boxes=())
    order = {"verify": "/there/a.partial", "store": "s3://b", "rank": 3, "to_its_end": True}
    assert process._read_back(part, order, buffer, tell=told.append) == "rank 3 has lost f"
    assert (told, rests, places) == ([30], [False, True], [("/there/a.partial", "s3://b")])
