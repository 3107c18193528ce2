"""Carries out the agent's commands for peers that missed rounds or join: keeps averages, copies states.

A round's average and the state before it give the state after it, bit for bit, on every peer. So a peer that
holds an earlier round's state needs the averages since then, not the whole state. Whether an average is the
run's is computed from its bytes: the digest of the state that follows must be that of the commit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from bloomery.checkpoint.format.state import Json
from bloomery.checkpoint.writer.ranks import Gather
from bloomery.data.position import Position, from_pairs, to_pairs
from bloomery.diloco.agent_client import AgentClient
from bloomery.diloco.all_reduce import Attempts
from bloomery.diloco.outer import TrainerHooks
from bloomery.diloco.outer_loop_state import (
    CheckpointLoaded,
    HeldState,
    Idle,
    MissedRoundMade,
    Progress,
    Resumed,
    RoundState,
)
from bloomery.diloco.outer_update import FEEDBACK_OF, OuterUpdate
from bloomery.diloco.peer_vector import FragmentHistory
from bloomery.diloco.stored_average import StoredAverage
from bloomery.protocol.rank_messages import CatchUp, CopyState, KeepAverage

log = logging.getLogger(__name__)

AboutMissedRounds = KeepAverage | CatchUp
"""The commands that `MissedRounds.take` carries out."""


class MissedRounds:
    """One rank's part in catching up: keeps averages for lagging peers, or makes a missed outer step.

    update: the outer update, which has the averages and makes the steps.
    attempts: knows to which state the average leads that was prepared last.
    gather: all_gather_object over the ranks of this peer.
    digest_of: the digest of the peer's state from that of this rank; collective over the peer.
    """

    def __init__(
        self, update: OuterUpdate, attempts: Attempts, *, gather: Gather, digest_of: Callable[[str], str]
    ) -> None:
        self._update, self._attempts = update, attempts
        self._gather, self._digest_of = gather, digest_of

    def take(self, command: AboutMissedRounds) -> MissedRoundMade | None:
        """Keep an average, on a thread, or prepare the state after a missed round. Collective."""
        if isinstance(command, CatchUp):
            return self._made(command)
        average = self._update.average()
        if average is not None and self._attempts.fits(command):
            threading.Thread(target=_write, args=(average, command.file), name="average", daemon=True).start()
        return None

    def _made(self, asked: CatchUp) -> MissedRoundMade:
        """Prepare the state after a missed round, and say whether it is the commit's."""
        try:
            average = StoredAverage.load(asked.file)
            rank_digest, why = self._update.prepare_missed(asked.round, average), ""
        except (OSError, ValueError) as error:
            rank_digest, why = "", str(error)
        reasons = [reason for reason in self._gather(why) if reason]
        if not reasons and self._digest_of(rank_digest) != asked.digest:
            reasons = [f"with this average, round {asked.round} ends with another state than the run's"]
        return MissedRoundMade(asked=asked, why=reasons[0] if reasons else "")


def _write(average: StoredAverage, path: Path) -> None:
    try:
        average.save(path)
    except OSError as error:
        log.warning("the average of a round is not kept for those who missed it: %s", error)


class StateCopies:
    """Copies of a peer's state for joining peers; made on demand, since each takes the memory of a state.

    All ranks of the peer make and remove them together.

    update: it puts the committed weights in the place of the present ones.
    trainer: it copies a state into memory.
    agent: it is told of each copy.
    """

    def __init__(self, update: OuterUpdate, trainer: TrainerHooks, agent: AgentClient) -> None:
        self._update, self._trainer, self._agent = update, trainer, agent
        self._made: dict[str, Path] = {}
        self._is_asked = False

    def take(self, command: CopyState) -> None:
        """Remove the copies that need not be kept, and note whether another one is wanted."""
        for digest in set(self._made) - set(command.keep):
            self._trainer.remove_copy(self._made.pop(digest))
        self._is_asked = bool(command.makes)

    def is_due(self, digest: str) -> bool:
        """Return whether a copy of this state, which the ranks hold, is to be made now."""
        return self._is_asked and digest not in self._made

    def make(self, state: Any, held: HeldState) -> None:
        """Copy the committed state. Collective over the peer; no ring may read the weights meanwhile.

        Where there is no room for it, it is not tried again before the agent asks anew.

        state: that of the training; within a round its weights are replaced by the committed ones and back.
        held: the committed state.
        """
        self._agent.report_activity("offer", step=state.step)
        self._trainer.wait_staged()
        self._update.swap_in_committed()
        directory = self._trainer.copy(state)
        self._update.swap_back()
        self._is_asked = False
        if directory is not None:
            self._made[held.digest] = directory
        self._agent.report_copy(round=held.round, digest=held.digest, directory=directory)
        self._agent.report_activity("wait", step=state.step)


def stored_rounds(state: RoundState, *, has_feedback: bool) -> dict[str, Json]:
    """Return what a checkpoint keeps: the committed state, and what this peer did in the next round."""
    held, progress, within = state.held, state.progress, cast(Json, None)
    if progress is not None:
        within = [progress.round, progress.steps, cast(Json, to_pairs(progress.spent))]
    return {
        "round": held.round,
        "digest": held.digest,
        "feedback": has_feedback,
        "feedback_of": FEEDBACK_OF,
        "inside": state.is_within,
        "within": within,
        "position": None if held.position is None else held.position.to_json(),
        "fragments": [past.to_json() for past in state.fragments],
    }


def restored_rounds(values: Mapping[str, Any]) -> CheckpointLoaded:
    """Read what `stored_rounds` wrote. Raises KeyError, TypeError or ValueError for other values."""
    held = HeldState(
        round=int(values["round"]),
        digest=str(values["digest"]),
        position=Position.from_json(values["position"]) if values.get("position") else None,
    )
    progress = None
    if values["within"] is not None:
        round, steps, spent = values["within"]
        progress = Progress(round=int(round), steps=int(steps), spent=from_pairs(spent))
    fragments = tuple(FragmentHistory.from_json(past) for past in values.get("fragments", ()))
    rest = Resumed(done=progress) if values["inside"] else Idle(ahead=progress)
    return CheckpointLoaded(held=held, rest=rest, fragments=fragments)
