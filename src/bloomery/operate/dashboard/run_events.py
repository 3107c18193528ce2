"""Turns each event of a run's journals into one sentence for the dashboard's list of events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bloomery.operate.ledger.operations import finite, time_of
from bloomery.operate.ledger.run_history import rewind_words

Level = Literal["info", "warning", "bad"]
Event = Mapping[str, Any]  # Any: a parsed line of a journal
_LONGEST = 400
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_HIDDEN = ("event", "time", "incarnation", "step", "spent", "recipe", "position", "promise", "versions")
_SILENT = frozenset({"step", "checkpoint", "receipt", "evaluation", "epoch", "go"})
"""Events that other parts of the page show, or that come so often that they would hide the rest."""
_TITLES: dict[str, tuple[str, Level]] = {
    "start": ("start", "info"),
    "end": ("end", "info"),
    "phase": ("phase", "info"),
    "compiled": ("compiled", "info"),
    "rewind": ("rewind", "bad"),
    "rewind_impossible": ("rewind impossible", "bad"),
    "guard": ("guard", "warning"),
    "checkpoint_failed": ("save failed", "bad"),
    "checkpoint_degraded": ("save degraded", "warning"),
    "corruption": ("corruption", "bad"),
    "corruption_check": ("corruption check", "warning"),
    "slow_ranks": ("slow ranks", "warning"),
    "restraint": ("restraint", "warning"),
    "skip": ("skip", "info"),
    "setting": ("setting", "info"),
    "setting_refused": ("setting refused", "warning"),
    "journal_gap": ("journal gap", "warning"),
    "attempt": ("attempt", "info"),
    "attempt_end": ("attempt ended", "info"),
    "diagnosis": ("failure", "bad"),
    "note": ("note", "info"),
    "alert": ("alert", "warning"),
    "request": ("request", "info"),
    "job": ("job", "info"),
    "left_out": ("left out of a round", "warning"),
    "parity": ("differing result", "bad"),
    "ring_failed": ("ring failed", "warning"),
    "evicted": ("evicted", "bad"),
    "update_refused": ("update refused", "warning"),
    "loss_not_finite": ("loss not finite", "bad"),
}


@dataclass(frozen=True, kw_only=True)
class ShownEvent:
    """One event as people read it.

    time: seconds since 1970. step: None where the event belongs to no step.
    kind: a short name, such as "rewind". text: a sentence; it may hold anything that a peer or a log wrote.
    number: counts the events of a run, so that a viewer knows which are new.
    """

    number: int
    time: float
    step: int | None
    incarnation: int
    kind: str
    level: Level
    text: str


def shown_event(event: Event, *, number: int) -> ShownEvent | None:
    """Return an event of any journal of a run as people read it; None for one that is shown elsewhere.

    An event that this version does not know is shown with its fields.
    """
    name = str(event.get("event", ""))
    if name in _SILENT or (name == "round" and event.get("included", True)):
        return None
    kind, level = _TITLES.get(name, (plain(name.replace("_", " "))[:40], "info"))
    if name == "end" and event.get("failed"):
        level = "bad"
    if name == "attempt_end" and event.get("status") not in (0, None):
        level = "warning"
    step = event.get("step")
    incarnation = event.get("incarnation")
    has_step = isinstance(step, int) and not isinstance(step, bool) and (step > 0 or incarnation)
    has_step = has_step and finite(step) is not None
    return ShownEvent(
        number=number,
        time=time_of(event) or 0.0,
        step=int(step) if has_step and step is not None else None,
        incarnation=incarnation if isinstance(incarnation, int) else 0,
        kind=kind,
        level=level,
        text=_shortened(_WORDS.get(name, fields_in_words)(event)),
    )


def fields_in_words(event: Event) -> str:
    """Return the fields of an event as `name value, name value`."""
    if set(event) - set(_HIDDEN) == {""}:
        return str(event[""])
    shown = {
        key: value for key, value in event.items() if key not in _HIDDEN and value not in (None, "", [], {})
    }
    return ", ".join(f"{str(key).replace('_', ' ')} {value}" for key, value in shown.items())


def plain(text: str) -> str:
    """Return a text without control characters, which would command a terminal, or turn the line around."""
    return _CONTROL.sub(" ", text)


def _shortened(text: str) -> str:
    line = " ".join(plain(text).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _start(event: Event) -> str:
    ranks, device = event.get("ranks", "?"), event.get("device", "?")
    changes = event.get("changes") if isinstance(event.get("changes"), dict) else {}
    text = f"incarnation {event.get('incarnation')} on {event.get('host', '?')}: {ranks} × {device}"
    why = str(event.get("reason", "start"))
    text += "" if why == "start" else f", after {why}"
    changed = "; ".join(f"{key} {value}" for key, value in (changes or {}).items())
    return text + (f"; changed: {changed}" if changed else "")


def _end(event: Event) -> str:
    word = "finished" if event.get("finished") else "failed" if event.get("failed") else "saved and stopped"
    return f"{word}: {event.get('reason', '')}"


def _data(event: Event) -> str:
    """Return what a `start` event has of its data, without the tables that the recipe has too."""
    whole, held_out = event.get("tokens"), event.get("held_out_tokens")
    warnings = event.get("warnings")
    told = " ".join(map(str, warnings)) if isinstance(warnings, list) else ""
    return (
        f"{_count(event.get('documents'))} documents, {_count(whole)} tokens to train on, {_count(held_out)} "
        f"held out, {_count(event.get('parameters'))} parameters{f'; {told}' if told else ''}"
    )


def _count(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)


def _rewind(event: Event) -> str:
    return f"{rewind_words(event)}: {event.get('reason', '')}"


def _diagnosis(event: Event) -> str:
    culprit = event.get("culprit")
    named = (
        ", ".join(f"{key} {value}" for key, value in culprit.items() if value not in ("", None))
        if isinstance(culprit, dict)
        else ""
    )
    surely = "" if event.get("sure") else " (likely)"
    gives_up = f"; not started again: {event['gives_up']}" if event.get("gives_up") else "; started again"
    return (
        f"{event.get('cause')}{surely}{f' at {named}' if named else ''}: {event.get('summary', '')}{gives_up}"
    )


def _note(event: Event) -> str:
    return f"{event.get('by', 'somebody')}: {event.get('text', '')}"


def _slow_ranks(event: Event) -> str:
    slow = event.get("slow")
    if not isinstance(slow, list) or not slow:
        return f"steps are slower; no rank of {event.get('ranks')} stands out"
    named = ", ".join(
        f"rank {rank[0]} on {rank[1]} ({rank[2]} s)"
        for rank in slow
        if isinstance(rank, list) and len(rank) == 3
    )
    return f"others take {event.get('usual_s')} s, and wait for {named}"


def _guard(event: Event) -> str:
    if event.get("reason"):
        return f"{event.get('guard')}: {event['reason']}"
    rest = {key: value for key, value in event.items() if key != "guard"}
    return f"{event.get('guard')}: {fields_in_words(rest)}"


def _round(event: Event) -> str:
    members = event.get("members")
    count = len(members) if isinstance(members, list) else 0
    if not count:
        return f"round {event.get('round')}: the state that all peers begin with"
    return f"round {event.get('round')} was made by {count} peers without this one"


_WORDS = {
    "round": _round,
    "start": _start,
    "end": _end,
    "data": _data,
    "rewind": _rewind,
    "diagnosis": _diagnosis,
    "note": _note,
    "slow_ranks": _slow_ranks,
    "guard": _guard,
}
