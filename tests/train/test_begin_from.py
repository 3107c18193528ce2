"""Runs that begin with weights that are there already: their first loss is that of who wrote the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.tiny_run import TINY
from tests.train.real_ranks import train_on_ranks

from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.cli import main
from bloomery.config.begin_from import DescribedWeights, take_described
from bloomery.config.load import LoadedRecipe, parse_recipe
from bloomery.config.validate import check_recipe
from bloomery.data.indexed import IndexedDataset
from bloomery.data.prepare import prepare
from bloomery.errors import CheckpointError, ConfigError
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.described_weights import described_weights
from bloomery.interchange.huggingface import import_
from bloomery.interchange.initial_weights import load_initial_weights
from bloomery.interchange.weight_files import write_checksums
from bloomery.train.loop import train
from bloomery.train.settings import StartOptions

LENGTH, VOCABULARY = 32, 300
BEGUN = """
[run]
name = "begun"
[data]
sequence_length = 32
held_out_every = 0
[train]
steps = 1
global_batch = 1
precision = "fp32"
compile = "off"
[optim]
learning_rate = 1e-4
[schedule]
shape = "constant"
[log]
tensorboard = false
"""


def save(model: transformers.PreTrainedModel, directory: Path, prepared: Path) -> Path:
    """A transformers directory of a random model with the tokenizer of the tiny run."""
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes((prepared / "tokenizer.json").read_bytes())
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return directory


def llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY + 4,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
    )


def gpt2() -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=LENGTH,
            initializer_range=0.2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def bloom() -> transformers.PreTrainedModel:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2
        )
    )


def qwen3() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
    )


@pytest.fixture
def text(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text((corpus / "glob.txt").read_text()[:6000])
    return path


def begun(text: Path, *overrides: str) -> LoadedRecipe:
    loaded = parse_recipe(
        BEGUN, [f"data.sources={text}", *overrides], label="begun", describe=described_weights
    )
    check_recipe(loaded.recipe, loaded.sources)  # as `bloomery train` does
    return loaded


def go(loaded: LoadedRecipe, path: Path, say: Callable[[str], None] = lambda line: None) -> float:
    """Train, and return the first step's loss."""
    assert train(loaded, RunDirectory(path), StartOptions(say=say)).finished
    return loss_curve(RunDirectory(path))[0][1]


def windows(path: Path) -> torch.Tensor:
    """Every sample of a run's training tokens: [samples, LENGTH + 1]."""
    tokens = np.asarray(IndexedDataset(path / "data" / "train").flat)
    count = (len(tokens) - 1) // LENGTH
    return torch.tensor(
        np.stack([tokens[k * LENGTH : (k + 1) * LENGTH + 1] for k in range(count)]).astype(np.int64)
    )


@pytest.mark.parametrize("make", [llama, gpt2, bloom, qwen3])
def test_the_first_loss_is_that_of_transformers(
    make: Callable[[], transformers.PreTrainedModel], text: Path, prepared: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = make().eval()
    origin = save(model, tmp_path / "origin", prepared)
    prepare(begun(text, f"init.from={origin}").recipe.data, tmp_path / "run" / "data")
    samples = windows(tmp_path / "run")
    loss = go(begun(text, f"init.from={origin}", f"train.global_batch={len(samples)}"), tmp_path / "run")
    with torch.no_grad():
        logits = model(samples[:, :-1]).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
    assert abs(loss - float(theirs)) < 1e-4
    assert float(theirs) > 5.5  # not what a model that was trained or drawn small gives


def test_the_loss_of_answers_alone_is_that_of_transformers(prepared: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = llama().eval()
    origin = save(model, tmp_path / "origin", prepared)
    records = [{"prompt": f"def f{n}(x):", "text": f" return {n} * x\n"} for n in range(24)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = (f"init.from={origin}", "data.prompt_field=prompt")
    prepare(begun(file, *settings).recipe.data, tmp_path / "run" / "data")
    samples = windows(tmp_path / "run")
    loss = go(begun(file, *settings, f"train.global_batch={len(samples)}"), tmp_path / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(origin)
    counts = list[bool]()  # of each token of the stream, which holds the records in their order
    for record in records:
        counts += [False] * len(tokenizer.encode(record["prompt"]))
        counts += [True] * (len(tokenizer.encode(record["text"])) + 1)
    kept = torch.tensor(counts[1 : samples[:, 1:].numel() + 1]).view_as(samples[:, 1:])
    with torch.no_grad():
        logits = model(samples[:, :-1]).logits
    theirs = torch.nn.functional.cross_entropy(logits[kept], samples[:, 1:][kept])
    assert abs(loss - float(theirs)) < 1e-4


def test_each_layout_begins_with_the_same_weights(text: Path, prepared: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    origin = save(gpt2(), tmp_path / "origin", prepared)
    batch = f"train.global_batch={4}"
    alone = go(begun(text, f"init.from={origin}", batch), tmp_path / "alone")
    recipe = BEGUN + "".join(
        f"{name} = {json.dumps(value)}\n" if not name.startswith("[") else f"{name}\n"
        for name, value in _model_of(origin)
    )
    split = ("parallel.tensor=2", "parallel.zero=1", f"data.sources={text}", f"init.from={origin}", batch)
    tokenizer = (f"data.tokenizer={origin}", "parallel.data=1")
    assert set(train_on_ranks(2, tmp_path / "split", *split, *tokenizer, recipe=recipe)) == {
        "the samples are done"
    }
    assert loss_curve(RunDirectory(tmp_path / "split"))[0][1] == pytest.approx(alone, abs=1e-5)


def _model_of(origin: Path) -> list[tuple[str, object]]:
    return [("[model]", None), *list(described_weights(str(origin)))[-1].model.items()]


def test_a_run_begins_with_the_weights_of_a_run_and_forgets_its_optimizer(
    text: Path, prepared: Path, tmp_path: Path
) -> None:
    origin = save(llama(), tmp_path / "origin", prepared)
    first = go(begun(text, f"init.from={origin}", "train.steps=3"), tmp_path / "first")
    told: list[str] = []
    again = go(
        begun(text, f"init.from={tmp_path / 'first'}", "train.steps=1"), tmp_path / "second", told.append
    )
    assert again < first
    assert any("step-000003" in line and "begin anew" in line for line in told)
    kept = (tmp_path / "second" / "recipe.toml").read_text()
    assert "hidden = 32" in kept and f'from = "{tmp_path / "first"}"' in kept


def test_an_imported_run_brings_a_recipe_that_trains_on(
    text: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = save(llama(), tmp_path / "origin", prepared)
    assert main(["ckpt", "import", str(origin), str(tmp_path / "imported")]) == 0
    recipe = tmp_path / "imported" / "continue.toml"
    assert f"bloomery train {recipe}" in capsys.readouterr().out
    loaded = parse_recipe(
        recipe.read_text(),
        [f"data.sources={text}", "train.steps=1", "schedule.warmup=0", "data.held_out_every=0"],
        label="continue",
        describe=described_weights,
    )
    check_recipe(loaded.recipe, loaded.sources)
    go(loaded, tmp_path / "run")
    assert loaded.recipe.model.hidden == 32 and loaded.recipe.model.vocabulary == VOCABULARY + 4


def test_a_model_of_another_shape_is_refused_by_name(text: Path, prepared: Path, tmp_path: Path) -> None:
    origin = save(llama(), tmp_path / "origin", prepared)
    with pytest.raises(ConfigError) as refused:
        parse_recipe(TINY, [f"init.from={origin}"], label="tiny", describe=described_weights)
    keys = {mistake.key for mistake in refused.value.mistakes}
    assert {"model.heads", "model.tied"} <= keys and "model.hidden" not in keys
    assert str(origin) in refused.value.message
    with pytest.raises(ConfigError, match="other ids"):
        begun(text, f"init.from={origin}", "data.tokenizer=train")
    with pytest.raises(ConfigError, match="no such directory"):
        begun(text, "init.from=/nowhere")
    with pytest.raises(ConfigError, match="neither a run nor a checkpoint"):
        begun(text, f"init.from={text.parent}")


def test_what_differs_on_purpose_is_told(text: Path) -> None:
    weights = DescribedWeights(
        place="there",
        model={
            "layers": 1,
            "hidden": 8,
            "heads": 1,
            "position": "rotary",
            "rope_theta": 1e4,
            "init_std": 0.02,
        },
        tokenizer="there/tokenizer.json",
        end_of_document="</s>",
    )
    loaded = parse_recipe(
        BEGUN,
        ["init.from=there", "model.rope_theta=5e5", "model.init_std=0.3"],
        label="begun",
        describe=lambda place: iter([weights]),
    )
    assert loaded.notes == ("model.rope_theta is 500000.0; the weights in there had 10000.0",)
    assert loaded.recipe.model.rope_theta == 5e5 and loaded.recipe.model.init_std == 0.3
    assert loaded.recipe.data.end_of_document_token == "</s>"
    assert loaded.sources["model.layers"] == "there"


@pytest.mark.parametrize(("position", "is_refused"), [("learned", True), ("rotary", False)])
def test_another_table_of_learned_positions_contradicts_the_weights(position: str, is_refused: bool) -> None:
    model = {"layers": 1, "hidden": 8, "heads": 1, "position": position, "max_positions": 64}
    weights = DescribedWeights(
        place="there", model=model, tokenizer="there/tokenizer.json", end_of_document=""
    )
    raw = {"model": {"max_positions": 128}}
    wrongs, _ = take_described(raw, {}, iter([weights]))
    assert [wrong.key for wrong in wrongs] == (["model.max_positions"] if is_refused else [])
    assert raw["model"]["max_positions"] == 128


def test_a_missing_source_and_a_wrong_setting_are_noticed_without_torch(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(llama().config.to_json_string(use_diff=False))
    (weights / "tokenizer.json").touch()
    contradicts = f"init.from={weights} data.tokenizer={weights} model.hidden=48"
    wrongs = ("data.sources=/nowhere.txt", "train.stps=3", "init.from=/nowhere optim.rate=1", contradicts)
    for wrong in wrongs:
        command = f"""
import sys
from bloomery.cli import main
status = main(["train", "demo", *{wrong.split()!r}])
assert status != 0
print("torch" in sys.modules)
"""
        done = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=60
        )
        assert done.stdout == "False\n", (wrong, done.stderr)


def test_import_still_reads_what_matches(prepared: Path, tmp_path: Path) -> None:
    origin = save(gpt2(), tmp_path / "origin", prepared)
    tensors = dict(import_(origin).tensors)
    assert tensors["blocks.1.attention.value.weight"].shape == (32, 32)


def test_weights_that_were_damaged_on_their_way_are_refused_by_their_checksum(
    prepared: Path, tmp_path: Path
) -> None:
    origin = save(llama(), tmp_path / "origin", prepared)
    write_checksums(origin, known={})
    model = import_(origin).resolved
    load_initial_weights(str(origin), (), model=model, ranks=Ranks())
    weights = origin / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="its checksum differs"):
        load_initial_weights(str(origin), (), model=model, ranks=Ranks())
