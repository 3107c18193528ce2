"""A whole run between real peers, as its user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import TINY

from bloomery.chaos.faults import schedule
from bloomery.chaos.scenario import peer_names
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
    told, _ = played("simulate-internet", corpus=corpus, directory=tmp_path)
    assert told["rounds"] >= 2 and told["peers"] > 1.0 and told["faults"] == []


@pytest.mark.timeout(900)
def test_the_faults_of_a_schedule_are_injected_in_their_order_and_each_is_told(
    corpus: Path, tmp_path: Path
) -> None:
    words = ["chaos", "--faults", "4", "--kinds", "slow,cut,sever", "--seed", "3", "--gap", "0.3"]
    told, said = played(*words, "--longest", "0.5", corpus=corpus, directory=tmp_path)
    kinds = ("slow", "cut", "sever")
    due = schedule(seed=3, peers=peer_names(2), faults=4, mean_gap_s=0.3, longest_s=0.5, kinds=kinds)
    assert [(fault["kind"], fault["peer"]) for fault in told["faults"]] == [(it.kind, it.peer) for it in due]
    assert all(fault["done"] for fault in told["faults"])
    assert [line for line in said.splitlines() if str(due[-1]) in line]
    for (earlier, later), fault in zip(pairwise(told["faults"]), due[1:], strict=True):
        assert later["at_s"] - earlier["at_s"] > fault.after_s - 1e-6


def played(*words: str, corpus: Path, directory: Path) -> tuple[dict[str, Any], str]:
    """What a scenario of two peers came to, and what it said meanwhile; it has ended well."""
    recipe = directory / "tiny.toml"
    recipe.write_text(TINY)
    command = [sys.executable, "-m", "bloomery", *words, str(recipe), f"data.sources={corpus}"]
    command += ["--peers", "2", "--rate", "100mbit", "--rtt", "10ms", "--directory", str(directory / "play")]
    command += ["train.ramp_up=[]", "elastic.inner_steps=3", "train.compile=off", "--minutes", "12", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    told = json.loads(done.stdout)
    assert told["statuses"] == {"peer0": 0, "peer1": 0}
    assert told["consumed"] >= 96 and told["mistakes"] == [] and told["leftover"] == []
    assert all(to + back > 0 for to, back in told["bytes_between"].values())
    return told, done.stderr
