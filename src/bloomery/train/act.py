"""Carrying out what was judged. The only place where a verdict changes the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bloomery.guard.verdict import CarryOn, Rewind, Save, Stop, Verdict
from bloomery.train.state import TrainState

if TYPE_CHECKING:
    from bloomery.train.parts import Parts


def act(parts: Parts, state: TrainState, verdict: Verdict) -> TrainState:
    """Carry out the verdict, equal on all ranks. Collective over the peer."""
    match verdict:
        case CarryOn():
            return state
        case Save():
            parts.save(state)
            return state
        case Rewind(to_step=to_step, skip=skip, reason=reason):
            return parts.rewind(state, to_step=to_step, skip=skip, reason=reason)
        case Stop(reason=reason, failed=failed):
            return state.halting(reason, failed=failed)
    raise AssertionError(f"a verdict that nobody carries out: {verdict!r}")
