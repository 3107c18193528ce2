"""The list of quarantined nodes, a file that several runs may share, which queued jobs then avoid."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.config.find import from_home
from bloomery.config.submit import SubmitSection
from bloomery.errors import TrainingFailed, storage_error
from bloomery.events.records import known_values
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import NO_LOCKS_HERE
from bloomery.operate.ledger.operations import time_of
from bloomery.operate.schedulers.interface import Scheduler

_LOCK_S = 20.0


@dataclass(frozen=True, kw_only=True)
class QuarantinedNode:
    """Why a node takes no jobs of these runs.

    since: seconds since 1970.
    run: the run that was hit. evidence: the line that shows the cause.
    """

    host: str
    cause: str
    since: float
    run: str = ""
    evidence: str = ""

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"{self.host} since {day}: {self.cause}" + (f" ({self.evidence})" if self.evidence else "")


class Exclusions:
    """The nodes in quarantine, kept in a JSON file that is locked while it is changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, rundir: RunDirectory, section: SubmitSection) -> Exclusions:
        """Return those of a run: in the file that its recipe names, or in its run directory."""
        return cls(from_home(section.exclusions) if section.exclusions else rundir.path / "exclusions.json")

    def nodes(self) -> dict[str, QuarantinedNode]:
        """Return the nodes in quarantine by name. Raises StorageError where the file is damaged."""
        try:
            records = json.loads(self.path.read_text())
            return {str(host): _node(host, record) for host, record in records.items()}
        except FileNotFoundError:
            return {}
        except OSError as refused:
            raise storage_error(refused, path=self.path, doing="Reading the nodes in quarantine") from refused
        except (ValueError, AttributeError, TypeError) as damage:
            raise TrainingFailed(
                f"{self.path}, the list of nodes in quarantine, is damaged: {damage}.",
                remedy="Mend it, or remove it to let all nodes back.",
            ) from damage

    def add(self, node: QuarantinedNode) -> None:
        """Put a node into quarantine; one that is there keeps its first cause. Raises StorageError."""
        self._change(lambda nodes: {node.host: node} | nodes)

    def release(self, host: str) -> QuarantinedNode | None:
        """Let a node back; returns its record, or None where it was not excluded. Raises StorageError."""
        before = self.nodes().get(host)
        if before is not None:
            self._change(lambda nodes: {name: node for name, node in nodes.items() if name != host})
        return before

    def _change(self, change: Any) -> None:  # Any: a function of the nodes by name
        try:
            with self._locked():
                nodes = change(self.nodes())
                text = json.dumps({host: asdict(node) for host, node in sorted(nodes.items())}, indent=1)
                durable.write_whole(self.path, text + "\n")
        except durable.LockHeld as held:
            raise TrainingFailed(
                f"{self.path} has been locked by {held} for {_LOCK_S:.0f} s.", remedy="Try again."
            ) from held
        except OSError as refused:
            raise storage_error(refused, path=self.path, doing="Writing the nodes in quarantine") from refused

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file; a file system without locks keeps no node from its quarantine."""
        path = self.path.with_name(f"{self.path.name}.lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(durable.locked(path, owner="bloomery", timeout_s=_LOCK_S))
            except OSError as error:
                if error.errno not in NO_LOCKS_HERE:
                    raise
            yield


def exclude_in_queue(
    scheduler: Scheduler, rundir: RunDirectory, *, name: str, section: SubmitSection, nodes: Sequence[str]
) -> list[str]:
    """Exclude `nodes` from every job of a run that waits; returns the names of these jobs.

    nodes: all that are excluded beside the recipe's, for they replace those that a job excluded before.
    Raises SchedulerError.
    """
    waiting = [
        job.job for job in scheduler.jobs(name=name, run=rundir.path.absolute()) if job.state.is_queued
    ]
    if waiting:
        scheduler.exclude(waiting, sorted({*section.exclude, *nodes}))
    return waiting


def _node(host: str, record: dict[str, Any]) -> QuarantinedNode:  # Any: parsed JSON
    values = known_values(QuarantinedNode, record)
    if time_of({"time": values.get("since")}) is None:
        raise ValueError(f"`since` of {host} is no time in seconds since 1970")
    return QuarantinedNode(**values | {"host": str(host)})
