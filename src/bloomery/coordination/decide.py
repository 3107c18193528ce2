"""Decides what a peer does next about the round under way: a pure function of a snapshot and a clock.

Every peer decides from (nearly) the same snapshot. A peer that decides to propose an attempt, or to
commit a round, does so by one transaction whose conditions are what the snapshot shows: of several such
transactions one succeeds. Peers later in the order of names wait a little longer, which makes races rare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bloomery.coordination import commits
from bloomery.coordination.attempts import carried_shares, gather_offers, ring_order
from bloomery.coordination.eligibility import (
    RoundSettings,
    answer_s,
    brings_first_part,
    broken_links,
    changed_offers,
    compare_results,
    ineligible,
    lease_samples,
    left_out_before,
    may_take_share,
    rest_s,
    suspects,
    unusable_offers,
)
from bloomery.coordination.snapshot import ListedMember, ListedOffer, RunSnapshot
from bloomery.data.position import Position, merged, within
from bloomery.protocol.records import Attempt, Commit, ProposedAttempt, Ready, RoundShares

DONE = "the samples are done"
SILENT = "it did not answer when an attempt failed"
CUT_OFF = "its links to the others fail"
FORGOTTEN = (
    "the coordinator has lost what it knew, for peers know of later rounds. A peer that was started with the "
    "run directory of an earlier run of this name says so too: end that one. If it is true and the data does "
    "not come back, `bloomery coordinate --adopt RUN` goes on from what these peers know"
)
NOBODY_HAS_IT = (
    "nobody has any state that this run ever committed. Start a peer that has one in its run directory, or "
    "begin a new run, under another name, from an exported model"
)
NEEDS_SOMEBODY = (FORGOTTEN, NOBODY_HAS_IT)
"""Reasons to wait that only an operator can end."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Do nothing until the snapshot changes or the clock reaches `until_s`.

    why, whom: the reason and the peers that are waited for, for logs.
    until_s: of the local monotonic clock, seconds; None: only a change ends the wait.
    """

    why: str
    whom: tuple[str, ...] = ()
    until_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Propose:
    """Propose this attempt; its epoch is the snapshot's plus one.

    offers: revision of each member's offer, a condition of the transaction.
    unseen: peers with a share that have offered nothing yet; that they still have not is a condition, too.
    """

    tried: ProposedAttempt
    offers: Mapping[str, int]
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CommitRound:
    """Commit the round, and give out the shares of the next one.

    lives: create_revision of the key of each peer that must still be listed.
    offers: revision of each averaged offer, which must be unchanged.
    """

    commit: Commit
    shares: RoundShares
    lives: Mapping[str, int] = field(default_factory=dict)
    offers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RequestFlush:
    """The others wait for this peer: it must offer the steps that it has made so far."""

    round: int


@dataclass(frozen=True, kw_only=True)
class TakeShare:
    """Take a share of the round with `transactions.join_shares`: this peer holds the state and has none.

    away: the peers whose shares are not going to be used.
    """

    round: int
    away: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The run is over: its samples have been used."""

    commit: Commit


Decision = Wait | Propose | CommitRound | RequestFlush | TakeShare | Ended


def decide(
    snapshot: RunSnapshot, *, me: str, settings: RoundSettings, now: float, start: Position | None = None
) -> Decision:
    """Return what this peer does next.

    me: the name of this peer. now: the local monotonic clock, seconds.
    start: where a run without a commit begins, as this peer's state has it; None: at sample 0.
    """
    if snapshot.forgotten:
        return Wait(why=FORGOTTEN, whom=snapshot.peers_ahead)
    commit = snapshot.commit
    if commit is None:
        return _begin(snapshot, me=me, settings=settings, now=now, start=start or Position())
    if commit.position.consumed >= settings.total_samples:
        return Ended(commit=commit)
    if me not in snapshot.members:
        return Wait(why="this peer is not listed", whom=(me,))
    # Offers go with their members, and an attempt cannot be concluded without: then it is as if it were not.
    if snapshot.tried is not None and _offers(snapshot):
        return _follow(snapshot, snapshot.tried, me=me, settings=settings, now=now)
    if commits.is_lost(snapshot, commit):
        return _go_back(snapshot, me=me, settings=settings, now=now)
    if may_take_share(snapshot, commit, me=me, settings=settings):
        return TakeShare(round=snapshot.round, away=frozenset(snapshot.away))
    return _gather(snapshot, me=me, settings=settings, now=now)


def _begin(
    snapshot: RunSnapshot, *, me: str, settings: RoundSettings, now: float, start: Position
) -> Decision:
    """Round 0: commit the state with which the run begins, that of the first member by name."""
    listed = {name: present for name, present in sorted(snapshot.members.items()) if present.member.digest}
    if len(listed) < settings.minimum_peers:
        return Wait(why=f"{len(listed)} of at least {settings.minimum_peers} peers are here")
    seen_s = sorted(present.seen_s for present in listed.values())
    until = seen_s[max(0, settings.minimum_peers - 1)] + settings.grace_s
    if len(listed) < settings.peers and now < until:
        return Wait(why=f"{len(listed)} of {settings.peers} planned peers are here", until_s=until)
    digest = next(iter(listed.values())).member.digest
    having = snapshot.holders(digest)
    if me not in having:
        return Wait(why="the run begins with another peer's state", whom=tuple(having))
    commit = Commit(
        round=0,
        epoch=snapshot.epoch,
        members=(),
        digest=digest,
        position=start,
        sources=tuple(having),
        left_out={},
        rewind_to=None,
        save=False,
        why="the beginning",
    )
    return _until_turn(snapshot, having, me, settings, now) or _concluded(snapshot, commit, having, settings)


def _gather(snapshot: RunSnapshot, *, me: str, settings: RoundSettings, now: float) -> Decision:
    """No attempt is under way: wait for the offers of those that have a share, then propose an attempt."""
    offers = _offers(snapshot)
    gathering = gather_offers(snapshot, offers, me=me, settings=settings, now=now)
    if gathering.hurries:
        return RequestFlush(round=snapshot.round)
    if gathering.why:
        return Wait(why=gathering.why, whom=gathering.whom, until_s=gathering.until_s)
    return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=())


def _follow(
    snapshot: RunSnapshot, tried: ProposedAttempt, *, me: str, settings: RoundSettings, now: float
) -> Decision:
    """An attempt is under way: commit its result, or propose another attempt if it cannot succeed."""
    attempt = tried.attempt
    gone = tuple(
        peer
        for peer, life in zip(attempt.members, tried.lives, strict=True)
        if peer not in snapshot.members or snapshot.members[peer].life != life
    )
    failed = {failure.peer for failure in snapshot.failures if failure.epoch == attempt.epoch}
    offers = _offers(snapshot)
    changed = changed_offers(snapshot, tried)
    # A member without a share that took one after the attempt had begun offers a second time: the attempt
    # cannot be concluded any more, and the member is in the next one.
    blamed = {peer: why for peer, why in changed.items() if not brings_first_part(snapshot, attempt, peer)}
    if blamed:
        return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=(), wrong=blamed)
    if gone or failed:
        silent = tuple(
            peer
            for peer in attempt.members
            if peer not in gone and peer not in failed and peer not in snapshot.dones
        )
        answers_until = snapshot.failed_s + answer_s(snapshot, attempt, settings)
        if not gone and silent and now < answers_until:
            return Wait(why="an attempt failed: who has let go of it?", whom=silent, until_s=answers_until)
        rest_until = snapshot.failed_s + rest_s(snapshot)
        if now < rest_until:
            return Wait(why="attempts fail again and again", until_s=rest_until)
        silent = silent if not gone else ()  # whoever waited for the one that is gone is not to blame
        return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=silent)
    missing = tuple(peer for peer in attempt.members if peer not in snapshot.dones)
    if missing and changed:
        return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=())
    if missing:
        return Wait(why=f"epoch {attempt.epoch} of round {attempt.round} is being reduced", whom=missing)
    digest, wrong = compare_results({peer: snapshot.dones[peer].digest for peer in attempt.members})
    wrong |= unusable_offers(snapshot, {peer: snapshot.readies[peer].ready for peer in attempt.members})
    if wrong or changed:
        return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=(), wrong=wrong)
    return _conclude(snapshot, digest=digest, me=me, settings=settings, now=now)


def _propose(
    snapshot: RunSnapshot,
    offers: Mapping[str, ListedOffer],
    *,
    me: str,
    settings: RoundSettings,
    now: float,
    silent: tuple[str, ...],
    wrong: Mapping[str, str] | None = None,
) -> Decision:
    bad = ineligible(snapshot, {name: offer.ready for name, offer in offers.items()}, settings)
    left_out = {**bad, **left_out_before(snapshot, offers), **dict.fromkeys(silent, SILENT), **(wrong or {})}
    left_out = suspects(snapshot, [name for name in offers if name not in left_out]) | left_out
    fit = {name: offer.ready for name, offer in offers.items() if name not in left_out}
    requests = commits.rewind_requests(snapshot, offers, fit, bad)
    if requests:
        requests += [ready for ready in fit.values() if ready.skip and ready not in requests]
        return _rewind(snapshot, requests, me=me, settings=settings, now=now)
    turn = _until_turn(snapshot, fit, me, settings, now)
    if turn is not None:  # only one of the members searches for the ring's order, which is costly for 500
        return turn
    order, dropped = ring_order(tuple(fit), rates=snapshot.rates, broken=broken_links(snapshot))
    left_out |= dict.fromkeys(dropped, CUT_OFF)
    if commits.is_minority(order, snapshot):
        # Nobody accepts a commit of so few members. Those that only earlier attempts left out, or whose links
        # or result failed once, may succeed in another attempt; one that is silent may still answer this one.
        left_out = {**bad, **dict.fromkeys(silent, SILENT)}
        fit = {name: offer.ready for name, offer in offers.items() if name not in left_out}
        order, _ = ring_order(tuple(fit), rates=snapshot.rates)
    elif len(_reachable(offers, left_out)) < settings.minimum_peers:
        # The round needs those whose links failed, and a link that was away may be back.
        left_out = {name: why for name, why in left_out.items() if why not in (SILENT, CUT_OFF)}
        left_out |= dict.fromkeys(silent, SILENT)
        fit = {name: offer.ready for name, offer in offers.items() if name not in left_out}
        order, _ = ring_order(tuple(fit), rates=snapshot.rates)
    tokens = {name: fit[name].weight_tokens for name in order}
    shares = snapshot.shares.shares if snapshot.shares else {}
    if me in fit and me not in shares and not sum(tokens.values()):
        # nobody with a share can take part
        return TakeShare(round=snapshot.round, away=frozenset(set(shares) - set(fit)))
    too_few = len(_reachable(offers, left_out)) < settings.minimum_peers or not sum(tokens.values())
    if too_few or commits.is_minority(order, snapshot):
        why = f"{len(order)} of {len(offers)} peers can take part, {settings.minimum_peers} are wanted"
        return Wait(why=why, whom=tuple(left_out), until_s=now + settings.grace_s)
    attempt = Attempt(
        round=snapshot.round,
        epoch=snapshot.epoch + 1,
        members=order,
        weights=commits.weights_of([tokens[name] for name in order]),
        left_out=left_out,
    )
    return Propose(
        tried=ProposedAttempt(
            attempt=attempt,
            lives=snapshot.lives(order),
            offers=tuple(offers[name].modified for name in order),
        ),
        offers={name: offers[name].modified for name in order},
        unseen=tuple(sorted(set(shares) - set(snapshot.readies))),
    )


def _reachable(offers: Iterable[str], left_out: Mapping[str, str]) -> list[str]:
    return [name for name in offers if left_out.get(name) not in (SILENT, CUT_OFF)]


def _conclude(
    snapshot: RunSnapshot, *, digest: str, me: str, settings: RoundSettings, now: float
) -> Decision:
    tried, standing = snapshot.tried, snapshot.standing
    assert tried is not None, "_follow was called with it"
    attempt = tried.attempt
    turn = _until_turn(snapshot, dict.fromkeys(attempt.members), me, settings, now)
    if turn is not None:  # only one of the members puts the commit together, and hundreds read it
        return turn
    readies = [snapshot.readies[peer].ready for peer in attempt.members]
    if standing is None:
        return Wait(why="what was given out in this round is not known yet")
    if commits.weights_of([ready.weight_tokens for ready in readies]) != attempt.weights:
        offers = {name: snapshot.readies[name] for name in attempt.members}
        return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=())
    position = commits.position_after(standing.shares.position, readies)
    kept = {ready.peer: within(merged(ready.kept), position.holes) for ready in readies}
    kept |= carried_shares(snapshot, attempt, position.holes, settings)
    commit = Commit(
        round=attempt.round,
        epoch=attempt.epoch,
        members=tuple(sorted(attempt.members)),
        digest=digest,
        position=position,
        sources=tuple(sorted(attempt.members)),
        left_out=attempt.left_out,
        rewind_to=None,
        save=any(ready.wants_save for ready in readies),
        why=DONE if position.consumed >= settings.total_samples else "",
    )
    going_on = {peer: snapshot.members[peer] for peer in sorted(kept)}
    shares = lease_samples(position, going_on, commit.round + 1, settings, kept=kept)
    revisions = dict(zip(attempt.members, tried.offers, strict=True))
    return CommitRound(commit=commit, shares=shares, offers=revisions)


def _rewind(
    snapshot: RunSnapshot, requests: list[Ready], *, me: str, settings: RoundSettings, now: float
) -> Decision:
    """Commit that the run goes back, as guards asked. Samples skipped since then stay skipped."""
    newest = snapshot.commits[max(snapshot.commits)]
    target, reason = commits.requested_target(snapshot, requests)
    skips = (newest.position.skips, *(ready.skip for ready in requests))
    working = {name: snapshot.members[name] for name in sorted(snapshot.working)}
    rung = max(ready.rung for ready in requests)
    commit = commits.rewind_commit(snapshot, target, skips=skips, why=reason, rung=rung)
    turn = _until_turn(snapshot, working, me, settings, now)
    return turn or _concluded(snapshot, commit, working, settings)


def _go_back(snapshot: RunSnapshot, *, me: str, settings: RoundSettings, now: float) -> Decision:
    """After an outage of all peers: wait for one with the newest state, else go back to an older one."""
    listed = snapshot.members
    newest = snapshot.commits[max(snapshot.commits)]
    busy = [
        name
        for name, present in sorted(listed.items())
        if not present.member.digest or present.modified <= snapshot.commit_revision
    ]
    if busy:
        return Wait(why="they have not said which state they hold since the last commit", whom=tuple(busy))
    if len(listed) < settings.minimum_peers:
        return Wait(why=f"{len(listed)} of at least {settings.minimum_peers} peers are here")
    until = max(snapshot.committed_s, *(present.said_s for present in listed.values())) + settings.grace_s
    if now < until:
        return Wait(why=f"nobody has the state of the newest commit ({newest.digest[:12]})", until_s=until)
    target = commits.newest_held(snapshot)
    if target is None:
        return Wait(why=NOBODY_HAS_IT, whom=tuple(listed))
    why = "nobody has the newest state any more"
    commit = commits.rewind_commit(snapshot, target, skips=(newest.position.skips,), why=why)
    holders = snapshot.holders(commit.digest)
    turn = _until_turn(snapshot, holders, me, settings, now)
    return turn or _concluded(snapshot, commit, holders, settings)


def _concluded(
    snapshot: RunSnapshot, commit: Commit, members: Mapping[str, ListedMember], settings: RoundSettings
) -> CommitRound:
    shares = lease_samples(commit.position, members, commit.round + 1, settings)
    lives = {name: present.life for name, present in members.items()}
    return CommitRound(commit=commit, shares=shares, lives=lives)


def _until_turn(
    snapshot: RunSnapshot, candidates: Mapping[str, object], me: str, settings: RoundSettings, now: float
) -> Wait | None:
    """Return a wait while it is not this peer's turn: peers earlier in the order of names act first."""
    before = sum(name < me for name in candidates)
    turn_s = snapshot.changed_s + before * settings.stagger_s
    if before == 0 or now >= turn_s:
        return None
    return Wait(why="another peer proposes", whom=tuple(sorted(candidates))[:before], until_s=turn_s)


def _offers(snapshot: RunSnapshot) -> dict[str, ListedOffer]:
    """Return the offers of members that are listed, in the order of names."""
    return {name: offer for name, offer in sorted(snapshot.readies.items()) if name in snapshot.members}
