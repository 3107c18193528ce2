"""The end of a child process is told at once, and once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

from bloomery.cli.ranks import ChildEnds, RankRange, run_ranks

LONG_S = 60.0


@pytest.fixture
def child() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []

    def started() -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return children[-1]

    yield started
    for one in children:
        one.kill()
        one.communicate()


def test_an_end_is_told_long_before_the_timeout_and_only_once(
    child: Callable[[], subprocess.Popen[bytes]],
) -> None:
    first, second = child(), child()
    with ChildEnds([first, second]) as ends:
        ends.wait(0.01)
        assert first.poll() is None
        first.kill()
        begun = time.monotonic()
        ends.wait(LONG_S)
        assert first.poll() is not None and time.monotonic() - begun < LONG_S / 2
        threading.Timer(0.2, second.kill).start()
        ends.wait(LONG_S)  # the first end is not told again
        assert second.poll() is not None


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_who_was_told_of_signals_before_is_told_of_them_again() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        with ChildEnds([]):
            pass
        assert signal.set_wakeup_fd(before) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        theirs.close()


def test_children_without_descriptors_are_looked_at_after_short_pauses(
    child: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise ProcessLookupError(3, "No such process")

    slept: list[float] = []
    monkeypatch.setattr("os.pidfd_open", refused)
    monkeypatch.setattr("time.sleep", slept.append)
    with ChildEnds([child()]) as ends:
        for timeout_s in (LONG_S, 0.01, -1e-6):
            ends.wait(timeout_s)
    assert slept == [0.05, 0.01, 0.0]


def test_no_descriptor_stays_open(child: Callable[[], subprocess.Popen[bytes]]) -> None:
    one = child()
    before = descriptors()
    with ChildEnds([one]) as ends:
        ends.wait(0.0)
        assert len(descriptors()) > len(before)
    assert descriptors() <= before


def test_a_time_that_has_passed_already_is_not_waited_for(
    child: Callable[[], subprocess.Popen[bytes]],
) -> None:
    with ChildEnds([child()]) as ends:
        waiter = threading.Thread(target=ends.wait, args=(-1.0,), daemon=True)
        waiter.start()
        waiter.join(10.0)
        assert not waiter.is_alive()


def test_a_signal_that_another_thread_gets_is_handled_at_once(
    child: Callable[[], subprocess.Popen[bytes]],
) -> None:
    """It interrupts no system call of this thread, as one that comes just before the wait: a peer that was
    asked to leave went on for a minute.
    """
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    wakeup = signal.set_wakeup_fd(-1)
    try:
        one = child()
        with ChildEnds([one]) as ends:
            for count in (1, 2):
                sender = threading.Timer(
                    0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
                )
                sender.start()
                begun = time.monotonic()
                ends.wait(LONG_S)
                assert told == count * [signal.SIGUSR1] and time.monotonic() - begun < LONG_S / 2
                sender.join()
            threading.Timer(0.2, one.kill).start()
            ends.wait(LONG_S)
            assert one.poll() is not None
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.set_wakeup_fd(wakeup)


def test_where_the_system_tells_of_no_ends_the_wait_is_short(
    child: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with ChildEnds([child()]) as ends:
        begun = time.monotonic()
        ends.wait(LONG_S)
        assert time.monotonic() - begun < LONG_S / 2


class SeesAllEnd:
    """A supervisor that lets the launcher look at its ranks only once all of them have ended."""

    def started(self, pids: Mapping[int, int]) -> None:
        for pid in pids.values():
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def why_to_end(self) -> str:
        return ""

    why_to_stop = why_to_end

    def ending(self) -> None: ...

    def ended(self, statuses: Mapping[int, int], *, killed: Collection[int]) -> None: ...

    def signalled(self, number: int) -> None: ...


def test_of_ranks_that_ended_together_the_one_that_a_signal_ended_is_to_blame(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "import os, signal\nos.environ['RANK'] == '0' and os._exit(7)\nos.kill(os.getpid(), 9)"
    status = run_ranks(
        [sys.executable, "-c", code],
        RankRange(count=2, world=2),
        environment=dict(os.environ),
        supervisor=SeesAllEnd(),
    )
    assert status == 128 + signal.SIGKILL and "rank 1 (process" in capsys.readouterr().err
