"""Each transaction of a round, condition by condition, and what a joining peer does when it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.coordination.test_gathering import SETTINGS, listed
from tests.protocol import example

from bloomery.coordination import transactions
from bloomery.coordination.decide import CommitRound, Propose
from bloomery.coordination.etcd import Condition, Delete, Put, TransactionResult
from bloomery.coordination.etcd_watch import KeyValue
from bloomery.coordination.snapshot import ListedShares, RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import ProposedAttempt, RoundShares

KEYS = Keys("run")
DONE, REFUSED, UNKNOWN = TransactionResult.DONE, TransactionResult.REFUSED, TransactionResult.UNKNOWN


class Coordinator:
    """Keys that are given, and what transactions were asked for. meanwhile: called before each one."""

    def __init__(self, *results: TransactionResult, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.items: dict[str, KeyValue] = {}
        self.results, self.meanwhile = list(results), meanwhile
        self.asked: list[tuple[list[Condition], list[Put | Delete]]] = []
        self.reads = 0

    def put(self, key: str, value: str, *, created: int = 1, modified: int = 1) -> None:
        self.items[key] = KeyValue(key=key, value=value, created=created, modified=modified)

    def get(self, key: str) -> KeyValue | None:
        self.reads += 1
        return self.items.get(key)

    def transact(self, conditions, operations) -> TransactionResult:
        self.meanwhile()
        self.asked.append((list(conditions), list(operations)))
        return self.results.pop(0) if len(self.results) > 1 else self.results[0]


def absent(key: str) -> Condition:
    return Condition(key=key, aspect="created", wanted=0)


def modified(key: str, revision: int) -> Condition:
    return Condition(key=key, aspect="modified", wanted=revision)


def snapshot_of(**changed) -> RunSnapshot:
    shares = RoundShares(round=5, position=Position(), shares={}, live=0)
    usual = dict(
        epoch=8,
        commits={4: example.commit(round=4)},
        commit_revision=17,
        standing=ListedShares(shares=shares, modified=23),
        refused=31,
        members={"a": listed("a", life=3)},
    )
    return RunSnapshot(**usual | changed)


def proposal(round: int = 5, epoch: int = 9) -> Propose:
    attempt = example.attempt(round=round, epoch=epoch, members=("b", "a"), weights=(0.5, 0.5))
    tried = ProposedAttempt(attempt=attempt, lives=(4, 3), offers=(12, 11))
    return Propose(tried=tried, offers={"b": 12, "a": 11}, unseen=("c", "d"))


def test_an_attempt_is_begun_where_epoch_commit_and_offers_are_what_its_proposer_saw() -> None:
    found = proposal()
    etcd = Coordinator(REFUSED)
    assert transactions.propose(etcd, KEYS, snapshot_of(), found) is REFUSED
    conditions, operations = etcd.asked.pop()
    assert conditions == [
        Condition(key=KEYS.epoch, aspect="value", wanted="8"),
        modified(KEYS.commit(5), 31),
        modified(KEYS.ready(5, "b"), 12),
        modified(KEYS.ready(5, "a"), 11),
        absent(KEYS.ready(5, "c")),
        absent(KEYS.ready(5, "d")),
    ]
    assert operations == [
        Put(key=KEYS.epoch, value="9"),
        Put(key=KEYS.attempt(5, 9), value=encode_text(found.tried)),
    ]


def test_the_first_attempt_of_a_run_is_begun_where_there_is_no_epoch() -> None:
    etcd = Coordinator(DONE)
    assert transactions.propose(etcd, KEYS, snapshot_of(epoch=0, refused=0), proposal(epoch=1)) is DONE
    conditions, operations = etcd.asked.pop()
    assert conditions[:2] == [absent(KEYS.epoch), modified(KEYS.commit(5), 0)]
    assert operations[0] == Put(key=KEYS.epoch, value="1")


def test_of_thousands_of_attempts_of_a_round_the_newest_are_kept() -> None:
    etcd, deleted = Coordinator(DONE), []
    for epoch in (127, 128, 129, 300):
        transactions.propose(etcd, KEYS, snapshot_of(epoch=epoch - 1), proposal(epoch=epoch))
        deleted.append([one.key for one in etcd.asked.pop()[1][2:]])
    assert deleted == [[], *([KEYS.attempt(5, epoch)] for epoch in (0, 1, 172))]


def decided(round: int = 5, **changed) -> CommitRound:
    shares = RoundShares(round=round + 1, position=Position(consumed=4), shares={"a": ()}, live=1)
    commit = example.commit(round=round, epoch=8, members=("a", "b"))
    return CommitRound(commit=commit, shares=shares, **dict(offers={"b": 12}, lives={"a": 3}) | changed)


def test_a_round_is_committed_on_what_its_concluder_saw_and_takes_the_records_before_it_along() -> None:
    found = decided()
    etcd = Coordinator(UNKNOWN)
    assert transactions.commit_round(etcd, KEYS, snapshot_of(), found) is UNKNOWN
    conditions, operations = etcd.asked.pop()
    assert conditions == [
        Condition(key=KEYS.epoch, aspect="value", wanted="8"),
        modified(KEYS.commit(5), 31),
        Condition(key=KEYS.member("a"), aspect="created", wanted=3),
        modified(KEYS.ready(5, "b"), 12),
        modified(KEYS.shares(5), 23),
    ]
    assert operations == [
        Put(key=KEYS.commit(5), value=encode_text(found.commit)),
        Put(key=KEYS.shares(6), value=encode_text(found.shares)),
        Delete(key=KEYS.attempts(4), prefix=True),
        Delete(key=KEYS.shares(4)),
    ]
    transactions.commit_round(etcd, KEYS, snapshot_of(standing=None), decided(offers={}, lives={}))
    assert etcd.asked.pop()[0][2:] == [modified(KEYS.shares(5), 0)]


def test_round_0_has_no_shares_and_no_round_before_it() -> None:
    etcd = Coordinator(DONE)
    beginning = snapshot_of(commits={}, epoch=0, refused=0, standing=None)
    transactions.commit_round(etcd, KEYS, beginning, decided(round=0, offers={}))
    conditions, operations = etcd.asked.pop()
    assert conditions == [
        absent(KEYS.epoch),
        modified(KEYS.commit(0), 0),
        Condition(key=KEYS.member("a"), aspect="created", wanted=3),
    ]
    assert [one.key for one in operations] == [KEYS.commit(0), KEYS.shares(1)]


def test_a_commit_that_is_too_old_goes_in_the_transaction_that_makes_it_so() -> None:
    commits = {number: example.commit(round=number) for number in (1, 2, 3, 1001)}
    etcd = Coordinator(DONE)
    transactions.commit_round(etcd, KEYS, snapshot_of(commits=commits), decided(round=1002))
    deleted = [one.key for one in etcd.asked.pop()[1] if isinstance(one, Delete)]
    assert deleted == [KEYS.attempts(1001), KEYS.shares(1001), KEYS.commit(1), KEYS.commit(2)]


def test_of_old_commits_that_asked_for_a_save_the_last_is_kept() -> None:
    commits = {number: example.commit(round=number, save=number in (1, 3)) for number in (1, 2, 3, 4, 1003)}
    assert transactions.outdated_rounds(RunSnapshot(commits=commits), 1004) == [1, 2, 4]


def test_a_commit_is_read_of_its_own_round() -> None:
    etcd = Coordinator(DONE)
    etcd.put(KEYS.commit(5), encode_text(example.commit(round=5, digest="x")))
    assert transactions.read_commit(etcd, KEYS, 5) == example.commit(round=5, digest="x")
    assert transactions.read_commit(etcd, KEYS, 4) is None


OF_A = RoundShares(round=5, position=Position(holes=(range(8),)), shares={"a": (range(8),)}, live=1)


def joining(*results: TransactionResult, meanwhile: Callable[[Coordinator], None] = lambda etcd: None):
    """A coordinator on which 'n', of two samples a step, may take a share of four steps."""
    etcd = Coordinator(*results)
    etcd.meanwhile = lambda: meanwhile(etcd)
    etcd.put(KEYS.shares(5), encode_text(OF_A), modified=23)
    etcd.put(KEYS.member("n"), encode_text(example.member(peer="n")), created=6)

    def join():
        return transactions.join_shares(etcd, KEYS, round=5, peer="n", life=6, samples=2, settings=SETTINGS)

    return etcd, join


def test_a_joining_peer_takes_new_samples_while_the_round_runs_and_it_is_listed() -> None:
    etcd, join = joining(DONE)
    assert join() == (range(8, 16),)
    ((conditions, operations),) = etcd.asked
    assert conditions == [
        modified(KEYS.shares(5), 23),
        absent(KEYS.commit(5)),
        Condition(key=KEYS.member("n"), aspect="created", wanted=6),
    ]
    (put,) = operations
    assert put.key == KEYS.shares(5)
    written = decode(put.value, RoundShares)
    assert dict(written.shares) == {"a": (range(8),), "n": (range(8, 16),)} and written.live == 2


@pytest.mark.parametrize("first", [REFUSED, UNKNOWN])
def test_a_joining_peer_tries_again_where_another_was_quicker_or_no_answer_came(first) -> None:
    def another(etcd: Coordinator) -> None:
        taken = {"a": (range(8),), "b": (range(8, 20),)}
        shares = RoundShares(round=5, position=Position(holes=(range(20),)), shares=taken, live=2)
        etcd.put(KEYS.shares(5), encode_text(shares), modified=24)

    etcd, join = joining(first, DONE, meanwhile=another)
    assert join() == (range(20, 28),)
    assert [conditions[0].wanted for conditions, _ in etcd.asked] == [23, 24]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_joining_peer_keeps_the_share_that_it_took_by_a_transaction_without_an_answer(
    is_over: bool,
) -> None:
    def carried_out(etcd: Coordinator) -> None:
        taken = {"a": (range(8),), "n": (range(8, 16),)}
        shares = RoundShares(round=5, position=Position(holes=(range(16),)), shares=taken, live=2)
        etcd.put(KEYS.shares(5), encode_text(shares), modified=24)
        if is_over:
            etcd.put(KEYS.commit(5), "{}")

    etcd, join = joining(UNKNOWN, meanwhile=carried_out)
    assert join() == (range(8, 16),) and len(etcd.asked) == 1


@pytest.mark.parametrize(
    "over",
    [
        lambda etcd: etcd.put(KEYS.commit(5), "{}"),
        lambda etcd: etcd.items.pop(KEYS.member("n"), None),
        lambda etcd: etcd.put(KEYS.member("n"), "{}", created=7),
    ],
    ids=["committed", "no longer listed", "listed as another life"],
)
def test_a_joining_peer_gives_up_once_the_round_is_over_or_its_life_is(over) -> None:
    etcd, join = joining(REFUSED, meanwhile=over)
    assert join() is None and len(etcd.asked) == 1


def test_a_joining_peer_whom_others_are_always_quicker_than_has_no_share_yet_and_does_not_end() -> None:
    etcd, join = joining(REFUSED)
    assert join() is None and len(etcd.asked) == 100


def test_the_first_peer_that_asks_makes_the_runs_token_and_the_others_read_it(monkeypatch) -> None:
    etcd = Coordinator(REFUSED)
    etcd.meanwhile = lambda: etcd.put(KEYS.token, "of the quicker one")
    assert transactions.run_token(etcd, KEYS) == "of the quicker one"
    ((conditions, (put,)),) = etcd.asked
    assert conditions == [absent(KEYS.token)] and put.key == KEYS.token
    assert len(put.value) == 64 and put.value != transactions.secrets.token_hex(32)
    assert transactions.run_token(etcd, KEYS) == "of the quicker one" and len(etcd.asked) == 1
    never = Coordinator(UNKNOWN)
    with pytest.raises(CoordinatorError, match="the run's token could not be made"):
        transactions.run_token(never, KEYS)
    assert never.reads == 100


def test_a_lost_token_is_written_again_unless_the_run_has_another_by_now() -> None:
    etcd = Coordinator(DONE)
    assert not transactions.restore_token(etcd, KEYS, "old")  # written, and gone before it was read
    assert etcd.asked == [([absent(KEYS.token)], [Put(key=KEYS.token, value="old")])]
    etcd.put(KEYS.token, "old")
    assert transactions.restore_token(etcd, KEYS, "old")
    etcd.put(KEYS.token, "new")
    assert not transactions.restore_token(etcd, KEYS, "old")
