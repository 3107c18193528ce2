"""Plain-text tables for the terminal, laid out by rich, and sizes as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from io import StringIO

COLUMNS = 100
_NARROWEST = 12


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
    width: the most characters in a line. To fit, the last column becomes narrower, down to 12 characters, and
        then the columns that are aligned to the left, the widest first. Other columns, of figures, are never
        cut: where they need more, lines are longer.
    wrap: whether text too long for its column goes on in the next line; else it is cut with an ellipsis.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # With a box, rich draws a blank of one character between two columns beside the padding.
    table = Table(
        box=box.SIMPLE_HEAD if head else None,
        show_header=head,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if head else 2, 0, 0),
    )
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    spent = 2 * last
    narrowed = set[int]()
    while (excess := sum(widths) + spent - width) > 0:
        wide = [column for column in (*left, last) if widths[column] > _NARROWEST]
        if not wide:
            break
        column = last if last in wide else max(wide, key=lambda column: widths[column])
        widths[column] -= min(excess, widths[column] - _NARROWEST)
        narrowed.add(column)
    for column in range(last + 1):
        table.add_column(
            Text(rows[0][column]) if head else "",
            justify="left" if column in left else "right",
            width=widths[column],  # given it, rich does not measure each cell again
            no_wrap=column not in narrowed or not wrap,
            overflow="fold" if column in narrowed and wrap else "ellipsis",
        )
    body = rows[1:] if head else rows
    if body and not narrowed and not any("\n" in cell for row in body for cell in row):
        # Every cell is one line: rich lays out a column of text in a fraction of the time of single cells.
        body = [["\n".join(cells) for cells in zip(*body, strict=True)]]
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    buffer = StringIO()
    console = Console(
        file=buffer,
        width=max(width, sum(widths) + spent),
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip("\n").split("\n"))


def size_words(count: float) -> str:
    """Return a number of bytes as text with a decimal unit, such as 1.5 GB."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
