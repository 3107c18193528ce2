"""The BLOOM family: ALiBi, a norm after the embedding, query, key and value interleaved by head."""

from __future__ import annotations

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
from bloomery.model.shape import ResolvedModel


def _section(settings: Settings) -> ModelSection:
    if settings["slow_but_exact"] and settings["pretraining_tp"] > 1:
        refuse(
            "slow_but_exact",
            True,  # noqa: FBT003  — the refused value itself
            wanted="false",
            remedy=f"With pretraining_tp = {settings['pretraining_tp']} transformers then leaves out biases. "
            "Set slow_but_exact to false in config.json if the model was trained with them, as BLOOM was.",
        )
    refuse_unless_divisible("hidden_size", settings["hidden_size"], "n_head", settings["n_head"])
    return ModelSection(
        layers=settings["n_layer"],
        hidden=settings["hidden_size"],
        heads=settings["n_head"],
        vocabulary=settings["vocab_size"],
        max_positions=settings["seq_length"] or "auto",
        norm="layernorm",
        norm_epsilon=float(settings["layer_norm_epsilon"]),
        position="alibi",
        activation="gelu_tanh",
        bias=True,
        tied=settings["tie_word_embeddings"],
        embedding_norm=True,
        hidden_dropout=float(settings["hidden_dropout"]),
        attention_dropout=float(settings["attention_dropout"]),
        init_std=float(settings["initializer_range"]),
    )


def _config(model: ResolvedModel) -> dict[str, Any]:
    section = model.section
    return {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": section.hidden,
        "n_layer": section.layers,
        "n_head": section.heads,
        "layer_norm_epsilon": section.norm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": section.hidden_dropout,
        "attention_dropout": section.attention_dropout,
        "seq_length": model.max_positions,
    }


_KEYS: dict[str, Key] = {
    "vocab_size": Supported(kind="count"),
    "hidden_size": Supported(kind="count"),
    "n_layer": Supported(kind="count"),
    "n_head": Supported(kind="count"),
    "layer_norm_epsilon": Supported(kind="number"),
    "initializer_range": Supported(kind="number"),
    "hidden_dropout": Supported(kind="rate"),
    "attention_dropout": Supported(kind="rate"),
    "pretraining_tp": Supported(kind="count"),
    "slow_but_exact": Supported(kind="switch"),
    "tie_word_embeddings": Supported(kind="switch"),
    "seq_length": Supported(kind="count", optional=True),  # ALiBi has no limit, so the value is only noted
    "apply_residual_connection_post_layernorm": Only(values=(False,)),
    "n_inner": Only(values=(None,)),
    # The program that trained BLOOM left these in published files; transformers reads none of them.
    **dict.fromkeys(
        (
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
        ),
        NO_EFFECT,
    ),
}
_NAMES = {
    "embedding.weight": "transformer.word_embeddings.weight",
    **both("embedding_norm", "transformer.word_embeddings_layernorm"),
    **both("attention_norm", "transformer.h.{}.input_layernorm"),
    **both("attention.query", "transformer.h.{}.self_attention.query_key_value"),
    **both("attention.output", "transformer.h.{}.self_attention.dense"),
    **both("mlp_norm", "transformer.h.{}.post_attention_layernorm"),
    **both("mlp.up", "transformer.h.{}.mlp.dense_h_to_4h"),
    **both("mlp.down", "transformer.h.{}.mlp.dense_4h_to_h"),
    **both("final_norm", "transformer.ln_f"),
    "head.weight": "lm_head.weight",
}
BLOOM = Family(
    name="bloom",
    keys=_KEYS,
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    defaults={
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "layer_norm_epsilon": 1e-05,
        "initializer_range": 0.02,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "slow_but_exact": False,
        "tie_word_embeddings": True,
    },
    names=_NAMES,
    prefix="transformer.",
    derived=None,
    fused="interleaved",
    transposes=False,
    section=_section,
    config=_config,
)
