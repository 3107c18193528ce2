"""What a peer brings to a round, whatever it is: how far its weights went, or its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bloomery.checkpoint.state import Scope, StateEntry
from bloomery.data.ranges import Ranges
from bloomery.elastic.exchange import Reduced


class Vector(Protocol):
    """One rank's part of its peer's weights and gradients: `parallel.vector.PeerVector` implements it."""

    @property
    def numel(self) -> int:
        """Elements of it."""

    def zeros(self) -> Tensor:
        """A new vector."""

    def read_masters(self, into: Tensor) -> None:
        """Copy the masters."""

    def read_gradients(self, into: Tensor) -> None:
        """Copy the reduced gradients."""

    def write_masters(self, values: Tensor, within: Ranges | None = None) -> None:
        """Make the masters of all ranks what their owners have. Collective over the peer."""

    def write_gradients(self, values: Tensor) -> None:
        """Make the gradients of all ranks what their owners have. Collective over the peer."""

    def entries(self, flat: Tensor, *, prefix: str, scope: Scope) -> Iterable[StateEntry]:
        """Describe a vector as boxes of logical tensors."""

    def places(self) -> list[tuple[str, range]]:
        """(logical name, elements) of all that lies in it."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """About one rank's part of a contribution: the sum of its squares, not finite where an element is not."""

    squares: float


class Contribution(Protocol):
    """A peer's part of one round after the other. Methods are called by every rank; those that write the
    model's memory are collective over the peer.
    """

    @property
    def has_feedback(self) -> bool:
        """Whether it keeps what quantising leaves out."""

    def forget_feedback(self) -> None:
        """Nothing was left out by quantising before."""

    def begin(self) -> None:
        """The weights are those that a run begins with."""

    def reset(self) -> None:
        """What this peer did since the last committed round does not count: go back to that."""

    def set_aside(self) -> None:
        """Be the state of the last committed round until `take_up`: what was done since is kept meanwhile."""

    def take_up(self) -> None:
        """Go on from what was set aside, to the bit."""

    def loaded(self) -> None:
        """The state came from another peer: nothing of this peer's own is left."""

    def nothing(self) -> None:
        """What is offered next is without weight: there need not be anything."""

    def offer(self, round: int) -> Offer:
        """Fix what is brought to this round."""

    def values(self) -> tuple[Tensor, Tensor | None]:
        """A copy of it for one try of the ring; and what takes up what quantising leaves out, where kept."""

    def prepare(self, reduced: Reduced) -> str:
        """Make the state that follows from an average, beside the one that holds; the hash of this rank's."""

    def adopt(self) -> None:
        """What was prepared holds from now on: the round is committed."""

    def refuse(self) -> None:
        """The round is committed without this peer: nothing of what it offered may be used."""

    def digest(self) -> str:
        """The hash of this rank's part of the state that holds."""

    def state_entries(self) -> Iterable[StateEntry]:
        """What a checkpoint holds of it."""
