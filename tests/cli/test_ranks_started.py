"""What the ranks of a machine are started with, what their supervisor learns, and how long each wait is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_ranks_of_a_machine import LOST, Others, Rank, Supervisor

from bloomery.cli import ranks as ranks_module
from bloomery.cli.ranks import LAUNCHER, PASSED_ON, RankRange, _wait, end_with_launcher, run_ranks


class Watching(Supervisor):
    """A supervisor that notes what it learns."""

    def __init__(self, *, end: str = "") -> None:
        super().__init__(end=end)
        self.learnt: list[Any] = []

    def started(self, pids: Mapping[int, int]) -> None:
        self.learnt.append(("started", dict(pids)))

    def ended(self, statuses: Mapping[int, int], *, killed: Collection[int]) -> None:
        self.learnt.append(("ended", dict(statuses), killed))

    def signalled(self, number: int) -> None:
        self.learnt.append(("signalled", number))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the ranks' processes: each is the next of `waiting`; returns with what they were started."""
    calls: list[Any] = []

    @contextmanager
    def ends(children: Any) -> Iterator[Any]:
        yield SimpleNamespace(wait=lambda seconds: None)

    def start(command: Any, *, env: dict[str, str], **options: Any) -> Rank:
        number = len(calls)
        held = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        calls.append((command, env, options, held))
        if meeting := env.get("BLOOMERY_RENDEZVOUS_FILE"):
            assert Path(meeting).parent.is_dir() and Path(meeting).name == "meeting"
        return Rank(0, pid=70 + number)

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr(ranks_module, "ChildEnds", ends)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(9)))
    return calls


def test_every_rank_gets_its_numbers_its_threads_and_the_file_where_they_meet(started: list[Any]) -> None:
    supervisor = Watching()
    command = ["python", "x"]
    given = {"MINE": "1"}
    share = RankRange(count=2, world=2)
    assert run_ranks(command, share, environment=given, supervisor=supervisor) == 0
    (first, one, options, held), (_, other, _, _) = started
    meeting = one.pop("BLOOMERY_RENDEZVOUS_FILE")
    assert other.pop("BLOOMERY_RENDEZVOUS_FILE") == meeting and not Path(meeting).parent.exists()
    shared = {
        "MINE": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    assert one == shared | {"RANK": "0", "LOCAL_RANK": "0"}
    assert other == shared | {"RANK": "1", "LOCAL_RANK": "1"}
    assert first == command and options == {"process_group": 0, "stdout": None, "stderr": None} and held
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert supervisor.learnt == [("started", {0: 70, 1: 71}), ("ended", {0: 0, 1: 0}, [])]
    assert given == {"MINE": "1"}


def test_ranks_of_several_machines_meet_where_the_environment_says(started: list[Any]) -> None:
    given = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "MASTER_ADDR": "n1"}
    followed: list[Any] = []
    output: Any = SimpleNamespace(
        follow=lambda rank, process: followed.append((rank, process.pid)),
        finish=lambda: followed.append("finish"),
    )
    share = RankRange(first=4, count=2, world=6)
    supervisor = Watching()
    assert run_ranks(["x"], share, environment=given, output=output, supervisor=supervisor) == 0
    assert started[1][1] == given | {
        "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", LAUNCHER: str(os.getpid()), "RANK": "5",
        "LOCAL_RANK": "1",
    }  # fmt: skip
    assert started[0][2] == {"process_group": 0, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    assert followed == [(4, 70), (5, 71), "finish"]
    assert supervisor.learnt == [("started", {4: 70, 5: 71}), ("ended", {4: 0, 5: 0}, [])]
    run_ranks(["x"], RankRange(count=1, world=1), environment=given)
    run_ranks(["x"], RankRange(count=1, world=2), environment={})
    assert "BLOOMERY_RENDEZVOUS_FILE" not in started[3][1], "nor does the first of several"
    assert started[2][1]["GLOO_SOCKET_IFNAME"] == "eth9"
    assert started[2][1]["OMP_NUM_THREADS"] == "7"


def test_more_ranks_than_cores_get_a_thread_each(started: list[Any]) -> None:
    run_ranks(["x"], RankRange(count=10, world=10), environment={})
    assert {environment["OMP_NUM_THREADS"] for _, environment, _, _ in started} == {"1"}


def test_ranks_that_were_killed_are_named_by_their_numbers_in_the_run(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = iter([Rank(0, pid=70), Rank(pid=71), Rank(pid=72)])
    monkeypatch.setattr("subprocess.Popen", lambda *command, **options: next(processes))
    supervisor = Watching(end="they stand still")
    assert (
        run_ranks(["x"], RankRange(first=4, count=3, world=9), environment={}, supervisor=supervisor) == LOST
    )
    assert supervisor.learnt[1:] == [("ended", {4: 0, 5: -9, 6: -9}, [5, 6])]


def test_signals_reach_the_supervisor_and_the_ranks_and_are_as_before_at_the_end(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PASSED_ON == (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    rank = Rank(answer=130)
    monkeypatch.setattr("subprocess.Popen", lambda *command, **options: rank)
    supervisor = Watching()

    def interrupted(pids: Mapping[int, int]) -> None:
        signal.raise_signal(signal.SIGINT)

    supervisor.started = interrupted  # type: ignore[method-assign]
    assert run_ranks(["x"], RankRange(count=1, world=1), environment={}, supervisor=supervisor) == 130
    assert rank.signals == [signal.SIGINT]
    assert supervisor.learnt[0] == ("signalled", signal.SIGINT)
    assert {number: signal.getsignal(number) for number in PASSED_ON} == before


def test_a_rank_gets_all_signals_that_came_while_it_was_started(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(answer=143)

    def start(*command: Any, **options: Any) -> Rank:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        return rank

    monkeypatch.setattr("subprocess.Popen", start)
    assert run_ranks(["x"], RankRange(count=1, world=1), environment={}) == 143
    assert rank.signals == [signal.SIGINT, signal.SIGTERM]


def test_ranks_leave_no_descriptor_open_and_signals_that_were_held_back_before_remain_so(
    started: list[Any],
) -> None:
    opened = len(list(Path("/proc/self/fd").iterdir()))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        run_ranks(["x"], RankRange(count=1, world=1), environment={})
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


def waits(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Rank], **beside: Any
) -> tuple[int, list[float], list[int]]:
    """Return the status, the seconds of each wait, and who was killed, where each wait takes all its time."""
    now, looks = [1_000.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def look(seconds: float) -> None:
        looks.append(round(seconds, 3))
        now[0] += seconds + 1e-6
        assert len(looks) < 200

    killed: set[int] = set()
    given: Any = [ranks, RankRange(count=len(ranks), world=9), beside.get("others"), beside.get("supervisor")]
    status = _wait(*given, killed, SimpleNamespace(wait=look))  # type: ignore[arg-type]
    return status, looks, sorted(killed)


class Deaf(Rank):
    """A rank that only SIGKILL ends."""

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.returncode = -number if number == signal.SIGKILL else None


@pytest.mark.parametrize(
    ("first", "looks", "status"),
    [
        (7, [20.0], 7),  # the others were asked to end
        (-9, [3.0], 137),
        (-6, [20.0], 134),
        (0, [60.0, 60.0, 60.0], 1),  # as agreed, and the others still save
    ],
)
def test_each_end_gives_the_others_its_own_time_before_they_are_killed(
    first: int, looks: list[float], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_S", 180.0)
    found = waits(monkeypatch, [Rank(first), Deaf()])
    assert found == (status, [*looks, 60.0], [1])  # and one wait for the end of the killed


def test_a_failure_elsewhere_gives_the_ranks_here_as_long_as_one_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, looks, killed = waits(monkeypatch, [Deaf()], others=Others("rank 0 failed"))
    assert (status, killed) == (1, [0])
    assert sum(looks) == pytest.approx(20.0, abs=0.3) and set(looks[:-1]) == {0.2}


def test_a_second_failure_neither_moves_the_end_nor_changes_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = Rank(answer=9)
    assert waits(monkeypatch, [Rank(7), second, Deaf()]) == (7, [20.0, 60.0], [2])
    assert second.signals == [signal.SIGTERM]


@pytest.mark.parametrize("launcher", [None, "4711"])
def test_a_rank_dies_with_its_launcher_if_it_has_one(
    launcher: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    library = SimpleNamespace(prctl=lambda *words: asked.append(words))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr("os.kill", lambda pid, number: asked.append((pid, number)))
    monkeypatch.delenv(LAUNCHER, raising=False)
    if launcher is not None:
        monkeypatch.setenv(LAUNCHER, launcher)
    monkeypatch.setattr("os.getppid", lambda: 4711)
    end_with_launcher()
    told = [(1, signal.SIGKILL, 0, 0, 0)] if launcher else []
    assert asked == told
    asked.clear()
    for parent in (1, 55):  # it is dead already: init has the rank, or a container's first process
        monkeypatch.setattr("os.getppid", lambda parent=parent: parent)
        end_with_launcher()
    assert asked == ([*told, (os.getpid(), signal.SIGKILL)] * 2 if launcher else [])
