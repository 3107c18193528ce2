"""The two outer updates: DiLoCo (pseudo-gradients, Nesterov outer optimizer), or averaging every gradient.

A pseudo-gradient is the difference between the weights that were last equal on all peers and the present
ones. Fragments, as in Streaming DiLoCo, are parts of the model that are averaged in turn, one in each
round. The outer optimizer has Nesterov momentum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bloomery.checkpoint.format.state import StateEntry
from bloomery.config.elastic import SPARSE, ElasticSection
from bloomery.data.position import Ranges, total
from bloomery.diloco.outer_update import (
    PIECE,
    Reduced,
    digest_of_pieces,
    pieces_of,
    rank_digest,
    squared_norm,
)
from bloomery.diloco.peer_vector import PeerVector, fragment_of_round, fragments_of, put, take
from bloomery.diloco.stored_average import BLOCK, StoredAverage

_WITH_FEEDBACK = ("int4", SPARSE)
"""The codecs whose error a peer keeps and adds in the next round."""


class PseudoGradient:
    """One rank's part of the outer optimizer. Implements OuterUpdate. Vectors are fp32, in the CPU's memory.

    base: the weights after the last committed round; equal on all peers. Pinned for a GPU, to which it goes.
    momentum: the outer momentum; equal on all peers.
    residual: what quantising lost of earlier averages at this peer (error feedback), or the values that the
        sparse codec did not send, in the unit of the average, so that it is sent whole whatever the peer's
        weight is then; None if the codec keeps none.

    These are 8 bytes a parameter, 12 with a residual. While a round is made the average is kept in the bytes
    of the codec beside them (1 for int8), and blocks of bounded size: the pseudo-gradient is computed from
    the weights when it is sent. With overlapped steps, which change the weights, it is kept (4 bytes more).

    With one fragment and no overlap, the weights of the model are the base at each committed round.

    piece: how many elements a ring reduces at a time.
    """

    def __init__(self, vector: PeerVector, section: ElasticSection, *, piece: int = PIECE) -> None:
        self._vector, self._section, self._piece = vector, section, piece
        self.base, self.momentum = vector.pinned_zeros(), vector.zeros()
        self.residual = vector.zeros() if section.codec in _WITH_FEEDBACK else None
        self._decay = section.feedback_decay if section.codec == SPARSE else 1.0
        self._fragments = fragments_of(vector.places(), numel=vector.numel, count=section.fragments)
        self._spans: Ranges = ()
        """The elements of the fragment that was offered last."""
        self._is_offered = False
        """Whether this peer's part of that fragment is offered, and its round is not over."""
        self._pseudo_gradient: Tensor | None = None
        """The pseudo-gradient that is offered, where steps overlap the round; else None."""
        self._weights: Tensor | None = None
        """The weights that `swap_in_committed` has replaced."""
        self._prepared: Reduced | None = None
        """The average and the next residual of that fragment; None until an attempt is complete."""

    digest_is_of_state = True

    @property
    def has_feedback(self) -> bool:
        """See OuterUpdate."""
        return self.residual is not None

    def forget_feedback(self) -> None:
        """See OuterUpdate."""
        if self.residual is not None:
            self.residual.zero_()

    def begin(self) -> None:
        """See OuterUpdate. The base is the weights, and the momentum is zero."""
        self._vector.read_masters(self.base)
        self.momentum.zero_()
        self._forget_offer()
        self.forget_feedback()

    def reset(self) -> None:
        """Set the weights to the base."""
        self._forget_offer()
        self._vector.write_masters(self.base)

    def swap_in_committed(self) -> None:
        """See OuterUpdate. The committed weights are the base."""
        self._weights = self._vector.zeros()
        self._vector.read_masters(self._weights)
        self._vector.write_masters(self.base)

    def swap_back(self) -> None:
        """See OuterUpdate."""
        assert self._weights is not None, "nothing was swapped"
        self._vector.write_masters(self._weights)
        self._weights = None

    def follow_loaded(self) -> None:
        """See OuterUpdate. The weights are set to the base and the residual to zero.

        The loaded ones are the other peer's own; only base and momentum are shared, and are checked.
        """
        self.reset()
        self.forget_feedback()

    def offer_nothing(self) -> None:
        """See OuterUpdate. No step has changed the weights, so the pseudo-gradient is finite."""

    @torch.no_grad()
    def offer(self, round: int) -> tuple[float, float]:
        """See OuterUpdate. The part is the pseudo-gradient of this round's fragment."""
        self._forget_offer()
        self._spans = self._fragments[fragment_of_round(round, count=self._section.fragments)]
        squares = sum(squared_norm(self._drift(strip)) for strip, _ in self._strips())
        if self._section.overlap_steps:
            self._pseudo_gradient = torch.cat(
                [torch.empty(0), *(self._drift(strip).clone() for strip, _ in self._strips())]
            )
        self._is_offered = True
        feedback = 0.0 if self.residual is None else squared_norm(take(self.residual, self._spans))
        return squares, self._decay**2 * feedback

    def pieces(self) -> Sequence[range]:
        """See OuterUpdate."""
        return pieces_of(total(self._spans), self._piece)

    @torch.no_grad()
    def values(self, weight: float, piece: range) -> tuple[Tensor, Tensor | None]:
        """See OuterUpdate."""
        assert self._is_offered, "nothing was offered"
        values = torch.empty(len(piece))
        for strip, place in self._strips(piece):
            at = place - piece.start
            known = self._pseudo_gradient
            drift = self._drift(strip) if known is None else known[place : place + len(strip)]
            values[at : at + len(strip)].copy_(drift)
        if self.residual is None:
            return values, None
        lost = torch.cat([values[:0], *(_of(self.residual, strip) for strip, _ in self._strips(piece))])
        if weight == 0.0:  # nothing of this peer is sent now, so what was lost is kept
            return values, lost
        # Error feedback: the error of earlier rounds is sent now; this attempt's is summed from zero.
        return values.add_(lost.mul_(self._decay).div_(weight)), lost.zero_()

    def prepare(self, reduced: Reduced) -> str:
        """Return the digest of the whole base and momentum after the outer step, which `adopt` makes."""
        self._prepared = reduced
        after = itertools.chain(self._after_round(momentum=False), self._after_round(momentum=True))
        return digest_of_pieces((piece.numpy() for piece in after), nbytes=8 * self._vector.numel)

    def average(self) -> StoredAverage | None:
        """See OuterUpdate. It is the fragment's average pseudo-gradient."""
        return None if self._prepared is None else self._prepared.average

    def prepare_missed(self, round: int, average: StoredAverage) -> str:
        """See OuterUpdate."""
        self._forget_offer()
        self._spans = self._fragments[fragment_of_round(round, count=self._section.fragments)]
        if average.numel != total(self._spans):
            raise ValueError(f"{average.numel} elements, and this part has {total(self._spans)}")
        return self.prepare(Reduced(average=average, residual=None))

    def adopt(self) -> None:
        """See OuterUpdate. The fragment's weights become the base, or are mixed with it (elastic.mixing).

        After `prepare_missed` all weights become the base, and the residual, this peer's own, stays.
        """
        assert self._prepared is not None, "nothing was prepared"
        self._make_step()
        residual = self._prepared.residual
        if residual is not None and self.residual is not None:
            put(self.residual, self._spans, residual)
        if not self._is_offered:
            self.reset()
            return
        self._vector.write_masters(self._mixed(), within=self._spans)
        self._forget_offer()

    def rebase(self) -> None:
        """See OuterUpdate. Only the fragment's weights move."""
        weights = self._vector.zeros()
        self._vector.read_masters(weights)
        moved = weights.sub_(self.base)
        self._make_step()
        self._vector.write_masters(moved.add_(self.base), within=self._spans)
        self._forget_offer()

    def _make_step(self) -> None:
        for strip, average in self._averaged_strips():
            base, momentum = self._step(strip, average)
            _of(self.base, strip).copy_(base)
            _of(self.momentum, strip).copy_(momentum)

    def drop_offer(self) -> None:
        """See OuterUpdate. The weights stay as they are until another peer's state replaces them."""
        self._forget_offer()

    def digest(self) -> str:
        """Return the `rank_digest` of base and momentum."""
        return rank_digest((self.base, self.momentum))

    def state_entries(self) -> Iterable[StateEntry]:
        """Describe base and momentum, which all peers share, and this peer's own residual."""
        yield from self._vector.entries(self.base, prefix="outer.base", scope="shared")
        yield from self._vector.entries(self.momentum, prefix="outer.momentum", scope="shared")
        if self.residual is not None:
            yield from self._vector.entries(self.residual, prefix="outer.residual", scope="peer")

    def _mixed(self) -> Tensor:
        """Return the next weights: the base, or a mixture of weights and base (Streaming DiLoCo, eq. 3)."""
        if self._section.mixing == 1.0:
            return self.base
        weights = self._vector.zeros()
        self._vector.read_masters(weights)
        return torch.lerp(weights, self.base, self._section.mixing)

    def _forget_offer(self) -> None:
        self._is_offered = False
        self._pseudo_gradient = self._prepared = None

    def _drift(self, strip: range) -> Tensor:
        """Return how far these elements have moved from the base, in memory that the next call takes."""
        weights = self._vector.block(len(strip))
        self._vector.read_masters(weights, strip.start)
        return torch.sub(_of(self.base, strip), weights, out=weights)

    def _strips(self, piece: range | None = None) -> Iterator[tuple[range, int]]:
        """Yield the elements of the fragment, or of a piece of it, at most BLOCK at a time.

        Each strip is a range of the rank's vector, with the place of its first element in the fragment.
        """
        wanted = range(total(self._spans)) if piece is None else piece
        place = 0
        for span in self._spans:
            first, last = max(place, wanted.start), min(place + len(span), wanted.stop)
            for start in range(first, last, BLOCK):
                at = span.start - place
                yield range(at + start, at + min(start + BLOCK, last)), start
            place += len(span)

    def _averaged_strips(self) -> Iterator[tuple[range, Tensor]]:
        """Yield the elements of the fragment with their average."""
        assert self._prepared is not None, "nothing was prepared"
        for strip, place in self._strips():
            for start, average in self._prepared.average.pieces(place, place + len(strip)):
                first = strip.start + start - place
                yield range(first, first + average.size), torch.from_numpy(average)

    def _step(self, strip: range, average: Tensor) -> tuple[Tensor, Tensor]:
        section = self._section
        rate, decay = section.outer_learning_rate, section.outer_momentum
        base, momentum = _of(self.base, strip), _of(self.momentum, strip)
        return nesterov_step(base, momentum, average, learning_rate=rate, decay=decay)

    def _after_round(self, *, momentum: bool) -> Iterator[Tensor]:
        """Yield the whole base or momentum as it is after the prepared round, some elements at a time."""
        present, place = self.momentum if momentum else self.base, 0
        for strip, average in self._averaged_strips():
            if place < strip.start:
                yield present[place : strip.start]
            yield self._step(strip, average)[momentum]
            place = strip.stop
        yield present[place:]


@torch.no_grad()
def nesterov_step(
    base: Tensor, momentum: Tensor, pseudo_gradient: Tensor, *, learning_rate: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Return the base weights and the momentum after an outer step, without changing the arguments.

    Algorithm 1 of DiLoCo (Douillard et al., 2023, arXiv 2311.08105) with its choice of Nesterov momentum
    (Sutskever et al., 2013) as torch.optim.SGD writes it: m' = μ·m + Δ, θ' = θ − η·(Δ + μ·m'), where Δ is the
    mean of θ − θᵢ over the peers. All fp32 vectors of one length. Each product and each sum is rounded by
    itself: a fused multiply-add would give other bits on another processor, and peers must agree on all.
    """
    momentum = torch.add(torch.mul(momentum, decay), pseudo_gradient)
    ahead = torch.add(torch.mul(momentum, decay), pseudo_gradient)
    return torch.sub(base, torch.mul(ahead, learning_rate)), momentum


def _of(flat: Tensor, strip: range) -> Tensor:
    """Return a view of these elements."""
    return flat[strip.start : strip.stop]


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

    def offer(self, round: int) -> tuple[float, float]:
        """See OuterUpdate. The part is the gradients as they are now, which stay until the round's end."""
        return sum(squared_norm(block) for block in self._blocks(self._vector.read_gradients)), 0.0

    def pieces(self) -> Sequence[range]:
        """See OuterUpdate."""
        return pieces_of(self._vector.numel, self._piece)

    def values(self, weight: float, piece: range) -> tuple[Tensor, Tensor | None]:
        """See OuterUpdate."""
        values = torch.empty(len(piece))
        self._vector.read_gradients(values, piece.start)
        return values, None

    def prepare(self, reduced: Reduced) -> str:
        """Keep the average; return the digest of the present weights and the average."""
        self._average = reduced.average
        weights = (block.numpy() for block in self._blocks(self._vector.read_masters))
        pieces = itertools.chain(weights, reduced.average.blocks())
        return digest_of_pieces(pieces, nbytes=8 * self._vector.numel)

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
