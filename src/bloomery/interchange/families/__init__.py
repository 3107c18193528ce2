"""Lists the supported Hugging Face families, and finds the one that a model or a config.json belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError, ExportRefused
from bloomery.interchange.families.bloom import BLOOM
from bloomery.interchange.families.family import QUANTISATION, Family, HfTensor
from bloomery.interchange.families.gpt2 import GPT2
from bloomery.interchange.families.llama import LLAMA, QWEN3
from bloomery.model.shape import ResolvedModel, logical_shapes

FAMILIES: Mapping[str, Family] = {family.name: family for family in (LLAMA, BLOOM, GPT2, QWEN3)}


def family_of(model: ModelSection, *, kv_heads: int, ffn: int) -> str:
    """Return the family that computes what `model` computes: 'llama', 'qwen3', 'bloom' or 'gpt2'.

    Raises ExportRefused that names every setting that no family computes.
    """
    rotary = "qwen3" if model.qk_norm else "llama"
    family = {"rotary": rotary, "alibi": "bloom", "learned": "gpt2"}[model.position]
    known: dict[str, dict[str, tuple[object, ...]]] = {
        "llama": {"norm": ("rmsnorm",), "activation": ("swiglu",), "embedding_norm": (False,)},
        "qwen3": {
            "norm": ("rmsnorm",),
            "activation": ("swiglu",),
            "embedding_norm": (False,),
            "bias_in": ("attention",) if model.bias else (model.bias_in,),
        },
        "bloom": {
            "norm": ("layernorm",),
            "activation": ("gelu_tanh",),
            "qk_norm": (False,),
            "embedding_norm": (True,),
            "bias": (True,),
            "bias_in": ("blocks",),
            "kv_heads": (model.heads,),
            "head_dim": (model.hidden / model.heads,),
            "ffn": (4 * model.hidden,),
        },
        "gpt2": {
            "norm": ("layernorm",),
            "activation": ("gelu", "gelu_tanh"),
            "qk_norm": (False,),
            "embedding_norm": (False,),
            "bias": (True,),
            "bias_in": ("blocks",),
            "kv_heads": (model.heads,),
            "head_dim": (model.hidden / model.heads,),
        },
    }
    actual = {"kv_heads": kv_heads, "ffn": ffn, "head_dim": model.head_width}
    in_the_way = []
    for setting, values in known[family].items():
        value = actual.get(setting, getattr(model, setting))
        if value not in values:
            wanted = " or ".join(repr(allowed) for allowed in values)
            in_the_way.append(f"model.{setting} = {value!r} (it has {wanted})")
    if family == "llama" and model.hidden % model.heads:
        in_the_way.append(f"model.heads = {model.heads} (its heads divide model.hidden = {model.hidden})")
    if in_the_way:
        raise ExportRefused(
            f"With model.position = {model.position!r} the Hugging Face family is {family}, which lacks "
            + ", ".join(in_the_way)
            + ".",
            remedy="Such a model has no Hugging Face form; `bloomery generate` reads its checkpoint.",
        )
    return family


def hf_tensors(model: ResolvedModel, family: str) -> Iterator[HfTensor]:
    """Yield every tensor of the Hugging Face model, in the order in which a token meets them."""
    for logical in logical_shapes(model):
        entry = FAMILIES[family].tensor(logical)
        if entry is not None:
            yield entry


def hf_config(
    model: ResolvedModel, *, family: str, dtype: str, end_of_document: int | None
) -> dict[str, Any]:
    """Return the contents of config.json. dtype: the name of the stored weights' type, as "float32"."""
    return {
        "model_type": family,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.section.tied,
        "torch_dtype": dtype,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "initializer_range": model.init_std,
    } | FAMILIES[family].config(model)


def family_in(content: Mapping[str, Any]) -> Family:
    """Return the family that `content` (config.json) names. Raises CheckpointError for all others."""
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"model_type {kind!r} is none of {', '.join(FAMILIES)}.",
            remedy="Only these families can be imported. A model of another that computes the same (as many "
            "named after Llama do) can be saved as one: load its weights into transformers' LlamaForCausalLM "
            "and save_pretrained.",
        )
    return FAMILIES[kind]


def section_from(content: Mapping[str, Any]) -> ModelSection:
    """Return the model section that computes what `content` (config.json) describes, whatever codes its
    weights are stored as.

    Raises CheckpointError naming what our decoder does not have, and what is not known.
    """
    family = family_in(content)
    return family.section(
        family.settings({key: value for key, value in content.items() if key != QUANTISATION})
    )
