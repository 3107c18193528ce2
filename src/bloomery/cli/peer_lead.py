"""A parent and its ranks in one process tree: started together, ended together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bloomery.elastic.peer.parent import Ending, PeerParent

log = logging.getLogger(__name__)

_JOIN_S = 60.0


def lead(parent: PeerParent, start_ranks: Callable[[str], int]) -> tuple[int, Ending | None]:
    """Run the ranks on this thread, with the parent beside them: their exit status, and how it ended.

    start_ranks: takes the path of the parent's socket, and returns when the ranks have ended.
    """
    parent.open()
    found: list[Ending] = []

    def run() -> None:
        try:
            found.append(parent.run())
        except Exception:
            log.exception("the parent of this peer's ranks failed: they end, too")

    thread = threading.Thread(target=run, name="parent", daemon=True)
    thread.start()
    status = 1
    try:
        status = start_ranks(str(parent.path))
    finally:
        parent.ranks_ended(failed=status != 0)
        thread.join(_JOIN_S)
    return status, found[0] if found else None
