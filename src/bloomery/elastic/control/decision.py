"""What a peer should do about the round now: a pure function of a snapshot and a clock.

Every peer asks the same question of (nearly) the same snapshot. Whoever finds that something is to be
proposed does so by one transaction whose conditions are what was seen here: of several at once one succeeds.
Peers further down the order of names hold back a little, which makes such races rare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bloomery.data.position import Position
from bloomery.data.ranges import Ranges, merged, within
from bloomery.elastic.control.allotment import give_out
from bloomery.elastic.control.codec import Tried
from bloomery.elastic.control.fitness import broken_links, left_out_before, rest_s, unfit
from bloomery.elastic.control.ringorder import ring
from bloomery.elastic.control.settings import RoundSettings
from bloomery.elastic.control.snapshot import Offered, Present, Snapshot
from bloomery.elastic.records import Attempt, Commit, Ready, Shares

DONE = "the samples are done"
SILENT = "it did not answer when an attempt failed"
CUT_OFF = "its links to the others fail"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do before the snapshot changes, or `until_s` comes. whom, why: for people."""

    why: str
    whom: tuple[str, ...] = ()
    until_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Propose:
    """Begin this attempt, whose epoch is the snapshot's and one. offers: revisions of what is averaged."""

    tried: Tried
    offers: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Conclude:
    """Commit the round, and give out the next.

    lives: of peers whose presence is a condition. offers: revisions of what is averaged.
    """

    commit: Commit
    shares: Shares
    lives: Mapping[str, int] = field(default_factory=dict)
    offers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Hasten:
    """The others wait for this peer: it is to offer what it has."""

    round: int


@dataclass(frozen=True, kw_only=True)
class TakeShare:
    """It holds the state and has no share of the round under way: `rounds.join_shares` takes one."""

    round: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The run's samples are done."""

    commit: Commit


Decision = Wait | Propose | Conclude | Hasten | TakeShare | Ended


def decide(
    snapshot: Snapshot, *, me: str, settings: RoundSettings, now: float, start: Position | None = None
) -> Decision:
    """What is to be done. start: where a run that has no commit yet begins, as this peer's state has it."""
    if snapshot.forgotten:
        return Wait(why="the coordinator has lost what it knew: `bloomery coordinate --adopt` restores it")
    commit = snapshot.commit
    if commit is None:
        return _begin(snapshot, me=me, settings=settings, now=now, start=start or Position())
    if commit.position.consumed >= settings.total_samples:
        return Ended(commit=commit)
    if me not in snapshot.members:
        return Wait(why="this peer is not listed", whom=(me,))
    if snapshot.tried is not None:
        return _follow(snapshot, snapshot.tried, me=me, settings=settings, now=now)
    if _nobody_has_it(snapshot, commit):
        return _go_back(snapshot, me=me, settings=settings, now=now)
    if _may_take_share(snapshot, commit, me=me, settings=settings):
        return TakeShare(round=snapshot.round)
    return _gather(snapshot, me=me, settings=settings, now=now)


def _begin(snapshot: Snapshot, *, me: str, settings: RoundSettings, now: float, start: Position) -> Decision:
    """Round 0: whose state is the run's."""
    listed = {name: one for name, one in sorted(snapshot.members.items()) if one.member.digest}
    if len(listed) < settings.minimum_peers:
        return Wait(why=f"{len(listed)} of at least {settings.minimum_peers} peers are here")
    until = _since(listed.values(), settings.minimum_peers) + settings.grace_s
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
        why="the beginning",
    )
    return _in_turn(_concluded(snapshot, commit, having, settings), snapshot, having, me, settings, now)


def _may_take_share(snapshot: Snapshot, newest: Commit, *, me: str, settings: RoundSettings) -> bool:
    """A newcomer begins within the round where that is wanted, or where nobody is left who works on it."""
    has_share = snapshot.shares is None or me in snapshot.shares.shares
    if has_share or snapshot.members[me].member.digest != newest.digest:
        return False
    return settings.joins_within or not snapshot.working


def _gather(snapshot: Snapshot, *, me: str, settings: RoundSettings, now: float) -> Decision:
    """No attempt is under way: wait for who has a share, then propose."""
    offers = {name: one for name, one in sorted(snapshot.readies.items()) if name in snapshot.members}
    missing = tuple(sorted(snapshot.working - set(offers)))
    if not offers:
        return Wait(why="nobody is ready", whom=missing)
    brought = [one.seen_s for one in offers.values() if one.ready.tokens]
    if missing and not brought:  # newcomers wait with nothing: that hurries nobody
        return Wait(why="nobody who has a share is ready", whom=missing)
    first_s = min(brought or (one.seen_s for one in offers.values()))
    if missing or len(offers) < settings.minimum_peers:
        if me in missing and now >= first_s + settings.patience_s:
            return Hasten(round=snapshot.round)
        if len(offers) < settings.minimum_peers:
            why = f"{len(offers)} of at least {settings.minimum_peers} peers are ready"
            return Wait(why=why, whom=missing, until_s=_next(now, first_s + settings.patience_s))
        if now < first_s + settings.grace_s:
            marks = (first_s + settings.patience_s, first_s + settings.grace_s)
            return Wait(why="the slow", whom=missing, until_s=_next(now, *marks))
    overtaken = tuple(name for name in _overtaken(snapshot) if name not in offers)
    if overtaken and now < first_s + settings.grace_s:
        why = "rounds were quicker than the fetching of their state"
        return Wait(why=why, whom=overtaken, until_s=first_s + settings.grace_s)
    return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=())


def _overtaken(snapshot: Snapshot) -> Iterable[str]:
    """Newcomers for whom this round waits, since the last ones were committed while they fetched the state.

    After 2 and 3 such rounds, 4 and 5, 8 and 9, and so on: one who fetches in vain, longer than the grace,
    costs the others ever less. Two at a time, for the first may be decided before its word has arrived.
    """
    for name, one in sorted(snapshot.members.items()):
        rounds = one.member.overtaken
        if rounds >= 2 and rounds - (1 << (rounds.bit_length() - 1)) <= 1:
            yield name


def _follow(snapshot: Snapshot, tried: Tried, *, me: str, settings: RoundSettings, now: float) -> Decision:
    """An attempt is under way: conclude it, or propose the next when it cannot be concluded."""
    attempt = tried.attempt
    gone = tuple(
        peer
        for peer, life in zip(attempt.members, tried.lives, strict=True)
        if peer not in snapshot.members or snapshot.members[peer].life != life
    )
    failed = {one.peer: one for one in snapshot.failures if one.epoch == attempt.epoch}
    offers = {name: one for name, one in sorted(snapshot.readies.items()) if name in snapshot.members}
    if gone or failed:
        silent = tuple(
            peer
            for peer in attempt.members
            if peer not in gone and peer not in failed and peer not in snapshot.dones
        )
        answers_until = snapshot.failed_s + settings.answer_s
        if not gone and silent and now < answers_until:
            why = "an attempt failed: who has let go of it?"
            return Wait(why=why, whom=silent, until_s=answers_until)
        rest_until = snapshot.failed_s + rest_s(snapshot)
        if now < rest_until:
            return Wait(why="attempts fail again and again", until_s=rest_until)
        silent = silent if not gone else ()  # whoever waited for the one that is gone is not to blame
        if not offers:
            return Wait(why="an attempt failed, and nobody is ready any more")
        return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=silent)
    missing = tuple(peer for peer in attempt.members if peer not in snapshot.dones)
    if missing:
        return Wait(why=f"epoch {attempt.epoch} of round {attempt.round} is being reduced", whom=missing)
    digests = {peer: snapshot.dones[peer].digest for peer in attempt.members}
    right = min(digests.values(), key=lambda one: (-list(digests.values()).count(one), _first(digests, one)))
    wrong = {peer: "its result differs" for peer, digest in digests.items() if digest != right}
    if wrong:
        return _propose(snapshot, offers, me=me, settings=settings, now=now, silent=(), wrong=wrong)
    return _conclude(snapshot, tried, digest=right, me=me, settings=settings, now=now)


def _propose(
    snapshot: Snapshot,
    offers: Mapping[str, Offered],
    *,
    me: str,
    settings: RoundSettings,
    now: float,
    silent: tuple[str, ...],
    wrong: Mapping[str, str] | None = None,
) -> Decision:
    bad = unfit(snapshot, {name: one.ready for name, one in offers.items()}, settings)
    left_out = {**bad, **left_out_before(snapshot, offers), **dict.fromkeys(silent, SILENT), **(wrong or {})}
    fit = {name: one.ready for name, one in offers.items() if name not in left_out}
    asked = _asking_to_go_back(snapshot, offers, fit, bad)
    if asked:
        asked += [one for one in fit.values() if one.skip and one not in asked]
        return _rewind(snapshot, asked, me=me, settings=settings, now=now)
    order, dropped = ring(tuple(fit), rates=snapshot.rates, broken=broken_links(snapshot))
    left_out |= dict.fromkeys(dropped, CUT_OFF)
    tokens = {name: fit[name].tokens for name in order}
    shares = snapshot.shares.shares if snapshot.shares else {}
    if me in fit and me not in shares and not sum(tokens.values()):
        return TakeShare(round=snapshot.round)  # nobody with a share can take part
    there = [name for name in offers if left_out.get(name) not in (SILENT, CUT_OFF)]
    if len(there) < settings.minimum_peers or not sum(tokens.values()):
        why = f"{len(order)} of {len(offers)} peers can take part, {settings.minimum_peers} are wanted"
        return Wait(why=why, whom=tuple(left_out), until_s=now + settings.grace_s)
    attempt = Attempt(
        round=snapshot.round,
        epoch=snapshot.epoch + 1,
        members=order,
        weights=_weights([tokens[name] for name in order]),
        left_out=left_out,
    )
    proposal = Propose(
        tried=Tried(attempt=attempt, lives=snapshot.lives(order)),
        offers={name: offers[name].modified for name in order},
    )
    return _in_turn(proposal, snapshot, fit, me, settings, now)


def _asking_to_go_back(
    snapshot: Snapshot, offers: Mapping[str, Offered], fit: Mapping[str, Ready], bad: Mapping[str, str]
) -> list[Ready]:
    """Those whose guards want the run to go back, of the fit; of all where nobody is.

    Where nobody is fit and nobody asks, the round is begun anew without the samples that spoilt it.
    """
    asked = [one for one in fit.values() if one.rewind_to is not None]
    if fit or len(bad) < len(offers):
        return asked
    readies = [one.ready for one in offers.values()]
    return [one for one in readies if one.rewind_to is not None] or [
        replace(one, rewind_to=snapshot.round - 1, skip=one.spent, why=bad[one.peer]) for one in readies
    ]


def _weights(tokens: list[int]) -> tuple[float, ...]:
    return tuple(count / sum(tokens) for count in tokens)


def _conclude(
    snapshot: Snapshot, tried: Tried, *, digest: str, me: str, settings: RoundSettings, now: float
) -> Decision:
    attempt, standing = tried.attempt, snapshot.standing
    readies = [snapshot.readies[peer].ready for peer in attempt.members if peer in snapshot.readies]
    if standing is None or len(readies) < len(attempt.members):
        return Wait(why="what was given out in this round is not known yet")
    if _weights([one.tokens for one in readies]) != attempt.weights:
        again = {name: snapshot.readies[name] for name in attempt.members}
        return _propose(snapshot, again, me=me, settings=settings, now=now, silent=())
    position = standing.shares.position.after(piece for one in readies for piece in one.spent)
    for piece in _skipped(readies):
        position = position.skipping(piece)
    kept = {one.peer: within(merged(one.kept), position.holes) for one in readies}
    commit = Commit(
        round=attempt.round,
        epoch=attempt.epoch,
        members=tuple(sorted(attempt.members)),
        digest=digest,
        position=position,
        sources=tuple(sorted(attempt.members)),
        left_out=attempt.left_out,
        save=any(one.wants_save for one in readies),
        why=DONE if position.consumed >= settings.total_samples else "",
    )
    there = {peer: snapshot.members[peer] for peer in commit.members}
    shares = give_out(position, there, commit.round + 1, settings, kept=kept)
    offers = {peer: snapshot.readies[peer].modified for peer in attempt.members}
    found = Conclude(commit=commit, shares=shares, offers=offers)
    return _in_turn(found, snapshot, there, me, settings, now)


def _skipped(readies: Iterable[Ready]) -> Ranges:
    return merged(piece for one in readies for piece in one.skip)


def _rewind(
    snapshot: Snapshot, asked: list[Ready], *, me: str, settings: RoundSettings, now: float
) -> Decision:
    """The whole run goes back, for somebody's guards want it. Samples skipped since stay skipped."""
    newest = snapshot.commits[max(snapshot.commits)]
    wanted = min(one.rewind_to for one in asked if one.rewind_to is not None)
    target = max((number for number in snapshot.commits if number <= wanted), default=min(snapshot.commits))
    reason = "; ".join(sorted({f"{one.peer}: {one.why}" for one in asked if one.rewind_to is not None}))
    skips = (*newest.position.skips, *_skipped(asked))
    there = {name: snapshot.members[name] for name in sorted(snapshot.working)}
    commit = _going_back(snapshot, target, skips=skips, why=reason)
    return _in_turn(_concluded(snapshot, commit, there, settings), snapshot, there, me, settings, now)


def _go_back(snapshot: Snapshot, *, me: str, settings: RoundSettings, now: float) -> Decision:
    """After a full outage: wait for who has the newest state, else go back to what somebody has."""
    listed = snapshot.members
    newest = snapshot.commits[max(snapshot.commits)]
    busy = [
        name
        for name, one in sorted(listed.items())
        if not one.member.digest or one.modified <= snapshot.commit_revision
    ]
    if busy:
        return Wait(why="they have not said which state they hold since the last commit", whom=tuple(busy))
    if len(listed) < settings.minimum_peers:
        return Wait(why=f"{len(listed)} of at least {settings.minimum_peers} peers are here")
    until = max(snapshot.committed_s, *(one.said_s for one in listed.values())) + settings.grace_s
    if now < until:
        return Wait(why=f"nobody has the state of the newest commit ({newest.digest[:12]})", until_s=until)
    held = {one.member.digest for one in listed.values()}
    known = [number for number, commit in snapshot.commits.items() if commit.digest in held]
    if not known:
        return Wait(why="nobody has any state that this run ever committed", whom=tuple(listed))
    commit = _going_back(
        snapshot, max(known), skips=newest.position.skips, why="nobody has the newest state any more"
    )
    there = snapshot.holders(commit.digest)
    return _in_turn(_concluded(snapshot, commit, there, settings), snapshot, there, me, settings, now)


def _going_back(snapshot: Snapshot, target: int, *, skips: tuple[range, ...], why: str) -> Commit:
    position = snapshot.commits[target].position
    for piece in skips:
        position = position.skipping(piece)
    digest = snapshot.commits[target].digest
    origin = target
    while (earlier := snapshot.commits[origin].rewind_to) is not None and earlier in snapshot.commits:
        origin = earlier
    return Commit(
        round=snapshot.round,
        epoch=snapshot.epoch,
        members=(),
        digest=digest,
        position=position,
        sources=tuple(snapshot.holders(digest)),
        rewind_to=origin,
        why=why,
    )


def _concluded(
    snapshot: Snapshot, commit: Commit, there: Mapping[str, Present], settings: RoundSettings
) -> Conclude:
    shares = give_out(commit.position, there, commit.round + 1, settings)
    return Conclude(commit=commit, shares=shares, lives={name: one.life for name, one in there.items()})


def _in_turn(
    found: Propose | Conclude,
    snapshot: Snapshot,
    candidates: Mapping[str, object],
    me: str,
    settings: RoundSettings,
    now: float,
) -> Decision:
    """What was found, once it is this peer's turn: those before it in the order of names are quicker."""
    before = sum(name < me for name in candidates)
    turn_s = snapshot.changed_s + before * settings.stagger_s
    if before == 0 or now >= turn_s:
        return found
    return Wait(why="another peer proposes", whom=tuple(sorted(candidates))[:before], until_s=turn_s)


def _nobody_has_it(snapshot: Snapshot, newest: Commit) -> bool:
    """Nobody is ready, and nobody who has spoken since the newest commit has its state."""
    return not snapshot.readies and not snapshot.holders(newest.digest) and bool(snapshot.members)


def _since(present: Iterable[Present], count: int) -> float:
    """When the `count`th of these became known."""
    return sorted(one.seen_s for one in present)[max(0, count - 1)]


def _next(now: float, *moments: float) -> float | None:
    return min((moment for moment in moments if moment > now), default=None)


def _first(digests: Mapping[str, str], digest: str) -> str:
    return min(peer for peer, one in digests.items() if one == digest)
