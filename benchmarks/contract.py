"""What every benchmark prints: one JSON object a line, and an exit status of 0 when all of them are ok."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass

COMPARISONS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number. reference: what was measured beside it in the same run; bar: None where none is set."""

    name: str
    value: float
    unit: str
    reference: str
    bar: str | None
    ok: bool


def measurement(name: str, value: float, *, unit: str, reference: str, bar: str | None = None) -> Measurement:
    """A measurement judged by its bar: '>= 1.3' or '<= 20'. Without a bar it is ok."""
    ok = True
    if bar is not None:
        comparison, limit = bar.split()
        ok = COMPARISONS[comparison](value, float(limit))
    return Measurement(name=name, value=value, unit=unit, reference=reference, bar=bar, ok=ok)


def report(measurements: Sequence[Measurement], *, as_json: bool) -> int:
    """Print them, as JSON lines or for a person. Returns the exit status."""
    for one in measurements:
        if as_json:
            print(json.dumps(asdict(one) | {"value": float(f"{one.value:.5g}")}), flush=True)
        else:
            verdict = "" if one.bar is None else f"  (bar {one.bar}: {'ok' if one.ok else 'MISSED'})"
            print(f"{one.name:<44} {one.value:>10.3f} {one.unit}{verdict}\n    {one.reference}", flush=True)
    return 0 if all(one.ok for one in measurements) else 1
