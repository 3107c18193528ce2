"""The type that describes a family of Hugging Face models: config.json keys, tensors and their layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bloomery.config.model import ModelSection
from bloomery.interchange.families.keys import Key, Settings, refuse, settings_from
from bloomery.model.shape import ResolvedModel, Shape

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
