"""Work that the first rank does while all others wait, for as long as it gets on with it.

Collectives give up after minutes, and preparing data may take hours. So the others watch a key of the store,
on which the first rank says every few seconds that it lives, and how far it is.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from torch._C._distributed_c10d import Store

from bloomery.errors import RankLost, ToldElsewhere
from bloomery.parallel.answers import answered

SIGN_EVERY_S = 2.0
SILENCE_S = 600.0
"""A first rank that gave no sign of life for so long is lost."""
STALL_S = 3600.0
"""One that lives, and neither got on nor computed anything for so long, hangs."""
_POLL_S, _SLOWEST_POLL_S = 0.02, 1.0
_STORE = "the store where the ranks meet"

_Result = TypeVar("_Result")
Tick = Callable[[], None]
"""Called whenever the work has got on."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What the first rank says. steps: how often the work has got on; processor_s: what it has computed."""

    count: int
    steps: int
    processor_s: int
    outcome: str = ""


def do_first(store: Store, key: str, task: Callable[[Tick], _Result]) -> _Result:
    """Do the work, and let the others know. Raises what it raises; the others then end without a word."""
    steps, ended, one_at_a_time = [0], threading.Event(), threading.Lock()

    def tick() -> None:
        steps[0] += 1

    def sign(count: int, outcome: str = "") -> None:
        used = os.times()
        processor_s = int(used.user + used.system + used.children_user + used.children_system)
        told = Sign(count=count, steps=steps[0], processor_s=processor_s, outcome=outcome)
        with one_at_a_time:
            if outcome or not ended.is_set():  # a sign after the outcome would hide it
                store.set(key, json.dumps(asdict(told)))

    def keep_signing() -> None:
        count = 0
        with suppress(RuntimeError):  # the store is gone: the others see that themselves
            while not ended.wait(SIGN_EVERY_S if count else 0.0):
                sign(count := count + 1)

    threading.Thread(target=keep_signing, daemon=True, name=key).start()
    with _told(lambda outcome: sign(-1, outcome), ended):
        return task(tick)


@contextmanager
def _told(tell: Callable[[str], None], ended: threading.Event) -> Iterator[None]:
    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        ended.set()
        if outcome == "done":
            answered(lambda: tell(outcome), by=_STORE)
        else:
            with suppress(RankLost):  # what failed is worth more than who did not hear of it
                answered(lambda: tell(outcome), by=_STORE)


def wait_for_first(
    store: Store, key: str, *, doing: str, silence_s: float = SILENCE_S, stall_s: float = STALL_S
) -> None:
    """Wait until the first rank has done its work: `doing`, as in "rank 0, which was {doing}".

    Raises ToldElsewhere where it failed, and RankLost where it fell silent, or stalled.
    """
    last, pause_s = Sign(count=0, steps=0, processor_s=0), _POLL_S
    lived_at = got_on_at = time.monotonic()
    while not last.outcome:
        time.sleep(pause_s)
        pause_s = min(_SLOWEST_POLL_S, pause_s * 1.2)
        found, now = answered(lambda: _read(store, key), by=_STORE), time.monotonic()
        if found is not None:
            lived_at = now if found.count != last.count else lived_at
            got_on_at = (
                now if (found.steps, found.processor_s) != (last.steps, last.processor_s) else got_on_at
            )
            last = found
        if now - lived_at > silence_s:
            raise RankLost(
                f"Rank 0, which was {doing}, has given no sign of life for {silence_s:.0f} s.",
                remedy="Look at its log and its machine. The same command goes on.",
            )
        if now - got_on_at > stall_s:
            raise RankLost(
                f"Rank 0, which was {doing}, lives, but has not got on for {stall_s:.0f} s.",
                remedy="Look what it waits for: a disk or a network that does not answer, perhaps.",
            )
    if last.outcome != "done":
        raise ToldElsewhere


def _read(store: Store, key: str) -> Sign | None:
    return Sign(**json.loads(store.get(key))) if store.check([key]) else None
