"""Many peers of one run: what a round costs 64 real agents and their coordinator, and 500 members.

64 agents with NumPy ranks train against a real etcd on this machine; etcd's own counters say what a round
costs. Then one real view, decision and transaction stand beside a program that writes what 125, 250 and 500
members write. Counts do not depend on the machine's load; seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from contract import Measurement, measurement, report
from tests.agent.crew import Crew
from tests.protocol import example

from bloomery.agent.registration import links_to_measure
from bloomery.coordination import transactions
from bloomery.coordination.attempts import ring_order
from bloomery.coordination.decide import CommitRound, Propose, decide
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_process import EtcdServer, start_single
from bloomery.coordination.run_view import RunView, SnapshotListener
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Done, ProposedAttempt, RoundShares

WITHIN_S = 300.0
COUNTERS = {
    "writes": ("etcd_mvcc_put_total", "etcd_debugging_mvcc_put_total"),
    "deletes": ("etcd_mvcc_delete_total", "etcd_debugging_mvcc_delete_total"),
    "transactions": ("etcd_mvcc_txn_total", "etcd_debugging_mvcc_txn_total"),
    "ranges": ("etcd_mvcc_range_total", "etcd_debugging_mvcc_range_total"),
    "events": ("etcd_debugging_mvcc_events_total",),
    "proposals": ("etcd_server_proposals_applied_total",),
    "sent": ("etcd_network_client_grpc_sent_bytes_total",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--agents", type=int, default=64, help="real agents; 0: none")
    options.add_argument("--rounds", type=int, default=10, help="that are measured")
    options.add_argument("--simulated", type=int, default=500, help="members of the largest simulated run")
    options.add_argument("--members", help=argparse.SUPPRESS)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args(arguments)
    if chosen.members:
        return play_members(json.loads(chosen.members))
    found = [*orders(64, 0.05), *orders(500, 1.0)]
    with tempfile.TemporaryDirectory() as place:
        if chosen.agents:
            found += agents(Path(place) / "agents", chosen.agents, chosen.rounds)
        if chosen.simulated:
            found += simulated(Path(place), chosen.simulated, chosen.rounds)
    return report(found, as_json=chosen.json)


def orders(count: int, bar_s: float) -> list[Measurement]:
    """The search for the ring's order, from links that all or only the usual number measured."""
    chance = random.Random(count)
    names = [f"p{number:03d}" for number in range(count)]
    whole = {one: {two: chance.uniform(10.0, 1000.0) for two in names if two != one} for one in names}
    usual = {one: {two: whole[one][two] for two in links_to_measure(names, one)} for one in names}
    found = []
    for what, rates in (("all links", whole), ("the links that peers measure", usual)):
        began = time.process_time()
        order, dropped = ring_order(names, rates=rates)
        seconds = time.process_time() - began
        slowest = min(
            rates[one].get(two, 0.0) for one, two in zip(order, (*order[1:], order[0]), strict=True)
        )
        assert not dropped
        found.append(
            measurement(
                f"elastic_scale: the ring's order of {count}, {what}",
                seconds,
                unit="s",
                reference=f"processor time; slowest hop {slowest:.0f} of 10 to 1000 Mbit/s",
                bar=f"<= {bar_s}",
            )
        )
    return found


def agents(place: Path, count: int, rounds: int) -> list[Measurement]:
    """Real agents, connections and rings: from the last part that is offered to the commit."""
    place.mkdir()
    server = start_single(place / "etcd")
    names = [f"p{number:03d}" for number in range(count)]
    slow = {"still_s": WITHIN_S, "stall_s": 60.0, "lease_s": 60.0, "heartbeat_s": 5.0, "streams": 1}
    try:
        with Crew(place, server.endpoint, "scale", peers=count, minimum_peers=count, **slow) as crew:
            crew.deadline_s = WITHIN_S
            crew.limits = {"step_s": WITHIN_S, "connect_s": 60.0}
            for name in names:
                crew.start(name, elements=10_000, step_s=0.5)
            clock = PartsAndCommits(server.endpoint, "scale")
            crew.until(lambda: clock.rounds >= 3, "three rounds")
            processes = [peer.process.pid for peer in crew.peers.values()]
            before, cpu = counters(server), (spent_s(processes), spent_s([server.process.pid]))
            begun = clock.rounds
            crew.until(lambda: clock.rounds >= begun + rounds, "the rounds that are measured")
            made = clock.rounds - begun
            after = counters(server)
            cpu = (spent_s(processes) - cpu[0], spent_s([server.process.pid]) - cpu[1])
            seconds = clock.commit_s[-made:]
    finally:
        server.stop()
    share = made * count
    counted = {name: (after[name] - before[name]) / share for name in after}
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; {made} rounds"
    return [
        measurement(
            f"elastic_scale: {count} agents: the last part → commit",
            median(seconds),
            unit="s",
            reference=f"{load}; worst {max(seconds):.2f} s; {cpu[0] / made:.2f} s of processor time a round "
            f"in all agents, {cpu[1] / made:.2f} s in etcd",
            bar="<= 1.0",
        ),
        measurement(
            f"elastic_scale: {count} agents: writes to etcd a round and peer",
            counted["writes"] + counted["deletes"],
            unit="writes",
            reference=_told(counted),
            bar="<= 8",
        ),
    ]


def simulated(place: Path, most: int, rounds: int) -> list[Measurement]:
    """One real peer among members of whom only the writes are real: a quarter, a half and all of them."""
    found, cost = [], {}
    for count in (most // 4, most // 2, most):
        cost[count] = _simulated(place / f"simulated-{count}", count, rounds)
        counted = cost[count]
        found.append(
            measurement(
                f"elastic_scale: {count} members: writes to etcd a round and peer",
                counted["writes"] + counted["deletes"],
                unit="writes",
                reference=f"{_told(counted)}; one peer spends {counted['cpu_s']:.3f} s of processor a round",
                bar="<= 8",
            )
        )
    growth = cost[most]["cpu_s"] / cost[most // 4]["cpu_s"]
    found.append(
        measurement(
            f"elastic_scale: what a round costs one peer of {most}, beside one of {most // 4}",
            growth,
            unit="times",
            reference=f"linear would be {most / (most // 4):.1f}, squares {(most / (most // 4)) ** 2:.1f}",
            bar="<= 6",
        )
    )
    return found


def _simulated(place: Path, count: int, rounds: int) -> dict[str, float]:
    """What etcd counts, and what one peer spends that looks at the run as an agent does."""
    server, keys = start_single(place), Keys("members")
    settings = RoundSettings(inner_steps=4, total_samples=1 << 40, peers=count, minimum_peers=count)
    options = {"endpoint": server.endpoint, "count": count}
    command = [sys.executable, str(Path(__file__)), "--members", json.dumps(options)]
    awake = threading.Event()
    with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd, RunView(etcd, keys) as view:
        news = SnapshotListener(
            view, wake=awake.set, failed=lambda error: awake.set()
        )  # the next look raises the error
        members = subprocess.Popen(command)
        try:
            snapshot, spent, before, begun = view.snapshot, 0.0, {}, None
            until = time.monotonic() + WITHIN_S
            news.start(snapshot.version)
            while begun is None or snapshot.round < begun + rounds:
                assert time.monotonic() < until, f"round {snapshot.round} does not end"
                awake.wait(1.0)
                awake.clear()
                looked = time.thread_time()
                snapshot = view.snapshot
                if begun is None and snapshot.round >= 3:
                    begun, spent, before = snapshot.round, time.process_time(), counters(server)
                decision = decide(snapshot, me="p000", settings=settings, now=time.monotonic())
                if isinstance(decision, Propose):
                    transactions.propose(etcd, keys, snapshot, decision)
                elif isinstance(decision, CommitRound):
                    transactions.commit_round(etcd, keys, snapshot, decision)
                news.note_cost(time.thread_time() - looked)
            spent, after = time.process_time() - spent, counters(server)
        finally:
            news.close()
            members.kill()
            members.wait()
            server.stop()
    counted = {name: (after[name] - before[name]) / rounds / count for name in after}
    return counted | {"cpu_s": spent / rounds}


def play_members(options: Mapping[str, object]) -> int:
    """Write what members write in each round, until this process is killed."""
    keys, count = Keys("members"), int(str(options["count"]))
    names = [f"p{number:03d}" for number in range(count)]
    with Etcd([str(options["endpoint"])], deadline_s=WITHIN_S) as etcd, ThreadPoolExecutor(8) as pool:
        digests, epochs = {0: "0" * 32}, {}

        def listed(name: str, round: int) -> None:
            record = example.member(
                peer=name,
                incarnation="1",
                round=round,
                digest=digests[round],
                addresses=("192.0.2.1:29600",),
                serves=("https://192.0.2.1:29601",),
            )
            etcd.put(keys.member(name), encode_text(record))

        def offers(name: str, shares: RoundShares) -> None:
            ready = example.ready(
                peer=name, round=shares.round, tokens=16, steps=4, spent=shares.shares[name], norm=1.0
            )
            etcd.put(keys.ready(shares.round, name), encode_text(ready))

        def is_done(name: str, tried: ProposedAttempt) -> None:
            round, epoch = tried.attempt.round, tried.attempt.epoch
            done = Done(peer=name, round=round, epoch=epoch, digest=digests[round])
            etcd.put(keys.done(round, epoch, name), encode_text(done))
            if round > 2:
                etcd.delete(keys.ready(round - 2, name))
                etcd.delete(keys.done(round - 2, epochs[round - 2], name))

        list(pool.map(lambda name: listed(name, 0), names))
        for change in _shared_changes(etcd, keys):
            kind, *_ = keys.parts(change.key)
            if change.item is None:
                continue
            if kind == "shares":
                shares = decode(change.item.value, RoundShares)
                digests[shares.round] = f"{shares.round:032d}"
                if shares.round > 1:
                    list(pool.map(lambda name, round=shares.round - 1: listed(name, round), names))
                list(pool.map(lambda name, shares=shares: offers(name, shares), names))
            if kind == "attempt":
                tried = decode(change.item.value, ProposedAttempt)
                epochs[tried.attempt.round] = tried.attempt.epoch
                list(pool.map(lambda name, tried=tried: is_done(name, tried), names))
    return 0


def _shared_changes(etcd: Etcd, keys: Keys):
    """Every change of shares and attempts: only these are watched, so that this program spends little."""
    changes: list = []
    arrived = threading.Condition()

    def follow(prefix: str) -> None:
        for batch in etcd.watch(prefix, after=0, idle_s=WITHIN_S).batches():
            with arrived:
                changes.extend(batch.changes)
                arrived.notify_all()

    for prefix in (f"{keys.root}shares/", f"{keys.root}attempt/"):
        threading.Thread(target=follow, args=(prefix,), daemon=True).start()
    while True:
        with arrived:
            arrived.wait_for(lambda: changes, timeout=WITHIN_S)
            taken, changes[:] = list(changes), []
        yield from taken


class PartsAndCommits:
    """When the last part of each round was offered, and how much later its commit was there.

    rounds: how many commits were seen. commit_s: for each of them the seconds since the last part.
    """

    def __init__(self, endpoint: str, run: str) -> None:
        self.rounds, self.commit_s = 0, []
        self._etcd, self._keys = Etcd([endpoint], deadline_s=WITHIN_S), Keys(run)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        last_s = time.monotonic()
        for batch in self._etcd.watch(self._keys.root, after=0, idle_s=WITHIN_S).batches():
            for change in batch.changes:
                kind, *_ = self._keys.parts(change.key)
                if change.item is not None and kind == "ready":
                    last_s = time.monotonic()
                if change.item is not None and kind == "commit":
                    self.commit_s.append(time.monotonic() - last_s)
                    self.rounds += 1


def counters(server: EtcdServer) -> dict[str, float]:
    """What etcd has counted since it was started."""
    with urllib.request.urlopen(f"{server.endpoint}/metrics", timeout=30.0) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    counted = {}
    for name, spellings in COUNTERS.items():
        counted[name] = next((float(values[spelling]) for spelling in spellings if spelling in values), 0.0)
    return counted


def spent_s(processes: Sequence[int]) -> float:
    """Processor seconds that processes have used."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _told(counted: Mapping[str, float]) -> str:
    """What etcd counted, for each round and peer."""
    names = ("writes", "deletes", "transactions", "ranges", "events")
    told = ", ".join(f"{counted[name]:.1f} {name}" for name in names)
    return f"a round and peer: {told}, {counted['sent'] / 1000:.0f} kB sent"


if __name__ == "__main__":
    sys.exit(main())
