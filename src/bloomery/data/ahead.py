"""An iterator that works ahead of its consumer, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from bloomery.errors import DataError

Item = TypeVar("Item")

_LOOK_S = 0.2
_SILENCE_S = 600.0
_ENDING_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """The iterator is exhausted, or raised."""

    error: BaseException | None


def read_ahead(
    items: Iterator[Item], *, count: int, what: Callable[[], str], silence_s: float = _SILENCE_S
) -> Iterator[Item]:
    """The same items in the same order, up to `count` of them made before they are asked for.

    What the iterator raises is raised here, after the items before it. The thread ends with this generator,
    or as soon as the system lets go of it. what: names what is waited for, in the DataError that follows
    `silence_s` without an item.
    """
    made: queue.Queue[Item | _Ended] = queue.Queue(count)
    unwanted = threading.Event()

    def put(item: Item | _Ended) -> bool:
        while not unwanted.is_set():
            try:
                made.put(item, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False

    def make() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not put(item):
                    return
        except BaseException as raised:  # noqa: BLE001  — handed to the consumer, who raises it
            error = raised
        put(_Ended(error=error))

    thread = threading.Thread(target=make, name="read-ahead", daemon=True)
    thread.start()
    answers = True
    try:
        while True:
            try:
                item = made.get(timeout=silence_s)
            except queue.Empty:
                answers = False
                raise DataError(
                    f"Waited {silence_s:.0f} s for {what()}.",
                    remedy="Check the disk or network mount that it is on; what was finished is kept.",
                ) from None
            if isinstance(item, _Ended):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        unwanted.set()
        thread.join(_ENDING_S if answers else 0)  # one that hangs in a read is a daemon
