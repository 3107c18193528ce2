"""The faults of a chaos run: draws a repeatable list of them from a seed, injects them, and undoes them.

`parse_rate`, `parse_seconds` and `parse_share` parse what people write on the command line: 200mbit, 50ms,
0.1%.
"""

from __future__ import annotations

import heapq
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from bloomery.chaos.processes import ManagedProcess
from bloomery.chaos.shaped_network import ShapedNetwork

KINDS = {
    "kill-rank": "kill -9 of one training process",
    "kill-peer": "kill -9 of a peer's parent and its ranks at once, as when a host vanishes",
    "stop-rank": "SIGSTOP of one training process, SIGCONT after a while",
    "stop-peer": "SIGSTOP of a peer's parent and its ranks, SIGCONT after a while",
    "leave": "SIGTERM of a peer's parent: it saves, leaves the run and exits",
    "cut": "all traffic of a peer is dropped silently for a while; its connections stay open",
    "sever": "every connection of a peer is reset",
    "slow": "everything to and from a peer is delayed for a while",
    "corrupt": "one bit of what next goes to a peer is flipped",
    "kill-coordinator": "kill -9 of the coordinator, started again after a while",
}
ENDING = frozenset({"kill-rank", "kill-peer", "leave"})
"""The kinds of faults that end the peer until it is started again."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a schedule.

    after_s: seconds since the fault before, or since the start of the run.
    kind: one of KINDS.
    peer: the name of the peer it hits; "" for a fault of the coordinator.
    seconds: how long the fault lasts; 0: it has no duration.
    """

    after_s: float
    kind: str
    peer: str
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{' of ' + self.peer if self.peer else ''}{lasting}"


def schedule(
    *,
    seed: int,
    peers: Sequence[str],
    faults: int,
    mean_gap_s: float,
    longest_s: float,
    kinds: Sequence[str] = tuple(KINDS),
) -> tuple[Fault, ...]:
    """Draw `faults` faults at exponentially distributed intervals, each of an equally likely kind and peer.

    The same arguments give the same schedule on any machine.

    mean_gap_s: the mean seconds between two faults.
    longest_s: faults last from a fifth of it to the whole of it, uniformly distributed.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not peers or faults < 0 or mean_gap_s <= 0 or longest_s <= 0:
        raise ValueError(f"no such schedule: kinds {unknown}, {len(peers)} peers, {faults} faults")
    random = Random(seed)
    drawn = []
    for _ in range(faults):
        kind, peer = random.choice(list(kinds)), random.choice(list(peers))
        lasts = kind not in ENDING and kind not in {"sever", "corrupt"}
        drawn.append(
            Fault(
                after_s=random.expovariate(1 / mean_gap_s),
                kind=kind,
                peer="" if kind == "kill-coordinator" else peer,
                seconds=random.uniform(0.2, 1.0) * longest_s if lasts else 0.0,
            )
        )
    return tuple(drawn)


RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"\d+(?:\.\d+)?"


def parse_rate(text: str) -> float:
    """Parse '200mbit' into bytes per second; '0' gives 0, which means no limit. Raises ValueError."""
    return _of(text, RATES, "200mbit, 1gbit, or 0 for no limit") / 8


def parse_seconds(text: str) -> float:
    """Parse '50ms' into seconds. Raises ValueError."""
    return _of(text, TIMES, "50ms, 0.2s, or 0")


def parse_share(text: str) -> float:
    """Parse '0.1%' or '0.001' into 0.001. Raises ValueError."""
    match = re.fullmatch(rf"({_NUMBER})(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else 1.0
    if value >= 1:
        raise ValueError(f"{text!r} is not a share below 1: write 0.1% or 0.001")
    return value


def _of(text: str, units: dict[str, float], understood: str) -> float:
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z]*?)(?:/s|ps)?", text.strip().lower())
    if match and float(match[1]) == 0:
        return 0.0
    if not match or match[2] not in units:
        raise ValueError(f"{text!r} is not understood: write {understood}")
    return float(match[1]) * units[match[2]]


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
        """Start a peer again once it has ended; a peer that is still ending is checked again after back_s.

        When the run is over by then, the peer notices that and ends.
        """
        if process.alive:
            self._later(self._back_s, lambda: self._bring_back(process))
        else:
            self._away.discard(process.name)
            process.start()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._pending, _PendingRevert(self._clock() + seconds, what))
