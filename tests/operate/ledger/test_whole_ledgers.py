"""Ledgers, chronicles and histories of small runs, as whole values."""

from __future__ import annotations

import errno
import logging
import threading
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.ledger.test_ledger import T0, killed_once, operation, start, step, write_run

from bloomery.errors import StorageError
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger import chronicle
from bloomery.operate.ledger.chronicle import (
    BY_HAND,
    ChronicleKeeper,
    add_note,
    as_block,
    as_text,
    chronicle_text,
    write_chronicle,
)
from bloomery.operate.ledger.run_history import (
    NO_WORD,
    SAVE_REFUSED,
    Incident,
    RunHistory,
    read_run_history,
)
from bloomery.operate.ledger.run_ledger import RunLedger
from bloomery.operate.ledger.time_class import TimeClass


def clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def test_a_chronicle_is_this() -> None:
    incidents = [
        Incident(time=T0 + 60, cause="bad GPU", culprit="n1, GPU 3", summary="it *fell* off", sure=True,
                 evidence=("it *fell* off", "Xid 79", ""), action="started again", remedy="report it",
                 step=1234, steps_lost=1000),
        Incident(time=T0 + 30, cause="x", sure=False, times=2),
    ]  # fmt: skip
    history = RunHistory(
        incidents=incidents, changes=[(T0 + 45, "stopped: signal")], step=2000, kept_tokens=5_000_000,
        best_tokens_per_s=100_000.0,
    )  # fmt: skip
    ledger = RunLedger(
        begin=T0, end=T0 + 100, ranks={"0-0": {TimeClass.TRAINING: 50.0, TimeClass.STOPPED: 50.0}},
        history=history, incident_s=[90.0, 0.0], goodput_at_incident=[0.25, 0.0],
    )  # fmt: skip
    note = operation(50, "note", text="a\n\n*b*", by="Ada")
    timeless = {**operation(0, "note", text="never"), "time": None}
    later = [operation(90, "note", text=words, by="Ben") for words in ("z", "a")]
    both = chronicle_text(ledger, later, name="my_run")
    assert both.index("> z") < both.index("> a"), "in the order in which they were written"
    text = chronicle_text(ledger, [note, timeless, operation(1, "attempt")], name="my_run")
    assert text == (
        "# Chronicle of my\\_run\n"
        "\n"
        "Written from the journal and operations.jsonl, anew at each incident; `bloomery note` adds to it.\n"
        "\n"
        f"- from {clock(T0)} to {clock(T0 + 100)}: 100.0 s\n"
        "- step 2,000, 5,000,000 tokens\n"
        "- effective time 50.0%, ETTR 100.0%, goodput of tokens 50.0% (first rank; "
        "`bloomery report` has all)\n"
        "- bad GPU: 1 ×, 90.0 s, 1,000 steps lost\n"
        "- x: 2 ×, 0.0 s, 0 steps lost\n"
        "\n"
        f"### {clock(T0 + 30)} · x (2 times in a row)\n"
        "\n"
        "Problem, at step 0, and its evidence:\n"
        "\n"
        "```text\n```\n"
        "\n"
        "- diagnosis: x, likely\n"
        "- done: nothing\n"
        "- cost: 0.0 s, 0 steps; effective time so far 0.0%\n"
        "\n"
        f"### {clock(T0 + 45)} · stopped: signal\n"
        "\n"
        f"### {clock(T0 + 50)} · note by Ada\n"
        "\n"
        "> a\n>\n> \\*b\\*\n"
        "\n"
        f"### {clock(T0 + 60)} · bad GPU: n1, GPU 3\n"
        "\n"
        "Problem, at step 1,234, and its evidence:\n"
        "\n"
        "```text\nit *fell* off\nXid 79\n```\n"
        "\n"
        "- diagnosis: bad GPU, sure\n"
        "- done: started again\n"
        "- what helps: report it\n"
        "- cost: 90.0 s, 1,000 steps; effective time so far 25.0%\n"
    )


def test_words_of_records_are_cut_and_a_fence_is_longer_than_any_in_it() -> None:
    assert as_text("x" * 300) == "x" * 300 and as_text("x" * 301) == "x" * 299 + "…"
    assert as_text(" 12. a ") == "12\\. a" and as_text("www.a.b") == "www\\.a.b"
    assert as_text("WWW.a") == "WWW\\.a" and as_text("a\u2066\u2069b") == "a b"
    assert as_text("a\x00\u202eb") == "a b" and as_text("- a://b") == "\\- a\\://b"
    assert as_block(["a````b", "c" * 400, ""]) == "`````text\na````b\n" + "c" * 300 + "\n\n`````"
    assert as_block([]) == "```text\n```" and as_block(["`a` `b`"]) == "```text\n`a` `b`\n```"


def test_a_note_has_its_author_and_a_chronicle_of_nothing_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    assert write_chronicle(run) is None and not run.chronicle.exists()
    monkeypatch.setattr(chronicle.getpass, "getuser", lambda: "ann")
    add_note(run, "a")
    add_note(run, "b", by="ben")

    def nameless() -> str:
        raise errors.pop()

    errors = [OSError("No username set in the environment"), KeyError("getpwuid(): uid not found: 5")]
    locked: list[int] = []
    monkeypatch.setattr(chronicle.getpass, "getuser", nameless)
    monkeypatch.setattr(
        chronicle.durable, "wait_for_lock", lambda file, *, timeout_s: bool(locked.append(file))
    )
    add_note(run, "c")
    add_note(run, "d")
    assert len(locked) >= 2, "supervisors write there too"
    told = [(event["event"], event["text"], event["by"], event["step"], event["incarnation"])
            for event in read_journal(run.operations)]  # fmt: skip
    assert told == [
        ("note", "a", "ann", 0, 0),
        ("note", "b", "ben", 0, 0),
        ("note", "c", "somebody", 0, 0),
        ("note", "d", "somebody", 0, 0),
    ]


def test_a_note_that_the_disk_does_not_take_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunDirectory(tmp_path).create()
    with monkeypatch.context() as patch:
        patch.setattr("bloomery.events.journal.os.write", full)
        with pytest.raises(StorageError, match=r"operations\.jsonl: No space left on device"):
            add_note(run, "node7 went back")
    assert caplog.messages == [], "no training goes on here"
    add_note(run, "it is back")
    assert [event["text"] for event in read_journal(run.operations)] == ["it is back"]


def test_a_new_chronicle_ends_with_room_for_notes_by_hand_and_a_refusal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, *killed_once())
    assert write_chronicle(run, now=T0 + 50) == run.chronicle
    text = run.chronicle.read_text()
    assert text.endswith(f"\n{BY_HAND}\n\n## Notes by hand\n") and text.count(BY_HAND) == 1

    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chronicle.durable, "write_whole", refuse)
    assert write_chronicle(run, now=T0 + 50) == run.chronicle, "there is nothing new to write"
    add_note(run, "x")
    with pytest.raises(StorageError, match="Writing the chronicle"):
        write_chronicle(run, now=T0 + 50)


def test_a_chronicle_tells_of_the_first_rank_and_keeps_notes_in_any_encoding(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    for event in (*events, *operations):
        event |= {"ranks": 2} if "ranks" in event else {}
    run = write_run(tmp_path, events, operations, bases)
    run.chronicle.write_bytes("Größe\n".encode("latin-1"))
    write_chronicle(run, now=T0 + 50)
    text, notes = run.chronicle.read_bytes(), "\nGröße\n".encode("latin-1")
    assert b"effective time 11.7%, ETTR 11.7%" in text and text.endswith(notes)
    run.chronicle.write_bytes(text + b"\xff\n")
    write_chronicle(run, now=T0 + 50)
    assert run.chronicle.read_bytes() == text + b"\xff\n", "there is nothing new to write"
    add_note(run, "x")
    write_chronicle(run, now=T0 + 50)
    assert run.chronicle.read_bytes().endswith(notes + b"\xff\n")


def test_notes_that_cannot_be_read_for_a_moment_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, *killed_once())
    run.chronicle.write_text("# My own diary\n")
    read, refusals = Path.read_text, [OSError(5, "Input/output error")]

    def refuse(path: Path, **options: Any) -> str:
        if path == run.chronicle and refusals:
            raise refusals.pop()
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(StorageError, match="Writing the chronicle"):
        write_chronicle(run, now=T0 + 50)
    assert run.chronicle.read_text() == "# My own diary\n"


def test_a_keeper_writes_when_the_records_grow_and_at_its_end_and_outlives_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, written = RunDirectory(tmp_path).create(), list[str]()
    looks = threading.Semaphore(0)

    def write(rundir: RunDirectory) -> None:
        assert rundir == run
        written.append(run.operations.read_text() if run.operations.exists() else "")
        looks.release()
        if len(written) == 1:
            raise StorageError("full", remedy="")
        if len(written) == 2:
            raise KeyError("odd")

    size, has_begun = ChronicleKeeper._size, threading.Event()

    def looked(keeper: ChronicleKeeper) -> int:
        found = size(keeper)
        has_begun.set()
        return found

    monkeypatch.setattr(ChronicleKeeper, "_size", looked)
    monkeypatch.setattr(chronicle, "_POLL_S", 0.005)
    monkeypatch.setattr(chronicle, "write_chronicle", write)
    with caplog.at_level(logging.WARNING), ChronicleKeeper(run):
        assert has_begun.wait(30.0)
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "chronicle")
        assert thread.daemon, "a disk that hangs keeps no launcher"
        for text in ("a", "aa"):
            run.operations.write_text(text)
            assert looks.acquire(timeout=30.0)
    assert written == ["a", "aa", "aa"]
    said = [(entry.levelname, entry.getMessage(), bool(entry.exc_info)) for entry in caplog.records]
    assert said == [
        ("WARNING", "the chronicle was not written: full", False),
        ("ERROR", "the chronicle was not written", True),
    ]


def test_a_keeper_writes_once_for_each_change_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, written = [5, 5, 7, 7, 7, 3, 3], list[int]()

    def wait(seconds: float) -> bool:
        return len(sizes) == 1

    keeper: Any = SimpleNamespace(
        _closed=SimpleNamespace(wait=wait),
        _size=lambda: sizes.pop(0),
        _write=lambda: written.append(sizes[0]),
    )
    ChronicleKeeper._run(keeper)
    assert written == [7, 3, 3]


def test_the_history_of_a_run_is_this() -> None:
    events = [
        start(10, ranks=2, starting=4.0),
        step(12, 1, compute=1.0),
        operation(12.5, "setting", incarnation=1, step=1, key="a", value=5),
        operation(13, "setting_refused", incarnation=1, step=1, why="w"),
        operation(13.5, "restraint", incarnation=1, step=1, what="r"),
        {**step(14, 2, compute=1.0), "tokens_per_s": 0.0, "consumed_tokens": "many"},
        {**step(15, 3, compute=1.0), "step": "x"},
        operation(16, "checkpoint_failed", incarnation=1, why="full"),
        operation(17, "rewind", incarnation=1, to_step=1, skip=[4, 8], reason="spike"),
        {**start(20, 2, at=1, ranks=0), "reason": "rewind: spike"},
        start(40, 3, at=1, ranks=4, starting=5.0),
        operation(50, "end", incarnation=3, step=9, finished=False, failed=True, reason="it broke"),
        {**operation(0, "step"), "time": None},
    ]
    operations = [operation(3, "attempt", attempt="a"), operation(60, "note", text="x")]
    assert read_run_history(events, operations, is_visible=lambda base: True) == RunHistory(
        began_s=T0 + 3, last_s=T0 + 50, is_over=False, is_finished=False, kept_steps=2, kept_tokens=100,
        step=2, best_tokens_per_s=100.0, members=((T0 + 6, 2), (T0 + 35, 4)),
        incidents=(
            Incident(time=T0 + 16, cause=SAVE_REFUSED, summary="full", step=2,
                     action="the training went on and tries again",
                     remedy="Free space or inodes where the message says."),
            Incident(time=T0 + 17, cause="rewind", summary="spike", step=2,
                     action="went back to step 1 or the checkpoint before it without samples 4–8"),
            Incident(time=T0 + 20, cause=NO_WORD, sure=False, step=2, action="somebody started it again",
                     summary="the process wrote nothing more, and no supervisor recorded why",
                     remedy="Start it with `bloomery launch --supervise`, which finds the cause."),
        ),
        changes=(
            (T0 + 12.5, "step 1: setting: key a, value 5"),
            (T0 + 13, "step 1: setting refused: why w"),
            (T0 + 13.5, "step 1: restraint: what r"),
            (T0 + 50, "failed: it broke"),
        ),
    )  # fmt: skip
    finished = [start(1), operation(2, "end", finished=True)]
    seen = read_run_history(finished, [], is_visible=lambda base: True)
    assert (seen.is_over, seen.is_finished, seen.changes) == (True, True, ())
    assert read_run_history([], [], is_visible=lambda base: True) == RunHistory(is_over=True)
