"""Runs the all_reduce of a round between peers: one attempt after the other, each on a thread of its own.

The native ring (`transport.ring_all_reduce`) runs over the connections that the agent passed to this rank.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bloomery.checkpoint.writer.ranks import Gather
from bloomery.config.elastic import SPARSE, ElasticSection
from bloomery.coordination.eligibility import NORM_FAILURE
from bloomery.diloco.agent_client import AgentClient, CommandInbox
from bloomery.diloco.background import BackgroundCall
from bloomery.diloco.outer_update import OuterUpdate, Reduced, peer_digest
from bloomery.diloco.stored_average import StoredAverage
from bloomery.errors import BloomeryError, PeerError
from bloomery.plan.peer_round import codec_of_partial_sums
from bloomery.protocol.rank_messages import Committed, KeepAverage, Reduce
from bloomery.protocol.records import Commit
from bloomery.transport.connection import HopRateLimit
from bloomery.transport.gradient_codec import Float32
from bloomery.transport.ring_all_reduce import WORDS, ReduceResult, Ring, RingError, Words
from bloomery.transport.sparse_codec import NotSendable, WrongCode, average_sparse

log = logging.getLogger(__name__)

_SLOWER = 3.0
"""Other members may be later by so many times what this one took for a piece: for one of a sparse part, with
60 members, that is half a minute, and a slower machine takes longer."""
_CANCEL_S = 60.0
"""The seconds within which a cancelled ring must no longer use its buffers."""


class RingConnections(Protocol):
    """The connections of one attempt, over which the ring can reduce.

    codec: in which complete sums are sent, so that they are kept in its bytes.
    """

    codec: str

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        """Replace `values` by the sum of weight × values over the members, bit-identical on all of them.

        It is called once for each piece of the part, in the same order on all members. Raises RingFailed.

        weight: this member's weight.
        residual: zeros, to which what this member's quantisation lost of the sum is added. With weight 0 it
            stays as it is. None: that error is lost.
        """
        ...

    def cancel(self) -> None:
        """Make `all_reduce` fail soon. Any thread may call it."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


RingMaker = Callable[[Reduce], RingConnections]


class RingFailed(BloomeryError):
    """An all_reduce did not complete. culprit: the peer at the other end; None if it is not known."""

    def __init__(self, message: str, *, kind: str, culprit: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.culprit = kind, culprit


class Attempts:
    """Runs the attempts of a round's all_reduce, and reports the result of each to the agent.

    All methods but `cancel`, `drop` and `fits` are collective over the peer.

    Args:
        update: provides the values to reduce, and computes the next state from the result.
        agent: the connection over which each result or failure is sent.
        rings: makes a ring of the connections of an attempt.
        gather: all_gather_object over the ranks of this peer.
        inbox: the agent's commands, read during an all_reduce so that an abort ends it.
        salt: part of the digest of the state; see `peer_digest`.
    """

    def __init__(
        self,
        update: OuterUpdate,
        *,
        agent: AgentClient,
        rings: RingMaker,
        gather: Gather,
        inbox: CommandInbox,
        salt: str,
    ) -> None:
        self._update, self._agent, self._rings = update, agent, rings
        self._gather, self._inbox, self._salt = gather, inbox, salt
        self._running: _Attempt | None = None
        self._prepared: tuple[int, str] | None = None
        """(epoch, digest) of the state that follows from the last complete attempt; None if there is none."""

    @property
    def is_under_way(self) -> bool:
        """Return whether an attempt has begun and is not concluded."""
        return self._running is not None

    def begin(self, reduce: Reduce) -> None:
        """Begin an attempt; `conclude_if_over` or `conclude` ends it."""
        self._prepared = None
        ring = self._rings(reduce) if len(reduce.attempt.members) > 1 else None
        self._running = _Attempt(ring, reduce, self._update)

    def conclude_if_over(self) -> None:
        """Between two steps: conclude the attempt under way, if it is over on every rank."""
        if all(self._gather(self._running is None or self._running.is_over(0.0))):
            self.conclude()

    def conclude(self) -> None:
        """Wait for the attempt under way, unless the agent aborts it, and tell the agent the result."""
        running = self._running
        assert running is not None, "no attempt is under way"
        if not self._inbox.while_reducing(running.epoch, running.is_over):
            running.cancel()
        result = self._result(running)
        self._running = None
        if not self._is_plausible(running, result):
            return
        rank_digests = self._gather(None if result is None else result.digest)
        if None in rank_digests:
            return
        self._prepared = running.epoch, peer_digest(rank_digests, salt=self._salt)
        self._agent.report_ring_done(epoch=running.epoch, digest=self._prepared[1])

    def cancel(self, epoch: int) -> None:
        """Cancel the all-reduce of this epoch, if it runs; `conclude` ends the attempt."""
        if self._running is not None and self._running.epoch == epoch:
            self._running.cancel()

    def drop(self) -> None:
        """Cancel the attempt under way and forget all results, because this peer's state is replaced."""
        if self._running is not None:
            self._running.cancel()
        self._running, self._prepared = None, None

    def fits(self, commit: Commit | KeepAverage) -> bool:
        """Return whether the last prepared state has the epoch and the digest of the commit."""
        return self._prepared == (commit.epoch, commit.digest)

    def adopts(self, command: Committed) -> bool:
        """Return whether the commit includes this peer's part, so that its prepared state is the run's.

        Raises PeerError if the commit includes the part, and the result was dropped since.
        """
        if command.included and not self.fits(command.commit):
            raise PeerError(
                f"round {command.commit.round} was committed with this peer's part, and its ranks have "
                "dropped the result: training from the state before would not be the run's",
                remedy="The same command starts the peer again. Please report it with the agent's log.",
            )
        return command.included

    def _is_plausible(self, running: _Attempt, result: _Result | None) -> bool:
        """Return whether the average is as small as the members' norms say; if not, tell the agent.

        Collective over the peer. It returns True where a rank has no average: that failure is reported
        already.
        """
        limit = running.norm_limit
        if limit is None:  # on all ranks alike
            return True
        # As text, because JSON has no infinities.
        squares = self._gather(None if result is None else repr(result.squares))
        if None in squares:
            return True
        norm = math.sqrt(sum(float(rank_squares) for rank_squares in squares))
        if norm <= limit:
            return True
        why = f"the average's norm is {norm:.3g}, and what the members say of theirs allows {limit:.3g}"
        self._agent.report_ring_failed(epoch=running.epoch, kind=NORM_FAILURE, culprit=None, why=why)
        return False

    def _result(self, attempt: _Attempt) -> _Result | None:
        """Return the result of an attempt that is over; if it failed, tell the agent why and return None."""
        try:
            return attempt.result()
        except RingFailed as failed:
            if failed.kind != "cancelled":
                self._agent.report_ring_failed(
                    epoch=attempt.epoch, kind=failed.kind, culprit=failed.culprit, why=failed.message
                )
            return None


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What one rank's attempt led to.

    squares: the sum of the squares of the average's elements. digest: of the rank's state after it.
    """

    squares: float
    digest: str


class _Attempt:
    """An all_reduce, and the preparation of the state after it, on a thread.

    Nothing may write what the part is made of, nor the outer state, until it is over.

    ring: None where this peer is the only member.
    """

    def __init__(self, ring: RingConnections | None, reduce: Reduce, update: OuterUpdate) -> None:
        self.epoch, self.norm_limit = reduce.attempt.epoch, reduce.norm_limit
        self._ring, self._update = ring, update
        self._members = len(reduce.attempt.members)
        self._weight = reduce.attempt.weights[reduce.index]
        self._is_cancelled = False
        self._call = BackgroundCall(self._run, name=f"ring {self.epoch}")
        self.is_over, self.result = self._call.is_over, self._call.result

    def cancel(self) -> None:
        """Cancel the ring or the preparation, and wait until its buffers are free.

        Raises RingFailed if that takes too long.
        """
        self._is_cancelled = True
        if self._ring is not None:
            self._ring.cancel()
        if not self.is_over(_CANCEL_S):
            raise RingFailed("The ring was cancelled and has not ended.", kind="stuck")

    def _run(self) -> _Result:
        try:
            reduced = self._reduced()
        finally:
            if self._ring is not None:
                self._ring.close()
        digest = self._update.prepare(reduced, check=self._refuse_cancelled)
        return _Result(squares=reduced.average.squares, digest=digest)

    def _reduced(self) -> Reduced:
        """Reduce the part piece by piece; without a ring the average is the part."""
        ring = self._ring
        average = StoredAverage("fp32" if ring is None else ring.codec, members=self._members)
        residuals = []
        for piece in self._update.pieces():
            self._refuse_cancelled()
            values, residual = self._update.values(self._weight, piece)
            if ring is not None:
                ring.all_reduce(values, weight=self._weight, residual=residual)
            average.append(values.numpy())
            residuals.append(residual)
        kept_residuals = [residual for residual in residuals if residual is not None]
        return Reduced(average=average, residual=torch.cat(kept_residuals) if kept_residuals else None)

    def _refuse_cancelled(self) -> None:
        if self._is_cancelled:
            raise RingFailed("The ring was cancelled.", kind="cancelled")


class WireRings:
    """Makes native rings; it is a RingMaker. It keeps the rate limit that was learnt for each neighbour.

    section: the recipe's [elastic].
    ranks: how many ranks the peer has; each may send its share of elastic.bandwidth_limit_mbit_s.
    """

    def __init__(self, section: ElasticSection, *, ranks: int = 1) -> None:
        self._section, self._ranks = section, ranks
        self._rate_limits: dict[str, HopRateLimit] = {}
        """The rate limit of each neighbour to which this peer has sent, by name."""

    def __call__(self, reduce: Reduce) -> WireRing:
        """Return the ring of this attempt."""
        members = reduce.attempt.members
        following = members[(reduce.index + 1) % len(members)]
        limit_bytes_s = self._section.bandwidth_limit_mbit_s * 1e6 / 8 / self._ranks
        rate_limit = self._rate_limits.setdefault(following, HopRateLimit(limit_bytes_s or None))
        return WireRing(reduce, self._section, rate_limit=rate_limit)


class WireRing:
    """The native ring of one attempt. It implements RingConnections and owns the connections."""

    def __init__(self, reduce: Reduce, section: ElasticSection, *, rate_limit: HopRateLimit) -> None:
        self._reduce, self._rate_limit, self._density = reduce, rate_limit, section.density
        self.codec = codec = section.codec
        self._until_s: float | None = None
        self._is_cancelled = False
        self._since_s = time.monotonic()
        """When this rank began to make the next piece of its part."""
        (hop,) = reduce.hops
        self._descriptors = (*hop.next_fds, *hop.previous_fds)
        members = len(reduce.attempt.members)
        self._ring = Ring(
            index=reduce.index,
            size=members,
            next_fds=hop.next_fds,
            previous_fds=hop.previous_fds,
            send_keys=hop.send_keys,
            receive_keys=hop.receive_keys,
            codec=WORDS if codec == SPARSE else codec,
            reduce_codec=None if codec == SPARSE else codec_of_partial_sums(codec, members),
            pace=rate_limit,
            rank=hop.rank,
        )

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        """See RingConnections."""
        errors = None if residual is None else residual.numpy()
        if self.codec == SPARSE:
            self._average_sparse(values.numpy(), errors)
            return
        self._exchange(self._ring.all_reduce, values.numpy(), weight=weight, residual=errors)
        if residual is not None and weight:
            residual.mul_(weight)  # the ring divided it by the weight

    def _average_sparse(self, values: Float32, residual: Float32 | None) -> None:
        attempt = self._reduce.attempt
        try:
            average_sparse(
                values,
                gather=lambda codes: self._exchange(self._ring.all_gather, codes),
                weights=attempt.weights,
                index=self._reduce.index,
                density=self._density,
                residual=residual,
                check=self._check_cancelled,
            )
        except NotSendable as error:
            raise RingFailed(str(error), kind="not finite") from error
        except WrongCode as error:
            culprit = attempt.members[error.index]
            raise RingFailed(f"{culprit} sent no code: {error}", kind="garbage", culprit=culprit) from error

    def _exchange(
        self, call: Callable[..., ReduceResult], array: Float32 | Words, **more: float | Float32 | None
    ) -> None:
        """Call the ring within the attempt's deadline, and note what it says of the link."""
        reduce, members = self._reduce, self._reduce.attempt.members
        now_s = time.monotonic()
        self._until_s = self._until_s or now_s + reduce.deadline_s
        try:
            result = call(
                array,
                round=reduce.attempt.round,
                epoch=reduce.attempt.epoch,
                stall_s=reduce.stall_s,
                deadline_s=max(0.001, self._until_s - now_s),
                grace_s=_SLOWER * (now_s - self._since_s),
                **more,
            )
            self._since_s = time.monotonic()
        except RingError as error:
            offset = {"previous": -1, "next": 1, None: 0}[error.culprit]
            culprit = members[(reduce.index + offset) % len(members)] if offset else None
            raise RingFailed(error.message, kind=error.kind, culprit=culprit) from error
        before, after = result.limit_bytes_s, self._rate_limit.limit_bytes_s
        if after is not None and (before is None or after < before):
            log.info(
                "epoch %d: %.1f%% of what went to %s was lost; the next ring sends at most %.1f Mbit/s",
                reduce.attempt.epoch,
                100 * result.delivered.lost_bytes / result.delivered.delivered_bytes,
                members[(reduce.index + 1) % len(members)],
                after * 8e-6,
            )

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise RingFailed("The ring was cancelled.", kind="cancelled")

    def cancel(self) -> None:
        """See RingConnections."""
        self._is_cancelled = True
        self._ring.cancel()

    def close(self) -> None:
        """See RingConnections."""
        self._ring.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
