"""Verdicts: what a guard may ask the training loop to do, from carry on to stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class CarryOn:
    """Nothing is wrong and nothing is due."""

    judged_step: int


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Something is to be known and nothing to be done. kind: what it is; numbers: what it was judged by."""

    judged_step: int
    kind: str
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint is due."""

    judged_step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """Something went wrong from step `first_bad` on and has to be undone: the ladder says how (`ladder`)."""

    judged_step: int
    first_bad: int
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Rung(IntEnum):
    """What is done about an anomaly, from the mildest to the last; `ladder` has the rules."""

    WATCH = 0
    REPEAT = 1
    SKIP = 2
    SLOW = 3
    CLAMP = 4
    STOP = 5


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """Go back to the newest checkpoint at or before `to_step`, and leave out `skip` from then on.

    skip: indices of the sample stream. What of it lies behind the restored position was used and stays used.
    rung: the rung of the ladder that this is; WATCH where a person or an outage asked for it, which leaves
    the ladder where it is.
    latest_step: where no checkpoint is as early as `to_step`, the newest at or before this step is taken.
    Where there is none either, the run stops. may_start_anew: it starts from its initial values instead,
    which only a run between peers asks for: they are its round 0.
    """

    judged_step: int
    to_step: int
    skip: range
    reason: str
    rung: Rung = Rung.WATCH
    latest_step: int | None = None
    may_start_anew: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """End the run. failed: it could not go on, as against being done or asked to stop."""

    judged_step: int
    reason: str
    failed: bool
    numbers: Mapping[str, float] = field(default_factory=dict)


Verdict: TypeAlias = CarryOn | Watch | Save | Rewind | Stop

_STRENGTH = {CarryOn: 0, Watch: 1, Save: 2, Rewind: 3, Stop: 4}


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
