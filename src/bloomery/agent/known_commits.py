"""Keeps the newest commit that a peer knows in RUN/known.json, and detects a coordinator that lost its data.

The file holds the newest commit that the peer has read, the shares of samples that belong to it, and the
highest epoch. The checkpoint that the ranks restored belongs to one more commit. Where the coordinator knows
less than that, the peer writes both to the coordinator as a recovery record.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from bloomery.agent.agent_context import AgentContext
from bloomery.coordination.membership import Membership
from bloomery.coordination.recovery import write_recovery_record
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.coordination.transactions import restore_token
from bloomery.durable import write_whole
from bloomery.errors import PeerError, storage_error
from bloomery.protocol.encoding import ProtocolError, decode, encode_text
from bloomery.protocol.rank_messages import StateHeld
from bloomery.protocol.records import Commit, KnownRun, RecoveryRecord

log = logging.getLogger(__name__)

_CLOSE_S = 10.0


class KnownCommits:
    """Reads and writes RUN/known.json. A thread writes the file, and skips records that are outdated by then.

    Raises PeerError for a file that cannot be read.

    remembered: what the file held at the start; None if there was no file, or it was another run's.
    """

    def __init__(self, path: Path, *, run: str, peer: str) -> None:
        self._path, self._run, self._peer = path, run, peer
        self.remembered = _read(path, run)
        self._newest = self.remembered.commit if self.remembered else None
        self._noted = self.remembered
        self._wanted: RecoveryRecord | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._write_all, name="knowledge", daemon=True)
        self._thread.start()

    def note(self, snapshot: RunSnapshot) -> None:
        """Queue the snapshot's commit to be written, if it is new and the coordinator has lost nothing."""
        commit = snapshot.commit
        if commit is None or snapshot.forgotten:
            return
        noted = RecoveryRecord(epoch=snapshot.own_highest, commit=commit, shares=snapshot.shares, held=None)
        if noted == self._noted:
            return
        self._noted, self._newest = noted, commit
        with self._changed:
            self._wanted = noted
            self._changed.notify_all()

    def contradiction(self, snapshot: RunSnapshot, holding: StateHeld | None) -> str | None:
        """Return why the coordinator's run is not this peer's run; None if it is.

        It is not if a round that both know ended with another digest. holding: what state the ranks hold.
        """
        digest_of_round = {} if self._newest is None else {self._newest.round: self._newest.digest}
        if holding is not None:
            digest_of_round[holding.round] = holding.digest
        for round, digest in sorted(digest_of_round.items()):
            commit = snapshot.commits.get(round)
            if round > 0 and commit is not None and commit.digest != digest:
                return (
                    f"the coordinator has another run called '{self._run}': its round {round} is not the "
                    f"one of this peer's run directory. With another --run directory this peer joins that "
                    f"run; what was trained here stays in {self._path.parent}"
                )
        return None

    def recovery_record(self, snapshot: RunSnapshot, holding: StateHeld | None) -> RecoveryRecord | None:
        """Return the recovery record that the coordinator needs from this peer; None if none is needed."""
        held_commit = self._held(holding)
        is_unknown = held_commit is not None and held_commit.round not in snapshot.commits
        if not snapshot.forgotten and not is_unknown:
            return None
        memory = snapshot.remembered
        commit, shares = (memory.commit, memory.shares) if memory else (None, None)
        if commit is None and held_commit is None:
            return None
        return RecoveryRecord(epoch=snapshot.own_highest, commit=commit, shares=shares, held=held_commit)

    def close(self) -> None:
        """Write the record that still waits, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _held(self, holding: StateHeld | None) -> Commit | None:
        """Return the commit whose state the ranks hold; None while that is no committed state."""
        if holding is None or holding.position is None or holding.round <= 0:
            return None
        return Commit(
            round=holding.round,
            epoch=0,
            members=(),
            digest=holding.digest,
            position=holding.position,
            sources=(self._peer,),
            left_out={},
            rewind_to=None,
            save=False,
            why="as a checkpoint tells it",
        )

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None or self._is_closed)
                record, self._wanted = self._wanted, None
            if record is None:
                return
            content = KnownRun(
                run=self._run,
                epoch=record.epoch,
                commit=record.commit,
                shares=record.shares,
                held=record.held,
            )
            try:
                write_whole(self._path, encode_text(content) + "\n")
            except OSError as error:  # the next commit is written to the same file
                log.error(
                    "%s", storage_error(error, path=self._path, doing="Keeping the newest round").message
                )


def _read(path: Path, run: str) -> RecoveryRecord | None:
    """Return what the file holds of this run; None if there is no file, or it is another run's."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path=path, doing="Reading what is known of the run") from error
    try:
        known_run = decode(content, KnownRun)
    except ProtocolError as error:
        raise PeerError(
            f"It cannot be read from {path} which round of the run is the newest: {error.message}",
            remedy="Restore it from a copy. If there is none, move it away: checkpoints know their rounds, "
            "and other peers know later ones.",
        ) from error
    if known_run.run != run:
        return None
    return RecoveryRecord(
        epoch=known_run.epoch, commit=known_run.commit, shares=known_run.shares, held=known_run.held
    )


class RecoveryReporter:
    """Keeps RUN/known.json up to date, and writes a recovery record to a coordinator that has lost data.

    It writes each record once. Its methods return at once, because other threads write the file and to the
    coordinator.
    """

    def __init__(self, context: AgentContext, membership: Membership, knowledge: KnownCommits) -> None:
        self._context, self._membership, self._knowledge = context, membership, knowledge
        self._told: RecoveryRecord | None = None

    def contradiction(self, snapshot: RunSnapshot, holding: StateHeld | None) -> str | None:
        """Return why the coordinator's run is not this peer's run; None if it is."""
        return self._knowledge.contradiction(snapshot, holding)

    def follow(self, snapshot: RunSnapshot, holding: StateHeld | None, *, is_listed: bool) -> None:
        """Note the snapshot's commit; where the coordinator knows less than this peer, write it a record.

        is_listed: whether this peer is a member now. The record is attached to a member's lease and vanishes
            with it, so that it is written again after each new listing.
        """
        self._knowledge.note(snapshot)
        if not is_listed:
            self._told = None
            return
        recovery_record = self._knowledge.recovery_record(snapshot, holding)
        if recovery_record is None or recovery_record == self._told:
            return
        self._told, me, keys, membership = (
            recovery_record,
            self._context.me,
            self._context.keys,
            self._membership,
        )
        self._context.writer.write("the run's token", self._restore_token)
        self._context.writer.write(
            "recovery record", lambda: write_recovery_record(membership, keys, me, recovery_record)
        )

    def _restore_token(self) -> None:
        """Write this peer's token back, so that peers that join from now on get the token of the members."""
        token = self._context.settings.token
        if token and not restore_token(self._context.etcd, self._context.keys, token):
            log.warning(
                "peers that came after the coordinator lost its data have another token than this one, and "
                "cannot connect to it: once it has saved, stop it and start it again"
            )
