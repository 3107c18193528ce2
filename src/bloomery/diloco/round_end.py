"""Decides when a peer has made the steps after which it offers its part, or waits for the commit."""

from __future__ import annotations

from bloomery.config.elastic import ElasticSection
from bloomery.diloco.outer_loop_state import AwaitingCommit, RoundState, TrainingRound
from bloomery.guard.verdict import Rewind


def is_last_step(rounds: RoundState, section: ElasticSection, *, unused: int, batch: int) -> bool:
    """Return whether no step is left before the part is offered, or while the round is decided.

    rounds: the state of a round that is under way.
    unused: how many samples the peer has left. batch: how many a step uses.
    """
    phase = rounds.phase
    if unused < batch or isinstance(rounds.wants, Rewind):
        return True
    if isinstance(phase, AwaitingCommit):
        # In asynchronous rounds the others go on meanwhile: a peer that was hurried must not keep the ring
        # waiting for the end of another of its slow steps.
        was_hurried = rounds.is_asynchronous and phase.ready.steps < section.round_steps
        return was_hurried or phase.steps >= section.overlap_steps
    assert isinstance(phase, TrainingRound), "asked within a round alone"
    return phase.is_flushed or phase.steps >= section.round_steps
