"""The Python API, as its page shows it."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.tiny_run import TINY

import bloomery
from bloomery.config.load import parse_recipe
from bloomery.errors import CheckpointError, ConfigError, StorageError
from bloomery.evaluate.scoring import IGNORED
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every example of the page has been run, in order."""
    path = tmp_path_factory.mktemp("api")
    (path / "notes.txt").write_text(Path(argparse.__file__).read_text()[:40_000])
    known: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
            exec(compile(block, str(PAGE), "exec"), known)
    return path


def test_the_page_runs_as_written_and_names_the_whole_api(place: Path) -> None:
    assert (place / "runs" / "notes" / "checkpoints").is_dir()
    used = set(re.findall(r"bloomery\.(\w+)\(", PAGE.read_text()))
    assert used == {"fit", "journal", "load", "recipe", "samples"}
    assert used < set(dir(bloomery))


def test_importing_the_package_is_quick_and_without_torch_or_numpy() -> None:
    asked = "import sys, bloomery; print(len(sys.modules), {'torch', 'numpy'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert told.endswith("set()\n")
    with pytest.raises(AttributeError):
        bloomery.nothing_of_the_kind  # noqa: B018  — the access is what is tested


def test_the_order_is_that_of_the_training(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)  # the recipe names its text by a relative path
    run, steps = place / "runs" / "notes", bloomery.journal(place / "runs" / "notes")
    samples = bloomery.samples(run)
    recipe = bloomery.recipe(run).recipe
    assert len(samples) * recipe.data.sequence_length >= recipe.train.tokens
    first = [samples[index] for index in range(recipe.train.global_batch)]
    again = bloomery.recipe(run, {"run.name": "again", "train.tokens": 1 * 64 * recipe.train.global_batch})
    tokens = torch.stack([sample["tokens"] for sample in first])
    targets = torch.stack([sample["targets"] for sample in first])
    bloomery.fit(again, place / "again", progress=False)  # the same first step, then a checkpoint
    assert bloomery.journal(place / "again")["loss"][0] == steps["loss"][0]
    untrained = bloomery.recipe(run, {"run.name": "zero", "optim.learning_rate": 1e-30} | _still(recipe))
    bloomery.fit(untrained, place / "zero", progress=False)
    logits = bloomery.load(place / "zero").logits(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    assert float(loss) == pytest.approx(bloomery.journal(place / "zero")["loss"][0], abs=1e-5)
    with pytest.raises(IndexError):
        samples[len(samples)]


def test_the_targets_of_prompts_count_in_no_sample_where_answers_alone_count(tmp_path: Path) -> None:
    records = [{"prompt": f"what comes after the number {n}?", "text": f" {n + 1}."} for n in range(60)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    samples = bloomery.samples(
        parse_recipe(TINY, [f"data.sources={file}", "data.prompt_field=prompt"], label="tiny"), tmp_path
    )
    targets = torch.stack([sample["targets"] for sample in samples.__getitems__(range(4))])
    counted = (targets != IGNORED).float().mean()
    assert 0.0 < counted < 0.5


def _still(recipe: object) -> dict[str, object]:
    """Settings with which one step leaves the weights as they were."""
    return {
        "optim.muon_learning_rate": 1e-30,
        "optim.head_learning_rate": 1e-30,
        "train.precision": "fp32",
        "train.tokens": 64 * recipe.train.global_batch,  # type: ignore[attr-defined]
    }


def test_a_journal_is_the_loss_curve_and_ids_give_the_logits_of_their_text(place: Path) -> None:
    run = place / "runs" / "notes"
    table = bloomery.journal(str(run))
    assert list(zip(table["step"], table["loss"], strict=True)) == loss_curve(RunDirectory(run))
    model = bloomery.load(run)
    ids = model.tokenizer.encode("import os")
    torch.testing.assert_close(model.logits(ids), model.logits("import os"))
    torch.testing.assert_close(model.logits(torch.tensor([ids, ids]))[1], model.logits(ids))
    assert bloomery.load(model.checkpoint).generate("x", max_tokens=5, seed=3) == model.generate(
        "x", max_tokens=5, seed=3
    )


def test_what_is_not_there_is_refused_as_by_the_commands(tmp_path: Path) -> None:
    for call, error in (
        (lambda: bloomery.load(tmp_path), CheckpointError),
        (lambda: bloomery.journal(tmp_path), StorageError),
        (lambda: bloomery.recipe("demo", {"train.stps": 1}), ConfigError),
        (lambda: bloomery.samples(bloomery.recipe("demo")), StorageError),
    ):
        with pytest.raises(error):
            call()


def test_a_recipe_of_peers_is_not_trained_alone(tmp_path: Path) -> None:
    loaded = bloomery.recipe("demo", {"elastic.inner_steps": 10, "data.sources": ["python:stdlib"]})
    with pytest.raises(ConfigError, match="each peer needs an agent"):
        bloomery.fit(loaded, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
