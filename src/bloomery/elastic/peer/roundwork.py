"""A peer in the rounds: what was committed is told to the ranks, what they bring is offered, rings are
begun and called off, and what is decided is proposed.

Each method looks at the newest snapshot and does what is still to be done; called again, it does nothing
twice.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace
from statistics import median

from bloomery.elastic.control import rounds
from bloomery.elastic.control.codec import DONE, FAILED, READY
from bloomery.elastic.control.decision import Conclude, Decision, Hasten, Propose, TakeShare
from bloomery.elastic.control.etcd import Outcome
from bloomery.elastic.control.membership import Membership
from bloomery.elastic.control.snapshot import Snapshot
from bloomery.elastic.peer.means import Means
from bloomery.elastic.peer.presence import Presence
from bloomery.elastic.peer.ringing import Ringing, Stage, Trouble, Waits
from bloomery.elastic.peer.timeouts import ring_deadline_s
from bloomery.elastic.records import Attempt, Commit, Done, Failed
from bloomery.elastic.seam import Abort, Committed, Go, Hurry, Reduce

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_STEPS = 2.0
"""Usual steps that one step may take."""


class RoundWork:
    """held: (round, digest) of the state that the ranks hold; None while that is not known.

    overtaken: rounds that were committed without this peer since it came or was last in one.
    """

    def __init__(self, means: Means, presence: Presence, membership: Membership) -> None:
        self._means, self._presence, self._membership = means, presence, membership
        self.held: tuple[int, str] | None = None
        self.seen = -1
        self.overtaken = 0
        self._go_told: object = None
        self._offered: tuple[int, int] | None = None
        self._hurried = -1
        self._ringing: Ringing | None = None
        self._called_off = self._reported = 0
        self._trouble: Trouble | None = None
        self._done: tuple[int, str] | None = None
        self._acted: tuple[int, float] = (-1, 0.0)
        self._ring_seconds: deque[float] = deque(maxlen=32)

    @property
    def is_ringing(self) -> bool:
        """Whether an attempt is under way here."""
        return self._ringing is not None

    def follow(self, snapshot: Snapshot) -> None:
        """Tell the ranks what was committed since they were told last."""
        commit = snapshot.commit
        if commit is None or commit.round <= self.seen:
            return
        is_first, self.seen = self.seen < 0, commit.round
        included = self._done == (commit.epoch, commit.digest) and self._means.me in commit.members
        ringing, self._ringing = self._ringing, None
        if ringing is not None:
            went_well = included and ringing.attempt.epoch == commit.epoch
            if went_well:
                self._ring_seconds.append(time.monotonic() - ringing.reducing_s)
                ringing.end(went_well=True)
            else:
                self._call_off(ringing, "the round was decided without it")
        self._go_told, self._offered = None, None
        self._note(commit, included=included, ringing=ringing)
        if is_first:
            return  # ranks that have just come: what they hold says whether it is the run's
        self.overtaken = 0 if included else self.overtaken + 1
        self._means.handoff.tell(Committed(commit=commit, included=included))
        if included:
            self.held = (commit.round, commit.digest)
        elif commit.rewind_to is not None:
            self.held = None  # they say what they went back to

    def go(self, snapshot: Snapshot, decision: Decision) -> None:
        """Let the ranks begin, once they hold the right state and there is something to do."""
        commit, shares = snapshot.commit, snapshot.shares
        if commit is None or shares is None or self.held is None or self.held[1] != commit.digest:
            return
        if isinstance(decision, TakeShare) or not self._presence.is_listed(snapshot):
            return
        samples = shares.shares.get(self._means.me)
        if samples is None and self._means.settings.rounds.joins_within:
            return
        wanted = (shares.round, samples, self._presence.generation)
        if self._go_told == wanted or not shares.live:
            return
        if self._go_told is None:
            self._means.events.write("go", round=shares.round, newcomer=samples is None)
        self._go_told = wanted
        self._means.local.progress.expect(now=time.monotonic())
        self._means.handoff.tell(Go(shares=shares, samples=samples or ()))

    def offer(self, snapshot: Snapshot) -> None:
        """Offer what the ranks bring to the round."""
        ready, place = self._means.local.ready, (snapshot.round, self._presence.generation)
        if ready is None or ready.round != snapshot.round or self._offered == place:
            return
        if not self._presence.is_listed(snapshot):
            return
        self._offered = place
        if self._means.settings.overlaps:
            ready = replace(ready, step_s=self._means.local.progress.usual_step_s())
        key, text, round = self._means.keys.ready(ready.round, self._means.me), READY.text(ready), ready.round
        self._means.writer.write("ready", lambda: self._membership.offer(key, text, round=round))

    def ring(self, snapshot: Snapshot) -> None:
        """Begin the attempt under way, call off what is over, and report how it went."""
        attempt = self._my_attempt(snapshot)
        current = self._ringing
        if current is not None and (attempt is None or attempt.epoch != current.attempt.epoch):
            self._call_off(current, "the attempt is over")
            self._ringing = current = None
        if attempt is None:
            return
        if current is None and attempt.epoch > self._called_off:
            current = self._ringing = self._begin(attempt, snapshot)
        if current is not None and self._reported < attempt.epoch:
            self._watch(current, snapshot)

    def act(self, decision: Decision, snapshot: Snapshot, *, now: float) -> None:
        """Carry out what was decided, once for each snapshot."""
        if isinstance(decision, Hasten) and self._hurried < decision.round:
            self._hurried = decision.round
            self._means.handoff.tell(Hurry(round=decision.round))
        if not isinstance(decision, Propose | Conclude | TakeShare) or self._means.writer.is_at("decision"):
            return
        version, acted_s = self._acted
        if snapshot.version == version and now < acted_s + _AGAIN_S:
            return
        self._acted = (snapshot.version, now)
        self._means.writer.write("decision", lambda: self._propose(decision, snapshot), repeats=False)

    def stop(self) -> None:
        """Be out of the rounds until further notice."""
        if self._ringing is not None:
            self._call_off(self._ringing, "this peer is out of the round")
            self._ringing = None
        self._go_told = self._offered = None

    def _note(self, commit: Commit, *, included: bool, ringing: Ringing | None) -> None:
        events, me = self._means.events, self._means.me
        now = time.monotonic()
        events.write(
            "round",
            round=commit.round,
            epoch=commit.epoch,
            members=list(commit.members),
            included=included,
            ring_s=round(now - ringing.reducing_s, 4) if ringing else None,
            consumed=commit.position.consumed,
            digest=commit.digest,
            rewind_to=commit.rewind_to,
        )
        for peer, why in commit.left_out.items():
            kind = "parity" if "result differs" in why else "left_out"
            events.write(kind, round=commit.round, whom=peer, why=why)
            if peer == me:
                log.warning("left out of round %d: %s", commit.round, why)

    def _my_attempt(self, snapshot: Snapshot) -> Attempt | None:
        """The attempt under way, if this life of this peer is in it and its ranks are ready for it."""
        tried, me, ready = snapshot.tried, self._means.me, self._means.local.ready
        if tried is None or me not in tried.attempt.members or me not in snapshot.members:
            return None
        if tried.lives[tried.attempt.members.index(me)] != snapshot.members[me].life:
            return None
        return tried.attempt if ready is not None and ready.round == tried.attempt.round else None

    def _begin(self, attempt: Attempt, snapshot: Snapshot) -> Ringing | None:
        if any(name not in snapshot.members for name in attempt.members):
            return None  # somebody is gone already: another attempt follows
        limits, local = self._means.settings.timeouts, self._means.local
        usual = median(self._ring_seconds) if self._ring_seconds else 0.0
        # Where steps go on meanwhile, a member begins the ring between two, and is silent until then.
        steps_s = [
            snapshot.readies[name].ready.step_s for name in attempt.members if name in snapshot.readies
        ]
        stall_s = limits.stall_s + _STEPS * max(steps_s, default=0.0)

        def tell(rank: int, reduce: Reduce) -> None:
            self._means.handoff.tell(reduce, rank=rank)

        return Ringing(
            attempt,
            me=self._means.me,
            members={name: one.member for name, one in snapshot.members.items()},
            lanes=local.world or 1,
            streams=self._means.settings.streams,
            links=self._means.station.pool,
            waits=Waits(
                connect_s=limits.connect_s,
                stall_s=stall_s,
                ring_s=max(ring_deadline_s(limits, usual), 2 * stall_s),
            ),
            tell=tell,
            wake=self._means.poke,
        )

    def _watch(self, current: Ringing, snapshot: Snapshot) -> None:
        """Report a ring that is done, or that will not be."""
        epoch, local = current.attempt.epoch, self._means.local
        digest = local.digest_of(epoch)
        if digest and epoch > self._called_off:
            self._reported, self._done = epoch, (epoch, digest)
            done = Done(peer=self._means.me, round=current.attempt.round, epoch=epoch, digest=digest)
            key = self._means.keys.done(done.round, epoch, self._means.me)
            self._means.writer.write(
                "done", lambda: self._membership.offer(key, DONE.text(done), round=done.round)
            )
            return
        others = set(current.attempt.members) - {self._means.me}
        if others <= set(snapshot.dones):
            self._means.local.progress.expect(now=time.monotonic())  # all wait for this peer alone
        if epoch > self._called_off:
            self._trouble = self._trouble_with(current, snapshot)
            if self._trouble is not None:
                self._call_off(current, self._trouble.why)
        if self._trouble is not None and local.have_let_go(epoch):
            self._report(current.attempt, self._trouble)

    def _trouble_with(self, current: Ringing, snapshot: Snapshot) -> Trouble | None:
        attempt, local = current.attempt, self._means.local
        failed = local.failure_of(attempt.epoch)
        if failed is not None and failed.kind != "cancelled":
            return Trouble(kind=failed.kind, culprit=self._named(attempt, failed.culprit), why=failed.why)
        if current.trouble is not None:
            return current.trouble
        if local.digest_of(attempt.epoch) == "":
            return Trouble(kind="parity", culprit=None, why="the ranks of this peer differ after the ring")
        for other in snapshot.failures:
            if other.epoch == attempt.epoch and other.peer != self._means.me:
                return Trouble(kind="aborted", culprit=None, why=f"'{other.peer}' failed: {other.kind}")
        assert snapshot.tried is not None, "it is this attempt's snapshot"
        for peer, life in zip(attempt.members, snapshot.tried.lives, strict=True):
            if peer not in snapshot.members or snapshot.members[peer].life != life:
                return Trouble(kind="aborted", culprit=None, why=f"'{peer}' is gone")
        return None

    def _named(self, attempt: Attempt, culprit: str | None) -> str | None:
        """A ring knows its neighbours by direction alone."""
        place = attempt.members.index(self._means.me)
        if culprit == "next":
            return attempt.members[(place + 1) % len(attempt.members)]
        return attempt.members[place - 1] if culprit == "previous" else culprit

    def _call_off(self, current: Ringing, why: str) -> None:
        epoch = current.attempt.epoch
        if epoch <= self._called_off:
            return
        self._called_off = epoch
        log.info("epoch %d is called off: %s", epoch, why)
        self._means.handoff.tell(Abort(epoch=epoch, why=why))
        if current.stage is not Stage.OVER:
            current.end(went_well=False)

    def _report(self, attempt: Attempt, trouble: Trouble) -> None:
        self._reported = attempt.epoch
        failed = Failed(
            peer=self._means.me,
            round=attempt.round,
            epoch=attempt.epoch,
            kind=trouble.kind,
            culprit=trouble.culprit,
            why=trouble.why[:500],
        )
        if trouble.kind != "aborted":
            self._means.events.write("ring_failed", round=attempt.round, epoch=attempt.epoch, why=trouble.why)
        key = self._means.keys.failed(attempt.round, attempt.epoch, self._means.me)
        self._means.writer.write(
            "failed", lambda: self._membership.offer(key, FAILED.text(failed), round=failed.round)
        )

    def _propose(self, decision: Decision, snapshot: Snapshot) -> None:
        """On the writer's thread. A refusal is no error: somebody was quicker, or somebody left."""
        etcd, keys, me = self._means.etcd, self._means.keys, self._means.me
        if isinstance(decision, Propose):
            outcome = rounds.propose(etcd, keys, snapshot, decision)
        elif isinstance(decision, Conclude):
            outcome = rounds.conclude(etcd, keys, snapshot, decision)
        else:
            assert isinstance(decision, TakeShare), decision
            present = snapshot.members[me]
            rounds.join_shares(
                etcd,
                keys,
                round=decision.round,
                peer=me,
                life=present.life,
                samples=present.member.samples,
                settings=self._means.settings.rounds,
            )
            return
        if outcome is not Outcome.DONE:
            log.info("%s: %s", type(decision).__name__.lower(), outcome.value)
