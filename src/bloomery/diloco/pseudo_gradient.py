"""What peers average: pseudo-gradients for DiLoCo's outer optimizer, or the gradients of each step.

A pseudo-gradient is the difference between the weights that were last equal on all peers and the present
ones. Fragments, as in Streaming DiLoCo, are parts of the model that are averaged in turn, one in each
round. The outer optimizer has Nesterov momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bloomery.checkpoint.format.state import StateEntry
from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Ranges, merged, total
from bloomery.diloco.fragment_history import fragment_of_round
from bloomery.diloco.outer_update import Reduced, rank_digest, squared_norm
from bloomery.diloco.peer_vector import PeerVector


class PseudoGradient:
    """One rank's part of the outer optimizer. Implements OuterUpdate. Vectors are fp32, in the CPU's memory.

    base: the weights after the last committed round; equal on all peers.
    momentum: the outer momentum; equal on all peers.
    residual: what quantising lost of earlier averages at this peer (error feedback), in the unit of the
        average, so that it is sent whole whatever the peer's weight is then; None if the codec keeps none.

    With one fragment and no overlap, the weights of the model are the base at each committed round.
    """

    def __init__(self, vector: PeerVector, section: ElasticSection) -> None:
        self._vector, self._section = vector, section
        self.base, self.momentum = vector.zeros(), vector.zeros()
        self.residual = vector.zeros() if section.codec == "int4" else None
        self._weights = vector.zeros()
        self._fragments = fragments_of(vector.places(), numel=vector.numel, count=section.fragments)
        self._spans: Ranges = ()
        """The elements of the fragment that was offered last."""
        self._pseudo_gradient: Tensor | None = None
        """The pseudo-gradient of that fragment; None before it is offered, and after its round."""
        self._prepared: tuple[Tensor, Tensor, Tensor | None] | None = None
        """The next base, momentum and residual of that fragment; None until an attempt is complete."""
        self._average: Tensor | None = None
        """The average from which that was computed."""

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
        self._vector.read_masters(self._weights)
        self._vector.write_masters(self.base)

    def swap_back(self) -> None:
        """See OuterUpdate."""
        self._vector.write_masters(self._weights)

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
        number = fragment_of_round(round, count=self._section.fragments)
        self._spans = self._fragments[number]
        self._vector.read_masters(self._weights)
        self._pseudo_gradient = torch.sub(take(self.base, self._spans), take(self._weights, self._spans))
        feedback = 0.0 if self.residual is None else squared_norm(take(self.residual, self._spans))
        return squared_norm(self._pseudo_gradient), feedback

    def values(self, weight: float) -> tuple[Tensor, Tensor | None]:
        """See OuterUpdate."""
        pseudo_gradient = self._pseudo_gradient
        assert pseudo_gradient is not None, "nothing was offered"
        if self.residual is None:
            return pseudo_gradient.clone(), None
        lost = take(self.residual, self._spans)
        if weight == 0.0:  # nothing of this peer is sent now, so what was lost is kept
            return pseudo_gradient.clone(), lost.clone()
        # Error feedback: the error of earlier rounds is sent now; this attempt's is summed from zero.
        return pseudo_gradient + lost / weight, torch.zeros_like(pseudo_gradient)

    def prepare(self, reduced: Reduced) -> str:
        """Make the outer step beside the present state; return the digest of the whole base and momentum."""
        base, momentum = nesterov_step(
            take(self.base, self._spans),
            take(self.momentum, self._spans),
            reduced.values,
            learning_rate=self._section.outer_learning_rate,
            decay=self._section.outer_momentum,
        )
        self._prepared, self._average = (base, momentum, reduced.residual), reduced.values
        if total(self._spans) == self._vector.numel:
            return rank_digest((base, momentum))
        whole = self.base.clone(), self.momentum.clone()
        for vector, fragment in zip(whole, (base, momentum), strict=True):
            put(vector, self._spans, fragment)
        return rank_digest(whole)

    def average(self) -> Tensor | None:
        """See OuterUpdate. It is the fragment's average pseudo-gradient."""
        return self._average

    def prepare_missed(self, round: int, average: Tensor) -> str:
        """See OuterUpdate."""
        self._forget_offer()
        self._spans = self._fragments[fragment_of_round(round, count=self._section.fragments)]
        if average.numel() != total(self._spans):
            raise ValueError(f"{average.numel()} elements, and this part has {total(self._spans)}")
        return self.prepare(Reduced(values=average, residual=None))

    def adopt(self) -> None:
        """See OuterUpdate. The fragment's weights become the base, or are mixed with it (elastic.mixing).

        After `prepare_missed` all weights become the base, and the residual, this peer's own, stays.
        """
        assert self._prepared is not None, "nothing was prepared"
        base, momentum, residual = self._prepared
        put(self.base, self._spans, base)
        put(self.momentum, self._spans, momentum)
        if residual is not None and self.residual is not None:
            put(self.residual, self._spans, residual)
        if self._pseudo_gradient is None:
            self.reset()
            return
        self._vector.write_masters(self._mixed(), within=self._spans)
        self._forget_offer()

    def refuse(self) -> None:
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
        self._vector.read_masters(self._weights)
        return torch.lerp(self._weights, self.base, self._section.mixing)

    def _forget_offer(self) -> None:
        self._pseudo_gradient = self._prepared = self._average = None


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


def fragments_of(places: Sequence[tuple[str, range]], *, numel: int, count: int) -> tuple[Ranges, ...]:
    """Return the elements of each of `count` fragments of a rank's vector.

    places: (logical name, elements) of each tensor in the vector.
    numel: the vector's length.

    Block b is in fragment b mod count (the strided pattern of Streaming DiLoCo, arXiv 2501.18512: each
    fragment has layers of every depth); the embedding is in the first, the head and the last norm in the
    last. One fragment is the whole vector.
    """
    if count == 1:
        return ((range(numel),),)
    fragments: list[list[range]] = [[] for _ in range(count)]
    for name, elements in places:
        fragments[_fragment(name, count)].append(elements)
    return tuple(merged(pieces) for pieces in fragments)


def _fragment(name: str, count: int) -> int:
    first, _, rest = name.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0]) % count
    return 0 if first in ("embedding", "positions") else count - 1


def take(flat: Tensor, spans: Sequence[range]) -> Tensor:
    """Return the elements of some ranges, one after the other; for one range, a view."""
    if len(spans) == 1:
        return flat[spans[0].start : spans[0].stop]
    return torch.cat([flat[:0], *(flat[span.start : span.stop] for span in spans)])


def put(flat: Tensor, spans: Sequence[range], values: Tensor) -> None:
    """Write values, in the order of `take`, to the elements of some ranges."""
    start = 0
    for span in spans:
        flat[span.start : span.stop].copy_(values[start : start + len(span)])
        start += len(span)


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
