"""Runs a chaos scenario: a coordinator, peer processes, shaped links, and injected faults."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bloomery.chaos.audit import read_commits
from bloomery.chaos.faults import Fault, FaultInjector
from bloomery.chaos.processes import ManagedProcess, kill_marked, marked
from bloomery.chaos.shaped_network import Shape, ShapedNetwork
from bloomery.config.trial import WITHIN_ITS_DIRECTORY
from bloomery.coordination.etcd_process import free_ports
from bloomery.errors import PeerError
from bloomery.protocol.records import Commit

log = logging.getLogger(__name__)

MARK = "BLOOMERY_SCENARIO"
"""Every process of a scenario has this environment variable, so that processes left running can be found."""
TICK_S = 0.2
READY_S = 60.0  # for the coordinator to come up
PAIRS_TRIED = 100  # of free ports, before it fails


@dataclass(frozen=True, kw_only=True)
class ScenarioSettings:
    """The settings of one scenario.

    recipe, overrides: the recipe of every peer, and the settings that override it.
    run: the name of the run in the recipe.
    peers: how many peers there are.
    shape: the link of each peer.
    directory: where each peer's run directory and the logs of all processes are written.
    faults: the faults in order; (): none.
    back_s: seconds after which an ended peer is started again.
    seed: of the shaped links and of the choice of ranks that faults hit.
    ranks: how many ranks each peer has.
    deadline_s: seconds that the whole scenario may take.
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
class InjectedFault:
    """A fault that was due.

    at_s: when it was injected, in seconds since the start.
    done: whether it took effect; False: its target did not run at the moment.
    """

    fault: Fault
    at_s: float
    done: bool


@dataclass(kw_only=True)
class ScenarioOutcome:
    """How a scenario ended.

    seconds: how long it took.
    statuses: the exit status of each peer; None: it has not ended.
    commits: the run's commits by round.
    injected: the faults that were due, in order.
    leftover: processes and files in memory that remained after the end.
    bytes_between: the bytes to and from each peer.
    """

    seconds: float
    statuses: Mapping[str, int | None]
    commits: Sequence[Commit]
    injected: Sequence[InjectedFault]
    leftover: Sequence[str]
    bytes_between: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a peer ended with an exit status other than 0, or something was left behind."""
        return any(self.statuses.values()) or bool(self.leftover)


def run_scenario(
    settings: ScenarioSettings, *, watch: Callable[[float, Sequence[InjectedFault]], None]
) -> ScenarioOutcome:
    """Run a scenario to its end. Its processes are ended however it ends.

    watch: called every fraction of a second, with the seconds since the start and the faults so far.
    Raises PeerError when the coordinator does not come up, or the deadline passes.
    """
    begun, mark = time.monotonic(), secrets.token_hex(8)
    memory = _memory_directory(mark)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        # What an interruption kept from being ended, such as a process that had just been started.
        stack.callback(kill_marked, MARK, mark)
        with ExitStack() as acting:
            scenario_run = _ScenarioRun(settings, mark, memory, acting)
            injected = scenario_run.run(begun, watch)
            statuses = {name: process.status for name, process in scenario_run.peers.items()}
            traffic = {name: scenario_run.internet.traffic(name) for name in scenario_run.peers}
            commits = read_commits(scenario_run.endpoint, settings.run)
        leftover = _left_running(mark)
        leftover += [str(path) for path in sorted(memory.rglob("*")) if path.is_file()]
    return ScenarioOutcome(
        seconds=time.monotonic() - begun,
        statuses=statuses,
        commits=commits,
        injected=injected,
        leftover=leftover,
        bytes_between=traffic,
    )


def peer_names(count: int) -> tuple[str, ...]:
    """Return the names of the peers of a scenario, in order."""
    return tuple(f"peer{index}" for index in range(count))


class _ScenarioRun:
    """The coordinator, the peers and the shaped network of one scenario.

    mark: the value of MARK in the environment of all processes.
    memory: the directory in memory for the peers' checkpoints.
    stack: ends the processes and the network when it is closed.
    """

    def __init__(self, settings: ScenarioSettings, mark: str, memory: Path, stack: ExitStack) -> None:
        self._settings, self._memory = settings, memory
        # More threads than cores would wait for one another by spinning, and make a step ten times as long.
        threads = max(1, len(os.sched_getaffinity(0)) // (settings.peers * settings.ranks))
        self._environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {MARK: mark}
        self.internet = stack.enter_context(ShapedNetwork(seed=settings.seed))
        self._ports = set[int]()
        (port,) = self._free_ports(1)
        self.coordinator = stack.enter_context(
            ManagedProcess(
                name="coordinator",
                command=_bloomery(
                    "coordinate",
                    "--data",
                    str(settings.directory / "coordinator"),
                    "--listen",
                    f"127.0.0.1:{port}",
                ),
                environment=self._environment,
                log=settings.directory / "logs" / "coordinator.log",
            )
        )
        self.coordinator.start()
        _wait_for_port(port, self.coordinator)
        self.endpoint = f"http://127.0.0.1:{port}"
        names = peer_names(settings.peers)
        self.peers = {name: stack.enter_context(self._peer(name)) for name in names}
        stack.callback(self._ask_to_leave)  # all at once; each of them is then waited for in turn

    def run(
        self, begun: float, watch: Callable[[float, Sequence[InjectedFault]], None]
    ) -> list[InjectedFault]:
        """Start the peers, inject the faults in their order, and wait until every peer has ended.

        begun: the time.monotonic() at which the scenario began.
        """
        settings, injected = self._settings, list[InjectedFault]()
        injector = FaultInjector(
            peers=self.peers,
            coordinator=self.coordinator,
            internet=self.internet,
            back_s=settings.back_s,
            seed=settings.seed,
        )
        for process in self.peers.values():
            process.start()
        faults = iter(settings.faults)
        fault, due = next(faults, None), 0.0
        if fault is not None:
            due = time.monotonic() + fault.after_s
        while True:
            now = time.monotonic()
            if now - begun > settings.deadline_s:
                raise PeerError(
                    f"The scenario did not end within {settings.deadline_s:.0f} s.",
                    remedy=f"The output of all processes is in {settings.directory / 'logs'}.",
                )
            injector.revert_due()
            if self._is_over(injector):
                break
            if fault is not None and now >= due:
                done = injector.inject(fault)
                log.info("%s%s", fault, "" if done else " (its target did not run)")
                injected.append(InjectedFault(fault=fault, at_s=now - begun, done=done))
                fault = next(faults, None)
                due = now + (fault.after_s if fault else 0.0)
            watch(now - begun, injected)
            time.sleep(min(TICK_S, injector.next_s, max(0.0, due - now) if fault else TICK_S))
        injector.revert_all()
        for process in self.peers.values():
            process.wait(settings.deadline_s)
        return injected

    def _ask_to_leave(self) -> None:
        for process in self.peers.values():
            process.signal(signal.SIGCONT)
            process.leave()

    def _is_over(self, injector: FaultInjector) -> bool:
        """Return whether no peer runs and none will be started again.

        That is so when some peer has ended with status 0, for it has seen the run finish, or when no fault is
        left to be undone. A peer that was asked to leave also ends with status 0, so it is not counted.
        """
        if any(process.alive for process in self.peers.values()):
            return False
        by_themselves = (process.status for name, process in self.peers.items() if name not in injector.away)
        return 0 in by_themselves or injector.next_s == float("inf")

    def _free_ports(self, count: int) -> list[int]:
        """Return `count` neighbouring free ports, none of which this scenario has taken before."""
        for _ in range(PAIRS_TRIED):
            (first,) = free_ports(1)
            ports = list(range(first, first + count))
            if self._ports.isdisjoint(ports) and all(map(_is_free, ports)):
                self._ports.update(ports)
                return ports
        raise PeerError(f"No {count} free ports beside each other were found on 127.0.0.1.")

    def _peer(self, name: str) -> ManagedProcess:
        """Return a peer that the others reach only through its shaped link, as if it had its own host."""
        settings, listens, advertised = self._settings, self._free_ports(2)[0], self._free_ports(2)[0]
        self.internet.host(name, settings.shape)
        for port in range(2):  # the port of the ring, and the next one, of the state server
            self.internet.open(name, listens + port, advertised=advertised + port)
        run = settings.directory / name
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
                settings.recipe,
                "--run",
                str(run),
                "--nproc",
                str(settings.ranks),
                "--plain",
                f"elastic.peers={settings.peers}",
                f"checkpoint.memory_directory={self._memory / name}",
                *settings.overrides,
                *WITHIN_ITS_DIRECTORY,
            ),
            environment=self._environment | own,
            log=settings.directory / "logs" / f"{name}.log",
        )


def _bloomery(*words: str) -> list[str]:
    return [sys.executable, "-m", "bloomery", *words]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError):
        return False
    return True


def _wait_for_port(port: int, process: ManagedProcess) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            if not process.alive:
                break
            time.sleep(0.05)
        else:
            return
    raise PeerError(
        "The coordinator of the scenario did not come up.", remedy=f"Its output is in {process.log}."
    )


def _left_running(mark: str) -> list[str]:
    """Return in words the processes of a scenario that still run."""
    told = []
    for process in marked(MARK, mark):
        with suppress(psutil.NoSuchProcess):  # it ended while it was looked at
            told.append(f"process {process.pid} ({' '.join(process.cmdline())[:80]})")
    return told


def _memory_directory(mark: str) -> Path:
    """Make a directory in memory that only this scenario uses, so that files it leaves behind are seen."""
    shared = Path("/dev/shm")
    directory = (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"bloomery-scenario-{mark}"
    directory.mkdir(mode=0o700)
    return directory
