"""The rendezvous of a job's launchers through files, in which they also agree on the next attempt.

They lie in RUN/launchers/JOB. Each launcher writes a card, `HOST.json`, every second; a launcher whose card
stays the same is lost. A decision is a file that is created exclusively, so that of two launchers which both
believe to lead one decides. Only the leader reads all cards; the others read those before theirs in the order
of hosts until one of them is alive.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from bloomery import durable
from bloomery.errors import TrainingFailed, storage_error
from bloomery.events.records import known_values
from bloomery.events.run_lock import process_identity
from bloomery.operate.node_facts import NodeFacts
from bloomery.operate.progress_watch import WatchClock

INTERVAL_S = 1.0  # between two writes of a launcher's card
SILENCE_S = 6.0  # without a new card, after which a launcher is lost
MOST_CARDS_PER_S = 100.0
"""The most cards per second that all launchers of a job together write."""
_NEW_JOB = "Give all nodes a --job TEXT that is new at each start, such as the date and time."


@dataclass(frozen=True, kw_only=True)
class LauncherCard:
    """A launcher's record about itself, rewritten as its heartbeat.

    address: where its ranks can be reached. ranks: the number that it starts.
    beats: how often the card was written. asked: the signal that asked this launcher to end; 0 for none.
    departs: why this launcher has let the run save and stop, or "".
    """

    host: str
    address: str
    ranks: int
    pid: int
    beats: int = 0
    asked: int = 0
    departs: str = ""


class JobBoard:
    """One launcher's view of the files of its job.

    nodes: the number of launchers that are expected.
    """

    def __init__(self, directory: Path, own: LauncherCard, *, nodes: int) -> None:
        self._directory, self._own = directory, own
        self.interval_s = max(INTERVAL_S, nodes / MOST_CARDS_PER_S)
        self.silence_s = max(SILENCE_S, 3 * self.interval_s)
        self._seen: dict[str, tuple[LauncherCard, float]] = {}
        self._empty_since: dict[str, float] = {}
        self._clock = WatchClock()
        try:
            durable.make_directory(directory)
        except OSError as refused:
            raise storage_error(refused, path=directory, doing="Meeting the other launchers") from refused

    def take_part(self) -> None:
        """Claim this host's place in the job, for this launcher alone.

        Raises TrainingFailed where another machine has the same host name, or where launchers of an earlier
        start have used this job's name.
        """
        claim = f"claim-0-{self._own.host}"
        if not self.put(claim, {"pid": self._own.pid, "process": process_identity(os.getpid())}):
            self._refuse_second(self.get(claim) or {})
        if any("status" in record and record["status"] is not None for record in self._decisions()):
            raise TrainingFailed(f"The job of this name has ended: {self._directory}.", remedy=_NEW_JOB)

    def _refuse_second(self, first: Mapping[str, Any]) -> NoReturn:
        """Raise TrainingFailed because the launcher that wrote the claim `first` has this host's place."""
        host, there = self._own.host, f"{self._directory} (process {first.get('pid')})"
        if _machine_of(first.get("process")) == _machine_of(process_identity(os.getpid())):
            raise TrainingFailed(
                f"A launcher on {host} has used the name of this job before: {there}.", remedy=_NEW_JOB
            )
        raise TrainingFailed(
            f"Another machine with the host name {host} takes part in this job: {there}.",
            remedy="Set BLOOMERY_HOST on each machine to a name or address of its own by which the others "
            f"reach it; another --job does not help. Where this machine was rebooted meanwhile: {_NEW_JOB}",
        )

    def _decisions(self) -> Iterator[dict[str, Any]]:
        for path in self._directory.glob("decision-*.json"):
            yield self.get(path.stem) or {}

    @property
    def host(self) -> str:
        """The name of this launcher's host."""
        return self._own.host

    def beat(self, *, asked: int = 0, departs: str = "") -> None:
        """Write this launcher's card. A disk that refuses it makes this launcher silent for the others."""
        self._own = replace(self._own, beats=self._own.beats + 1, asked=asked, departs=departs)
        path = self._directory / f"{self._own.host}.json"
        try:
            durable.refresh(path, json.dumps(asdict(self._own)) + "\n")
        except OSError as refused:
            raise storage_error(refused, path=path, doing="Writing this launcher's heartbeat") from refused

    def hosts(self) -> list[str]:
        """Return all hosts that ever had a card, in natural order: node-2 before node-10."""
        names = [path.stem for path in self._directory.glob("*.json") if not _RECORD.match(path.stem)]
        return sorted(names, key=natural_sort_key)

    def card(self, host: str) -> LauncherCard | None:
        """Read a launcher's card now; None where there is none that can be read."""
        record = self.get(host)
        if record is None:
            return self._seen[host][0] if host in self._seen else None
        card = LauncherCard(**known_values(LauncherCard, record))
        if host not in self._seen or self._seen[host][0] != card:
            self._seen[host] = (card, self.now())
        return card

    def now(self) -> float:
        """Return the seconds during which this launcher really watched the others."""
        return self._clock.look(most_s=self.silence_s / 3)

    def is_alive(self, host: str) -> bool:
        """Return whether a launcher's card has changed within the allowed silence; reads it."""
        if host == self._own.host:
            return True
        return self.card(host) is not None and self.now() - self._seen[host][1] <= self.silence_s

    def asked(self, hosts: Iterable[str]) -> int:
        """Return the signal by which somebody asked one of these launchers to end; 0 where nobody did."""
        cards = [self.card(host) for host in hosts]
        return max((card.asked for card in cards if card), default=0)

    def departs(self, hosts: Iterable[str]) -> str:
        """Return why one of these launchers has let the run save and stop; "" where none did."""
        cards = [self.card(host) for host in hosts]
        return next((card.departs for card in cards if card and card.departs), "")

    def leads(self) -> bool:
        """Return whether no launcher before this one, in the order of hosts, is alive. Asked all the time."""
        self.now()  # counts the time in which no other card is read
        for host in self.hosts():
            if host == self._own.host:
                return True
            if self.is_alive(host):
                return False
        return False

    def living(self) -> list[str]:
        """Return the hosts whose launchers are alive, in natural order; reads all cards."""
        return [host for host in self.hosts() if self.is_alive(host)]

    def put(self, name: str, record: dict[str, Any]) -> bool:
        """Create a record; returns whether this launcher was the first to do so. Raises StorageError."""
        path = self._directory / f"{name}.json"
        try:
            durable.create(path, json.dumps(record, ensure_ascii=False) + "\n")
        except FileExistsError:
            self._clear_if_left_empty(path)
            return False
        except OSError as refused:
            raise storage_error(refused, path=path, doing="Deciding with the other launchers") from refused
        return True

    def _clear_if_left_empty(self, path: Path) -> None:
        """Take a record away that has been empty for the allowed silence, so that the next `put` creates it.

        Where there are no hard links, a launcher that dies while it creates a record leaves it so.
        """
        with suppress(FileNotFoundError):  # another launcher was first
            since = self._empty_since.setdefault(path.name, self.now())
            if path.stat().st_size > 0:
                del self._empty_since[path.name]
            elif self.now() - since > self.silence_s:
                left = path.with_name(f".{path.name}.{self._own.host}")
                durable.replace(path, left)
                if left.stat().st_size > 0:  # it was written in this very moment
                    durable.replace(left, path)

    def get(self, name: str) -> dict[str, Any] | None:
        """Read a record; None where there is none, or none that is complete."""
        try:
            record = json.loads((self._directory / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def put_facts(self, facts: NodeFacts) -> None:
        """Write the facts of this node, before its first card. Raises StorageError."""
        self.put(f"facts-0-{self._own.host}", facts.to_json())

    def facts(self, hosts: Iterable[str]) -> dict[str, NodeFacts]:
        """Return the facts of the nodes that have written them."""
        records = {host: self.get(f"facts-0-{host}") for host in hosts}
        return {host: NodeFacts.from_json(record) for host, record in records.items() if record is not None}

    def has(self, name: str) -> bool:
        """Return whether there is a record of this name."""
        return (self._directory / f"{name}.json").exists()


_RECORD = re.compile(r"(?:decision|ending|ask|result|stacks|facts|claim)-\d")


def _machine_of(process: object) -> str:
    """Return the part of a `process_identity` that all processes of a machine share until it is rebooted."""
    return str(process or "").rpartition("/")[0]


def natural_sort_key(host: str) -> list[tuple[int, str]]:
    """Return a key that sorts node-2 before node-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]


def assign_hosts(
    before: Iterable[str], *, living: Iterable[str], bad: Iterable[str], wanted: int
) -> list[str]:
    """Return the hosts of the next attempt, those that go on in their old places, so that ranks keep theirs.

    before: the hosts of the attempt before. living: hosts whose launchers are alive. bad: hosts to leave out.
    The list is shorter than `wanted` where there are too few.
    """
    left_out = set(bad)
    usable = [host for host in living if host not in left_out]
    old = list(before)
    fresh = [host for host in usable if host not in old]
    chosen = [host if host in usable else (fresh.pop(0) if fresh else "") for host in old]
    chosen = [host for host in chosen if host]
    return (chosen + fresh)[:wanted]
