"""Prompts that are longer than a sequence: windows and global batches of which no token counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiny_run import TINY
from tests.train.test_loop import events, go

from bloomery.config.load import parse_recipe


def test_a_run_goes_on_without_a_held_out_loss_where_no_answer_is_held_out_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pairs.jsonl"
    records = [{"prompt": f"{n} and {n} are? " * 60, "text": f" {2 * n}."} for n in range(12)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = ("data.prompt_field=prompt", "data.held_out_every=3", "evaluate.samples=1")
    evaluations = ("evaluate.every_steps=2", "evaluate.at_end=true")
    short = ("train.samples=32", "train.ramp_up=[]", "train.global_batch=4")
    loaded = parse_recipe(TINY, [f"data.sources={file}", *settings, *evaluations, *short], label="tiny")
    outcome = go(loaded, tmp_path / "run")
    assert outcome.finished, outcome
    steps = events(tmp_path / "run", "step")
    assert len(steps) == 8 and all(step["held_out_loss"] is None for step in steps)
    assert caplog.text.count("no loss of 'held-out' is measured: the windows") == 1
    without = [step for step in steps if step["loss"] == 0.0]
    assert without and any(step["loss"] > 0.0 for step in steps)
    made = [(step["gradient_norm"], step["update_applied"]) for step in without]
    assert made == [(0.0, True)] * len(without), "momentum and weight decay go on, and no guard is concerned"
    assert caplog.text.count("are all prompt: no token of their step counts") == 1
