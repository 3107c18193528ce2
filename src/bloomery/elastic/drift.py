"""DiLoCo's contribution: how far the weights went since they were last equal on all peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bloomery.checkpoint.state import StateEntry
from bloomery.config.elastic import ElasticSection
from bloomery.data.ranges import Ranges, total
from bloomery.elastic.contribution import Offer, Vector
from bloomery.elastic.exchange import Reduced
from bloomery.elastic.fragments import fragment_of_round, fragments_of
from bloomery.elastic.nesterov import nesterov_step
from bloomery.elastic.parity import lane_digest


class Drift:
    """Base weights, outer momentum and error feedback of this rank's part: fp32, in the CPU's memory.

    base and momentum are equal on all peers at a committed round; with one fragment and no overlap the
    weights are the base then. A pseudo-gradient is base − weights, of one fragment of the model.
    """

    def __init__(self, vector: Vector, section: ElasticSection) -> None:
        self._vector, self._section = vector, section
        self.base, self.momentum = vector.zeros(), vector.zeros()
        self.residual = vector.zeros() if section.codec == "int4" else None
        self._weights = vector.zeros()
        self._fragments = fragments_of(vector.places(), numel=vector.numel, count=section.fragments)
        self._spans: Ranges = ()
        self._given: Tensor | None = None
        self._candidate: tuple[Tensor, Tensor, Tensor | None] | None = None

    @property
    def has_feedback(self) -> bool:
        """With int4."""
        return self.residual is not None

    def forget_feedback(self) -> None:
        """Nothing was left out."""
        if self.residual is not None:
            self.residual.zero_()

    def begin(self) -> None:
        """The base is where the weights are."""
        self._vector.read_masters(self.base)
        self.momentum.zero_()
        self.loaded()

    def reset(self) -> None:
        """Go back to the base."""
        self._drop()
        self._vector.write_masters(self.base)

    def set_aside(self) -> None:
        """The weights are the base."""
        self._vector.read_masters(self._weights)
        self._vector.write_masters(self.base)

    def take_up(self) -> None:
        """The weights are what they were."""
        self._vector.write_masters(self._weights)

    def loaded(self) -> None:
        """What quantising left out was another peer's."""
        self._drop()
        self.forget_feedback()

    def nothing(self) -> None:
        """The weights are where they were: nothing is what will be offered."""

    @torch.no_grad()
    def offer(self, round: int) -> Offer:
        """The pseudo-gradient of this round's fragment."""
        number = fragment_of_round(round, count=self._section.fragments)
        self._spans = self._fragments[number]
        self._vector.read_masters(self._weights)
        self._given = torch.sub(taken(self.base, self._spans), taken(self._weights, self._spans))
        return Offer(squares=float(torch.linalg.vector_norm(self._given, dtype=torch.float64).square()))

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Copies for one try."""
        assert self._given is not None, "nothing was offered"
        if self.residual is None:
            return self._given.clone(), None
        # What was left out before goes with it; what will be left out is counted from nothing.
        return self._given + taken(self.residual, self._spans), torch.zeros_like(self._given)

    def prepare(self, reduced: Reduced) -> str:
        """The outer step, beside the state."""
        base, momentum = nesterov_step(
            taken(self.base, self._spans),
            taken(self.momentum, self._spans),
            reduced.values,
            learning_rate=self._section.outer_learning_rate,
            decay=self._section.outer_momentum,
        )
        self._candidate = base, momentum, reduced.residual
        if total(self._spans) == self._vector.numel:
            return lane_digest((base, momentum))
        whole = self.base.clone(), self.momentum.clone()
        for kept, new in zip(whole, (base, momentum), strict=True):
            put(kept, self._spans, new)
        return lane_digest(whole)

    def adopt(self) -> None:
        """Base, momentum and weights are what followed."""
        assert self._candidate is not None, "nothing was prepared"
        base, momentum, residual = self._candidate
        put(self.base, self._spans, base)
        put(self.momentum, self._spans, momentum)
        if residual is not None and self.residual is not None:
            put(self.residual, self._spans, residual)
        self._vector.write_masters(self._mixed(), within=self._spans)
        self._drop()

    def refuse(self) -> None:
        """Somebody else's state replaces this one."""
        self._drop()

    def digest(self) -> str:
        """Of base and momentum."""
        return lane_digest((self.base, self.momentum))

    def state_entries(self) -> Iterable[StateEntry]:
        """Base and momentum, shared; what quantising left out, this peer's own."""
        yield from self._vector.entries(self.base, prefix="outer.base", scope="shared")
        yield from self._vector.entries(self.momentum, prefix="outer.momentum", scope="shared")
        if self.residual is not None:
            yield from self._vector.entries(self.residual, prefix="outer.residual", scope="peer")

    def _mixed(self) -> Tensor:
        """The weights to go on with: the base, or that and what they are now (Streaming DiLoCo, eq. 3)."""
        if self._section.mixing == 1.0:
            return self.base
        self._vector.read_masters(self._weights)
        return torch.lerp(self._weights, self.base, self._section.mixing)

    def _drop(self) -> None:
        self._given = self._candidate = None


def taken(flat: Tensor, spans: Sequence[range]) -> Tensor:
    """The elements of some ranges, one after the other: a view where they are one range."""
    if len(spans) == 1:
        return flat[spans[0].start : spans[0].stop]
    return torch.cat([flat[:0], *(flat[span.start : span.stop] for span in spans)])


def put(flat: Tensor, spans: Sequence[range], values: Tensor) -> None:
    """Write what `taken` gave back to its place."""
    start = 0
    for span in spans:
        flat[span.start : span.stop].copy_(values[start : start + len(span)])
        start += len(span)
