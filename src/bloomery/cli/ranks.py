"""Starts the ranks of one machine, shows and logs what they print, and ends them together.

The pipe of a rank is read until the rank ends, whatever happens to the log and the screen, because a rank
blocks when its pipe is full. A full disk therefore costs lines of a log, and a closed terminal costs what
would have been shown; neither stops a rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from bloomery.cli.child_ends import ChildEnds
from bloomery.durable import hold_directory, remove_abandoned
from bloomery.errors import RankLost
from bloomery.events.run_lock import host_name
from bloomery.events.timeouts import GRACE_AFTER_FAILURE_S, GRACE_AFTER_SIGNAL_S, GRACE_S

_JOIN_S = 10.0
_LOOK_S, _ALONE_S = 0.2, 60.0  # between questions to supervisors and other launchers; where there are none

LAUNCHER = "BLOOMERY_LAUNCHER"
"""Environment variable of a rank: the process id of its launcher."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NO_FAILURE = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, RankLost.exit_status)
"""Exit statuses of a rank that ended as agreed with the others, or because another rank failed."""
_PREFIX = "bloomery-meeting-"
Ranks = list[subprocess.Popen[bytes]]


@dataclass(frozen=True, kw_only=True)
class RankRange:
    """The ranks that this machine starts: `count` of `world`, from `first` on."""

    count: int
    world: int
    first: int = 0


class RankSupervisor(Protocol):
    """Watches the ranks of this machine while they run."""

    def started(self, pids: Mapping[int, int]) -> None:
        """Learn the process of each rank."""
        ...

    def why_to_end(self) -> str:
        """Return why the ranks must be killed now; empty while they need not. Asked many times per second."""
        ...

    def ending(self) -> None:
        """Learn that a rank has failed by itself and the others are being ended; called before they are."""
        ...

    def ended(self, statuses: Mapping[int, int], *, killed: Collection[int]) -> None:
        """Learn the exit status of each rank, negative for a signal, and which ranks this launcher killed."""
        ...

    def signalled(self, number: int) -> None:
        """Learn that this process got SIGINT, SIGTERM or SIGUSR1; called from the signal's handler."""
        ...

    def why_to_stop(self) -> str:
        """Return why the ranks must save and stop now; empty while they need not."""
        ...


class OtherLaunchers(Protocol):
    """The launchers of the other machines of a run."""

    def failure(self) -> str:
        """Return why the ranks here shall end; empty while they need not."""
        ...

    def report_failure(self, failure: str) -> None:
        """Tell the others that a rank of this machine failed."""
        ...


def run_ranks(
    command: Sequence[str],
    share: RankRange,
    *,
    environment: Mapping[str, str],
    output: RankOutput | None = None,
    others: OtherLaunchers | None = None,
    supervisor: RankSupervisor | None = None,
) -> int:
    """Run `command` as the ranks of `share` until all have ended; returns the first failure's status, or 0.

    The rendezvous of the ranks of one machine is a file, so that no port can be in use; that of several
    machines is the store that `environment` names. When one rank fails, the others are ended. SIGINT, SIGTERM
    and SIGUSR1 are passed on to the ranks. Each rank has its own process group, so that a terminal's Ctrl-C
    does not reach it twice.

    command: the program and its arguments, the same for every rank.
    share: the ranks that this machine starts.
    environment: the environment of every rank, to which its own variables are added.
    output: reads and shows what the ranks print; None lets them write to this process's output.
    others: the launchers of the other machines; None where there is one machine.
    supervisor: decides whether the ranks must be ended; None lets them run.
    """
    ranks: Ranks = []
    with _meeting_place() as directory, _signals_passed_on(ranks, supervisor):
        shared = dict(environment) | {
            "WORLD_SIZE": str(share.world),
            "LOCAL_WORLD_SIZE": str(share.count),
            LAUNCHER: str(os.getpid()),
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(max(1, _cores() // share.count))),
        }
        if share.count == share.world:
            shared["BLOOMERY_RENDEZVOUS_FILE"] = str(Path(directory) / "meeting")
            shared["GLOO_SOCKET_IFNAME"] = environment.get("GLOO_SOCKET_IFNAME", "lo")
        pipe, errors = (subprocess.PIPE, subprocess.STDOUT) if output else (None, None)
        for local in range(share.count):
            own = shared | {"RANK": str(share.first + local), "LOCAL_RANK": str(local)}
            with _usr1_held_back():
                rank = subprocess.Popen(command, env=own, process_group=0, stdout=pipe, stderr=errors)
            ranks.append(rank)
            if output:
                output.follow(share.first + local, rank)
        if supervisor is not None:
            supervisor.started({share.first + local: rank.pid for local, rank in enumerate(ranks)})
        killed: set[int] = set()
        with ChildEnds(ranks) as ends:
            status = _wait(ranks, share, others, supervisor, killed, ends)
        if output:
            output.finish()
        if supervisor is not None:
            statuses = {share.first + local: rank.returncode for local, rank in enumerate(ranks)}
            supervisor.ended(statuses, killed=[share.first + local for local in sorted(killed)])
        return status


def end_with_launcher() -> None:
    """Make the kernel kill this rank when its launcher dies, so that the same command can start again.

    Does nothing in a process that no launcher started, and on other systems than Linux.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(launcher):  # it was killed before we asked
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _meeting_place() -> Iterator[str]:
    """Yield a temporary directory for the rendezvous file; removes those that killed launchers left."""
    remove_abandoned(Path(tempfile.gettempdir()), _PREFIX)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory:
        lock = hold_directory(Path(directory))
        try:
            yield directory
        finally:
            if lock is not None:
                os.close(lock)


@contextmanager
def _signals_passed_on(ranks: Ranks, supervisor: RankSupervisor | None) -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        if supervisor is not None:
            supervisor.signalled(number)
        _signal_all(ranks, number)

    previous = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _usr1_held_back() -> Iterator[None]:
    """Block SIGUSR1, also in processes started meanwhile, which it would end before they have a handler.

    A rank lets it through once it has one, so that none is lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(
    ranks: Ranks,
    share: RankRange,
    others: OtherLaunchers | None,
    supervisor: RankSupervisor | None,
    killed: set[int],
    ends: ChildEnds,
) -> int:
    """Wait until all ranks have ended; returns the first failure's status, or 0, and adds to `killed`."""
    failure, elsewhere, departs, deadline = 0, "", "", float("inf")
    look_s = _ALONE_S if others is None and supervisor is None else _LOOK_S
    while True:
        living = [number for number, rank in enumerate(ranks) if rank.poll() is None]
        ended = {number: rank.returncode for number, rank in enumerate(ranks) if number not in living}
        blamed = _to_blame(ended)
        if blamed is not None and not failure:
            failure, deadline = ended[blamed], time.monotonic() + _grace_s(ended[blamed])
            _blame(ranks, share, blamed, others=others, supervisor=supervisor, reported=elsewhere)
        if others is not None and not failure and not elsewhere:
            elsewhere = others.failure()
            if elsewhere:
                _say(elsewhere)
                _signal_all(ranks, signal.SIGTERM)
                deadline = time.monotonic() + GRACE_AFTER_FAILURE_S
        if supervisor is not None and not departs and (departs := supervisor.why_to_stop()):
            _say(f"{departs}; the ranks save and stop")
            _signal_all(ranks, signal.SIGTERM)
        standstill = supervisor.why_to_end() if supervisor is not None and not failure else ""
        if standstill:
            _say(f"{standstill}; ending the ranks")
            killed.update(_signal_all(ranks, signal.SIGKILL))  # they do not answer anything else
            failure = RankLost.exit_status
        if not living:
            break
        if ended and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            _say(f"ranks {[share.first + number for number in living]} did not end in time: killed")
            killed.update(_signal_all(ranks, signal.SIGKILL))
            failure, deadline = failure or 1, float("inf")
        ends.wait(min(look_s, deadline - time.monotonic()))
    if failure < 0:
        _say("the same command goes on from the newest checkpoint")
        return 128 - failure
    if not failure and not elsewhere and RankLost.exit_status in ended.values():
        _say("the ranks here lost another; the same command goes on from the newest checkpoint")
    return failure or (RankLost.exit_status if elsewhere else max(ended.values()))


def _blame(
    ranks: Ranks,
    share: RankRange,
    blamed: int,
    *,
    others: OtherLaunchers | None,
    supervisor: RankSupervisor | None,
    reported: str,
) -> None:
    """Report which rank failed, here and to the other machines, and end the ranks that still run."""
    if supervisor is not None:
        supervisor.ending()
    living = any(rank.poll() is None for rank in ranks)
    status = ranks[blamed].returncode
    who = f"rank {share.first + blamed} (process {ranks[blamed].pid})"
    if not reported:
        more = "; ending the other ranks" if living or others is not None else ""
        _say(f"{who} on {host_name()} {_how(status)}{more}")
    if others is not None:
        others.report_failure(f"{who} on {host_name()} {_how(status)}; ending the ranks here")
    _signal_all(ranks, signal.SIGTERM)


def _to_blame(statuses: Mapping[int, int]) -> int | None:
    """Return the first rank that failed by itself; one that was ended by a signal goes before the others."""
    failed = [number for number, status in statuses.items() if status not in NO_FAILURE]
    return min(failed, key=lambda number: (statuses[number] > 0, number), default=None)


def _grace_s(status: int) -> float:
    """Return how long the other ranks may take to end after one that ended with `status`, in seconds.

    NCCL's watchdogs end one rank after the other by SIGABRT, and what each of them prints names the culprit.
    """
    is_sudden = status < 0 and -status not in (signal.SIGABRT, signal.SIGINT, signal.SIGTERM)
    return GRACE_AFTER_SIGNAL_S if is_sudden else GRACE_AFTER_FAILURE_S


def _how(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"


def _say(line: str) -> None:
    print(f"bloomery: {line}", file=sys.stderr, flush=True)


def _signal_all(ranks: Ranks, number: int) -> list[int]:
    """Send a signal to the ranks that run; returns their places."""
    running = [place for place, rank in enumerate(ranks) if rank.poll() is None]
    for place in running:
        ranks[place].send_signal(number)
    return running


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RankOutput:
    """Shows and logs what ranks print, with a thread for each rank that reads its pipe until it closes.

    file_of: returns the path of a rank's log file, to which lines are appended.
    """

    def __init__(self, file_of: Callable[[int], Path]) -> None:
        self._file_of = file_of
        self._screen = _Screen()
        self._threads: list[threading.Thread] = []

    def follow(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Show and log what `process` prints from now on."""
        assert process.stdout is not None, "its output goes to a pipe"
        arguments = (process.stdout, rank, _RankLog(self._file_of(rank)), self._screen)
        thread = threading.Thread(target=_copy, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the last lines of ranks that have ended."""
        for thread in self._threads:
            thread.join(_JOIN_S)


def _copy(pipe: IO[bytes], rank: int, log: _RankLog, screen: _Screen) -> None:
    log.write(b"")  # a rank that says nothing has a log too
    with pipe:
        for line in pipe:
            log.write(line)
            screen.write(f"[rank {rank}] {line.decode(errors='replace')}")
    log.close()


class _RankLog:
    """A log file that survives a full disk: it notes the number of lines that could not be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._lines_lost, self._is_reported = 0, False

    def write(self, line: bytes) -> None:
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            if self._lines_lost:
                _write(self._file, f"[{self._lines_lost} lines are missing here]\n".encode())
            _write(self._file, line)
            self._lines_lost, self._is_reported = 0, False
        except OSError as refused:
            if not self._is_reported:
                _warn(f"{self._path} cannot be written ({refused.strerror}): its next lines are only shown")
            self._is_reported = True
            self._lines_lost += 1 if line else 0

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


class _Screen:
    """The standard output of this process, until it is closed or refuses a write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, line: str) -> None:
        with self._lock:  # so that lines of two ranks do not mix
            if self._is_closed:
                return
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except OSError as refused:
                self._is_closed = True
                _warn(f"what ranks print is no longer shown ({refused.strerror}); their logs have it")
                with suppress(OSError):  # what is buffered would be tried again at the end, and fail there
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(file: IO[bytes], content: bytes) -> None:
    while content:
        content = content[file.write(content) :]


def _warn(line: str) -> None:
    with suppress(OSError):
        print(f"bloomery launch: {line}", file=sys.stderr, flush=True)
