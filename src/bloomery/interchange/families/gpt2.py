"""The GPT-2 family: learned positions, matrices stored as [in, out], query, key and value stacked."""

from __future__ import annotations

import re
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

_EXACT = ("gelu", "gelu_python")
_BY_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")


def _section(settings: Settings) -> ModelSection:
    refuse_unless_divisible("n_embd", settings["n_embd"], "n_head", settings["n_head"])
    if settings["embd_pdrop"] != settings["resid_pdrop"]:
        refuse(
            "embd_pdrop",
            settings["embd_pdrop"],
            wanted=f"resid_pdrop = {settings['resid_pdrop']}",
            remedy="It and resid_pdrop are one rate here. Dropout acts only in training: set both alike.",
        )
    return ModelSection(
        layers=settings["n_layer"],
        hidden=settings["n_embd"],
        heads=settings["n_head"],
        ffn=settings["n_inner"] or 4 * settings["n_embd"],
        vocabulary=settings["vocab_size"],
        max_positions=settings["n_positions"],
        norm="layernorm",
        norm_epsilon=float(settings["layer_norm_epsilon"]),
        position="learned",
        activation="gelu" if settings["activation_function"] in _EXACT else "gelu_tanh",
        bias=True,
        tied=settings["tie_word_embeddings"],
        hidden_dropout=float(settings["resid_pdrop"]),
        attention_dropout=float(settings["attn_pdrop"]),
        init_std=float(settings["initializer_range"]),
    )


def _config(model: ResolvedModel) -> dict[str, Any]:
    section = model.section
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": section.hidden,
        "n_layer": section.layers,
        "n_head": section.heads,
        "n_inner": model.ffn,
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[section.activation],
        "layer_norm_epsilon": section.norm_epsilon,
        "embd_pdrop": section.hidden_dropout,
        "resid_pdrop": section.hidden_dropout,
        "attn_pdrop": section.attention_dropout,
    }


_KEYS: dict[str, Key] = {
    "vocab_size": Supported(kind="count"),
    "n_positions": Supported(kind="count"),
    "n_embd": Supported(kind="count"),
    "n_layer": Supported(kind="count"),
    "n_head": Supported(kind="count"),
    "n_inner": Supported(kind="count", optional=True),
    "activation_function": Supported(kind="name", names=(*_EXACT, *_BY_TANH)),
    "resid_pdrop": Supported(kind="rate"),
    "embd_pdrop": Supported(kind="rate"),
    "attn_pdrop": Supported(kind="rate"),
    "layer_norm_epsilon": Supported(kind="number"),
    "initializer_range": Supported(kind="number"),
    "tie_word_embeddings": Supported(kind="switch"),
    "scale_attn_weights": Only(values=(True,)),
    "scale_attn_by_inverse_layer_idx": Only(values=(False,)),
    # the result is the same in fp32, in which ours computes scores in any case
    "reorder_and_upcast_attn": NO_EFFECT,
    # n_ctx sizes the mask that old versions stored. The others belong to heads that are not for language
    # modelling.
    **dict.fromkeys(
        (
            "n_ctx",
            "n_special",
            "predict_special_tokens",
            "output_past",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        NO_EFFECT,
    ),
}
_NAMES = {
    "embedding.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    **both("attention_norm", "transformer.h.{}.ln_1"),
    **both("attention.query", "transformer.h.{}.attn.c_attn"),
    **both("attention.output", "transformer.h.{}.attn.c_proj"),
    **both("mlp_norm", "transformer.h.{}.ln_2"),
    **both("mlp.up", "transformer.h.{}.mlp.c_fc"),
    **both("mlp.down", "transformer.h.{}.mlp.c_proj"),
    **both("final_norm", "transformer.ln_f"),
    "head.weight": "lm_head.weight",
}
GPT2 = Family(
    name="gpt2",
    keys=_KEYS,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    defaults={
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    names=_NAMES,
    prefix="transformer.",
    derived=re.compile(
        r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
    ),  # old versions stored the causal mask
    fused="stacked",
    transposes=True,
    section=_section,
    config=_config,
)
