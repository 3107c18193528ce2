"""Three families of Hugging Face models in our words: settings, names, and how tensors are laid out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError, ExportRefused
from bloomery.model.names import logical_shapes
from bloomery.model.resolve import ResolvedModel

Layout = Literal["plain", "transposed", "stacked", "stacked_transposed", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """One tensor of a Hugging Face model: its name, our tensors it is made of, and how."""

    name: str
    parts: tuple[str, ...]
    layout: Layout = "plain"


def family_of(model: ModelSection, *, kv_heads: int, ffn: int) -> str:
    """The family that computes what `model` computes: 'llama', 'bloom' or 'gpt2'.

    Raises ExportRefused, naming every setting in the way.
    """
    family = {"rotary": "llama", "alibi": "bloom", "learned": "gpt2"}[model.position]
    known: dict[str, dict[str, tuple[object, ...]]] = {
        "llama": {"norm": ("rmsnorm",), "activation": ("swiglu",), "embedding_norm": (False,)},
        "bloom": {
            "norm": ("layernorm",),
            "activation": ("gelu_tanh",),
            "embedding_norm": (True,),
            "bias": (True,),
            "kv_heads": (model.heads,),
            "ffn": (4 * model.hidden,),
        },
        "gpt2": {
            "norm": ("layernorm",),
            "activation": ("gelu", "gelu_tanh"),
            "embedding_norm": (False,),
            "bias": (True,),
            "kv_heads": (model.heads,),
        },
    }
    actual = {"kv_heads": kv_heads, "ffn": ffn}
    in_the_way = []
    for setting, values in known[family].items():
        value = actual.get(setting, getattr(model, setting))
        if value not in values:
            wanted = " or ".join(repr(one) for one in values)
            in_the_way.append(f"model.{setting} = {value!r} (it has {wanted})")
    if in_the_way:
        raise ExportRefused(
            f"With model.position = {model.position!r} the Hugging Face family is {family}, which lacks "
            + ", ".join(in_the_way)
            + ".",
            remedy="Such a model has no Hugging Face form; `bloomery generate` reads its checkpoint.",
        )
    return family


def hf_tensors(model: ResolvedModel, family: str) -> Iterator[HfTensor]:
    """Every tensor of the Hugging Face model, in the order in which a token meets them."""
    names = {"llama": _LLAMA, "bloom": _BLOOM, "gpt2": _GPT2}[family]
    for logical in logical_shapes(model):
        parts = logical.split(".")
        block, key = (parts[1], ".".join(parts[2:])) if parts[0] == "blocks" else ("", logical)
        if family != "llama" and key.startswith(("attention.key", "attention.value")):
            continue  # stored with the query
        yield _entry(family, names[key].format(block), logical, key)


def hf_config(
    model: ResolvedModel, *, family: str, dtype: torch.dtype, end_of_document: int | None
) -> dict[str, Any]:
    """The contents of config.json."""
    section = model.section
    shared = {
        "model_type": family,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": section.tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "initializer_range": model.init_std,
    }
    if family == "llama":
        return shared | {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": section.hidden,
            "intermediate_size": model.ffn,
            "num_hidden_layers": section.layers,
            "num_attention_heads": section.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_positions,
            "rms_norm_eps": section.norm_epsilon,
            "rope_theta": section.rope_theta,
            "attention_bias": section.bias,
            "mlp_bias": section.bias,
            "attention_dropout": section.attention_dropout,
        }
    if family == "bloom":
        return shared | {
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
    return shared | {
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


def section_from(config: Mapping[str, Any]) -> ModelSection:
    """The model section that computes what `config` (config.json) describes.

    Raises CheckpointError naming the first setting that our decoder does not have.
    """
    family = config.get("model_type")
    if family == "llama":
        return _llama_section(config)
    if family == "bloom":
        return _bloom_section(config)
    if family == "gpt2":
        return _gpt2_section(config)
    raise CheckpointError(
        f"model_type {family!r} is none of llama, bloom and gpt2.",
        remedy="Only these three families can be imported.",
    )


def joined(entry: HfTensor, parts: Sequence[Tensor], model: ResolvedModel) -> Tensor:
    """The Hugging Face tensor made of our `parts`."""
    if entry.layout == "plain":
        return parts[0]
    if entry.layout == "transposed":
        return parts[0].t()
    if entry.layout == "stacked":
        return torch.cat(list(parts))
    if entry.layout == "stacked_transposed":
        return torch.cat(list(parts)).t()
    by_head = [part.unflatten(0, (-1, model.head_dim)) for part in parts]  # [heads, d, …]
    return torch.stack(by_head, dim=1).flatten(0, 2)  # [heads · 3 · d, …]


def separated(entry: HfTensor, tensor: Tensor, model: ResolvedModel) -> tuple[Tensor, ...]:
    """Our parts of the Hugging Face `tensor`: `joined` undone."""
    if entry.layout == "plain":
        return (tensor,)
    if entry.layout == "transposed":
        return (tensor.t(),)
    if entry.layout == "stacked":
        return tensor.chunk(len(entry.parts))
    if entry.layout == "stacked_transposed":
        return tensor.t().chunk(len(entry.parts))
    by_head = tensor.unflatten(0, (-1, len(entry.parts), model.head_dim))
    return tuple(part.flatten(0, 1) for part in by_head.unbind(1))


def _entry(family: str, name: str, logical: str, key: str) -> HfTensor:
    is_matrix = key.endswith(".weight")
    if family != "llama" and key.startswith("attention.query"):
        parts = tuple(logical.replace(".query.", f".{part}.") for part in ("query", "key", "value"))
        if family == "bloom":
            return HfTensor(name=name, parts=parts, layout="interleaved")
        return HfTensor(name=name, parts=parts, layout="stacked_transposed" if is_matrix else "stacked")
    in_block = key.startswith(("attention.", "mlp."))
    # GPT-2 keeps its matrices as [in, out].
    layout: Layout = "transposed" if family == "gpt2" and is_matrix and in_block else "plain"
    return HfTensor(name=name, parts=(logical,), layout=layout)


def _llama_section(config: Mapping[str, Any]) -> ModelSection:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    heads = config["num_attention_heads"]
    _refuse_unless(config, "hidden_act", ("silu",), default="silu")
    _refuse_unless({"rope_type": rope_type}, "rope_type", ("default",), default="default")
    _refuse_unless(config, "head_dim", (config["hidden_size"] // heads, None), default=None)
    attention_bias = config.get("attention_bias", False)
    _refuse_unless(config, "mlp_bias", (attention_bias,), default=False)
    return ModelSection(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm="rmsnorm",
        norm_epsilon=config["rms_norm_eps"],
        position="rotary",
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        activation="swiglu",
        bias=attention_bias,
        tied=config.get("tie_word_embeddings", False),
    )


def _bloom_section(config: Mapping[str, Any]) -> ModelSection:
    _refuse_unless(config, "apply_residual_connection_post_layernorm", (False,), default=False)
    return ModelSection(
        layers=config["n_layer"],
        hidden=config["hidden_size"] if "hidden_size" in config else config["n_embed"],
        heads=config["n_head"],
        vocabulary=config["vocab_size"],
        norm="layernorm",
        norm_epsilon=config["layer_norm_epsilon"],
        position="alibi",
        activation="gelu_tanh",
        bias=True,
        tied=config.get("tie_word_embeddings", True),
        embedding_norm=True,
        hidden_dropout=config.get("hidden_dropout", 0.0),
        attention_dropout=config.get("attention_dropout", 0.0),
    )


def _gpt2_section(config: Mapping[str, Any]) -> ModelSection:
    activations = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    _refuse_unless(config, "activation_function", tuple(activations), default="gelu_new")
    _refuse_unless(config, "scale_attn_by_inverse_layer_idx", (False,), default=False)
    _refuse_unless(config, "scale_attn_weights", (True,), default=True)
    _refuse_unless(config, "add_cross_attention", (False,), default=False)
    return ModelSection(
        layers=config["n_layer"],
        hidden=config["n_embd"],
        heads=config["n_head"],
        ffn=config.get("n_inner") or 4 * config["n_embd"],
        vocabulary=config["vocab_size"],
        max_positions=config["n_positions"],
        norm="layernorm",
        norm_epsilon=config["layer_norm_epsilon"],
        position="learned",
        activation=activations[config.get("activation_function", "gelu_new")],
        bias=True,
        tied=config.get("tie_word_embeddings", True),
        hidden_dropout=config.get("resid_pdrop", 0.1),
        attention_dropout=config.get("attn_pdrop", 0.1),
    )


def _refuse_unless(config: Mapping[str, Any], key: str, values: Sequence[object], *, default: object) -> None:
    value = config.get(key, default)
    if value not in values:
        raise CheckpointError(
            f"config.json has {key} = {value!r}, which our decoder does not compute.",
            remedy=f"It can import models with {key} = {' or '.join(repr(one) for one in values)}.",
        )


def _both(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


_LLAMA = {
    "embedding.weight": "model.embed_tokens.weight",
    **_both("attention_norm", "model.layers.{}.input_layernorm"),
    **_both("attention.query", "model.layers.{}.self_attn.q_proj"),
    **_both("attention.key", "model.layers.{}.self_attn.k_proj"),
    **_both("attention.value", "model.layers.{}.self_attn.v_proj"),
    **_both("attention.output", "model.layers.{}.self_attn.o_proj"),
    **_both("mlp_norm", "model.layers.{}.post_attention_layernorm"),
    **_both("mlp.gate", "model.layers.{}.mlp.gate_proj"),
    **_both("mlp.up", "model.layers.{}.mlp.up_proj"),
    **_both("mlp.down", "model.layers.{}.mlp.down_proj"),
    **_both("final_norm", "model.norm"),
    "head.weight": "lm_head.weight",
}
_BLOOM = {
    "embedding.weight": "transformer.word_embeddings.weight",
    **_both("embedding_norm", "transformer.word_embeddings_layernorm"),
    **_both("attention_norm", "transformer.h.{}.input_layernorm"),
    **_both("attention.query", "transformer.h.{}.self_attention.query_key_value"),
    **_both("attention.output", "transformer.h.{}.self_attention.dense"),
    **_both("mlp_norm", "transformer.h.{}.post_attention_layernorm"),
    **_both("mlp.up", "transformer.h.{}.mlp.dense_h_to_4h"),
    **_both("mlp.down", "transformer.h.{}.mlp.dense_4h_to_h"),
    **_both("final_norm", "transformer.ln_f"),
    "head.weight": "lm_head.weight",
}
_GPT2 = {
    "embedding.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    **_both("attention_norm", "transformer.h.{}.ln_1"),
    **_both("attention.query", "transformer.h.{}.attn.c_attn"),
    **_both("attention.output", "transformer.h.{}.attn.c_proj"),
    **_both("mlp_norm", "transformer.h.{}.ln_2"),
    **_both("mlp.up", "transformer.h.{}.mlp.c_fc"),
    **_both("mlp.down", "transformer.h.{}.mlp.c_proj"),
    **_both("final_norm", "transformer.ln_f"),
    "head.weight": "lm_head.weight",
}
