"""All ordered pairs of layouts, bit for bit; then a state of a gigabyte, and the bytes that are read of it.

Writes the table of docs/layouts.md where BLOOMERY_WRITE_DOCS is set.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from tests.checkpoint.layout_maps import LAYOUTS, Layout, Shape
from tests.checkpoint.resharding import bytes_of_reading, loaded_everywhere, saved_by

SMALL = Shape(hidden=16, inner=44, layers=5, vocabulary=52, key_rows=4)
LARGE = Shape(hidden=1024, inner=2816, layers=5, vocabulary=32_768, key_rows=256)
PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
HEADING = "## Checkpoints between layouts"
END = "<!-- end of what `make soak PART=reshard` writes -->"


def state_bytes(shape: Shape) -> int:
    return 3 * 4 * sum(torch.Size(size).numel() for size in shape.tensors().values())


@pytest.mark.slow
def test_every_layout_loads_what_every_layout_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    begun, wrong = time.monotonic(), {}
    for number, before in enumerate(LAYOUTS):
        directory, state = saved_by(SMALL, before, tmp_path / str(number), seed=number)
        for after in LAYOUTS:
            differences, _ = loaded_everywhere(SMALL, after, directory, state)
            if differences:
                wrong[f"{before} → {after}"] = differences[:3]
    figures = {"pairs": len(LAYOUTS) ** 2, "wrong": wrong, "seconds": round(time.monotonic() - begun, 1)}
    with capsys.disabled():
        print(json.dumps(figures))
    assert not wrong


@pytest.mark.slow
def test_a_gigabyte_is_read_once_by_each_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Sixteen pairs (each BLOOMERY_SOAK_STRIDE-th) really written and read, and all 256 by arithmetic."""
    needed = state_bytes(LARGE)
    assert needed >= 1e9
    rows = []
    pairs = [(number, before, LAYOUTS[number * 5 % 16 - 1]) for number, before in enumerate(LAYOUTS)]
    for number, before, after in pairs[:: int(os.environ.get("BLOOMERY_SOAK_STRIDE", "1"))]:
        directory, state = saved_by(LARGE, before, tmp_path, seed=number)
        differences, read = loaded_everywhere(LARGE, after, directory, state)
        shutil.rmtree(directory)
        rows.append((before, after, read / needed))
        with capsys.disabled():
            print(json.dumps({"from": str(before), "into": str(after), "read / needed": read / needed}))
        assert not differences and read <= 1.1 * needed
    planned = [bytes_of_reading(LARGE, before, after) / needed for before in LAYOUTS for after in LAYOUTS]
    with capsys.disabled():
        print(json.dumps({"planned": len(planned), "largest read / needed": max(planned)}))
    assert max(planned) <= 1.1
    if os.environ.get("BLOOMERY_WRITE_DOCS"):
        _write(_section(rows, needed, max(planned)))


def _section(rows: list[tuple[Layout, Layout, float]], needed: int, most: float) -> str:
    ranks = ", ".join(f"{layout} ({layout.world})" for layout in LAYOUTS)
    table = "\n".join(f"| {before} | {after} | yes | {ratio:.3f} |" for before, after, ratio in rows)
    return f"""{HEADING}

A checkpoint holds logical tensors, so any layout loads what any other saved; there is no conversion.
Verified with a Llama-like model (grouped queries, stages of different sizes, an embedding tied across the
first and the last) and its two Adam moments, in fp32. All {len(LAYOUTS) ** 2} ordered pairs of these layouts
(ranks in parentheses) are equal bit for bit: {ranks}.

With a state of {needed / 1e9:.2f} GB: the bytes read by all ranks together over the bytes of the state, which
count once however many ranks hold them (bar: 1.1; by arithmetic over all pairs at most {most:.3f}).

| saved by | loaded by | equal | read / needed |
|---|---|---|---|
{table}

{END}
"""


def _write(section: str) -> None:
    text = PAGE.read_text() if PAGE.exists() else "# Layouts\n"
    if HEADING in text:
        before, rest = text.split(HEADING, 1)
        text = before.rstrip() + "\n\n" + section + rest.split(END, 1)[-1].lstrip("\n")
    else:
        text = text.rstrip() + "\n\n" + section
    PAGE.write_text(text)
