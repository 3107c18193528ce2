"""Converts rotary position settings between config.json, in each version of transformers, and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bloomery.interchange.families.keys import Supported, refuse
from bloomery.model.rope import scaling_of
from bloomery.model.shape import ResolvedModel

_DEFAULT_THETA = 10_000.0  # RotaryEmbeddingConfigMixin.default_theta
_NUMBER = Supported(kind="number")
_OPTIONAL = Supported(kind="number", optional=True)
_EVERYWHERE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS: Mapping[str, Mapping[str, Supported]] = {
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
    if not isinstance(kind, str) or kind not in _KEYS or rope.get("type", kind) != kind:
        refuse(key, rope, wanted=" or ".join(f"{{'rope_type': {known_type!r}, …}}" for known_type in _KEYS))
    for name, value in rope.items():
        if name not in _EVERYWHERE and name not in _KEYS[kind]:
            refuse(
                f"{key}.{name}", value, wanted="", remedy=f"It has no meaning for the type {kind}: remove it."
            )
    for name, use in _KEYS[kind].items():
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
