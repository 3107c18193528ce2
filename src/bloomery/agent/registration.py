"""Registers a peer in the coordinator, and publishes link bandwidths.

A peer is listed with the state that it holds, and unlisted while its ranks make no progress. Bandwidths are
measured after a member has joined, for a fraction of a second each, one after the other, and never during an
all_reduce or a fetch: the traffic would falsify the figures. The order of the ring is computed from the
bandwidths that all peers publish.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bloomery.agent.agent_context import AgentContext
from bloomery.coordination.membership import Membership
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.protocol.records import Member
from bloomery.transport.bandwidth_probe import ProbeSizes
from bloomery.transport.connection import Contact
from bloomery.transport.trust import PeerRefused

log = logging.getLogger(__name__)

_JOB = "the list of members"


class Registration:
    """Lists this peer in the coordinator, and takes it off the list. The writer's thread does both in order.

    generation: how often this peer was listed anew; changes of its entry do not count.
    """

    def __init__(self, context: AgentContext, membership: Membership) -> None:
        self._context, self._membership = context, membership
        self._wanted: Member | None = None
        self._after = 0
        self.generation = 0

    def publish(self, member: Member, *, after: int) -> None:
        """List this peer with this entry, or change its entry, if that says something new.

        member: the entry. A new `epoch` alone is not written.
        after: revision of the newest commit. A new one is written even with an equal entry, because the
            others wait until each member has answered it.
        """
        wanted = self._wanted
        if (
            wanted is not None
            and after == self._after
            and member == msgspec.structs.replace(wanted, epoch=member.epoch)
        ):
            return
        is_new, self._wanted, self._after = wanted is None, member, after
        if is_new:
            self.generation += 1
            self._context.writer.write(_JOB, self._join)
        else:
            self._context.writer.write(_JOB, self._update)

    def unlist(self) -> None:
        """Take this peer off the list, before all writes that wait."""
        if self._wanted is None:
            return
        self._wanted = None
        self._context.writer.write(_JOB, self._membership.withdraw, first=True)

    def is_listed(self, snapshot: RunSnapshot) -> bool:
        """Return whether the snapshot lists this peer with its present incarnation."""
        seen = snapshot.members.get(self._context.me)
        return (
            self._wanted is not None
            and seen is not None
            and seen.member.incarnation == self._context.settings.incarnation
        )

    def own_view(self, snapshot: RunSnapshot) -> RunSnapshot:
        """Return the snapshot from which this process decides: without this peer unless it is listed.

        After a kill the former process of this peer stays listed until its lease ends. That entry, its share
        and its offer are not this process's, which must neither propose nor take a share in its name.
        """
        return snapshot if self.is_listed(snapshot) else snapshot.without(self._context.me)

    def _join(self) -> None:
        if self._wanted is not None:
            self._membership.join(self._wanted)
            log.info("listed as '%s'", self._context.me)

    def _update(self) -> None:
        member = self._wanted
        if member is None:
            return
        if self._membership.lease:
            self._membership.update(member)
        else:  # this job replaced the first listing before that had run
            self._membership.join(member)


_AGAIN_S = 60.0
_MOST = 1 << 22
_NEAR, _FAR = 12, 12
"""The most links that a peer measures to peers that follow it by name, and to peers further on."""
_PUBLISHED_EVERY_S = 10.0
_OLD_S = 3_600.0
"""The age after which a link is measured again, seconds: links change within the weeks of a run."""
_ALIKE = 0.25
"""A rate that differs from the known one by this share at most is no news: each peer would plan another ring,
which needs other connections."""


def links_to_measure(names: Sequence[str], me: str) -> list[str]:
    """Return the peers to which `me` measures its link: all of them in a small run, and at most 24.

    They are the peers that follow it in the order of names, which is a ring whose links are all measured,
    and others at even distances. So the measurements of a run grow with its peers and not with their square.

    names: all peers in the order of names.
    """
    place = sum(name < me for name in names)
    others = [name for name in (*names[place:], *names[:place]) if name != me]
    near, far = others[:_NEAR], others[_NEAR:]
    return near + [far[number * len(far) // _FAR] for number in range(_FAR)] if len(far) > _FAR else others


class _Measured(NamedTuple):
    """The link to a peer's process: its rate in megabits a second, and when it was measured."""

    incarnation: str
    mbit_s: float
    measured_s: float


class BandwidthReports:
    """Measures this peer's links in the background. It measures nothing in a run of two peers, whose ring has
    only one order.
    """

    def __init__(self, context: AgentContext, membership: Membership) -> None:
        self._context, self._membership = context, membership
        self._measured: dict[str, _Measured] = {}
        self._again_s: dict[tuple[str, str], float] = {}
        self._thread: threading.Thread | None = None
        self._is_unpublished, self._published_s = False, float("-inf")

    def update(self, snapshot: RunSnapshot, *, is_busy: bool, now: float) -> None:
        """Start to measure the next unknown link, if there is one and no measurement is under way.

        Links to peers that fetch a state are measured afterwards.

        is_busy: whether an all_reduce or a fetch is under way here; then no measurement begins.
        now: the monotonic clock, in seconds.
        """
        if is_busy or len(snapshot.members) < 3 or (self._thread and self._thread.is_alive()):
            return
        member = self._next(snapshot, now)
        if member is None:
            if self._is_unpublished:
                self._publish(now)
            return
        if self._is_unpublished and now > self._published_s + _PUBLISHED_EVERY_S:
            self._publish(now)
        probing = threading.Thread(target=self._measure, args=(member,), name="probe", daemon=True)
        try:
            probing.start()
        except RuntimeError as error:  # no thread is left
            self._put_off(member, error)
            return
        self._thread = probing

    def _next(self, snapshot: RunSnapshot, now: float) -> Member | None:
        """Return the peer whose link is measured next: one that is not known, or else the oldest old one."""
        old: list[tuple[float, str]] = []
        for peer in links_to_measure(sorted(snapshot.members), self._context.me):
            member, known = snapshot.members[peer].member, self._measured.get(peer)
            if (
                not member.addresses
                or member.wants
                or now < self._again_s.get((peer, member.incarnation), 0.0)
            ):
                continue
            if known is None or known.incarnation != member.incarnation:
                return member
            if now >= known.measured_s + _OLD_S:
                old.append((known.measured_s, peer))
        return snapshot.members[min(old)[1]].member if old else None

    def _measure(self, member: Member) -> None:
        contact = Contact(peer=member.peer, incarnation=member.incarnation, addresses=member.addresses)
        limits = self._context.settings.timeouts
        sizes = ProbeSizes(streams=self._context.settings.streams, most=_MOST)
        try:
            measured = self._context.connection_manager.probe(
                contact, sizes=sizes, deadline_s=limits.connect_s
            )
        except (PeerRefused, OSError, RuntimeError) as error:  # RuntimeError: no thread is left
            self._put_off(member, error)
            return
        before, mbit_s = self._measured.get(member.peer), measured.mbit_s
        if (
            before is not None
            and before.incarnation == member.incarnation
            and abs(mbit_s - before.mbit_s) <= _ALIKE * before.mbit_s
        ):
            mbit_s = before.mbit_s
        else:
            self._is_unpublished = True
        self._measured[member.peer] = _Measured(member.incarnation, mbit_s, time.monotonic())
        log.info("to '%s': %.0f Mbit/s, %.1f ms", member.peer, measured.mbit_s, measured.rtt_ms)
        self._context.wake()

    def _put_off(self, member: Member, error: Exception) -> None:
        log.info("the link to '%s' was not measured: %s", member.peer, error)
        self._again_s[member.peer, member.incarnation] = time.monotonic() + _AGAIN_S

    def _publish(self, now: float) -> None:
        """Write what is measured so far: all peers read each write, so several links share one."""
        self._is_unpublished, self._published_s = False, now
        key = self._context.keys.rate(self._context.me)
        text = json.dumps({peer: round(known.mbit_s, 1) for peer, known in sorted(self._measured.items())})

        self._context.writer.write("rates", lambda: self._membership.keep(key, text))
