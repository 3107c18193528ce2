"""From a Hugging Face directory to a run, to text, and back: the commands a user would type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from bloomery.checkpoint import huggingface
from bloomery.checkpoint.load import read_model
from bloomery.checkpoint.save import save_checkpoint
from bloomery.checkpoint.state import whole
from bloomery.cli import ckpt_export, generate
from bloomery.config.model import ModelSection
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import CheckpointError
from bloomery.evaluate.saved import open_saved
from bloomery.model.decoder import build, logical_parameters
from bloomery.model.init import initialise

EOD = "<|endoftext|>"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["def main():\n    return 1\n"] * 20, vocabulary=270, end_of_document=EOD)
    tokenizer.save(directory / "tokenizer.json")
    section = ModelSection(layers=1, hidden=16, heads=2, ffn=24, init_std=0.3)
    decoder = build(section, vocabulary=tokenizer.vocabulary_size, sequence_length=32)
    initialise(decoder, seed=2)
    tensors = sorted((logical.name, logical.tensor) for logical in logical_parameters(decoder))
    entries = [whole(f"model.{name}", tensor) for name, tensor in tensors]
    checkpoint = save_checkpoint(directory / "checkpoints", entries, step=0, incarnation=1)
    huggingface.export(
        decoder.model,
        checkpoint,
        directory / "hf",
        tokenizer=directory / "tokenizer.json",
        end_of_document=EOD,
    )
    return directory / "hf"


@pytest.fixture
def run(exported: Path, tmp_path: Path) -> Path:
    assert ckpt_export.import_([str(exported), "--to", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def test_import_then_export_gives_the_same_weights(run: Path, exported: Path, tmp_path: Path) -> None:
    assert ckpt_export.export([str(run), str(tmp_path / "again")]) == 0
    one, other = (load_file(path / "model.safetensors") for path in (exported, tmp_path / "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_dcp_checkpoint_becomes_a_run_by_its_recipe(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = open_saved(run)
    dcp.save(dict(read_model(saved.checkpoint)), checkpoint_id=tmp_path / "dcp", no_dist=True)
    command = [str(tmp_path / "dcp"), str(tmp_path / "again")]
    with pytest.raises(CheckpointError, match="--recipe RECIPE"):
        ckpt_export.import_(command)
    named = ["--recipe", str(run / "recipe.toml"), "--tokenizer", str(exported / "tokenizer.json")]
    assert ckpt_export.import_([*command, *named]) == 0
    again = open_saved(tmp_path / "again")
    one, other = (dict(read_model(path)) for path in (saved.checkpoint, again.checkpoint))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_transformers_finds_the_tokenizer_and_its_end_of_document(exported: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported, local_files_only=True)
    assert tokenizer.eos_token == EOD
    assert tokenizer.decode(tokenizer("def main(): é").input_ids) == "def main(): é"
    config = json.loads((exported / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_a_run_and_its_checkpoint_write_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for path in (run, open_saved(run).checkpoint):
        capsys.readouterr()
        assert generate.run([str(path), "def", "--max-tokens", "9", "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["text"] == told[1]["text"]
    assert 0 < told[0]["tokens"] <= 9
    assert generate.run([str(run), "--prompt", "def", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "def" + told[0]["text"] + "\n"


def test_a_path_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run directory nor a checkpoint"):
        open_saved(tmp_path)
