"""Each key of a config.json is honoured, without effect, or refused by name: none is passed over."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.interchange.published_configs import PUBLISHED
from transformers.generation import GenerationConfig

from bloomery.errors import CheckpointError
from bloomery.interchange.families import FAMILIES, hf_config, hf_tensors, section_from
from bloomery.interchange.families.family import COMMON, NoEffect, Supported, stored_shape
from bloomery.interchange.huggingface import fill, import_
from bloomery.model.decoder import build
from bloomery.model.shape import logical_shapes, resolve

VOCABULARY, LENGTH = 96, 24
CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "bloom": "BloomConfig",
    "gpt2": "GPT2Config",
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
    },
    "qwen3": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": LENGTH,
    },
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
OTHERS: dict[str, list[Any]] = {
    "model_type": ["opt"],
    "architectures": [["LlamaForSequenceClassification"], None],
    "dtype": ["bfloat16", "float16", "float8_e4m3fn"],
    "torch_dtype": ["bfloat16", "int8"],
    "vocab_size": [97, 0, "96"],
    "hidden_size": [64, 33, "32", None, 32.0, True],
    "n_embed": [96],
    "n_embd": [64, 33],
    "intermediate_size": [40, -1],
    "n_inner": [72, None, 0],
    "num_hidden_layers": [1, 0],
    "n_layer": [1, 3],
    "num_attention_heads": [8, 5, 32],
    "n_head": [8, 3, 16, 5],
    "num_key_value_heads": [2, 1, 3, None],
    "head_dim": [16, 8, 7, None],
    "hidden_act": ["gelu", "relu", "swish"],
    "activation_function": [
        "gelu",
        "gelu_fast",
        "gelu_accurate",
        "gelu_python",
        "gelu_python_tanh",
        "gelu_pytorch_tanh",
        "relu",
        "quick_gelu",
        "silu",
    ],
    "rms_norm_eps": [1e-3, 0, "1e-6", 10**400],
    "layer_norm_epsilon": [1e-2, -1.0],
    "max_position_embeddings": [48, 7],
    "n_positions": [48],
    "pretraining_tp": [2],
    "bos_token_id": [5, None, [1, 2]],
    "eos_token_id": [5, [1, 2], None],
    "pad_token_id": [0, 3, None],
    "rope_theta": [1000.0, 20_000, None],
    "rope_parameters": [
        {"rope_theta": 2000.0, "rope_type": "default"},
        {"rope_theta": 2000.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        {},
        [],
    ],
    "rope_scaling": [
        None,
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 12,
        },
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        {"rope_type": "unheard_of"},
    ],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [12],
    "quantization_config": [{"quant_method": "fp8"}, None],
    "per_layer_config": [{"0": {"intermediate_size": 24}}, None],
    "layer_types": [["full_attention", "full_attention"]],
    "sliding_window": [4, None],
    "auto_map": [{"AutoModelForCausalLM": "modeling.Mine"}],
    "pruned_heads": [{"0": [1]}, {}],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0, "b": 1}],
    "problem_type": ["regression"],
    "name_of_something_new": [1],
    "is_causal": [False],
    "logit_scale": [2.0],
}
"""What keys are set to. Those that are not named here are set to something of their default's type."""


def keys_of(family: str) -> list[str]:
    """Every key of transformers' class, of what it saves, and of generation."""
    kind = getattr(transformers, CONFIG_CLASSES[family])
    keys = set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}
    keys |= set(kind().to_dict()) | set(kind.attribute_map)
    keys |= set(GenerationConfig().to_dict())
    keys |= set(getattr(GenerationConfig, "_get_default_generation_params", dict)())
    return sorted(keys)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_left_out_means_what_it_means_to_transformers(family: str) -> None:
    parameters = inspect.signature(getattr(transformers, CONFIG_CLASSES[family]).__init__).parameters
    honoured = {key for key, use in {**COMMON, **FAMILIES[family].keys}.items() if isinstance(use, Supported)}
    theirs = {name: parameters[name].default for name in honoured & set(parameters)}
    ours = FAMILIES[family].defaults
    assert ours == {name: value for name, value in theirs.items() if value is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_every_key_of_the_class_in_transformers(family: str) -> None:
    known = {**COMMON, **FAMILIES[family].keys, **FAMILIES[family].aliases}
    assert [key for key in keys_of(family) if key not in known] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_aliases_are_those_of_transformers(family: str) -> None:
    kind = getattr(transformers, CONFIG_CLASSES[family])
    legacy = {"n_embed": "hidden_size"} if family == "bloom" else {}
    assert dict(FAMILIES[family].aliases) == kind.attribute_map | legacy


def cases() -> Iterator[tuple[str, str, Any]]:
    for family, entry in FAMILIES.items():
        kind = getattr(transformers, CONFIG_CLASSES[family])
        defaults = kind().to_dict()
        keys = set(keys_of(family)) | set(entry.keys) | set(COMMON) | set(entry.aliases) | set(OTHERS)
        for key in sorted(keys):
            for value in OTHERS.get(key, [_another(defaults.get(key))]):
                yield family, key, value


def _another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 0.25
    return "something else"


@pytest.mark.parametrize(("family", "key", "value"), list(cases()), ids=lambda one: str(one)[:40])
def test_a_key_set_to_something_else_gives_equal_logits_or_is_refused_by_name(
    family: str, key: str, value: object, tmp_path: Path
) -> None:
    content = {"model_type": family, **SMALL[family], key: value}
    torch.manual_seed(7)
    theirs = _their_model(content, tmp_path)
    if theirs is None:
        # It refuses the value. Where the key has no effect here, the rest of the model still counts.
        kept = _their_model({"model_type": family, **SMALL[family]}, tmp_path)
        theirs = kept if isinstance({**COMMON, **FAMILIES[family].keys}.get(key), NoEffect) else None
        (tmp_path / "config.json").write_text(json.dumps(content))
    try:
        found = import_(tmp_path)
        ours = build(found.model, vocabulary=VOCABULARY, sequence_length=LENGTH)
        fill(ours, found.tensors)
    except CheckpointError as refused:
        assert key in str(refused) or FAMILIES[family].aliases.get(key, key) in str(refused)
        return
    assert theirs is not None, "transformers refuses what was imported"
    tokens = torch.randint(0, min(VOCABULARY, int(found.model.vocabulary)), (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(tokens)), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def _their_model(content: Mapping[str, Any], directory: Path) -> Any:  # Any: a transformers model
    """What transformers makes of `content`, with weights drawn for it and saved; None where it refuses."""
    (directory / "config.json").write_text(json.dumps(content))
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        config.return_dict = True
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception:  # noqa: BLE001  — whatever it raises, it refuses
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tensors = {name: tensor.contiguous() for name, tensor in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_tensors_that_transformers_makes_of_it(
    name: str, tmp_path: Path
) -> None:
    content = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    section = section_from(content)
    model = resolve(section, vocabulary=int(section.vocabulary), sequence_length=1)
    shapes = logical_shapes(model)
    entries = hf_tensors(model, content["model_type"])
    assert {entry.name: stored_shape(entry, shapes) for entry in entries} == {
        name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()
    }


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("gpt2", {"embd_pdrop": 0.25, "resid_pdrop": 0.25, "attn_pdrop": 0.125}),
        ("bloom", {"hidden_dropout": 0.25, "attention_dropout": 0.125}),
    ],
)
def test_each_rate_of_dropout_is_written_as_it_was_read(name: str, rates: dict[str, float]) -> None:
    section = section_from({"model_type": name, **SMALL[name], **rates})
    model = resolve(section, vocabulary=VOCABULARY, sequence_length=LENGTH)
    written = hf_config(model, family=name, dtype="float32", end_of_document=0)
    assert {key: written[key] for key in rates} == rates
