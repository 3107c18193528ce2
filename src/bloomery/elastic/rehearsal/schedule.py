"""What goes wrong when: a seeded list of faults, so that a rehearsal can be repeated."""

from __future__ import annotations

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
"""After these the peer is gone until it is started again."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong. after_s: since the one before. seconds: how long it lasts; 0: an instant."""

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
    """Draw `faults` faults, at exponential intervals, each of an equally likely kind and peer.

    Lengths are uniform up to `longest_s`. The same arguments give the same list on any machine.
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
