"""Lists a peer among the run's members, and publishes the bandwidth of its links to the others.

A peer is listed with the state that it holds, and unlisted while its ranks make no progress. Bandwidths are
measured after a member has joined, for a fraction of a second each, one after the other and never during an
all_reduce. The order of the ring is computed from the bandwidths that all peers publish.
"""

from __future__ import annotations

import json
import logging
import threading
import time

import msgspec

from bloomery.agent.agent_context import AgentContext
from bloomery.coordination.membership import Membership
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.protocol.records import Member
from bloomery.transport.bandwidth_probe import ProbeSizes
from bloomery.transport.connection_manager import Contact
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

    @property
    def is_wanted(self) -> bool:
        """Return whether this peer is listed, or about to be listed."""
        return self._wanted is not None

    def be(self, member: Member, *, after: int) -> None:
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

    def vanish(self) -> None:
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


class BandwidthReports:
    """Measures this peer's links in the background. It measures nothing in a run of two peers, whose ring has
    only one order.
    """

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._measured: dict[str, tuple[str, float]] = {}
        self._again_s: dict[tuple[str, str], float] = {}
        self._thread: threading.Thread | None = None

    def look(self, snapshot: RunSnapshot, *, is_ringing: bool, now: float) -> None:
        """Start to measure the next unknown link, if there is one and no measurement or ring is under way.

        is_ringing: whether an all_reduce is under way here.
        now: the monotonic clock, in seconds.
        """
        if is_ringing or len(snapshot.members) < 3 or (self._thread and self._thread.is_alive()):
            return
        for peer in self._in_turn(snapshot):
            member = snapshot.members[peer].member
            known = self._measured.get(peer, ("", 0.0))[0] == member.incarnation
            if known or not member.addresses or now < self._again_s.get((peer, member.incarnation), 0.0):
                continue
            self._thread = threading.Thread(target=self._measure, args=(member,), name="probe", daemon=True)
            self._thread.start()
            return

    def _in_turn(self, snapshot: RunSnapshot) -> list[str]:
        """Return the other peers, from the next name on, so that not all measure one peer at once."""
        names, me = sorted(snapshot.members), self._context.me
        place = sum(name < me for name in names)
        return [name for name in (*names[place:], *names[:place]) if name != me]

    def _measure(self, member: Member) -> None:
        contact = Contact(peer=member.peer, incarnation=member.incarnation, addresses=member.addresses)
        limits = self._context.settings.timeouts
        sizes = ProbeSizes(streams=self._context.settings.streams, most=_MOST)
        try:
            measured = self._context.station.probe(contact, sizes=sizes, deadline_s=limits.connect_s)
        except (PeerRefused, OSError) as error:
            log.info("the link to '%s' was not measured: %s", member.peer, error)
            self._again_s[member.peer, member.incarnation] = time.monotonic() + _AGAIN_S
            return
        self._measured[member.peer] = (member.incarnation, measured.mbit_s)
        log.info("to '%s': %.0f Mbit/s, %.1f ms", member.peer, measured.mbit_s, measured.rtt_ms)
        key = self._context.keys.rate(self._context.me)
        text = json.dumps({peer: round(rate, 1) for peer, (_, rate) in sorted(self._measured.items())})

        def publish() -> None:
            self._context.etcd.put(key, text)

        self._context.writer.write("rates", publish)
        self._context.poke()
