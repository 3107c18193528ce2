"""Reports an error that ends a thread to the agent, so that nobody goes on as if the thread still worked."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bloomery.errors import CoordinatorError

log = logging.getLogger(__name__)


class ThreadEnded(CoordinatorError):
    """A thread on which this peer's part in the run rests ended by an error that nobody foresaw."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(
            f"the thread '{name}' of this peer ended: {type(error).__name__}: {str(error)[:500]}",
            remedy="This is a mistake in bloomery, not in your run: please report it with the log.",
        )


def reported(
    run: Callable[[], None], *, name: str, failed: Callable[[CoordinatorError], None]
) -> Callable[[], None]:
    """Return `run` for a thread. failed: called with what ended it, once, where it did not just return."""

    def guarded() -> None:
        try:
            run()
        except CoordinatorError as error:
            failed(error)
        except Exception as error:
            log.exception("the thread '%s' ended", name)
            failed(ThreadEnded(name, error))

    return guarded
