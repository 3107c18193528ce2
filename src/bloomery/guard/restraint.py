"""A lower learning rate and a tighter clipping for a stretch of the run, as a function of the position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bloomery.events.json_floats import Json


@dataclass(frozen=True, kw_only=True)
class Restraint:
    """A restraint of the steps that begin at a number of consumed samples in [start, stop).

    rate: the factor of the learning rate.
    clip: the factor of the gradient norm at which gradients are clipped.
    """

    start: int
    stop: int
    rate: float
    clip: float

    def to_json(self) -> dict[str, Json]:
        """Return what `restraints_from_json` reads."""
        return {"start": self.start, "stop": self.stop, "rate": self.rate, "clip": self.clip}


def restraints_from_json(values: Iterable[Mapping[str, Any]]) -> tuple[Restraint, ...]:
    """Return the restraints that a checkpoint holds."""
    return tuple(
        Restraint(
            start=int(value["start"]),
            stop=int(value["stop"]),
            rate=float(value["rate"]),
            clip=float(value["clip"]),
        )
        for value in values
    )


def restrained(restraints: Iterable[Restraint], consumed: int) -> tuple[float, float]:
    """Return the factors of learning rate and clipping of a step that begins after `consumed` samples.

    When several restraints hold, the smallest of each factor counts and not their product. Otherwise a run
    that goes back again while it is restrained would become slower each time.
    """
    held = [restraint for restraint in restraints if restraint.start <= consumed < restraint.stop]
    return min((restraint.rate for restraint in held), default=1.0), min(
        (restraint.clip for restraint in held), default=1.0
    )
