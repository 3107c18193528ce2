"""The numbers that divide, for messages that name what would fit."""

from __future__ import annotations


def divisors(number: int) -> list[int]:
    """Every divisor of `number`, rising."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def some(numbers: list[int], *, near: int) -> str:
    """Up to eight of the numbers, those nearest to what was asked for."""
    nearest = sorted(numbers, key=lambda number: (abs(number - near), number))[:8]
    return ", ".join(str(number) for number in sorted(nearest))
