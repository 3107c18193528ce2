"""Loads the scenario of a simulation from TOML, and counts its hours by cause.

A scenario describes a machine with its failures and checkpoints, or peers with their links. Names carry their
units. Rates are those of the whole run unless they say "per GPU" or "per peer". Every hour of a
simulated run has exactly one cause.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bloomery.config.convert import BadValue, BadValues, convert_table
from bloomery.config.find import from_home
from bloomery.config.setting import setting
from bloomery.errors import ConfigError, Mistake

HOURS_PER_DAY = 24.0


@dataclass(frozen=True, kw_only=True)
class ScenarioRun:
    """`[run]`: its name, and how long it is simulated."""

    name: str = setting(kind="free", help="Name of the scenario.")
    notes: str = setting("", kind="free", help="Where its figures come from.")
    days: float = setting(365.0, kind="free", above=0.0, maximum=36_500.0, help="Simulated days.")


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """`[cluster]`: the machine, its spares and repairs, and its maintenance."""

    gpus: int = setting(kind="free", minimum=1, help="GPUs that the run needs.")
    gpus_per_node: int = setting(8, kind="free", minimum=1, help="GPUs of one node.")
    spare_nodes: int = setting(0, kind="free", minimum=0, help="Nodes kept ready to replace a broken one.")
    repair_hours: float = setting(
        48.0, kind="free", above=0.0, help="Mean time until a broken node is back, as a spare."
    )
    replacement_hours: float = setting(
        4.0, kind="free", minimum=0.0, help="Mean wait for another node where no spare is left."
    )
    job_hours: float = setting(
        0.0, kind="free", minimum=0.0, help="The scheduler's limit on a job's duration; 0: none."
    )
    queue_hours: float = setting(
        0.0, kind="free", minimum=0.0, help="Mean wait in the queue for the next job."
    )
    maintenance_every_days: float = setting(
        0.0, kind="free", minimum=0.0, help="Days between two maintenances of the machine; 0: none."
    )
    maintenance_hours: float = setting(8.0, kind="free", minimum=0.0, help="How long it is away.")
    straggler_every_days: float = setting(
        0.0, kind="free", minimum=0.0, help="Mean time between nodes that become slow; 0 never."
    )
    straggler_slowdown: float = setting(
        1.3, kind="free", minimum=1.0, help="How much longer steps take with a slow node."
    )
    straggler_found_hours: float = setting(
        6.0, kind="free", minimum=0.0, help="Until the slow node is found and replaced."
    )


@dataclass(frozen=True, kw_only=True)
class ScenarioCheckpoints:
    """`[checkpoint]`: how often the run saves, and what a save and a restart cost."""

    every_minutes: float = setting(kind="free", above=0.0, help="Training time between two saves.")
    blocking_s: float = setting(0.0, kind="free", minimum=0.0, help="Training stands still for each save.")
    durable_s: float = setting(
        0.0, kind="free", minimum=0.0, help="Until a save that has begun can be restored."
    )
    restart_s: float = setting(300.0, kind="free", minimum=0.0, help="To start all ranks again.")
    load_s: float = setting(60.0, kind="free", minimum=0.0, help="To load the newest checkpoint.")


@dataclass(frozen=True, kw_only=True)
class FailureSection:
    """`[[failures]]`: one kind of failure, seen `count` times in `days` days on `gpus` GPUs."""

    name: str = setting(kind="free", help="What breaks.")
    count: float = setting(kind="free", minimum=0.0, help="Number of failures observed …")
    days: float = setting(kind="free", above=0.0, help="… in this number of days …")
    gpus: int = setting(kind="free", minimum=1, help="… on this number of GPUs.")
    takes_node: bool = setting(True, kind="free", help="Whether a node has to be replaced.")
    detection_s: float = setting(60.0, kind="free", minimum=0.0, help="Until it is noticed.")

    @property
    def per_gpu_hour(self) -> float:
        """The failures of one GPU in an hour."""
        return self.count / (self.days * HOURS_PER_DAY * self.gpus)


@dataclass(frozen=True, kw_only=True)
class ScenarioPeers:
    """`[elastic]`: peers at several sites that average in rounds."""

    peers: int = setting(kind="free", minimum=1, help="Peers that take part when all are there.")
    inner_steps: int = setting(100, kind="free", minimum=1, help="Optimizer steps of a round (H).")
    step_s: float = setting(kind="free", above=0.0, help="Seconds of one inner step on an average peer.")
    speed_spread: float = setting(
        0.0, kind="free", minimum=0.0, maximum=0.9, help="Peers' speeds lie in 1 ± this, evenly."
    )
    parameters: float = setting(kind="free", above=0.0, help="Parameters that are averaged.")
    bits: float = setting(
        8.0, kind="free", above=0.0, maximum=64.0, help="Bits of one value on the wire: 32, 16, 8 or 4."
    )
    bandwidth_mbit_s: float = setting(
        kind="free", above=0.0, help="Of the ring's slowest link, each way, in 10⁶ bit/s."
    )
    latency_ms: float = setting(0.0, kind="free", minimum=0.0, help="One way, of an average link.")
    groups: int = setting(
        1,
        kind="free",
        minimum=1,
        help="Groups of a hierarchical all-reduce (within groups, then between them); 1: one ring.",
    )
    fragments: int = setting(
        1, kind="free", minimum=1, help="Parts of the model that are averaged one by one (streaming)."
    )
    overlap: bool = setting(False, kind="free", help="Whether training goes on while a part is averaged.")
    outer_s: float = setting(0.0, kind="free", minimum=0.0, help="The outer optimizer's step.")
    leaves_per_peer_day: float = setting(
        0.0, kind="free", minimum=0.0, help="How often a peer says goodbye and goes."
    )
    crashes_per_peer_day: float = setting(0.0, kind="free", minimum=0.0, help="How often one just dies.")
    detection_s: float = setting(
        10.0, kind="free", minimum=0.0, help="Until a peer that died is known to be dead."
    )
    absent_hours: float = setting(12.0, kind="free", minimum=0.0, help="Mean time until it comes back.")
    join_s: float = setting(
        0.0, kind="free", minimum=0.0, help="Seconds that a joining peer needs to fetch the state."
    )
    join_blocks: bool = setting(False, kind="free", help="Whether the others wait for a joiner.")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run on one cluster, or a run between peers: exactly one of `cluster` and `elastic` is set."""

    run: ScenarioRun
    cluster: ClusterSection | None = None
    checkpoint: ScenarioCheckpoints | None = None
    failures: tuple[FailureSection, ...] = ()
    elastic: ScenarioPeers | None = None

    @property
    def hours(self) -> float:
        """The hours that are simulated."""
        return self.run.days * HOURS_PER_DAY


SECTIONS: Mapping[str, type] = {
    "run": ScenarioRun,
    "cluster": ClusterSection,
    "checkpoint": ScenarioCheckpoints,
    "elastic": ScenarioPeers,
}
FAILURES = "failures"
SHIPPED = Path(__file__).with_name("scenarios")


def shipped_scenarios() -> dict[str, Path]:
    """Return the scenarios that are shipped with bloomery, by name."""
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
    except OSError as unread:
        problem = f"cannot be read: {unread.strerror}"
        raise _refused(
            [_wrong("scenario", str(path), problem, "Check who may read it.")], "command line"
        ) from None
    wrongs = [wrong for text in overrides for wrong in _override(raw, text)]
    if wrongs:
        raise _refused(wrongs, path)
    return scenario_of(raw, label=path)


def scenario_of(raw: Mapping[str, Any], *, label: Path | str) -> Scenario:
    """Return the scenario that parsed TOML describes."""
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
            except BadValues as unusable:
                wrongs += unusable.wrongs
    failures = []
    kinds = raw.get(FAILURES, [])
    if not isinstance(kinds, list):
        remedy = "Write [[failures]] on a line of its own, once for each kind."
        wrongs.append(_wrong(FAILURES, None, "must be an array of tables", remedy))
    for index, table in enumerate(kinds if isinstance(kinds, list) else ()):
        key = f"{FAILURES}[{index}]"
        try:
            failures.append(FailureSection(**convert_table(FailureSection, _table(table, key), key)))
        except BadValues as unusable:
            wrongs += unusable.wrongs
    wrongs += _across(raw)
    if wrongs:
        raise _refused(wrongs, label)
    return Scenario(failures=tuple(failures), **built)


def _across(raw: Mapping[str, Any]) -> list[BadValue]:
    """Return the mistakes that concern several sections."""
    if ("cluster" in raw) == ("elastic" in raw):
        remedy = "Describe one cluster, or peers between sites; not both, and not neither."
        return [_wrong("cluster", None, "give either [cluster] or [elastic]", remedy)]
    if "cluster" in raw and "checkpoint" not in raw:
        return [_wrong("checkpoint", None, "is missing", "Add [checkpoint] with every_minutes = 30.")]
    cluster = raw["cluster"] if isinstance(raw.get("cluster"), dict) else {}
    gpus, per_node = (cluster.get(key, 8) for key in ("gpus", "gpus_per_node"))
    if isinstance(gpus, int) and isinstance(per_node, int) and min(gpus, per_node) > 0 and gpus % per_node:
        below = gpus // per_node * per_node
        remedy = f"Take {below or per_node} or {below + per_node}, or set cluster.gpus_per_node."
        return [_wrong("cluster.gpus", gpus, f"is no whole number of nodes of {per_node}", remedy)]
    return []


def _override(raw: dict[str, Any], text: str) -> list[BadValue]:
    """Write one `section.key=value` into the tables, and return what is wrong with it."""
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
        table = raw.setdefault(section, {})
        if isinstance(table, dict):  # what is none is refused with the other sections
            table[name] = value
        return []
    kind, _, field = name.rpartition(".")
    known = raw.get(FAILURES)
    tables = [table for table in known if isinstance(table, dict)] if isinstance(known, list) else []
    for table in tables:
        if table.get("name") == kind:
            table[field] = value
            return []
    kinds = ", ".join(f"'{table.get('name')}'" for table in tables) or "none"
    return [_wrong(key, value, "there is no such kind of failure", f"The scenario has {kinds}.")]


def _find(path_or_name: str) -> Path:
    shipped = shipped_scenarios()
    if path_or_name in shipped:
        return shipped[path_or_name]
    path = from_home(path_or_name)
    if path.suffix == ".toml" and path.is_file():
        return path
    near = get_close_matches(path_or_name, shipped, n=1, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    remedy = f"{hint}Shipped: {', '.join(shipped)}. One of your own is given as a path, ending in .toml."
    raise _refused([_wrong("scenario", path_or_name, "there is no such scenario", remedy)], "command line")


def _table(value: object, key: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise BadValues([_wrong(key, value, "must be a table", "Write it in brackets, on a line of its own.")])


def _wrong(key: str, value: object, problem: str, remedy: str) -> BadValue:
    return BadValue(key=key, value=value, problem=problem, remedy=remedy)


def _refused(wrongs: Sequence[BadValue], label: Path | str) -> ConfigError:
    source = label.name if isinstance(label, Path) else label
    return ConfigError(
        [
            Mistake(
                key=wrong.key, value=wrong.value, source=source, problem=wrong.problem, remedy=wrong.remedy
            )
            for wrong in wrongs
        ],
        of="the scenario",
    )


TRAINING = "training"
"""The cause of the hours that count; their share is the goodput."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One simulated life of a run.

    hours: hours by cause; they sum to the simulated time.
    events: how often each thing happened.
    spans: (begin, end, cause) in order of time, in hours, without gaps. Lost work appears only in `hours`,
    because its hours looked like training until they were lost.
    """

    hours: Mapping[str, float]
    events: Mapping[str, int]
    spans: tuple[tuple[float, float, str], ...]

    @property
    def goodput(self) -> float:
        """The share of the time whose work was kept."""
        return self.hours.get(TRAINING, 0.0) / sum(self.hours.values())


@dataclass
class HoursLedger:
    """Counts the hours of a run while it is simulated.

    end: hours after which the simulation stops.
    """

    end: float
    now: float = 0.0
    hours: dict[str, float] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    spans: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the simulated time is used up."""
        return self.now >= self.end

    def spend(self, hours: float, cause: str) -> float:
        """Let time pass, at most until the end, and return the hours that passed."""
        return self.spend_until(self.now + hours, cause)

    def spend_until(self, when: float, cause: str) -> float:
        """Let time pass until `when` exactly, so that a wait for that moment ends."""
        begin, self.now = self.now, max(self.now, min(when, self.end))
        passed = self.now - begin
        if passed > 0.0:
            self.hours[cause] = self.hours.get(cause, 0.0) + passed
            if self.spans and self.spans[-1][2] == cause:
                begin = self.spans.pop()[0]
            self.spans.append((begin, self.now, cause))
        return passed

    def count(self, event: str) -> None:
        """Count one event."""
        self.events[event] = self.events.get(event, 0) + 1

    def move(self, hours: float, *, cause: str, to: str) -> None:
        """Move hours that were counted under one cause to another cause."""
        self.hours[cause] = self.hours.get(cause, 0.0) - hours
        self.hours[to] = self.hours.get(to, 0.0) + hours

    def close(self) -> Life:
        """Return the finished ledger."""
        return Life(
            hours=MappingProxyType(self.hours),
            events=MappingProxyType(self.events),
            spans=tuple(self.spans),
        )
