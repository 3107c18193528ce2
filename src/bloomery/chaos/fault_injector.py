"""Injects faults into the processes and links of a chaos run, and undoes the temporary ones."""

from __future__ import annotations

import heapq
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from bloomery.chaos.fault_schedule import ENDING, Fault
from bloomery.chaos.processes import ManagedProcess
from bloomery.chaos.shaped_network import ShapedNetwork

log = logging.getLogger(__name__)

EXTRA_DELAY_S = 0.5
"""The delay in seconds that a `slow` fault adds to a peer's link."""


@dataclass(order=True)
class _PendingRevert:
    at: float
    what: Callable[[], None] = field(compare=False)


class FaultInjector:
    """Injects faults and undoes them when their time is over. Not thread-safe.

    peers: the processes of the peers by name.
    back_s: seconds after which an ended peer is started again.
    seed: decides which rank of a peer a fault hits.
    clock: replaced by tests.
    """

    def __init__(
        self,
        *,
        peers: Mapping[str, ManagedProcess],
        coordinator: ManagedProcess,
        internet: ShapedNetwork,
        back_s: float,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers, self._coordinator, self._internet = peers, coordinator, internet
        self._back_s, self._random, self._clock = back_s, Random(seed), clock
        self._pending: list[_PendingRevert] = []
        self._away: set[str] = set()

    def inject(self, fault: Fault) -> bool:
        """Inject a fault now. Returns False when nothing was done, for its target does not run now."""
        if fault.kind == "kill-coordinator":
            if not self._coordinator.alive:
                return False
            self._coordinator.kill()
            self._later(fault.seconds, self._coordinator.start)
            return True
        process = self._peers[fault.peer]
        if not process.alive:
            return False
        done = self._inject_into_peer(fault, process)
        if done and fault.kind in ENDING and process.name not in self._away:
            self._away.add(process.name)
            self._later(self._back_s, lambda: self._bring_back(process))
        return done

    def revert_due(self) -> None:
        """Undo the faults whose time is over, and start ended peers again. Must be called often."""
        while self._pending and self._pending[0].at <= self._clock():
            heapq.heappop(self._pending).what()

    def revert_all(self) -> None:
        """Undo all faults now. A peer that is still ending is not started again."""
        pending, self._pending = sorted(self._pending), []
        for revert in pending:
            revert.what()
        self._pending.clear()

    @property
    def next_s(self) -> float:
        """Seconds until the next fault is to be undone; infinite when no fault is in effect."""
        return max(0.0, self._pending[0].at - self._clock()) if self._pending else float("inf")

    @property
    def away(self) -> frozenset[str]:
        """The peers that a fault has ended and that are to be started again."""
        return frozenset(self._away)

    def _inject_into_peer(self, fault: Fault, process: ManagedProcess) -> bool:
        match fault.kind:
            case "kill-peer":
                process.kill()
            case "leave":
                process.leave()
            case "kill-rank" | "stop-rank":
                ranks = process.ranks()
                if not ranks:  # the peer has not started its ranks yet
                    return False
                victim = [self._random.choice(ranks)]
                if fault.kind == "kill-rank":
                    process.signal(signal.SIGKILL, whom=victim)
                else:
                    process.signal(signal.SIGSTOP, whom=victim)
                    self._later(fault.seconds, lambda: process.signal(signal.SIGCONT, whom=victim))
            case "stop-peer":
                family = process.family()
                process.signal(signal.SIGSTOP, whom=family)
                self._later(fault.seconds, lambda: process.signal(signal.SIGCONT, whom=family))
            case "cut":
                self._internet.cut(process.name, fault.seconds)
            case "slow":
                self._internet.slow(process.name, EXTRA_DELAY_S, lasting=fault.seconds)
            case "sever":
                self._internet.sever(process.name)
            case "corrupt":
                self._internet.corrupt(process.name)
            case _:
                raise ValueError(f"no such fault: {fault.kind!r}")
        return True

    def _bring_back(self, process: ManagedProcess) -> None:
        """Start a peer again once it has ended; a peer that is still ending is looked at again after back_s.

        When the run is over by then, the peer notices that and ends.
        """
        if process.alive:
            self._later(self._back_s, lambda: self._bring_back(process))
        else:
            self._away.discard(process.name)
            process.start()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._pending, _PendingRevert(self._clock() + seconds, what))
