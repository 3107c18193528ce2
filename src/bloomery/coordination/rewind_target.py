"""Chooses the earlier state to which a run goes back: pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from bloomery.coordination.snapshot import ListedOffer, RunSnapshot
from bloomery.data.position import Ranges
from bloomery.protocol.records import Commit, Ready


def newest_held(snapshot: RunSnapshot) -> Commit | None:
    """Return the newest commit whose state a listed member holds, or None if there is none.

    Where the coordinator no longer has the commit of a held state, the recovery record of its holder has it.
    """
    held = {present.member.digest for present in snapshot.members.values()}
    commits = [commit for commit in known_commits(snapshot).values() if commit.digest in held]
    return max(commits, key=lambda commit: commit.round, default=None)


def known_commits(snapshot: RunSnapshot) -> dict[int, Commit]:
    """Return commits by round: the coordinator's and, for rounds that it lacks, those that members hold."""
    commits = dict(snapshot.commits)
    for name, record in sorted(snapshot.recovery_records.items()):
        if record.held is not None and name in snapshot.members:
            commits.setdefault(record.held.round, record.held)
    return commits


def requested_target(snapshot: RunSnapshot, requests: Iterable[Ready]) -> tuple[Commit, str]:
    """Return the commit to which guards want the run to go back, and why: the earliest round wins.

    requests: offers of this round, at least one of which asks for a rewind.
    """
    asking = [ready for ready in requests if ready.rewind_to is not None]
    earliest = min(ready.rewind_to for ready in asking if ready.rewind_to is not None)
    target = max((round for round in snapshot.commits if round <= earliest), default=min(snapshot.commits))
    reason = "; ".join(sorted({f"{ready.peer}: {ready.why}" for ready in asking}))
    return snapshot.commits[target], reason


def rewind_commit(snapshot: RunSnapshot, target: Commit, *, skips: Ranges, why: str, rung: int = 0) -> Commit:
    """Return a commit of the round under way that makes the state of `target` the run's state again.

    skips: ranges of samples that the run leaves out from now on.
    rung: the highest rung of the ladder of reactions that guards asked for; 0: none asked.
    """
    position = target.position
    for piece in skips:
        position = position.skipping(piece)
    origin = target
    while origin.rewind_to is not None and origin.rewind_to in snapshot.commits:
        origin = snapshot.commits[origin.rewind_to]
    return Commit(
        round=snapshot.round,
        epoch=snapshot.epoch,
        members=(),
        digest=target.digest,
        position=position,
        sources=tuple(snapshot.holders(target.digest)),
        left_out={},
        rewind_to=origin.round,
        save=False,
        why=why,
        rung=rung,
    )


def rewind_requests(
    snapshot: RunSnapshot, offers: Mapping[str, ListedOffer], fit: Mapping[str, Ready], bad: Mapping[str, str]
) -> list[Ready]:
    """Return the offers whose guards ask for a rewind: of the fit ones, or of all if no offer is fit.

    If no offer is fit and none asks, each is returned as a request to repeat this round without its samples.
    bad: why each unfit peer's offer cannot be averaged.
    """
    requests = [ready for ready in fit.values() if ready.rewind_to is not None]
    if fit or len(bad) < len(offers):
        return requests
    readies = [offer.ready for offer in offers.values()]
    return [ready for ready in readies if ready.rewind_to is not None] or [
        msgspec.structs.replace(ready, rewind_to=snapshot.round - 1, skip=ready.spent, why=bad[ready.peer])
        for ready in readies
    ]


def is_lost(snapshot: RunSnapshot, newest: Commit) -> bool:
    """Whether no member holds the newest commit's state, and none has made an offer in this round."""
    return not snapshot.readies and not snapshot.holders(newest.digest) and bool(snapshot.members)
