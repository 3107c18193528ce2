"""Reads saved checkpoints back and verifies them: each rank its own files; the first rank combines results.

After a save beside the training, a rank's writer reads its files back while no other save is under way, and
the ranks tell each other the outcome when the next save begins. So no rank reads more than it wrote, and the
end of a run waits only for the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from bloomery.checkpoint.save.staging import PendingSave
from bloomery.checkpoint.writer.client import WriterProcess
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer
from bloomery.errors import CheckpointError

log = logging.getLogger(__name__)


_REMEMBERED = 16
"""The most checkpoints that only some ranks have read back: those that the others gave up stay so."""


class OwnFilesCheck:
    """Has one rank's writer read back what it wrote for each save, and keeps the outcomes.

    given_up: how many checkpoints this rank has not read back, because the writer was needed.
    """

    def __init__(self) -> None:
        self.given_up = 0
        self._outcomes: dict[str, str] = {}
        self._gave_up = False
        self._carried: set[str] = set()

    def carry_to_end(self, name: str) -> None:
        """Have a checkpoint read back to its end, as on all ranks after one of them has given another up.

        Else one of hundreds of ranks would give up at nearly each save, and no checkpoint would ever be known
        to be intact.
        """
        self._carried.add(name)

    def run(
        self,
        saving: PendingSave,
        *,
        writer: WriterProcess,
        buffer: SharedBuffer,
        is_free: Callable[[], bool],
    ) -> None:
        """Have the files of an ended save read back, unless the writer is needed (`is_free` says no).

        After one that was given up, the next is carried to its end, or saves without a pause would never be
        checked. Called in the save's thread.
        """
        buffer.stops_reading = False
        to_its_end = self._gave_up or saving.name in self._carried
        self._carried.discard(saving.name)
        if not to_its_end and not is_free():
            self._note_end(gave_up=True)
            return
        order: dict[str, Any] = {  # Any: JSON
            "verify": saving.order["partial"],
            "store": saving.order["store"],
            "rank": saving.order["rank"],
            "buffer": saving.buffer,
            "to_its_end": to_its_end,
        }
        try:
            answer = writer.write(
                order, deadline_s=saving.deadlines.answer_s, silence_s=saving.deadlines.silence_s, tries=1
            )
        except CheckpointError as error:  # the next save starts a new writer, and reports what is wrong
            log.info("%s was not read back: %s", saving.name, error.message)
            return
        self._note_end(gave_up=answer["problem"] is None)
        if answer["problem"] is not None:
            self._outcomes[saving.name] = answer["problem"]

    def _note_end(self, *, gave_up: bool) -> None:
        self._gave_up = gave_up
        self.given_up += gave_up

    def take(self) -> dict[str, str]:
        """Return what is wrong with each checkpoint read back since the last call; "" for nothing."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes


class VerificationResults:
    """Combines the ranks' results: a checkpoint is intact once every rank has read back its own files of it.

    intact: called with the name of a checkpoint when that is known.
    """

    def __init__(self, *, world: int, intact: Callable[[str], None]) -> None:
        self._world, self._intact = world, intact
        self._ranks_done: dict[str, set[int]] = {}

    def add(self, rank: int, outcomes: Mapping[str, str]) -> list[str]:
        """Take what a rank found, by checkpoint; return the checkpoints that are now known to be intact."""
        intact = []
        for name, problem in outcomes.items():
            if problem:
                log.warning("%s is damaged: rank %d: %s", name, rank, problem)
                continue
            done = self._ranks_done.setdefault(name, set())
            done.add(rank)
            if len(self._ranks_done) > _REMEMBERED:
                del self._ranks_done[next(iter(self._ranks_done))]
            if len(done) == self._world:
                del self._ranks_done[name]
                self._intact(name)
                intact.append(name)
        return intact
