"""Watches the ranks of one launcher: why they must stop, and reports of failures to other launchers."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from bloomery.errors import StorageError
from bloomery.operate.decision import FAILURE, HANG, SILENT, Decision
from bloomery.operate.departure import Departure
from bloomery.operate.job_board import JobBoard
from bloomery.operate.share_log import ShareLog

_CHILDREN_S = 1.0
"""The least seconds between two looks at what the ranks have started: each reads a file for each thread."""


class ShareWatch:
    """Follows one attempt for the ranks of one launcher: when they must stop, and what to report of them.

    It serves `run_ranks` as the supervisor of the ranks and as the launchers of the other nodes.

    asked: the signal that asked this launcher to end; 0 for none.
    """

    def __init__(
        self,
        board: JobBoard,
        decision: Decision,
        share: ShareLog,
        *,
        name: str,
        departure: Departure | None = None,
    ) -> None:
        self._departure = departure
        self.name, self._board, self._decision, self._share = name, board, decision, share
        self._ending: Mapping[str, Any] = {}
        self._is_over, self.asked = False, 0
        self._children_due = float("-inf")

    def poll(self) -> None:
        """Read from the board whether the attempt ends. Called from the thread that follows the job."""
        if time.monotonic() >= self._children_due:
            self._children_due = time.monotonic() + _CHILDREN_S
            self._share.note_children()
        number = self._decision.number
        if not self._ending:
            self._ending = self._board.get(f"ending-{number}") or {}
        self._is_over = self._board.has(f"decision-{number + 1:06d}")

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the process id of each rank."""
        self._share.started(pids)

    def unlogged(self, rank: int, line: str) -> None:
        """Record a line of a rank that its log did not take, as on a full disk."""
        self._share.unlogged(rank, line)

    def ending(self) -> None:
        """Do nothing: `report_failure` tells the leader, who judges no standstill from then on."""

    def ended(self, statuses: Mapping[int, int], *, killed: Collection[int]) -> None:
        """Record the exit status of each rank, and which ranks this launcher killed."""
        self._share.ended(statuses, killed=killed)

    def signalled(self, number: int) -> None:
        """Record that a signal asked this launcher to end, or that the scheduler has warned the job."""
        if number != signal.SIGUSR1:
            self.asked = number
        elif self._departure is not None:
            self._departure.warned()

    def why_to_stop(self) -> str:
        """Return why the ranks must save and stop now; "" while they need not."""
        return self._departure.reason if self._departure is not None else ""

    def why_to_end(self) -> str:
        """Return why the ranks here must be killed now; "" while they need not."""
        if self._ending.get("kind") in (HANG, SILENT):
            return str(self._ending["why"])
        return "the other launchers have gone on without this node" if self._is_over else ""

    def failure(self) -> str:
        """Return why the ranks here shall end, for another node's ranks failed; "" while they need not."""
        if self._ending.get("kind") == FAILURE and self._ending.get("host") != self._board.host:
            return str(self._ending["why"])
        return ""

    def report_failure(self, failure: str) -> None:
        """Tell the other launchers that a rank of this machine failed. Only the first report counts."""
        record = {"kind": FAILURE, "why": failure, "host": self._board.host}
        with suppress(StorageError):  # the others see the lost connections
            self._board.put(f"ending-{self._decision.number}", record)
