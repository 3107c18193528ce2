"""Describes a Hugging Face model family: its config.json, of which each key is checked, and its tensors.

A key that is in no table is refused by name. transformers ignores unknown keys, but a model that silently
computes something else than its author meant is the worst outcome.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError
from bloomery.model.shape import ResolvedModel, Shape

Settings = Mapping[str, Any]  # Any: values of JSON, of the kinds that the table says
Kind = Literal["count", "number", "rate", "switch", "object", "token id", "token ids", "name", "layer types"]
_WANTED: Mapping[Kind, str] = {
    "count": "a whole number from 1 to 2,147,483,647",
    "number": "a finite number above 0",
    "rate": "a number from 0 to 0.999",
    "switch": "true or false",
    "object": "an object",
    "token id": "a token id",
    "token ids": "a token id, or a list of them",
    "layer types": "a list of 'full_attention'",
}
_LARGEST_COUNT, _LARGEST_RATE = 2**31 - 1, 0.999


@dataclass(frozen=True, kw_only=True)
class Supported:
    """The family's section takes the value.

    optional: null means that transformers derives the value.
    names: all values that the kind 'name' may have.
    """

    kind: Kind
    optional: bool = False
    names: tuple[str, ...] = ()

    def wanted(self) -> str:
        """Return what a value must be, in words."""
        kind = " or ".join(self.names) if self.kind == "name" else _WANTED[self.kind]
        return kind + (", or null" if self.optional else "")

    def allows(self, value: object) -> bool:
        """Whether `value` is of this kind."""
        if self.kind == "name":
            return value in self.names
        return (value is None and self.optional) or _is_of(self.kind, value)


@dataclass(frozen=True, kw_only=True)
class Only:
    """The forward pass depends on the value, and ours computes only these values.

    remedy: what the user can do instead.
    """

    values: tuple[object, ...]
    remedy: str = ""

    def wanted(self) -> str:
        """Return what a value must be, in words."""
        return " or ".join(repr(value) for value in self.values)

    def allows(self, value: object) -> bool:
        """Whether ours computes what `value` asks for. Here 1 is not True."""
        return any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
            for allowed in self.values
        )


@dataclass(frozen=True, kw_only=True)
class NoEffect:
    """The logits of transformers do not depend on the value."""

    def wanted(self) -> str:
        """Return what a value must be, in words."""
        return "anything"

    def allows(self, value: object) -> bool:
        """Whether `value` is allowed; every value is."""
        return True


Key = Supported | Only | NoEffect


def settings_from(
    content: Mapping[str, Any],
    *,
    keys: Mapping[str, Key],
    aliases: Mapping[str, str],
    defaults: Settings,
) -> dict[str, Any]:
    """Return the value of each honoured key: from `content` (config.json), or else its default.

    keys: the family's table, which COMMON completes.
    aliases: other names of its keys.
    defaults: transformers' values of keys that a config.json leaves out; None where it lacks one.
    Raises CheckpointError naming the keys that are unknown, have a wrong type, or are not computed here.
    """
    table = {**COMMON, **keys}
    unknown = [key for key in content if key not in table and key not in aliases]
    if unknown:
        raise CheckpointError(
            f"config.json has {_shown(content, unknown)}, whose meaning is not known here.",
            remedy="If its model is known to compute the same without, remove that from config.json.",
        )
    merged: dict[str, Any] = {}
    for key, value in content.items():
        name = aliases.get(key, key)
        if name in merged and merged[name] != value:
            raise CheckpointError(
                f"config.json has {key} = {value!r} beside {merged[name]!r} under another name of the same "
                f"setting, {name}.",
                remedy="Remove the wrong one of the two.",
            )
        merged[name] = value
    for key, value in merged.items():
        if not table[key].allows(value):
            refuse(key, value, wanted=table[key].wanted(), remedy=getattr(table[key], "remedy", ""))
    return {
        key: merged.get(key, defaults.get(key)) for key, use in table.items() if isinstance(use, Supported)
    }


def refuse(key: str, value: object, *, wanted: str, remedy: str = "") -> None:
    """Raise CheckpointError because this value of this key is not computed here."""
    raise CheckpointError(
        f"config.json has {key} = {_short(value)}, which our decoder does not compute.",
        remedy=remedy or f"It can import models with {key} = {wanted}.",
    )


def _is_of(kind: Kind, value: object) -> bool:
    if kind == "switch":
        return isinstance(value, bool)
    if kind == "object":
        return isinstance(value, dict)
    if kind == "layer types":
        return isinstance(value, list) and all(layer == "full_attention" for layer in value)
    if kind == "token id":
        return _is_id(value)
    if kind == "token ids":
        return _is_id(value) or (isinstance(value, list) and all(_is_id(item) for item in value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == "count":
        return isinstance(value, int) and 1 <= value <= _LARGEST_COUNT
    if kind == "rate":
        return 0.0 <= value <= _LARGEST_RATE
    return value > 0.0 and (isinstance(value, float) or value <= _LARGEST_COUNT) and math.isfinite(value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_COUNT


def _shown(content: Mapping[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key} = {_short(content[key])}" for key in keys)


def _short(value: object, *, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]} …"


NO_EFFECT = NoEffect()
QUANTISATION = "quantization_config"
"""The key that says by which scheme weights are stored as codes (`quantised_weights`)."""
PLAIN_WEIGHTS = (
    "Let transformers undo it and save plain weights: model.dequantize(), then "
    "model.save_pretrained(directory)."
)
_TYPES = ("float32", "bfloat16", "float16")

_ABOUT_THE_FILE = (
    "model_type architectures transformers_version _name_or_path name_or_path _commit_hash tokenizer_class "
    "task_specific_params finetuning_task unsloth_version unsloth_fixed"
)
_ABOUT_RUNNING = (
    "use_cache output_attentions output_hidden_states return_dict torchscript use_bfloat16 tf_legacy_loss "
    "gradient_checkpointing attn_implementation _attn_implementation _attn_implementation_autoset "
    "experts_implementation chunk_size_feed_forward use_return_dict"
)
_ABOUT_OTHER_HEADS = "id2label label2id num_labels problem_type classifier_dropout"
_ABOUT_GENERATION = (
    "_from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight "
    "assistant_lookbehind bad_words_ids begin_suppress_tokens cache_config cache_implementation "
    "compile_config constraints continuous_batching_config decoder_start_token_id disable_compile "
    "diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant length_penalty "
    "low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length "
    "min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
    "num_beam_groups num_beams num_return_sequences output_logits output_scores penalty_alpha "
    "prefill_chunk_size prefix prompt_lookup_num_tokens remove_invalid_values renormalize_logits "
    "repetition_penalty return_dict_in_generate sep_token_id sequence_bias speculation_type stop_strings "
    "suppress_tokens target_lookbehind temperature token_healing top_h top_k top_p typical_p unk_token_id "
    "use_mtp watermarking_config"
)

COMMON: Mapping[str, Key] = {
    **dict.fromkeys(
        " ".join((_ABOUT_THE_FILE, _ABOUT_RUNNING, _ABOUT_OTHER_HEADS, _ABOUT_GENERATION)).split(), NO_EFFECT
    ),
    # The files say in which type weights are stored; transformers may round to this type when it loads them.
    "dtype": Only(values=(None, "auto", *_TYPES)),
    "torch_dtype": Only(values=(None, "auto", *_TYPES)),
    "bos_token_id": Supported(kind="token id", optional=True),
    "eos_token_id": Supported(kind="token ids", optional=True),
    "pad_token_id": Supported(kind="token id", optional=True),
    "quantization_config": Only(values=(None,), remedy=PLAIN_WEIGHTS),
    "compression_config": Only(values=(None,), remedy=PLAIN_WEIGHTS),
    "auto_map": Only(values=(None, {}), remedy="It names code of the model's own, which is never run here."),
    "is_encoder_decoder": Only(values=(False,)),
    "is_decoder": Only(values=(False, True)),  # a causal model decodes in any case
    "add_cross_attention": Only(values=(False,)),
    "cross_attention_hidden_size": Only(values=(None,)),
    "tie_encoder_decoder": Only(values=(False,)),
    "pruned_heads": Only(values=(None, {})),
    "per_layer_config": Only(values=(None, {})),
    "layer_types": Only(values=(None,)),
    "sliding_window": Only(values=(None,)),
}
"""The keys that configurations of all families may have."""


Layout = Literal["plain", "transposed", "stacked", "stacked_transposed", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """One tensor of a Hugging Face model: its name, our tensors that it is made of, and how."""

    name: str
    parts: tuple[str, ...]
    layout: Layout = "plain"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of Hugging Face models.

    name: its model_type.
    keys: what each key of config.json means.
    aliases: other names of keys.
    defaults: what transformers' configuration class takes for a key that config.json leaves out. They are
        written down here, because importing transformers takes seconds.
    names: names of tensors by ours, with '{}' for the block.
    prefix: what precedes the base model's tensors; files of a bare base model leave it out.
    derived: stored tensors that follow from the settings, which transformers ignores; None for none.
    fused: how query, key and value are laid out in one tensor; None if they are separate.
    transposes: whether the matrices of blocks are stored as [in, out].
    section: makes our model section from honoured settings.
    config: makes the settings from our model.
    """

    name: str
    keys: Mapping[str, Key]
    aliases: Mapping[str, str]
    defaults: Settings
    names: Mapping[str, str]
    prefix: str
    derived: re.Pattern[str] | None
    fused: Layout | None
    transposes: bool
    section: Callable[[Settings], ModelSection]
    config: Callable[[ResolvedModel], dict[str, Any]]

    def settings(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the honoured settings of config.json's `content`. Raises CheckpointError for all other
        settings.
        """
        return settings_from(content, keys=self.keys, aliases=self.aliases, defaults=self.defaults)

    def tensor(self, logical: str) -> HfTensor | None:
        """Return the Hugging Face tensor whose first part is `logical`; None if another tensor holds it."""
        parts = logical.split(".")
        block, key = (parts[1], ".".join(parts[2:])) if parts[0] == "blocks" else ("", logical)
        is_matrix = key.endswith(".weight")
        if self.fused and key.startswith(("attention.key", "attention.value")):
            return None  # the query's tensor holds it
        name = self.names[key].format(block)
        if self.fused and key.startswith("attention.query"):
            fused_parts = tuple(logical.replace(".query.", f".{part}.") for part in ("query", "key", "value"))
            transposed = self.transposes and is_matrix
            return HfTensor(
                name=name, parts=fused_parts, layout="stacked_transposed" if transposed else self.fused
            )
        in_block = key.startswith(("attention.", "mlp."))
        layout: Layout = "transposed" if self.transposes and is_matrix and in_block else "plain"
        return HfTensor(name=name, parts=(logical,), layout=layout)

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names that a tensor may have in files: its name, and that in a bare base model."""
        bare = name.removeprefix(self.prefix)
        return (name,) if bare == name else (name, bare)


def both(ours: str, theirs: str) -> dict[str, str]:
    """Return the names of a weight and its bias."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def refuse_unless_divisible(key: str, value: int, by_key: str, by: int) -> None:
    """Raise CheckpointError unless `value` is a multiple of `by`."""
    if value % by:
        refuse(key, value, wanted=f"a multiple of {by_key} = {by}")


def stored_shape(entry: HfTensor, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of the Hugging Face tensor.

    shapes: shapes of the logical tensors (`logical_shapes`).
    """
    first = shapes[entry.parts[0]]
    rows = sum(shapes[part][0] for part in entry.parts)
    whole = (rows, *first[1:])
    return whole[::-1] if entry.layout in ("transposed", "stacked_transposed") else whole
