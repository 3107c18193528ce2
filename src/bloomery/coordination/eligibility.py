"""Rules of a round: which peers may take part, which links the ring avoids, and who gets which samples.

A pseudo-gradient of s steps has a norm between √s times that of one step, if the steps point in random
directions, and s times that, if all point in one. So the norm of a part is judged beside its number of steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from bloomery.coordination.offer_limits import OfferLimits, overstated
from bloomery.coordination.snapshot import Link, ListedMember, RunSnapshot
from bloomery.data.position import Position, Ranges, SampleShare, lease, merged, total, without
from bloomery.protocol.records import Attempt, Commit, Member, ProposedAttempt, Ready, RoundShares


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """The settings of the recipe's [elastic] that rounds depend on, and the run's length in samples.

    peers: how many are planned.
    grace_s: how long a round waits for slow peers after the first offer, seconds.
    patience_s: the seconds after which slow peers are asked to offer the steps that they have made.
    outlier_factor: an offer is left out if its norm exceeds what the others' norms let expect by this factor.
    feedback_rounds: how many rounds' parts a peer's error feedback may be the sum of.
    quorum: with how many offers an asynchronous round begins to be decided; 0: rounds are synchronous.
    overlap_steps: how many steps a peer makes while a round is decided.
    joins_within: whether joining peers take a share of the round under way.
    answer_s: how long members have to report that they left the ring of a failed attempt, seconds, beside
        what the coordinator takes.
    stagger_s: how much later each peer acts than the one before it by name, seconds.
    limits: what offers may claim, and members as the samples of a step; None: both are believed.
    """

    inner_steps: int
    total_samples: int
    peers: int = 1
    minimum_peers: int = 1
    grace_s: float = 60.0
    patience_s: float = 10.0
    outlier_factor: float = 10.0
    feedback_rounds: float = 1.0
    quorum: int = 0
    overlap_steps: int = 0
    joins_within: bool = False
    answer_s: float = 0.7
    stagger_s: float = 0.2
    limits: OfferLimits | None = None

    def batch_of(self, member: Member) -> int:
        """Return the samples for which a member gets a share for each step."""
        return member.samples if self.limits is None else min(member.samples, self.limits.batch)


LINK_FAILURES = 2
"""Attempts of a round that must fail between two members before their link counts as broken."""
PIECES_MORE = 64
"""A peer spends its share from the beginning, so in no more pieces than it was given. What it leaves between
pieces becomes holes of the position, which the commit has to hold; this many more are tolerated."""
_ROUND_TRIPS, _ROUND_TRIP_S_AT_MOST = 4, 5.0
"""The round trips to the coordinator that an answer may take, and the most seconds that one counts."""
_AT_ONCE, _REST_S, _REST_S_AT_MOST = 3, 0.1, 10.0
_DOUBLINGS_AT_MOST = 16
"""After more, the rest has long been the longest, and the power would soon be larger than any float."""


def ineligible(
    snapshot: RunSnapshot, readies: Mapping[str, Ready], settings: RoundSettings
) -> dict[str, str]:
    """Return the peers whose part may not be averaged, and why."""
    unfit = unusable_offers(snapshot, readies)
    parts = {name: ready for name, ready in readies.items() if name not in unfit}
    factor, feedback_rounds = settings.outlier_factor, settings.feedback_rounds
    return unfit | outliers(parts, factor=factor, feedback_rounds=feedback_rounds)


def unusable_offers(snapshot: RunSnapshot, readies: Mapping[str, Ready]) -> dict[str, str]:
    """Return the peers whose part cannot be averaged at all, and why, from each part alone."""
    reasons = {name: "its part is not finite" for name, ready in readies.items() if not ready.finite}
    shares = snapshot.shares.shares if snapshot.shares else {}
    position = snapshot.shares.position if snapshot.shares else Position()
    for name, ready in readies.items():
        claimed = (*ready.spent, *ready.kept)
        share = merged(shares.get(name, ()))
        if total(claimed) != total(merged(claimed)) or without(merged(claimed), share):
            reasons[name] = "it spent samples that it was not given"
        elif len(merged(claimed)) > len(share) + PIECES_MORE:
            reasons[name] = "it spent its samples in too many pieces"
        elif snapshot.limits and (why := overstated(ready, position=position, limits=snapshot.limits)):
            reasons[name] = why
    return reasons


def changed_offers(snapshot: RunSnapshot, tried: ProposedAttempt) -> dict[str, str]:
    """Return the members whose offer was changed after the attempt had begun, and why that matters.

    A member that lost its lease is not one of them: its offer went with the lease.
    """
    offers = {name: offer.modified for name, offer in snapshot.readies.items()}
    return {
        name: "what it brings was changed after the attempt had begun"
        for name, modified, life in zip(tried.attempt.members, tried.offers, tried.lives, strict=True)
        if offers.get(name) != modified and name in snapshot.members and snapshot.members[name].life == life
    }


def left_out_before(snapshot: RunSnapshot, offers: Collection[str]) -> dict[str, str]:
    """Return the peers that the attempt before left out, and why: they stay out of this round's attempts.

    Those that `suspects` left out do not: they are chosen anew for each attempt.
    """
    if snapshot.tried is None:
        return {}
    return {
        name: why
        for name, why in snapshot.tried.attempt.left_out.items()
        if name in offers and why != OVERSTATED
    }


def broken_links(snapshot: RunSnapshot) -> set[Link]:
    """Return pairs of members between which at least `LINK_FAILURES` attempts of this round failed."""
    epochs: dict[Link, set[int]] = {}
    for failure in snapshot.failures:
        if failure.culprit is not None and failure.culprit != failure.peer:
            epochs.setdefault(frozenset((failure.peer, failure.culprit)), set()).add(failure.epoch)
    return {link for link, when in epochs.items() if len(when) >= LINK_FAILURES}


def answer_s(snapshot: RunSnapshot, attempt: Attempt, settings: RoundSettings) -> float:
    """Return how long members have to report that they left the ring of a failed attempt, seconds.

    A report takes four ways of a round trip to the coordinator at most: the failure on its way to the slowest
    member, that member's report and its confirmation, and the report on its way to the others. A failure may
    just have missed a watch that is being opened anew, so twice that.
    """
    offers = [snapshot.readies[name].ready for name in attempt.members if name in snapshot.readies]
    slowest_s = max((ready.coordinator_s for ready in offers), default=0.0)
    return settings.answer_s + _ROUND_TRIPS * min(slowest_s, _ROUND_TRIP_S_AT_MOST)


def rest_s(snapshot: RunSnapshot) -> float:
    """Return how long to wait before the next attempt, seconds: 0 after few failures, then ever longer."""
    failed = len({failure.epoch for failure in snapshot.failures})
    doublings = min(failed - _AT_ONCE, _DOUBLINGS_AT_MOST)
    return min(_REST_S_AT_MOST, _REST_S * 2.0**doublings) if doublings > 0 else 0.0


def brings_first_part(snapshot: RunSnapshot, attempt: Attempt, peer: str) -> bool:
    """Whether a member that offered nothing when the attempt began offers samples of a share now.

    This can happen once in each life of a peer: in the next attempt it has a weight.
    """
    weight = attempt.weights[attempt.members.index(peer)]
    offer = snapshot.readies.get(peer)
    return weight == 0.0 and offer is not None and offer.ready.tokens > 0


def overtaken_newcomers(snapshot: RunSnapshot) -> Iterable[str]:
    """Yield the joining peers for which this round waits: rounds ended while they fetched the state.

    A round waits after 2, 3, 4, 5, 8, 9, 16, 17 … such rounds, so a joining peer whose fetch takes longer
    than the grace time delays the others ever more rarely. Two rounds in a row wait, because the first may be
    decided before the joining peer's record has arrived.
    """
    for name, present in sorted(snapshot.members.items()):
        rounds = present.member.overtaken
        if rounds >= 2 and rounds - (1 << (rounds.bit_length() - 1)) <= 1:
            yield name


def may_take_share(snapshot: RunSnapshot, newest: Commit, *, me: str, settings: RoundSettings) -> bool:
    """Whether a joining peer takes a share of the round: if the recipe says so, or nobody works on the round,
    and the run needs more samples than are leased to those who work.
    """
    shares, member = snapshot.shares, snapshot.members[me].member
    if shares is None or me in shares.shares or member.digest != newest.digest:
        return False
    if not settings.joins_within and snapshot.working:
        return False
    return (
        newcomer_steps(shares, samples=settings.batch_of(member), away=snapshot.away, settings=settings) > 0
    )


def newcomer_steps(
    shares: RoundShares, *, samples: int, away: Collection[str], settings: RoundSettings
) -> int:
    """Return for how many steps a joining peer may take samples; 0: the leased ones are all that are left.

    samples: how many the peer uses in one inner step.
    away: peers that do not use their shares.
    """
    leased = sum(total(part) for name, part in shares.shares.items() if name not in away)
    left = settings.total_samples - shares.position.consumed - leased
    return max(0, min(settings.inner_steps, -(-left // max(1, samples))))


def compare_results(digests: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the digest that most members have, and why each of the others is left out.

    digests: of the state that each member computed, by member. The digest of the first by name wins a tie.
    """
    counts = Counter(digests.values())
    majority = min(sorted(digests), key=lambda peer: -counts[digests[peer]])
    right = digests[majority]
    return right, {peer: "its result differs" for peer, digest in digests.items() if digest != right}


def lease_samples(
    position: Position,
    members: Mapping[str, ListedMember],
    round: int,
    settings: RoundSettings,
    *,
    kept: Mapping[str, Ranges] | None = None,
) -> RoundShares:
    """Return the shares of a round for these members: samples for inner_steps each, fewer at the run's end.

    kept: for each member, ranges that it has leased and not used yet. They are holes of the position and
        become part of its share. None: there are none.
    """
    kept = {name: merged(pieces) for name, pieces in (kept or {}).items() if pieces}
    samples = {name: settings.batch_of(members[name].member) for name in sorted(members)}
    steps = settings.inner_steps
    samples_left = settings.total_samples - position.consumed
    if samples_left <= 0:
        return RoundShares(round=round, position=position, shares={}, live=0)
    if sum(samples.values()):
        steps = max(1, min(steps, -(-samples_left // sum(samples.values()))))
    leased, position = lease(
        position,
        samples=[max(0, steps * count - total(kept.get(name, ()))) for name, count in samples.items()],
        outstanding=[SampleShare(lease=pieces) for pieces in kept.values()],
    )
    shares = {
        name: merged((*kept.get(name, ()), *(share.lease or ())))
        for name, share in zip(samples, leased, strict=True)
    }
    return RoundShares(round=round, position=position, shares=shares, live=len(shares))


def with_newcomer(
    shares: RoundShares, peer: str, *, samples: int, away: Collection[str] = (), settings: RoundSettings
) -> RoundShares | None:
    """Return the shares and one more, for a peer that joins while the round is under way.

    None if those who work have leased all samples that the run still needs.

    samples, away: as in `newcomer_steps`.
    """
    steps = newcomer_steps(shares, samples=samples, away=away, settings=settings)
    if not steps:
        return None
    leased, position = lease(
        shares.position,
        samples=[samples * steps],
        outstanding=[SampleShare(lease=pieces) for pieces in shares.shares.values()],
    )
    return RoundShares(
        round=shares.round,
        position=position,
        shares={**shares.shares, peer: leased[0].lease or ()},
        live=shares.live + 1,
    )


Part = tuple[int, float]
"""How many steps a pseudo-gradient spans, and its norm."""

OVERSTATED = "the average came out larger than the members' norms allow, and is tried without it"
"""Why a member is left out of an attempt during the search for the one that reported too small a norm."""

NORM_FAILURE = "norm"
"""The kind of a failure that a member reports if the average is larger than the norms allow."""

_SLACK = 1.5
"""How far the norm of an average may exceed its bound, which the codecs' errors may pass."""
_SEARCHES = 8
"""The most attempts that search for the member that reported too small a norm."""


def largest_norm(steps: int, part: Part) -> float:
    """Return the largest norm that a part of `steps` steps is expected to have, judged by another part."""
    ratio = max(1, steps) / max(1, part[0])
    return part[1] * max(ratio, math.sqrt(ratio))


def smallest_norm(steps: int, part: Part) -> float:
    """Return the smallest norm that a part of `steps` steps is expected to have, judged by another part."""
    ratio = max(1, steps) / max(1, part[0])
    return part[1] * min(ratio, math.sqrt(ratio))


def outliers(readies: Mapping[str, Ready], *, factor: float, feedback_rounds: float = 1.0) -> dict[str, str]:
    """Return the peers whose part's norm is more than `factor` times what is to be expected, and why.

    Of three and more parts each is compared with the median of what all let expect; of two, with the other
    part and with the peer's own earlier parts. One part alone cannot be judged.

    feedback_rounds: how many rounds' parts the error feedback of a peer may be the sum of.
    """
    parts = {
        name: (ready.spanned_steps, ready.norm)
        for name, ready in readies.items()
        if ready.tokens and ready.norm is not None
    }
    if len(parts) == 2:
        return _outlier_of_two(parts, readies, factor)
    if len(parts) < 2:
        return {}
    distinct = {steps for steps, _ in parts.values()}
    expected = {
        steps: median(largest_norm(steps, part) for part in parts.values()) for steps in sorted(distinct)
    }
    return {
        name: _reason(steps, norm, expected[steps], "the others' parts")
        for name, (steps, norm) in parts.items()
        if max(norm, readies[name].feedback / feedback_rounds) > factor * expected[steps]
    }


def _outlier_of_two(parts: Mapping[str, Part], readies: Mapping[str, Ready], factor: float) -> dict[str, str]:
    """Judge two parts: one is an outlier if it exceeds the other part and the peer's own earlier parts.

    The two cannot both be outliers. Without a past of the larger part, the past of the smaller one tells
    whether it is the smaller one that is unusual.
    """
    for name, other in (tuple(parts), tuple(reversed(tuple(parts)))):
        (steps, norm), (other_steps, other_norm) = parts[name], parts[other]
        beside = largest_norm(steps, parts[other])
        if norm <= factor * beside:
            continue
        own = [largest_norm(steps, part) for part in readies[name].past]
        if own and norm > factor * median(own):
            return {name: _reason(steps, norm, median(own), "its own earlier parts")}
        usual = [smallest_norm(other_steps, part) for part in readies[other].past]
        if not own and usual and factor * other_norm >= median(usual):
            return {name: _reason(steps, norm, beside, f"the part of '{other}'")}
    return {}


def _reason(steps: int, norm: float, expected: float, source: str) -> str:
    return (
        f"its part's norm is {norm:.3g} after {steps} steps, and {source} let expect at most {expected:.3g}"
    )


def norm_limit(attempt: Attempt, readies: Mapping[str, Ready]) -> float | None:
    """Return the largest norm that the attempt's average can have, if what its members say is true.

    By the triangle inequality that is the sum of weight × norm, and of the quantisation errors that members
    add, with slack for the errors of this attempt. None if a member's offer is not known.
    """
    total = 0.0
    for name, weight in zip(attempt.members, attempt.weights, strict=True):
        ready = readies.get(name)
        if ready is None or ready.norm is None:
            return None
        if weight:
            total += weight * ready.norm + ready.feedback
    return _SLACK * total


def suspects(snapshot: RunSnapshot, names: Iterable[str]) -> dict[str, str]:
    """Return the members that the next attempt leaves out because averages were larger than norms allow.

    Nobody sees another member's part, so the one that said too small a norm is searched: after the k-th
    such attempt of a round the k-th of at most eight groups of members is left out. An attempt counts only
    if at least half of the members report it, so that no single one can have others left out.
    """
    reports: dict[int, int] = {}
    for failure in snapshot.failures:
        if failure.kind == NORM_FAILURE:
            reports[failure.epoch] = reports.get(failure.epoch, 0) + 1
    order = sorted(names)
    failed = sum(2 * count >= len(order) - len(order) // _SEARCHES for count in reports.values())
    if not failed or len(order) < 2:
        return {}
    size = -(-len(order) // _SEARCHES)
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return dict.fromkeys(groups[(failed - 1) % len(groups)], OVERSTATED)
