"""Faults on real processes, by a clock of the test's own."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from bloomery.chaos.faults import Fault, FaultInjector
from bloomery.chaos.processes import ManagedProcess
from bloomery.chaos.shaped_network import Shape, ShapedNetwork

PARENT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: (rank.kill(), sys.exit(0)))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until there is a rank to end
rank = subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": "0"})
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
time.sleep(600)
"""


class Stage:
    """Two peers, a coordinator, an internet, and a clock that stands still."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.now = 0.0
        self.actors = {
            name: stack.enter_context(
                ManagedProcess(
                    name=name,
                    command=[sys.executable, "-c", PARENT],
                    environment={"PATH": "/usr/bin:/bin"},
                    log=directory / f"{name}.log",
                )
            )
            for name in ("a", "b", "coordinator")
        }
        internet = stack.enter_context(ShapedNetwork())
        for name in ("a", "b"):
            internet.host(name, Shape())
        self.hand = FaultInjector(
            peers={name: self.actors[name] for name in ("a", "b")},
            coordinator=self.actors["coordinator"],
            internet=internet,
            back_s=5.0,
            clock=lambda: self.now,
        )
        for actor in self.actors.values():
            actor.start()
        for actor in self.actors.values():
            until(lambda actor=actor: actor.ranks())  # type: ignore[misc]


def until(condition: Callable[[], object]) -> None:
    """Wait for it, a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage that is cleared afterwards."""
    with ExitStack() as stack:
        yield Stage(tmp_path, stack)


def _strike(stage: Stage, kind: str, peer: str = "a", seconds: float = 0.0) -> bool:
    return stage.hand.inject(Fault(after_s=0.0, kind=kind, peer=peer, seconds=seconds))


def test_a_killed_peer_is_started_again_when_its_time_comes_and_not_before(stage: Stage) -> None:
    assert _strike(stage, "kill-peer")
    assert not stage.actors["a"].family()
    assert not _strike(stage, "stop-peer"), "nobody is there to be stopped"
    stage.now = 4.9
    stage.hand.revert_due()
    assert not stage.actors["a"].alive
    stage.now = 5.0
    stage.hand.revert_due()
    assert stage.actors["a"].alive
    assert stage.actors["b"].starts == 1


def test_a_peer_that_left_comes_back_as_well(stage: Stage) -> None:
    assert _strike(stage, "leave")
    until(lambda: not stage.actors["a"].alive)
    assert stage.actors["a"].status == 0
    assert stage.hand.away == {"a"}, "its status says nothing of the run"
    stage.now = 5.0
    stage.hand.revert_due()
    assert stage.actors["a"].alive and not stage.hand.away


def test_a_peer_that_is_struck_while_it_ends_is_started_again_once(stage: Stage) -> None:
    (rank,) = stage.actors["a"].ranks()
    assert _strike(stage, "kill-rank") and _strike(stage, "leave")
    until(lambda: not stage.actors["a"].alive and not rank.is_running())
    stage.now = 5.0
    stage.hand.revert_due()
    assert stage.actors["a"].alive and stage.hand.next_s == float("inf")


def test_a_peer_that_says_goodbye_at_the_end_is_not_started_again(stage: Stage) -> None:
    stage.actors["a"].signal(signal.SIGSTOP)
    assert _strike(stage, "leave")
    stage.hand.revert_all()
    assert stage.actors["a"].starts == 1 and stage.hand.next_s == float("inf")
    stage.actors["a"].signal(signal.SIGCONT)


def test_a_stopped_rank_goes_on_after_its_while(stage: Stage) -> None:
    (rank,) = stage.actors["a"].ranks()
    assert _strike(stage, "stop-rank", seconds=3.0)
    until(lambda: rank.status() == psutil.STATUS_STOPPED)
    assert stage.actors["a"].family()[0].status() != psutil.STATUS_STOPPED
    stage.now = 3.0
    stage.hand.revert_due()
    until(lambda: rank.status() != psutil.STATUS_STOPPED)


def test_the_coordinator_is_killed_and_comes_back(stage: Stage) -> None:
    assert _strike(stage, "kill-coordinator", peer="", seconds=2.0)
    assert not stage.actors["coordinator"].alive
    assert stage.hand.next_s == 2.0
    stage.hand.revert_all()
    assert stage.actors["coordinator"].alive
    assert stage.hand.next_s == float("inf")
