"""Chooses the peer that makes a run's backups: of the members that can, the one that was listed first."""

from __future__ import annotations

import logging

from bloomery.checkpoint.remote.backup_duty import Duty, backed_up_round, read_duty, write_duty
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)


class BackupChoice:
    """Decides at each snapshot whether this peer makes the run's backups, and writes that to a file for its
    ranks.

    Each member publishes the newest round that it has backed up. The member that was listed first makes the
    backups; the others prune their checkpoints as if its backups were their own. When it is gone the next
    member takes over. For a moment two members may make backups, which is safe: each writes to a place of its
    own.

    rundir: this peer's run directory.
    me: the name of this peer.
    """

    def __init__(self, rundir: RunDirectory, *, me: str) -> None:
        self._rundir, self._me = rundir, me
        before = read_duty(rundir)
        self._duty = Duty(peer=me, writes=False, covered=-1 if before is None else before.covered)
        write_duty(rundir, self._duty)

    @property
    def round(self) -> int:
        """The newest round that this peer has backed up; -1 if there is none."""
        return backed_up_round(self._rundir)

    def update(self, snapshot: RunSnapshot) -> None:
        """Decide whether this peer makes the backups; write for its ranks that and what others backed up."""
        lives = {
            name: listed.life
            for name, listed in snapshot.members.items()
            if listed.member.backed_up is not None
        }
        if self._me not in lives:
            return
        # A round that is not committed is in no backup, and checkpoints are removed by this number.
        rounds = [
            listed.member.backed_up
            for listed in snapshot.members.values()
            if listed.member.backed_up is not None and listed.member.backed_up < snapshot.round
        ]
        duty = Duty(
            peer=self._me,
            writes=min(lives, key=lambda name: lives[name]) == self._me,
            covered=max(self._duty.covered, *rounds),
        )
        if duty == self._duty:
            return
        if duty.writes != self._duty.writes:
            log.info("this peer %s the backups of the run", "makes" if duty.writes else "no longer makes")
        try:
            write_duty(self._rundir, duty)
        except StorageError as error:
            log.warning("%s", error)  # the next snapshot tries again, since _duty has not changed
            return
        self._duty = duty
