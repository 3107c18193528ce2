"""Limits for a while after a rewind, as functions of samples: a lower learning rate and tighter clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bloomery.events.records import Json


@dataclass(frozen=True, kw_only=True)
class Restraint:
    """A restraint of the steps that begin at a number of consumed samples in [start, stop).

    rate: the factor of the learning rate.
    clip: the factor of the gradient norm at which gradients are clipped.
    z_score: gradients are also clipped where the norm's z-score is above this (ZClip); 0: they are not.
    qk_clip: heads with attention logits above this are rescaled (QK-clip); 0: they are not.
    """

    start: int
    stop: int
    rate: float
    clip: float
    z_score: float = 0.0
    qk_clip: float = 0.0

    def to_json(self) -> dict[str, Json]:
        """Return what `restraints_from_json` reads."""
        return {name: getattr(self, name) for name in ("start", "stop", *_LIMITS)}


_LIMITS = ("rate", "clip", "z_score", "qk_clip")


def restraints_from_json(values: Iterable[Mapping[str, Any]]) -> tuple[Restraint, ...]:
    """Return the restraints that a checkpoint holds."""
    return tuple(
        Restraint(
            start=int(value["start"]),
            stop=int(value["stop"]),
            rate=float(value["rate"]),
            clip=float(value["clip"]),
            z_score=float(value.get("z_score", 0.0)),  # absent before there were clamps
            qk_clip=float(value.get("qk_clip", 0.0)),
        )
        for value in values
    )


def restraint_at(restraints: Iterable[Restraint], consumed: int) -> Restraint:
    """Return what restrains a step that begins after `consumed` samples, as one restraint.

    When several restraints hold, the smallest of each limit counts and not their product. Otherwise a run
    that goes back again while it is restrained would become slower each time.
    """
    in_force = [restraint for restraint in restraints if restraint.start <= consumed < restraint.stop]
    return Restraint(
        start=max((restraint.start for restraint in in_force), default=consumed),
        stop=min((restraint.stop for restraint in in_force), default=consumed),
        rate=min((restraint.rate for restraint in in_force), default=1.0),
        clip=min((restraint.clip for restraint in in_force), default=1.0),
        z_score=smallest_limit(restraint.z_score for restraint in in_force),
        qk_clip=smallest_limit(restraint.qk_clip for restraint in in_force),
    )


def smallest_limit(limits: Iterable[float]) -> float:
    """Return the smallest limit above 0; 0, which means no limit, where all are 0."""
    return min((limit for limit in limits if limit), default=0.0)
