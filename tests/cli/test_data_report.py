"""`bloomery data report` on a mixture of small datasets, against counting the samples of the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bloomery.cli import main
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.order import Order

RECIPE = """
[run]
name = "mixed"
[model]
layers = 1
hidden = 32
heads = 2
[data]
sequence_length = 8
tokenizer = "tokenizer.json"
order = "{order}"
[train]
samples = 1000
global_batch = 10
[optim]
name = "adamw"
learning_rate = 1e-3
[schedule]
warmup = 10
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    text, draw = RECIPE, np.random.default_rng(2)
    for number, (tokens, weight) in enumerate([(4000, 5), (900, 3), (9000, 2)]):
        with IndexedWriter(tmp_path / f"d{number}", dtype="<u2") as writer:
            for size in np.full(tokens // 20, 20):
                writer.add_document(draw.integers(0, 500, size))
        text += f'[[data.datasets]]\nname = "a-long-name-{"x" * 40}-{number}"\nweight = {weight}.0\n'
        text += f'path = "{tmp_path}/d{number}"\ngroup = "{"code" if number else "text"}"\n'
    path = tmp_path / "mixed.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("order", ["bloomery", "megatron"])
def test_the_report_says_what_the_run_will_take(
    recipe: Path, order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(recipe.read_text().replace("{order}", order))
    assert main(["data", "report", str(recipe), "--json", "--png", str(tmp_path / "shares.png")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["samples"], told["tokens"]) == (1000, 8000)
    rows = told["datasets"]
    assert [row["tokens"] for row in rows] == [4000, 900, 9000]
    assert [row["wanted"] for row in rows] == pytest.approx([0.5, 0.3, 0.2])
    if order == "bloomery":
        windows = [IndexedDataset(tmp_path / f"d{number}").window_count(8) for number in range(3)]
        which, _ = Order(windows, [5.0, 3.0, 2.0], 1234).locate((range(1000),))
        counts = np.bincount(which) / 1000
        assert [row["delivered"] for row in rows] == pytest.approx(counts, abs=0.05)  # another seed
    assert sum(row["delivered"] for row in rows) == pytest.approx(1.0)
    for row in rows:
        assert row["epochs"] == pytest.approx(row["delivered"] * 8000 / row["tokens"])
    ends = [row["first_epoch_step"] for row in rows]
    assert ends[2] is None and 30 < ends[1] <= 45 and 90 < (ends[0] or 100) <= 100
    (code, text) = sorted(told["groups"], key=lambda row: row["name"])
    assert (code["tokens"], text["tokens"]) == (9900, 4000)
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_fits_a_terminal(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text().replace("{order}", "bloomery"))
    assert main(["data", "report", str(recipe), "train.samples=2000000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("first epoch ends" in line for line in lines) and any("code" in line for line in lines)


def test_text_that_is_not_tokenised_yet_cannot_be_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "report", "demo"]) == 1
    assert "not tokenised yet" in capsys.readouterr().err
