"""Averages the gradients of each step over the peers: elastic synchronous data parallelism."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from bloomery.checkpoint.format.state import StateEntry
from bloomery.diloco.outer_update import Reduced, rank_digest, squared_norm
from bloomery.diloco.peer_vector import PeerVector


class GradientAverage:
    """One rank's share of its peer's gradients, averaged between backward and update. Implements OuterUpdate.

    Weights and moments are equal on all peers, because all that changes them is equal on all peers. So the
    digest of a round covers the weights before it and the average, and a checkpoint keeps nothing of this.
    """

    def __init__(self, vector: PeerVector) -> None:
        self._vector = vector
        self._gradients, self._weights = vector.zeros(), vector.zeros()
        self._average: Tensor | None = None
        """The result of the last attempt; None before there is one."""

    has_feedback = False
    digest_is_of_state = False

    def forget_feedback(self) -> None:
        """See OuterUpdate. No quantisation error is kept."""

    def begin(self) -> None:
        """See OuterUpdate. This object has no state to begin with."""

    def reset(self) -> None:
        """See OuterUpdate. A step without a commit was not made, so the weights are the committed ones."""
        self._average = None

    def swap_in_committed(self) -> None:
        """See OuterUpdate. The weights are the committed ones."""

    def swap_back(self) -> None:
        """See OuterUpdate. `swap_in_committed` has replaced nothing."""

    def follow_loaded(self) -> None:
        """See OuterUpdate. Only the weights are shared, and they were loaded."""
        self._average = None

    def offer_nothing(self) -> None:
        """Set the gradients to zero, because those of an earlier step may not be finite."""
        self._vector.write_gradients(self._gradients.zero_())

    def offer(self, round: int) -> tuple[float, float]:
        """See OuterUpdate. The part is the gradients as they are now."""
        self._vector.read_gradients(self._gradients)
        return squared_norm(self._gradients), 0.0

    def values(self, weight: float) -> tuple[Tensor, Tensor | None]:
        """See OuterUpdate."""
        return self._gradients.clone(), None

    def prepare(self, reduced: Reduced) -> str:
        """Keep the average; return the digest of the present weights and the average."""
        self._average = reduced.values
        self._vector.read_masters(self._weights)
        return rank_digest((self._weights, self._average))

    def average(self) -> Tensor | None:
        """See OuterUpdate. Gradients are of no use later: the optimizer has to make each step in turn."""
        return None

    def prepare_missed(self, round: int, average: Tensor) -> str:
        """See OuterUpdate."""
        raise ValueError("gradients of a step that others made cannot be made up for")

    def adopt(self) -> None:
        """Make the average the gradients that the optimizer's update uses."""
        assert self._average is not None, "nothing was prepared"
        self._vector.write_gradients(self._average)
        self._average = None

    def refuse(self) -> None:
        """Make the gradients NaN, so that the optimizer refuses the update."""
        self._average = None
        self._vector.spoil_gradients()

    def digest(self) -> str:
        """Return the `rank_digest` of the weights."""
        self._vector.read_masters(self._weights)
        return rank_digest((self._weights,))

    def state_entries(self) -> Iterable[StateEntry]:
        """See OuterUpdate. No tensors are kept."""
        return ()
