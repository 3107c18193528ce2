"""Qwen3: Llama with a norm of each head's queries and keys, and without biases."""

from __future__ import annotations

from typing import Any

from bloomery.config.model import ModelSection
from bloomery.interchange.families.family import Family, Settings, refuse_unless_divisible
from bloomery.interchange.families.keys import NO_EFFECT, Key, Only, Supported, refuse
from bloomery.interchange.families.llama import LLAMA
from bloomery.interchange.families.rope import rope_config, rope_settings
from bloomery.model.shape import ResolvedModel


def _section(settings: Settings) -> ModelSection:
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    kv_heads = settings["num_key_value_heads"] or heads
    refuse_unless_divisible("hidden_size", hidden, "num_attention_heads", heads)
    refuse_unless_divisible("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if settings["head_dim"] != hidden // heads:
        refuse(
            "head_dim", settings["head_dim"], wanted=f"hidden_size / num_attention_heads = {hidden // heads}"
        )
    if hidden // heads % 2:
        refuse("hidden_size", hidden, wanted="an even multiple of num_attention_heads (rotary pairs)")
    types = settings["layer_types"]
    if types is not None and len(types) != settings["num_hidden_layers"]:
        refuse("layer_types", types, wanted=f"one entry for each of {settings['num_hidden_layers']} layers")
    rope = rope_settings(settings)
    if rope.get("rope_scaling") == "dynamic" and hidden // heads == 2:
        refuse(
            "hidden_size", hidden, wanted="4 or more times num_attention_heads beside the rope type dynamic"
        )
    return ModelSection(
        layers=settings["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=settings["intermediate_size"],
        vocabulary=settings["vocab_size"],
        max_positions=settings["max_position_embeddings"],
        norm="rmsnorm",
        norm_epsilon=float(settings["rms_norm_eps"]),
        position="rotary",
        **rope,
        activation="swiglu",
        qk_norm=True,
        tied=settings["tie_word_embeddings"],
        attention_dropout=float(settings["attention_dropout"] or 0.0),
        init_std=float(settings["initializer_range"]),
    )


def _config(model: ResolvedModel) -> dict[str, Any]:
    section = model.section
    return {
        "architectures": ["Qwen3ForCausalLM"],
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
        "attention_bias": False,
        "attention_dropout": section.attention_dropout,
        "use_sliding_window": False,
    }


_KEYS: dict[str, Key] = {
    **{
        key: use
        for key, use in LLAMA.keys.items()
        if key not in ("attention_bias", "mlp_bias", "pretraining_tp", "max_sequence_length")
    },
    "attention_bias": Only(values=(False,)),
    # Without a window these two say nothing.
    "use_sliding_window": Only(values=(False,)),
    "sliding_window": NO_EFFECT,
    "max_window_layers": NO_EFFECT,
    "layer_types": Supported(kind="layer types", optional=True),
}
QWEN3 = Family(
    name="qwen3",
    config_class="Qwen3Config",
    keys=_KEYS,
    aliases={},
    names={
        **{ours: theirs for ours, theirs in LLAMA.names.items() if not ours.endswith(".bias")},
        "attention.query_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
        "attention.key_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    },
    prefix="model.",
    derived=None,
    fused=None,
    transposes=False,
    section=_section,
    config=_config,
)
