"""Doing something on every rank of a peer, so that what fails on one is known to all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import inf
from typing import Any

from bloomery.checkpoint.deadlines import PATIENCE_S
from bloomery.checkpoint.manifest import DamagedCheckpoint
from bloomery.errors import BloomeryError, CheckpointError, StorageError

Gather = Callable[[Any], list[Any]]
"""Returns the JSON value of every rank, in their order, on every rank. Collective over the peer."""

Exchange = Callable[
    [Mapping[int, Any], Mapping[int, Any]], None
]  # Any: torch.Tensor; this module loads no torch
"""exchange(sends, receives): sends bytes (a flat uint8 tensor in main memory) to each rank of the first
mapping, and fills those of the second with what that rank sent here. Collective over the peer: every rank
calls, with mappings that agree, and with empty ones where it has no part in it. Returns when all is done."""

_FIRST_TICK_S = 0.02


def alone(value: Any) -> list[Any]:  # Any: JSON
    """Gather where there is one rank."""
    return [value]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that own a run together, and which of them this is.

    exchange: None where they cannot send each other bytes; each then reads for itself what it loads.
    """

    rank: int = 0
    world: int = 1
    gather: Gather = alone
    exchange: Exchange | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank commits, sweeps and prunes."""
        return self.rank == 0

    def together(self, act: Callable[[], Any]) -> list[Any]:
        """Do something on each rank and return all results (JSON); what fails on one raises on all."""
        result, failure = None, None
        try:
            result = act()
        except BloomeryError as error:
            failure = error
        outcomes = self.gather({"result": result, "failure": None if failure is None else _told(failure)})
        if failure is not None:
            raise failure
        for rank, outcome in enumerate(outcomes):
            if outcome["failure"] is not None:
                raise _retold(outcome["failure"], rank=rank)
        return [outcome["result"] for outcome in outcomes]

    def patiently(
        self, act: Callable[[], Any], *, deadline_s: float = inf, doing: str = "what all wait for"
    ) -> list[Any]:
        """Like `together`, for what may take one rank long: the others ask again until it is over.

        A collective that waits for somebody fails after minutes, so none has to. `act` runs in a thread.
        deadline_s: for this rank's own; without one `act` has its own. Raises StorageError on every rank
        where one is late, naming it and what it is `doing`.
        """
        if self.world == 1:
            return [act()]
        begun = time.monotonic()
        over: Future[Any] = Future()
        threading.Thread(target=_run, args=(act, over), name="patiently", daemon=True).start()
        tick_s = _FIRST_TICK_S
        while True:
            wait([over], timeout=tick_s)
            late = not over.done() and time.monotonic() - begun > deadline_s
            told = self.gather([over.done(), f"{doing} for {deadline_s:,.0f} s" if late else ""])
            for rank, (_, why) in enumerate(told):
                if why:
                    raise StorageError(
                        f"rank {rank} has been busy with {why}, and no end is in sight.",
                        remedy="Is its disk stuck (dmesg)? What was saved is safe.",
                    )
            if all(is_over for is_over, _ in told):
                return self.together(over.result)
            tick_s = min(2 * tick_s, PATIENCE_S)

    def first(self, act: Callable[[], Any]) -> Any:
        """Do something on the first rank and return its result on all."""
        return self.together(lambda: act() if self.is_first else None)[0]

    def first_patiently(self, act: Callable[[], Any], *, deadline_s: float = inf, doing: str = "it") -> Any:
        """Like `first`, for what may take long: see `patiently`."""
        mine = act if self.is_first else _nothing
        return self.patiently(mine, deadline_s=deadline_s, doing=doing)[0]


def _nothing() -> None:
    """What the other ranks do while the first is busy."""


def _run(act: Callable[[], Any], over: Future[Any]) -> None:
    try:
        over.set_result(act())
    except BaseException as error:  # noqa: BLE001  — whoever waits raises it
        over.set_exception(error)


def _told(error: BloomeryError) -> dict[str, str]:
    kinds = {DamagedCheckpoint: "damaged", StorageError: "storage"}
    return {"kind": kinds.get(type(error), ""), "message": error.message, "remedy": error.remedy}


def _retold(failure: Mapping[str, str], *, rank: int) -> BloomeryError:
    """Return another rank's error as this rank's."""
    message = f"rank {rank}: {failure['message']}"
    if failure["kind"] == "damaged":
        return DamagedCheckpoint(message)
    kind = StorageError if failure["kind"] == "storage" else CheckpointError
    return kind(message, remedy=failure["remedy"])
