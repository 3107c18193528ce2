"""Presents a peer's weights or gradients as one flat vector, divided over its ranks and in fragments.

Every element of the model is in exactly one rank's part. Elements that data-parallel ranks hold alike are
divided among them, those that tensor-parallel ranks hold alike belong to the first rank, and a tied embedding
belongs to the first stage.

Streaming DiLoCo averages one fragment of the model a round, so a part spans the steps of several rounds:
`FragmentHistory` holds what a peer did since a fragment was last averaged.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bloomery.checkpoint.format.state import Box, Json, Scope, StateEntry
from bloomery.data.position import Ranges, merged, total
from bloomery.optim.groups import GroupLayout
from bloomery.parallel.device_wait import wait_for_device
from bloomery.parallel.host_copies import PIECE_NUMEL, Arrival, link_to
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import MasterWeights
from bloomery.protocol.records import Ready


@dataclass(frozen=True, kw_only=True)
class _Own:
    """Elements [start, stop) of what this rank holds of a parameter group, at `offset` of its vector."""

    layout: GroupLayout
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def narrowed(self) -> GroupLayout:
        """The layout as if this rank held only these elements."""
        first = self.layout.held.start
        return replace(self.layout, held=range(first + self.start, first + self.stop))


@dataclass(frozen=True)
class _Arrivals:
    each: Sequence[Arrival]

    def synchronize(self) -> None:
        """See Arrival."""
        for arrival in self.each:
            arrival.synchronize()


class PeerVector:
    """One rank's part of its peer's master weights and reduced gradients: fp32 vectors in the CPU's memory.

    numel: how many elements this rank's part has.
    """

    def __init__(self, weights: MasterWeights, mesh: Mesh) -> None:
        self._weights, self._mesh = weights, mesh
        self._link = link_to(mesh.device)
        self._blocks = (torch.empty(0), torch.empty(0))
        self._own: list[_Own] = []
        offset = 0
        for layout in weights.layouts:
            start, stop = _own_part(layout, mesh)
            self._own.append(_Own(layout=layout, start=start, stop=stop, offset=offset))
            offset += stop - start
        self.numel = offset

    def zeros(self) -> Tensor:
        """Return a new zero vector for this rank's part."""
        return torch.zeros(self.numel)

    def pinned_zeros(self, numel: int | None = None) -> Tensor:
        """Return new zeros, which a GPU copies by itself. They are given back with this object.

        numel: how many; None: for this rank's part.
        """
        memory = self._link.zeros(self.numel if numel is None else numel)
        weakref.finalize(self, self._link.release, (memory,)).atexit = False
        return memory

    def read_masters(self, into: Tensor, start: int = 0) -> None:
        """Copy this rank's part of the master weights, from element `start` on, until `into` is full."""
        self._read(self._weights.master, into, start)

    def each_master(self, strips: Sequence[range]) -> Iterator[Tensor]:
        """Yield the master weights in each of these ranges, in memory that the caller may change.

        While the caller uses one range, a GPU copies the next; the memory of a range is taken again when the
        caller asks for the next.
        """
        longest = max(map(len, strips), default=0)
        if self._blocks[0].numel() < longest:
            self._blocks = (self.pinned_zeros(longest), self.pinned_zeros(longest))
        coming: list[tuple[Tensor, Arrival]] = []
        for number, strip in enumerate(strips):
            into = self._blocks[number % 2][: len(strip)]
            coming.append((into, self._begin_read(self._weights.master, into, strip.start)))
            if number:
                yield _arrived(*coming.pop(0))
        for into, arrival in coming:
            yield _arrived(into, arrival)

    def copy_masters(self, into: Tensor, spans: Ranges) -> Arrival:
        """Begin to copy the master weights in some ranges, one after the other, to pinned memory.

        The device goes on meanwhile. Before it changes the weights, `keep_masters_until_copied` is called.
        """
        place, arrivals = 0, []
        for span in spans:
            arrivals.append(
                self._begin_read(self._weights.master, into[place : place + len(span)], span.start)
            )
            place += len(span)
        return _Arrivals(arrivals)

    def keep_masters_until_copied(self) -> None:
        """Have the device change the weights only after the copies that `copy_masters` began."""
        self._link.follow_down()

    def read_gradients(self, into: Tensor, start: int = 0) -> None:
        """Copy this rank's part of the reduced gradients, from element `start` on, until `into` is full."""
        self._read(self._weights.reduced_gradient, into, start)

    @torch.no_grad()
    def write_masters(self, values: Tensor, within: Ranges | None = None) -> None:
        """Write each rank's part to the master weights of all ranks that hold it. Collective over the peer.

        It updates the working weights too.

        values: a vector of this rank's part.
        within: the elements of that vector that are written; None: all of them.
        """
        self.wait_for_device()  # memory that is not pinned is copied in a call that waits without a deadline
        self.put_masters(values, within)
        self.share_masters()

    @torch.no_grad()
    def put_masters(self, values: Tensor, within: Ranges | None = None) -> None:
        """Begin to write pinned values to this rank's own elements; `share_masters` must follow."""
        self._put(self._weights.master, values, within)

    @torch.no_grad()
    def share_masters(self) -> None:
        """Give what `put_masters` wrote to all ranks that hold it, and wait. Collective over the peer."""
        self._share(self._weights.master)
        self._weights.copy_masters_to_working()
        self.wait_for_device()

    @torch.no_grad()
    def mix_masters(self, values: Tensor, spans: Ranges, *, share: float) -> None:
        """Move the master weights in some ranges towards other values. Collective over the peer.

        The device does it before what it computes next, and the host does not wait for it: `values` must not
        change before `wait_for_device` has returned.

        values: of these ranges, one after the other, in pinned memory.
        share: 1: the weights become the values; 0: they stay.
        """
        place = 0
        for span in spans:
            self._put(
                self._weights.master,
                values[place : place + len(span)],
                (span,),
                begin=span.start,
                share=share,
            )
            place += len(span)
        self._share(self._weights.master)
        self._weights.copy_masters_to_working()

    def wait_for_device(self) -> None:
        """Wait until the device has made what it was told. Raises RankLost if that takes too long."""
        wait_for_device(self._mesh.device)

    @torch.no_grad()
    def write_gradients(self, values: Tensor) -> None:
        """Write each rank's part to the gradients of all ranks that hold it. Collective over the peer."""
        self.wait_for_device()
        self._put(self._weights.reduced_gradient, values, None)
        self._share(self._weights.reduced_gradient)
        self._weights.copy_reduced_gradient()
        self.wait_for_device()

    def spoil_gradients(self) -> None:
        """Make all gradients of this rank NaN, so that the optimizer refuses the update."""
        self._weights.spoil_gradients()

    def entries(self, flat: Tensor, *, prefix: str, scope: Scope) -> Iterable[StateEntry]:
        """Describe a vector of this rank's part as boxes of the logical tensors `PREFIX.NAME`."""
        for own in self._own:
            part = flat[own.offset : own.offset + own.numel]
            for place in own.narrowed.held_logical():
                yield StateEntry(
                    name=f"{prefix}.{place.name}",
                    global_shape=place.global_shape,
                    dtype="float32",
                    box=Box(offset=place.offset, shape=place.shape),
                    tensor=part[place.start : place.start + place.numel].view(place.shape),
                    scope=scope,
                )

    def places(self) -> list[tuple[str, range]]:
        """Return (logical name, elements) of each tensor in this rank's part, in the order of the vector."""
        return [
            (place.name, range(own.offset + place.start, own.offset + place.start + place.numel))
            for own in self._own
            for place in own.narrowed.held_logical()
        ]

    def _read(self, buffers: Sequence[Tensor], into: Tensor, first: int) -> None:
        self.wait_for_device()
        self._begin_read(buffers, into, first).synchronize()

    @torch.no_grad()
    def _begin_read(self, buffers: Sequence[Tensor], into: Tensor, first: int) -> Arrival:
        arrivals = []
        for own, buffer in zip(self._own, buffers, strict=True):
            start = max(first, own.offset)
            stop = min(first + into.numel(), own.offset + own.numel)
            if start < stop:
                at = own.start - own.offset
                source = buffer[at + start : at + stop]
                arrivals.append(self._link.down(into[start - first : stop - first], source))
        return _Arrivals(arrivals)

    def _put(
        self,
        buffers: Sequence[Tensor],
        values: Tensor,
        within: Ranges | None,
        *,
        begin: int = 0,
        share: float = 1.0,
    ) -> None:
        """Begin to move this rank's own elements to `values`, whose first one is element `begin`."""
        self._link.wait_unless_pinned(values)
        for own, buffer in zip(self._own, buffers, strict=True):
            for piece in (range(begin, begin + values.numel()),) if within is None else within:
                start, stop = max(piece.start, own.offset), min(piece.stop, own.offset + own.numel)
                if start < stop:
                    at = own.start - own.offset
                    _move(buffer[at + start : at + stop], values[start - begin : stop - begin], share)

    def _share(self, buffers: Sequence[Tensor]) -> None:
        for own, buffer in zip(self._own, buffers, strict=True):
            self._broadcast(own, buffer, self._mesh)

    def _broadcast(self, own: _Own, buffer: Tensor, mesh: Mesh) -> None:
        """Give all ranks that hold the same elements the values of the rank in whose part they are."""
        if mesh.world == 1:
            return
        held_numel, degree = buffer.numel(), mesh.replica.degree
        part = -(-held_numel // degree)
        whole = torch.zeros(part * degree, device=mesh.device)
        if own.numel:
            first = mesh.replica.index * part
            whole[first : first + own.numel].copy_(buffer[own.start : own.stop])
        mesh.replica.all_gather(whole)
        # A sum gives every rank the values, because ranks that own nothing of this group add zeros.
        if own.layout.share in ("whole", "partial"):
            mesh.tensor.all_reduce(whole)
        if own.layout.share in ("echoed", "echo"):
            mesh.embedding.all_reduce(whole)
        buffer.copy_(whole[:held_numel])


def _arrived(into: Tensor, arrival: Arrival) -> Tensor:
    arrival.synchronize()
    return into


def _move(weights: Tensor, values: Tensor, share: float) -> None:
    """Begin to move weights on the device towards values in the CPU's memory, a piece at a time."""
    if share == 1.0:
        weights.copy_(values, non_blocking=True)
        return
    for mine, theirs in zip(weights.split(PIECE_NUMEL), values.split(PIECE_NUMEL), strict=True):
        mine.lerp_(theirs.to(weights.device, non_blocking=True), share)


def _own_part(layout: GroupLayout, mesh: Mesh) -> tuple[int, int]:
    """Return [start, stop) of the elements of a group that are in this rank's part, among those it holds."""
    counts = layout.share != "echo" and (layout.share in ("split", "echoed") or mesh.tensor.is_first)
    if not counts:
        return 0, 0
    held_numel = len(layout.held)
    part = -(-held_numel // mesh.replica.degree)
    start = min(mesh.replica.index * part, held_numel)
    return start, min(start + part, held_numel)


PAST_PARTS = 5
"""The number of its earlier parts that a peer lists in an offer."""


@dataclass(frozen=True, kw_only=True)
class FragmentHistory:
    """What this peer did since a fragment of the model was last averaged, and what it brought before.

    steps, samples: of the committed rounds since then, which averaged other fragments.
    parts: (steps, norm) of its last parts of this fragment that were averaged.
    """

    steps: int = 0
    samples: int = 0
    parts: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_json(cls, values: Any) -> FragmentHistory:
        """Read what `to_json` wrote. Raises TypeError or ValueError for other values."""
        steps, samples, parts = values
        brought = tuple((int(part_steps), float(norm)) for part_steps, norm in parts[-PAST_PARTS:])
        return cls(steps=int(steps), samples=int(samples), parts=brought)

    def to_json(self) -> Json:
        """Return what a checkpoint keeps."""
        return [self.steps, self.samples, [list(part) for part in self.parts]]

    def after(self, ready: Ready, *, is_averaged: bool) -> FragmentHistory:
        """Return the history after a round that included this peer's part of it, or of another fragment."""
        if not is_averaged:
            steps, samples = self.steps + ready.steps, self.samples + total(ready.spent)
            return replace(self, steps=steps, samples=samples)
        brought = ((ready.spanned_steps, ready.norm),) if ready.tokens and ready.norm is not None else ()
        return FragmentHistory(parts=(*self.parts, *brought)[-PAST_PARTS:])


def fragment_of_round(round: int, *, count: int) -> int:
    """Return the index of the fragment that round 1, 2, … averages."""
    return (round - 1) % count


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
