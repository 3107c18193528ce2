"""The whole layout matrix: every row with every style. Writes the table of docs/layouts.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.layouts.comparison import BF16, BF16_LOSS_TOLERANCE, LEARNT_NATS, Difference, Matrix
from tests.layouts.layouts import LAYOUTS, STYLES

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_layout_trains_every_style_like_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    matrix = Matrix()
    rows: dict[str, dict[str, tuple[Difference, float]]] = {}
    wrong = []
    try:
        learnt = {style: matrix.learnt(style) for style in STYLES}
        for layout in LAYOUTS:
            for style in layout.styles:
                found = matrix.difference(layout, style)
                bf16 = matrix.difference(layout, style, settings=BF16).loss
                with capsys.disabled():
                    print(f"{layout.name}, {style}: {found}, bf16 {bf16:.1e}", flush=True)
                rows.setdefault(layout.name, {})[style] = found, bf16
                if found.beyond or not bf16 <= BF16_LOSS_TOLERANCE:
                    wrong.append((layout.name, style, found, bf16))
    finally:
        matrix.close()
    assert not wrong
    assert min(learnt.values()) >= LEARNT_NATS
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows, learnt) + END + rest.split(END)[1])


def table(rows: dict[str, dict[str, tuple[Difference, float]]], learnt: dict[str, float]) -> str:
    """One line a layout; for each style gradient, loss, norm, and loss in bf16."""
    titles = [f"{style} (−{nats:.1f} nats)" for style, nats in learnt.items()]
    lines = [f"| layout | ranks | {' | '.join(titles)} |", f"|---|---:|{'---|' * len(titles)}"]
    ranks = {layout.name: layout.ranks for layout in LAYOUTS}
    for name, found in rows.items():
        cells = [_cell(*found[style]) if style in found else "–" for style in learnt]
        lines.append(f"| {name} | {ranks[name]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Difference, bf16: float) -> str:
    return f"{found.gradient:.0e} · {found.loss:.0e} · {found.norm:.0e} · {bf16:.0e}"
