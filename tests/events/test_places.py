"""The places of a run's files, which tools and people know, and what a step's record says to the letter."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.events.test_records import REPORT

from bloomery.errors import StorageError
from bloomery.events import run_directory
from bloomery.events.journal import Journal, read_tail
from bloomery.events.records import Facts, StepReport, as_json, ignore_progress, log_line
from bloomery.events.run_directory import RunDirectory, prove_shared
from bloomery.events.switches import Switches, arm, note_of

PLACES = {
    "recipe": "recipe.toml",
    "sources": "sources.toml",
    "incarnations": "incarnations",
    "checkpoints": "checkpoints",
    "control_dir": "control",
    "backups": "backups",
    "operations": "operations.jsonl",
    "watch": "watch.json",
    "chronicle": "chronicle.md",
    "evaluations": "evaluations.jsonl",
    "rounds": "rounds.jsonl",
    "attention": "attention.json",
    "known": "known.json",
    "memory": "memory",
    "lock": "holder.lock",
    "holder": "holder.json",
    "logs": "logs",
    "tensorboard": "tensorboard",
    "profiles": "profiles",
    "data": "data",
    "export": "export",
}


def test_every_file_of_a_run_is_where_it_always_was() -> None:
    run = RunDirectory(Path("runs/a"))
    properties = {name for name, item in vars(RunDirectory).items() if isinstance(item, property)} - {"name"}
    assert {name: str(getattr(run, name).relative_to("runs/a")) for name in properties} == PLACES
    assert run.incarnation(12) == Path("runs/a/incarnations/000012.json")
    assert run.control("rewind") == Path("runs/a/control/rewind")
    assert (run.journal(), run.journal(peer="b", rank=3)) == (
        Path("runs/a/journal/0-0.jsonl"),
        Path("runs/a/journal/b-3.jsonl"),
    )
    assert run.heartbeat() == Path("runs/a/heartbeat/0-0")
    assert run.heartbeat(peer="b", rank=3) == Path("runs/a/heartbeat/b-3")
    assert run.stacks() == Path("runs/a/stacks/0-0.txt")
    assert run.stacks(peer="b", rank=3) == Path("runs/a/stacks/b-3.txt")
    assert run.log(host="node7", rank=5) == Path("runs/a/logs/node7-5.log")


def test_a_new_run_has_the_directories_that_its_ranks_write_in(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a")
    assert run.create() is run
    made = "incarnations checkpoints control logs tensorboard journal heartbeat"
    assert {path.name for path in run.path.iterdir()} == {*made.split()}


def test_of_many_nodes_that_are_not_seen_three_are_named_and_the_rest_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [50.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(run_directory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_directory.time, "sleep", sleep)
    introductions = [[name, "a directory", "ab"] for name in ("n1", "n1", "n5", "n4", "n3", "n2")]
    gathered: list[Any] = []

    def gather(mine: Any) -> list[Any]:
        gathered.append(mine)
        return introductions if len(gathered) == 1 else [mine]

    with pytest.raises(StorageError) as refused:
        prove_shared(tmp_path / "run", rank=0, node="n1", gather=gather, within_s=0.35)
    assert refused.value.message == (
        f"{tmp_path / 'run'} is not one directory on all nodes: node n1 does not see what n2, n3, n4 and 1 "
        "more wrote there"
    )
    assert refused.value.remedy == (
        "Put the run directory on a file system that every node mounts at this path."
    )
    assert slept == [0.1] * 4 and gathered[1] == "" and list((tmp_path / "run").iterdir()) == []
    quiet: list[Any] = []

    def of_second(mine: Any) -> list[Any]:
        quiet.append(mine)
        return introductions if len(quiet) == 1 else [mine]

    prove_shared(tmp_path / "run", rank=1, node="n1", gather=of_second)
    assert quiet[1:] == ["", ""], "the node's other ranks write nothing and look for nothing"
    introductions[:] = [[name, "a directory", "ab"] for name in ("n1", "n2", "n3", "n4")]
    gathered.clear()
    with pytest.raises(StorageError, match="does not see what n2, n3, n4 wrote there"):
        prove_shared(tmp_path / "run", rank=0, node="n1", gather=gather, within_s=0.0)


def test_the_name_of_the_first_ranks_probe_is_that_of_all(tmp_path: Path) -> None:
    seen: list[str] = []
    answers: list[list[Any]] = [[["a", "one", "first"], ["b", "one", "second"]]]

    def gather(mine: Any) -> list[Any]:
        if not answers:
            seen.extend(str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*")))
            (tmp_path / ".shared-first" / "00000").touch()
            return [mine]
        return answers.pop()

    prove_shared(tmp_path, rank=1, node="b", gather=gather)
    assert seen[:2] == [".shared-first", ".shared-first/00001"] and list(tmp_path.iterdir()) == []


LINE = (
    "step 120/1255 | samples 1,200 | tokens 307,200 | 0.215 s/step | lr 1.2000e-03 | batch 10 | loss 3.4567 "
    "| z-loss 1.00e-04 | loss scale 65536.0 | grad norm 0.512 | zeros 17 | skipped 2 | nan 1 | "
    "46.5 samples/s | 11,900 tokens/s | TFLOPs 0.420 model 0.450 hardware | MFU 31.0%"
)


def test_a_log_line_to_the_letter() -> None:
    scaled = replace(REPORT, loss_scale=65536.0)
    assert log_line(scaled, total_steps=1255) == LINE
    evaluated = replace(scaled, held_out_loss=3.25, update_applied=False, mfu=None, loss_scale=None)
    told = LINE.replace("/1255", "").replace("65536.0", "-").replace("31.0%", "-")
    assert log_line(evaluated) == f"{told} | held-out 3.2500 | UPDATE REFUSED"


def test_a_report_is_recorded_field_by_field() -> None:
    facts = Facts(rewind_requested=(5, 1, 2), skip_requested=((1, 2), (3, 4)), minutes_running=1.5)
    recorded = replace(REPORT, loss=float("-inf"), corrupt_ranks=(3,), facts=facts).to_json()
    assert recorded["loss"] == "-Infinity" and recorded["corrupt_ranks"] == [3]
    assert recorded["facts"] == {
        "save_requested": False,
        "stop_requested": False,
        "stop_reason": "",
        "skip_requested": [[1, 2], [3, 4]],
        "rewind_requested": [5, 1, 2],
        "settings_requested": [],
        "minutes_since_save": 0.0,
        "minutes_running": 1.5,
    }
    assert StepReport.from_json({**recorded, "facts": None}).facts == Facts()
    assert as_json({1: float("inf"), "b": (float("nan"), None, True, "x")}) == {
        "1": "Infinity",
        "b": ["NaN", None, True, "x"],
    }
    assert ignore_progress("a", 1, 2, "bytes") is None


def test_an_event_is_one_line_with_its_time_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.events.journal.time.time", lambda: 12.3456)
    with Journal(tmp_path / "deep" / "a.jsonl") as journal:
        journal.write("näher", incarnation=2, step=3, more=[1])
        journal.close()
    assert (tmp_path / "deep" / "a.jsonl").read_text(encoding="utf-8") == (
        '{"event": "näher", "time": 12.346, "incarnation": 2, "step": 3, "more": [1]}\n'
    )


def test_a_journal_that_is_opened_again_gets_no_line_but_the_end_of_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for content, after in ((b"", b""), (b"whole\n", b"whole\n"), (b"torn", b"torn\n")):
        path.write_bytes(content)
        Journal(path).close()
        assert path.read_bytes() == after


def test_lines_that_were_lost_are_counted_anew_each_time_and_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, content: bytes) -> int:
        raise OSError(28, "full")

    monkeypatch.setattr("bloomery.events.journal._MOST_WAITING", 2)
    journal = Journal(tmp_path / "a.jsonl")
    for steps in ((1, 2, 3, 4), (6,)):
        with monkeypatch.context() as full:
            full.setattr("bloomery.events.journal.os.write", refuse)
            for step in steps:
                journal.write("step", incarnation=1, step=step)
        journal.write("step", incarnation=1, step=steps[-1] + 1)
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if "is written again" in text] == [
        f"{journal.path} is written again; {lost} lines were lost" for lost in (3, 0)
    ]
    assert [event["step"] for event in read_tail(journal.path)] == [1, 5, 6, 7]
    file = journal._file
    journal.close()
    journal.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_tail_begins_with_its_first_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"event": "one"}\n{"event": "two"}\n{"event": "end"}\n')  # 17 bytes each

    def tail(most_bytes: int) -> list[str]:
        return [event["event"] for event in read_tail(path, most_bytes=most_bytes)]

    assert (tail(51), tail(50), tail(18), tail(17)) == (["one", "two", "end"], ["two", "end"], ["end"], [])
    assert list(read_tail(tmp_path / "none.jsonl")) == []


def test_the_switches_of_a_run_are_in_its_directory_and_in_the_users(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a")
    assert Switches.of_run(run, "").directories == (run.control_dir,)
    both = Switches.of_run(run, str(tmp_path / "mine"))
    assert both.directories == (run.control_dir, tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    arm(tmp_path / "mine" / "stop")
    assert both.armed("stop") == tmp_path / "mine" / "stop"
    run.control_dir.mkdir(parents=True)
    arm(run.control_dir / "stop")
    assert both.armed("stop") == run.control_dir / "stop", "the first counts"


def test_a_switch_says_who_armed_it_when_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "grace")
    monkeypatch.setenv("LOGNAME", "root")  # as after su
    monkeypatch.setattr("os.uname", lambda: type("U", (), {"nodename": "login1"}))
    monkeypatch.setattr(time, "strftime", lambda form: form)
    arm(tmp_path / "stop")
    assert (tmp_path / "stop").read_text() == "armed by grace on login1 at %Y-%m-%d %H:%M:%S\n"
    arm(tmp_path / "stop", why="quota")
    assert note_of(tmp_path / "stop") == "armed by grace on login1 at %Y-%m-%d %H:%M:%S: quota"
    (tmp_path / "save").write_text("  one \ntwo\n")
    assert note_of(tmp_path / "save") == "one"


def test_a_switch_that_cannot_be_removed_is_told_and_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arm(tmp_path / "save")
    switches = Switches([tmp_path])
    caplog.set_level(logging.WARNING)

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        switches.take("save")
    told = f"{tmp_path / 'save'} cannot be removed (Permission denied): touch it to ask again"
    assert [record.getMessage() for record in caplog.records] == [told]
    assert switches.armed("save") is None
