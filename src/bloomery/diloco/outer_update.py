"""What a peer brings to a round and how the average is applied: the interface, and digests of the result.

`pseudo_gradient.PseudoGradient` (DiLoCo) and `gradient_average.GradientAverage` implement it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bloomery.checkpoint.format.state import StateEntry
from bloomery.transport.state_digest import digest


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The result of an all-reduce: the average, and what quantising it left out (None: not kept)."""

    values: Tensor
    residual: Tensor | None


class OuterUpdate(Protocol):
    """One rank's part of what its peer brings to each round: fp32 vectors in the CPU's memory.

    Every rank of the peer calls each method; methods that write weights or gradients are collective over it.
    A round goes: `offer`, then for each attempt `values` and `prepare`, then `adopt` or `refuse`.
    """

    @property
    def digest_is_of_state(self) -> bool:
        """Whether a round's digest is `digest` of the state after it, so that it can be checked from that."""

    @property
    def has_feedback(self) -> bool:
        """Whether it keeps what quantising leaves out, and adds it to the next round's part."""

    def forget_feedback(self) -> None:
        """Set what quantising left out to nothing."""

    def begin(self) -> None:
        """Begin a run with the weights as they are."""

    def reset(self) -> None:
        """Go back to the committed weights: what was done since does not count."""

    def swap_in_committed(self) -> None:
        """Put the committed weights in place of the present ones until `swap_back`."""

    def swap_back(self) -> None:
        """Put the weights back that `swap_in_committed` took out, to the bit."""

    def follow_loaded(self) -> None:
        """Go on from another peer's state, which was just loaded: keep what is shared alone."""

    def offer_nothing(self) -> None:
        """Make the next part finite without a step: it has weight 0, so its values do not matter."""

    def offer(self, round: int) -> float:
        """Fix this round's part; return the sum of its squares, not finite where an element is not."""

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Return a copy of the part for one attempt, and zeros that what quantising leaves out is added to.

        None instead of the zeros: it is not kept.
        """

    def prepare(self, reduced: Reduced) -> str:
        """Compute the state that follows from an average, beside the present one; return its digest."""

    def adopt(self) -> None:
        """Make what was prepared the present state: the round is committed with it."""

    def refuse(self) -> None:
        """Use nothing of the part that was offered: the round is committed without it."""

    def digest(self) -> str:
        """Return the `rank_digest` of the present shared state."""

    def state_entries(self) -> Iterable[StateEntry]:
        """Describe the tensors that a checkpoint keeps."""


def rank_digest(tensors: Iterable[Tensor]) -> str:
    """The hash of one rank's part: contiguous tensors in the CPU's memory, in their order."""
    return digest(*(tensor.numpy() for tensor in tensors))


def peer_digest(rank_digests: Sequence[str], *, salt: str) -> str:
    """The digest of a peer's state, from those of its ranks in their order.

    salt: what must be equal on all peers beside the tensors.
    """
    return hashlib.sha256("\n".join((salt, *rank_digests)).encode()).hexdigest()[:32]
