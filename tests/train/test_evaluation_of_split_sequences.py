"""Evaluations where tensor-parallel ranks share each sequence: windows of every length are split evenly."""

from __future__ import annotations

from pathlib import Path

from tests.train.real_ranks import train_on_ranks
from tests.train.test_loop import events

LENGTH = 56
"""Two ranks split it, and not its eighth, to which the windows of short documents are padded."""


def test_short_held_out_documents_are_split_over_the_ranks_of_a_sequence(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(120):
        (texts / f"{number}.txt").write_text("".join(str(digit) for digit in range(number)))
    layout = ("parallel.tensor=2", "parallel.sequence=true", f"data.sequence_length={LENGTH}")
    short = ("train.samples=16", "train.ramp_up=[]", "evaluate.samples=64", "evaluate.every_steps=1")
    path = tmp_path / "run"
    ends = train_on_ranks(2, path, f"data.sources={texts}", "optim.name=adamw", *layout, *short)
    assert ends == ["the samples are done"] * 2
    assert all(step["held_out_loss"] > 0.0 for step in events(path, "step"))
