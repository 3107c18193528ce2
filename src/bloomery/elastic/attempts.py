"""The tries of a round's all-reduce, one after the other, up to the state that would follow."""

from __future__ import annotations

from bloomery.checkpoint.ranks import Gather
from bloomery.elastic.contribution import Contribution
from bloomery.elastic.ear import Ear
from bloomery.elastic.exchange import Exchange, Reduced, RingFailed, RingMaker
from bloomery.elastic.parity import peer_digest
from bloomery.elastic.records import Commit
from bloomery.elastic.seam import Parent, Reduce


class Attempts:
    """Runs what the parent hands over, and says how it went. Collective over the peer, but for `call_off`."""

    def __init__(
        self,
        contribution: Contribution,
        *,
        parent: Parent,
        rings: RingMaker,
        gather: Gather,
        ear: Ear,
        salt: str,
    ) -> None:
        self._contribution, self._parent, self._rings = contribution, parent, rings
        self._gather, self._ear, self._salt = gather, ear, salt
        self._epoch = 0
        self._exchange: Exchange | None = None
        self._alone: Reduced | None = None
        self._prepared: tuple[int, str] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a try has begun and was not concluded."""
        return self._epoch > 0

    def begin(self, reduce: Reduce) -> None:
        """Begin a try; `go_on` or `finish` concludes it."""
        self._epoch, self._prepared = reduce.attempt.epoch, None
        values, residual = self._contribution.values()
        if len(reduce.attempt.members) == 1:
            self._alone = Reduced(values=values, residual=residual)
        else:
            self._exchange = Exchange(self._rings(reduce), reduce, values, residual)

    def go_on(self) -> None:
        """Between steps: conclude the try under way, if it is over on every rank."""
        over = self._exchange is None or self._exchange.is_over(0.0)
        if all(self._gather(over)):
            self.finish()

    def finish(self) -> None:
        """Wait for the try under way, unless it is called off, and conclude it."""
        epoch, exchange = self._epoch, self._exchange
        reduced, self._alone = self._alone, None
        if exchange is not None:
            if not self._ear.while_reducing(epoch, exchange.is_over):
                exchange.cancel()
            reduced = self._result(exchange)
        self._epoch, self._exchange = 0, None
        lanes = self._gather(None if reduced is None else self._contribution.prepare(reduced))
        if None in lanes:
            return
        self._prepared = epoch, peer_digest(lanes, salt=self._salt)
        self._parent.done(epoch=epoch, digest=self._prepared[1])

    def call_off(self, epoch: int) -> None:
        """End the try of this epoch, if it is under way: `finish` concludes it."""
        if self._epoch == epoch and self._exchange is not None:
            self._exchange.cancel()

    def drop(self) -> None:
        """End what is under way: the state it began from does not count any more."""
        if self._exchange is not None:
            self._exchange.cancel()
        self._epoch, self._exchange, self._alone, self._prepared = 0, None, None, None

    def fits(self, commit: Commit) -> bool:
        """Whether what was prepared is what the commit says."""
        return self._prepared == (commit.epoch, commit.digest)

    def _result(self, exchange: Exchange) -> Reduced | None:
        try:
            return exchange.result()
        except RingFailed as failed:
            if failed.kind != "cancelled":
                self._parent.failed(
                    epoch=exchange.epoch, kind=failed.kind, culprit=failed.culprit, why=failed.message
                )
            return None
