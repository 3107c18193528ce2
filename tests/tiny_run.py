"""A run small enough for a test, on real text."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.config.load import LoadedRecipe, parse_recipe

TINY = """
[run]
name = "tiny"
[model]
layers = 2
hidden = 32
heads = 2
tied = true
hidden_dropout = 0.1
[data]
sequence_length = 32
tokenizer_vocabulary = 300
held_out_every = 3
[train]
samples = 96
global_batch = 8
micro_batch = 2
precision = "fp32"
ramp_up = [4, 4, 24]
[optim]
name = "muon"
learning_rate = 1e-2
[schedule]
shape = "cosine"
warmup = 16
[loss]
z_loss = 1e-4
[checkpoint]
every_steps = 5
[evaluate]
every_steps = 5
samples = 8
[log]
tensorboard = false
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few real documents."""
    directory = tmp_path_factory.mktemp("corpus")
    library = Path(argparse.__file__).parent
    for name in ("argparse", "ast", "bdb", "calendar", "cmd", "code", "dis", "glob"):
        shutil.copy(library / f"{name}.py", directory / f"{name}.txt")
    return directory


@pytest.fixture(scope="session")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as a run's data directory, made once."""
    from bloomery.data.prepare import prepare

    directory = tmp_path_factory.mktemp("prepared")
    loaded = parse_recipe(TINY, [f"data.sources={corpus}"], label="tiny")
    prepare(loaded.recipe.data, directory)
    return directory


@pytest.fixture
def start(corpus: Path, prepared: Path, tmp_path: Path) -> Callable[..., tuple[LoadedRecipe, Path]]:
    """A recipe with overrides, and its run directory with the data in place."""

    def begin(*overrides: str, name: str = "tiny") -> tuple[LoadedRecipe, Path]:
        path = tmp_path / name
        if not path.exists():
            shutil.copytree(prepared, path / "data")
        loaded = parse_recipe(TINY, [f"data.sources={corpus}", *overrides], label="tiny")
        return loaded, path

    return begin


@pytest.fixture
def train_command(corpus: Path, prepared: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The arguments of `bloomery` that train the tiny recipe in a run directory with its data in place."""
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY.replace("[data]", f"[data]\nsources = ['{corpus}']"))

    def arguments(*more: str, run: str = "run") -> list[str]:
        path = tmp_path / run
        if not path.exists():
            shutil.copytree(prepared, path / "data")
        return ["train", str(recipe), "--run", str(path), *more]

    return arguments
