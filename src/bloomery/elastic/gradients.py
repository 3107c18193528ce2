"""The contribution of elastic synchronous data parallelism: the gradients of one step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bloomery.checkpoint.state import StateEntry
from bloomery.elastic.contribution import Offer, Vector
from bloomery.elastic.exchange import Reduced
from bloomery.elastic.parity import lane_digest


class Gradients:
    """One rank's part of its peer's gradients, between backward and update.

    Weights and moments are equal on all peers because everything that changes them is. What names the state
    after a round is therefore a hash of the weights before it and of the average.
    """

    def __init__(self, vector: Vector) -> None:
        self._vector = vector
        self._given, self._weights = vector.zeros(), vector.zeros()
        self._average: Tensor | None = None

    has_feedback = False

    def forget_feedback(self) -> None:
        """There is none."""

    def begin(self) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """A step without a commit was not made."""
        self._average = None

    def set_aside(self) -> None:
        """Nothing is done before the commit."""

    def take_up(self) -> None:
        """Nothing was set aside."""

    def loaded(self) -> None:
        """Nothing is kept."""
        self._average = None

    def nothing(self) -> None:
        """No gradients: those of a step long ago would be as good, but for what is not finite."""
        self._vector.write_gradients(self._given.zero_())

    def offer(self, round: int) -> Offer:
        """The gradients as they are now."""
        self._vector.read_gradients(self._given)
        return Offer(squares=float(torch.linalg.vector_norm(self._given, dtype=torch.float64).square()))

    def values(self) -> tuple[Tensor, Tensor | None]:
        """A copy for one try."""
        return self._given.clone(), None

    def prepare(self, reduced: Reduced) -> str:
        """Keep the average."""
        self._average = reduced.values
        self._vector.read_masters(self._weights)
        return lane_digest((self._weights, self._average))

    def adopt(self) -> None:
        """The update is made with the average."""
        assert self._average is not None, "nothing was prepared"
        self._vector.write_gradients(self._average)
        self._average = None

    def refuse(self) -> None:
        """No update is made: the gradients become what every update refuses."""
        self._average = None
        self._given.fill_(torch.nan)
        self._vector.write_gradients(self._given)

    def digest(self) -> str:
        """Of the weights."""
        self._vector.read_masters(self._weights)
        return lane_digest((self._weights,))

    def state_entries(self) -> Iterable[StateEntry]:
        """Nothing of its own."""
        return ()
