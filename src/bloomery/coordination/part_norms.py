"""Judges the norms of the parts that peers offer, by the steps that each part spans.

A pseudo-gradient of s steps has a norm between √s times that of one step, if the steps point in random
directions, and s times that, if all point in one. So a norm tells something only beside the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from bloomery.coordination.snapshot import RunSnapshot
from bloomery.protocol.records import Attempt, Ready

Part = tuple[int, float]
"""How many steps a pseudo-gradient spans, and its norm."""

OVERSTATED = "the average came out larger than the members' norms allow, and is tried without it"
"""Why a member is left out of an attempt while the one that said too small a norm is searched."""

NORM_FAILURE = "norm"
"""The kind of a failure that a member reports if the average is larger than the norms allow."""

_SLACK = 1.5
"""How far the norm of an average may exceed its bound, which the codecs' errors may pass."""
_SEARCHES = 8
"""How many attempts at most find the member that said too small a norm."""


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
