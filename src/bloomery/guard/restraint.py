"""A lower learning rate and a tighter clipping for a stretch of the run, as a function of the position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bloomery.events.json_floats import Json


@dataclass(frozen=True, kw_only=True)
class Restraint:
    """Holds for steps that begin at a number of consumed samples in [start, stop).

    rate: what the learning rate is multiplied with. clip: what the largest gradient norm is multiplied with.
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
            start=int(one["start"]), stop=int(one["stop"]), rate=float(one["rate"]), clip=float(one["clip"])
        )
        for one in values
    )


def restrained(restraints: Iterable[Restraint], consumed: int) -> tuple[float, float]:
    """Return the factors of learning rate and clipping of a step that begins after `consumed` samples.

    Of several that hold at once the strictest counts, not their product: a run that is sent back again while
    it is restrained is not slowed down without end.
    """
    held = [one for one in restraints if one.start <= consumed < one.stop]
    return min((one.rate for one in held), default=1.0), min((one.clip for one in held), default=1.0)
