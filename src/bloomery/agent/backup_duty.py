"""Decides which member backs the run up: of those that can, the one that was listed first."""

from __future__ import annotations

import logging

from bloomery.checkpoint.remote.backup_duty import Duty, backed_up_round, read_duty, write_duty
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)


class Backups:
    """One peer's part in the backups of its run. It tells its ranks through the run directory.

    Each member publishes the newest round that it has backed up. The member that was listed first writes; the
    others prune as if its backups were theirs. When it is gone the next one takes over. For a moment two may
    write, each to a place of its own.
    """

    def __init__(self, rundir: RunDirectory, *, me: str) -> None:
        self._rundir, self._me = rundir, me
        before = read_duty(rundir)
        self._duty = Duty(peer=me, writes=False, covered=-1 if before is None else before.covered)
        write_duty(rundir, self._duty)

    @property
    def round(self) -> int:
        """The newest round that this peer has backed up; -1 for none."""
        return backed_up_round(self._rundir)

    def look(self, snapshot: RunSnapshot) -> None:
        """Take over, or let the ranks know what others have backed up."""
        lives = {name: one.life for name, one in snapshot.members.items() if one.member.backed_up is not None}
        if self._me not in lives:
            return
        told = [one.member.backed_up for one in snapshot.members.values() if one.member.backed_up is not None]
        duty = Duty(
            peer=self._me,
            writes=min(lives, key=lambda name: lives[name]) == self._me,
            covered=max(self._duty.covered, *told),
        )
        if duty == self._duty:
            return
        if duty.writes != self._duty.writes:
            log.info("this peer %s the run up", "backs" if duty.writes else "no longer backs")
        try:
            write_duty(self._rundir, duty)
        except StorageError as error:
            log.warning("%s", error)  # the next look tries again
            return
        self._duty = duty
