"""Peers as processes on this machine, what can be done to them, and what the coordinator saw of it all."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bloomery.coordination.etcd import Etcd
from bloomery.data.position import merged, total
from bloomery.protocol.encoding import decode
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit, Ready

DEADLINE_S = 120.0
AFTER_AN_END_S = 60.0
"""How much longer something is waited for once a peer has ended with an error."""

ELASTIC = {
    "inner_steps": 3,
    "minimum_peers": 1,
    "grace_s": DEADLINE_S,
    "patience_s": DEADLINE_S,
    "heartbeat_s": 0.3,
    "lease_s": 2.0,
    "stall_s": 3.0,
    "streams": 2,
}


class GrowingFile:
    """The objects of a file of JSON lines that somebody appends to; each is read once.

    It stays open, so that a new file of its name, after the directory was removed, is not taken for it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1
        self._partial = b""
        self._objects: list[dict] = []
        self._lock = threading.Lock()

    def objects(self) -> list[dict]:
        """All so far; a line that has no end yet does not count."""
        with self._lock:  # a test may look from several threads
            if self._file < 0:
                if not self._path.exists():
                    return []
                self._file = os.open(self._path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._file)
            while new := os.read(self._file, 1 << 20):
                self._partial += new
            *lines, self._partial = self._partial.split(b"\n")
            self._objects += map(json.loads, lines)
            return list(self._objects)


class Peer:
    """One peer's process: the parent, whose children are the ranks."""

    def __init__(
        self, name: str, directory: Path, process: subprocess.Popen[bytes], journal: str = "journal.jsonl"
    ) -> None:
        self.name, self.directory, self.process = name, directory, process
        self._journal = directory / journal
        self._events = GrowingFile(self._journal)
        self._notes: dict[int, GrowingFile] = {}

    @property
    def ranks(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    def signal(self, number: int, *, to: str = "rank") -> None:
        """To the ranks, to the parent, or to all, as when the machine stands still."""
        processes = self.ranks if to == "rank" else [self.process.pid]
        processes += self.ranks if to == "all" else []
        for process in processes:
            with suppress(ProcessLookupError):  # its parent's end has ended it
                os.kill(process, number)

    def ask(self, what: str) -> None:
        (self.directory / what).touch()

    def unask(self, what: str) -> None:
        (self.directory / what).unlink()

    def notes(self, what: str, rank: int = 0) -> list[dict]:
        if rank not in self._notes:
            self._notes[rank] = GrowingFile(self.directory / f"rank{rank}.jsonl")
        return [note for note in self._notes[rank].objects() if note["what"] == what]

    def events(self, event: str) -> list[dict]:
        return [one for one in self._events.objects() if one["event"] == event]

    @property
    def journal(self) -> str:
        return self._journal.read_text() if self._journal.exists() else ""

    def wait(self) -> int:
        return self.process.wait(5 * DEADLINE_S)

    @property
    def said(self) -> str:
        return (self.directory / "out").read_text()


class Crew:
    """Peers of one run. A context manager: leaves no process behind."""

    asked_to_end = (0,)
    deadline_s = DEADLINE_S
    """How a peer ends that was sent SIGTERM."""

    def __init__(self, base: Path, endpoint: str, run: str, **elastic: object) -> None:
        self.base, self.endpoint, self.run = base, endpoint, run
        self.elastic = ELASTIC | elastic
        self.peers: dict[str, Peer] = {}
        self._started: list[Peer] = []
        self.dead: list[Peer] = []
        in_memory = Path("/dev/shm")
        self._memory = tempfile.TemporaryDirectory(
            prefix="bloomery-crew-", dir=in_memory if in_memory.is_dir() else None
        )
        self.limits: dict[str, float] = {}
        self.step_s = 0.01
        self.etcd, self.keys = Etcd([endpoint], deadline_s=DEADLINE_S), Keys(run)
        self._readies: dict[tuple[int, str], Ready] = {}
        self._seen_revision = 0

    @property
    def memory(self) -> str:
        """Where ranks keep what they hold, and what they fetch."""
        return self._memory.name

    def start(self, name: str, **options: object) -> Peer:
        directory = self.base / name
        directory.mkdir(exist_ok=True)
        chosen = {"samples": 1 << 40, "elements": 5000, "step_s": self.step_s, "inner_steps": 3} | options
        given = {
            "peer": name,
            "run": self.run,
            "endpoint": self.endpoint,
            "directory": str(directory),
            "memory": self._memory.name,
            "elastic": self.elastic | chosen.pop("elastic", {}),
            "limits": self.limits,
            **chosen,
        }
        command = [sys.executable, str(Path(__file__).with_name("fake_peer.py")), json.dumps(given)]
        with (directory / "out").open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        peer = self.peers[name] = Peer(name, directory, process)
        self._started.append(peer)
        return peer

    def kill(self, peer: Peer, *, to: str = "rank") -> None:
        """Kill -9, of the ranks or of everything; it ends badly."""
        self.dead.append(peer)
        peer.signal(signal.SIGKILL, to=to)

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait for something that peers bring about."""
        deadline = time.monotonic() + self.deadline_s
        while not holds():
            if self.has_ended_badly:
                deadline = min(deadline, time.monotonic() + AFTER_AN_END_S)
            if time.monotonic() > deadline:
                raise AssertionError(f"this did not happen: {what}\n{self.last_words()}")
            time.sleep(0.05)

    @property
    def has_ended_badly(self) -> bool:
        """Whether a peer that nobody killed has ended with an error: then there is little to wait for."""
        living = [peer for peer in self.peers.values() if peer not in self.dead]
        return any(peer.process.poll() not in (None, 0, *self.asked_to_end) for peer in living)

    def last_words(self) -> str:
        """For each peer how it ended, if it did, and the end of what it said and wrote into its journal."""
        words = ""
        for peer in self.peers.values():
            status = peer.process.poll()
            words += f"--- {peer.name}: {'lives' if status is None else f'ended with {status}'}\n"
            words += f"{peer.said[-1500:]}\n{peer.journal[-1500:]}\n"
        return words

    def until_committed(self, *members: str, more: int = 1) -> Commit:
        """Wait for `more` rounds, from now on, that exactly these peers are in; the last of them."""
        after = max(self.rounds(newest=1), default=-1)

        def matching() -> list[Commit]:
            newest = self.rounds(newest=more + 8)
            if min(newest, default=0) > after + 1:
                newest = self.rounds()
            found = [commit for round, commit in sorted(newest.items()) if round > after]
            return [commit for commit in found if set(commit.members) == set(members)]

        self.until(lambda: len(matching()) >= more, f"a round of {members} after round {after}")
        return matching()[-1]

    def rounds(self, *, newest: int = 0) -> dict[int, Commit]:
        """Every commit, or so many of the newest."""
        found = self.etcd.list(self.keys.commits, newest=newest).items
        return {commit.round: commit for commit in (decode(item.value, Commit) for item in found)}

    def check_accounts(self) -> None:
        """Every sample that counts as consumed was spent once, by a peer that its round's commit names.

        After a thousand rounds the first commits are gone, but for those that a save rests on. What was
        consumed before the newest rounds without a gap is then taken for granted.
        """
        rounds = self.rounds()
        gaps = [round for round in rounds if round > 0 and round - 1 not in rounds]
        rounds = {round: commit for round, commit in rounds.items() if round >= max(gaps, default=0)}
        readies = self._last_readies()
        spent: tuple[range, ...] = ()
        first, before = min(rounds, default=0), 0
        if first > 0:
            own = sum(total(readies[first, peer].spent) for peer in rounds[first].members)
            before = rounds[first].position.consumed - own
        for round, commit in sorted(rounds.items()):
            assert commit.rewind_to is None
            for peer in commit.members:
                part = readies[round, peer].spent
                joined = merged((*spent, *part))
                assert total(joined) == total(spent) + total(part), f"round {round}: spent twice"
                spent = joined
            assert commit.position.consumed == before + total(spent), f"round {round}"

    def check_digests(self) -> None:
        """Every peer that was in a round that is still known went on with the state that the commit names."""
        rounds = self.rounds()
        for peer in self._started:
            for note in peer.notes("holding"):
                if note["round"] > 0 and note["round"] in rounds:
                    assert note["digest"] == rounds[note["round"]].digest, (peer.name, note)

    def stop(self) -> None:
        """End every peer that lives, as Ctrl-C does, and see that all end well."""
        living = [peer for peer in self._started if peer not in self.dead]
        for peer in living:
            peer.process.send_signal(signal.SIGTERM)
        for peer in living:
            assert peer.wait() in self.asked_to_end, peer.said

    def _last_readies(self) -> dict[tuple[int, str], Ready]:
        """What was ever offered: the last word of each peer in each round. Each change is read once."""
        prefix = self.keys.peers
        watch = self.etcd.watch(prefix, after=self._seen_revision, idle_s=DEADLINE_S)
        marker = f"{prefix}marker-{secrets.token_hex(8)}"
        self.etcd.put(marker, "until here")
        is_complete = False
        for batch in watch.batches():
            for change in batch.changes:
                is_complete |= change.key == marker
                if change.item is not None and self.keys.parts(change.key)[0] == "ready":
                    ready = decode(change.item.value, Ready)
                    self._readies[ready.round, ready.peer] = ready
            self._seen_revision = batch.revision
            if is_complete:
                break
        watch.stop()
        self.etcd.delete(marker)
        return self._readies

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        for peer in self._started:
            if peer.process.poll() is None:
                for process in (*peer.ranks, peer.process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                peer.process.wait()
        self._memory.cleanup()
        self.etcd.close()
