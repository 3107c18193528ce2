"""Which settings may change when a run is resumed, and while it runs (`control/set`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from bloomery.config.convert import toml_value, unknown_key
from bloomery.config.data import HUB_PREFIX
from bloomery.config.load import override, sections
from bloomery.config.peer_settings import EQUAL
from bloomery.config.recipe import Recipe
from bloomery.config.setting import Kind, Setting, declaration_of, key_of
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError, Mistake
from bloomery.frozen import dataclass

_STRICTNESS: tuple[Kind, ...] = ("free", "journalled", "fixed")


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """One setting that changed. old, new: its values; None where an entry of a list was added or removed."""

    key: str
    old: Any  # Any: a setting's value
    new: Any


@dataclass(frozen=True, kw_only=True)
class SettingChanges:
    """All differences of two recipes, by kind of setting: applied, applied and journalled, refused."""

    free: tuple[SettingChange, ...] = ()
    journalled: tuple[SettingChange, ...] = ()
    fixed: tuple[SettingChange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.free or self.journalled or self.fixed)


def compare(old: Recipe, new: Recipe) -> SettingChanges:
    """Return how `new` differs from the run's recipe `old`."""
    changes: dict[Kind, list[SettingChange]] = {kind: [] for kind in _STRICTNESS}
    for name in sections():
        for kind, change in _differences(name, getattr(old, name), getattr(new, name)):
            changes[kind].append(change)
    return SettingChanges(**{kind: tuple(of_kind) for kind, of_kind in changes.items()})


def refuse_fixed(changes: SettingChanges, sources: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError with both values of each fixed setting that changed; without any, do nothing."""
    if not changes.fixed:
        return
    raise ConfigError(
        [
            Mistake(
                key=change.key,
                value=change.new,
                source=(sources or {}).get(change.key, "recipe"),
                problem=f"the run was started with {_shown(change.old)}, and this setting is fixed",
                remedy=f"Set it back to {_shown(change.old)}, or start a run with another name.",
            )
            for change in changes.fixed
        ]
    )


def apply_free(
    recipe: Recipe, key: str, value_text: str, *, data_degree: int | None = None, consumed: int = 0
) -> Recipe:
    """Return the recipe with one free setting changed, for a run that is going on.

    Raises ConfigError for a setting that is unknown, not free or read only at the start, for a value that
    cannot be used, and for one that does not fit the rest of the recipe.

    key: `section.name`.
    value_text: the value, as on the command line.
    data_degree: data-parallel ranks of the run; None where unknown.
    consumed: the samples that the run has used.
    """
    key, value_text = key.strip(), value_text.strip()
    section, _, name = key.partition(".")
    sections_by_name = sections()
    if section not in sections_by_name:
        _refuse(
            key, "there is no such section", f"Settings are section.key, of {', '.join(sections_by_name)}."
        )
    settings = {key_of(field): declaration_of(field) for field in fields(sections_by_name[section])}
    if name not in settings:
        wrong = unknown_key(key, None, settings)
        _refuse(key, wrong.problem, wrong.remedy)
    if settings[name].kind != "free":
        _refuse(
            key,
            f"is {settings[name].kind}, and cannot change while the run goes on",
            _instead(settings[name], key, value_text),
        )
    if settings[name].at_start:
        _refuse(
            key,
            "is read when training starts",
            f"Stop the run (it saves), and resume it with {key}={value_text} on the command line.",
        )
    if recipe.elastic.inner_steps and key in EQUAL:
        _refuse(
            key,
            "must be equal on all peers, and cannot change on one while the run goes on",
            f"Stop all peers, and start each with {key}={value_text} on the command line.",
        )
    changed = override(recipe, [f"{key}={value_text}"], source="control/set")
    check_recipe(changed, {key: "control/set"}, data_degree=data_degree, consumed=consumed)
    return changed


def _differences(key: str, old: Any, new: Any, bound: Kind = "fixed") -> Iterator[tuple[Kind, SettingChange]]:
    """Yield the settings in which two sections of one type differ, each with its kind.

    bound: the kind of an entry's setting is at most as strict as that of the list which holds the entry.
    """
    for field in fields(old):
        kind = min(declaration_of(field).kind, bound, key=_STRICTNESS.index)
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        path = f"{key}.{key_of(field)}"
        if path == "data.tokenizer" and after == f"{HUB_PREFIX}{before}":
            kind = "journalled"  # the run was started by a version that wrote names without the prefix
        if not any(is_dataclass(entry) for entry in (*_entries(before), *_entries(after))):
            yield kind, SettingChange(key=path, old=before, new=after)
            continue
        for index in range(max(len(before), len(after))):
            element = f"{path}[{index}]"
            if index < min(len(before), len(after)):
                yield from _differences(element, before[index], after[index], kind)
            else:
                first = before[index] if index < len(before) else None
                second = after[index] if index < len(after) else None
                yield kind, SettingChange(key=element, old=first, new=second)


def _entries(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _instead(known: Setting, key: str, value_text: str) -> str:
    if known.kind == "journalled":
        return f"Stop the run (it saves), and resume it with {key}={value_text}: the journal will say so."
    return "It is fixed: start a run with another name."


def _refuse(key: str, problem: str, remedy: str) -> None:
    raise ConfigError([Mistake(key=key, value=None, source="control/set", problem=problem, remedy=remedy)])


def _shown(value: Any) -> str:
    return "nothing" if value is None else toml_value(value)
