"""An etcd of three members, of which one is killed, then another: what was agreed stays, rounds go on."""

import threading

import pytest
from tests.coordination.test_membership import WITHIN_S, member
from tests.protocol import example

from bloomery.coordination import transactions
from bloomery.coordination.decide import CommitRound, Propose, Wait, decide
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Etcd, TransactionResult
from bloomery.coordination.etcd_process import EtcdMember, PortTaken, free_ports, launch, wait_until_ready
from bloomery.coordination.membership import Membership
from bloomery.coordination.run_view import RunView
from bloomery.data.position import Position, total
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit, Done

SETTINGS = RoundSettings(
    inner_steps=2, total_samples=10**9, peers=3, minimum_peers=3, grace_s=WITHIN_S, stagger_s=0.05
)


@pytest.fixture
def cluster(tmp_path):
    servers = start_cluster(tmp_path)
    yield servers
    for server in servers:
        server.stop()


def start_cluster(directory):
    for tried in range(10):
        ports = free_ports(6)
        urls = {f"m{number}": f"http://127.0.0.1:{ports[3 + number]}" for number in range(3)}
        servers = [
            launch(
                EtcdMember(
                    name=name,
                    host="127.0.0.1",
                    port=ports[number],
                    peer_port=ports[3 + number],
                    data=directory / f"{tried}-{name}",
                    cluster=urls,
                    heartbeat_ms=50,
                    election_ms=500,
                )
            )
            for number, name in enumerate(urls)
        ]
        try:
            for server in servers:
                wait_until_ready(server)
        except PortTaken:
            for server in servers:
                server.kill()
        else:
            return servers
    raise AssertionError("no ports")


class Actor(threading.Thread):
    """A peer that does nothing but its rounds: it commits until it is told to end."""

    def __init__(self, name, endpoints, keys):
        super().__init__(name=name, daemon=True)
        self.peer, self.keys = name, keys
        self.etcd = Etcd(endpoints, deadline_s=5.0)
        self.committed, self.ended, self.error = 0, threading.Event(), None

    def run(self):
        try:
            self.live()
        except BaseException as error:
            self.error = error
            raise

    def live(self):
        membership = Membership(self.etcd, self.keys, lease_s=WITHIN_S, heartbeat_s=0.5)
        with RunView(self.etcd, self.keys, idle_s=2.0) as view, membership:
            membership.join(member(self.peer, digest="start", samples=3), deadline_s=WITHIN_S)
            offered = done = -1
            while not self.ended.is_set():
                snapshot = view.snapshot
                self.committed = max(self.committed, snapshot.round)
                try:
                    if snapshot.round > max(0, offered) and self.offer(membership, snapshot):
                        offered = snapshot.round
                    if snapshot.tried and snapshot.epoch > done:
                        self.reduce(membership, snapshot)
                        done = snapshot.epoch
                    found = decide(snapshot, me=self.peer, settings=SETTINGS, now=snapshot.changed_s + 9.0)
                    if isinstance(found, Propose):
                        transactions.propose(self.etcd, self.keys, snapshot, found)
                    elif isinstance(found, CommitRound):
                        self.conclude(snapshot, found)
                except CoordinatorError:
                    continue  # away for a while: what lacks is done again
                view.changed(snapshot.version, timeout_s=0.2 if not isinstance(found, Wait) else 1.0)

    def offer(self, membership, snapshot):
        if snapshot.shares is None:
            return False
        share = snapshot.shares.shares[self.peer]
        ready = example.ready(
            peer=self.peer,
            round=snapshot.round,
            steps=2,
            tokens=total(share),
            spent=share,
            norm=1.0,
            finite=True,
        )
        membership.offer(self.keys.ready(ready.round, self.peer), encode_text(ready), round=ready.round)
        return True

    def reduce(self, membership, snapshot):
        attempt = snapshot.tried.attempt
        done = Done(peer=self.peer, round=attempt.round, epoch=attempt.epoch, digest=f"d{attempt.round}")
        key = self.keys.done(attempt.round, attempt.epoch, self.peer)
        membership.offer(key, encode_text(done), round=attempt.round)

    def conclude(self, snapshot, found):
        if transactions.commit_round(self.etcd, self.keys, snapshot, found) is TransactionResult.UNKNOWN:
            transactions.read_commit(self.etcd, self.keys, found.commit.round)


def until_committed(actors, count):
    """Wait until everybody has seen so many rounds more."""
    goal = max(actor.committed for actor in actors) + count
    waiting = threading.Event()
    for _ in range(1200):
        if all(actor.committed >= goal for actor in actors):
            return
        assert not any(actor.error for actor in actors), [actor.error for actor in actors]
        waiting.wait(0.1)
    raise AssertionError(f"{[actor.committed for actor in actors]}, not {goal}")


def test_rounds_go_on_when_one_of_three_members_is_killed_and_comes_back(cluster):
    keys = Keys("run")
    endpoints = [server.endpoint for server in cluster]
    actors = [Actor(name, endpoints[number:] + endpoints[:number], keys) for number, name in enumerate("abc")]
    for actor in actors:
        actor.start()
    until_committed(actors, 3)
    cluster[0].kill()
    until_committed(actors, 5)
    cluster[0] = launch(cluster[0].member)
    wait_until_ready(cluster[0])
    cluster[1].kill()
    until_committed(actors, 5)
    for actor in actors:
        actor.ended.set()
    for actor in actors:
        actor.join(WITHIN_S)
        assert actor.error is None
    with Etcd(endpoints, deadline_s=WITHIN_S) as etcd:
        commits = [decode(item.value, Commit) for item in etcd.list(keys.commits).items]
        epoch = int(etcd.get(keys.epoch).value)
    assert [commit.round for commit in commits] == list(range(len(commits)))
    assert all(commit.members == ("a", "b", "c") for commit in commits[1:])
    # Each round is 2 steps of 3 samples of three peers, whatever was tried how often.
    assert [commit.position for commit in commits] == [Position(consumed=18 * n) for n in range(len(commits))]
    assert epoch >= len(commits) - 1
