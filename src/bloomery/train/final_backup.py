"""Waits on all ranks at the end of a run until its backup is finished."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.writer.deadlines import BACKUP_AFTER_ERROR_S
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.rank_zero_task import ReportProgress

log = logging.getLogger(__name__)

_TELL_EVERY_S = 30.0
_POLL_S = 0.1


@contextmanager
def backed_up_at_the_end(
    backup: Backup | None,
    mesh: Mesh,
    *,
    interruptions: Callable[[], int],
    say: Callable[[str], None],
    on_progress: ReportProgress = lambda: None,
) -> Iterator[None]:
    """Wait at the end of a run until its backup is finished. Collective over the peer when the run ends well.

    backup: None on ranks that have none.
    interruptions: returns how often the process was interrupted so far.
    say: is told what is left to copy.
    on_progress: called on the first rank while it copies.

    Every rank stays until the first has copied what is left, or until it is interrupted once more. After an
    error nobody waits for more than a moment: the launcher ends what is left, and the next start continues
    the copying.
    """
    try:
        yield
    except BaseException:
        if backup is not None:
            backup.close(wait_s=BACKUP_AFTER_ERROR_S)
        raise

    def finish(tick: ReportProgress) -> None:
        assert backup is not None, "the first rank has the backup"

        def both() -> None:
            tick()
            on_progress()

        _finish(backup, both, interruptions=interruptions, say=say)

    mesh.run_on_rank_zero(finish, doing="backing up the last checkpoints")


def _finish(
    backup: Backup, tick: ReportProgress, *, interruptions: Callable[[], int], say: Callable[[str], None]
) -> None:
    closing = threading.Thread(target=backup.close, name="end of the backup", daemon=True)
    so_far, begun, told_at = interruptions(), time.monotonic(), float("-inf")
    closing.start()
    while closing.is_alive():
        closing.join(_POLL_S)
        tick()
        left = [checkpoint.name for checkpoint in backup.due()] if closing.is_alive() else []
        if left and time.monotonic() - told_at > _TELL_EVERY_S:
            told_at = time.monotonic()
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            say(
                f"backing up {left[0]}{more} before the end, {told_at - begun:.0f} s so far; "
                "Ctrl-C leaves it to the next start"
            )
        if interruptions() > so_far:
            backup.close(wait_s=0.0)
            return
