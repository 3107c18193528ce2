"""Says which rank of a peer this is, and how its ranks gather values, exchange bytes and share errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import inf
from typing import Any

from bloomery.checkpoint.format.deadlines import POLL_S, PartProgress, StallWatch
from bloomery.checkpoint.format.manifest import DamagedCheckpoint
from bloomery.errors import BloomeryError, CheckpointError, StorageError

Gather = Callable[[Any], list[Any]]
"""gather(value) returns the JSON values of all ranks, in their order, on every rank. Collective."""

Exchange = Callable[
    [Mapping[int, Any], Mapping[int, Any]], None
]  # Any: torch.Tensor; this module loads no torch
"""exchange(sends, receives): sends bytes (a flat uint8 tensor in main memory) to each rank of the first
mapping, and fills those of the second with what that rank sent here. Collective over the peer: every rank
calls, with mappings that agree, and with empty ones where it has no part in it. Returns when all is done."""

_FIRST_TICK_S = 0.02


def alone(value: Any) -> list[Any]:  # Any: JSON
    """The `Gather` of a single rank."""
    return [value]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of a peer, and which of them this one is.

    exchange: None where the ranks cannot send each other bytes; each then reads everything that it loads.
    """

    rank: int = 0
    world: int = 1
    gather: Gather = alone
    exchange: Exchange | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which commits, sweeps and prunes."""
        return self.rank == 0

    def run_on_all(self, act: Callable[[], Any]) -> list[Any]:
        """Call `act` on each rank and return all results (JSON). An error on one rank is raised on all.

        Collective.
        """
        result, failure = None, None
        try:
            result = act()
        except BloomeryError as error:
            failure = error
        outcomes = self.gather(
            {"result": result, "failure": None if failure is None else _error_to_json(failure)}
        )
        if failure is not None:
            raise failure
        for rank, outcome in enumerate(outcomes):
            if outcome["failure"] is not None:
                raise _error_from_json(outcome["failure"], rank=rank)
        return [outcome["result"] for outcome in outcomes]

    def poll_on_all(
        self,
        act: Callable[[], Any],
        *,
        deadline_s: float = inf,
        stall_s: float = inf,
        progress: PartProgress | None = None,
        doing: str = "what all wait for",
    ) -> list[Any]:
        """Like `run_on_all`, for work that may take one rank longer than a collective's time-out.

        `act` runs in a thread, and the ranks gather again and again until all are done. Collective.
        deadline_s: for this rank's `act`; inf where `act` has deadlines itself. doing: for the message.
        progress: counts the bytes that `act` has written; stall_s: for how long it may stand still.
        Raises StorageError on every rank where one is late, naming that rank.
        """
        if self.world == 1:
            return [act()]
        begun = time.monotonic()
        over: Future[Any] = Future()
        threading.Thread(target=_run_into, args=(act, over), name="poll-on-all", daemon=True).start()
        tick_s, watch = _FIRST_TICK_S, StallWatch(stall_s)
        while True:
            wait([over], timeout=tick_s)
            late = ""
            if not over.done() and progress is not None and watch.is_stalled(progress.count):
                late = f"{doing} without a new byte for {stall_s:,.0f} s"
            elif not over.done() and time.monotonic() - begun > deadline_s:
                late = f"{doing} for {deadline_s:,.0f} s"
            states = self.gather([over.done(), late])
            for rank, (_, why) in enumerate(states):
                if why:
                    raise StorageError(
                        f"rank {rank} has been busy with {why}, which is longer than expected.",
                        remedy="Is its disk stuck (dmesg)? What was saved is safe.",
                    )
            if all(is_over for is_over, _ in states):
                return self.run_on_all(over.result)
            tick_s = min(2 * tick_s, POLL_S)

    def run_on_first(self, act: Callable[[], Any]) -> Any:
        """Call `act` on rank 0 and return its result on all ranks. Collective."""
        return self.run_on_all(lambda: act() if self.is_first else None)[0]

    def poll_on_first(self, act: Callable[[], Any], *, deadline_s: float = inf, doing: str = "it") -> Any:
        """Like `run_on_first`, for work that may take longer than a collective may: see `poll_on_all`."""
        mine = act if self.is_first else _nothing
        return self.poll_on_all(mine, deadline_s=deadline_s, doing=doing)[0]


def _nothing() -> None:
    """What the other ranks call while rank 0 is busy."""


def _run_into(act: Callable[[], Any], over: Future[Any]) -> None:
    try:
        over.set_result(act())
    except BaseException as error:  # noqa: BLE001  — whoever waits raises it
        over.set_exception(error)


def _error_to_json(error: BloomeryError) -> dict[str, str]:
    kinds = {DamagedCheckpoint: "damaged", StorageError: "storage"}
    return {"kind": kinds.get(type(error), ""), "message": error.message, "remedy": error.remedy}


def _error_from_json(failure: Mapping[str, str], *, rank: int) -> BloomeryError:
    """Return an error of another rank as an exception to raise here."""
    message = f"rank {rank}: {failure['message']}"
    if failure["kind"] == "damaged":
        return DamagedCheckpoint(message)
    kind = StorageError if failure["kind"] == "storage" else CheckpointError
    return kind(message, remedy=failure["remedy"])
