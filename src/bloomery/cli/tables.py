"""Plain-text tables for the terminal.

They are laid out here: importing what rich needs for a table would take a third of the time of a whole plan.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence

COLUMNS = 100
_NARROWEST = 12
_GAP = 2
"""Blanks between two columns."""


def table_text(
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (),
    head: bool = True,
    width: int = COLUMNS,
    wrap: bool = True,
) -> str:
    """Return rows of cells as aligned columns, without colours and without trailing spaces.

    rows: the cells of each row; all rows have the same number of cells.
    left: indices of the columns that are aligned to the left; the others are aligned to the right.
    head: whether the first row is a heading with a rule beneath it.
    width: the most characters in a line. Only the last column becomes narrower to fit.
    wrap: whether text too long for the last column goes on in the next line; else it is cut with an ellipsis.
    """
    widths = [max(_cell_width(row[column]) for row in rows) for column in range(len(rows[0]))]
    room = width - sum(widths[:-1]) - _GAP * (len(widths) - 1)
    widths[-1] = min(widths[-1], max(room, _NARROWEST))
    lines = []
    for number, row in enumerate(rows):
        *others, last = row
        pieces = _pieces(last, widths[-1], wrap=wrap)
        for index, piece in enumerate(pieces):
            cells = [*others, piece] if index == 0 else [*([""] * len(others)), piece]
            lines.append((" " * _GAP).join(map(_aligned, cells, widths, _sides(left, widths))).rstrip())
        if head and number == 0:
            lines.append("─" * (sum(widths) + _GAP * (len(widths) - 1)))
    return "\n".join(lines)


def _sides(left: Collection[int], widths: Sequence[int]) -> list[bool]:
    return [column in left for column in range(len(widths))]


def _aligned(cell: str, width: int, is_left: bool) -> str:  # noqa: FBT001 (mapped over columns)
    blanks = " " * (width - _cell_width(cell))
    return cell + blanks if is_left else blanks + cell


def _pieces(cell: str, width: int, *, wrap: bool) -> list[str]:
    """Return the lines of a cell of the last column, of which there is one unless it may wrap."""
    if _cell_width(cell) <= width:
        return [cell]
    if not wrap:
        return [_prefix(cell, width - 1) + "…"]
    lines = [""]
    for word in cell.split():
        if _cell_width(joined := f"{lines[-1]} {word}".lstrip()) <= width:
            lines[-1] = joined
            continue
        lines.append(word)
        while _cell_width(lines[-1]) > width:
            first = _prefix(lines[-1], width)
            lines[-1:] = [first, lines[-1][len(first) :]]
    return [line for line in lines if line]


def _prefix(text: str, width: int) -> str:
    while _cell_width(text) > width:
        text = text[:-1]
    return text


def _cell_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )
