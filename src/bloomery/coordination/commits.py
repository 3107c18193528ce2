"""Validates a round's commit against the members' records, and chooses the commit to which a run rewinds.

Whichever peer is first concludes a round, so every member may write the key of a commit. No peer trusts a
commit for its own sake: each compares it with the attempt, with the members' offers, and with the state
digests that the members announced. All peers read these keys in the same order, so all refuse the same
commits, and then write another commit over a refused one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bloomery.coordination.eligibility import changed_offers, unusable_offers
from bloomery.coordination.snapshot import ListedOffer, RunSnapshot
from bloomery.data.position import Position, Ranges, merged, total, without
from bloomery.protocol.encoding import decode, encode
from bloomery.protocol.rank_messages import MAX_BYTES, Committed, StartRound, encode_local
from bloomery.protocol.records import Attempt, Commit, Ready, RoundShares

SKIPS_AT_MOST = 2_048
"""The most ranges that a position may skip. A request for more is ignored: the commit and the shares hold
the position, and a transaction that is too large for etcd would end every agent that tries it, like a message
that is too large for the ranks (`rank_messages.MAX_BYTES`)."""
SKIP_END_AT_MOST = 10**15
"""The largest sample number up to which a position may skip, which recipes do not count beyond. A request for
more is ignored: no message can hold the numbers of the samples that would come next."""
EPOCHS_AT_MOST = 2_000_000
"""The most attempts of one round. While attempts fail they begin every ten seconds: that is 231 days."""
_HOPS_BYTES = 32 << 10
"""What an attempt's connections and their keys may take in the message that begins it."""


def newest_held(snapshot: RunSnapshot) -> Commit | None:
    """Return the newest commit whose state a listed member holds, or None if there is none.

    Where the coordinator no longer has the commit of a held state, the recovery record of its holder has it.
    """
    digests = {present.member.digest for present in snapshot.members.values()}
    commits = [commit for commit in known_commits(snapshot).values() if commit.digest in digests]
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


def rewind_commit(
    snapshot: RunSnapshot, target: Commit, *, skips: Iterable[Ranges], why: str, rung: int = 0
) -> Commit:
    """Return a commit of the round under way that makes the state of `target` the run's state again.

    skips: ranges of samples that the run leaves out from now on, one request after the other.
    rung: the highest rung of the ladder of reactions that guards asked for; 0: none asked.
    """
    position = _skipping(target.position, *skips)
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


def objection(commit: Commit, before: RunSnapshot) -> str:
    """Return why a commit does not follow from the run as it was just before, or "" if it does follow."""
    if commit.round != before.round:
        return f"it is of round {commit.round}, and round {before.round} is under way"
    if commit.members:
        return _objection_to_average(commit, before)
    if commit.rewind_to is not None:
        return _objection_to_rewind(commit, before)
    if before.commits:
        return "it averages nothing and goes back nowhere"
    return "" if before.holders(commit.digest) else "nobody holds the state that it begins with"


def objection_of_listing(commit: Commit, listed: RunSnapshot) -> str:
    """Return why the newest commit of a listing is not valid, or "".

    A listing does not have all the keys that were there before the commit: the announcements of members that
    left went with their leases. So only the members that are still listed are checked. The commit of the
    round before is there, unless the run was restored from what its peers knew.
    """
    reported = {told.round for record in listed.recovery_records.values() for told in record.commits}
    has_gap = bool(listed.commits) and commit.round != listed.round
    if has_gap and commit.round not in reported and not listed.holders(commit.digest):
        return f"round {listed.round} is not committed, and nobody holds its state or knows of it"
    tried = listed.tried
    if tried is None or tried.attempt.epoch != commit.epoch:
        return ""
    listed_members = [
        name
        for name, life in zip(tried.attempt.members, tried.lives, strict=True)
        if name in listed.members and listed.members[name].life == life
    ]
    return _not_announced(commit, listed, listed_members)


def position_after(before: Position, readies: Iterable[Ready]) -> Position:
    """Return the run's position once these offers are averaged.

    before: the position of the round under way, in which the samples that were leased out are holes.
    """
    offers = list(readies)
    position = before.after(piece for ready in offers for piece in ready.spent)
    return _skipping(position, *(ready.skip for ready in offers if ready.skip))


def weights_of(tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each member's part from the tokens that it trained on, some of which count."""
    return tuple(count / sum(tokens) for count in tokens)


def require_room_at_ranks(record: Commit | RoundShares | Attempt) -> None:
    """Raise ValueError for a record that is too long for the message that tells a peer's ranks of it.

    Any member may write such a record, and it must not end the agents of the others.
    """
    match record:
        case Commit():
            encode_local(Committed(commit=record, included=True))
        case RoundShares(round=round, position=position, shares=shares, live=live):
            longest = max(shares.values(), key=len, default=())
            encode_local(StartRound(round=round, position=position, live=live, samples=longest, number=0))
        case Attempt():
            size = len(encode(record))
            if size > MAX_BYTES - _HOPS_BYTES:
                raise ValueError(f"an attempt of {size} bytes; {MAX_BYTES - _HOPS_BYTES} fit")


def require_epoch(epoch: int, commits: Mapping[int, Commit]) -> None:
    """Raise ValueError for an epoch to which no attempts can have led since the newest commit.

    Any member may write the epoch. One near the largest number would leave none for later attempts.
    """
    if commits and epoch > (newest := commits[max(commits)]).epoch + EPOCHS_AT_MOST:
        raise ValueError(
            f"epoch {epoch} is far above {newest.epoch}, in which round {newest.round} was committed"
        )


def require_same(in_record: object, in_key: object) -> None:
    """Raise ValueError unless a record agrees with the name of its key."""
    if in_record != in_key:
        raise ValueError(f"its content says {in_record!r}, its key {in_key!r}")


def shares_of(value: str, *, round: int) -> RoundShares:
    """Return the shares of a round that are stored as this text. Raises ProtocolError, or ValueError where
    they are not usable: they lease a sample to two peers, for instance, or one that is no hole.
    """
    shares = decode(value, RoundShares)
    require_same(shares.round, round)
    require_room_at_ranks(shares)
    leased = [piece for share in shares.shares.values() for piece in share]
    if shares.live > len(shares.shares):  # which decides how fast schedules go on
        raise ValueError(f"it counts {shares.live} peers, and {len(shares.shares)} have a share")
    if total(leased) != total(merged(leased)) or without(merged(leased), shares.position.holes):
        raise ValueError("it leases a sample to two peers, or one that is no hole of its position")
    if shares.position.cursor > SKIP_END_AT_MOST:
        raise ValueError(f"it leases samples beyond {SKIP_END_AT_MOST}")
    return shares


def only_adds(shares: RoundShares, before: RoundShares) -> bool:
    """Whether the shares are those of `before`, and perhaps more shares for joining peers."""
    return (shares.position.consumed, shares.position.skips) == (
        before.position.consumed,
        before.position.skips,
    ) and all(shares.shares.get(name) == part for name, part in before.shares.items())


def _skipping(position: Position, *requests: Ranges) -> Position:
    """Return the position after requests to skip are followed, as long as a record can hold its ranges, and
    messages those that come next.
    """
    for pieces in requests:
        after = position.skipping(*pieces)
        reaches_too_far = any(piece.stop > SKIP_END_AT_MOST for piece in pieces)
        if len(after.skips) <= max(SKIPS_AT_MOST, len(position.skips)) and not reaches_too_far:
            position = after
    return position


def is_minority(members: Iterable[str], snapshot: RunSnapshot, *, before: int | None = None) -> bool:
    """Whether these members are fewer than half of the peers that have a share and a usable offer.

    before: revision of an attempt, whose members cannot include later offers; None: count all offers.
    """
    shares = snapshot.shares.shares if snapshot.shares else {}
    readies = {
        name: offer.ready
        for name, offer in snapshot.readies.items()
        if name in shares and (before is None or offer.modified < before)
    }
    usable = set(readies) - set(unusable_offers(snapshot, readies))
    return 2 * len(usable & set(members)) < len(usable)


def _objection_to_average(commit: Commit, before: RunSnapshot) -> str:
    tried, standing = before.tried, before.standing
    if tried is None or tried.attempt.epoch != commit.epoch:
        return f"no attempt of epoch {commit.epoch} is under way"
    members = tried.attempt.members
    if set(commit.members) != set(members):
        return "its members are not those of the attempt"
    missing = _not_announced(commit, before, members)
    if missing:
        return missing
    if standing is None or any(name not in before.readies for name in members):
        return "it names members that brought nothing"
    readies = {name: before.readies[name].ready for name in members}
    for name, why in {**changed_offers(before, tried), **unusable_offers(before, readies)}.items():
        return f"'{name}': {why}"
    tokens = [readies[name].weight_tokens for name in members]
    if not sum(tokens) or tried.attempt.weights != weights_of(tokens):
        return "its weights are not those of its members' tokens"
    if is_minority(members, before, before=before.tried_revision):
        return "its members are fewer than half of those that could take part"
    if commit.position != position_after(standing.shares.position, readies.values()):
        return "its position does not follow from what its members spent"
    return ""


def _objection_to_rewind(commit: Commit, before: RunSnapshot) -> str:
    commits = known_commits(before)
    origin = commits.get(commit.rewind_to) if commit.rewind_to is not None else None
    if origin is not None and origin.digest != commit.digest:
        return f"the state of round {commit.rewind_to} is another"
    if commit.digest not in {earlier.digest for earlier in commits.values()}:
        return "it goes back to a state that the run never committed"
    if commit.position.consumed > max(earlier.position.consumed for earlier in commits.values()):
        return "it goes back, and counts more samples than before"
    if commit.rung > max((offer.ready.rung for offer in before.readies.values()), default=0):
        return f"nobody asked for its rung {commit.rung}"
    return ""


def _not_announced(commit: Commit, before: RunSnapshot, members: Iterable[str]) -> str:
    for name in members:
        done = before.dones.get(name)
        if done is None or done.digest != commit.digest:
            return f"'{name}' has not announced the state {commit.digest[:12]!r}"
    return ""
