"""One try of a round's all-reduce, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bloomery.elastic.seam import Reduce
from bloomery.errors import BloomeryError

_END_S = 60.0
"""How long a cancelled ring may take to let go of its buffers."""


class Ring(Protocol):
    """The connections of one attempt, ready to reduce."""

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        """Make `values` the sum of weight × values over the members, in place; bit-identical everywhere.

        residual: what quantising leaves out is added to it. Raises RingFailed.
        """
        ...

    def cancel(self) -> None:
        """Make `all_reduce` fail soon. From any thread."""
        ...

    def close(self) -> None:
        """Let go of the connections."""
        ...


RingMaker = Callable[[Reduce], Ring]


class RingFailed(BloomeryError):
    """An all-reduce that did not come to its end. culprit: the peer at the other end, where one is known."""

    def __init__(self, message: str, *, kind: str, culprit: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.culprit = kind, culprit


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What a ring left: the average, and what quantising it left out."""

    values: Tensor
    residual: Tensor | None


class Exchange:
    """A ring under way. values and residual are its own until it is over."""

    def __init__(self, ring: Ring, reduce: Reduce, values: Tensor, residual: Tensor | None) -> None:
        self.epoch = reduce.attempt.epoch
        self._ring = ring
        self._reduced = Reduced(values=values, residual=residual)
        self._weight = reduce.attempt.weights[reduce.index]
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"ring {self.epoch}", daemon=True)
        self._thread.start()

    def is_over(self, timeout_s: float) -> bool:
        """Whether it came to its end, one way or the other, in so long."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """End it, and wait until its buffers are free. Raises RingFailed when it does not let go of them."""
        self._ring.cancel()
        if not self.is_over(_END_S):
            raise RingFailed("The cancelled ring does not end.", kind="stuck")

    def result(self) -> Reduced:
        """What it left. Raises RingFailed, or what else went wrong in it."""
        if self._failure is not None:
            raise self._failure
        return self._reduced

    def _run(self) -> None:
        try:
            self._ring.all_reduce(self._reduced.values, weight=self._weight, residual=self._reduced.residual)
        except BaseException as failure:  # noqa: BLE001  — the thread's edge: raised again in `result`
            self._failure = failure
        finally:
            self._ring.close()
