"""Tables of cells as plain text of a bounded width."""

from __future__ import annotations

import pytest

from bloomery.cli.tables import table_text

ROWS = [["name", "count", "note"], ["a", "1,000", "short"], ["longer", "2", "many words " * 20]]


@pytest.mark.parametrize("wrap", [True, False])
def test_only_the_last_column_gives_way_to_the_width(wrap: bool) -> None:
    lines = table_text(ROWS, left=(0, 2), width=60, wrap=wrap).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0] == "name    count  note" and set(lines[1]) == {"─"}
    assert lines[2] == "a       1,000  short"
    assert lines[3].startswith("longer      2  many words")
    assert (len(lines) > 4) == wrap and lines[3].endswith("…") != wrap


@pytest.mark.parametrize("left", [(), (0,)])
def test_the_last_column_gives_way_however_it_is_aligned(left: tuple[int, ...]) -> None:
    lines = table_text(ROWS, left=left, width=60).splitlines()
    assert max(map(len, lines)) <= 60 and len(lines) > 4


def test_a_table_is_plain_text_whatever_the_cells_and_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    text = table_text([["[bold]x[/bold]", "http://a/b", "3"]], left=(0, 1), head=False)
    assert text == "[bold]x[/bold]  http://a/b  3"


def test_long_names_give_way_before_figures_and_figures_never() -> None:
    rows = [["run", "loss", "note"], ["a" * 50, "12.345", "z" * 40], ["b", "9.1", "c"]]
    lines = table_text(rows, left=(0, 2), width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[2] == f"{'a' * 18}  12.345  {'z' * 12}" and sum(line.count("a") for line in lines) == 50
    cut = table_text(rows, left=(0, 2), width=40, wrap=False).splitlines()
    assert cut[2] == f"{'a' * 17}…  12.345  {'z' * 11}…"
    figures = [["1" * 30, "2" * 30, "note"]]
    assert table_text(figures, left=(2,), head=False, width=40) == f"{'1' * 30}  {'2' * 30}  note"


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([["a", "b"]], ["a  b", "────"]),
        ([["a", "b"], ["", ""], ["x", ""], ["", "y"]], ["a  b", "────", "", "x", "   y"]),
        ([["ab", "c"], ["1\n2", "y"], ["x", "z"]], ["ab  c", "─────", " 1  y", " 2", " x  z"]),
    ],
)
def test_cells_stay_in_their_rows_also_where_they_are_empty_or_of_two_lines(
    rows: list[list[str]], lines: list[str]
) -> None:
    assert table_text(rows).split("\n") == lines
