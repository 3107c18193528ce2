"""The Llama family: its config.json keys and tensor names, and what of them Qwen3 has too."""

from __future__ import annotations

import re
from typing import Any

from bloomery.config.model import ModelSection
from bloomery.interchange.families.family import Family, Settings, both, refuse_unless_divisible
from bloomery.interchange.families.keys import NO_EFFECT, Key, Only, Supported, refuse
from bloomery.interchange.families.rope import rope_config, rope_settings
from bloomery.model.shape import ResolvedModel


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
    config_class="LlamaConfig",
    keys=_KEYS,
    aliases={},
    names=_NAMES,
    prefix="model.",
    derived=re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # old versions stored it
    fused=None,
    transposes=False,
    section=_section,
    config=_config,
)
