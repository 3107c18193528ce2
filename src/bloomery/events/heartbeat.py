"""The heartbeat file of a rank: its activity, since when, and its step, for supervisors and watchers.

A thread writes the file, so that a rank which hangs in one activity (its file is fresh) differs from
one whose process is frozen (its file is old). One rank writes one small file and reads none.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from bloomery import durable
from bloomery.errors import storage_error
from bloomery.events.records import Json, known_values
from bloomery.events.shared_memory import shared_memory_space

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between two writes of a rank's heartbeat, in a run of few ranks."""
MOST_WRITES_PER_S = 100.0
"""The most heartbeats per second of all ranks of a run together: in large runs each rank writes rarely."""
ATTEMPT = "BLOOMERY_ATTEMPT"
"""The environment variable that names the launcher's attempt which started this rank."""
STARTING = "starting"
"""What a process counts as before its first activity: its imports, and joining the other ranks."""
_REMEMBERED = 64
_COMPILING_TURNS = 2
"""The turns of an activity that may compile: the first, and one more where a shape or a gradient is new."""
_MESSAGE_LENGTH = 2000
_STARTTIME = 19
"""Place of `starttime` (proc_pid_stat(5)) among the fields behind the process's name."""


class RankActivity(StrEnum):
    """What a rank does now."""

    PREPARING = "preparing the data"
    BUILDING = "building the model"
    LOADING = "loading a checkpoint"
    WAITING_FOR_SAMPLES = "waiting for samples"
    COMPUTING = "forward and backward"
    REDUCING = "reducing gradients"
    UPDATING = "updating the weights"
    REPORTING = "reducing the report"
    EVALUATING = "evaluating"
    BETWEEN_STEPS = "between steps"
    WAITING_FOR_PEERS = "waiting for peers"
    SAVING = "saving a checkpoint"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class RankBeat:
    """What a heartbeat file holds.

    activity: a RankActivity.
    since: when the activity began, in seconds since 1970 by the rank's clock as it is set now.
    time: when the file was written, by the same clock.
    moves: counts activities and progress inside them; a rank whose count stays the same makes no progress.
    may_compile: whether this turn of the activity is one of its first two in the process, or since shapes or
        settings have changed. torch.compile may work in it, so that it takes far longer than those after it.
        In a process that compiles nothing only those count whose shapes or settings have changed.
    longest_s: seconds of the longest recent turn of each activity, without the first turn of a process.
    first_s: seconds of the longest first turn of each activity.
    gap_s: the longest time between two writes so far.
    attempt: the launcher's attempt that started the rank; "" where no launcher did.
    stacks: the file into which SIGUSR2 makes the process write its stacks; "" where it has no handler.
    bus: the PCI bus of the rank's GPU as the kernel's log names it, "0000:3b:00"; "" where it is not known.
    error: type and message of the exception that ended the rank; "" where none did. The type of a library is
        told with its module.
    where: the last lines of that exception's traceback.
    memory_bytes: what the rank held after its newest step; 0 where that is not known.
    shm_free_bytes, shm_bytes: free and in all in the /dev/shm that the rank sees; 0 where that is not known.
    """

    rank: int = 0
    world: int = 1
    step: int = 0
    activity: str = ""
    since: float = 0.0
    time: float = 0.0
    moves: int = 0
    may_compile: bool = False
    longest_s: Mapping[str, float] = field(default_factory=dict)
    first_s: Mapping[str, float] = field(default_factory=dict)
    gap_s: float = 0.0
    incarnation: int = 0
    host: str = ""
    device: str = ""
    bus: str = ""
    pid: int = 0
    attempt: str = ""
    stacks: str = ""
    error: str = ""
    where: str = ""
    memory_bytes: float = 0.0
    shm_free_bytes: int = 0
    shm_bytes: int = 0


class Heartbeat:
    """Writes the heartbeat file of this rank from a thread until it is closed.

    `enter`, `at` and `tick` only set numbers; they cost a microsecond and never wait for the disk. A disk
    that refuses the file is logged once, and the next write tries again.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int = 0,
        world: int = 1,
        device: str = "",
        bus: str = "",
        host: str = "",
        stacks: Path | None = None,
        interval_s: float | None = None,
        before_first_write: Callable[[Path], None] | None = None,
    ) -> None:
        """Prepare the heartbeat, which `start` begins to write.

        interval_s: seconds between two writes; None takes INTERVAL_S, or more in a run of many ranks.
        before_first_write: called with `stacks` to install the handler of SIGUSR2, which ends a process that
            has none; so the file never names `stacks` before the handler is there.
        """
        self._prepare = before_first_write if stacks else None
        self.path = path
        self.interval_s = interval_of(world) if interval_s is None else interval_s
        self._fixed: dict[str, Any] = {
            "rank": rank,
            "world": world,
            "device": device,
            "bus": bus,
            "host": host or os.uname().nodename,
            "pid": os.getpid(),
            "attempt": os.environ.get(ATTEMPT, ""),
            "stacks": str(stacks or ""),
        }
        self._activity, self._entered = "", time.monotonic()
        self._moves = self._step = self.incarnation = 0
        self._memory_bytes = 0.0
        self._turns: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._spent: dict[str, float] = {STARTING: process_age_s()}
        self._counted = self._entered
        self._turns_since: dict[str, int] = defaultdict(int)
        self._may_compile = True
        self._first_s: dict[str, float] = {}
        self._error = self._where = ""
        self._written, self._gap_s = time.monotonic(), 0.0
        self._is_refused = False
        self._wake, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self) -> Heartbeat:
        """Write the file now, and from a thread from now on; returns self. Starting it again does nothing."""
        if self._thread is not None:
            return self
        if self._prepare is not None:
            self._prepare(Path(self._fixed["stacks"]))
        self.write()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def enter(self, activity: RankActivity) -> None:
        """Record what this rank does from now on."""
        now = time.monotonic()
        if self._activity:
            self._end_turn(now - self._entered)
        self._count(now)
        self._activity, self._entered = activity, now
        self._moves += 1

    def expect_compilation(self) -> None:
        """Count the turns of each activity anew, for shapes or settings have changed and may be compiled.

        Does nothing before the first forward and backward has ended: until then none was of other shapes.
        """
        if RankActivity.COMPUTING in self._first_s:
            self._turns_since.clear()
            self._may_compile = True

    def expect_no_compilation(self) -> None:
        """Count no turn as one that may compile, for this process compiles nothing, until shapes change."""
        self._may_compile = False

    def _end_turn(self, seconds: float) -> None:
        self._turns_since[self._activity] += 1
        if self._turns_since[self._activity] == 1:
            self._first_s[self._activity] = max(self._first_s.get(self._activity, 0.0), seconds)
        else:
            self._turns[self._activity].append(seconds)

    def take_spent(self) -> dict[str, Json]:
        """Return the seconds of each activity since the last call, or since the process began.

        The seconds before the first activity, among them those of imports, count as STARTING.
        """
        self._count(time.monotonic())
        taken = {activity: round(seconds, 4) for activity, seconds in self._spent.items()}
        # what rounding left out is counted next time, so that nothing is lost over many steps
        self._spent = {activity: self._spent[activity] - taken[activity] for activity in taken}
        return {activity: seconds for activity, seconds in taken.items() if seconds > 0.0}

    def _count(self, now: float) -> None:
        activity = self._activity or STARTING
        self._spent[activity] = self._spent.get(activity, 0.0) + now - self._counted
        self._counted = now

    def at(self, *, step: int, incarnation: int | None = None, memory_bytes: float = 0.0) -> None:
        """Record how many steps are done, and in which incarnation; None: the incarnation is the same.

        memory_bytes: what this rank holds; 0 where that is not known.
        """
        self._step, self._memory_bytes = step, memory_bytes
        self.incarnation = self.incarnation if incarnation is None else incarnation

    def tick(self) -> None:
        """Record that the present activity makes progress."""
        self._moves += 1

    def record(self) -> RankBeat:
        """Return what the next write holds."""
        longest = {name: round(max(turns), 3) for name, turns in dict(self._turns).items() if turns}
        shm_free_bytes, shm_bytes = shared_memory_space()
        return RankBeat(
            step=self._step,
            activity=self._activity,
            since=round(time.time() - (time.monotonic() - self._entered), 3),
            time=round(time.time(), 3),
            moves=self._moves,
            may_compile=self._may_compile and self._turns_since.get(self._activity, 0) < _COMPILING_TURNS,
            longest_s=longest,
            first_s={name: round(seconds, 3) for name, seconds in dict(self._first_s).items()},
            gap_s=round(self._gap_s, 2),
            incarnation=self.incarnation,
            error=self._error,
            where=self._where,
            memory_bytes=self._memory_bytes,
            shm_free_bytes=shm_free_bytes,
            shm_bytes=shm_bytes,
            **self._fixed,
        )

    def write(self) -> None:
        """Write the file now."""
        now = time.monotonic()
        self._gap_s, self._written = max(self._gap_s, now - self._written), now
        shown = {name: value for name, value in asdict(self.record()).items() if value != ""}
        try:
            self.path.parent.mkdir(exist_ok=True)  # not the run directory, which may have been moved
            durable.refresh(self.path, json.dumps(shown, ensure_ascii=False) + "\n")
            self._is_refused = False
        except OSError as refused:
            if not self._is_refused:
                told = storage_error(refused, path=self.path, doing="Writing")
                log.warning("the heartbeat cannot be written: %s", told)
            self._is_refused = True

    def close(self) -> None:
        """Stop the thread, and write the file a last time, with the activity ENDED.

        Does nothing where `start` was never called, or after the first call.
        """
        if self._thread is None or self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join(2 * self.interval_s)
        self.enter(RankActivity.ENDED)
        self.write()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            import traceback

            self._error = f"{_name_of(type(error))}: {error}"[:_MESSAGE_LENGTH]
            self._where = "".join(traceback.format_tb(trace)[-3:])[-_MESSAGE_LENGTH:]
        self.close()

    def _run(self) -> None:
        while not self._wake.wait(self.interval_s):
            try:
                self.write()
            except Exception:
                if not self._is_refused:  # without this thread the rank would be taken for silent, and killed
                    log.exception("the heartbeat cannot be written")
                self._is_refused = True


def _name_of(kind: type[BaseException]) -> str:
    """Return the name of an exception as tracebacks have it; of our own and of Python's without a module."""
    is_bare = kind.__module__ == "builtins" or kind.__module__.startswith("bloomery.")
    return kind.__name__ if is_bare else f"{kind.__module__}.{kind.__name__}"


def process_age_s(pid: int | None = None) -> float:
    """Return the seconds since a process began, by the clock of the kernel; 0.0 where it does not say.

    pid: None takes this process.
    """
    try:
        fields_after_name = Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields_after_name[_STARTTIME]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def ignore_activity(activity: RankActivity) -> None:
    """Do nothing with the activity, for callers that have no heartbeat."""


def interval_of(world: int) -> float:
    """Return the seconds between two heartbeats of a rank: `world` ranks shall write few files per second."""
    return max(INTERVAL_S, world / MOST_WRITES_PER_S)


def read_heartbeat(path: Path) -> dict[str, Any] | None:  # Any: parsed JSON
    """Return the last heartbeat; None where there is none that can be read."""
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def read_beat(path: Path) -> RankBeat | None:
    """Return a rank's heartbeat without unknown fields; None where there is none that can be read."""
    try:
        record = read_heartbeat(path)
    except OSError:  # a file that NFS replaces may be stale for a moment
        return None
    if record is None:
        return None
    values = known_values(RankBeat, record)
    try:
        return RankBeat(**{name: _checked(name, value) for name, value in values.items()})
    except (AttributeError, OverflowError, TypeError, ValueError):
        return None


def has_died_here(beat: RankBeat, *, now: float) -> bool:
    """Return whether the process of a heartbeat was one of this machine and is gone without a last word.

    now: seconds since 1970. A heartbeat that is younger than its interval counts as alive, for it may come
    from another machine, or container, of the same name.
    """
    is_elsewhere = beat.host != os.uname().nodename or beat.pid <= 0
    if is_elsewhere or beat.activity == RankActivity.ENDED or now - beat.time < 1.2 * interval_of(beat.world):
        return False
    try:
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return Path("/proc/self").exists()  # without /proc nothing is known
    except (OSError, IndexError):
        return False
    return state == "Z"


def _checked(name: str, value: Any) -> Any:  # Any: parsed JSON
    if name in ("rank", "world", "step", "moves", "incarnation", "pid", "shm_free_bytes", "shm_bytes"):
        return int(value)
    if name in ("since", "time", "gap_s", "memory_bytes"):
        return float(value)
    if name == "may_compile":
        return value is True
    if name in ("longest_s", "first_s"):
        return {str(activity): float(seconds) for activity, seconds in value.items()}
    return str(value)


def write_unsynced(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old text or the new one. Raises StorageError.

    The file is not synced, for it describes a living process, and after a power cut there is none.
    """
    try:
        durable.write_whole_unsynced(path, text)
    except OSError as error:
        raise storage_error(error, path=path, doing="Writing") from error
