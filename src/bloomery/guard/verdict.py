"""Verdicts: what guards may ask the loop to do, from the mildest to the strongest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class CarryOn:
    """Nothing is wrong and nothing is due."""

    judged_step: int


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint is due."""

    judged_step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """Go back to the newest checkpoint at or before `to_step`, and leave out `skip` from then on.

    skip: indices of the sample stream. What of it lies behind the restored position was used and stays used.
    """

    judged_step: int
    to_step: int
    skip: range
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stop:
    """End the run. failed: it could not go on, as against being done or asked to stop."""

    judged_step: int
    reason: str
    failed: bool


Verdict: TypeAlias = CarryOn | Save | Rewind | Stop

_STRENGTH = {CarryOn: 0, Save: 1, Rewind: 2, Stop: 3}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the strongest of at least one verdict; of equally strong ones the first, but failures first.

    Of several rewinds the one that goes back furthest.
    """
    return max(verdicts, key=_weight)


def _weight(verdict: Verdict) -> tuple[int, int]:
    within = 0
    if isinstance(verdict, Stop):
        within = int(verdict.failed)
    elif isinstance(verdict, Rewind):
        within = -verdict.to_step
    return _STRENGTH[type(verdict)], within
