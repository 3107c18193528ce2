"""The outer update of DiLoCo: pseudo-gradients, and an outer optimizer with Nesterov momentum.

A pseudo-gradient is the difference between the weights that were last equal on all peers and the present
ones. Fragments, as in Streaming DiLoCo, are parts of the model that are averaged in turn, one in each
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bloomery.checkpoint.format.state import StateEntry
from bloomery.config.elastic import SPARSE, ElasticSection
from bloomery.data.position import Ranges, total
from bloomery.diloco.background import BackgroundCall
from bloomery.diloco.outer_update import (
    PIECE,
    Measure,
    Reduced,
    digest_of_pieces,
    pieces_of,
    rank_digest,
    squared_norm,
)
from bloomery.diloco.peer_vector import PeerVector, fragment_of_round, fragments_of, put, take
from bloomery.diloco.stored_average import BLOCK, StoredAverage
from bloomery.parallel.host_copies import Arrival

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
    the weights when it is sent.

    Overlapped steps change the weights meanwhile, so two pinned copies of a fragment are kept (8 bytes an
    element): the weights that were offered, and the next base, which the device reads while base and
    momentum make their step on a thread. The training waits for none of that.

    With one fragment and no overlap, the weights of the model are the base at each committed round.

    piece: how many elements a ring reduces at a time.
    """

    def __init__(self, vector: PeerVector, section: ElasticSection, *, piece: int = PIECE) -> None:
        self._vector, self._section, self._piece = vector, section, piece
        self._base, self._momentum = vector.pinned_zeros(), vector.zeros()
        self.residual = vector.zeros() if section.codec in _WITH_FEEDBACK else None
        self._decay = section.feedback_decay if section.codec == SPARSE else 1.0
        self._fragments = fragments_of(vector.places(), numel=vector.numel, count=section.fragments)
        longest = max(map(total, self._fragments)) if section.overlap_steps else 0
        self._offered, self._next_base = vector.pinned_zeros(longest), vector.pinned_zeros(longest)
        """With overlapped steps: the fragment's weights that are offered, and its base after the round."""
        self._copied: Arrival | None = None
        """The copy of the weights that are offered; None where they are read from the model."""
        self._adopting: BackgroundCall[None] | None = None
        """The step of base and momentum that the weights have made already; None: none is under way."""
        self._spans: Ranges = ()
        """The elements of the fragment that was offered last."""
        self._is_offered = False
        """Whether this peer's part of that fragment is offered, and its round is not over."""
        self._values = torch.empty(0)
        """Memory for a piece of the part; empty between rounds."""
        self._weights: Tensor | None = None
        """The weights that `swap_in_committed` has replaced."""
        self._prepared: Reduced | None = None
        """The average and the next residual of that fragment; None until an attempt is complete."""

    @property
    def base(self) -> Tensor:
        """See the class. Waits for a step that is under way."""
        self._end_adoption()
        return self._base

    @property
    def momentum(self) -> Tensor:
        """See the class. Waits for a step that is under way."""
        self._end_adoption()
        return self._momentum

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

    def offer(self, round: int) -> Measure:
        """See OuterUpdate. The part is the pseudo-gradient of this round's fragment."""
        self._end_adoption()
        self._forget_offer()
        self._spans = self._fragments[fragment_of_round(round, count=self._section.fragments)]
        if self._section.overlap_steps:
            self._copied = self._vector.copy_masters(self._offered, self._spans)
        self._is_offered = True
        return partial(self._measure, self._spans, self._copied)

    def keep_offer(self) -> None:
        """See OuterUpdate."""
        if self._copied is not None:
            self._vector.keep_masters_until_copied()

    def _measure(self, spans: Ranges, copied: Arrival | None) -> tuple[float, float]:
        squares = sum(squared_norm(drift) for drift, _ in self._drifts(spans, copied))
        feedback = 0.0 if self.residual is None else squared_norm(take(self.residual, spans))
        return squares, self._decay**2 * feedback

    def pieces(self) -> Sequence[range]:
        """See OuterUpdate."""
        return pieces_of(total(self._spans), self._piece)

    @torch.no_grad()
    def values(self, weight: float, piece: range) -> tuple[Tensor, Tensor | None]:
        """See OuterUpdate."""
        assert self._is_offered, "nothing was offered"
        if self._values.numel() < len(piece):
            self._values = torch.empty(len(piece))
        values = self._values[: len(piece)]
        for drift, place in self._drifts(self._spans, self._copied, piece):
            values[place - piece.start : place - piece.start + len(drift)] = drift
        if self.residual is None:
            return values, None
        parts = [_of(self.residual, strip) for strip, _ in _strips(self._spans, piece)]
        lost = torch.cat([values[:0], *parts])
        if weight == 0.0:  # nothing of this peer is sent now, so what was lost is kept
            return values, lost
        # Error feedback: the error of earlier rounds is sent now; this attempt's is summed from zero.
        return values.add_(lost.mul_(self._decay).div_(weight)), lost.zero_()

    def prepare(self, reduced: Reduced, *, check: Callable[[], None] = lambda: None) -> str:
        """Return the digest of the whole base and momentum after the outer step, which `adopt` makes."""
        self._end_adoption()
        self._prepared = None
        pieces = self._after_round(reduced.average)
        digest = digest_of_pieces(pieces, nbytes=8 * self._vector.numel, check=check)
        self._prepared = reduced
        return digest

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
        average, residual = self._prepared.average, self._prepared.residual
        if residual is not None and self.residual is not None:
            put(self.residual, self._spans, residual)
        if not self._is_offered:
            self._make_step(average, self._spans)
            self.reset()
        elif self._section.overlap_steps:
            self._vector.mix_masters(self._next_base, self._spans, share=self._section.mixing)
            step = partial(self._make_step, average, self._spans)
            self._adopting = BackgroundCall(step, name="outer step")
        else:
            self._make_step(average, self._spans, then=self._put)
            self._vector.share_masters()
        self._forget_offer()

    def rebase(self) -> None:
        """See OuterUpdate. Only the fragment's weights move."""
        assert self._prepared is not None, "nothing was prepared"
        weights = self._vector.zeros()
        self._vector.read_masters(weights)
        moved = weights.sub_(self.base)
        self._make_step(self._prepared.average, self._spans)
        self._vector.write_masters(moved.add_(self.base), within=self._spans)
        self._forget_offer()

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

    def _forget_offer(self) -> None:
        self._is_offered = False
        self._prepared = self._copied = None
        self._values = torch.empty(0)

    @torch.no_grad()
    def _drifts(
        self, spans: Ranges, copied: Arrival | None, piece: range | None = None
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield how far the weights have moved from the base, strip by strip.

        The memory of a strip is taken again when the caller asks for the next one, or for the next but one
        where the weights were copied. Each strip comes with the place of its first element in the fragment.

        copied: see `_copied`.
        """
        strips = list(_strips(spans, piece))
        if copied is None:
            read = self._vector.each_master([strip for strip, _ in strips])
            for (strip, place), weights in zip(strips, read, strict=True):
                yield torch.sub(_of(self._base, strip), weights, out=weights), place
            return
        copied.synchronize()
        drifts = torch.empty(2, self._scratch_numel())
        for number, (strip, place) in enumerate(strips):
            weights, drift = self._offered[place : place + len(strip)], drifts[number % 2, : len(strip)]
            yield torch.sub(_of(self._base, strip), weights, out=drift), place

    def _scratch_numel(self) -> int:
        return min(BLOCK, self._vector.numel)

    def _step(self, strip: range, average: Tensor, *, out: tuple[Tensor, Tensor, Tensor]) -> None:
        rate, decay = self._section.outer_learning_rate, self._section.outer_momentum
        base, momentum = _of(self._base, strip), _of(self._momentum, strip)
        nesterov_step(base, momentum, average, learning_rate=rate, decay=decay, out=out)

    def _make_step(
        self, average: StoredAverage, spans: Ranges, *, then: Callable[[range], None] = lambda strip: None
    ) -> None:
        """Make a step in place. then: called with the elements of the vector that have made it."""
        scratch = torch.empty(self._scratch_numel())
        for strip, _, values in _averaged(average, spans):
            base, momentum = _of(self._base, strip), _of(self._momentum, strip)
            self._step(strip, values, out=(base, momentum, scratch[: len(strip)]))
            then(strip)

    def _put(self, strip: range) -> None:
        """Begin to write elements of the base to the weights, while the CPU makes the step of others."""
        self._vector.put_masters(self._base, (strip,))

    def _end_adoption(self) -> None:
        """Wait until base and momentum are those of the round whose weights the device has."""
        if self._adopting is not None:
            self._adopting.result()
            self._adopting = None
            self._vector.wait_for_device()  # it may still read the next base

    @torch.no_grad()
    def _after_round(self, average: StoredAverage) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the whole base and then the momentum as they are after a round, some elements at a time.

        With overlapped steps the next base stays; else the memory of a piece is taken for the next but one.
        """
        scratch = torch.empty(3, self._scratch_numel())
        for present in (self._base, self._momentum):
            end = 0
            for number, (strip, place, values) in enumerate(_averaged(average, self._spans)):
                yield present[end : strip.start].numpy()
                after = scratch[number % 2, : len(strip)]
                if present is self._momentum:
                    decay = self._section.outer_momentum
                    torch.mul(_of(present, strip), decay, out=after).add_(values)
                else:
                    if self._section.overlap_steps:
                        after = self._next_base[place : place + len(strip)]
                    self._step(strip, values, out=(after, scratch[2, : len(strip)], after))
                yield after.numpy()
                end = strip.stop
            yield present[end:].numpy()


def _strips(spans: Ranges, piece: range | None = None) -> Iterator[tuple[range, int]]:
    """Yield the elements of a fragment, or of a piece of it, at most BLOCK at a time.

    Each strip is a range of the rank's vector, with the place of its first element in the fragment.
    """
    wanted = range(total(spans)) if piece is None else piece
    place = 0
    for span in spans:
        first, last = max(place, wanted.start), min(place + len(span), wanted.stop)
        for start in range(first, last, BLOCK):
            at = span.start - place
            yield range(at + start, at + min(start + BLOCK, last)), start
        place += len(span)


def _averaged(average: StoredAverage, spans: Ranges) -> Iterator[tuple[range, int, Tensor]]:
    """Yield elements of a fragment in the vector, the place of the first in the fragment, their average."""
    place = 0
    for span in spans:
        for start, values in average.pieces(place, place + len(span)):
            first = span.start + start - place
            yield range(first, first + values.size), start, torch.from_numpy(values)
        place += len(span)


@torch.no_grad()
def nesterov_step(
    base: Tensor,
    momentum: Tensor,
    pseudo_gradient: Tensor,
    *,
    learning_rate: float,
    decay: float,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the base weights and the momentum after an outer step.

    Algorithm 1 of DiLoCo (Douillard et al., 2023, arXiv 2311.08105) with its choice of Nesterov momentum
    (Sutskever et al., 2013) as torch.optim.SGD writes it: m' = μ·m + Δ, θ' = θ − η·(Δ + μ·m'), where Δ is the
    mean of θ − θᵢ over the peers. All fp32 vectors of one length. Each product and each sum is rounded by
    itself: a fused multiply-add would give other bits on another processor, and peers must agree on all.

    out: memory for both results, which may be the arguments themselves, and for what lies between, which may
        be that of the weights if these are no argument; None: new memory.
    """
    after, moved, ahead = (torch.empty_like(base) for _ in range(3)) if out is None else out
    torch.mul(momentum, decay, out=moved).add_(pseudo_gradient)
    torch.mul(moved, decay, out=ahead).add_(pseudo_gradient).mul_(learning_rate)
    return torch.sub(base, ahead, out=after), moved


def _of(flat: Tensor, strip: range) -> Tensor:
    """Return a view of these elements."""
    return flat[strip.start : strip.stop]
