"""Epochs, budgets and sums of tokens of packed documents, whose samples have empty places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bloomery.cli import main
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.sample_layout import layout_of, sample_tokens

RECIPE = """
[run]
name = "packed"
[optim]
learning_rate = 1e-3
[data]
tokenizer = "{tokenizer}"
sequence_length = 8
packing = "{packing}"
mask_documents = true
[train]
global_batch = 10
samples = 1000
[model]
layers = 1
hidden = 16
heads = 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """100 documents of 5 tokens, of which a sample holds one, and 300 of 8."""
    text = RECIPE.replace("{tokenizer}", str(tmp_path / "tokenizer.json"))
    for name, documents, tokens in (("short", 100, 5), ("full", 300, 8)):
        with IndexedWriter(tmp_path / name, dtype="<u2") as writer:
            for number in range(documents):
                writer.add_document(np.full(tokens, number % 500))
        text += f'[[data.datasets]]\nname = "{name}"\npath = "{tmp_path / name}"\n{{{name}}}\n'
    path = tmp_path / "packed.toml"
    path.write_text(text.replace("{full}", "weight = 1.0"))
    return path


def report(recipe: Path, capsys: pytest.CaptureFixture[str], **filled: str) -> dict[str, object]:
    text = recipe.read_text()
    for name, value in filled.items():
        text = text.replace(f"{{{name}}}", value)
    filled_in = recipe.with_name("filled.toml")
    filled_in.write_text(text)
    assert main(["data", "report", str(filled_in), "--json"]) == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return told


def test_an_epoch_of_packed_documents_is_as_many_samples_as_they_fill(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = report(recipe, capsys, packing="documents", short="weight = 1.0")
    short, full = told["datasets"]  # type: ignore[misc]
    assert (short["epochs"], full["epochs"]) == (pytest.approx(500 / 100), pytest.approx(500 / 300))
    assert told["tokens"] == 500 * 5 + 500 * 8
    assert main(["data", "report", str(recipe.with_name("filled.toml"))]) == 0
    assert capsys.readouterr().out.startswith("1,000 samples of at most 8 tokens: 6,500 tokens\n")


def test_a_budget_of_tokens_counts_tokens_of_text(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tokens, samples in ((500, 100), (499, 99), (4, 1)):
        told = report(recipe, capsys, packing="documents", short=f"tokens = {tokens}")
        assert told["datasets"][0]["delivered"] * 1000 == pytest.approx(samples)  # type: ignore[index]


def test_samples_of_windows_are_full(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for packing in ("windows", "shifted"):
        told = report(recipe, capsys, packing=packing, short="tokens = 500")
        short = told["datasets"][0]  # type: ignore[index]
        assert short["epochs"] == pytest.approx(short["delivered"] * 1000 * 8 / 500)
        assert told["tokens"] == 8000
        pair = IndexedDataset(recipe.with_name("short"))
        layout = layout_of(pair, packing, length=8, seed=1, number=0)
        assert sample_tokens(layout, pair.token_count) == 8
