"""From a Hugging Face directory to a run, to text, and back: the commands a user would type."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.load.loader import read_model
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import ckpt_export, generate, main
from bloomery.config.load import load_recipe
from bloomery.config.model import ModelSection
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import CheckpointError, ConfigError, DataError
from bloomery.evaluate.open_checkpoint import blocks_from_file, open_saved
from bloomery.interchange import huggingface
from bloomery.interchange.weight_files import CHECKSUMS
from bloomery.model.decoder import build
from bloomery.model.initial_filling import initialise
from bloomery.model.logical_parameters import logical_parameters

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


def test_an_imported_run_has_the_name_of_its_directory_and_says_where_it_came_from(
    run: Path, exported: Path
) -> None:
    recipe = load_recipe(str(run / "recipe.toml")).recipe
    assert (recipe.run.name, recipe.run.notes) == ("run", f"imported from {exported}")
    assert recipe.data.end_of_document_token == EOD
    record = json.loads((run / "incarnations" / "000001.json").read_text())
    assert record["reason"] == f"imported from {exported}"
    continued = tomllib.loads((run / ckpt_export.CONTINUE).read_text())
    assert (continued["run"]["name"], continued["init"]["from"]) == ("run-continued", str(run))
    assert continued["data"] == {"sequence_length": recipe.data.sequence_length}


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


def test_where_the_newest_checkpoint_is_damaged_fallback_takes_the_newest_intact_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = open_saved(run)
    entries = [whole(f"model.{name}", tensor) for name, tensor in read_model(saved.checkpoint)]
    newest = save_checkpoint(saved.checkpoint.parent, entries, step=5, incarnation=1)
    assert open_saved(run).checkpoint == open_saved(run, fallback=True).checkpoint == newest
    data = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    command = ["generate", str(run), "def", "--max-tokens", "3", "--json"]
    assert main(command) == 1
    assert "--fallback" in capsys.readouterr().err
    assert main([*command, "--fallback"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(saved.checkpoint)
    assert main(["ckpt", "export", str(run), str(tmp_path / "again"), "--fallback"]) == 0
    content = bytearray((saved.checkpoint / data.name).read_bytes())
    content[-5] ^= 1
    (saved.checkpoint / data.name).write_bytes(content)
    capsys.readouterr()
    assert main([*command, "--fallback"]) == 1
    assert "No checkpoint of" in capsys.readouterr().err


def test_a_prompt_that_is_not_utf8_or_longer_than_what_was_trained_is_told(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "caf\udce9"]) == 2
    assert "not UTF-8: its character 4 is the byte 0xe9" in capsys.readouterr().err
    limit = open_saved(run).model.max_positions
    assert main(["generate", str(run), "def " * limit, "--max-tokens", "1", "--json"]) == 0
    assert f"trained with {limit:,} at a time" in capsys.readouterr().err
    assert main(["generate", str(run), "def", "--max-tokens", "1", "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", [b"", b"[]", b'{"eos_token": 5}', b"{}", b"\xff"])
def test_an_import_with_a_broken_tokenizer_config_is_refused_and_leaves_nothing(
    content: bytes, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "hf")
    (tmp_path / "hf" / CHECKSUMS).unlink()
    (tmp_path / "hf" / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ckpt_export.import_([str(tmp_path / "hf"), "--to", str(tmp_path / "run")])
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_at_import(
    exported: Path, tmp_path: Path
) -> None:
    bigger = train_tokenizer(["def main():\n    return 1\n"] * 20, vocabulary=275, end_of_document=EOD)
    bigger.save(tmp_path / "tokenizer.json")
    command = [str(exported), "--tokenizer", str(tmp_path / "tokenizer.json"), "--to", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match="the tokenizer has 27"):
        ckpt_export.import_(command)


def test_a_path_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run directory nor a checkpoint"):
        open_saved(tmp_path)


@pytest.mark.parametrize(
    ("named", "told"),
    [("train", "no longer holds the tokenizer"), ("runs/tiny", "no such file or directory")],
)
def test_a_deleted_tokenizer_is_told_and_nobody_elsewhere_is_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch, named: str, told: str
) -> None:
    monkeypatch.setattr("bloomery.data.tokenizer._cached", lambda name: pytest.fail(f"{name} was looked up"))
    monkeypatch.setattr("bloomery.data.tokenizer._fetched", lambda name: pytest.fail(f"{name} was fetched"))
    recipe = (run / "recipe.toml").read_text()
    lines = [
        f'tokenizer = "{named}"' if one.startswith("tokenizer =") else one for one in recipe.splitlines()
    ]
    (run / "recipe.toml").write_text("\n".join(lines))
    (run / "data" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=told):
        open_saved(run)


@pytest.mark.parametrize(
    ("option", "accepted", "refused"),
    [
        ("--max-tokens", "1", "0"),
        ("--temperature", "0", "-0.1"),
        ("--top-k", "0", "-1"),
        ("--top-p", "1", "1.01"),
        ("--top-p", "0.01", "0"),
        ("--seed", "0", "-1"),
    ],
)
def test_numbers_out_of_range_are_refused_before_the_model_is_looked_for(
    option: str, accepted: str, refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="neither a run directory nor a checkpoint"):
        generate.run([str(tmp_path), "def", option, accepted])
    with pytest.raises(SystemExit):
        generate.run([str(tmp_path), "def", f"{option}={refused}"])
    assert option in capsys.readouterr().err


def test_several_prompts_give_each_text_as_alone_also_layer_by_layer_and_from_a_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["def", "return 1", "d"]
    alone = []
    for seed, prompt in enumerate(prompts):
        capsys.readouterr()
        words = [str(run), prompt, "--max-tokens", "9", "--json", "--seed", str(seed)]
        assert generate.run(words) == 0
        alone.append(json.loads(capsys.readouterr().out))
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    for words in (
        prompts,
        [*prompts, "--by-layer"],
        [*prompts, "--batch", "2"],
        ["--prompts", str(tmp_path / "prompts.txt")],
    ):
        assert generate.run([str(run), *words, "--max-tokens", "9", "--json"]) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(each["prompt"], each["text"]) for each in told] == [
            (each["prompt"], each["text"]) for each in alone
        ]
    assert generate.run([str(run), *prompts, "--max-tokens", "9", "--dtype", "bf16"]) == 0


def test_layer_by_layer_only_one_block_has_weights_and_only_while_it_computes(
    tmp_path: Path,
) -> None:
    section = ModelSection(layers=3, hidden=16, heads=2, ffn=24, init_std=0.3)
    whole_one = build(section, vocabulary=270, sequence_length=32)
    initialise(whole_one, seed=2)
    tensors = sorted((logical.name, logical.tensor) for logical in logical_parameters(whole_one))
    entries = [whole(f"model.{name}", tensor) for name, tensor in tensors]
    checkpoint = save_checkpoint(tmp_path / "checkpoints", entries, step=0, incarnation=1)
    decoder = blocks_from_file(whole_one.model, checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    held = []
    for block in decoder.blocks:
        block.mlp.register_forward_hook(
            lambda *unused: held.append([next(each.parameters()).is_meta for each in decoder.blocks])
        )
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        assert torch.equal(decoder(tokens), whole_one(tokens))
        assert torch.equal(decoder(tokens), whole_one(tokens))  # and can do it again
    assert held == [[number != at for number in range(3)] for at in (0, 1, 2)] * 2


def test_prompts_that_are_not_utf8_or_too_long_are_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_bytes(b"def\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"prompts\.txt is not UTF-8 in line 2"):
        generate.run([str(run), "--prompts", str(tmp_path / "prompts.txt")])
    with pytest.raises(DataError, match="Cannot read the prompts"):
        generate.run([str(run), "--prompts", str(tmp_path / "missing.txt")])
    assert generate.run([str(run), "def main " * 20, "--max-tokens", "2"]) == 0
    assert "was trained with 32 at a time" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="has no chat template"):
        generate.run([str(run), "def", "--chat"])
