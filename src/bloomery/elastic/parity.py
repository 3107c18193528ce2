"""One name for the state that all peers share: a hash over the lanes of a peer's ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor

from bloomery.elastic.wire.parity import digest


def lane_digest(tensors: Iterable[Tensor]) -> str:
    """The hash of one rank's part: contiguous tensors of main memory, in their order."""
    return digest(*(tensor.numpy() for tensor in tensors))


def peer_digest(lanes: Sequence[str], *, salt: str) -> str:
    """The hash of a peer's state, from those of its ranks. salt: what else must be equal between peers."""
    return hashlib.sha256("\n".join((salt, *lanes)).encode()).hexdigest()[:32]
