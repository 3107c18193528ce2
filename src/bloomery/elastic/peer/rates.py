"""Which links are fast: this peer measures its own to the others, and says it in the coordinator.

Measured when somebody comes, a fraction of a second each, one after the other, and never during a ring. The
order of the ring follows from what all peers say.
"""

from __future__ import annotations

import json
import logging
import threading
import time

from bloomery.elastic.control.snapshot import Snapshot
from bloomery.elastic.links.probe import Sizes
from bloomery.elastic.links.refusal import Refused
from bloomery.elastic.links.station import Contact
from bloomery.elastic.peer.means import Means
from bloomery.elastic.records import Member

log = logging.getLogger(__name__)

_AGAIN_S = 60.0
_MOST = 1 << 22


class Rates:
    """Measures in the background. Two peers have one ring, so nothing is measured for them."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._measured: dict[str, tuple[str, float]] = {}
        self._again_s: dict[tuple[str, str], float] = {}
        self._thread: threading.Thread | None = None

    def look(self, snapshot: Snapshot, *, is_ringing: bool, now: float) -> None:
        """Measure the next link that is not known, if there is one and no ring is under way."""
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

    def _in_turn(self, snapshot: Snapshot) -> list[str]:
        """The others, from the next by name on: so that not all measure one peer at once."""
        names, me = sorted(snapshot.members), self._means.me
        place = sum(name < me for name in names)
        return [name for name in (*names[place:], *names[:place]) if name != me]

    def _measure(self, member: Member) -> None:
        contact = Contact(peer=member.peer, incarnation=member.incarnation, addresses=member.addresses)
        limits = self._means.settings.timeouts
        sizes = Sizes(streams=self._means.settings.streams, most=_MOST)
        try:
            found = self._means.station.probe(contact, sizes=sizes, deadline_s=limits.connect_s)
        except (Refused, OSError) as error:
            log.info("the link to '%s' was not measured: %s", member.peer, error)
            self._again_s[member.peer, member.incarnation] = time.monotonic() + _AGAIN_S
            return
        self._measured[member.peer] = (member.incarnation, found.mbit_s)
        log.info("to '%s': %.0f Mbit/s, %.1f ms", member.peer, found.mbit_s, found.rtt_ms)
        key = self._means.keys.rate(self._means.me)
        text = json.dumps({peer: round(rate, 1) for peer, (_, rate) in sorted(self._measured.items())})

        def publish() -> None:
            self._means.etcd.put(key, text)

        self._means.writer.write("rates", publish)
        self._means.poke()
