"""The native ring as rounds use it: over the connections that the parent handed to this rank."""

from __future__ import annotations

import os

from torch import Tensor

from bloomery.config.elastic import ElasticSection
from bloomery.elastic.exchange import RingFailed
from bloomery.elastic.seam import Reduce
from bloomery.elastic.wire.ring import Ring, RingError


class WireRing:
    """Implements `exchange.Ring`; it closes the connections with itself."""

    def __init__(self, reduce: Reduce, section: ElasticSection) -> None:
        self._reduce = reduce
        (hop,) = reduce.hops
        self._descriptors = (*hop.next_fds, *hop.previous_fds)
        limit = section.bandwidth_limit_mbit_s * 1e6 / 8
        self._ring = Ring(
            index=reduce.index,
            size=len(reduce.attempt.members),
            next_fds=hop.next_fds,
            previous_fds=hop.previous_fds,
            send_keys=hop.send_keys,
            receive_keys=hop.receive_keys,
            codec=section.codec,
            rate_limit_bytes_s=limit or None,
            lane=hop.lane,
        )

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        """See `exchange.Ring`."""
        reduce, members = self._reduce, self._reduce.attempt.members
        try:
            self._ring.all_reduce(
                values.numpy(),
                round=reduce.attempt.round,
                epoch=reduce.attempt.epoch,
                stall_s=reduce.stall_s,
                deadline_s=reduce.deadline_s,
                weight=weight,
                residual=None if residual is None else residual.numpy(),
            )
        except RingError as error:
            aside = {"previous": -1, "next": 1, None: 0}[error.culprit]
            culprit = members[(reduce.index + aside) % len(members)] if aside else None
            raise RingFailed(error.message, kind=error.kind, culprit=culprit) from error

    def cancel(self) -> None:
        """See `exchange.Ring`."""
        self._ring.cancel()

    def close(self) -> None:
        """See `exchange.Ring`."""
        self._ring.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
