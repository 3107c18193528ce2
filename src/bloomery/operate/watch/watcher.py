"""Watches a run: observes it, keeps its open incidents in RUN/watch.json, and sends alerts."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from bloomery import durable
from bloomery.errors import BloomeryError, RunBusy, storage_error
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import NO_LOCKS_HERE
from bloomery.operate.run_state import RunStatus
from bloomery.operate.watch.alerts import (
    Alert,
    AlertRules,
    AlertWord,
    OpenIncident,
    WatchCondition,
    incidents_from_json,
    incidents_to_json,
    update,
)
from bloomery.operate.watch.conditions import STATE, WatchLimits, conditions_of
from bloomery.operate.watch.disk import DiskSample
from bloomery.operate.watch.observe import RunObserver

log = logging.getLogger(__name__)

_SILENT_TIMES, _SILENT_LEAST_S = 3.0, 120.0
_FORGOTTEN_LEAST_S = 3600.0
"""Seconds without a check after which the times of the queue begin anew; or _SILENT_TIMES the last gap."""
_MOST_UNSENT = 100
_ACKNOWLEDGED = "watch.ack"
_WAITING = {str(state) for state in (RunStatus.PENDING, RunStatus.HELD, RunStatus.SUSPENDED)}
_AFTER_WAITING = {
    str(RunStatus.RUNNING): "running",
    str(RunStatus.STARTING): "running",
    str(RunStatus.STOPPED): "cancelled",
}

Send = Callable[[Alert], Alert | None]
"""Sends an alert; returns None, or the alert with the addresses to which it is still owed."""


@dataclass
class RunWatcher:
    """Watches one run; only one process at a time does.

    send: sends an alert; what is still owed of it is tried again at each check.
    gap_s: the seconds between the last two looks.
    """

    rundir: RunDirectory
    send: Send
    limits: WatchLimits = field(default_factory=WatchLimits)
    rules: AlertRules = field(default_factory=AlertRules)

    def __post_init__(self) -> None:
        self.incidents: dict[str, OpenIncident] = {}
        self._unsent: list[Alert] = []
        self._alive, self._gap_s, self._ended = 0.0, 0.0, True
        self._observer = RunObserver(self.rundir)
        self._lock = self._locked()
        self._restore()

    @property
    def state(self) -> str:
        """The state of the run at the last check."""
        return self._observer.state

    def check(self, *, now: float | None = None) -> list[Alert]:
        """Check the run, record and send new alerts, and return them. now: seconds since 1970."""
        now = time.time() if now is None else now
        gap_s = now - self._alive if self._alive else 0.0
        if gap_s < 0.0:
            self._set_back(-gap_s)
            gap_s = self._gap_s
        allowed_s = max(_SILENT_LEAST_S, _SILENT_TIMES * self._gap_s)
        silent_s = gap_s if not self._ended and gap_s > allowed_s else 0.0
        if gap_s > max(_FORGOTTEN_LEAST_S, _SILENT_TIMES * self._gap_s):
            self._observer.forget_queue()  # nobody knows how the queue was meanwhile
        self._take_acknowledged()
        before = self.state
        seen = self._observer.observe(now=now, silent_s=silent_s)
        conditions = conditions_of(seen, self.limits)
        if seen.verdict.state == RunStatus.UNKNOWN and STATE in self.incidents:
            conditions.append(self.incidents[STATE].condition)  # nobody knows that it is over
        self.incidents, alerts = update(
            self.incidents,
            conditions,
            run=self.rundir.name,
            now=now,
            rules=self.rules,
        )
        self._alive, self._gap_s, self._ended = now, gap_s, False
        self._record(alerts, before=before)
        self._unsent = [*self._unsent, *alerts][-_MOST_UNSENT:]
        owed = [self.send(alert) for alert in self._unsent]
        self._unsent = [alert for alert in owed if alert is not None]
        self._keep()
        return alerts

    def _set_back(self, by_s: float) -> None:
        """Move what is remembered with a clock that was set back, or no incident ends or is repeated."""
        self._observer.set_back(by_s)
        self.incidents = {
            key: replace(open, began=open.began - by_s, seen=open.seen - by_s, told=open.told - by_s)
            for key, open in self.incidents.items()
        }

    def close(self) -> None:
        """Record that this watcher ends as it should, and let others watch."""
        self._ended = True
        with suppress(BloomeryError):
            self._keep()
        os.close(self._lock)

    def _locked(self) -> int:
        path = self.rundir.path / "watch.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise storage_error(error, path=path, doing="Opening the lock of the watcher") from error
        if not self._is_free(lock):
            holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            raise RunBusy(
                f"{self.rundir.path} is watched already by {holder or 'another process'}.",
                remedy="End that watcher, or leave this run to it.",
            )
        with suppress(OSError):  # who holds the lock is only for messages, and a full disk has no room for it
            os.truncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        return lock

    def _is_free(self, lock: int) -> bool:
        """Return whether no other watcher has the lock; on a file system without locks nobody has it."""
        try:
            return durable.try_lock(lock)
        except OSError as error:
            if error.errno in NO_LOCKS_HERE:
                return True
            os.close(lock)
            path = self.rundir.path / "watch.lock"
            raise storage_error(error, path=path, doing="Locking the run for this watcher") from error

    def _take_acknowledged(self) -> None:
        """Mark incidents as known that a person has acknowledged since the last check."""
        path = self.rundir.path / _ACKNOWLEDGED
        try:
            kinds = path.read_text().splitlines()
            path.unlink()
        except OSError:
            return
        for key, incident in self.incidents.items():
            if "" in kinds or incident.condition.kind in kinds:
                self.incidents[key] = replace(incident, acknowledged=True)

    def _restore(self) -> None:
        try:
            record: dict[str, Any] = json.loads((self.rundir.watch).read_text())
            self._alive, self._gap_s = float(record["alive"]), float(record["gap_s"])
            self._ended = bool(record["ended"])
            self.incidents = incidents_from_json(record["incidents"])
            self._unsent = [_alert_from_json(alert) for alert in record["unsent"]]
            self._observer.state, self._observer.since = str(record["state"]), float(record["since"])
            self._observer.disks = [DiskSample(*sample) for sample in record["disks"]]
            # watchers before it did not keep these
            self._observer.unheard_since = float(record.get("unheard_since", 0.0))
            self._observer.short_since = float(record.get("short_since", 0.0))
            self._observer.saves.extend((float(time), str(name)) for time, name in record.get("saves", ()))
            guards = record.get("guards", ())
            self._observer.guards.extend((float(time), str(who), str(words)) for time, who, words in guards)
            self._observer.failed_save = str(record.get("failed_save", ""))
            quotas: dict[str, list[Any]] = record.get("quotas", {})
            self._observer.quotas = {
                owner: [DiskSample(*sample) for sample in samples] for owner, samples in quotas.items()
            }
        except (OSError, ValueError, KeyError, TypeError):
            log.debug("%s: nothing was watched before", self.rundir.path)

    def _keep(self) -> None:
        record = {
            "alive": self._alive,
            "gap_s": self._gap_s,
            "ended": self._ended,
            "state": self._observer.state,
            "since": self._observer.since,
            "unheard_since": self._observer.unheard_since,
            "short_since": self._observer.short_since,
            "incidents": incidents_to_json(self.incidents),
            "unsent": [_alert_to_json(alert) for alert in self._unsent],
            "disks": self._observer.disks,
            "quotas": self._observer.quotas,
            "saves": list(self._observer.saves),
            "guards": list(self._observer.guards),
            "failed_save": self._observer.failed_save,
        }
        path = self.rundir.watch
        try:
            durable.write_whole_unsynced(path, json.dumps(record))
        except OSError as error:
            # A full disk is what a watcher is for: it goes on with what it has in memory.
            log.warning("%s", storage_error(error, path=path, doing="Keeping what the watcher saw").message)

    def _record(self, alerts: Sequence[Alert], *, before: str) -> None:
        """Write alerts, and the times in the scheduler's queue, into operations.jsonl."""
        waits, waited = self.state in _WAITING, before in _WAITING
        if not alerts and waits == waited:
            return
        try:
            with Journal(self.rundir.operations, is_shared=True) as journal:
                if waits != waited:
                    state = "pending" if waits else _AFTER_WAITING.get(self.state, "failed")
                    journal.write("job", incarnation=0, step=0, state=state)
                for alert in alerts:
                    fields = {"word": str(alert.word), **alert.condition.__dict__}
                    journal.write("alert", incarnation=0, step=0, **fields)
        except BloomeryError as refused:
            log.warning("%s", refused.message)


def acknowledge(rundir: RunDirectory, kind: str) -> list[str]:
    """Ask the watcher of a run not to repeat what is open; returns the kinds. Raises StorageError.

    kind: the incident; "" takes all. The watcher reads the acknowledgement at its next check.
    """
    try:
        opened = incidents_from_json(json.loads(rundir.watch.read_text())["incidents"])
        kinds = [incident.condition.kind for incident in opened.values()]
        kinds = [name for name in kinds if kind in ("", name)]
    except (OSError, ValueError, KeyError, TypeError):
        kinds = []
    path = rundir.path / _ACKNOWLEDGED
    try:
        if kinds:
            durable.append(path, f"{kind}\n")
    except OSError as error:
        raise storage_error(error, path=path, doing="Acknowledging") from error
    return kinds


def _alert_to_json(alert: Alert) -> dict[str, Any]:
    return {
        "run": alert.run,
        "word": str(alert.word),
        "began": alert.began,
        "condition": dict(alert.condition.__dict__),
        "owed": alert.owed,
    }


def _alert_from_json(record: dict[str, Any]) -> Alert:
    condition = WatchCondition(**record["condition"])
    owed = record.get("owed")  # watchers before it did not tell who had taken an alert
    return Alert(
        run=record["run"],
        word=AlertWord(record["word"]),
        condition=condition,
        began=record["began"],
        owed=None if owed is None else tuple(owed),
    )
