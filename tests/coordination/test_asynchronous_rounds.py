"""Rounds that wait for nobody beyond a quorum, in virtual time: whose work they cost, and what counts."""

import math

import msgspec
import pytest
from tests.coordination.round_world import World, world
from tests.coordination.test_whole_runs import Counted

from bloomery.coordination.attempts import gather_offers
from bloomery.coordination.decide import RequestFlush
from bloomery.data.position import total
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.records import Ready

STEPS, OVERLAP, RING_S, TICK_S = 50, 20, 3.0, 0.5


class Trainer:
    """A peer that takes `step_s` for a step and acts between two steps, as ranks do."""

    def __init__(self, run: World, name: str, *, step_s: float, overlap: int) -> None:
        self.run, self.peer, self.step_s, self.overlap = run, run.peers[name], step_s, overlap
        self.boundary_s, self.made, self.ahead, self.total = run.now + step_s, 0, 0, 0
        self.round, self.is_offered, self.is_hurried = self.peer.round, False, False
        self.ring_from_s: float | None = None

    def tick(self) -> None:
        """Follow the run at a moment of virtual time."""
        self.peer.see()
        if isinstance(self.peer.decide(), RequestFlush):
            self.is_hurried = True
        if self.peer.round != self.round:
            commit = self.peer.snapshot.commit
            is_member = self.peer.name in commit.members
            self.made = self.ahead if is_member else self.made + self.ahead
            self.round, self.ahead, self.is_offered, self.is_hurried = self.peer.round, 0, False, False
        self._begin_ring()
        if self.run.now >= self.boundary_s:
            self._end_step()
        if self.ring_from_s is not None and self.run.now >= self.ring_from_s + RING_S:
            self.peer.reduce()
        self.peer.see()
        self.peer.act()

    @property
    def waits(self) -> bool:
        """Whether it makes no step until the round is decided."""
        was_hurried = self.made < STEPS
        return self.is_offered and (self.ahead >= self.overlap or was_hurried)

    def _end_step(self) -> None:
        if not self.waits:
            self.total += 1
            self.made, self.ahead = self.made + (not self.is_offered), self.ahead + self.is_offered
            if not self.is_offered and (self.made >= STEPS or self.is_hurried):
                self._offer()
        self.boundary_s = self.run.now + (self.step_s if not self.waits else TICK_S)

    def _offer(self) -> None:
        self.peer.work(self.made, kept=self.overlap * self.run.samples[self.peer.name])
        key = self.run.keys.ready(self.run.newest + 1, self.peer.name)
        item = self.run.store.items.get(key)
        if item is None:
            return
        self.is_offered = True
        ready = msgspec.structs.replace(
            decode(item.value, Ready), step_s=self.step_s, norm=0.01 * math.sqrt(self.made)
        )
        self.run.put(self.peer, key, encode_text(ready))

    def _begin_ring(self) -> None:
        """Begin the ring of an attempt between two steps, and no sooner than the last member does."""
        attempt = self.peer.attempt()
        if attempt is None or attempt.epoch in self.peer.reported:
            self.ring_from_s = None
        elif self.ring_from_s is None and (self.run.now >= self.boundary_s or self.waits):
            self.ring_from_s = self.run.now


def trained(*, quorum: int, slow_s: float, rounds: int = 7) -> tuple[Counted, dict[str, Trainer], float]:
    run = world(
        samples=dict.fromkeys("abcd", 2),
        inner_steps=STEPS + OVERLAP,
        overlap_steps=OVERLAP,
        quorum=quorum,
        peers=4,
        minimum_peers=2,
        patience_s=0.0,  # the least that synchronous rounds can wait
    )
    run.settle(1)
    began_s, spent = run.now, Counted(run)
    trainers = {
        name: Trainer(run, name, step_s=slow_s if name == "d" else 1.0, overlap=OVERLAP) for name in "abcd"
    }
    goal = run.newest + rounds
    while run.newest < goal:
        for trainer in trainers.values():
            trainer.tick()
        spent.check()
        run.now += TICK_S
        assert run.now < 10_000, [trainer.peer.decide() for trainer in trainers.values()]
    return spent, trainers, run.now - began_s


@pytest.mark.parametrize("slow_s", [3.0, 10.0, 130.0])
def test_a_slow_peer_costs_the_others_at_most_three_hundredths_of_their_work(slow_s):
    spent, trainers, seconds = trained(quorum=3, slow_s=slow_s)
    for name in "abc":
        assert trainers[name].total >= 0.97 * seconds - 2, (name, trainers[name].total, seconds)
    averaged = [commit for commit in spent.run.commits if commit.members]
    assert all({"a", "b", "c"} <= set(commit.members) for commit in averaged)
    assert not any(commit.left_out for commit in averaged)
    with_slow = [commit for commit in averaged if "d" in commit.members]
    assert with_slow, "its steps are offered sooner or later"


def test_synchronous_rounds_wait_for_such_a_peer():
    _, trainers, seconds = trained(quorum=0, slow_s=130.0)
    assert trainers["a"].total < 0.9 * seconds


def test_a_late_peer_brings_all_its_steps_since_its_last_part_with_their_tokens():
    spent, trainers, _ = trained(quorum=3, slow_s=27.0, rounds=8)
    commits = [commit for commit in spent.run.commits if commit.members]
    brought, made_since = [], 0
    for commit in commits:
        if "d" in commit.members:
            brought.append((spent.readies[commit.round, "d"], made_since))
            made_since = 0
        else:
            made_since += 1
    late = [ready.steps for ready, missed in brought if missed]
    assert late and max(late) > 60 / 27 + 1  # more than fit into one round
    assert all(ready.tokens == 2 * ready.steps == total(ready.spent) for ready, _ in brought)
    still_to_come = trainers["d"].made + trainers["d"].ahead
    assert sum(ready.steps for ready, _ in brought) + still_to_come >= trainers["d"].total


def test_a_window_lasts_half_of_the_overlap_of_the_fastest_and_at_most_the_grace():
    run = world(
        samples=dict.fromkeys("abc", 2), quorum=2, overlap_steps=OVERLAP, inner_steps=STEPS, grace_s=60.0
    )
    run.settle(1)
    for name, step_s in (("a", 1.0), ("b", 4.0)):
        trainer = Trainer(run, name, step_s=step_s, overlap=OVERLAP)
        trainer.made = STEPS
        run.peers[name].see()
        trainer._offer()
        peer = run.peers["a"]
        peer.see()
        gathering = gather_offers(
            peer.snapshot, peer.snapshot.readies, me="a", settings=run.settings, now=run.now
        )
        if name == "a":
            assert gathering.why == "1 of a quorum of 2 are ready" and gathering.until_s is None
    assert gathering.whom == ("c",) and gathering.until_s == run.now + 10.0
    late = gather_offers(
        peer.snapshot, peer.snapshot.readies, me="a", settings=run.settings, now=run.now + 10.0
    )
    assert late.why == "" and not late.hurries
    slow = run.peers["c"]
    slow.see()
    assert gather_offers(
        slow.snapshot, slow.snapshot.readies, me="c", settings=run.settings, now=run.now
    ).hurries
