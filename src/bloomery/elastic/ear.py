"""What a rank hears of its parent: in order, and between steps as much as the other ranks of its peer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bloomery.checkpoint.ranks import Gather
from bloomery.elastic.seam import Abort, Halt, Parent, Told
from bloomery.errors import PeerError

log = logging.getLogger(__name__)

TELL_S = 60.0
"""How often somebody who waits says for whom."""
DEADLINE_S = 24 * 3600.0
"""The parent knows better when to give up: it ends its ranks."""
_SAME_S = 120.0
"""How long after the first rank another may hear the same message."""


class Ear:
    """Hears one rank's parent. Every rank of a peer hears the same messages in the same order."""

    def __init__(self, parent: Parent, gather: Gather) -> None:
        self._parent, self._gather = parent, gather

    def between_steps(self) -> list[Told]:
        """What the first rank has been told since the last call, on every rank. Collective over the peer."""
        count = self._gather(len(self._parent.peek()))[0]
        return [self._next() for _ in range(count)]

    def wait(self, for_what: str) -> Told:
        """The next message. Raises PeerError when none comes in a day."""
        begun = time.monotonic()
        told_s = TELL_S
        while (told := self._parent.hear(1.0)) is None:
            waited_s = time.monotonic() - begun
            if waited_s > DEADLINE_S:
                raise PeerError(
                    f"No word from this peer's parent in {waited_s / 3600:.0f} hours: waited for {for_what}.",
                    remedy="Is the coordinator up? The same command starts the peer again.",
                )
            if waited_s > told_s:
                log.warning("waiting for %s since %.0f s", for_what, waited_s)
                told_s += TELL_S
        return told

    def while_reducing(self, epoch: int, over: Callable[[float], bool]) -> bool:
        """Wait until `over(timeout_s)` says so. False, at once, when the ring is to be cancelled."""
        while not over(0.02):
            if any(_ends(told, epoch) for told in self._parent.peek()):
                return False
        return True

    def _next(self) -> Told:
        told = self._parent.hear(_SAME_S)
        if told is None:
            raise PeerError(
                "The ranks of this peer were told different things.",
                remedy="The same command starts the peer again. Please report it with the parent's words.",
            )
        return told


def _ends(told: Told, epoch: int) -> bool:
    return isinstance(told, Halt) or (isinstance(told, Abort) and told.epoch == epoch)
