"""Decides of which states a peer's ranks keep copies in memory, for newcomers that want to fetch them.

A copy takes as much memory as the state, and a peer that makes one pauses for it. So none is made before a
listed peer wants a state, a few peers make one for each, and it goes when nobody wants it any more.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Mapping, Sequence

from bloomery.agent.agent_context import ServesState
from bloomery.agent.rank_server import RankServer
from bloomery.agent.rank_state import LocalRanks
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.errors import BloomeryError
from bloomery.protocol.rank_messages import CopyState, StateCopied
from bloomery.state_transfer.source import THROUGH_RELAY

log = logging.getLogger(__name__)

SOURCES = 4
"""So many peers make a copy for one newcomer, and twice as many with each round that is committed without it,
since one that makes none, or a wrong one, must not keep it out."""
_DOUBLINGS = 10
_KEPT = 2
"""A peer keeps so many copies at most: one that is being fetched, and one of a later state."""


class CopyKeeper:
    """Has this peer's ranks make and remove copies, and serves those that they made.

    made: the digests of the copies that are served, the oldest first.

    Args:
        server: serves the copies.
        ranks: where the ranks are told.
        local: what the ranks have reported.
        me: the name of this peer.
    """

    def __init__(self, server: ServesState, ranks: RankServer, local: LocalRanks, *, me: str) -> None:
        self._server, self._ranks, self._local, self._me = server, ranks, local, me
        self.made: tuple[str, ...] = ()
        self._told = CopyState(keep=(), makes="")

    def update(self, snapshot: RunSnapshot) -> None:
        """Serve the copies of states that ranks have made, and tell the ranks which copies to make next."""
        for copy in self._local.take_copies():
            if copy.digest not in self.made and self._serve(copy):
                self.made = (*self.made, copy.digest)
        wanted = copies_wanted(snapshot, me=self._me, made=self.made)
        if wanted == self._told:
            return
        self._told = wanted
        if set(wanted.keep) < set(self.made):
            self.made = wanted.keep
            self._server.keep(self.made)
        self._ranks.send(wanted)

    def _serve(self, copy: StateCopied) -> bool:
        """Serve a copy that the ranks made, and return whether it is served."""
        if copy.directory is None:
            return False
        try:
            self._server.offer(copy.directory, round=copy.round, digest=copy.digest)
        except (BloomeryError, OSError) as error:
            log.warning("round %d is not served: %s", copy.round, error)
            return False
        return True


def copies_wanted(snapshot: RunSnapshot, *, me: str, made: Sequence[str]) -> CopyState:
    """Return which copies this peer keeps, and whether its ranks make one of the state that they hold.

    made: the digests of the copies that it has, the oldest first.
    """
    newcomers = {
        name: listed
        for name, listed in sorted(snapshot.members.items())
        if listed.member.wants and name != me
    }
    wanted = {listed.member.wants for listed in newcomers.values()}
    keep = tuple(digest for digest in made if digest in wanted or (wanted and digest == made[-1]))
    commit = snapshot.commit
    newest = commit.digest if commit is not None else ""
    serving = snapshot.holders(newest).items()
    holders = {
        name: THROUGH_RELAY in listed.member.serves for name, listed in serving if listed.member.serves
    }
    makes = newest in wanted and newest not in made and me in holders and len(keep) < _KEPT
    is_source = any(
        me in _sources(name, listed, holders)
        for name, listed in newcomers.items()
        if makes and listed.member.wants == newest
    )
    return CopyState(keep=keep, makes=newest if is_source else "")


def _sources(newcomer: str, listed: ListedMember, holders: Mapping[str, bool]) -> Sequence[str]:
    """Return the peers that make a copy for a newcomer: those that follow it by name among the holders.

    Those that can be dialled come first, to spare the peers that relay.

    holders: the peers that hold the state and can serve a copy of it, and whether through a relay alone.
    """
    count = SOURCES << min(listed.member.overtaken, _DOUBLINGS)
    names = list(holders)
    first = bisect(names, newcomer)
    return sorted((*names[first:], *names[:first]), key=lambda name: holders[name])[:count]
