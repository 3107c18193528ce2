"""Keeps what a peer knows of its run in RUN/known.json, so that a coordinator that lost its data is noticed.

The file holds the newest commit that was read, what was given out with it, and the highest epoch. The
checkpoint that the ranks restored tells of one more commit. Where the coordinator knows less, the peer writes
both there as a recovery record.
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
    """Reads and writes RUN/known.json. `note` returns at once: a thread writes, and skips what is already
    outdated.

    remembered: what this peer knew when it was last there; None where it knew nothing. Raises PeerError for a
    file that cannot be read.
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
        """Keep what the coordinator says now, if it is the newest; returns at once."""
        commit = snapshot.commit
        if commit is None or snapshot.forgotten:
            return
        noted = RecoveryRecord(epoch=snapshot.highest, commit=commit, shares=snapshot.shares, held=None)
        if noted == self._noted:
            return
        self._noted, self._newest = noted, commit
        with self._changed:
            self._wanted = noted
            self._changed.notify_all()

    def contradiction(self, snapshot: RunSnapshot, holding: StateHeld | None) -> str | None:
        """Why the coordinator's run is not this peer's: a round that both know ended differently."""
        known = {} if self._newest is None else {self._newest.round: self._newest.digest}
        if holding is not None:
            known[holding.round] = holding.digest
        for round, digest in sorted(known.items()):
            commit = snapshot.commits.get(round)
            if round > 0 and commit is not None and commit.digest != digest:
                return (
                    f"the coordinator has another run called '{self._run}': its round {round} is not the "
                    f"one of this peer's run directory. With another --run directory this peer joins that "
                    f"run; what was trained here stays in {self._path.parent}"
                )
        return None

    def testimony(self, snapshot: RunSnapshot, holding: StateHeld | None) -> RecoveryRecord | None:
        """What the coordinator ought to be told; None where it knows as much."""
        held = self._held(holding)
        is_unknown = held is not None and held.round not in snapshot.commits
        if not snapshot.forgotten and not is_unknown:
            return None
        memory = snapshot.remembered
        commit, shares = (memory.commit, memory.shares) if memory else (None, None)
        if commit is None and held is None:
            return None
        return RecoveryRecord(epoch=snapshot.highest, commit=commit, shares=shares, held=held)

    def close(self) -> None:
        """Write what is still to be written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _held(self, holding: StateHeld | None) -> Commit | None:
        """The commit whose state the ranks hold; of round 0 there is nothing to tell."""
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
                wanted, self._wanted = self._wanted, None
            if wanted is None:
                return
            content = KnownRun(
                run=self._run,
                epoch=wanted.epoch,
                commit=wanted.commit,
                shares=wanted.shares,
                held=wanted.held,
            )
            try:
                write_whole(self._path, encode_text(content) + "\n")
            except OSError as error:  # the next commit's is tried again
                log.error(
                    "%s", storage_error(error, path=self._path, doing="Keeping the newest round").message
                )


def _read(path: Path, run: str) -> RecoveryRecord | None:
    """What was kept of this run; None where there is nothing, or it was another run's."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path=path, doing="Reading what is known of the run") from error
    try:
        known = decode(text, KnownRun)
    except ProtocolError as error:
        raise PeerError(
            f"{path} does not tell which round of the run is the newest: {error.message}",
            remedy="Bring it back from a copy. If there is none, move it away: the checkpoints tell of their "
            "rounds, and other peers of later ones.",
        ) from error
    if known.run != run:
        return None
    return RecoveryRecord(epoch=known.epoch, commit=known.commit, shares=known.shares, held=known.held)


class RecoveryWitness:
    """Keeps what a peer knows of the run up to date, and tells the coordinator what it has lost, each thing
    once.

    It returns at once: the files and the coordinator are written on other threads.
    """

    def __init__(self, context: AgentContext, membership: Membership, knowledge: KnownCommits) -> None:
        self._context, self._membership, self._knowledge = context, membership, knowledge
        self._told: RecoveryRecord | None = None

    def contradiction(self, snapshot: RunSnapshot, holding: StateHeld | None) -> str | None:
        """Why the coordinator's run is not this peer's; None where it is."""
        return self._knowledge.contradiction(snapshot, holding)

    def follow(self, snapshot: RunSnapshot, holding: StateHeld | None, *, is_listed: bool) -> None:
        """Keep what the coordinator says now; where it knows less than this peer, tell it.

        is_listed: what is told lies on the lease of a member, and goes with it.
        """
        self._knowledge.note(snapshot)
        if not is_listed:
            self._told = None
            return
        testimony = self._knowledge.testimony(snapshot, holding)
        if testimony is None or testimony == self._told:
            return
        self._told, me, keys, membership = testimony, self._context.me, self._context.keys, self._membership
        self._context.writer.write("the run's token", self._restore_token)
        self._context.writer.write(
            "testimony", lambda: write_recovery_record(membership, keys, me, testimony)
        )

    def _restore_token(self) -> None:
        """Who comes now is to find the token that this peer and others have."""
        token = self._context.settings.token
        if token and not restore_token(self._context.etcd, self._context.keys, token):
            log.warning(
                "peers that came after the coordinator lost its data have another token than this one, and "
                "cannot connect to it: once it has saved, stop it and start it again"
            )
