"""Between a peer's parent and its ranks: what one may ask of the other, as plain data.

The parent (`bloomery peer`) holds the lease, knows the others and hands over connected descriptors; the ranks
compute and reduce. Every rank of a peer talks to the parent by itself, and hears the same decisions in the
same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bloomery.data.position import Position
from bloomery.data.ranges import Ranges
from bloomery.elastic.records import Attempt, Commit, Ready, Shares


@dataclass(frozen=True, kw_only=True)
class Go:
    """Take part in round `shares.round`: the state held is the right one. samples: this peer's own share.

    No samples: a newcomer that begins with the next round. It offers a part of no steps and no tokens at once
    (`spent` empty, its weight is 0), takes part in the ring, and so holds what the others hold after it.
    Told again within a round: with what was offered in `samples`, offer it again, for the coordinator has
    lost it; where nothing was offered but samples came, begin anew with these.
    """

    shares: Shares
    samples: Ranges


@dataclass(frozen=True, kw_only=True)
class Replace:
    """Load this checkpoint: the run's state after `round`, fetched and verified. Then say `holding` again.

    The digest tells which: once a run went back, an earlier round's checkpoint has a later one's state. The
    position is the commit's: a source that was within the next round had used some of that one's samples.
    """

    round: int
    digest: str
    position: Position
    directory: Path
    why: str


@dataclass(frozen=True, kw_only=True)
class Hurry:
    """The others wait: offer what there is after the step under way."""

    round: int


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Connections of one lane's ring: descriptors and, for each, its key. The rank closes them."""

    lane: int
    next_fds: tuple[int, ...]
    previous_fds: tuple[int, ...]
    send_keys: tuple[bytes, ...]
    receive_keys: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """Run the ring of an attempt, as member `index` of `attempt.members`."""

    attempt: Attempt
    index: int
    hops: tuple[Hop, ...]
    stall_s: float
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Cancel the ring of this epoch, wherever it is; another attempt follows."""

    epoch: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The round is decided. included: whether this peer's part is in it: its own result is the run's."""

    commit: Commit
    included: bool


@dataclass(frozen=True, kw_only=True)
class Halt:
    """End the training. failed: nobody asked for it."""

    why: str
    failed: bool


Told = Go | Replace | Hurry | Reduce | Abort | Committed | Halt


class Parent(Protocol):
    """The parent as a rank sees it. Calls return at once but `hear`; a parent that died raises PeerError."""

    def moving(self, phase: str, *, step: int) -> None:
        """Say what this rank does: start, compile, step, evaluate, ring, offer, save, wait."""
        ...

    def holding(self, *, round: int, digest: str, step: int, directory: Path | None, samples: int) -> None:
        """Say which state is held now. digest: of the peer's whole shared state, equal on all ranks.

        directory: a durable or in-memory checkpoint of exactly it, from which others may be served; None: not
        now. samples: of one inner step of this peer.
        """
        ...

    def ready(self, ready: Ready) -> None:
        """Offer this peer's part of a round. The part stays unchanged until the round is committed."""
        ...

    def done(self, *, epoch: int, digest: str) -> None:
        """The ring of this epoch completed; `digest` is of the state that would follow."""
        ...

    def failed(self, *, epoch: int, kind: str, culprit: str | None, why: str) -> None:
        """The ring of this epoch failed. culprit: the peer at the other end, where one is known."""
        ...

    def leave(self, why: str) -> None:
        """Go, by intention: the others need not wait for a lease to run out."""
        ...

    def hear(self, timeout_s: float) -> Told | None:
        """The next thing the parent says, in order; None when there was none in time."""
        ...

    def peek(self) -> Sequence[Told]:
        """What was said and not heard yet, without waiting. Called between steps."""
        ...
