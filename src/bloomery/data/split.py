"""Train, validation and test as ranges of documents: a document is in one of them, never in two."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def split_documents(count: int, parts: Sequence[int]) -> tuple[range, range, range]:
    """The documents of train, validation and test: neighbours, in this order, together all of them.

    parts: up to three numbers in any unit; none at all trains on every document. Ends are rounded to even,
    as Megatron's --split rounds them.
    """
    wanted = [*parts, *[0] * (3 - len(parts))] if parts else [1, 0, 0]
    ends = [round(Fraction(sum(wanted[: number + 1]) * count, sum(wanted))) for number in range(3)]
    return range(0, ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2])
