"""Starts the ranks of one machine, passes signals on to them, and ends them together."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

from bloomery.cli.rank_output import RankOutput
from bloomery.cli.standard_output import tell
from bloomery.durable import hold_directory, remove_abandoned
from bloomery.errors import RankLost
from bloomery.events.run_lock import host_name
from bloomery.events.timeouts import GRACE_AFTER_FAILURE_S, GRACE_AFTER_SIGNAL_S, GRACE_S
from bloomery.operate.process_tree import signal_name

_PAUSE_S = 0.05
"""The seconds of one wait where the system has no descriptors of processes."""


class ChildEnds:
    """Tells when one of some child processes ends, or a signal comes. A context manager.

    Linux tells it by descriptors of processes. On other systems `wait` is a short pause, so callers poll
    the processes after each call.

    A signal ends `wait` by the descriptor that Python writes to. One that comes just before the wait begins,
    or to another thread, interrupts no system call of this thread: its handler would run after the wait.
    """

    def __init__(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        self._poll = select.poll()
        self._descriptors: list[int] = []
        self._are_told = hasattr(os, "pidfd_open")
        self._signalled, self._signals = socket.socketpair()
        for end in (self._signalled, self._signals):
            end.settimeout(0.0)
        self._poll.register(self._signalled, select.POLLIN)
        self._is_on_main_thread = threading.current_thread() is threading.main_thread()
        if self._is_on_main_thread:  # the only one that may ask for it, and that runs the handlers
            self._wakeup_before = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        for child in children:
            self._follow(child.pid)

    def wait(self, timeout_s: float) -> None:
        """Wait until another child has ended or a signal has come, for `timeout_s` seconds at most."""
        if not self._are_told:
            time.sleep(max(0.0, min(timeout_s, _PAUSE_S)))
            return
        for descriptor, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            if descriptor == self._signalled.fileno():
                self._signalled.recv(4096)
            else:
                self._poll.unregister(descriptor)  # or it would be told again at once

    def __enter__(self) -> ChildEnds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on_main_thread:
            signal.set_wakeup_fd(self._wakeup_before)
        self._signalled.close()
        self._signals.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _follow(self, pid: int) -> None:
        if not self._are_told:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            # The child's end was taken already, or the kernel has no such descriptors: callers have to poll.
            self._are_told = False
            return
        self._descriptors.append(descriptor)
        self._poll.register(descriptor, select.POLLIN)


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
        """Learn the process id of each rank."""
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
    with _meeting_place() as directory, _signals_passed_on(ranks, supervisor) as received:
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
            with _held_back(signal.SIGUSR1):  # it would end a rank that has no handler yet
                rank = subprocess.Popen(command, env=own, process_group=0, stdout=pipe, stderr=errors)
            with _held_back(*PASSED_ON):
                ranks.append(rank)
                missed = list(received)
            for number in missed:  # those that came before this rank was among those they are passed on to
                rank.send_signal(number)
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
def _signals_passed_on(ranks: Ranks, supervisor: RankSupervisor | None) -> Iterator[list[int]]:
    """Pass signals on to the ranks that are there; yields the list of all signals so far."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if supervisor is not None:
            supervisor.signalled(number)
        _signal_all(ranks, number)

    previous = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread and in the processes that it starts meanwhile, which inherit the mask.

    A rank unblocks SIGUSR1 once it has a handler, so that none is lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
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
    return f"was ended by {signal_name(-status)}" if status < 0 else f"failed with status {status}"


def _say(line: str) -> None:
    tell(f"bloomery: {line}")


def _signal_all(ranks: Ranks, number: int) -> list[int]:
    """Send a signal to the ranks that run; returns their places."""
    running = [place for place, rank in enumerate(ranks) if rank.poll() is None]
    for place in running:
        ranks[place].send_signal(number)
    return running


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
