"""Qwen3: Llama with a norm of each head's queries and keys; only attention may have biases."""

from __future__ import annotations

from typing import Any

from bloomery.config.model import ModelSection
from bloomery.interchange.families.family import Family, Settings
from bloomery.interchange.families.keys import NO_EFFECT, Key, Only, Supported, refuse
from bloomery.interchange.families.llama import LLAMA, config_shared_with_qwen3, fields_shared_with_qwen3
from bloomery.model.shape import ResolvedModel


def _section(settings: Settings) -> ModelSection:
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


def _config(model: ResolvedModel) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **config_shared_with_qwen3(model),
        "use_sliding_window": False,
    }


_KEYS: dict[str, Key] = {
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
    config_class="Qwen3Config",
    keys=_KEYS,
    aliases={},
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
    section=_section,
    config=_config,
)
