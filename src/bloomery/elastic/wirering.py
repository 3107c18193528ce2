"""The native ring as rounds use it: over the connections that the parent handed to this rank."""

from __future__ import annotations

import logging
import os

from torch import Tensor

from bloomery.config.elastic import ElasticSection
from bloomery.elastic.exchange import RingFailed
from bloomery.elastic.seam import Reduce
from bloomery.elastic.wire.pace import Pace
from bloomery.elastic.wire.ring import Ring, RingError

log = logging.getLogger(__name__)


class WireRings:
    """Implements `exchange.RingMaker`. What it learnt of the way to a neighbour outlasts a ring."""

    def __init__(self, section: ElasticSection) -> None:
        self._section = section
        self._paces: dict[str, Pace] = {}

    def __call__(self, reduce: Reduce) -> WireRing:
        """The ring of this attempt."""
        members = reduce.attempt.members
        following = members[(reduce.index + 1) % len(members)]
        limit = self._section.bandwidth_limit_mbit_s * 1e6 / 8
        pace = self._paces.setdefault(following, Pace(limit or None))
        return WireRing(reduce, codec=self._section.codec, pace=pace)


class WireRing:
    """Implements `exchange.Ring`; it closes the connections with itself."""

    def __init__(self, reduce: Reduce, *, codec: str, pace: Pace) -> None:
        self._reduce, self._pace = reduce, pace
        (hop,) = reduce.hops
        self._descriptors = (*hop.next_fds, *hop.previous_fds)
        self._ring = Ring(
            index=reduce.index,
            size=len(reduce.attempt.members),
            next_fds=hop.next_fds,
            previous_fds=hop.previous_fds,
            send_keys=hop.send_keys,
            receive_keys=hop.receive_keys,
            codec=codec,
            pace=pace,
            lane=hop.lane,
        )

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        """See `exchange.Ring`."""
        reduce, members = self._reduce, self._reduce.attempt.members
        try:
            result = self._ring.all_reduce(
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
        before, after = result.limit_bytes_s, self._pace.limit_bytes_s
        if after is not None and (before is None or after < before):
            log.info(
                "epoch %d: %.1f%% of what went to %s was lost; the next ring sends at most %.1f Mbit/s",
                reduce.attempt.epoch,
                100 * result.delivered.lost_bytes / result.delivered.delivered_bytes,
                members[(reduce.index + 1) % len(members)],
                after * 8e-6,
            )

    def cancel(self) -> None:
        """See `exchange.Ring`."""
        self._ring.cancel()

    def close(self) -> None:
        """See `exchange.Ring`."""
        self._ring.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
