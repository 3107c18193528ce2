"""Decides which rounds a peer that was not in them can make up for by their averages."""

from __future__ import annotations

from bloomery.coordination.snapshot import RunSnapshot
from bloomery.protocol.records import Commit


def missed_rounds(
    snapshot: RunSnapshot, *, me: str, round: int, digest: str, overtaken: int, at_most: int
) -> tuple[Commit, ...]:
    """Return the commits after a round up to the newest, whose averages lead from its state to the run's.

    () if that is not possible, or if there is none. The members of a round keep its average for a peer that
    was listed then and was not in it, so only rounds that were committed since this peer came count.

    me: the name of this peer.
    round, digest: the state that it holds, or is fetching.
    overtaken: how many rounds were committed without this peer since it came, or was last in one.
    at_most: how many averages a peer keeps.
    """
    base = snapshot.commits.get(round)
    count = snapshot.round - 1 - round
    if base is None or base.digest != digest or not 0 < count <= min(overtaken, at_most):
        return ()
    commits = [snapshot.commits.get(round + number) for number in range(1, count + 1)]
    missed = [commit for commit in commits if commit is not None and _has_average(commit, me)]
    return tuple(missed) if len(missed) == count else ()


def _has_average(commit: Commit, me: str) -> bool:
    return commit.rewind_to is None and bool(commit.members) and me not in commit.members
