"""A whole run between real peers, as its user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny_run import TINY

from bloomery.cli.chaos import recipe_and_overrides


@pytest.mark.parametrize(
    ("words", "recipe", "overrides"),
    [
        ([], "diloco-internet", ()),
        (["train.steps=8"], "diloco-internet", ("train.steps=8",)),
        (["mine.toml", "train.steps=8"], "mine.toml", ("train.steps=8",)),
    ],
)
def test_a_rehearsal_has_a_recipe_of_its_own(words, recipe, overrides) -> None:
    assert recipe_and_overrides(words) == (recipe, overrides)


@pytest.mark.timeout(900)
def test_two_peers_behind_shaped_links_train_to_the_end_and_leave_nothing(
    corpus: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY)
    command = [sys.executable, "-m", "bloomery", "simulate-internet", str(recipe), f"data.sources={corpus}"]
    command += ["--peers", "2", "--rate", "100mbit", "--rtt", "10ms", "--directory", str(tmp_path / "play")]
    command += ["train.ramp_up=[]", "elastic.inner_steps=3", "train.compile=off", "--minutes", "12", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    told = json.loads(done.stdout)
    assert told["statuses"] == {"peer0": 0, "peer1": 0}
    assert told["consumed"] >= 96 and told["mistakes"] == [] and told["leftover"] == []
    assert told["rounds"] >= 2 and told["peers"] > 1.0
    assert all(to + back > 0 for to, back in told["bytes_between"].values())
