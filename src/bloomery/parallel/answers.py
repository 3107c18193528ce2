"""Questions to a store that another machine serves: that machine may freeze, and never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from bloomery.errors import RankLost
from bloomery.parallel.failures import tells_of_a_lost_rank

ANSWER_S = 60.0
"""How long a store may take to answer, on a machine where much else happens."""

_REMEDY = (
    "Look whether its machine is up and can be reached. The same command goes on from the newest checkpoint."
)

_Answer = TypeVar("_Answer")


def answered(call: Callable[[], _Answer], *, by: str, within_s: float = ANSWER_S) -> _Answer:
    """What `call` returns or raises. Raises RankLost naming whom it asked (`by`) where that one is gone, or
    says nothing.

    A store's own time-outs do not cover a server that keeps the connection and says nothing, so the call goes
    on in a thread that nobody waits for any longer.
    """
    ended = threading.Event()
    values: list[_Answer] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            values.append(call())
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: raised again below
            errors.append(error)
        ended.set()

    threading.Thread(target=ask, daemon=True, name=f"asking {by}").start()
    who = f"{by[:1].upper()}{by[1:]}"
    if not ended.wait(within_s):
        raise RankLost(f"{who} has not answered for {within_s:.0f} s.", remedy=_REMEDY)
    for error in errors:
        if isinstance(error, RuntimeError) and tells_of_a_lost_rank(error):
            raise RankLost(f"{who} is gone.", remedy=_REMEDY) from error
        raise error
    return values[0]
