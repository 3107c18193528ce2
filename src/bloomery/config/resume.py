"""What may change when a run goes on with another recipe, and while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from bloomery.config.check import check_recipe
from bloomery.config.convert import unknown_key
from bloomery.config.dump import toml_value
from bloomery.config.load import override, sections
from bloomery.config.recipe import Recipe
from bloomery.config.setting import Kind, Setting, about
from bloomery.errors import ConfigError, Mistake

_STRICTNESS: tuple[Kind, ...] = ("free", "journalled", "fixed")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting with two values. `old` or `new` is None where an entry of a list was added or removed."""

    key: str
    old: Any  # Any: a setting's value
    new: Any


@dataclass(frozen=True, kw_only=True)
class Changes:
    """All differences of two recipes, by what a resume does: apply, apply and journal, refuse."""

    free: tuple[Change, ...] = ()
    journalled: tuple[Change, ...] = ()
    fixed: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.free or self.journalled or self.fixed)


def compare(old: Recipe, new: Recipe) -> Changes:
    """How `new` differs from the run's recipe `old`."""
    found: dict[Kind, list[Change]] = {kind: [] for kind in _STRICTNESS}
    for name in sections():
        for kind, change in _differences(name, getattr(old, name), getattr(new, name)):
            found[kind].append(change)
    return Changes(**{kind: tuple(changes) for kind, changes in found.items()})


def refuse_fixed(changes: Changes, sources: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError naming both values of each fixed setting that changed."""
    if not changes.fixed:
        return
    raise ConfigError(
        [
            Mistake(
                key=change.key,
                value=change.new,
                source=(sources or {}).get(change.key, "recipe"),
                problem=f"the run was started with {_shown(change.old)}, and this is part of what it is",
                remedy=f"Set it back to {_shown(change.old)}, or start a run of another name.",
            )
            for change in changes.fixed
        ]
    )


def apply_free(recipe: Recipe, key: str, value_text: str, *, data_degree: int | None = None) -> Recipe:
    """The recipe with one free setting changed while the run goes on.

    Raises ConfigError for a setting that is unknown, not free or read only at the start, for a value that
    cannot be used, and for one that does not fit the rest of the recipe or the `data_degree` it runs with.
    """
    key, value_text = key.strip(), value_text.strip()
    section, _, name = key.partition(".")
    known = sections()
    if section not in known:
        _refuse(key, "there is no such section", f"Settings are section.key, of {', '.join(known)}.")
    settings = {field.name: about(field) for field in fields(known[section])}
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
    changed = override(recipe, [f"{key}={value_text}"], source="control/set")
    check_recipe(changed, {key: "control/set"}, data_degree=data_degree)
    return changed


def _differences(key: str, old: Any, new: Any, bound: Kind = "fixed") -> Iterator[tuple[Kind, Change]]:
    """Differences of two equal sections, setting by setting; a list's own kind bounds its entries'."""
    for field in fields(old):
        kind = min(about(field).kind, bound, key=_STRICTNESS.index)
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        path = f"{key}.{field.name}"
        if not any(is_dataclass(entry) for entry in (*_entries(before), *_entries(after))):
            yield kind, Change(key=path, old=before, new=after)
            continue
        for index in range(max(len(before), len(after))):
            here = f"{path}[{index}]"
            if index < min(len(before), len(after)):
                yield from _differences(here, before[index], after[index], kind)
            else:
                first = before[index] if index < len(before) else None
                second = after[index] if index < len(after) else None
                yield kind, Change(key=here, old=first, new=second)


def _entries(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _instead(known: Setting, key: str, value_text: str) -> str:
    if known.kind == "journalled":
        return f"Stop the run (it saves), and resume it with {key}={value_text}: the journal will say so."
    return "It is part of what the run is: start a run of another name."


def _refuse(key: str, problem: str, remedy: str) -> None:
    raise ConfigError([Mistake(key=key, value=None, source="control/set", problem=problem, remedy=remedy)])


def _shown(value: Any) -> str:
    return "nothing" if value is None else toml_value(value)
