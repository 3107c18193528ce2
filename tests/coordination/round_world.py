"""A coordinator in memory with etcd's transactions, and peers whose clocks and moves are given.

Nothing happens by itself: a test lets one peer do one thing at a time, in any order, with views that lag.
"""

from __future__ import annotations

import hashlib

import msgspec
from tests.protocol import example

from bloomery.coordination import transactions
from bloomery.coordination.decide import CommitRound, Decision, Propose, TakeShare, decide
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Delete, Put, TransactionResult
from bloomery.coordination.etcd_watch import KeyValue, WatchEvent
from bloomery.coordination.snapshot_builder import SnapshotBuilder
from bloomery.data.position import first, merged, total, without
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit, Done, Ready


class Store:
    """What `rounds` needs of `Etcd`: get and transact. answers: lost where a transaction's is Unknown."""

    def __init__(self) -> None:
        self.revision = 1
        self.items: dict[str, KeyValue] = {}
        self.log: list[tuple[int, WatchEvent]] = []
        self.loses_answers = lambda: False

    def get(self, key, *, deadline_s=None):
        return self.items.get(key)

    def put(self, key, value, *, lease=0, deadline_s=None):
        self.transact([], [Put(key=key, value=value, lease=lease)])

    def transact(self, conditions, operations, *, deadline_s=None):
        if not all(self._holds(one) for one in conditions):
            return TransactionResult.UNKNOWN if self.loses_answers() else TransactionResult.REFUSED
        self.revision += 1
        touched = set()
        for one in operations:
            keys = [one.key]
            if isinstance(one, Delete) and one.prefix:
                keys = [key for key in self.items if key.startswith(one.key)]
            for key in keys:
                assert key not in touched, f"etcd refuses a transaction that touches {key} twice"
                touched.add(key)
                self._apply(key, one)
        return TransactionResult.UNKNOWN if self.loses_answers() else TransactionResult.DONE

    def end_lease(self, lease):
        self.revision += 1
        for key in [key for key, item in self.items.items() if item.lease == lease]:
            self._apply(key, Delete(key=key))

    def _apply(self, key, one):
        before = self.items.pop(key, None)
        item = None
        if isinstance(one, Put):
            created = before.created if before else self.revision
            item = KeyValue(
                key=key, value=one.value, created=created, modified=self.revision, lease=one.lease
            )
            self.items[key] = item
        elif before is None:
            return
        self.log.append((self.revision, WatchEvent(key=key, item=item)))

    def _holds(self, one):
        item = self.items.get(one.key)
        if one.aspect == "value":
            return item is not None and item.value == one.wanted
        found = 0 if item is None else item.created if one.aspect == "created" else item.modified
        return found == one.wanted


class Peer:
    """One peer: its lagging view, and the state it holds, as a digest."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.lives = 0
        self.saves: tuple[int, ...] = ()
        self.begin(digest="initial", round=-1)

    def begin(self, *, digest: str, round: int) -> None:
        self.lives += 1
        self.digest, self.round = digest, round
        self.read, self.lease = 0, f"{self.name}{self.lives}"
        self.alive, self.offered, self.reported = True, -1, set()
        self.overtaken = 0
        self.candidate: tuple[int, str] | None = None
        self.assembly = SnapshotBuilder(self.world.keys, clock=lambda: self.world.now)
        self.list()

    def list(self) -> None:
        member = example.member(
            peer=self.name,
            incarnation=self.lease,
            addresses=("127.0.0.1:1",),
            serves=(),
            round=self.round,
            digest=self.digest,
            ranks=1,
            recipe="r",
            samples=self.world.samples[self.name],
            overtaken=self.overtaken,
            saves=self.saves,
        )
        self.world.put(self, self.world.keys.member(self.name), encode_text(member))

    def see(self, count: int | None = None) -> None:
        """Take in the next `count` revisions, or all, and go on from what was committed."""
        self.look(count)
        self._follow_commit()

    def look(self, count: int | None = None) -> None:
        """Take in the next `count` revisions, or all, and no more."""
        log = self.world.store.log
        while self.read < len(log) and (count is None or count > 0):
            revision = log[self.read][0]
            while self.read < len(log) and log[self.read][0] == revision:
                self.assembly.take(log[self.read][1])
                self.read += 1
            self.assembly.heard(revision)
            count = None if count is None else count - 1
        self.snapshot = self.assembly.snapshot(changed=True)

    def _follow_commit(self) -> None:
        commit = self.snapshot.commit
        if commit is None or commit.round <= self.round:
            return
        mine = self.candidate is not None and self.candidate[0] == commit.epoch
        if mine and self.name in commit.members:
            assert self.candidate[1] == commit.digest
        self.digest, self.round, self.candidate = commit.digest, commit.round, None  # its own, or fetched
        self.list()

    def work(
        self, steps: int, *, kept=0, finite: bool = True, rewind_to: int | None = None, skip=(), rung: int = 0
    ) -> None:
        """Offer this many steps of its share of the round under way, and keep `kept` samples after them."""
        shares = self.snapshot.shares
        if shares is None or self.round != shares.round - 1:
            return
        if self.offered == shares.round:  # a part stays as it is until its round is committed
            return
        self.offered = shares.round
        share = shares.shares.get(self.name, ())  # a newcomer waits with nothing, and is part of the next
        wanted, spent = steps * self.world.samples[self.name], list[range]()
        for piece in share:
            spent.append(range(piece.start, min(piece.stop, piece.start + wanted)))
            wanted -= len(spent[-1])
        left = without(merged(share), merged(spent))
        ready = example.ready(
            peer=self.name,
            round=shares.round,
            steps=steps,
            tokens=total(spent),
            spent=tuple(piece for piece in spent if len(piece)),
            norm=1.0,
            kept=first(left, kept),
            finite=finite,
            rewind_to=rewind_to,
            skip=skip,
            rung=rung,
        )
        self.world.put(self, self.world.keys.ready(shares.round, self.name), encode_text(ready))

    def attempt(self):
        tried = self.snapshot.tried
        if tried is None or self.name not in tried.attempt.members:
            return None
        if tried.lives[tried.attempt.members.index(self.name)] != self.life():
            return None
        return tried.attempt

    def life(self) -> int:
        item = self.world.store.items.get(self.world.keys.member(self.name))
        return item.created if item is not None and item.lease == self.lease else -1

    def reduce(self, *, fails: str | None = None, differs: bool = False) -> None:
        """Finish the attempt that it sees: with the right result or not. fails: the culprit."""
        attempt = self.attempt()
        if attempt is None or attempt.epoch in self.reported:
            return
        self.reported.add(attempt.epoch)
        common = dict(peer=self.name, round=attempt.round, epoch=attempt.epoch)
        keys = self.world.keys
        if fails is not None:
            text = encode_text(example.failed(kind="stalled", culprit=fails or None, **common))
            self.world.put(self, keys.failed(attempt.round, attempt.epoch, self.name), text)
            return
        content = f"{self.digest} {attempt.members} {attempt.weights}{' wrong' if differs else ''}"
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.candidate = (attempt.epoch, digest)
        text = encode_text(Done(digest=digest, **common))
        self.world.put(self, keys.done(attempt.round, attempt.epoch, self.name), text)

    def decide(self) -> Decision:
        return decide(self.snapshot, me=self.name, settings=self.world.settings, now=self.world.now)

    def act(self) -> TransactionResult | None:
        """Do what is to be decided, as this peer sees it."""
        found = self.decide()
        store, keys = self.world.store, self.world.keys
        if isinstance(found, Propose):
            return transactions.propose(store, keys, self.snapshot, found)
        if isinstance(found, TakeShare):
            settings, me = self.world.settings, {"peer": self.name, "life": self.life()}
            transactions.join_shares(
                store, keys, round=found.round, samples=1, settings=settings, away=found.away, **me
            )
            self.look()
            self.offered = -1
        if isinstance(found, CommitRound):
            outcome = transactions.commit_round(store, keys, self.snapshot, found)
            if outcome is TransactionResult.UNKNOWN:
                transactions.read_commit(store, keys, found.commit.round)
            return outcome
        return None

    def die(self) -> None:
        self.alive = False
        self.world.store.end_lease(self.lease)


class World:
    """The run. samples: of one inner step, by peer."""

    def __init__(self, samples: dict[str, int], settings: RoundSettings) -> None:
        self.keys, self.store, self.samples = Keys("run"), Store(), dict(samples)
        self.now, self.settings = 0.0, settings
        self.peers = {name: Peer(self, name) for name in samples}

    def put(self, peer: Peer, key: str, value: str) -> None:
        """On the peer's lease."""
        assert peer.alive
        self.store.put(key, value, lease=peer.lease)

    @property
    def commits(self) -> list[Commit]:
        prefix = self.keys.commits
        return [decode(item.value, Commit) for key, item in sorted(self.store.items.items()) if prefix in key]

    @property
    def newest(self) -> int:
        """The round of the newest commit; -1 before there is one."""
        return max((commit.round for commit in self.commits), default=-1)

    @property
    def epoch(self) -> int:
        item = self.store.items.get(self.keys.epoch)
        return 0 if item is None else int(item.value)

    def settle(self, rounds: int, *, steps: int = 2) -> None:
        """Let everybody who is alive do everything until so many rounds more are committed."""
        goal = self.newest + rounds
        for _ in range(400):
            for peer in self.peers.values():
                if self.newest >= goal:
                    return
                if peer.alive:
                    peer.see()
                    peer.work(steps)
                    peer.see()
                    peer.reduce()
                    peer.see()
                    peer.act()
            self.now += 0.5
        raise AssertionError(f"stuck at {self.commits[-1:]}: {[p.decide() for p in self.peers.values()]}")

    def propose_attempt(self, *, steps: int = 2) -> None:
        """Let everybody make steps and offer a part, and peer a propose an attempt, unseen so far."""
        for peer in self.peers.values():
            peer.see()
            peer.work(steps)
        for peer in self.peers.values():
            peer.see()
        self.peers["a"].act()


THREE = {"a": 2, "b": 3, "c": 5}


def world(samples=None, **changed):
    usual = dict(inner_steps=4, total_samples=10**6, peers=3, minimum_peers=2, grace_s=60.0, patience_s=10.0)
    made = World(samples or THREE, RoundSettings(**usual | changed))
    for peer in made.peers.values():
        peer.see()
    return made


def offers_of(run, **changed):
    """Everybody's offer to round 1, with its views of them; changed: fields of a peer's, by its name."""
    for peer in run.peers.values():
        peer.see()
        peer.work(2)
        if peer.name in changed:
            rewrite(run, peer.name, **changed[peer.name])
    for peer in run.peers.values():
        peer.see()


def rewrite(run, name, **fields):
    key = run.keys.ready(1, name)
    offer = msgspec.structs.replace(decode(run.store.items[key].value, Ready), **fields)
    run.put(run.peers[name], key, encode_text(offer))
