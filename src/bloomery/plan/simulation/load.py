"""A scenario from its TOML file and the command line, strictly: every mistake at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bloomery.config.convert import Unusable, Wrong, convert_table
from bloomery.errors import ConfigError, Mistake
from bloomery.plan.simulation.scenario import (
    CheckpointSection,
    ClusterSection,
    ElasticSection,
    FailureSection,
    RunSection,
    Scenario,
)

SECTIONS: Mapping[str, type] = {
    "run": RunSection,
    "cluster": ClusterSection,
    "checkpoint": CheckpointSection,
    "elastic": ElasticSection,
}
FAILURES = "failures"
SHIPPED = Path(__file__).with_name("scenarios")


def shipped_scenarios() -> dict[str, Path]:
    """The scenarios that come with bloomery, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_scenario(path_or_name: str, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file, or a shipped one by name, and apply `section.key=value` overrides.

    `failures.NAME.key=value` changes a kind of failure. Raises ConfigError with all mistakes.
    """
    path = _find(path_or_name)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as broken:
        raise _refused(
            [_wrong("syntax", None, str(broken), "Mend the file: it is not TOML.")], path
        ) from None
    wrongs = [wrong for text in overrides for wrong in _override(raw, text)]
    if wrongs:
        raise _refused(wrongs, path)
    return scenario_of(raw, label=path)


def scenario_of(raw: Mapping[str, Any], *, label: Path | str) -> Scenario:
    """The scenario that parsed TOML describes."""
    wrongs = [
        _wrong(name, None, "there is no such section", f"There are {', '.join((*SECTIONS, FAILURES))}.")
        for name in raw
        if name not in (*SECTIONS, FAILURES)
    ]
    built: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        if name in raw or name == "run":
            try:
                built[name] = section(**convert_table(section, _table(raw.get(name, {}), name), name))
            except Unusable as unusable:
                wrongs += unusable.wrongs
    failures = []
    for index, table in enumerate(raw.get(FAILURES, ())):
        key = f"{FAILURES}[{index}]"
        try:
            failures.append(FailureSection(**convert_table(FailureSection, _table(table, key), key)))
        except Unusable as unusable:
            wrongs += unusable.wrongs
    wrongs += _across(raw)
    if wrongs:
        raise _refused(wrongs, label)
    return Scenario(failures=tuple(failures), **built)


def _across(raw: Mapping[str, Any]) -> list[Wrong]:
    """What is wrong between sections."""
    if ("cluster" in raw) == ("elastic" in raw):
        remedy = "Describe one cluster, or peers between sites; not both, and not neither."
        return [_wrong("cluster", None, "give either [cluster] or [elastic]", remedy)]
    if "cluster" in raw and "checkpoint" not in raw:
        return [_wrong("checkpoint", None, "is missing", "Add [checkpoint] with every_minutes = 30.")]
    gpus, per_node = (raw.get("cluster", {}).get(key, 8) for key in ("gpus", "gpus_per_node"))
    if isinstance(gpus, int) and isinstance(per_node, int) and min(gpus, per_node) > 0 and gpus % per_node:
        below = gpus // per_node * per_node
        remedy = f"Take {below or per_node} or {below + per_node}, or set cluster.gpus_per_node."
        return [_wrong("cluster.gpus", gpus, f"is no whole number of nodes of {per_node}", remedy)]
    return []


def _override(raw: dict[str, Any], text: str) -> list[Wrong]:
    """Write one `section.key=value` into the tables; what is wrong with it."""
    key, equals, value_text = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        remedy = "Write section.key=value, for instance checkpoint.every_minutes=15."
        return [_wrong(text, None, "is not a setting", remedy)]
    try:
        value = tomllib.loads(f"value = {value_text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = value_text.strip()
    if section != FAILURES:
        raw.setdefault(section, {})[name] = value
        return []
    kind, _, field = name.rpartition(".")
    for table in raw.get(FAILURES, ()):
        if table.get("name") == kind:
            table[field] = value
            return []
    kinds = ", ".join(f"'{table.get('name')}'" for table in raw.get(FAILURES, ())) or "none"
    return [_wrong(key, value, "there is no such kind of failure", f"The scenario has {kinds}.")]


def _find(path_or_name: str) -> Path:
    shipped = shipped_scenarios()
    if path_or_name in shipped:
        return shipped[path_or_name]
    path = Path(path_or_name).expanduser()
    if path.suffix == ".toml" and path.is_file():
        return path
    near = get_close_matches(path_or_name, shipped, n=1, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    remedy = f"{hint}Shipped: {', '.join(shipped)}. One of your own is given as a path, ending in .toml."
    raise _refused([_wrong("scenario", path_or_name, "there is no such scenario", remedy)], "command line")


def _table(value: object, key: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise Unusable([_wrong(key, value, "must be a table", "Write it in brackets, on a line of its own.")])


def _wrong(key: str, value: object, problem: str, remedy: str) -> Wrong:
    return Wrong(key=key, value=value, problem=problem, remedy=remedy)


def _refused(wrongs: Sequence[Wrong], label: Path | str) -> ConfigError:
    source = label.name if isinstance(label, Path) else label
    return ConfigError(
        [
            Mistake(key=one.key, value=one.value, source=source, problem=one.problem, remedy=one.remedy)
            for one in wrongs
        ]
    )
