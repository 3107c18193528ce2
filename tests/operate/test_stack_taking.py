"""How the stack of a rank is taken: by py-spy, by a signal, or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.events.heartbeat import RankBeat
from bloomery.operate import stacks
from bloomery.operate.stacks import (
    Frame,
    RankStack,
    parse_faulthandler,
    parse_pyspy,
    process_state,
    take_stacks,
)

FRAME = Frame(function="recv", file="/x/socket.py", line=7)


def test_a_frame_and_a_stack_are_told_in_words_and_as_json() -> None:
    assert str(FRAME) == "recv (socket.py:7)"
    stack = RankStack(rank=3, frames=(FRAME,), state="D")
    assert json.loads(json.dumps(stack.to_json())) == {
        "rank": 3, "frames": [{"function": "recv", "file": "/x/socket.py", "line": 7}], "state": "D"
    }  # fmt: skip
    assert RankStack.from_json(stack.to_json()) == stack


def test_the_kernels_letter_stands_behind_a_name_with_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/5/stat": "5 (a) b) T 1 2", "/proc/6/stat": ""}

    def read(path: Path) -> str:
        if str(path) not in texts:
            raise FileNotFoundError
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert [process_state(pid) for pid in (5, 6, 7)] == ["T", "", ""]


@pytest.mark.parametrize(
    ("state", "by_pyspy", "frames", "asked"),
    [
        ("S", (FRAME,), (FRAME,), ["py-spy"]),
        ("S", (), (Frame(function="f", file="g", line=1),), ["py-spy", "signal"]),
        ("T", (), (), ["py-spy"]),
        ("T", (FRAME,), (FRAME,), ["py-spy"]),
        ("Z", (FRAME,), (), []),
        ("", (FRAME,), (), []),
    ],
)
def test_a_rank_is_signalled_only_where_it_runs_and_py_spy_says_nothing(
    monkeypatch: pytest.MonkeyPatch, state: str, by_pyspy: Any, frames: Any, asked: list[str]
) -> None:
    seen: list[str] = []
    by_signal = (Frame(function="f", file="g", line=1),)
    monkeypatch.setattr(stacks, "process_state", lambda pid: state if pid == 77 else "?")
    monkeypatch.setattr(stacks, "_by_pyspy", lambda pid, deadline: seen.append("py-spy") or by_pyspy)
    monkeypatch.setattr(stacks, "_by_signal", lambda beat, deadline: seen.append("signal") or by_signal)
    beat = RankBeat(rank=3, pid=77)
    assert take_stacks({3: beat}) == {3: RankStack(rank=3, frames=frames, state=state)}
    assert seen == asked


def test_py_spy_is_asked_for_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    threads = [{"os_thread_id": 77, "frames": [{"name": "A.recv", "filename": "/x/socket.py", "line": 7}]}]
    answer = SimpleNamespace(returncode=0, stdout=json.dumps(threads))

    def run(command: Any, **options: Any) -> Any:
        calls.append((command, options))
        if isinstance(answer.returncode, BaseException):
            raise answer.returncode
        return answer

    monkeypatch.setattr(stacks.subprocess, "run", run)
    monkeypatch.setattr(stacks.shutil, "which", lambda name: "/bin/py-spy" if name == "py-spy" else None)
    monkeypatch.setattr(stacks.time, "monotonic", lambda: 100.0)
    assert stacks._by_pyspy(77, 103.0) == (FRAME,)
    command = ["/bin/py-spy", "dump", "--json", "--nonblocking", "--pid", "77"]
    options = {"capture_output": True, "text": True, "timeout": 3.0, "check": False}
    assert calls == [(command, options)]
    for deadline, seconds in ((200.0, 5.0), (90.0, 0.5)):
        stacks._by_pyspy(77, deadline)
        assert calls[-1][1]["timeout"] == seconds
    answer.returncode = 1
    assert stacks._by_pyspy(77, 103.0) == ()
    answer.returncode, answer.stdout = 0, "no JSON"
    assert stacks._by_pyspy(77, 103.0) == ()
    answer.stdout = '[{"os_thread_id": 77, "frames": [{}]}]'
    assert stacks._by_pyspy(77, 103.0) == ()
    for failure in (subprocess.TimeoutExpired("py-spy", 3.0), PermissionError()):
        answer.returncode = failure
        assert stacks._by_pyspy(77, 103.0) == ()
    count = len(calls)
    monkeypatch.setattr(stacks.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert stacks._by_pyspy(77, 103.0) == () and len(calls) == count
    (tmp_path / "py-spy").touch()
    stacks._by_pyspy(77, 103.0)
    assert calls[-1][0][0] == str(tmp_path / "py-spy"), "it lies beside the Python of a virtual environment"


class Ticking:
    """A clock by which sleeping takes time; what the process writes comes at its moments."""

    def __init__(self, path: Path, comes: dict[float, str]) -> None:
        self.now, self.path, self.comes = 0.0, path, dict(comes)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 3)
        for moment in [moment for moment in self.comes if moment <= self.now]:
            with self.path.open("a") as file:
                file.write(self.comes.pop(moment))


HELPER = (
    'Thread 0x2 (most recent call first):\n  File "/x/a.py", line 3 in beat\n'
    '  File "/usr/lib/threading.py", line 9 in _bootstrap\n\n'
)
DUMP = 'Current thread 0x1 (most recent call first):\n  File "/x/socket.py", line 7 in recv\n'
END = '  File "/x/run.py", line 1 in <module>\n'
RUNPY = '  File "<frozen runpy>", line 198 in _run_module_as_main\n'


@pytest.mark.parametrize(
    ("comes", "frames", "until"),
    [
        ({0.1: DUMP, 0.3: END}, ["recv", "<module>"], 0.6),
        ({0.1: DUMP + END}, ["recv", "<module>"], 0.4),
        ({0.1: HELPER + DUMP, 1.2: RUNPY}, ["recv", "_run_module_as_main"], 1.5),
        ({0.1: HELPER, 1.3: DUMP + END}, ["recv", "<module>"], 1.6),
        ({0.1: HELPER + DUMP + END[:-1], 1.3: "\n"}, ["recv", "<module>"], 1.6),
        ({0.1: DUMP + "  ..."}, ["recv"], 0.4),
        ({0.1: HELPER + DUMP, 1.3: "\n"}, ["recv"], 2.0),
        ({0.1: HELPER}, ["beat", "_bootstrap"], 2.0),
        ({0.1: "no dump\n"}, [], 2.0),
        ({1.9: DUMP}, ["recv"], 2.0),
        ({}, [], 2.0),
    ],
)
def test_what_a_signalled_rank_writes_is_read_once_it_is_whole_and_has_settled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, comes: dict[float, str], frames: list[str], until: float
) -> None:
    path, sent = tmp_path / "stacks", list[tuple[int, int]]()
    path.write_text(DUMP.replace("recv", "of_before"))
    clock = Ticking(path, comes)
    monkeypatch.setattr(stacks, "time", clock)
    monkeypatch.setattr(os, "kill", lambda *words: sent.append(words))
    found = stacks._by_signal(RankBeat(pid=77, stacks=str(path)), 2.0)
    assert [frame.function for frame in found] == frames
    assert sent == [(77, signal.SIGUSR2)] and clock.now == pytest.approx(until, abs=0.051)


def test_a_rank_without_a_handler_or_of_somebody_else_is_not_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[Any] = []

    def refuse(*words: int) -> None:
        sent.append(words)
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(stacks, "time", Ticking(tmp_path / "none", {}))
    assert stacks._by_signal(RankBeat(pid=77), 2.0) == () and sent == []
    assert stacks._by_signal(RankBeat(pid=77, stacks=str(tmp_path / "none")), 0.2) == () and len(sent) == 1


def test_at_most_sixty_four_frames_are_kept() -> None:
    many = [{"name": f"f{number}", "filename": "/x", "line": number} for number in range(100)]
    found = parse_pyspy([{"thread_name": "MainThread", "frames": many}], 7)
    assert [frame.function for frame in found] == [f"f{number}" for number in range(64)]
    lines = "".join(f'  File "/x", line {number} in f{number}\n' for number in range(100))
    text = f"Thread 0x1 (most recent call first):\n{lines}"
    assert [frame.line for frame in parse_faulthandler(text)] == list(range(64))
    whole = parse_faulthandler(f'{text}  File "/x", line 5 in <module>\n')
    assert [frame.line for frame in whole] == list(range(64))
    before = '  File "/x", line 5 in f\n'
    assert parse_faulthandler(before) == (), "it belongs to no thread"


def test_all_ranks_of_a_machine_have_eight_seconds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(100.0)
    deadlines: list[float] = []
    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(stacks, "process_state", lambda pid: "S")
    monkeypatch.setattr(stacks, "_by_pyspy", lambda pid, deadline: deadlines.append(deadline) or ())
    monkeypatch.setattr(stacks, "_by_signal", lambda beat, deadline: deadlines.append(deadline) or (FRAME,))
    taken = take_stacks({rank: RankBeat(rank=rank, pid=rank) for rank in range(10)})
    assert sorted(taken) == list(range(10)) and deadlines == [108.0] * 20


def test_a_file_of_stacks_that_cannot_be_read_is_one_without_a_stack(tmp_path: Path) -> None:
    assert stacks._text_behind(tmp_path, 0) == "" == stacks._text_behind(tmp_path / "gone", 0)
