"""What each family's config.json becomes, and what is written of a model: every setting, by value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError, ExportRefused
from bloomery.interchange.families import family_in, family_of, hf_config, hf_tensors, section_from
from bloomery.interchange.families.family import HfTensor, refuse, refuse_unless_divisible
from bloomery.interchange.families.llama import rope_config
from bloomery.interchange.tensor_matching import join_parts, split_parts
from bloomery.model.shape import resolve

CONTENTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 101,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 50,
        "initializer_range": 0.03,
        "rms_norm_eps": 1e-4,
        "tie_word_embeddings": True,
        "rope_theta": 700.0,
        "attention_bias": True,
        "attention_dropout": 0.25,
    },
    "qwen3": {
        "vocab_size": 101,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 50,
        "initializer_range": 0.03,
        "rms_norm_eps": 1e-4,
        "attention_bias": True,
        "attention_dropout": 0.25,
        "layer_types": ["full_attention"] * 3,
    },
    "bloom": {
        "vocab_size": 101,
        "hidden_size": 24,
        "n_layer": 3,
        "n_head": 6,
        "layer_norm_epsilon": 1e-4,
        "initializer_range": 0.03,
        "hidden_dropout": 0.125,
        "attention_dropout": 0.25,
        "tie_word_embeddings": False,
        "seq_length": 50,
    },
    "gpt2": {
        "vocab_size": 101,
        "n_positions": 50,
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": 40,
        "activation_function": "gelu_python",
        "resid_pdrop": 0.125,
        "embd_pdrop": 0.125,
        "attn_pdrop": 0.25,
        "layer_norm_epsilon": 1e-4,
        "initializer_range": 0.03,
        "tie_word_embeddings": False,
    },
}
USUAL = {"layers": 3, "hidden": 24, "heads": 6, "vocabulary": 101, "max_positions": 50, "init_std": 0.03}
USUAL |= {"norm_epsilon": 1e-4, "attention_dropout": 0.25}
SECTIONS = {
    "llama": ModelSection(
        **USUAL,
        kv_heads=2,
        ffn=36,
        norm="rmsnorm",
        position="rotary",
        rope_theta=700.0,
        activation="swiglu",
        tied=True,
        bias=True,
        bias_in="attention",
    ),
    "qwen3": ModelSection(
        **USUAL,
        kv_heads=2,
        head_dim=10,
        ffn=36,
        norm="rmsnorm",
        position="rotary",
        rope_theta=10_000.0,
        activation="swiglu",
        bias=True,
        bias_in="attention",
        qk_norm=True,
    ),
    "bloom": ModelSection(
        **USUAL,
        norm="layernorm",
        position="alibi",
        activation="gelu_tanh",
        bias=True,
        embedding_norm=True,
        hidden_dropout=0.125,
    ),
    "gpt2": ModelSection(
        **USUAL,
        ffn=40,
        norm="layernorm",
        position="learned",
        activation="gelu",
        bias=True,
        hidden_dropout=0.125,
    ),
}
WRITTEN: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 50,
        "rms_norm_eps": 1e-4,
        "rope_theta": 700.0,
        "attention_bias": True,
        "attention_dropout": 0.25,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "max_position_embeddings": 50,
        "rms_norm_eps": 1e-4,
        "rope_theta": 10_000.0,
        "attention_bias": True,
        "attention_dropout": 0.25,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 24,
        "n_layer": 3,
        "n_head": 6,
        "layer_norm_epsilon": 1e-4,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.125,
        "attention_dropout": 0.25,
        "seq_length": 50,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": 40,
        "n_positions": 50,
        "n_ctx": 50,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-4,
        "embd_pdrop": 0.125,
        "resid_pdrop": 0.125,
        "attn_pdrop": 0.25,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("family", CONTENTS)
def test_each_setting_of_a_file_is_one_of_our_model_and_is_written_again(family: str) -> None:
    content = {"model_type": family, **CONTENTS[family]}
    section = section_from(content)
    assert section == SECTIONS[family]
    model = resolve(section, vocabulary=101, sequence_length=9)
    assert hf_config(model, family=family, dtype="bfloat16", end_of_document=7) == {
        "model_type": family,
        "vocab_size": 101,
        "torch_dtype": "bfloat16",
        "bos_token_id": 7,
        "eos_token_id": 7,
        "initializer_range": 0.03,
        **WRITTEN[family],
    }
    assert family_of(section, kv_heads=model.kv_heads, ffn=model.ffn) == family
    assert section_from({**content, "quantization_config": {"quant_method": "fp8"}}) == section


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"bias": True, "bias_in": "blocks"}),
        ("llama", {"attention_bias": False, "mlp_bias": True}, {"bias": True, "bias_in": "mlp"}),
        ("llama", {"attention_bias": False}, {"bias": False, "bias_in": "blocks"}),
        ("llama", {"num_key_value_heads": None}, {"kv_heads": 6}),
        ("llama", {"head_dim": 8}, {"head_dim": 8}),
        ("llama", {"head_dim": 4}, {"head_dim": "auto"}),
        ("llama", {"attention_dropout": None}, {"attention_dropout": 0.0}),
        ("llama", {"hidden_size": 12}, {"hidden": 12}),
        ("qwen3", {"attention_bias": False}, {"bias": False, "bias_in": "blocks"}),
        ("qwen3", {"head_dim": 4, "layer_types": None}, {"head_dim": "auto"}),
        ("bloom", {"seq_length": None}, {"max_positions": "auto"}),
        ("bloom", {"tie_word_embeddings": True}, {"tied": True}),
        ("gpt2", {"tie_word_embeddings": True}, {"tied": True}),
        ("gpt2", {"n_inner": None}, {"ffn": 96}),
        *(
            ("gpt2", {"activation_function": f"gelu_{form}"}, {"activation": "gelu_tanh"})
            for form in ("fast", "new", "accurate", "python_tanh", "pytorch_tanh")
        ),
    ],
)
def test_what_a_setting_changes_is_that_setting_alone(
    family: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    section = section_from({"model_type": family, **CONTENTS[family], **changes})
    assert section == replace(SECTIONS[family], **expected)


@pytest.mark.parametrize(
    ("family", "changes", "said", "remedy"),
    [
        ("llama", {"hidden_size": 25}, "hidden_size = 25", "a multiple of num_attention_heads = 6"),
        (
            "llama",
            {"hidden_size": 25, "head_dim": 4},
            "hidden_size = 25",
            "a multiple of num_attention_heads",
        ),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads = 6", "num_key_value_heads = 4"),
        ("llama", {"head_dim": 5}, "head_dim = 5", "an even number of channels"),
        ("llama", {"hidden_size": 18}, "hidden_size = 18", "an even multiple of num_attention_heads"),
        (
            "llama",
            {"hidden_size": 12, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "hidden_size = 12",
            "4 or more times num_attention_heads",
        ),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types = ", "each of 3 layers"),
        ("bloom", {"n_head": 5}, "hidden_size = 24", "a multiple of n_head = 5"),
        ("gpt2", {"n_head": 5}, "n_embd = 24", "a multiple of n_head = 5"),
        ("gpt2", {"embd_pdrop": 0.5}, "embd_pdrop = 0.5", "It and resid_pdrop are one rate here"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused_by_name(
    family: str, changes: dict[str, Any], said: str, remedy: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        section_from({"model_type": family, **CONTENTS[family], **changes})
    assert said in refused.value.message and remedy in refused.value.remedy


ALL_OF = {
    "llama": ({"norm": "layernorm"}, {"activation": "gelu"}, {"embedding_norm": True}),
    "qwen3": ({"norm": "layernorm"}, {"activation": "gelu"}, {"embedding_norm": True}, {"bias_in": "mlp"}),
    "bloom": (
        *({"norm": "rmsnorm"}, {"activation": "gelu"}, {"qk_norm": True}, {"embedding_norm": False}),
        *({"bias": False}, {"bias_in": "mlp"}, {"kv_heads": 2}, {"head_dim": 6}, {"ffn": 40}),
    ),
    "gpt2": (
        *({"norm": "rmsnorm"}, {"activation": "swiglu"}, {"embedding_norm": True}, {"qk_norm": True}),
        *({"bias": False}, {"bias_in": "attention"}, {"kv_heads": 2}, {"head_dim": 6}),
    ),
}


@pytest.mark.parametrize(
    ("family", "change"), [(family, change) for family, some in ALL_OF.items() for change in some], ids=str
)
def test_each_setting_that_a_family_lacks_is_named_with_what_it_has(
    family: str, change: dict[str, Any]
) -> None:
    section = replace(SECTIONS[family], **change)
    model = resolve(section, vocabulary=101, sequence_length=9)
    with pytest.raises(ExportRefused) as refused:
        family_of(section, kv_heads=model.kv_heads, ffn=model.ffn)
    ((setting, value),) = change.items()
    assert f"family is {family}, which lacks model.{setting} = {value!r} (it has " in refused.value.message
    assert refused.value.message.count("model.") == 2, "nothing else is in the way"
    assert "`bloomery generate` reads its checkpoint" in refused.value.remedy


def test_heads_that_do_not_divide_the_width_are_no_llama() -> None:
    section = replace(SECTIONS["llama"], hidden=26, head_dim=4)
    with pytest.raises(ExportRefused, match=r"model.heads = 6 \(its heads divide model.hidden = 26\)"):
        family_of(section, kv_heads=2, ffn=36)
    assert family_of(replace(SECTIONS["qwen3"], hidden=26), kv_heads=2, ffn=36) == "qwen3"
    assert family_of(replace(SECTIONS["gpt2"], activation="gelu_tanh"), kv_heads=6, ffn=5) == "gpt2"
    assert family_of(replace(SECTIONS["qwen3"], bias=False, bias_in="mlp"), kv_heads=2, ffn=36) == "qwen3"


def test_a_model_of_no_known_family_is_refused_with_those_that_are() -> None:
    for content in (
        {},
        {"model_type": None},
        {"model_type": 5},
        {"model_type": "mistral"},
        {"model_type": []},
    ):
        with pytest.raises(CheckpointError) as refused:
            family_in(content)
        kind = content.get("model_type")
        assert refused.value.message == f"model_type {kind!r} is none of llama, bloom, gpt2, qwen3."
        assert "LlamaForCausalLM" in refused.value.remedy


SCALED = {"rope_scaling": "linear", "rope_factor": 4.0}
ORIGINAL = {"rope_original_positions": 16, "rope_low_rotations": 2.0, "rope_high_rotations": 8.0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        (SCALED, {"rope_type": "linear", "factor": 4.0}),
        (SCALED | {"rope_scaling": "dynamic"}, {"rope_type": "dynamic", "factor": 4.0}),
        (
            SCALED | ORIGINAL | {"rope_scaling": "llama3"},
            {
                **{"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16},
                **{"low_freq_factor": 2.0, "high_freq_factor": 8.0},
            },
        ),
        (
            SCALED | ORIGINAL | {"rope_scaling": "yarn", "rope_attention_factor": 1.5},
            {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
                **{"beta_slow": 2.0, "beta_fast": 8.0, "attention_factor": 1.5},
            },
        ),
    ],
)
def test_rotary_settings_are_written_in_words_that_all_versions_read(
    settings: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    section = replace(SECTIONS["llama"], **settings)
    written = rope_config(resolve(section, vocabulary=101, sequence_length=9))
    assert written == {"rope_theta": 700.0} | ({} if expected is None else {"rope_scaling": expected})
    content = {"model_type": "llama", **CONTENTS["llama"], **written}
    assert section_from(content) == section


def test_tensors_come_in_the_order_in_which_a_token_meets_them() -> None:
    model = resolve(replace(SECTIONS["bloom"], layers=1), vocabulary=101, sequence_length=9)
    names = [(entry.name.removeprefix("transformer."), entry.layout) for entry in hf_tensors(model, "bloom")]
    block = "h.0."
    assert names == [
        *[("word_embeddings.weight", "plain")],
        *[(f"word_embeddings_layernorm.{kind}", "plain") for kind in ("weight", "bias")],
        *[(f"{block}input_layernorm.{kind}", "plain") for kind in ("weight", "bias")],
        *[(f"{block}self_attention.query_key_value.{kind}", "interleaved") for kind in ("weight", "bias")],
        *[(f"{block}self_attention.dense.{kind}", "plain") for kind in ("weight", "bias")],
        *[(f"{block}post_attention_layernorm.{kind}", "plain") for kind in ("weight", "bias")],
        *[(f"{block}mlp.dense_h_to_4h.{kind}", "plain") for kind in ("weight", "bias")],
        *[(f"{block}mlp.dense_4h_to_h.{kind}", "plain") for kind in ("weight", "bias")],
        *[(f"ln_f.{kind}", "plain") for kind in ("weight", "bias")],
        ("lm_head.weight", "plain"),
    ]


def test_each_layout_joins_and_splits_its_parts_by_value() -> None:
    model: Any = type("Model", (), {"head_dim": 2})()
    query, key, value = (torch.arange(8.0).reshape(4, 2) + 10 * number for number in range(3))
    parts = ("query", "key", "value")
    for layout, given, expected in (
        ("plain", (query,), query),
        ("transposed", (query,), [[0.0, 2, 4, 6], [1, 3, 5, 7]]),
        ("stacked", (query, key, value), [*query.tolist(), *key.tolist(), *value.tolist()]),
        (
            "stacked_transposed",
            (query, key, value),
            [[0.0, 2, 4, 6, 10, 12, 14, 16, 20, 22, 24, 26], [1, 3, 5, 7, 11, 13, 15, 17, 21, 23, 25, 27]],
        ),
        (
            "interleaved",
            (query, key, value),
            [
                *query[:2].tolist(), *key[:2].tolist(), *value[:2].tolist(),
                *query[2:].tolist(), *key[2:].tolist(), *value[2:].tolist(),
            ],
        ),
    ):  # fmt: skip
        entry = HfTensor(name="t", parts=parts[: len(given)], layout=layout)  # type: ignore[arg-type]
        joined = join_parts(entry, given, model)
        assert joined.tolist() == torch.as_tensor(expected).tolist(), layout
        split = split_parts(entry, joined, model)
        assert [part.tolist() for part in split] == [part.tolist() for part in given], layout


def test_a_refusal_says_what_could_be_imported_unless_it_has_a_remedy_of_its_own() -> None:
    refuse_unless_divisible("a", 12, "b", 4)
    for call, remedy in (
        (lambda: refuse("a", 5, wanted="6"), "It can import models with a = 6."),
        (lambda: refuse("a", 5, wanted="6", remedy="Mend it."), "Mend it."),
        (lambda: refuse_unless_divisible("a", 5, "b", 4), "a = a multiple of b = 4."),
    ):
        with pytest.raises(CheckpointError) as refused:
            call()
        assert refused.value.message == "config.json has a = 5, which our decoder does not compute."
        assert refused.value.remedy.endswith(remedy)
