"""The outer of a run between peers: asks its parent for a share, trains it, averages, and goes on.

Everything that a rank does here follows from what its parent says, in order (see `seam`); nothing is decided
by a clock. What others decided is applied only when its commit was read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bloomery.checkpoint.ranks import Gather
from bloomery.checkpoint.state import Json, StateEntry
from bloomery.config.elastic import ElasticSection
from bloomery.data.ranges import Ranges, first, from_pairs, merged, to_pairs, total, without
from bloomery.data.share import Share
from bloomery.elastic.attempts import Attempts
from bloomery.elastic.contribution import Contribution
from bloomery.elastic.ear import Ear
from bloomery.elastic.exchange import RingMaker
from bloomery.elastic.household import Household
from bloomery.elastic.outer import State, UnderWay
from bloomery.elastic.parity import peer_digest
from bloomery.elastic.records import Commit, Ready
from bloomery.elastic.seam import Abort, Committed, Go, Halt, Hurry, Parent, Reduce, Replace, Told
from bloomery.errors import CheckpointError
from bloomery.guard.verdict import CarryOn, Rewind, Save, Stop, Verdict

log = logging.getLogger(__name__)


class Rounds:
    """Implements `outer.Outer` for a run between peers.

    peer: this peer's name. salt: what must be equal between peers beside the tensors. tokens_per_sample: for
    the weight of this peer's part.
    """

    def __init__(
        self,
        section: ElasticSection,
        contribution: Contribution,
        *,
        parent: Parent,
        rings: RingMaker,
        gather: Gather,
        peer: str,
        salt: str,
        tokens_per_sample: int,
    ) -> None:
        self._section, self._contribution = section, contribution
        self._parent, self._gather = parent, gather
        self._peer, self._salt, self._tokens_per_sample = peer, salt, tokens_per_sample
        self._ear = Ear(parent, gather)
        self._attempts = Attempts(
            contribution, parent=parent, rings=rings, gather=gather, ear=self._ear, salt=salt
        )
        self._household: Household | None = None
        self.share = Share(lease=())
        self.round, self.digest = 0, ""
        self._met = False
        self._go: Go | None = None
        self._steps = 0
        self._spent: Ranges = ()
        self._within: tuple[int, int, Ranges] | None = None
        """(round, steps, spent) of what was done of a round before its `Go`: with overlap_steps, or by a
        process before this one."""
        self._is_inside = False
        """Whether the state that was loaded is one within a round."""
        self._hurried = False
        self._offered: Ready | None = None
        self._wants: Verdict | None = None
        self._skips: Ranges = ()
        self._due: Verdict | None = None
        self._going_back: Commit | None = None
        self._after: Any = None
        """In a round that averages gradients: the state after it, from between backward and update."""
        self._adopted = self._is_waiting = False

    def serve(self, household: Household) -> None:
        """Make the training known, once it is built."""
        self._household = household

    def admit(self, state: State) -> State:
        """Wait for a share, where this peer has none and the run goes on. Collective over the peer."""
        if not self._met:
            self._met = True
            begun = self._begun(state) if self._is_inside else None
            if self._is_inside:  # whatever was consumed, the round is not committed
                state = replace(state, under_way=UnderWay(committed=state.position.consumed, live=1))
            self._hold(state, begun=begun)
        if self._going_back is not None:
            commit, self._going_back = self._going_back, None
            state = self._at(state, commit)
            self._hold(state)
        self._is_waiting = True
        while self._go is None and not state.done:
            self._parent.moving("wait", step=state.step)
            state = self._obey(state, self._ear.wait(f"the go to round {self.round + 1}"))
            if self._looks_on:
                state = self._look_on(state)
            elif self._has_done_its_part(state):
                state = self._conclude_round(state)
        self._is_waiting = False
        self._parent.moving("step", step=state.step)
        return state

    @property
    def _looks_on(self) -> bool:
        return self._go is not None and self._offered is None and not self._go.samples

    def _has_done_its_part(self, state: State) -> bool:
        """Whether a round is gone on with of which this peer, before it stopped, had made every step."""
        is_begun = self._go is not None and self._offered is None and self._steps > 0
        return is_begun and self._section.average == "weights" and self._is_over(state)

    def _look_on(self, state: State) -> State:
        """Take part in a round that this peer has no samples of: a newcomer holds the state after it."""
        before = state
        self._adopted = False
        self._contribution.nothing()
        state = self._conclude_round(state)
        if self._adopted and self._section.average == "gradients":
            after = self._home.follow(before)
            state = replace(after, position=state.position, under_way=None)
            self._hold(state)
        return state

    def average_gradients(self, state: State) -> None:
        """Average the step's gradients, where that is what a round is. Collective over the peer."""
        if self._section.average != "gradients":
            return
        self._adopted = False
        for told in self._ear.between_steps():
            state = self._obey(state, told)
        if self._go is None or state.done:
            self._contribution.refuse()
        else:
            self._steps = 1
            batch = self._home.batch(state)
            self._spent = merged((*self._spent, *first(self._unused(state), batch)))
            state = self._conclude_round(state)
        self._after = state

    def average(self, state: State, verdict: Verdict) -> tuple[State, Verdict]:
        """Note what the guards ask for; where the round is over, offer this peer's part and await the end."""
        carry_on = CarryOn(judged_step=verdict.judged_step)
        self._note(verdict)
        if isinstance(verdict, Stop):
            self._remember(state)
            self._parent.leave(verdict.reason)
            return state, verdict
        if self._section.average == "gradients":
            return self._after_gradients(state, carry_on)
        self._remember(state)
        self._steps += 1
        for told in self._ear.between_steps():
            state = self._obey(state, told)
        if self._attempts.is_under_way:
            self._attempts.go_on()
        if self._go is not None and not state.done and self._is_over(state):
            state = self._conclude_round(state)
        due, self._due = self._due or carry_on, None
        return state, due

    def skipping(self, state: State, samples: range) -> State:
        """Ask everybody, with the next round, never to use these samples."""
        self._skips = merged((*self._skips, samples))
        return state

    def state_entries(self) -> Iterable[StateEntry]:
        """What the contribution keeps."""
        return self._contribution.state_entries()

    def state_values(self) -> dict[str, Json]:
        """The round that is committed and, within one, what this peer did of it."""
        done = self._within
        if self._offered is not None:
            done = self._offered.round, self._offered.steps, self._offered.spent
        elif self._go is not None:
            done = self._go.shares.round, self._steps, self._spent
        return {
            "round": self.round,
            "digest": self.digest,
            "feedback": self._contribution.has_feedback,
            "inside": self._go is not None or self._is_inside,
            "within": None if done is None else [done[0], done[1], cast(Json, to_pairs(done[2]))],
        }

    def load_state_values(self, values: Mapping[str, Any]) -> None:
        """Take what a checkpoint holds; of a run that begins, nothing."""
        self._go, self._within, self._is_inside = None, None, False
        self._attempts.drop()
        self.share = Share(lease=())
        if not values:
            self.round = 0
            self._contribution.begin()
            self.digest = self._digest_of(self._contribution.digest())
            return
        self.round, self.digest = int(values["round"]), str(values["digest"])
        if not values.get("feedback", True):  # saved with a codec that loses next to nothing
            self._contribution.forget_feedback()
        self._is_inside = bool(values["inside"])
        if values["within"] is not None:
            round, steps, spent = values["within"]
            self._within = int(round), int(steps), from_pairs(spent)

    @property
    def _home(self) -> Household:
        assert self._household is not None, "nobody said whose outer this is"
        return self._household

    def _obey(self, state: State, told: Told) -> State:
        """Do what the parent says. Collective over the peer: all ranks hear the same."""
        match told:
            case Go():
                return self._begin(state, told)
            case Replace():
                return self._replace(state, told)
            case Hurry(round=round):
                self._hurried = self._hurried or (self._go is not None and round == self._go.shares.round)
            case Reduce():
                self._attempts.begin(told)
            case Abort(epoch=epoch):
                self._attempts.call_off(epoch)
            case Committed():
                return self._decided(state, told)
            case Halt(why=why, failed=failed):
                return state.halting(why, failed=failed)
        return state

    def _begin(self, state: State, go: Go) -> State:
        """Take up the share of a round; go on within it where this peer was."""
        if self._offered is not None and self._offered.round == go.shares.round:
            if not without(self._offered.spent, go.samples):  # the parent lost our offer with its lease
                self._parent.ready(self._offered)
                return state
            self._offered = None
        elif self._go is not None:
            self._within = self._go.shares.round, self._steps, self._spent
        within, self._within, self._is_inside = self._within, None, False
        self._go, self._hurried = go, False
        self._steps, self._spent = 0, ()
        self.share = Share(lease=go.samples)
        position = go.shares.position
        if within is not None and within[0] == go.shares.round and not without(within[2], go.samples):
            _, self._steps, self._spent = within
            position = position.after(self._spent)
        elif within is not None:
            self._home.settle()
            self._contribution.reset()
        under_way = UnderWay(committed=go.shares.position.consumed, live=go.shares.live)
        return replace(state, position=position, under_way=under_way)

    def _unused(self, state: State) -> Ranges:
        """Of this peer's share, what it has not trained on."""
        lease = self.share.lease or ()
        return without(lease, without(lease, state.position.holes))

    def _remember(self, state: State) -> None:
        if self._go is not None:
            self._spent = without(self.share.lease or (), state.position.holes)

    def _is_over(self, state: State) -> bool:
        """Whether there is no step to make: before the round's part is offered, or while it is decided."""
        if total(self._unused(state)) < self._home.batch(state) or isinstance(self._wants, Rewind):
            return True
        if self._offered is not None:
            return self._steps >= self._section.overlap_steps
        return self._steps >= self._section.round_steps or self._hurried

    def _note(self, verdict: Verdict) -> None:
        """Keep what has to wait for the end of the round; a rewind outweighs a save."""
        if isinstance(verdict, Rewind) or (isinstance(verdict, Save) and self._wants is None):
            self._wants = verdict

    def _conclude_round(self, state: State) -> State:
        """Offer this peer's part, and do what the parent says until the round is decided.

        With steps left to make meanwhile, go on with those.
        """
        if self._offered is None:
            self._offer(state)
            if not self._is_over(state):
                return state
        self._parent.moving("ring", step=state.step)
        while self._offered is not None and not state.done:
            if self._attempts.is_under_way:
                self._attempts.finish()
            else:
                state = self._obey(state, self._ear.wait(f"round {self.round + 1} to be decided"))
        return state

    def _offer(self, state: State) -> None:
        go = self._go
        assert go is not None, "only in a round"
        # As text: JSON has no infinities.
        offers = self._gather(repr(self._contribution.offer(go.shares.round).squares))
        squares = sum(float(squares) for squares in offers)
        rewind_to, why, skips = None, "", self._skips
        if isinstance(self._wants, Rewind):
            rewind_to = self._home.round_before(self._wants.to_step) or 0
            why, skips = self._wants.reason, merged((*skips, self._wants.skip))
        self._offered = Ready(
            peer=self._peer,
            round=go.shares.round,
            steps=self._steps,
            tokens=total(self._spent) * self._tokens_per_sample,
            spent=self._spent,
            kept=first(self._unused(state), self._section.overlap_steps * self._home.batch(state)),
            norm=math.sqrt(squares) if math.isfinite(squares) else math.inf,
            finite=math.isfinite(squares),
            wants_save=isinstance(self._wants, Save),
            rewind_to=rewind_to,
            skip=skips,
            why=why,
        )
        # From here on steps and samples are the next round's.
        self._steps, self._spent, self.share = 0, (), Share(lease=self._offered.kept)
        self._parent.ready(self._offered)

    def _decided(self, state: State, told: Committed) -> State:
        """The round is committed: go on from it, go back, or wait for somebody else's state."""
        commit, offered = told.commit, self._offered
        if commit.round <= self.round:
            return state
        ahead = self._steps, self._spent
        self._offered, self._go, self.share = None, None, Share(lease=())
        self._wants, self._skips = None, ()
        if commit.rewind_to is not None:
            self._contribution.refuse()
            return self._go_back(state, commit)
        if not (told.included and offered is not None and self._attempts.fits(commit)):
            self._attempts.drop()
            self._contribution.refuse()
            self._skips = offered.skip if offered else ()
            return state
        self._home.settle()
        self._contribution.adopt()
        self._adopted = True
        if commit.save:
            self._due = Save(judged_step=state.step, reason=f"round {commit.round}")
        state = self._at(state, commit)
        self._within = (commit.round + 1, *ahead) if ahead[0] else None
        if self._section.average == "weights":
            self._hold(state)
        return state

    def _at(self, state: State, commit: Commit) -> State:
        """The state at a committed round."""
        self.round, self.digest = commit.round, commit.digest
        self._steps, self._spent = 0, ()
        return replace(state, position=commit.position, under_way=None)

    def _go_back(self, state: State, commit: Commit) -> State:
        """Have the run rewound from this peer's own checkpoint of the round; without one, from another's.

        From another's, too, where this peer has not begun: there nobody carries out what is due.
        """
        round = commit.rewind_to
        assert round is not None
        step = 0 if round == 0 else self._home.step_of(round)
        if step is None or self._is_waiting:
            self._hold(state)
            return state
        self._going_back = commit
        nothing = range(state.position.cursor, state.position.cursor)
        self._due = Rewind(judged_step=state.step, to_step=step, skip=nothing, reason=commit.why)
        return state

    def _after_gradients(self, state: State, carry_on: Verdict) -> tuple[State, Verdict]:
        """The state after a step whose gradients were averaged: the position is the commit's."""
        after, self._after = self._after, None
        due, self._due = self._due or carry_on, None
        if self._adopted:
            state = replace(state, position=after.position, under_way=None)
            self._hold(state)
            return state, due
        return after, due

    def _hold(self, state: State, *, begun: Path | None = None) -> None:
        """Say what is held, and offer a copy of it to newcomers. begun: that copy, where it is made."""
        self._parent.moving("offer", step=state.step)
        self._parent.holding(
            round=self.round,
            digest=self.digest,
            step=state.step,
            directory=self._home.offer(state) if state.under_way is None else begun,
            samples=self._home.batch(state),
        )
        if self._due is not None:  # a save, which takes longer
            self._parent.moving("save", step=state.step)

    def _begun(self, state: State) -> Path | None:
        """A copy of the state that the round began with, for newcomers; this peer goes on within the round.

        It may be the only one that has that state, and the round may need more peers than this one.
        """
        within, self._within, self._is_inside = self._within, None, False
        self._parent.moving("offer", step=state.step)
        self._contribution.set_aside()
        copy = self._home.offer(state)
        self._contribution.take_up()
        self._within, self._is_inside = within, True
        return copy

    def _replace(self, state: State, told: Replace) -> State:
        """Load another peer's state of a round, as it was verified by the parent."""
        self._parent.moving("save", step=0)
        self._offered, self._wants = None, None
        self._attempts.drop()
        self._home.settle()
        state = self._home.load(told.directory, told.why)
        self._contribution.loaded()
        self._within = None  # what its source did of a round is not ours
        if self.digest != told.digest or self._is_inside:
            raise CheckpointError(
                f"{told.directory} holds the state {self.digest[:12]} of round {self.round}, and "
                f"{told.digest[:12]} of round {told.round} was asked for.",
                remedy="This is a mistake in bloomery, not in your run: please report it with the recipe.",
            )
        self.round = told.round
        state = replace(state, position=told.position, under_way=None)
        self._hold(state)
        return state

    def _digest_of(self, lane: str) -> str:
        return peer_digest(self._gather(lane), salt=self._salt)
