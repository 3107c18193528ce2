"""A peer among the members: listed with what it holds, unlisted while its ranks do not move."""

from __future__ import annotations

import logging
from dataclasses import replace

from bloomery.elastic.control.membership import Membership
from bloomery.elastic.control.snapshot import Snapshot
from bloomery.elastic.peer.means import Means
from bloomery.elastic.records import Member

log = logging.getLogger(__name__)

_JOB = "the list of members"


class Presence:
    """Says what this peer is; the writing is done elsewhere. generation: grows with each listing."""

    def __init__(self, means: Means, membership: Membership) -> None:
        self._means, self._membership = means, membership
        self._wanted: Member | None = None
        self.generation = 0

    @property
    def is_wanted(self) -> bool:
        """Whether this peer is, or is about to be, listed."""
        return self._wanted is not None

    def be(self, member: Member) -> None:
        """List this peer so."""
        if self._wanted is not None and member == replace(self._wanted, epoch=member.epoch):
            return
        is_new, self._wanted = self._wanted is None, member
        if is_new:
            self.generation += 1
            self._means.writer.write(_JOB, self._join)
        else:
            self._means.writer.write(_JOB, self._update)

    def vanish(self) -> None:
        """Be unlisted at once."""
        if self._wanted is None:
            return
        self._wanted = None
        self._means.writer.write(_JOB, self._membership.withdraw, first=True)

    def is_listed(self, snapshot: Snapshot) -> bool:
        """Whether everybody can see this life of this peer."""
        seen = snapshot.members.get(self._means.me)
        return (
            self._wanted is not None
            and seen is not None
            and seen.member.incarnation == self._means.settings.incarnation
        )

    def _join(self) -> None:
        if self._wanted is not None:
            self._membership.join(self._wanted)
            log.info("listed as '%s'", self._means.me)

    def _update(self) -> None:
        member = self._wanted
        if member is None:
            return
        if self._membership.lease:
            self._membership.update(member)
        else:  # the first listing was still under way, and this one took its place
            self._membership.join(member)
