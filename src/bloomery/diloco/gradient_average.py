"""The outer update of synchronous data parallelism between peers: every gradient is averaged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bloomery.checkpoint.format.state import StateEntry
from bloomery.diloco.outer_update import PIECE, Measure, Reduced, digest_of_pieces, pieces_of, squared_norm
from bloomery.diloco.peer_vector import PeerVector
from bloomery.diloco.stored_average import BLOCK, StoredAverage


class GradientAverage:
    """One rank's share of its peer's gradients, averaged between backward and update. Implements OuterUpdate.

    Weights and moments are equal on all peers, because all that changes them is equal on all peers. So the
    digest of a round covers the weights before it and the average, and a checkpoint keeps nothing of this.
    """

    def __init__(self, vector: PeerVector, *, piece: int = PIECE) -> None:
        self._vector, self._piece = vector, piece
        self._average: StoredAverage | None = None
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
        self._vector.write_gradients(self._vector.zeros())

    def offer(self, round: int) -> Measure:
        """See OuterUpdate. The part is the gradients as they are now, which stay until the round's end."""
        return lambda: (sum(squared_norm(block) for block in self._blocks(self._vector.read_gradients)), 0.0)

    def keep_offer(self) -> None:
        """See OuterUpdate. Nothing is copied while the device goes on."""

    def pieces(self) -> Sequence[range]:
        """See OuterUpdate."""
        return pieces_of(self._vector.numel, self._piece)

    def values(self, weight: float, piece: range) -> tuple[Tensor, Tensor | None]:
        """See OuterUpdate."""
        values = torch.empty(len(piece))
        self._vector.read_gradients(values, piece.start)
        return values, None

    def prepare(self, reduced: Reduced, *, check: Callable[[], None] = lambda: None) -> str:
        """Keep the average; return the digest of the present weights and the average."""
        self._average = None
        weights = (block.numpy() for block in self._blocks(self._vector.read_masters))
        pieces = itertools.chain(weights, reduced.average.blocks())
        digest = digest_of_pieces(pieces, nbytes=8 * self._vector.numel, check=check)
        self._average = reduced.average
        return digest

    def average(self) -> StoredAverage | None:
        """See OuterUpdate. Gradients are of no use later: the optimizer has to make each step in turn."""
        return None

    def prepare_missed(self, round: int, average: StoredAverage) -> str:
        """See OuterUpdate."""
        raise ValueError("gradients of a step that others made cannot be made up for")

    def adopt(self) -> None:
        """Make the average the gradients that the optimizer's update uses."""
        assert self._average is not None, "nothing was prepared"
        self._vector.write_gradients(torch.from_numpy(self._average.whole()))
        self._average = None

    def rebase(self) -> None:
        """See OuterUpdate."""
        raise ValueError("gradients of a step that others made cannot be made up for")

    def drop_offer(self) -> None:
        """Make the gradients NaN, so that the optimizer refuses the update."""
        self._average = None
        self._vector.spoil_gradients()

    def digest(self) -> str:
        """Return the `rank_digest` of the weights."""
        pieces = (block.numpy() for block in self._blocks(self._vector.read_masters))
        return digest_of_pieces(pieces, nbytes=4 * self._vector.numel)

    def state_entries(self) -> Iterable[StateEntry]:
        """See OuterUpdate. No tensors are kept."""
        return ()

    def _blocks(self, read: Callable[[Tensor, int], None]) -> Iterator[Tensor]:
        """Yield this rank's weights or gradients, some elements at a time."""
        for part in pieces_of(self._vector.numel, BLOCK):
            block = torch.empty(len(part))
            read(block, part.start)
            yield block
