"""Runs a chaos scenario: a coordinator, peer processes, shaped links, and injected faults."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.chaos.audit import read_commits
from bloomery.chaos.fault_injector import FaultInjector
from bloomery.chaos.fault_schedule import Fault
from bloomery.chaos.processes import ManagedProcess, marked
from bloomery.chaos.shaped_network import Shape, ShapedNetwork
from bloomery.coordination.etcd_process import free_ports
from bloomery.errors import PeerError
from bloomery.protocol.records import Commit

log = logging.getLogger(__name__)

MARK = "BLOOMERY_REHEARSAL"
"""In the environment of everything that a rehearsal starts, so that what it leaves behind can be found."""
TICK_S = 0.2
READY_S = 60.0
PAIRS_TRIED = 100


@dataclass(frozen=True, kw_only=True)
class ScenarioSettings:
    """What is played. recipe, overrides: of every peer. run: the name that they give it.

    faults: in order; () for none. directory: takes each peer's run directory and what everybody printed.
    deadline_s: of the whole.
    """

    recipe: str
    overrides: Sequence[str]
    run: str
    peers: int
    shape: Shape
    directory: Path
    faults: Sequence[Fault] = ()
    back_s: float = 3.0
    seed: int = 0
    ranks: int = 1
    deadline_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A fault and when it came; done: whether there was somebody to hurt."""

    fault: Fault
    at_s: float
    done: bool


@dataclass(kw_only=True)
class ScenarioOutcome:
    """How it ended. statuses: of the peers. leftover: processes and files in memory that remained."""

    seconds: float
    statuses: Mapping[str, int | None]
    commits: Sequence[Commit]
    struck: Sequence[Struck]
    leftover: Sequence[str]
    bytes_between: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a peer did not end well, or something was left behind."""
        return any(self.statuses.values()) or bool(self.leftover)


def run_scenario(
    setting: ScenarioSettings, *, watch: Callable[[float, Sequence[Struck]], None]
) -> ScenarioOutcome:
    """Play a rehearsal to its end, or to its deadline. `watch` is called every little while.

    Raises PeerError where the coordinator does not come up, or the deadline passes. Whatever happens, the
    processes it started are ended.
    """
    begun, mark = time.monotonic(), secrets.token_hex(8)
    memory = _memory_directory(mark)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        with ExitStack() as acting:
            stage = _Stage(setting, mark, memory, acting)
            struck = stage.run(begun, watch)
            statuses = {name: actor.status for name, actor in stage.peers.items()}
            traffic = {name: stage.internet.traffic(name) for name in stage.peers}
            commits = read_commits(stage.endpoint, setting.run)
        left = [f"process {one.pid} ({' '.join(one.cmdline())[:80]})" for one in marked(MARK, mark)]
        left += [str(one) for one in sorted(memory.rglob("*")) if one.is_file()]
    return ScenarioOutcome(
        seconds=time.monotonic() - begun,
        statuses=statuses,
        commits=commits,
        struck=struck,
        leftover=left,
        bytes_between=traffic,
    )


def peer_names(count: int) -> tuple[str, ...]:
    """Names of the peers of a rehearsal, in order."""
    return tuple(f"peer{index}" for index in range(count))


class _Stage:
    def __init__(self, setting: ScenarioSettings, mark: str, memory: Path, stack: ExitStack) -> None:
        self._setting, self._memory = setting, memory
        # Threads that spin for one another's cores make a step ten times as long.
        threads = max(1, len(os.sched_getaffinity(0)) // (setting.peers * setting.ranks))
        self._environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {MARK: mark}
        self.internet = stack.enter_context(ShapedNetwork(seed=setting.seed))
        self._ports = set[int]()
        (port,) = self._free_ports(1)
        self.coordinator = stack.enter_context(
            ManagedProcess(
                name="coordinator",
                command=_bloomery(
                    "coordinate",
                    "--data",
                    str(setting.directory / "coordinator"),
                    "--listen",
                    f"127.0.0.1:{port}",
                ),
                environment=self._environment,
                log=setting.directory / "logs" / "coordinator.log",
            )
        )
        self.coordinator.start()
        _wait_for_port(port, self.coordinator)
        self.endpoint = f"http://127.0.0.1:{port}"
        names = peer_names(setting.peers)
        self.peers = {name: stack.enter_context(self._peer(name)) for name in names}

    def run(self, begun: float, watch: Callable[[float, Sequence[Struck]], None]) -> list[Struck]:
        """Start the peers, carry the faults out in their order, and wait until every peer has ended."""
        setting, struck = self._setting, list[Struck]()
        hand = FaultInjector(
            peers=self.peers,
            coordinator=self.coordinator,
            internet=self.internet,
            back_s=setting.back_s,
            seed=setting.seed,
        )
        for actor in self.peers.values():
            actor.start()
        faults = iter(setting.faults)
        fault, due = next(faults, None), 0.0
        if fault is not None:
            due = time.monotonic() + fault.after_s
        while True:
            now = time.monotonic()
            if now - begun > setting.deadline_s:
                raise PeerError(
                    f"The rehearsal did not end within {setting.deadline_s:.0f} s.",
                    remedy=f"What everybody said is in {setting.directory / 'logs'}.",
                )
            hand.heal()
            if self._is_over(hand):
                break
            if fault is not None and now >= due:
                done = hand.strike(fault)
                log.info("%s%s", fault, "" if done else " (nobody there)")
                struck.append(Struck(fault=fault, at_s=now - begun, done=done))
                fault = next(faults, None)
                due = now + (fault.after_s if fault else 0.0)
            watch(now - begun, struck)
            time.sleep(min(TICK_S, hand.next_s, max(0.0, due - now) if fault else TICK_S))
        hand.heal_all()
        for actor in self.peers.values():
            actor.wait(setting.deadline_s)
        return struck

    def _is_over(self, hand: FaultInjector) -> bool:
        """Whether nobody is at it any more, nor will be: some found the run finished, or all failed.

        Who was asked to leave has ended well, too, and says nothing of the run.
        """
        if any(actor.alive for actor in self.peers.values()):
            return False
        by_themselves = (actor.status for name, actor in self.peers.items() if name not in hand.away)
        return 0 in by_themselves or hand.next_s == float("inf")

    def _free_ports(self, count: int) -> list[int]:
        """Free ports beside each other, which nobody is given twice, nor for a connection that it makes."""
        for _ in range(PAIRS_TRIED):
            (first,) = free_ports(1)
            found = list(range(first, first + count))
            if self._ports.isdisjoint(found) and all(map(_is_free, found)):
                self._ports.update(found)
                return found
        raise PeerError(f"No {count} free ports beside each other were found on 127.0.0.1.")

    def _peer(self, name: str) -> ManagedProcess:
        """A peer on its own host: others reach what it listens on through the shaped link alone."""
        setting, listens, advertised = self._setting, self._free_ports(2)[0], self._free_ports(2)[0]
        self.internet.host(name, setting.shape)
        for port in range(2):  # the ring's, and beside it that of the state
            self.internet.open(name, listens + port, advertised=advertised + port)
        run = setting.directory / name
        own = {
            "BLOOMERY_PEER": name,
            "BLOOMERY_COORDINATOR": self.endpoint,
            "BLOOMERY_LISTEN": f"127.0.0.1:{listens}",
            "BLOOMERY_ADVERTISE": f"127.0.0.1:{advertised}",
        }
        return ManagedProcess(
            name=name,
            command=_bloomery(
                "peer",
                setting.recipe,
                "--run",
                str(run),
                "--nproc",
                str(setting.ranks),
                "--plain",
                f"elastic.peers={setting.peers}",
                f"checkpoint.memory_directory={self._memory / name}",
                *setting.overrides,
            ),
            environment=self._environment | own,
            log=setting.directory / "logs" / f"{name}.log",
        )


def _bloomery(*words: str) -> list[str]:
    return [sys.executable, "-m", "bloomery", *words]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError):
        return False
    return True


def _wait_for_port(port: int, actor: ManagedProcess) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            if not actor.alive:
                break
            time.sleep(0.05)
        else:
            return
    raise PeerError("The coordinator of the rehearsal did not come up.", remedy=f"What it said: {actor.log}.")


def _memory_directory(mark: str) -> Path:
    """A place in memory of this rehearsal's own, where what remains at the end is seen."""
    shared = Path("/dev/shm")
    directory = (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"bloomery-rehearsal-{mark}"
    directory.mkdir(mode=0o700)
    return directory
