"""Draws a repeatable list of faults from a seed, and parses rates, times and shares as people write them.

`rate_bytes_s`, `seconds` and `share` parse what people write on the command line: 200mbit, 50ms, 0.1%.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

KINDS = {
    "kill-rank": "kill -9 of one training process",
    "kill-peer": "kill -9 of a peer's parent and its ranks at once, as when a host vanishes",
    "stop-rank": "SIGSTOP of one training process, SIGCONT after a while",
    "stop-peer": "SIGSTOP of a peer's parent and its ranks, SIGCONT after a while",
    "leave": "SIGTERM of a peer's parent: it says goodbye",
    "cut": "no byte to or from a peer for a while, and nobody is told",
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


def rate_bytes_s(text: str) -> float:
    """Parse '200mbit' into bytes a second; '0' gives 0, which means no limit. Raises ValueError."""
    return _of(text, RATES, "200mbit, 1gbit, or 0 for no limit") / 8


def seconds(text: str) -> float:
    """Parse '50ms' into seconds. Raises ValueError."""
    return _of(text, TIMES, "50ms, 0.2s, or 0")


def share(text: str) -> float:
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
