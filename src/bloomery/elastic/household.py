"""What the outer of a run between peers asks of the training around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Household:
    """What the outer asks of the training around it. `Any` is its state. All are collective.

    batch: samples of the next step from a state. load: fill every part from a checkpoint's directory, in a
    new incarnation, and return the state. offer: a checkpoint in memory of this state, for others to fetch;
    None where there is none. round_before: the newest committed round at or before a step, of those that this
    run directory has a checkpoint of. step_of: the step of its checkpoint of a round; None where it has none.
    settle: returns when nobody reads the state any more, which is about to be written. follow: makes the
    update with gradients that others brought, and returns the state after it.
    """

    batch: Callable[[Any], int]
    load: Callable[[Path, str], Any]
    offer: Callable[[Any], Path | None]
    settle: Callable[[], None]
    follow: Callable[[Any], Any]
    round_before: Callable[[int], int | None]
    step_of: Callable[[int], int | None]
