"""The figures that `gpu.py` makes of what its jobs of speed have found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contract import Measurement
from gpu_session import Figures, Session

LENGTH = 4096
"""Tokens of a sample of the bars."""
H200_BF16 = 989e12
"""FLOP/s of dense bf16 products of an H200, as published."""
ROUND_STEPS = 100
"""Steps of a round between peers, to which an outer step is compared."""


def speed_job(session: Session, size: str, length: int, precision: str) -> Figures:
    job = {
        "kind": "speed",
        "size": session.size(size),
        "length": session.length(length),
        "family": "llama",
        "precision": precision,
    }
    if (size, length, precision) == ("1B", LENGTH, "bf16"):
        job["outer"] = True
    return session.measured(**job)


def ratio(session: Session, title: str, base: Figures, other: Figures) -> list[Measurement]:
    """How many times as fast the other is as the base; nothing if one of them was left out."""
    if "left_out" in base or "left_out" in other:
        return []
    seconds = [figures.get("seconds", float("nan")) for figures in (base, other)]
    reference = base.get("failure") or other.get("failure") or f"{seconds[0]:.4g} s and {seconds[1]:.4g} s"
    return [session.judged(title, seconds[0] / seconds[1], "x", reference=reference)]


def against_peers(
    session: Session, size: str, length: int, base: Figures, peers: Sequence[str]
) -> list[Measurement]:
    found = []
    for peer in peers:
        theirs = session.measured(
            kind="peer", peer=peer, size=session.size(size), length=session.length(length)
        )
        found += ratio(session, f"{size}, {length:,}: against compiled {peer}", theirs, base)
    return found


def outer_step(session: Session, told: Figures) -> list[Measurement]:
    """What the outer step of a round takes of the training without the network, against so many steps.

    The training waits for all of it, or goes on with steps meanwhile (`elastic.overlap_steps`).
    """
    if "left_out" in told:
        return []
    waits: Mapping[str, float] = told.get("outer_waits", {})
    beside: Mapping[str, float] = told.get("outer_beside", {})
    added = {
        "1B: outer step, of 100 steps": (
            sum(waits.values()) if waits else float("nan"),
            ", ".join(f"{name} {value:.3g} s" for name, value in waits.items()),
        ),
        "1B: outer step, of 100 steps, beside steps": (
            beside.get("added", float("nan")),
            ", ".join(f"{name} {value:.4g}" for name, value in beside.items()),
        ),
    }
    return [
        session.judged(
            title,
            100 * added_s / (ROUND_STEPS * told.get("seconds", float("nan"))),
            "%",
            reference=told.get("failure") or f"{added_s:.3g} s: {parts}",
        )
        for title, (added_s, parts) in added.items()
    ]


def figures(session: Session, title: str, told: Figures) -> list[Measurement]:
    """The speed of one job, its share of the product and of the published peak, memory, and time by part."""
    if "left_out" in told:
        return []
    if not {"seconds", "flops", "peak"} <= told.keys():
        failure = told.get("failure", "incomplete")
        return [
            session.judged(f"{title}: {figure}", float("nan"), "%", reference=failure)
            for figure in ("of the product", "MFU of 989 TFLOP/s")
        ]
    seconds = told["seconds"]
    rate, hardware = told["flops"] / seconds, told["hardware_flops"] / seconds
    reference = (
        f"{seconds:.4g} s a step of {told['tokens']:,} tokens; product {told['peak'] / 1e12:.4g} TFLOP/s; "
        f"{told['layout']}"
    )
    reference += f"; afterwards: {told['failure']}" if "failure" in told else ""
    figures = (
        ("speed", told["tokens"] / seconds, "tokens/s"),
        ("model TFLOP/s", rate / 1e12, "TFLOP/s"),
        ("hardware TFLOP/s", hardware / 1e12, "TFLOP/s"),
        ("of the product", 100 * rate / told["peak"], "%"),
        ("MFU of 989 TFLOP/s", 100 * rate / H200_BF16, "%"),
        ("memory", told["bytes"] / 2**30, "GiB"),
        ("first step", told["first"], "s"),
    )
    found = [
        session.judged(f"{title}: {name}", value, unit, reference=reference) for name, value, unit in figures
    ]
    return found + [
        session.judged(f"{title}: time of {part}", spent_ms, "ms", reference=f"{share:.1%} of a step")
        for part, (spent_ms, share) in told.get("parts", {}).items()
    ]
