"""Runs a rank's outer loop between peers: trains on its samples of a round, averages, and continues.

A rank acts only on the commands of its agent, in the order in which they arrive. `outer_loop_state` defines
the phases of a round; this module turns events into messages, and carries out what `transition` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from bloomery.checkpoint.format.state import Json, StateEntry
from bloomery.checkpoint.writer.ranks import Gather
from bloomery.config.elastic import ElasticSection
from bloomery.data.position import SampleShare, first, merged, total, without
from bloomery.diloco.agent_client import AgentClient, CommandInbox
from bloomery.diloco.all_reduce import Attempts, RingMaker
from bloomery.diloco.kept_states import (
    AboutMissedRounds,
    MissedRounds,
    StateCopies,
    restored_rounds,
    stored_rounds,
)
from bloomery.diloco.outer import State, TrainerHooks
from bloomery.diloco.outer_loop_state import (
    Admitted,
    AwaitingCommit,
    CheckpointLoaded,
    Decided,
    HeldState,
    Idle,
    LoadAccepted,
    LoadRefused,
    Message,
    PartMade,
    RoundState,
    SamplesUsed,
    StepRefused,
    TrainingRound,
    UpdateMade,
    Updating,
)
from bloomery.diloco.outer_update import FEEDBACK_OF, OuterUpdate, peer_digest
from bloomery.diloco.part_offer import PartOffer
from bloomery.diloco.peer_vector import FragmentHistory
from bloomery.diloco.round_transition import (
    Action,
    BeginRing,
    CancelRing,
    Do,
    Halt,
    LoadState,
    MoveTo,
    SendReady,
    SendRefused,
    is_last_step,
    transition,
)
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.guard.verdict import CarryOn, Rewind, Stop, Verdict
from bloomery.protocol.rank_messages import AgentMessage, Committed, CopyState, ReplaceState

_UNUSABLE = (CheckpointError, KeyError, TypeError, ValueError, OverflowError, AttributeError, AssertionError)
"""What loading raises, on all ranks alike, for a checkpoint whose writer was wrong or hostile."""
_LONGEST_REASON = 500
"""The most characters of a refusal that are sent to the agent."""


class OuterLoop:
    """The outer loop of one rank. It implements `outer.Outer` for a run between peers.

    Args:
        section: the recipe's [elastic].
        update: defines what is averaged, and how the average is applied.
        agent: the connection to this peer's agent.
        rings: makes a ring of the connections of an attempt.
        gather: all_gather_object over the ranks of this peer.
        peer: the name of this peer.
        salt: what must be equal on all peers besides the tensors; part of every digest.
        tokens_per_sample: the weight of a peer's part is the number of its samples times this.
        identity: what identifies the stream of samples; empty on all but the first rank.
        trainer: what the loop calls in the training; not used before `admit`.
    """

    def __init__(
        self,
        section: ElasticSection,
        update: OuterUpdate,
        *,
        agent: AgentClient,
        rings: RingMaker,
        gather: Gather,
        peer: str,
        salt: str,
        tokens_per_sample: int,
        identity: Mapping[str, str],
        trainer: TrainerHooks,
    ) -> None:
        self._section, self._update = section, update
        self._agent, self._gather = agent, gather
        self._peer, self._salt, self._tokens_per_sample = peer, salt, tokens_per_sample
        self._identity = identity
        self._inbox = CommandInbox(agent, gather, asked_to_stop=trainer.asked_to_stop, enter=trainer.enter)
        self._attempts = Attempts(
            update, agent=agent, rings=rings, gather=gather, inbox=self._inbox, salt=salt
        )
        self._offer = PartOffer(update, agent, gather)
        self._missed = MissedRounds(update, self._attempts, gather=gather, digest_of=self._digest_of)
        self._trainer = trainer
        self._copies = StateCopies(update, trainer, agent)
        self._rounds = RoundState(
            averages_gradients=section.average == "gradients",
            is_asynchronous=section.quorum > 0,
            fragments=tuple(FragmentHistory() for _ in range(section.fragments)),
        )
        self._state_without_step: Any = None
        """The state to continue with if the step is not made; set by `average_gradients`."""

    @property
    def share(self) -> SampleShare:
        """The samples that this peer may train on now."""
        return SampleShare(lease=self._rounds.samples)

    def admit(self, state: State) -> State:
        """Wait until this peer has samples or the run ends. Collective over the peer."""
        state = self._handle(state, Admitted(position=state.position))
        while not self._rounds.is_in_round and not state.done:
            self._agent.report_activity("wait", step=state.step)
            command = self._inbox.wait(f"round {self._rounds.held.round + 1} to begin")
            state = self._obey(state, command, can_rewind=False)
            if isinstance(self._rounds.phase, TrainingRound):
                state = self._conclude_without_steps(state, self._rounds.phase)
        self._agent.report_activity("step", step=state.step)
        return state

    def average_gradients(self, state: State) -> None:
        """Average the step's gradients with the other peers, if rounds do that. Collective over the peer."""
        self._update.keep_offer()
        if not self._rounds.averages_gradients:
            return
        for command in self._inbox.between_steps():
            state = self._obey(state, command, can_rewind=True)
        if not self._rounds.is_in_round or state.done:
            self._update.drop_offer()
        else:
            spent = self._rounds.progress.spent if self._rounds.progress else ()
            used = first(self._rounds.unused(state.position), self._trainer.batch(state))
            state = self._handle(state, SamplesUsed(steps=1, spent=merged((*spent, *used))))
            state = self._conclude_round(state, can_rewind=True)
            if not isinstance(self._rounds.phase, Updating):  # this peer was left out, or told to stop
                self._update.drop_offer()
                state = self._handle(state, StepRefused())
        self._state_without_step = state

    def average(self, state: State, verdict: Verdict) -> tuple[State, Verdict]:
        """Average with the other peers if the round is over; return the state, and the verdict to carry out.

        A save that the guards want waits for the end of the round; all peers decide on a rewind together.
        """
        carry_on = CarryOn(judged_step=verdict.judged_step)
        verdict = self._trainer.possible(verdict)
        self._rounds = self._rounds.asking(verdict)
        averages_gradients = self._rounds.averages_gradients
        state = self._after_update(state) if averages_gradients else self._count_step(state)
        if isinstance(verdict, Stop):
            self._agent.leave(verdict.reason)
            return state, verdict
        if not averages_gradients:
            state = self._go_on_in_round(state)
        due, self._rounds = self._rounds.due, replace(self._rounds, due=None)
        return state, due or carry_on

    def skipping(self, state: State, samples: range) -> State:
        """Ask all peers, with the next part, never to use these samples."""
        self._rounds = self._rounds.skipping(samples)
        return state

    def state_entries(self) -> Iterable[StateEntry]:
        """Describe the tensors that the outer update keeps."""
        return self._update.state_entries()

    def state_values(self) -> dict[str, Json]:
        """Return the committed round that this peer holds, and what it did in the next one."""
        return stored_rounds(self._rounds, has_feedback=self._update.has_feedback)

    def load_state_values(self, values: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint; they are empty for a run that begins."""
        self._attempts.drop()
        if not values:
            self._update.begin()
            held_state = HeldState(round=0, digest=self._digest_of(self._update.digest()), position=None)
            self._handle(None, CheckpointLoaded(held=held_state, rest=Idle()))
            return
        # The codec at that time kept no quantisation error, or an earlier version kept it in another unit.
        if not values.get("feedback", True) or values.get("feedback_of") != FEEDBACK_OF:
            self._update.forget_feedback()
        self._handle(None, restored_rounds(values))

    def _obey(self, state: Any, command: AgentMessage, *, can_rewind: bool) -> Any:
        """Carry out a command of the agent. Collective over the peer: all ranks get the same commands.

        can_rewind: whether the caller carries out a rewind that is due when this returns.
        """
        if isinstance(command, AboutMissedRounds):
            made = self._missed.take(command)
            return state if made is None else self._handle(state, made)
        if isinstance(command, CopyState):
            self._copies.take(command)
            self._copy_if_asked(state)
            return state
        if not isinstance(command, Committed):
            return self._handle(state, command)
        commit, rewind_step = command.commit, None
        if commit.rewind_to is not None and can_rewind:
            rewind_step = 0 if commit.rewind_to == 0 else self._trainer.step_of(commit.rewind_to)
        decided = Decided(
            commit=commit,
            is_prepared=self._attempts.adopts(command),
            rewind_step=rewind_step,
            step=state.step,
            cursor=state.position.cursor,
            is_late=bool(commit.members) and self._peer not in {*commit.members, *commit.left_out},
        )
        return self._handle(state, decided)

    def _handle(self, state: Any, message: Message) -> Any:
        self._rounds, actions = transition(self._rounds, message)
        for action in actions:
            state = self._carry_out(action, state)
        return state

    def _carry_out(self, action: Action, state: Any) -> Any:
        """Carry out an action; return the training's state after it."""
        match action:
            case MoveTo(position=position, under_way=under_way):
                return replace(state, position=position, under_way=under_way)
            case Halt(why=why, failed=failed):
                return state.halting(why, failed=failed)
            case LoadState(asked=asked):
                return self._load(asked)
            case Do.HOLD:
                self._hold(state)
            case Do.SEND_IDENTITY:
                if self._identity:
                    self._agent.report_data_identity(self._identity)
            case SendReady(number=number):
                self._offer.send(self._rounds, number=number)
            case SendRefused(why=why):
                self._agent.refuse_state(why)
            case _:
                self._change_update(action)
        return state

    def _change_update(self, action: Action) -> None:
        match action:
            case BeginRing(reduce=reduce):
                self._attempts.begin(reduce)
            case CancelRing(epoch=epoch):
                self._attempts.cancel(epoch)
            case Do.DROP_RING:
                self._attempts.drop()
            case Do.REFUSE_UPDATE:
                self._update.drop_offer()
            case Do.RESET_UPDATE | Do.ADOPT_UPDATE | Do.REBASE_UPDATE:
                self._trainer.wait_staged()
                update = self._update
                changes = {Do.RESET_UPDATE: update.reset, Do.ADOPT_UPDATE: update.adopt}
                changes.get(action, update.rebase)()
            case _:
                raise AssertionError(f"an action that nobody carries out: {action!r}")

    def _conclude_without_steps(self, state: State, training: TrainingRound) -> State:
        """Conclude the round that has just begun, if this peer has no step to make in it."""
        if training.start.samples:
            # A resumed peer may have made all its steps before it stopped, without being in a commit.
            is_done = training.steps > 0 and not self._rounds.averages_gradients and self._is_over(state)
            return self._conclude_round(state, can_rewind=False) if is_done else state
        # A joining peer without samples takes part with weight 0, so that it holds the state after the round.
        before = state
        self._update.offer_nothing()
        state = self._conclude_round(state, can_rewind=False)
        is_committed = isinstance(self._rounds.phase, Updating)
        return self._handle(self._trainer.follow(before), UpdateMade()) if is_committed else state

    def _conclude_round(self, state: State, *, can_rewind: bool) -> State:
        """Offer this peer's part, and carry out commands of the agent until the round is decided.

        Returns at once while there are steps to make during that (elastic.overlap_steps).
        """
        if isinstance(self._rounds.phase, TrainingRound):
            state = self._handle(state, self._part(state, self._rounds.phase.start.round))
            if not self._is_over(state):
                return state
        self._rounds = self._offer.sent_if_measured(self._rounds, waits=True)
        self._agent.report_activity("ring", step=state.step)
        while isinstance(self._rounds.phase, AwaitingCommit) and not state.done:
            if self._attempts.is_under_way:
                self._attempts.conclude()
                self._copy_if_asked(state)
            else:
                command = self._inbox.wait(f"round {self._rounds.held.round + 1} to be decided")
                state = self._obey(state, command, can_rewind=can_rewind)
        return state

    def _part(self, state: State, round: int) -> PartMade:
        """Fix this peer's part of the round."""
        self._offer.fix(round)
        wants, kept = self._rounds.wants, self._section.overlap_steps * self._trainer.batch(state)
        return PartMade(
            peer=self._peer,
            tokens_per_sample=self._tokens_per_sample,
            kept=first(self._rounds.unused(state.position), kept),
            rewind_to=self._trainer.round_for(wants) if isinstance(wants, Rewind) else None,
        )

    def _count_step(self, state: State) -> State:
        """Note that a step was made, and which of this peer's samples are used now."""
        phase, samples = self._rounds.phase, self._rounds.samples
        if not isinstance(phase, TrainingRound | AwaitingCommit):
            return state
        spent = without(samples, state.position.holes)
        return self._handle(state, SamplesUsed(steps=phase.steps + 1, spent=spent))

    def _go_on_in_round(self, state: State) -> State:
        """Carry out the commands that came during the step; conclude the round if no step is left."""
        self._rounds = self._offer.sent_if_measured(self._rounds, waits=False)
        for command in self._inbox.between_steps():
            state = self._obey(state, command, can_rewind=True)
        if self._attempts.is_under_way:
            self._attempts.conclude_if_over()
            self._copy_if_asked(state)
        if self._rounds.is_in_round and not state.done and self._is_over(state):
            state = self._conclude_round(state, can_rewind=True)
        return state

    def _is_over(self, state: State) -> bool:
        """Return whether no step is left before the part is offered, or while the round is decided."""
        unused, batch = total(self._rounds.unused(state.position)), self._trainer.batch(state)
        return is_last_step(self._rounds, self._section, unused=unused, batch=batch)

    def _after_update(self, state: State) -> State:
        """Return the state after a step on averaged gradients; without an average, the one before it."""
        is_made = isinstance(self._rounds.phase, Updating)
        return self._handle(state, UpdateMade()) if is_made else self._state_without_step

    def _hold(self, state: State) -> None:
        """Tell the agent what is held."""
        held_state = self._rounds.held
        self._agent.report_state(
            round=held_state.round,
            digest=held_state.digest,
            step=state.step,
            samples=self._trainer.batch(state),
            position=held_state.position,
            saves=self._trainer.saves(),
        )
        if self._rounds.due is not None:  # a save or rewind follows, which takes longer
            self._agent.report_activity("save", step=state.step)

    def _copy_if_asked(self, state: State) -> None:
        """Copy the committed state for joining peers, if the agent asked and nothing needs the weights."""
        rounds = self._rounds
        is_busy = self._attempts.is_under_way or isinstance(rounds.phase, Updating)
        if not is_busy and self._copies.is_due(rounds.held.digest):
            self._rounds = replace(rounds, phase=Idle())  # because the copy stores this phase
            self._copies.make(replace(state, under_way=None), rounds.held)
            self._rounds = rounds

    def _load(self, asked: ReplaceState) -> Any:
        """Load the other peer's state that the agent names; load this peer's own if the digest is wrong."""
        self._agent.report_activity("save", step=0)
        self._trainer.wait_staged()
        try:
            state = self._trainer.load(asked.directory, asked.why, lambda: self._check(asked))
        except _UNUSABLE as error:
            why = error.message if isinstance(error, BloomeryError) else f"{type(error).__name__}: {error}"
            # This overwrites what was loaded, so that it is never saved or served.
            state = self._trainer.reload(f"another peer's state was refused: {why}")
            return self._handle(state, LoadRefused(why=why[:_LONGEST_REASON], position=state.position))
        self._update.follow_loaded()
        return self._handle(state, LoadAccepted())

    def _check(self, asked: ReplaceState) -> None:
        """Raise CheckpointError if the state that was just loaded is not the one that was asked for."""
        digest, is_within = self._rounds.held.digest, self._rounds.is_within
        if self._update.digest_is_of_state:  # computed from the tensors, since the stored one may be wrong
            digest = self._digest_of(self._update.digest())
        if digest != asked.digest or is_within:
            within = " within a round" if is_within else ""
            raise CheckpointError(
                f"its tensors are the state {digest[:12]}{within}, and "
                f"{asked.digest[:12]} of round {asked.round} was asked for",
                remedy="Look at the machine that gave it: its memory or disk may be failing.",
            )

    def _digest_of(self, rank_digest: str) -> str:
        return peer_digest(self._gather(rank_digest), salt=self._salt)
