"""Takes the stacks of this machine's ranks, by py-spy where it works and by SIGUSR2 elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bloomery.events.heartbeat import RankBeat

_AT_ONCE = 8
_PYSPY_S = 5.0
_SETTLED_S = 0.3
_POLL_S = 0.05
_MOST_FRAMES = 64
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One call on a stack: the function, its file and the line that it has reached."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """The stack of a rank's main thread, innermost call first.

    frames: empty where the process did not answer.
    state: the kernel's letter for the state of the process: "T" is stopped, "D" waits for a disk, "Z" has
        ended; "" where there is no such process.
    """

    rank: int
    frames: tuple[Frame, ...] = ()
    state: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the stack as JSON, for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankStack:
        """Return the stack that `to_json` described."""
        frames = tuple(Frame(**frame) for frame in record["frames"])
        return cls(rank=int(record["rank"]), frames=frames, state=str(record["state"]))


def take_stacks(beats: Mapping[int, RankBeat], *, within_s: float = 8.0) -> dict[int, RankStack]:
    """Return the stack of each rank, all of which must run on this machine, within about `within_s` seconds.

    A process that does not answer has an empty stack, and the state that the kernel reports.
    """
    deadline = time.monotonic() + within_s
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        taken = pool.map(lambda beat: _take(beat, deadline), beats.values())
        return {stack.rank: stack for stack in taken}


def parse_faulthandler(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames from what faulthandler wrote last, innermost first.

    faulthandler writes the main thread after all others. Where `text` ends before it, the frames are those of
    the last thread that began.
    """
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
        match = _FRAME.match(line)
        if match and threads:
            number = 0 if match["line"] == "???" else int(match["line"])
            threads[-1].append(Frame(function=match["function"], file=match["file"], line=number))
    begun = [frames for frames in threads if frames]
    mains = [frames for frames in begun if not _is_thread_start(frames[-1])]
    return tuple((mains or begun or [[]])[-1][:_MOST_FRAMES])


def parse_pyspy(threads: Sequence[Mapping[str, Any]], pid: int) -> tuple[Frame, ...]:
    """Return the main thread's frames from py-spy's JSON, innermost first."""
    for thread in threads:
        if thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread":
            return tuple(
                # from Python 3.11 on py-spy may give qualified names: only the last part is compared
                Frame(
                    function=str(frame["name"]).rpartition(".")[2],
                    file=frame["filename"],
                    line=int(frame["line"]),
                )
                for frame in thread["frames"][:_MOST_FRAMES]
            )
    return ()


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _take(beat: RankBeat, deadline: float) -> RankStack:
    state = process_state(beat.pid)
    frames: tuple[Frame, ...] = ()
    if state not in ("", "Z"):
        frames = _by_pyspy(beat.pid, deadline) or (() if state == "T" else _by_signal(beat, deadline))
    return RankStack(rank=beat.rank, frames=frames, state=state)


def _by_pyspy(pid: int, deadline: float) -> tuple[Frame, ...]:
    beside = Path(sys.executable).with_name("py-spy")
    program = shutil.which("py-spy") or (str(beside) if beside.exists() else None)
    if program is None:
        return ()
    # py-spy reads the memory of the process without stopping it, so it works on a stopped process too.
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    seconds = min(_PYSPY_S, max(0.5, deadline - time.monotonic()))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        return parse_pyspy(json.loads(done.stdout), pid) if done.returncode == 0 else ()
    except (subprocess.TimeoutExpired, ValueError, KeyError, OSError):
        return ()  # this user may not read the memory of processes, for instance; signals are allowed then


def _by_signal(beat: RankBeat, deadline: float) -> tuple[Frame, ...]:
    """Ask for the stacks by SIGUSR2; a rank has a handler for it if its heartbeat names a file for stacks."""
    if not beat.stacks:
        return ()
    path = Path(beat.stacks)
    before = _size(path)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(beat.pid, signal.SIGUSR2)
    size, settled_at = before, float("inf")
    text = ""
    while time.monotonic() < min(deadline, settled_at):
        time.sleep(_POLL_S)
        now = _size(path)
        if now > size:
            text = _text_behind(path, before)
            waits_s = _SETTLED_S if _is_whole(text) else float("inf")
            size, settled_at = now, time.monotonic() + waits_s
    return parse_faulthandler(text)


def _text_behind(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except OSError:  # such as a stale handle of NFS: what hangs is judged without this stack
        return ""


def _is_whole(dump: str) -> bool:
    """Return whether a dump ends where the main thread, which is the last one, began.

    A busy machine may write a dump in parts: what ends elsewhere is to be waited for, however long it has not
    grown.
    """
    if not dump.endswith("\n"):
        return dump.endswith("\n  ...")  # faulthandler tells 100 frames of a thread
    match = _FRAME.match(dump.splitlines()[-1])
    return match is not None and match["function"] in ("<module>", "_run_module_as_main")


def _is_thread_start(frame: Frame) -> bool:
    """Return whether a frame is the outermost call of a thread that Python's `threading` module started."""
    return frame.function == "_bootstrap" and Path(frame.file).name == "threading.py"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
