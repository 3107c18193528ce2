"""Simulates a run between peers at several sites: inner steps, all_reduce, and peers that leave and join."""

from __future__ import annotations

import math
from random import Random

from bloomery.plan.simulate.scenario import TRAINING, HoursLedger, Life, Scenario, ScenarioPeers

SLOWER, RING, OUTER = "waiting for slower peers", "all-reduce", "outer step"
DETECTION, JOINING, NOBODY = "not noticed yet", "waiting for a joiner", "no peer is there"
CAUSES = (TRAINING, SLOWER, RING, OUTER, DETECTION, JOINING, NOBODY)

S_PER_HOUR, HOURS_PER_DAY = 3600.0, 24.0


def simulate_peers(scenario: Scenario, *, seed: int) -> Life:
    """Simulate one life of a run. Peers leave and crash at constant rates each, and come back."""
    assert scenario.elastic is not None, "checked when it was loaded"
    run = _PeersState(scenario, scenario.elastic, Random(seed))
    while not run.account.is_over:
        run.make_round()
    return run.account.close()


def speeds_of(elastic: ScenarioPeers) -> tuple[float, ...]:
    """Return each peer's speed, evenly spread around 1."""
    if elastic.peers == 1:
        return (1.0,)
    step = 2.0 * elastic.speed_spread / (elastic.peers - 1)
    return tuple(1.0 - elastic.speed_spread + index * step for index in range(elastic.peers))


def all_reduce_s(elastic: ScenarioPeers, *, peers: int) -> float:
    """Return the seconds of averaging the whole model once; each fragment adds the latency."""
    return sum(stages_s(elastic, peers=peers))


def stages_s(elastic: ScenarioPeers, *, peers: int) -> tuple[float, ...]:
    """Return the seconds of each stage of averaging the whole model, which a crash begins again.

    One ring has one stage. Rings of rings have three: each ring reduces, so that a member holds the sum of
    one piece; the members with equal pieces all_reduce them, in rings of one of each; each ring gathers.
    """
    parts, groups = elastic.fragments, min(elastic.groups, peers)
    members = -(-peers // groups)

    def ring(elements: float, ranks: int) -> float:
        return parts * ring_s(
            elements / parts,
            ranks=ranks,
            bits=elastic.bits,
            bandwidth_mbit_s=elastic.bandwidth_mbit_s,
            latency_ms=elastic.latency_ms,
        )

    if groups == 1 or members == 1:
        return (ring(elastic.parameters, peers),)
    half = ring(elastic.parameters, members) / 2
    return half, ring(elastic.parameters / members, groups), half


def ring_s(
    elements: float, *, ranks: int, bits: float, bandwidth_mbit_s: float, latency_ms: float = 0.0
) -> float:
    """Return the seconds of a ring all_reduce: 2(n−1)/n of the bytes over each link, in 2(n−1) hops.

    (Patarasuk and Yuan, 2009.)

    elements: elements of the reduced tensor.
    ranks: members of the ring, the n of the formula.
    bits: bits of one element on the wire.
    bandwidth_mbit_s: bandwidth of the slowest link in one direction, in 10⁶ bit/s.
    latency_ms: latency of one hop in one direction.
    """
    if ranks == 1:
        return 0.0
    transfer = 2.0 * (ranks - 1) / ranks * elements * bits / (bandwidth_mbit_s * 1e6)
    return transfer + 2.0 * (ranks - 1) * latency_ms / 1e3


class _PeersState:
    """The peers that are present, and when the others come back (hours since the start)."""

    def __init__(self, scenario: Scenario, elastic: ScenarioPeers, random: Random) -> None:
        self.account = HoursLedger(end=scenario.hours)
        self._elastic, self._random = elastic, random
        self._speeds = speeds_of(elastic)
        self._fetching = 0.0 if elastic.join_blocks else elastic.join_s / S_PER_HOUR
        self._present = set(range(elastic.peers))
        self._back: dict[int, float] = {}

    def make_round(self) -> None:
        """Simulate one round: what each peer computes, the wait for the slowest, and the averaging."""
        self._take_joiners()
        if not self._present:
            self.account.spend_until(min(self._back.values()) + self._fetching, NOBODY)
            return
        elastic, account = self._elastic, self.account
        times = [elastic.inner_steps * elastic.step_s / self._speeds[peer] for peer in self._present]
        mean, slowest = sum(times) / len(times), max(times)
        self._lose_some(slowest / S_PER_HOUR, in_ring=False)
        account.spend(mean / S_PER_HOUR, TRAINING)
        account.spend((slowest - mean) / S_PER_HOUR, SLOWER)
        self._average(hidden_s=slowest if elastic.overlap else 0.0)
        account.spend(elastic.outer_s / S_PER_HOUR, OUTER)
        account.count("rounds")

    def _average(self, *, hidden_s: float) -> None:
        """Simulate the all_reduce of the peers that are left. A crash during it is detected, and it begins
        again.
        """
        stage = 0
        while self._present:
            stages = stages_s(self._elastic, peers=len(self._present))
            if stage >= len(stages):
                return
            seconds = stages[stage]
            if not self._lose_some(seconds / S_PER_HOUR, in_ring=True):
                self.account.spend(max(0.0, seconds - hidden_s) / S_PER_HOUR, RING)
                hidden_s, stage = max(0.0, hidden_s - seconds), stage + 1
                continue
            self.account.count("rings begun again")
            self.account.spend(self._random.random() * seconds / S_PER_HOUR, RING)
            self.account.spend(self._elastic.detection_s / S_PER_HOUR, DETECTION)

    def _lose_some(self, hours: float, *, in_ring: bool) -> bool:
        """Let peers leave and crash within `hours`, and return whether one crashed."""
        crashed = False
        for peer in sorted(self._present):
            crashes = self._happens(self._elastic.crashes_per_peer_day, hours)
            # A peer that leaves in order first finishes the all_reduce that is under way.
            leaves = not in_ring and self._happens(self._elastic.leaves_per_peer_day, hours)
            if crashes or leaves:
                self._present.discard(peer)
                away = self._random.expovariate(1.0) * self._elastic.absent_hours
                self._back[peer] = self.account.now + hours + away
                self.account.count("crashes" if crashes else "leaves")
                crashed = crashed or crashes
        return crashed

    def _take_joiners(self) -> None:
        """Let peers that came back take part once they have the state."""
        elastic = self._elastic
        ready = [peer for peer, back in self._back.items() if back + self._fetching <= self.account.now]
        for peer in ready:
            del self._back[peer]
            self._present.add(peer)
            self.account.count("joins")
        if ready and elastic.join_blocks and len(self._present) > len(ready):
            self.account.spend(elastic.join_s / S_PER_HOUR, JOINING)

    def _happens(self, per_day: float, hours: float) -> bool:
        return per_day > 0.0 and self._random.random() < -math.expm1(-per_day * hours / HOURS_PER_DAY)
