"""Reports an error that ends a thread to the agent, so that nobody goes on as if the thread still worked."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bloomery.errors import CoordinatorError

log = logging.getLogger(__name__)


class ThreadEnded(CoordinatorError):
    """An unexpected error ended a thread without which this peer cannot take part in the run."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(
            f"the thread '{name}' of this peer ended: {type(error).__name__}: {str(error)[:500]}",
            remedy="This is a mistake in bloomery, not in your run: please report it with the log.",
        )


def reported(
    run: Callable[[], None], *, name: str, failed: Callable[[CoordinatorError], None]
) -> Callable[[], None]:
    """Return a function for a thread, which calls `run` and reports the error that ended it.

    name: the thread's, for the message.
    failed: called once with the error; not called if `run` returned.
    """

    def guarded() -> None:
        try:
            run()
        except CoordinatorError as error:
            failed(error)
        except Exception as error:
            log.exception("the thread '%s' ended", name)
            failed(ThreadEnded(name, error))

    return guarded
