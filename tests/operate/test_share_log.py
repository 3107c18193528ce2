"""What a launcher records of its ranks: the processes that they have started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.events.run_directory import RunDirectory
from bloomery.operate import share_log
from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import Cause
from bloomery.operate.failure_evidence import FailureEvidence
from bloomery.operate.process_tree import descendants, sees_kernel_pids
from bloomery.operate.share_log import ShareLog, kernel_lines

# a thread starts a shell, which starts a process of its own; "go" on standard input ends and reaps both
PARENT = """
import subprocess, sys, threading

def start():
    global child
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $$ $!; wait"], stdout=subprocess.PIPE)
    print(child.stdout.readline().decode().strip(), flush=True)
    over.wait()

over = threading.Event()
threading.Thread(target=start, daemon=True).start()
sys.stdin.readline()
subprocess.run(["pkill", "-P", str(child.pid)], check=True)
child.wait()
print("reaped", flush=True)
sys.stdin.readline()
over.set()
"""


def test_children_of_threads_and_their_children_stay_known_after_their_end(tmp_path: Path) -> None:
    share = ShareLog(RunDirectory(tmp_path), ranks=range(1), host="node0")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        shell, sleeper = map(int, rank.stdout.readline().split())
        share.started({0: rank.pid})
        share.note_children()
        assert sorted(descendants(rank.pid)) == sorted([shell, sleeper])
        print("go", file=rank.stdin, flush=True)
        assert rank.stdout.readline() == "reaped\n"
        share.note_children()
        assert descendants(rank.pid) == []
    assert descendants(rank.pid) == []
    share.ended({0: 0}, killed=())
    (end,) = share.ends(attempt="")
    assert end.children is None or set(end.children) == {shell, sleeper}
    assert (end.children is None) != sees_kernel_pids()


def test_lines_that_no_log_took_say_why_a_rank_ended(tmp_path: Path) -> None:
    share = ShareLog(RunDirectory(tmp_path), ranks=range(2), host="node0")
    refused = "bloomery train: Writing failed at /run/holder.json: No space left on device\n"
    for line in ("earlier\n", refused):
        share.unlogged(1, line)
    share.ended({0: 0, 1: 1}, killed=())
    first, second = share.ends(attempt="")
    assert first.log == "" and second.log == f"earlier\n{refused}"
    assert diagnose(FailureEvidence(ranks=[first, second])).cause == Cause.NO_SPACE


def test_the_numbers_of_the_kernels_log_are_known_in_its_first_namespace_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    namespaces = {"/proc/self/ns/pid": 0xEFFFFFFC}
    monkeypatch.setattr(Path, "stat", lambda path: SimpleNamespace(st_ino=namespaces[str(path)]))
    assert sees_kernel_pids()
    namespaces["/proc/self/ns/pid"] += 1
    assert not sees_kernel_pids()

    def hidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", hidden)
    assert not sees_kernel_pids()


def test_a_thread_that_ends_while_its_children_are_listed_hides_those_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = {"/proc/7/task/7": None, "/proc/7/task/8": "11 12 ", "/proc/11/task/11": "13 "}

    def listed(path: Path, pattern: str) -> list[Path]:
        return [Path(task) / "children" for task in tasks if task.startswith(f"{path}/")]

    def read(path: Path) -> str:
        text = tasks[str(path.parent)]
        if text is None:
            raise ProcessLookupError
        return text

    monkeypatch.setattr(Path, "glob", listed)
    monkeypatch.setattr(Path, "read_text", read)
    assert sorted(descendants(7)) == [11, 12, 13]


def test_a_log_that_cannot_be_read_hides_no_exit_status(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    share = ShareLog(run, ranks=range(1), host="node0")
    run.log(host="node0", rank=0).mkdir(parents=True)  # opening it raises OSError, as a stale file's does
    share.ended({0: -9}, killed=())
    (end,) = share.ends(attempt="")
    assert (end.status, end.log) == (-9, "")


def test_a_kernel_log_is_read_whatever_bytes_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "dmesg"
    command.write_text("#!/bin/sh\nprintf 'a \\377 name\\nOut of memory\\n'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert kernel_lines() == ["a \ufffd name", "Out of memory"]
    command.write_text("#!/bin/sh\necho 'dmesg: read kernel buffer failed'\nexit 1\n")
    assert kernel_lines() == []


@pytest.mark.parametrize("is_comparable", [True, False])
def test_children_and_the_flight_of_a_rank_are_told_where_they_say_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_comparable: bool
) -> None:
    asked: list[tuple[Path, int]] = []

    def read(stacks: Path, rank: int, *, since: float) -> dict[str, tuple[int, str]]:
        asked.append((stacks, rank))
        return {"0": (7, "all_reduce")} if since > 1e9 else {}

    monkeypatch.setattr(share_log, "sees_kernel_pids", lambda: is_comparable)
    monkeypatch.setattr(share_log, "descendants", lambda pid: [pid + 1, pid + 2])
    monkeypatch.setattr(share_log, "read_flight", read)
    run = RunDirectory(tmp_path)
    share = ShareLog(run, ranks=range(4, 6), host="node0")
    share.started({4: 70, 5: 80})
    share.note_children()
    share.ended({5: 1, 4: 1}, killed=())
    ends = share.ends(attempt="")
    assert [end.children for end in ends] == ([(71, 72), (81, 82)] if is_comparable else [None, None])
    assert asked == [(run.path / "stacks", rank) for rank in (4, 5)]
    assert [end.flight for end in ends] == [{"0": (7, "all_reduce")}] * 2


def test_of_lines_that_no_log_took_the_last_two_hundred_are_told_behind_what_it_took(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    share = ShareLog(run, ranks=range(1), host="node0")
    run.log(host="node0", rank=0).write_text("in the log\n")
    for number in range(250):
        share.unlogged(0, f"{number}\n")
    share.ended({0: 1}, killed=())
    (end,) = share.ends(attempt="")
    assert end.log.splitlines() == ["in the log", *(str(number) for number in range(50, 250))]
