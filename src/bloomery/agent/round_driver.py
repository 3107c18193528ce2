"""Drives a peer through the rounds: sends its ranks StartRound, offers their part, runs attempts, commits.

Each method compares the newest snapshot with what it has done already, and does the rest; called again with
the same snapshot it does nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from statistics import median

import msgspec

from bloomery.agent.agent_context import AgentContext
from bloomery.agent.registration import Registration
from bloomery.agent.ring_attempt import AttemptFailure, AttemptStage, AttemptTimeouts, RingAttempt
from bloomery.agent.state_sync import KeptAverages
from bloomery.agent.timeouts import ring_deadline_s
from bloomery.coordination import transactions
from bloomery.coordination.decide import CommitRound, Decision, Propose, RequestFlush, TakeShare
from bloomery.coordination.eligibility import newcomer_steps, norm_limit
from bloomery.coordination.etcd import TransactionResult
from bloomery.coordination.membership import Membership
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Ranges
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.rank_messages import Abort, Committed, FlushRound, KeepAverage, Reduce, StartRound
from bloomery.protocol.records import Attempt, Commit, Done, Failed

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_STEPS = 2.0
"""The usual step times that are added to stall_s where steps overlap the ring."""


class RoundDriver:
    """Drives one peer through the rounds of its run.

    held: (round, digest) of the state that the ranks hold; None while that is not known.
    seen: the newest committed round that the ranks were told of; -1 while there is none.
    overtaken: how many rounds were committed without this peer since it joined or was last included in one.

    averages: keeps the averages of rounds that others missed; None: this peer keeps none.
    """

    def __init__(
        self,
        context: AgentContext,
        registration: Registration,
        membership: Membership,
        averages: KeptAverages | None = None,
    ) -> None:
        self._context, self._registration, self._membership = context, registration, membership
        self._averages = averages
        self.held: tuple[int, str] | None = None
        self.seen = -1
        self.overtaken = 0
        self._go_told: tuple[int, Ranges | None, int] | None = None
        self._offered: tuple[int, int] | None = None
        self._flushed_round = -1
        self._ringing: RingAttempt | None = None
        self._called_off = self._reported = 0
        self._failure: AttemptFailure | None = None
        self._done: tuple[int, str] | None = None
        self._acted: tuple[int, float] = (-1, 0.0)
        self._ring_seconds: deque[float] = deque(maxlen=32)

    @property
    def is_ringing(self) -> bool:
        """Return whether this peer takes part in an attempt now."""
        return self._ringing is not None

    def follow(self, snapshot: RunSnapshot) -> None:
        """Tell the ranks of the newest commit, if they have not been told of it."""
        commit = snapshot.commit
        if commit is None or commit.round <= self.seen:
            return
        before, self.seen = self.seen, commit.round
        is_first = before < 0
        included = self._done == (commit.epoch, commit.digest) and self._context.me in commit.members
        ringing, self._ringing = self._ringing, None
        if ringing is not None:
            went_well = included and ringing.attempt.epoch == commit.epoch
            if went_well:
                self._ring_seconds.append(time.monotonic() - ringing.reducing_s)
                ringing.end(went_well=True)
            else:
                self._call_off(ringing, "the round was decided without it")
        self._go_told, self._offered = None, None
        self._note(commit, snapshot, included=included, ringing=ringing)
        if is_first:
            return  # ranks that have just started report what they hold, and the agent compares that
        # On a busy machine several commits may have arrived since the last snapshot.
        self.overtaken = 0 if included else self.overtaken + commit.round - before
        if included:
            self._keep_average(commit, snapshot)
        self._context.rank_server.send(Committed(commit=commit, included=included))
        if included:
            self.held = (commit.round, commit.digest)
        elif commit.rewind_to is not None:
            self.held = None
            self._context.local.forget_states()  # so that they report the state again, even an unchanged one

    def _keep_average(self, commit: Commit, snapshot: RunSnapshot) -> None:
        """Have the ranks keep the average of this round, if a listed peer was not in it."""
        if self._averages is None:
            return
        places = self._averages.places(commit, snapshot, ranks=self._context.local.world or 1)
        for rank, file in enumerate(places):
            keep = KeepAverage(epoch=commit.epoch, digest=commit.digest, file=file)
            self._context.rank_server.send(keep, rank=rank)

    def start_round(self, snapshot: RunSnapshot, decision: Decision) -> None:
        """Start the ranks on the round, once they hold the newest commit's state and there are shares."""
        commit, shares = snapshot.commit, snapshot.shares
        if commit is None or shares is None or self.held is None or self.held[1] != commit.digest:
            return
        if isinstance(decision, TakeShare) or not self._registration.is_listed(snapshot):
            return
        me, rounds = self._context.me, self._context.settings.rounds
        samples, step = shares.shares.get(me), rounds.batch_of(snapshot.members[me].member)
        steps = newcomer_steps(shares, samples=step, away=snapshot.away, settings=rounds)
        if samples is None and rounds.joins_within and steps:
            return  # it takes a share first
        start = (shares.round, samples, self._registration.generation)
        if self._go_told == start or not shares.live:
            return
        if self._go_told is None:
            self._context.events.write("go", round=shares.round, newcomer=samples is None)
        elif self._go_told[:2] != start[:2]:
            # The ranks offered a part without samples before, and now get a share: they offer again. An
            # attempt under way may be committed with the part that they have offered, so it ends first.
            if self._ringing is not None and self._ringing.attempt.epoch > self._called_off:
                return
            self._offered = None
        self._go_told = start
        self._context.local.progress.expect(now=time.monotonic())
        self._context.rank_server.send(
            StartRound(
                round=shares.round,
                position=shares.position,
                live=shares.live,
                samples=samples or (),
                number=self._context.local.next_start(),
            )
        )

    def offer(self, snapshot: RunSnapshot) -> None:
        """Publish this peer's part of the round, once its ranks have offered it and the peer is listed."""
        ready, place = self._context.local.ready, (snapshot.round, self._registration.generation)
        if ready is None or ready.round != snapshot.round or self._offered == place:
            return
        if not self._registration.is_listed(snapshot):
            return
        self._offered = place
        ready = msgspec.structs.replace(ready, coordinator_s=self._membership.round_trip_s)
        if self._context.settings.overlaps:
            ready = msgspec.structs.replace(ready, step_s=self._context.local.progress.usual_step_s())
        key, text, round = (
            self._context.keys.ready(ready.round, self._context.me),
            encode_text(ready),
            ready.round,
        )
        self._context.writer.write("ready", lambda: self._membership.offer(key, text, round=round))

    def ring(self, snapshot: RunSnapshot) -> None:
        """Begin the attempt that the snapshot names, call off an earlier one, and report the result."""
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

    def carry_out(self, decision: Decision, snapshot: RunSnapshot, *, now: float) -> None:
        """Carry out a decision, once for each snapshot, and again after a pause if nothing changed."""
        if isinstance(decision, RequestFlush) and self._flushed_round < decision.round:
            self._flushed_round = decision.round
            self._context.rank_server.send(FlushRound(round=decision.round))
        if not isinstance(decision, Propose | CommitRound | TakeShare) or self._context.writer.is_at(
            "decision"
        ):
            return
        version, acted_s = self._acted
        if snapshot.version == version and now < acted_s + _AGAIN_S:
            return
        self._acted = (snapshot.version, now)
        self._context.writer.write("decision", lambda: self._propose(decision, snapshot), repeats=False)

    def stop(self) -> None:
        """Stop taking part in the round; `start_round` starts the ranks again."""
        if self._ringing is not None:
            self._call_off(self._ringing, "this peer is out of the round")
            self._ringing = None
        self._go_told = self._offered = None

    def _note(
        self, commit: Commit, snapshot: RunSnapshot, *, included: bool, ringing: RingAttempt | None
    ) -> None:
        events, me = self._context.events, self._context.me
        now = time.monotonic()
        events.write(
            "round",
            round=commit.round,
            epoch=commit.epoch,
            members=list(commit.members),
            **_ring_facts(ringing, snapshot),
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

    def _my_attempt(self, snapshot: RunSnapshot) -> Attempt | None:
        """Return the attempt under way, if this listing of this peer is in it and its ranks are ready."""
        tried, me, ready = snapshot.tried, self._context.me, self._context.local.ready
        if tried is None or me not in tried.attempt.members or me not in snapshot.members:
            return None
        if tried.lives[tried.attempt.members.index(me)] != snapshot.members[me].life:
            return None
        return tried.attempt if ready is not None and ready.round == tried.attempt.round else None

    def _begin(self, attempt: Attempt, snapshot: RunSnapshot) -> RingAttempt | None:
        if any(name not in snapshot.members for name in attempt.members):
            return None  # a member has gone already: another attempt follows
        limits, local = self._context.settings.timeouts, self._context.local
        usual = median(self._ring_seconds) if self._ring_seconds else 0.0
        # With overlapped steps a member begins the ring between two steps, and sends nothing until then.
        steps_s = [
            snapshot.readies[name].ready.step_s
            for name in attempt.members
            if name in snapshot.readies and self._context.settings.overlaps
        ]
        stall_s = limits.stall_s + _STEPS * max(steps_s, default=0.0)

        def send(rank: int, reduce: Reduce) -> None:
            self._context.rank_server.send(reduce, rank=rank)

        return RingAttempt(
            attempt,
            me=self._context.me,
            members={name: listed.member for name, listed in snapshot.members.items()},
            ranks=local.world or 1,
            streams=self._context.settings.streams,
            links=self._context.connection_manager.pool,
            timeouts=AttemptTimeouts(
                connect_s=limits.connect_s,
                stall_s=stall_s,
                ring_s=max(ring_deadline_s(limits, usual), 2 * stall_s),
            ),
            norm_limit=norm_limit(attempt, {name: offer.ready for name, offer in snapshot.readies.items()}),
            send=send,
            wake=self._context.wake,
        )

    def _watch(self, current: RingAttempt, snapshot: RunSnapshot) -> None:
        """Report the digest of the ranks' state once the all_reduce is done, or call the attempt off.

        If the attempt cannot be completed, the reason is reported once the ranks no longer reduce.
        """
        epoch, local = current.attempt.epoch, self._context.local
        digest = local.digest_of(epoch)
        if digest and epoch > self._called_off:
            self._reported, self._done = epoch, (epoch, digest)
            done = Done(peer=self._context.me, round=current.attempt.round, epoch=epoch, digest=digest)
            key = self._context.keys.done(done.round, epoch, self._context.me)
            self._context.writer.write(
                "done",
                lambda: self._membership.offer(key, encode_text(done), round=done.round, is_report=True),
            )
            return
        others = set(current.attempt.members) - {self._context.me}
        if others <= set(snapshot.dones):
            self._context.local.progress.expect(
                now=time.monotonic()
            )  # all others are done and wait for this peer
        if epoch > self._called_off:
            self._failure = self._failure_of(current, snapshot)
            if self._failure is not None:
                self._call_off(current, self._failure.why)
        if self._failure is not None and local.have_stopped_reducing(epoch):
            self._report(current.attempt, self._failure)

    def _failure_of(self, current: RingAttempt, snapshot: RunSnapshot) -> AttemptFailure | None:
        attempt, local = current.attempt, self._context.local
        failed = local.failure_of(attempt.epoch)
        if failed is not None and failed.kind != "cancelled":
            return AttemptFailure(
                kind=failed.kind, culprit=self._named(attempt, failed.culprit), why=failed.why
            )
        if current.failure is not None:
            return current.failure
        if local.digest_of(attempt.epoch) == "":
            return AttemptFailure(
                kind="parity", culprit=None, why="the ranks of this peer differ after the ring"
            )
        for other in snapshot.failures:
            if other.epoch == attempt.epoch and other.peer != self._context.me:
                return AttemptFailure(
                    kind="aborted", culprit=None, why=f"'{other.peer}' failed: {other.kind}"
                )
        assert snapshot.tried is not None, "it is this attempt's snapshot"
        for peer, life in zip(attempt.members, snapshot.tried.lives, strict=True):
            if peer not in snapshot.members or snapshot.members[peer].life != life:
                return AttemptFailure(kind="aborted", culprit=None, why=f"'{peer}' is gone")
        return None

    def _named(self, attempt: Attempt, culprit: str | None) -> str | None:
        """Return the culprit's name. The ranks know a neighbour only as "next" or "previous"."""
        place = attempt.members.index(self._context.me)
        if culprit == "next":
            return attempt.members[(place + 1) % len(attempt.members)]
        return attempt.members[place - 1] if culprit == "previous" else culprit

    def _call_off(self, current: RingAttempt, why: str) -> None:
        epoch = current.attempt.epoch
        if epoch <= self._called_off:
            return
        self._called_off = epoch
        log.info("epoch %d is aborted: %s", epoch, why)
        self._context.rank_server.send(Abort(epoch=epoch, why=why))
        if current.stage is not AttemptStage.OVER:
            current.end(went_well=False)

    def _report(self, attempt: Attempt, failure: AttemptFailure) -> None:
        self._reported = attempt.epoch
        failed = Failed(
            peer=self._context.me,
            round=attempt.round,
            epoch=attempt.epoch,
            kind=failure.kind,
            culprit=failure.culprit,
            why=failure.why[:500],
        )
        if failure.kind != "aborted":
            self._context.events.write(
                "ring_failed", round=attempt.round, epoch=attempt.epoch, why=failure.why
            )
        key = self._context.keys.failed(attempt.round, attempt.epoch, self._context.me)
        self._context.writer.write(
            "failed",
            lambda: self._membership.offer(key, encode_text(failed), round=failed.round, is_report=True),
        )

    def _propose(self, decision: Decision, snapshot: RunSnapshot) -> None:
        """Write a decision to the coordinator. Runs on the writer's thread.

        A refused transaction is no error: another peer has written it first, or a member has left.
        """
        etcd, keys, me = self._context.etcd, self._context.keys, self._context.me
        if isinstance(decision, Propose):
            outcome = transactions.propose(etcd, keys, snapshot, decision)
        elif isinstance(decision, CommitRound):
            outcome = transactions.commit_round(etcd, keys, snapshot, decision)
        else:
            assert isinstance(decision, TakeShare), decision
            present = snapshot.members[me]
            transactions.join_shares(
                etcd,
                keys,
                round=decision.round,
                peer=me,
                life=present.life,
                samples=self._context.settings.rounds.batch_of(present.member),
                settings=self._context.settings.rounds,
                away=decision.away,
            )
            return
        if outcome is not TransactionResult.DONE:
            log.info("%s: %s", type(decision).__name__.lower(), outcome.value)


def _ring_facts(ringing: RingAttempt | None, snapshot: RunSnapshot) -> dict[str, object]:
    """Return, for the journal, the ring's members in its order and the rate of each link to the next one.

    Rates are in megabits a second, None where nobody measured the link. {} where this peer was in no ring.
    """
    if ringing is None:
        return {}
    ring = list(ringing.attempt.members)
    following = [*ring[1:], *ring[:1]]
    rates = [
        snapshot.rates.get(sender, {}).get(receiver) for sender, receiver in zip(ring, following, strict=True)
    ]
    return {"ring": ring, "ring_mbit_s": rates}
