"""What the loss, silence, leaving and coming of peers cost the others: seconds until the next commit.

Real parents, etcd, connections, rings and fetches on this machine; the ranks are NumPy's, so that nothing but
the rounds takes time: their own compute, three steps of 10 ms, is part of it. Medians of each case are told.

--joins N counts newcomers, one after the other, that leave or are killed; a source of every fourth is killed
while it fetches. --record keeps what was seen in a file, from which a later call goes on.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from contract import Measurement, measurement, report
from tests.agent.crew import ELASTIC, Crew, Peer

from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_process import start_single
from bloomery.protocol.encoding import decode
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit

WITHIN_S = 120.0
ELEMENTS = 1_000_000
SKEW_S = 12.0
STILL_S = 3.0
"""After which a rank that makes no step counts as hung."""
PAUSE_AT_END_S = 0.1
"""How long a lost peer's parent waits before it ends. Its end takes 60 ms of processor time, which another
machine would spend; here the two others would wait for it on the same two cores."""
STATE_ELEMENTS, STATE_MBIT_S = 4_000_000, 200.0
"""Of what newcomers fetch, and how fast each source gives it: long enough to be killed meanwhile."""


class CommitClock:
    """When each commit was seen, by a watch of its own."""

    def __init__(self, endpoint: str, run: str) -> None:
        self.seen: list[tuple[float, Commit]] = []
        self._etcd, self._keys = Etcd([endpoint], deadline_s=WITHIN_S), Keys(run)
        self._watch = self._etcd.watch(self._keys.commits, after=0, idle_s=WITHIN_S)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for batch in self._watch.batches():
            now = time.monotonic()
            for change in batch.changes:
                if change.item is not None:
                    self.seen.append((now, decode(change.item.value, Commit)))

    def first(self, since: float, holds: Callable[[Commit], bool]) -> float:
        """Seconds from `since` to the first commit after it of which this holds."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            for at, commit in self.seen:
                if at > since and holds(commit):
                    return at - since
            time.sleep(0.002)
        raise AssertionError("no such commit")

    def longest_gap(self, since: float) -> float:
        """Between two commits, the last one before `since` counts too."""
        times = [at for at, _ in self.seen]
        begun = [at for at in times if at <= since][-1:] + [at for at in times if at > since]
        return max((later - earlier for earlier, later in pairwise(begun)), default=0.0)

    def usual_gap(self, before: float) -> float:
        """The median time between two of the last commits."""
        times = [at for at, _ in self.seen if at <= before][-9:]
        return median(later - earlier for earlier, later in pairwise(times))


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=5, help="of each case")
    options.add_argument("--json", action="store_true")
    options.add_argument("--joins", type=int, default=4, help="newcomers that are counted; 0: none")
    options.add_argument("--record", type=Path, help="where joins are kept, so that another call goes on")
    options.add_argument("--only-joins", action="store_true")
    options.add_argument("--minutes", type=float, default=60.0, help="for joins; then what was seen is told")
    chosen = options.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left behind
    with tempfile.TemporaryDirectory() as place:
        server = start_single(Path(place) / "etcd")
        try:
            found = []
            if not chosen.only_joins:
                found += [
                    *three(server.endpoint, Path(place), chosen.repeats),
                    *twelve(server.endpoint, Path(place)),
                ]
            if chosen.joins:
                record = chosen.record or Path(place) / "joins.jsonl"
                found += joins(
                    server.endpoint, Path(place), count=chosen.joins, record=record, minutes=chosen.minutes
                )
        finally:
            server.stop()
    return report(found, as_json=chosen.json)


def three(endpoint: str, place: Path, repeats: int) -> list[Measurement]:
    """Cases of three peers, of which the second is hurt and comes back."""
    base = place / "three"
    base.mkdir()
    with Crew(base, endpoint, "three", peers=3) as crew:
        crew.limits = {"step_s": STILL_S}
        for name in "abc":
            crew.start(name, elements=ELEMENTS, pause_at_end_s=PAUSE_AT_END_S)
        clock = CommitClock(endpoint, "three")
        cases: dict[str, tuple[Callable[[Crew, CommitClock], float], float, str]] = {
            "kill -9 outside the ring": (_killed_outside, 1.5, "supervised: its parent sees it"),
            "kill -9 inside the ring": (_killed_inside, 2.0, "torchft: 10.3 s, and the round is lost"),
            "a host vanishes": (_vanished, ELASTIC["lease_s"] + 1, f"lease {ELASTIC['lease_s']} s"),
            "SIGSTOP inside the ring": (_stopped, ELASTIC["stall_s"] + 1, f"stall {ELASTIC['stall_s']} s"),
            "SIGSTOP outside the ring": (_stopped_outside, STILL_S + 1, f"still for {STILL_S} s"),
            "leave": (_left, 0.5, "SIGTERM of its parent"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        joins, stalls = [], []
        for number in range(repeats):
            for name, (case, _, _) in cases.items():
                crew.until_committed("a", "b", "c", more=2)
                seconds[name].append(case(crew, clock))
                print(f"{number + 1} of {repeats}: {name}: {seconds[name][-1]:.3f} s", file=sys.stderr)
            crew.until_committed("a", "b", "c", more=2)
            join, stall = _joined(crew, clock, f"d{number}")
            joins.append(join)
            stalls.append(stall)
        crew.stop()
    found = [
        measurement(
            f"elastic: {name} → next commit",
            median(seconds[name]),
            unit="s",
            reference=f"{beside}; worst of {repeats}: {max(seconds[name]):.2f} s",
            bar=f"<= {bar}",
        )
        for name, (_, bar, beside) in cases.items()
    ]
    worst = f"worst of {repeats}: {max(joins):.2f} s"
    return [
        *found,
        measurement(
            "elastic: newcomer ready → in a round", median(joins), unit="s", reference=worst, bar="<= 1.0"
        ),
        measurement(
            "elastic: longest gap of the others meanwhile",
            median(stalls),
            unit="s",
            reference=f"worst: {max(stalls):.2f} s",
            bar="<= 1.0",
        ),
    ]


def twelve(endpoint: str, place: Path) -> list[Measurement]:
    """One of twelve is slow; four are lost at once."""
    base = place / "twelve"
    base.mkdir()
    names = [f"p{number:02d}" for number in range(12)]
    with Crew(base, endpoint, "twelve", peers=12, grace_s=60.0, patience_s=10.0) as crew:
        for name in names:
            crew.start(name, elements=ELEMENTS, pause_at_end_s=len(names) * PAUSE_AT_END_S)
        clock = CommitClock(endpoint, "twelve")
        crew.until_committed(*names)
        slow = crew.peers[names[0]]
        slow.ask("hold")
        began = time.monotonic()
        time.sleep(SKEW_S)
        slow.unask("hold")
        clock.first(time.monotonic(), lambda commit: True)
        with_all = [len(commit.members) for at, commit in clock.seen if at > began + 1.0]
        began = time.monotonic()
        for name in names[:4]:
            crew.kill(crew.peers[name])
        seconds = clock.first(began, lambda commit: set(commit.members) == set(names[4:]))
        crew.stop()
    return [
        measurement(
            f"elastic: one of 12 is {SKEW_S:g} s behind: fewest members of a commit meanwhile",
            min(with_all),
            unit="members",
            reference=f"{len(with_all)} commits",
            bar=">= 12",
        ),
        measurement(
            "elastic: 4 of 12 killed at once → commit of the 8",
            seconds,
            unit="s",
            reference="no checkpoint is read; INTELLECT-1 restarted from one",
        ),
    ]


def joins(endpoint: str, place: Path, *, count: int, record: Path, minutes: float) -> list[Measurement]:
    """Newcomers counted: how many were in a round with the bits of the others, and what that took."""
    base = place / "joins"
    base.mkdir()
    seen = _recorded(record)
    with Crew(base, endpoint, "joins", peers=3, bandwidth_limit_mbit_s=STATE_MBIT_S) as crew:
        for name in "abc":
            crew.start(name, elements=STATE_ELEMENTS)
        clock = CommitClock(endpoint, "joins")
        until = time.monotonic() + 60.0 * minutes
        for number in range(len(seen), count):
            if time.monotonic() > until:
                break
            crew.until_committed("a", "b", "c", more=2)
            seen.append(_join(crew, clock, number))
            with record.open("a") as file:
                file.write(json.dumps(vars(seen[-1])) + "\n")
            print(f"join {number + 1} of {count}: {seen[-1]}", file=sys.stderr)
        crew.until_committed("a", "b", "c")  # who was killed is back
        crew.stop()
    return _of_joins(seen)


@dataclass(frozen=True, kw_only=True)
class Join:
    """One newcomer. seconds: from its ranks being ready to its first round, without the transfer.

    stall_s: the others' longest time between two commits meanwhile, beyond what it was before, round_s.
    killed: the source that was, meanwhile. lost: its ranks, or its host with all that ran there.
    """

    seconds: float
    transfer_s: float
    stall_s: float
    round_s: float
    killed: str
    lost: str
    identical: bool


def _recorded(record: Path) -> list[Join]:
    lines = record.read_text().splitlines() if record.exists() else []
    return [Join(**json.loads(line)) for line in lines]


def _join(crew: Crew, clock: CommitClock, number: int) -> Join:
    name, killed, lost = f"d{number:03d}", "", ""
    newcomer = crew.start(name, elements=STATE_ELEMENTS, first=7.0)
    crew.until(lambda: newcomer.notes("holding"), "the newcomer is ready")
    began = time.monotonic()
    usual = clock.usual_gap(began)
    if number % 4 == 3:
        killed, lost = "abc"[number // 4 % 3], ("ranks", "host")[number // 4 % 2]
        fetched = Path(crew.memory) / f"{name}-fetched"
        crew.until(lambda: any(fetched.glob("*")), "the newcomer fetches")
        crew.kill(crew.peers[killed], to="all" if lost == "host" else "rank")
    seconds = clock.first(began, lambda commit: name in commit.members)
    gap = clock.longest_gap(began)
    round = min(round for round, commit in crew.rounds().items() if name in commit.members)
    identical = _is_identical(crew, newcomer, round)
    if number % 2:
        crew.kill(newcomer, to=("rank", "all")[number // 2 % 2])
    else:
        newcomer.process.send_signal(signal.SIGTERM)
    newcomer.wait()
    if killed:
        crew.peers[killed].wait()
        crew.start(killed, elements=STATE_ELEMENTS)
    transfer = sum(event["seconds"] for event in newcomer.events("replaced"))
    return Join(
        seconds=seconds - transfer,
        transfer_s=transfer,
        stall_s=gap - usual,
        round_s=usual,
        killed=killed,
        lost=lost,
        identical=identical,
    )


def _is_identical(crew: Crew, newcomer: Peer, round: int) -> bool:
    """Whether it holds, after its first round, what the commit names and the others hold."""

    def held(peer: Peer) -> list[dict[str, object]]:
        return [note for note in peer.notes("holding") if note["round"] == round]

    crew.until(lambda: held(newcomer), f"{newcomer.name} says what it holds after round {round}")
    commit = crew.rounds()[round]
    others = [crew.peers[name] for name in commit.members if name != newcomer.name]
    for peer in others:
        crew.until(lambda peer=peer: held(peer) or peer in crew.dead, f"{peer.name} says it, too")
    notes = [note for peer in (newcomer, *others) for note in held(peer)[-1:]]
    own = held(newcomer)[-1]["optimizer_of"]
    return len(notes) > 1 and {note["digest"] for note in notes} == {commit.digest} and own != newcomer.name


def _of_joins(seen: list[Join]) -> list[Measurement]:
    identical = sum(one.identical for one in seen)
    killed = sum(bool(one.killed) for one in seen)
    found = [
        measurement(
            "elastic: newcomers in a round with the others' bits",
            100.0 * identical / len(seen),
            unit="%",
            reference=f"{identical} of {len(seen)}; a source killed meanwhile: {killed}",
            bar=">= 100",
        )
    ]
    lease_s = ELASTIC["lease_s"]
    for lost, what, most in (
        ("", "", 1.0),
        ("ranks", ", a source's ranks killed", 1.0),
        ("host", f", a source's host lost, lease {lease_s} s", lease_s + 1),
    ):
        some = [one for one in seen if one.lost == lost]
        for name, of in (
            ("ready → in a round, without the transfer", "seconds"),
            ("the others stall", "stall_s"),
        ):
            values = [getattr(one, of) for one in some]
            if values:
                beside = f"transfer {median(one.transfer_s for one in some):.2f} s"
                beside += f", rounds of {median(one.round_s for one in some):.2f} s"
                found.append(
                    measurement(
                        f"elastic: joins{what}: {name}",
                        median(values),
                        unit="s",
                        reference=f"{len(values)} newcomers, most {max(values):.2f} s; {beside}",
                        bar=f"<= {most}",
                    )
                )
    return found


def _without_b(commit: Commit) -> bool:
    return set(commit.members) == {"a", "c"}


def _killed_outside(crew: Crew, clock: CommitClock) -> float:
    peer = crew.peers["b"]
    peer.ask("hold")
    time.sleep(0.3)  # the others wait for it now
    began = time.monotonic()
    crew.kill(peer)
    return _afterwards(crew, clock, peer, began, "hold")


def _killed_inside(crew: Crew, clock: CommitClock) -> float:
    peer = _into_the_ring(crew)
    began = time.monotonic()
    crew.kill(peer)
    return _afterwards(crew, clock, peer, began, "stop_in_ring", "in_ring")


def _vanished(crew: Crew, clock: CommitClock) -> float:
    """Stands still as a whole, as when its cable is out; its sockets say nothing."""
    peer = crew.peers["b"]
    peer.ask("hold")
    time.sleep(0.3)
    began = time.monotonic()
    peer.signal(signal.SIGSTOP, to="all")
    seconds = clock.first(began, _without_b)
    peer.unask("hold")
    peer.signal(signal.SIGCONT, to="all")
    return seconds


def _stopped_outside(crew: Crew, clock: CommitClock) -> float:
    """Its parent lives, and holds the lease; only its steps stop."""
    peer = crew.peers["b"]
    began = time.monotonic()
    peer.ask("hold")  # within its step, which is not to end before the signal
    time.sleep(0.1)
    peer.signal(signal.SIGSTOP)
    seconds = clock.first(began, _without_b)
    peer.unask("hold")
    peer.signal(signal.SIGCONT)
    return seconds


def _stopped(crew: Crew, clock: CommitClock) -> float:
    peer = _into_the_ring(crew)
    began = time.monotonic()
    peer.signal(signal.SIGSTOP)
    for left in ("stop_in_ring", "in_ring"):
        peer.unask(left)
    seconds = clock.first(began, _without_b)
    peer.signal(signal.SIGCONT)
    return seconds


def _left(crew: Crew, clock: CommitClock) -> float:
    peer = crew.peers["b"]
    began = time.monotonic()
    peer.process.send_signal(signal.SIGTERM)
    seconds = clock.first(began, _without_b)
    peer.wait()
    crew.start("b", elements=ELEMENTS, pause_at_end_s=PAUSE_AT_END_S)
    return seconds


def _joined(crew: Crew, clock: CommitClock, name: str) -> tuple[float, float]:
    """From the newcomer's ranks saying what they hold to its first round; the others' longest gap since."""
    newcomer = crew.start(name, elements=ELEMENTS, first=7.0)
    crew.until(lambda: newcomer.notes("holding"), "the newcomer is ready")
    began = time.monotonic()
    seconds = clock.first(began, lambda commit: name in commit.members)
    gap = clock.longest_gap(began)
    newcomer.process.send_signal(signal.SIGTERM)
    newcomer.wait()
    return seconds, gap


def _into_the_ring(crew: Crew) -> Peer:
    peer = crew.peers["b"]
    peer.ask("stop_in_ring")
    crew.until((peer.directory / "in_ring").exists, "b is in the ring")
    return peer


def _afterwards(crew: Crew, clock: CommitClock, peer: Peer, began: float, *asked: str) -> float:
    """Wait for the others' commit, and bring the dead one back."""
    seconds = clock.first(began, _without_b)
    peer.process.wait(WITHIN_S)
    for one in asked:
        peer.unask(one)
    crew.start("b", elements=ELEMENTS, pause_at_end_s=PAUSE_AT_END_S)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
