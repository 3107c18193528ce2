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
    """Something should be reported, and nothing is to be done.

    kind: what it is, in a word or two.
    numbers: the numbers by which it was judged.
    """

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
    """Something went wrong from step `first_bad` on and must be undone; `guard/ladder.py` decides how."""

    judged_step: int
    first_bad: int
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Rung(IntEnum):
    """The remedies for an anomaly, from the mildest to the last; `guard/ladder.py` has the rules."""

    WATCH = 0
    REPEAT = 1
    SKIP = 2
    SLOW = 3
    CLAMP = 4
    STOP = 5


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """Go back to the newest checkpoint at or before `to_step`, and leave out `skip` from then on.

    skip: indices of the sample stream; those before the restored position were used and stay used.
    rung: the rung of the ladder; WATCH: a person or an outage asked, and the ladder stays where it is.
    latest_step: when no checkpoint is as early as `to_step`, the newest one at or before this step is taken;
        without one, the run stops. None: only `to_step` counts.
    may_start_anew: without a checkpoint the run starts from its initial values instead of stopping. Only a
        run between peers asks for that, for the initial values are its round 0, and one whose machine erred
        before its first checkpoint.
    may_go_on: without a checkpoint the run goes on instead of stopping: nothing is wrong, a person asked for
        what cannot be.
    """

    judged_step: int
    to_step: int
    skip: range
    reason: str
    rung: Rung = Rung.WATCH
    latest_step: int | None = None
    may_start_anew: bool = False
    may_go_on: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """End the run. failed: whether it cannot go on; False: it is done, or was asked to stop."""

    judged_step: int
    reason: str
    failed: bool
    numbers: Mapping[str, float] = field(default_factory=dict)


Verdict: TypeAlias = CarryOn | Watch | Save | Rewind | Stop

_STRENGTH = {CarryOn: 0, Watch: 1, Save: 2, Rewind: 3, Stop: 4}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the strongest of at least one verdict.

    Of several stops, one that failed counts; of several rewinds, the one that goes back furthest; of other
    equally strong verdicts, the first.
    """
    return max(verdicts, key=_weight)


def _weight(verdict: Verdict) -> tuple[int, int]:
    within = 0
    if isinstance(verdict, Stop):
        within = int(verdict.failed)
    elif isinstance(verdict, Rewind):
        within = -verdict.to_step
    return _STRENGTH[type(verdict)], within
