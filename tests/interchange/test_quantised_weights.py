"""Weights stored as codes are what transformers makes of them; whatever else says so is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from bloomery.errors import CheckpointError
from bloomery.interchange.huggingface import import_
from bloomery.interchange.quantised_weights import Scheme

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 12]}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
Tensors = dict[str, Tensor]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def as_fp8(tensors: Tensors, block: list[int] | None) -> Tensors:
    """The matrices of blocks as codes and scales; the values that they stand for come from transformers."""
    weights = {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() != 2 or ".layers." not in name:
            weights[name] = tensor
            continue
        tensors[name] = (tensor * 900).to(torch.float8_e4m3fn)
        grid = (-(-tensor.shape[0] // block[0]), -(-tensor.shape[1] // block[1])) if block else ()
        tensors[f"{name}_scale_inv"] = scale = torch.rand(grid) / 900
        weights[name] = _dequantize_fp8_weight(tensors[name].clone(), scale, block, torch.float32)
    return weights


def as_int8(tensors: Tensors) -> Tensors:
    """As bitsandbytes stores it: codes = round(127 · weight / SCB), SCB the largest magnitude of a row."""
    weights = {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() != 2 or ".layers." not in name:
            weights[name] = tensor
            continue
        largest = tensor.abs().amax(1)
        tensors[name] = (tensor / largest[:, None] * 127).round().to(torch.int8)
        tensors[name.removesuffix("weight") + "SCB"] = largest
        tensors[name.removesuffix("weight") + "weight_format"] = torch.tensor(0, dtype=torch.uint8)
        weights[name] = tensors[name].float() * largest[:, None] / 127
        assert float((weights[name] - tensor).abs().max()) <= float(largest.max()) / 253
    return weights


def rewritten(directory: Path, change: Callable[[Tensors], Tensors], quantisation: dict[str, Any]) -> Tensors:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    weights = change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return weights


def assert_imported(directory: Path, weights: Tensors) -> None:
    found = dict(import_(directory).tensors)
    for block in range(2):
        for ours, theirs in (("attention.key", "self_attn.k_proj"), ("mlp.down", "mlp.down_proj")):
            wanted = weights[f"model.layers.{block}.{theirs}.weight"]
            torch.testing.assert_close(found[f"blocks.{block}.{ours}.weight"], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("block", [[16, 12], [128, 128], None], ids=["blocks", "large blocks", "one scale"])
def test_fp8_codes_are_the_weights_that_transformers_makes_of_them(plain: Path, block: list[int]) -> None:
    quantisation = FP8 | {"weight_block_size": block, "modules_to_not_convert": ["lm_head"]}
    weights = rewritten(plain, lambda tensors: as_fp8(tensors, block), quantisation)
    assert_imported(plain, weights)


def test_a_block_that_a_file_claims_takes_no_memory_beyond_its_matrix() -> None:
    stored = {"w": torch.full((3, 5), 2.0), "w_scale_inv": torch.full((1, 1), 4.0)}
    scheme = Scheme(kind="fp8", dtype="F8_E4M3", block=(10**12, 10**12))
    assert torch.equal(scheme.read("w", stored.__getitem__), torch.full((3, 5), 8.0))


def test_one_scale_of_a_matrix_is_a_number_or_a_list_of_one(plain: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        weights = as_fp8(tensors, None)
        scales = {name: scale.reshape(1) for name, scale in tensors.items() if name.endswith("_scale_inv")}
        assert scales
        tensors.update(scales)
        return weights

    assert_imported(plain, rewritten(plain, change, FP8 | {"weight_block_size": None}))


def test_int8_codes_are_the_weights_of_their_rows(plain: Path) -> None:
    assert_imported(plain, rewritten(plain, as_int8, INT8))


def without(name: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        as_fp8(tensors, [16, 12])
        del tensors[name]
        return tensors

    return change


def of_other_kind(name: str, value: Tensor) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        (as_int8 if "SCB" in name or "format" in name else lambda one: as_fp8(one, [16, 12]))(tensors)
        tensors[name] = value
        return tensors

    return change


UP = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("quantisation", "change", "told"),
    [
        (FP8, lambda tensors: tensors, "q_proj.weight .* stored as F32, and the quantization_config"),
        (FP8, without(f"{UP}weight_scale_inv"), "up_proj.weight .* stored as F8_E4M3: codes"),
        (
            FP8,
            of_other_kind(f"{UP}weight_scale_inv", torch.ones(3, 4)),
            "up_proj.weight .* as F8_E4M3: codes",
        ),
        (FP8, of_other_kind(f"{UP}weight", torch.ones(40, 32)), "up_proj.weight .* stored as F32, and the"),
        (FP8, of_other_kind(f"{UP}activation_scale", torch.ones(1)), "holds .*activation_scale"),
        (INT8, of_other_kind(f"{UP}weight_format", torch.tensor(2, dtype=torch.uint8)), "not lie row by row"),
        (INT8, of_other_kind(f"{UP}SCB", torch.ones(39)), "up_proj.weight .* stored as I8: codes"),
        (INT8 | {"load_in_4bit": True}, as_int8, "quantization_config.load_in_4bit = True"),
        (FP8 | {"activation_scheme": "static"}, as_int8, "quantization_config.activation_scheme = 'static'"),
        (FP8 | {"weight_block_size": [0, 1]}, as_int8, r"quantization_config.weight_block_size = \[0, 1\]"),
        (FP8 | {"fmt": "e5m2"}, as_int8, "quantization_config.fmt = 'e5m2'"),
        ({"quant_method": "gptq", "bits": 4}, as_int8, "quantization_config.quant_method = 'gptq'"),
        ({"bits": 4}, as_int8, "quantization_config.quant_method = None"),
        ({"quant_method": ["fp8"]}, as_int8, r"quantization_config.quant_method = \['fp8'\]"),
        ([4], as_int8, "quantization_config"),
    ],
)
def test_codes_that_are_not_understood_are_refused_by_name(
    plain: Path, quantisation: dict[str, Any], change: Callable[[Tensors], Tensors], told: str
) -> None:
    rewritten(plain, change, quantisation)
    with pytest.raises(CheckpointError, match=told):
        list(import_(plain).tensors)


def test_a_tied_model_with_a_head_of_codes_is_not_taken_for_tied_unseen(plain: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        return tensors

    rewritten(plain, change, {})
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight .* stored as F8_E4M3(?s:.*)dequantize"):
        import_(plain)


def test_matrices_that_config_json_leaves_out_of_the_codes_may_be_plain(plain: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        down = {name: tensor.clone() for name, tensor in tensors.items() if "down_proj" in name}
        weights = as_fp8(tensors, [16, 12])
        for name, tensor in down.items():
            tensors[name] = weights[name] = tensor
            del tensors[f"{name}_scale_inv"]
        return weights

    skipping = FP8 | {"modules_to_not_convert": ["lm_head", "mlp.down_proj"]}
    assert_imported(plain, rewritten(plain, change, skipping))
