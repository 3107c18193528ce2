"""Whole models of others: which names they have, what of them counts, and what `init.from` says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.begin_from import DescribedWeights
from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError, ConfigError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange import described_weights as described_module
from bloomery.interchange import tensor_matching
from bloomery.interchange.described_weights import _numbers, described_weights
from bloomery.interchange.families import FAMILIES, hf_config, hf_tensors
from bloomery.interchange.families.family import stored_shape
from bloomery.interchange.huggingface import import_, open_model
from bloomery.interchange.tensor_matching import read_foreign, split_parts
from bloomery.model.shape import logical_shapes, resolve

GPT2 = ModelSection(
    layers=1, hidden=8, heads=2, ffn=8, norm="layernorm", position="learned", activation="gelu", bias=True
)
Lazy = dict[str, Callable[[], torch.Tensor]]


def theirs(section: ModelSection, family: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """Numbered values for each tensor of a family, by its name behind the prefix."""
    model = resolve(section, vocabulary=20, sequence_length=6)
    shapes, found, start = logical_shapes(model), {}, 0
    for entry in hf_tensors(model, family):
        shape = stored_shape(entry, shapes)
        count = torch.Size(shape).numel()
        found[prefix + entry.name] = torch.arange(start, start + count, dtype=torch.float32).view(shape)
        start += count
    return found


def read(
    monkeypatch: pytest.MonkeyPatch, section: ModelSection, tensors: dict[str, torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    lazy: Lazy = {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}  # type: ignore[misc]
    monkeypatch.setattr(tensor_matching, "read_megatron", lambda directory: lazy)
    model, found = read_foreign(Path("there"), section, vocabulary=20, sequence_length=6)
    return model, dict(found)


@pytest.mark.parametrize("prefix", ["", "state."])
def test_each_tensor_of_transformers_becomes_ours_by_its_layout(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = theirs(GPT2, "gpt2", prefix)
    model, found = read(monkeypatch, GPT2, tensors)
    expected = {
        part: value
        for entry in hf_tensors(model, "gpt2")
        for part, value in zip(
            entry.parts, split_parts(entry, tensors[prefix + entry.name], model), strict=True
        )
    }
    assert list(found) == list(expected) == list(dict.fromkeys(expected))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    down = tensors[f"{prefix}transformer.h.0.mlp.c_proj.weight"]
    assert torch.equal(found["blocks.0.mlp.down.weight"], down.t()), "a square one too"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"transformer.h.1.ln_1.weight": 8}, "holds 1 tensors .* has not: transformer.h.1.ln_1.weight"),
        ({"lm_head.bias": 8, "lm_head.extra": 8}, "holds 2 tensors"),
        ({"transformer.h.0.attn.bias": 8, "optimizer.state": 8}, ""),
    ],
)
def test_what_else_a_model_of_transformers_has_is_refused_and_other_state_is_not(
    more: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = theirs(GPT2, "gpt2") | {name: torch.ones(size) for name, size in more.items()}
    if said:
        with pytest.raises(CheckpointError, match=said):
            read(monkeypatch, GPT2, tensors)
    else:
        read(monkeypatch, GPT2, tensors)


def test_what_is_missing_or_of_another_family_is_told_with_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = theirs(GPT2, "gpt2")
    lost = "transformer.h.0.ln_2.bias"
    kept = {name: tensor for name, tensor in tensors.items() if name != lost}
    with pytest.raises(CheckpointError, match=rf"lacks 1 of the recipe's {len(tensors)} tensors: {lost}"):
        read(monkeypatch, GPT2, kept)
    other = {f"encoder.{name}": torch.ones(1) for name in "dcba"}
    said = "there has neither embedding.weight nor transformer.wte.weight, behind any prefix"
    with pytest.raises(CheckpointError, match=said) as refused:
        read(monkeypatch, GPT2, other)
    assert refused.value.remedy.startswith("It has encoder.a, encoder.b, encoder.c and 1 more.")
    codes = tensors | {"transformer.h.0.attn.c_attn.weight": torch.ones(8, 24, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match=r"c_attn.weight of there is stored as torch.int8"):
        read(monkeypatch, GPT2, codes)


def test_a_head_beside_a_tied_embedding_must_be_equal_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = ModelSection(**{**GPT2.__dict__, "tied": True})
    tensors = theirs(tied, "gpt2")
    embedding = tensors["transformer.wte.weight"]
    read(monkeypatch, tied, tensors | {"lm_head.weight": embedding.clone()})
    with pytest.raises(CheckpointError, match=r"has not: lm_head\.weight"):
        read(monkeypatch, tied, tensors | {"lm_head.weight": embedding + 1})
    shapes = logical_shapes(resolve(tied, vocabulary=20, sequence_length=6))
    own = {name: torch.ones(shape) for name, shape in shapes.items()}
    read(monkeypatch, tied, own | {"head.weight": own["embedding.weight"].clone()})
    with pytest.raises(CheckpointError, match=r"has not: head\.weight"):
        read(monkeypatch, tied, own | {"head.weight": own["embedding.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"has not: blocks.9.w"):
        read(monkeypatch, tied, own | {"blocks.9.w": torch.ones(1), "optim.blocks": torch.ones(1)})


def test_numbers_stand_for_what_is_automatic_and_what_stays_so_is_left_out() -> None:
    section = ModelSection(layers=1, hidden=8, heads=2)
    values = _numbers(section, sequence_length=77)
    assert (values["kv_heads"], values["ffn"], values["head_dim"]) == (2, 32, 4)
    assert "max_positions" not in values and "vocabulary" not in values
    assert "auto" not in values.values() and values["layers"] == 1
    for change in ({"position": "learned"}, {"rope_scaling": "linear"}):
        changed = ModelSection(layers=1, hidden=8, heads=2, **change)
        assert _numbers(changed, sequence_length=77)["max_positions"] == 77
        fixed = ModelSection(layers=1, hidden=8, heads=2, max_positions=5, **change)
        assert _numbers(fixed, sequence_length=77)["max_positions"] == 5


RECIPE = """
[run]
name = "small"
[data]
tokenizer = "{tokenizer}"
sequence_length = 32
end_of_document_token = "<e>"
[model]
layers = 1
hidden = 8
heads = 2
position = "learned"
[train]
global_batch = 1
[optim]
learning_rate = 1e-4
"""


def test_a_run_is_described_by_its_recipe_and_the_tokenizer_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    begin(rundir, base=None, reason="start")
    saved = save_checkpoint(rundir.checkpoints, [whole("model.a", torch.ones(2))], step=5, incarnation=1)
    kept: list[Path | None] = [None]
    monkeypatch.setattr(described_module, "tokenizer_in", lambda directory: kept[0])
    for tokenizer, expected in (("train", ""), ("/there/tokenizer.json", "/there/tokenizer.json")):
        rundir.recipe.write_text(RECIPE.format(tokenizer=tokenizer))
        for place in (rundir.path, saved):
            (found,) = described_weights(str(place))
            model = _numbers(
                ModelSection(layers=1, hidden=8, heads=2, position="learned"), sequence_length=32
            )
            assert found == DescribedWeights(
                place=str(place), model=model, tokenizer=expected, end_of_document="<e>"
            )
    kept[0] = rundir.data / "tokenizer.json"
    (found,) = described_weights(str(rundir.path))
    assert found.tokenizer == str(kept[0])
    rundir.recipe.unlink()
    with pytest.raises(ConfigError, match="does not lie in a run"):
        list(described_weights(str(saved)))


def test_a_directory_that_describes_no_model_is_refused_with_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"holds no config.json, and is neither a run nor a checkpoint"):
        list(described_weights(str(tmp_path)))
    (tmp_path / ".metadata").touch()
    with pytest.raises(ConfigError, match="is a checkpoint of another program") as refused:
        list(described_weights(str(tmp_path)))
    assert f"bloomery ckpt import {tmp_path} --recipe" in str(refused.value)


def test_all_families_have_names_for_the_same_logical_tensors() -> None:
    for family in FAMILIES.values():
        assert family.names["embedding.weight"] != family.names["head.weight"] == "lm_head.weight"
        assert len(set(family.names.values())) == len(family.names), "no two of ours have one name"
        for ours, name in family.names.items():
            assert name.rpartition(".")[2] == ours.rpartition(".")[2]
            assert ("{}" in name) is (ours.startswith(("attention", "mlp"))), "blocks are numbered"


LLAMA = ModelSection(layers=1, hidden=8, heads=2, ffn=12, vocabulary=20, max_positions=6, init_std=0.02)


def written(directory: Path, *, tied: bool, head: float | None) -> Path:
    """A transformers directory of a small Llama. head: what its head differs by; None for no head."""
    directory.mkdir()
    model = resolve(LLAMA, vocabulary=20, sequence_length=6)
    config = hf_config(model, family="llama", dtype="float32", end_of_document=None)
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    tensors = {name: tensor + 1 for name, tensor in theirs(LLAMA, "llama").items()}
    if head is None:
        del tensors["lm_head.weight"]
    else:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + head
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_directory_is_opened_as_what_its_files_hold_and_filled_as_the_recipe_says(tmp_path: Path) -> None:
    tied = written(tmp_path / "tied", tied=True, head=None)
    opened = open_model(tied)
    assert opened.section.tied and opened.resolved.section is opened.section
    assert (opened.family.name, opened.resolved.vocabulary) == ("llama", 20)
    assert [match.stored for match in opened.matched] == [match.entry.name for match in opened.matched]
    other = replace(opened.section, rope_theta=5e5)
    again = open_model(tied, section=other)
    assert again.section == opened.section and again.resolved.section == other
    apart = written(tmp_path / "apart", tied=True, head=1.0)
    assert not open_model(apart).section.tied, "a stored head that differs counts"
    with pytest.raises(CheckpointError, match="stores a head that differs from its embedding") as refused:
        open_model(apart, section=opened.section)
    assert "model.tied = false" in refused.value.remedy
    untied = replace(opened.section, tied=False)
    assert open_model(apart, section=untied).resolved.section == untied
    assert open_model(written(tmp_path / "equal", tied=True, head=0.0), section=opened.section).section.tied
    found = import_(tied)
    assert (found.model, found.family, found.tokenizer) == (opened.section, "llama", None)
    values = dict(found.tensors)
    assert values["embedding.weight"][0, :3].tolist() == [1.0, 2.0, 3.0] and "head.weight" not in values
    (tied / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match=r"(?s)has an adapter beside the model.*merge_and_unload"):
        open_model(tied)
    (tied / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)has no config.json.*save_pretrained"):
        open_model(tied)


def test_a_directory_of_transformers_is_described_quickly_and_then_by_its_files(tmp_path: Path) -> None:
    apart = written(tmp_path / "apart", tied=True, head=1.0)
    quick, full = described_weights(str(apart))
    section = open_model(apart).section
    assert quick == DescribedWeights(
        place=str(apart),
        model=_numbers(replace(section, tied=True), sequence_length=0),
        tokenizer="",
        end_of_document="",
    )
    assert full == replace(quick, model=_numbers(section, sequence_length=0))
    with pytest.raises(ConfigError, match=r"(?s)neither a run nor a checkpoint of ours.*save_pretrained"):
        next(described_weights(str(tmp_path)))
    (apart / "tokenizer.json").touch()
    (apart / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    described = next(described_weights(str(apart)))
    assert (described.tokenizer, described.end_of_document) == (str(apart / "tokenizer.json"), "</s>")


@pytest.mark.parametrize(
    ("here", "place"), [("checkpoints", "step-000005.i001"), ("checkpoints/step-000005.i001", ".")]
)
def test_a_checkpoint_is_described_by_the_recipe_above_it_also_where_its_path_does_not_name_the_run(
    here: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    rundir.recipe.write_text(RECIPE.format(tokenizer="train"))
    save_checkpoint(rundir.checkpoints, [whole("model.a", torch.ones(2))], step=5, incarnation=1)
    monkeypatch.chdir(rundir.path / here)
    (found,) = described_weights(place)
    assert found.place == place and found.end_of_document == "<e>"
