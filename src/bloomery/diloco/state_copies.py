"""Makes and keeps the copies of committed states for which a peer's agent asks, since newcomers want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bloomery.diloco.agent_client import AgentClient
from bloomery.diloco.outer import TrainerHooks
from bloomery.diloco.outer_loop_state import HeldState
from bloomery.diloco.outer_update import OuterUpdate
from bloomery.protocol.rank_messages import CopyState


class StateCopies:
    """The copies of one peer. Each takes as much memory as the state, so there are none without a newcomer.

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
        self._agent.moving("offer", step=state.step)
        self._trainer.wait_staged()
        self._update.swap_in_committed()
        directory = self._trainer.copy(state)
        self._update.swap_back()
        self._is_asked = False
        if directory is not None:
            self._made[held.digest] = directory
        self._agent.copied(round=held.round, digest=held.digest, directory=directory)
        self._agent.moving("wait", step=state.step)
