"""What a rank is to do after a message in a round: the actions that `round_transition.transition` returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from bloomery.data.position import Position
from bloomery.diloco.outer import UnderWay
from bloomery.protocol.rank_messages import Reduce, ReplaceState
from bloomery.protocol.records import Ready


class Do(Enum):
    """Actions without parameters."""

    SEND_IDENTITY = auto()
    """Tell the agent what identifies the stream of samples."""
    HOLD = auto()
    """Tell the agent which committed state is held, or was held when the round began."""
    DROP_RING = auto()
    """Cancel any all_reduce under way, and drop the result of the last one."""
    RESET_UPDATE = auto()
    """Go back to the committed weights."""
    REFUSE_UPDATE = auto()
    """Drop the part that was offered."""
    ADOPT_UPDATE = auto()
    """Continue from the result of the all_reduce."""
    REBASE_UPDATE = auto()
    """Continue from the state after a missed round, with this peer's own steps since the state before."""


@dataclass(frozen=True, kw_only=True)
class SendReady:
    """Offer a part to the agent."""

    ready: Ready


@dataclass(frozen=True, kw_only=True)
class SendRefused:
    """Tell the agent that this peer refuses the state that it was to load."""

    why: str


@dataclass(frozen=True, kw_only=True)
class BeginRing:
    """Begin the all_reduce of an attempt."""

    reduce: Reduce


@dataclass(frozen=True, kw_only=True)
class CancelRing:
    """Cancel the all_reduce of this epoch, if it is under way."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class MoveTo:
    """Set the position of the training. under_way: the round that it is in; None: a committed state."""

    position: Position
    under_way: UnderWay | None = None


@dataclass(frozen=True, kw_only=True)
class LoadState:
    """Load another peer's state, and answer with LoadAccepted or LoadRefused."""

    asked: ReplaceState


@dataclass(frozen=True, kw_only=True)
class Halt:
    """End the training. failed: whether an error is the cause."""

    why: str
    failed: bool


Action = Do | SendReady | SendRefused | BeginRing | CancelRing | MoveTo | LoadState | Halt
