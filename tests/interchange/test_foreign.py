"""Checkpoints of others: their own tools write the fixtures, or the tests do from the public layout."""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError
from bloomery.interchange.foreign_files import load_plain, read_dcp, read_megatron
from bloomery.interchange.huggingface import fill, import_
from bloomery.interchange.tensor_matching import read_foreign
from bloomery.model.decoder import build
from bloomery.model.initial_filling import initialise
from bloomery.model.logical_parameters import logical_parameters
from bloomery.model.shape import logical_shapes, resolve

VOCABULARY, LENGTH = 96, 24


def bloom() -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6, initializer_range=0.2
    )
    model = transformers.BloomForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def bloom_section() -> ModelSection:
    return ModelSection(
        layers=2, hidden=48, heads=6, norm="layernorm", position="alibi", activation="gelu_tanh",
        bias=True, tied=True, embedding_norm=True, vocabulary=VOCABULARY,
    )  # fmt: skip


def logits_of(directory: Path, section: ModelSection, tokens: torch.Tensor) -> torch.Tensor:
    _, tensors = read_foreign(directory, section, vocabulary=VOCABULARY, sequence_length=LENGTH)
    decoder = build(section, vocabulary=VOCABULARY, sequence_length=LENGTH)
    fill(decoder, tensors)
    with torch.no_grad():
        return decoder.logits(decoder(tokens))


def tokens() -> torch.Tensor:
    return torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCABULARY


def write_megatron(
    model: transformers.PreTrainedModel, directory: Path, *, ranks: int, padding: int = 0
) -> None:
    """The public layout: a file a layer and rank; columns, rows and vocabulary split, the rest replicated."""
    directory.mkdir()
    state = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    embedding = torch.cat([state["word_embeddings.weight"], torch.zeros(padding, 48)])
    layers: dict[int, dict[str, torch.Tensor]] = {
        1: {
            "word_embeddings.weight": embedding,
            "word_embeddings.norm.weight": state["word_embeddings_layernorm.weight"],
            "word_embeddings.norm.bias": state["word_embeddings_layernorm.bias"],
        },
        7: {"weight": state["ln_f.weight"], "bias": state["ln_f.bias"]},
    }
    for block in range(2):
        prefix = f"h.{block}."
        layers[3 + block] = {
            name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)
        }
    for layer, tensors in layers.items():
        for rank in range(ranks):
            own = {}
            for name, tensor in tensors.items():
                dim = None
                if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
                    dim = 1
                elif "query_key_value" in name or "dense_h_to_4h" in name or name == "word_embeddings.weight":
                    dim = 0
                own[name] = tensor.clone() if dim is None else tensor.chunk(ranks, dim)[rank].clone()
            torch.save(own, directory / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")


@pytest.mark.parametrize(("ranks", "padding"), [(1, 0), (2, 32)])
def test_a_megatron_checkpoint_of_any_tensor_degree_computes_the_same(
    ranks: int, padding: int, tmp_path: Path
) -> None:
    model = bloom()
    write_megatron(model, tmp_path / "global_step1", ranks=ranks, padding=padding)
    with torch.no_grad():
        expected = model(tokens()).logits
    found = logits_of(tmp_path / "global_step1", bloom_section(), tokens())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_megatron_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    write_megatron(bloom(), tmp_path / "m", ranks=2)
    (tmp_path / "m/layer_04-model_01-model_states.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)lacks layer_04-model_01-model_states\.pt.*Bring all files"
    ):
        read_megatron(tmp_path / "m")


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    write_megatron(bloom(), tmp_path / "m", ranks=2)
    path = tmp_path / "m/layer_03-model_01-model_states.pt"
    content = torch.load(path, weights_only=True)
    content["input_layernorm.weight"] += 1.0
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"should be equal on all ranks(?s:.*)of one checkpoint"):
        logits_of(tmp_path / "m", bloom_section(), tokens())


@pytest.mark.parametrize(
    "difference",
    [{"layers": 1}, {"bias": False}, {"tied": True}, {"embedding_norm": False}],
    ids=lambda difference: next(iter(difference)),
)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_dcp_checkpoint_of_a_larger_model_is_refused_and_none_of_it_left_out(
    difference: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    stored = ModelSection(layers=2, hidden=32, heads=2, bias=True, embedding_norm=True, vocabulary=VOCABULARY)
    shapes = logical_shapes(resolve(stored, vocabulary=VOCABULARY, sequence_length=LENGTH))
    state = {prefix + name: torch.randn(shape) for name, shape in shapes.items()}
    state["optim.state.blocks.0.exp_avg"] = torch.zeros(2)
    dcp.save(state, checkpoint_id=tmp_path)
    read_foreign(tmp_path, stored, vocabulary=VOCABULARY, sequence_length=LENGTH)
    with pytest.raises(CheckpointError, match="that the recipe's model has not") as refused:
        read_foreign(tmp_path, replace(stored, **difference), vocabulary=VOCABULARY, sequence_length=LENGTH)
    assert "model.layers, tied, bias" in refused.value.remedy


@pytest.mark.parametrize("prefix", ["", "model.", "state.module."])
def test_a_dcp_checkpoint_with_transformers_names_computes_the_same(prefix: str, tmp_path: Path) -> None:
    model = bloom()
    state = {
        f"{prefix}{name}": tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    dcp.save({**state, "step": 7}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with torch.no_grad():
        expected = model(tokens()).logits
    found = logits_of(tmp_path / "dcp", bloom_section(), tokens())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_dcp_checkpoint_with_our_names_gives_its_values_back(tmp_path: Path) -> None:
    section = ModelSection(layers=1, hidden=16, heads=2, ffn=24, vocabulary=VOCABULARY)
    decoder = build(section, vocabulary=VOCABULARY, sequence_length=LENGTH)
    initialise(decoder, seed=2)
    state = {f"model.{logical.name}": logical.tensor.clone() for logical in logical_parameters(decoder)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _, tensors = read_foreign(tmp_path / "dcp", section, vocabulary=VOCABULARY, sequence_length=LENGTH)
    for name, tensor in tensors:
        assert torch.equal(tensor, state.pop(f"model.{name}"))
    assert not state


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)

    def __init__(self, mark: Path) -> None:
        self.mark = mark


def test_metadata_that_would_run_something_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(
        CheckpointError,
        match=r"posix\.system, which does not belong there(?s:.*)unless you know who wrote it",
    ):
        read_dcp(tmp_path)
    assert not mark.exists()


def test_what_metadata_may_name_is_never_the_real_thing(tmp_path: Path) -> None:
    """Names on the list are stood for by records: getattr(os, …) would be a way around it."""
    content = b"cbuiltins\ngetattr\n(ctorch.serialization\n_get_layout\nV__globals__\ntR."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)does not describe a checkpoint.*torch.distributed.checkpoint.save of a recent torch",
    ):
        read_dcp(tmp_path)


def test_a_megatron_file_that_would_run_something_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"weight": Evil(mark)}, tmp_path / "layer_01-model_00-model_states.pt")
    with pytest.raises(
        CheckpointError, match=r"(?s)cannot be read without running what it holds.*save only its tensors"
    ):
        read_megatron(tmp_path)
    assert not mark.exists()


def test_a_chunk_outside_the_directory_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = tmp_path / "dcp/.metadata"
    content = metadata.read_bytes()
    assert content.count(b"__0_0.distcp") == 1
    metadata.write_bytes(content.replace(b"__0_0.distcp", b"../_0.distcp"))
    with pytest.raises(CheckpointError, match=r"(?s)outside of it.*unless you know who wrote it"):
        read_dcp(tmp_path / "dcp")["a"]()


def test_truncated_metadata_and_data_are_named(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3000)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    data = tmp_path / "dcp/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read(?s:.*)Take another copy"):
        read_dcp(tmp_path / "dcp")["a"]()
    metadata = tmp_path / "dcp/.metadata"
    metadata.write_bytes(metadata.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"is damaged(?s:.*)Take another copy"):
        read_dcp(tmp_path / "dcp")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x8d" + b"\xff" * 8,  # a text longer than a machine's memory
        b"\x80\x04\x8d" + b"\xff" * 5 + b"\0" * 3,  # of a terabyte
        b"\x80\x04\x30.",  # nothing is there to take away
        b"\x80\x04h\x07.",  # no such thing was remembered
    ],
)
def test_metadata_and_files_with_impossible_lengths_and_places_are_damaged(
    tmp_path: Path, content: bytes
) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp/.metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read_dcp(tmp_path / "dcp")
    torch.save({"a": torch.ones(3)}, tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as whole, zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut:
        for name in whole.namelist():
            cut.writestr(name, content if name.endswith("data.pkl") else whole.read(name))
    with pytest.raises(CheckpointError, match=r"cut\.pt cannot be read"):
        load_plain(tmp_path / "cut.pt")


def test_another_model_is_refused_before_a_tensor_is_read(tmp_path: Path) -> None:
    write_megatron(bloom(), tmp_path / "m", ranks=1)
    deeper = ModelSection(**{**bloom_section().__dict__, "layers": 3})
    with pytest.raises(
        CheckpointError, match=r"(?s)lacks 12 of the recipe's \d+ tensors.*model.layers, tied"
    ):
        read_foreign(tmp_path / "m", deeper, vocabulary=VOCABULARY, sequence_length=LENGTH)


def test_hugging_face_import_still_wins_where_both_could_be(tmp_path: Path) -> None:
    bloom().save_pretrained(tmp_path)
    assert import_(tmp_path).family == "bloom"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.full((48,), float("nan")), r"final_norm\.weight of .* holds 48 NaN"),
        (torch.ones(48, dtype=torch.int8), r"final_norm\.weight of .* stored as torch\.int8"),
    ],
)
def test_values_that_are_not_plain_finite_weights_are_refused(
    value: torch.Tensor, told: str, tmp_path: Path
) -> None:
    decoder = build(bloom_section(), vocabulary=VOCABULARY, sequence_length=LENGTH)
    initialise(decoder, seed=4)
    state = {logical.name: logical.tensor for logical in logical_parameters(decoder)}
    dcp.save({**state, "final_norm.weight": value}, checkpoint_id=tmp_path, no_dist=True)
    _, tensors = read_foreign(tmp_path, bloom_section(), vocabulary=VOCABULARY, sequence_length=LENGTH)
    with pytest.raises(CheckpointError, match=told):
        list(tensors)


def test_what_is_no_tensor_in_a_file_of_megatron_is_left_out(tmp_path: Path) -> None:
    content = {"weight": torch.ones(3), "bias": torch.zeros(3), "iteration": 7, "arguments": {"lr": 0.1}}
    torch.save(content, tmp_path / "layer_07-model_00-model_states.pt")
    found = read_megatron(tmp_path)
    assert sorted(found) == ["transformer.ln_f.bias", "transformer.ln_f.weight"]
    assert found["transformer.ln_f.weight"]().tolist() == [1.0] * 3
