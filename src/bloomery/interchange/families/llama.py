"""The Llama family and Qwen3: their config.json keys, rotary settings and tensor names.

`rope_settings` and `rope_config` convert rotary position settings between config.json, in each version of
transformers, and ours. Qwen3 is Llama with a norm of each head's queries and keys; only attention may
have biases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from bloomery.config.model import ModelSection
from bloomery.interchange.families.family import (
    NO_EFFECT,
    Family,
    Key,
    Only,
    Settings,
    Supported,
    both,
    refuse,
    refuse_unless_divisible,
)
from bloomery.model.shape import ResolvedModel, scaling_of

_DEFAULT_THETA = 10_000.0  # RotaryEmbeddingConfigMixin.default_theta
_NUMBER = Supported(kind="number")
_OPTIONAL = Supported(kind="number", optional=True)
_EVERYWHERE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ROPE_KEYS: Mapping[str, Mapping[str, Supported]] = {
    "default": {},
    "linear": {"factor": _NUMBER},
    "dynamic": {"factor": _NUMBER},
    "llama3": {
        "factor": _NUMBER,
        "low_freq_factor": _NUMBER,
        "high_freq_factor": _NUMBER,
        "original_max_position_embeddings": Supported(kind="count", optional=True),
    },
    "yarn": {
        "factor": _NUMBER,
        "original_max_position_embeddings": Supported(kind="count", optional=True),
        "beta_fast": _OPTIONAL,
        "beta_slow": _OPTIONAL,
        "attention_factor": _OPTIONAL,
        "mscale": _OPTIONAL,
        "mscale_all_dim": _OPTIONAL,
        "truncate": Supported(kind="switch", optional=True),
    },
}
"""The types that are known, with the keys that each has besides those that all have."""


def rope_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a `[model]` section. Raises CheckpointError for an unknown key."""
    key, rope = _written(settings)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS or rope.get("type", kind) != kind:
        refuse(
            key, rope, wanted=" or ".join(f"{{'rope_type': {known_type!r}, …}}" for known_type in _ROPE_KEYS)
        )
    for name, value in rope.items():
        if name not in _EVERYWHERE and name not in _ROPE_KEYS[kind]:
            refuse(
                f"{key}.{name}", value, wanted="", remedy=f"It has no meaning for the type {kind}: remove it."
            )
    for name, use in _ROPE_KEYS[kind].items():
        if not use.allows(rope.get(name)):
            refuse(f"{key}.{name}", rope.get(name), wanted=use.wanted())
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        refuse(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], wanted="1.0")
    theta = _theta(key, rope, settings)
    if kind == "yarn" and theta <= 1.0:
        refuse("rope_theta", theta, wanted="more than 1 beside the type yarn")
    plain = {"rope_theta": theta}
    return (
        plain if kind == "default" else plain | {"rope_scaling": kind, **_scaling(key, kind, rope, settings)}
    )


def rope_config(model: ResolvedModel) -> dict[str, Any]:
    """Return the same settings for a config.json, in the words that old and new versions read."""
    section, scaling = model.section, scaling_of(model)
    plain: dict[str, Any] = {"rope_theta": section.rope_theta}
    if scaling is None:
        return plain
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_rotations, "high_freq_factor": scaling.high_rotations}
    if scaling.kind == "yarn":
        rope |= {
            "beta_slow": scaling.low_rotations,
            "beta_fast": scaling.high_rotations,
            "attention_factor": scaling.attention_factor,
        }
    return plain | {"rope_scaling": rope}


def _written(settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the key under which the settings are written, and their value."""
    new, old = settings["rope_parameters"] or {}, settings["rope_scaling"] or {}
    if new and old and new != old:
        remedy = f"rope_parameters beside it says {new}: remove one."
        refuse("rope_scaling", old, wanted="null", remedy=remedy)
    return ("rope_scaling", old) if old else ("rope_parameters", new)


def _theta(key: str, rope: Mapping[str, Any], settings: Mapping[str, Any]) -> float:
    inner, outer = rope.get("rope_theta"), settings["rope_theta"]
    if not _OPTIONAL.allows(inner):
        refuse(f"{key}.rope_theta", inner, wanted=_NUMBER.wanted())
    if inner is not None and outer is not None and inner != outer:
        refuse("rope_theta", outer, wanted="", remedy=f"{key} beside it says {inner}: remove one.")
    return float(inner or outer or _DEFAULT_THETA)


def _scaling(key: str, kind: str, rope: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    factor = float(rope["factor"])
    if factor < 1.0:
        refuse(f"{key}.factor", factor, wanted="1 or more")
    scaling: dict[str, Any] = {"rope_factor": factor}
    if kind in ("linear", "dynamic"):
        return scaling
    low, high = (
        (rope["low_freq_factor"], rope["high_freq_factor"])
        if kind == "llama3"
        else (rope.get("beta_slow") or 1, rope.get("beta_fast") or 32)
    )
    if high <= low:
        name = "high_freq_factor" if kind == "llama3" else "beta_fast"
        refuse(f"{key}.{name}", high, wanted=f"more than {low}")
    if rope.get("truncate") is False:
        refuse(f"{key}.truncate", value=False, wanted="true")
    scaling |= {"rope_low_rotations": float(low), "rope_high_rotations": float(high)}
    original = rope.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    scaling["rope_original_positions"] = original
    return scaling | ({"rope_attention_factor": _attention_factor(factor, rope)} if kind == "yarn" else {})


def _attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    """Return the factor for cosines and sines, as YaRN's authors advise if the file does not say it."""

    def advised(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    some_dims, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    return advised(some_dims) / advised(all_dims) if some_dims and all_dims else advised(1.0)


def fields_shared_with_qwen3(settings: Settings) -> dict[str, Any]:
    """Return what the `[model]` sections of Llama and Qwen3 have in common.

    Raises CheckpointError for sizes that do not fit together.
    """
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    kv_heads = settings["num_key_value_heads"] or heads
    refuse_unless_divisible("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    width = settings["head_dim"]
    if width is None:
        refuse_unless_divisible("hidden_size", hidden, "num_attention_heads", heads)
        width = hidden // heads
    if width % 2:
        if settings["head_dim"]:
            refuse("head_dim", width, wanted="an even number of channels (rotary pairs)")
        refuse("hidden_size", hidden, wanted="an even multiple of num_attention_heads (rotary pairs)")
    rope = rope_settings(settings)
    if rope.get("rope_scaling") == "dynamic" and width == 2:
        refuse(
            "hidden_size", hidden, wanted="4 or more times num_attention_heads beside the rope type dynamic"
        )
    return {
        "layers": settings["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": "auto" if width * heads == hidden else width,
        "ffn": settings["intermediate_size"],
        "vocabulary": settings["vocab_size"],
        "max_positions": settings["max_position_embeddings"],
        "norm": "rmsnorm",
        "norm_epsilon": float(settings["rms_norm_eps"]),
        "position": "rotary",
        **rope,
        "activation": "swiglu",
        "tied": settings["tie_word_embeddings"],
        "attention_dropout": float(settings["attention_dropout"] or 0.0),
        "init_std": float(settings["initializer_range"]),
    }


def config_shared_with_qwen3(model: ResolvedModel) -> dict[str, Any]:
    """Return what the config.json of Llama and of Qwen3 have in common."""
    section = model.section
    return {
        "hidden_size": section.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": section.norm_epsilon,
        **rope_config(model),
        "attention_bias": section.attention_bias,
        "attention_dropout": section.attention_dropout,
    }


def _section(settings: Settings) -> ModelSection:
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    refuse_unless_divisible("hidden_size", hidden, "num_attention_heads", heads)  # transformers asks for it
    attention, mlp = settings["attention_bias"], settings["mlp_bias"]
    bias_in = "blocks" if attention == mlp else ("attention" if attention else "mlp")
    return ModelSection(**fields_shared_with_qwen3(settings), bias=attention or mlp, bias_in=bias_in)


def _config(model: ResolvedModel) -> dict[str, Any]:
    bias = {"mlp_bias": model.section.mlp_bias}
    return {"architectures": ["LlamaForCausalLM"], **config_shared_with_qwen3(model), **bias}


_KEYS: dict[str, Key] = {
    "vocab_size": Supported(kind="count"),
    "hidden_size": Supported(kind="count"),
    "intermediate_size": Supported(kind="count"),
    "num_hidden_layers": Supported(kind="count"),
    "num_attention_heads": Supported(kind="count"),
    "num_key_value_heads": Supported(kind="count", optional=True),
    "head_dim": Supported(kind="count", optional=True),
    "hidden_act": Only(values=("silu", "swish")),
    "max_position_embeddings": Supported(kind="count"),
    "initializer_range": Supported(kind="number"),
    "rms_norm_eps": Supported(kind="number"),
    "tie_word_embeddings": Supported(kind="switch"),
    "rope_parameters": Supported(kind="object", optional=True),
    "rope_scaling": Supported(kind="object", optional=True),
    "rope_theta": Supported(kind="number"),
    "partial_rotary_factor": Only(values=(None, 1.0, 1)),
    "attention_bias": Supported(kind="switch"),
    "attention_dropout": Supported(kind="rate", optional=True),
    "mlp_bias": Supported(kind="switch"),
    "pretraining_tp": NO_EFFECT,  # it splits products into sums of the same value
    "max_sequence_length": NO_EFFECT,  # a key of Llama 1
}
_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    **both("attention_norm", "model.layers.{}.input_layernorm"),
    **both("attention.query", "model.layers.{}.self_attn.q_proj"),
    **both("attention.key", "model.layers.{}.self_attn.k_proj"),
    **both("attention.value", "model.layers.{}.self_attn.v_proj"),
    **both("attention.output", "model.layers.{}.self_attn.o_proj"),
    **both("mlp_norm", "model.layers.{}.post_attention_layernorm"),
    **both("mlp.gate", "model.layers.{}.mlp.gate_proj"),
    **both("mlp.up", "model.layers.{}.mlp.up_proj"),
    **both("mlp.down", "model.layers.{}.mlp.down_proj"),
    **both("final_norm", "model.norm"),
    "head.weight": "lm_head.weight",
}
LLAMA = Family(
    name="llama",
    keys=_KEYS,
    aliases={},
    defaults={
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    },
    names=_NAMES,
    prefix="model.",
    derived=re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # old versions stored it
    fused=None,
    transposes=False,
    section=_section,
    config=_config,
)


def _qwen3_section(settings: Settings) -> ModelSection:
    types = settings["layer_types"]
    if types is not None and len(types) != settings["num_hidden_layers"]:
        refuse("layer_types", types, wanted=f"one entry for each of {settings['num_hidden_layers']} layers")
    bias = settings["attention_bias"]
    return ModelSection(
        **fields_shared_with_qwen3(settings),
        qk_norm=True,
        bias=bias,
        bias_in="attention" if bias else "blocks",
    )


def _qwen3_config(model: ResolvedModel) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **config_shared_with_qwen3(model),
        "use_sliding_window": False,
    }


_QWEN3_KEYS: dict[str, Key] = {
    **{
        key: use
        for key, use in LLAMA.keys.items()
        if key not in ("head_dim", "mlp_bias", "pretraining_tp", "max_sequence_length")
    },
    "head_dim": Supported(kind="count"),
    # Without a window these two say nothing.
    "use_sliding_window": Only(values=(False,)),
    "sliding_window": NO_EFFECT,
    "max_window_layers": NO_EFFECT,
    "layer_types": Supported(kind="layer types", optional=True),
}
QWEN3 = Family(
    name="qwen3",
    keys=_QWEN3_KEYS,
    aliases={},
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
    },
    names={
        **{
            ours: theirs
            for ours, theirs in LLAMA.names.items()
            if not ours.endswith(".bias") or ours.startswith("attention.")
        },
        "attention.query_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
        "attention.key_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    },
    prefix="model.",
    derived=None,
    fused=None,
    transposes=False,
    section=_qwen3_section,
    config=_qwen3_config,
)
