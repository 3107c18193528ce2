"""Rates, times and shares as people write them: 200mbit, 1gbit, 50ms, 0.1%."""

from __future__ import annotations

import re

RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"\d+(?:\.\d+)?"


def rate_bytes_s(text: str) -> float:
    """Bytes a second of '200mbit'; 0 (no limit) of '0'. Raises ValueError, which says what is understood."""
    return _of(text, RATES, "200mbit, 1gbit, or 0 for no limit") / 8


def seconds(text: str) -> float:
    """Seconds of '50ms'. Raises ValueError."""
    return _of(text, TIMES, "50ms, 0.2s, or 0")


def share(text: str) -> float:
    """0.001 of '0.1%' and of '0.001'. Raises ValueError."""
    found = re.fullmatch(rf"({_NUMBER})(%?)", text.strip())
    value = float(found[1]) / (100 if found[2] else 1) if found else 1.0
    if value >= 1:
        raise ValueError(f"{text!r} is not a share below 1: write 0.1% or 0.001")
    return value


def _of(text: str, units: dict[str, float], understood: str) -> float:
    found = re.fullmatch(rf"({_NUMBER})\s*([a-z]*?)(?:/s|ps)?", text.strip().lower())
    if found and float(found[1]) == 0:
        return 0.0
    if not found or found[2] not in units:
        raise ValueError(f"{text!r} is not understood: write {understood}")
    return float(found[1]) * units[found[2]]
