"""Findings of the checks across settings, and the error that reports all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from math import isqrt

from bloomery.config.recipe import Recipe
from bloomery.errors import ConfigError, Mistake, without_logins
from bloomery.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One setting that does not fit the others. key: `section.name`."""

    key: str
    problem: str
    remedy: str


def refuse(recipe: Recipe, sources: Mapping[str, str], findings: Sequence[Finding]) -> None:
    """Raise ConfigError with all findings, each with its value and source; without findings, do nothing.

    sources: where the value of each setting came from, by key.
    """
    if not findings:
        return
    raise ConfigError(
        [
            Mistake(
                key=finding.key,
                value=shown_value(setting_value(recipe, finding.key)),
                source=sources.get(finding.key, "default"),
                problem=finding.problem,
                remedy=finding.remedy,
            )
            for finding in findings
        ]
    )


def setting_value(recipe: Recipe, key: str) -> object:
    """Return the value of a setting. key: `section.name`."""
    section, _, name = key.partition(".")
    value: object = getattr(getattr(recipe, section), name)
    return value


def shown_value(value: object) -> object:
    """Return the value without user names and passwords of URLs, and None for a list of tables."""
    if isinstance(value, tuple) and any(is_dataclass(entry) for entry in value):
        return None  # its key and line tell where it is
    if isinstance(value, (tuple, list)):
        return type(value)(shown_value(entry) for entry in value)
    return without_logins(value) if isinstance(value, str) else value


def divisors(number: int) -> list[int]:
    """Return every divisor of `number`, in ascending order."""
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def nearest_numbers(numbers: list[int], *, near: int) -> str:
    """Return up to eight of the numbers as text: those nearest to `near`."""
    nearest = sorted(numbers, key=lambda number: (abs(number - near), number))[:8]
    return ", ".join(str(number) for number in sorted(nearest))
