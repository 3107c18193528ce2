"""The control plane of training between peers: what a commit costs, and what a coordinator's failure costs.

A real etcd on loopback, started here; the cluster of three with 50 ms heartbeats. Latencies stand beside bare
puts of the same run, taken in turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from contract import Measurement, measurement, report
from tests.protocol import example

from bloomery.coordination import transactions
from bloomery.coordination.decide import CommitRound, Propose, decide
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Etcd, TransactionResult
from bloomery.coordination.etcd_process import EtcdMember as Etcd3
from bloomery.coordination.etcd_process import (
    EtcdServer,
    free_ports,
    launch,
    start_member,
    start_single,
    wait_until_ready,
)
from bloomery.coordination.membership import Membership
from bloomery.coordination.run_view import RunView
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Member, RoundShares

PEERS = ("a", "b", "c", "d")
WITHIN_S = 60.0
SETTINGS = RoundSettings(inner_steps=100, total_samples=10**12, peers=len(PEERS), stagger_s=0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=50, help="commits and leaves that are timed")
    options.add_argument("--kills", type=int, default=3, help="of the coordinator, and of members of three")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        found = [
            *latencies(Path(directory) / "one", rounds_timed=chosen.rounds),
            restarts(Path(directory) / "two", kills=chosen.kills),
            failovers(Path(directory) / "three", kills=chosen.kills),
        ]
    return report(found, as_json=chosen.json)


def latencies(directory: Path, *, rounds_timed: int) -> list[Measurement]:
    """An attempt and a commit by their transactions, and a leave as another peer sees it."""
    server = start_single(directory)
    keys = Keys("latency")
    puts, attempts, commits, leaves = [], [], [], []
    try:
        with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd, RunView(etcd, keys) as view:
            for name in PEERS:
                etcd.put(keys.member(name), encode_text(_member(name)))
            _begin(etcd, keys, _until(view, lambda snapshot: len(snapshot.members) == len(PEERS)))
            for number in range(rounds_timed):
                puts.append(_timed(lambda number=number: etcd.put(keys.rate("a"), "{}")))
                one, two = _round(etcd, keys, view)
                attempts.append(one)
                commits.append(two)
                leaves.append(_leave(etcd, keys, view, number))
                print(f"round {number + 1} of {rounds_timed}", file=sys.stderr)
    finally:
        server.stop()
    bare = median(puts)
    beside = f"a bare put of the same run: {1000 * bare:.2f} ms; {len(PEERS)} peers"
    return [
        measurement("elastic_control: commit", median(commits) / bare, unit="puts", reference=beside),
        measurement("elastic_control: attempt", median(attempts) / bare, unit="puts", reference=beside),
        measurement(
            "elastic_control: commit in seconds", median(commits), unit="s", reference=beside, bar="<= 0.5"
        ),
        measurement(
            "elastic_control: leave until seen by others",
            median(leaves),
            unit="s",
            reference=beside,
            bar="<= 0.5",
        ),
    ]


def restarts(directory: Path, *, kills: int) -> Measurement:
    """A coordinator that is killed: from its successor's start to the next transaction."""
    server = start_single(directory)
    keys, seconds, ready = Keys("restart"), [], []
    try:
        with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd:
            etcd.put(keys.epoch, "1")
            for _ in range(kills):
                server.kill()
                began = time.monotonic()
                server = start_single(directory, port=server.member.port)
                ready.append(time.monotonic() - began)
                assert etcd.transact([], []) is TransactionResult.DONE
                seconds.append(time.monotonic() - began)
    finally:
        server.stop()
    reference = f"etcd itself served after {median(ready):.2f} s; worst of {kills}: {max(seconds):.2f} s"
    name = "elastic_control: restart until a transaction succeeds"
    return measurement(name, median(seconds), unit="s", reference=reference, bar="<= 2.0")


def failovers(directory: Path, *, kills: int) -> Measurement:
    """One of three members is killed, each in turn: the longest time without a transaction."""
    keys, pauses = Keys("failover"), []
    with ExitStack() as stack:
        servers = _cluster(directory)
        for server in servers:
            stack.callback(server.stop)
        endpoints = [server.endpoint for server in servers]
        etcd = stack.enter_context(Etcd(endpoints, deadline_s=5.0))
        ticking = _Ticking(etcd, keys)
        ticking.start()
        stack.callback(ticking.end)
        for number in range(kills):
            ticking.wait_for(5)
            victim = servers[number % 3]
            ticking.worst_s = 0.0
            victim.kill()
            ticking.wait_for(20)
            pauses.append(ticking.worst_s)
            servers[number % 3] = start_member(victim.member)
            stack.callback(servers[number % 3].stop)
    shown = ", ".join(f"{pause:.2f}" for pause in pauses)
    reference = f"three members, each killed in turn; heartbeat 50 ms, election 500 ms; pauses: {shown} s"
    name = "elastic_control: longest pause when one of three is killed"
    return measurement(name, max(pauses), unit="s", reference=reference, bar="<= 3.0")


class _Ticking(threading.Thread):
    """Transactions one after the other. worst_s: the longest time between two that succeeded."""

    def __init__(self, etcd: Etcd, keys: Keys) -> None:
        super().__init__(daemon=True)
        self.etcd, self.keys = etcd, keys
        self.done, self.worst_s, self.ended = 0, 0.0, threading.Event()

    def run(self) -> None:
        last = time.monotonic()
        while not self.ended.wait(0.01):
            try:
                self.etcd.put(self.keys.epoch, str(self.done), deadline_s=5.0)
            except CoordinatorError:
                continue
            now = time.monotonic()
            self.worst_s, last = max(self.worst_s, now - last), now
            self.done += 1

    def wait_for(self, count: int) -> None:
        goal, until = self.done + count, time.monotonic() + WITHIN_S
        while self.done < goal:
            assert time.monotonic() < until, "no transaction succeeds any more"
            time.sleep(0.01)

    def end(self) -> None:
        self.ended.set()
        self.join(WITHIN_S)


def _cluster(directory: Path) -> list[EtcdServer]:
    ports = free_ports(6)
    urls = {f"m{number}": f"http://127.0.0.1:{ports[3 + number]}" for number in range(3)}
    servers = [
        launch(
            Etcd3(
                name=name,
                host="127.0.0.1",
                port=ports[number],
                peer_port=ports[3 + number],
                data=directory / name,
                cluster=urls,
                heartbeat_ms=50,
                election_ms=500,
            )
        )
        for number, name in enumerate(urls)
    ]
    for server in servers:
        wait_until_ready(server)
    return servers


def _begin(etcd: Etcd, keys: Keys, snapshot: RunSnapshot) -> None:
    """The start of a run, with shares that a thousand rounds do not use up."""
    commit = example.commit(round=0, epoch=0, members=(), digest="d", position=Position(), sources=PEERS)
    shares = RoundShares(round=1, position=Position(), shares=dict.fromkeys(PEERS, ()), live=len(PEERS))
    assert (
        transactions.commit_round(etcd, keys, snapshot, CommitRound(commit=commit, shares=shares))
        is TransactionResult.DONE
    )


def _round(etcd: Etcd, keys: Keys, view: RunView) -> tuple[float, float]:
    """Seconds of the two transactions of a round, in which every peer brings its part."""
    snapshot = _until(view, lambda snapshot: snapshot.standing is not None and not snapshot.tried)
    number, shares = snapshot.round, snapshot.shares
    assert shares is not None
    for name in PEERS:
        ready = example.ready(
            peer=name, round=number, steps=1, tokens=1, spent=shares.shares[name], norm=1.0, finite=True
        )
        etcd.put(keys.ready(number, name), encode_text(ready))
    snapshot = _until(view, lambda snapshot: len(snapshot.readies) == len(PEERS))
    proposal = decide(snapshot, me="a", settings=SETTINGS, now=time.monotonic())
    assert isinstance(proposal, Propose), proposal
    attempt_s = _timed(lambda: transactions.propose(etcd, keys, snapshot, proposal))
    for name in PEERS:
        epoch = proposal.tried.attempt.epoch
        text = f'{{"peer":"{name}","round":{number},"epoch":{epoch},"digest":"d"}}'
        etcd.put(keys.done(number, epoch, name), text)
    after = _until(view, lambda snapshot: len(snapshot.dones) == len(PEERS))
    decided = decide(after, me="a", settings=SETTINGS, now=time.monotonic())
    assert isinstance(decided, CommitRound), decided
    commit_s = _timed(lambda: transactions.commit_round(etcd, keys, after, decided))
    _until(view, lambda snapshot: snapshot.round == number + 1)
    return attempt_s, commit_s


def _leave(etcd: Etcd, keys: Keys, view: RunView, number: int) -> float:
    name = f"leaver-{number}"
    membership = Membership(etcd, keys, lease_s=WITHIN_S, heartbeat_s=10.0)
    membership.join(_member(name))
    _until(view, lambda snapshot: name in snapshot.members)
    began = time.monotonic()
    membership.leave()
    _until(view, lambda snapshot: name not in snapshot.members)
    return time.monotonic() - began


def _until(view: RunView, holds) -> RunSnapshot:
    snapshot, until = view.snapshot, time.monotonic() + WITHIN_S
    while not holds(snapshot):
        assert time.monotonic() < until, "nothing came"
        snapshot = view.changed(snapshot.version, timeout_s=1.0)
    return snapshot


def _timed(function) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


def _member(name: str) -> Member:
    return example.member(
        peer=name,
        incarnation="1",
        addresses=("127.0.0.1:1",),
        serves=(),
        round=0,
        digest="d",
        ranks=1,
        recipe="r",
        samples=8,
    )


if __name__ == "__main__":
    sys.exit(main())
