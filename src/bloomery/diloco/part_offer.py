"""Offers a peer's part of a round to its agent once its norm is known, which a thread computes.

Where steps overlap the round (elastic.overlap_steps), they go on meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec

from bloomery.checkpoint.writer.ranks import Gather
from bloomery.diloco.agent_client import AgentClient
from bloomery.diloco.background import BackgroundCall
from bloomery.diloco.outer_loop_state import AwaitingCommit, RoundState
from bloomery.diloco.outer_update import OuterUpdate
from bloomery.protocol.records import Ready


class PartOffer:
    """The offer of one rank's part. All methods but `send` are collective over the peer.

    update: it fixes and measures the part. agent: it gets the offer. gather: all_gather_object.
    """

    def __init__(self, update: OuterUpdate, agent: AgentClient, gather: Gather) -> None:
        self._update, self._agent, self._gather = update, agent, gather
        self._measuring: BackgroundCall[tuple[float, float]] | None = None
        """The measurement of the part that was fixed last; None once it was told."""
        self._number = 0
        """The number of the StartRound that the offer answers."""

    def fix(self, round: int) -> None:
        """Fix this peer's part of a round, and begin to measure it."""
        if self._measuring is not None:  # of a round that was decided without this peer
            self._measuring.result()
        self._measuring = BackgroundCall(self._update.offer(round), name=f"part of round {round}")

    def send(self, rounds: RoundState, *, number: int) -> None:
        """Offer the part that awaits its commit, now or once it is measured. number: see SendReady."""
        self._number = number
        if self._measuring is None and isinstance(rounds.phase, AwaitingCommit):
            self._agent.offer_part(rounds.phase.ready, number=number)

    def sent_if_measured(self, rounds: RoundState, *, waits: bool) -> RoundState:
        """Offer the part that awaits its commit, if it is measured on all ranks and was not offered yet.

        Returns the state with the norm of the part. waits: whether to wait for the measurement.
        """
        measuring = self._measuring
        if measuring is None or not isinstance(rounds.phase, AwaitingCommit):
            return rounds
        found = measuring.result() if waits or measuring.is_over() else None
        # As text, because JSON has no infinities.
        of_ranks = self._gather(None if found is None else [repr(rank_squares) for rank_squares in found])
        if None in of_ranks:
            return rounds
        self._measuring = None
        ready = measured(
            rounds.phase.ready,
            squares=sum(float(squares) for squares, _ in of_ranks),
            feedback=sum(float(feedback) for _, feedback in of_ranks),
        )
        rounds = replace(rounds, phase=replace(rounds.phase, ready=ready))
        self.send(rounds, number=self._number)
        return rounds


def measured(ready: Ready, *, squares: float, feedback: float) -> Ready:
    """Return a part with its norm.

    squares: the sum of the squares of the part's elements.
    feedback: the sum of the squares of the quantisation errors that are added to it.
    """
    is_finite = math.isfinite(squares) and math.isfinite(feedback)
    return msgspec.structs.replace(
        ready,
        norm=math.sqrt(squares) if is_finite else None,
        feedback=math.sqrt(feedback) if is_finite else 0.0,
        finite=is_finite,
    )
