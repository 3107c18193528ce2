"""Turns conditions into alerts: when an incident begins, again while it is unacknowledged, when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

_DOUBLINGS = 64
"""After so many repetitions the time until the next one no longer doubles."""


class AlertWord(StrEnum):
    """Why an alert is sent."""

    RAISED = "new"
    ESCALATED = "still"
    RESOLVED = "over"


@dataclass(frozen=True, kw_only=True)
class WatchCondition:
    """Something that a person should know of a run.

    kind: what it is, in a word; a run has at most one open incident of each kind.
    line: the cause, in one line.
    command: the command that helps.
    group: what it is one incident with, as a run that hangs and is then gone is; "": only with its kind.
    """

    kind: str
    line: str
    command: str = ""
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class OpenIncident:
    """A condition of a run that holds, and the alerts sent about it. Times are seconds since 1970.

    began: when the condition began.
    seen: when it was last seen.
    told: when an alert about it was last sent.
    escalations: how often an alert was repeated, because nobody acknowledged it.
    acknowledged: whether a person has acknowledged it; the next alert is then that it is over.
    """

    condition: WatchCondition
    began: float
    seen: float
    told: float
    escalations: int = 0
    acknowledged: bool = False


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A message for people about one run."""

    run: str
    word: AlertWord
    condition: WatchCondition
    began: float
    owed: tuple[int, ...] | None = None
    """Numbers of the addresses that have not taken it yet; None: it was not sent before."""

    @property
    def title(self) -> str:
        """One line for a subject."""
        return f"[{self.run}] {self.word}: {self.condition.kind}"

    @property
    def body(self) -> str:
        """The cause in a line, and the command that helps."""
        if self.word == AlertWord.RESOLVED or not self.condition.command:
            return self.condition.line
        return f"{self.condition.line}\n{self.condition.command}"


@dataclass(frozen=True, kw_only=True)
class AlertRules:
    """When alerts are repeated and when incidents end.

    escalate_s: seconds after which an incident that nobody acknowledged is repeated; the time doubles each
        time.
    settle_s: seconds without the condition after which an incident is over, so that one which comes and goes
        is told once.
    """

    escalate_s: float = 1800.0
    settle_s: float = 30.0


def update(
    incidents: Mapping[str, OpenIncident],
    conditions: Iterable[WatchCondition],
    *,
    run: str,
    now: float,
    rules: AlertRules,
) -> tuple[dict[str, OpenIncident], list[Alert]]:
    """Return the open incidents after a check of a run, and the alerts to send because of it."""
    current = {condition.group or condition.kind: condition for condition in conditions}
    after: dict[str, OpenIncident] = {}
    alerts = []
    for kind, condition in current.items():
        incident = incidents.get(kind)
        if incident is None:
            after[kind] = OpenIncident(condition=condition, began=now, seen=now, told=now)
            alerts.append(Alert(run=run, word=AlertWord.RAISED, condition=condition, began=now))
            continue
        incident = replace(incident, condition=condition, seen=now)
        patience_s = rules.escalate_s * 2.0 ** min(incident.escalations, _DOUBLINGS)
        if not incident.acknowledged and now - incident.told >= patience_s:
            incident = replace(incident, told=now, escalations=incident.escalations + 1)
            alerts.append(Alert(run=run, word=AlertWord.ESCALATED, condition=condition, began=incident.began))
        after[kind] = incident
    for kind, incident in incidents.items():
        if kind in current:
            continue
        if now - incident.seen < rules.settle_s:
            after[kind] = incident
        else:
            alerts.append(
                Alert(run=run, word=AlertWord.RESOLVED, condition=incident.condition, began=incident.began)
            )
    return after, alerts


def incidents_to_json(incidents: Mapping[str, OpenIncident]) -> dict[str, Any]:
    """Return open incidents as JSON."""
    return {kind: asdict(incident) for kind, incident in incidents.items()}


def incidents_from_json(record: object) -> dict[str, OpenIncident]:
    """Return the open incidents in a parsed record; those that cannot be read are left out."""
    incidents = {}
    for kind, fields in record.items() if isinstance(record, dict) else ():
        try:
            condition = WatchCondition(**fields["condition"])
            incidents[str(kind)] = OpenIncident(**{**fields, "condition": condition})
        except (KeyError, TypeError):
            continue
    return incidents
