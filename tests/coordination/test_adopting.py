"""What is written to a coordinator that lost a run's data, and on which conditions; without a coordinator."""

from __future__ import annotations

from typing import Any

import pytest
from tests.coordination.test_adoption import commit
from tests.coordination.test_membership import member
from tests.protocol import example

from bloomery.coordination.etcd import Condition, Listing, Put, TransactionResult
from bloomery.coordination.etcd_watch import KeyValue
from bloomery.coordination.recovery import RestoredRun, adopt, write_recovery_record
from bloomery.data.position import Position
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import RoundShares

KEYS = Keys("r")


class Etcd:
    def __init__(self) -> None:
        self.items: dict[str, KeyValue] = {}
        self.asked: list[Any] = []
        self.result = TransactionResult.DONE

    def put(self, key: str, record: Any, *, modified: int = 1) -> None:
        value = record if isinstance(record, str) else encode_text(record)
        self.items[key] = KeyValue(key=key, value=value, created=1, modified=modified)

    def get(self, key: str) -> KeyValue | None:
        return self.items.get(key)

    def list(self, prefix: str) -> Listing:
        found = [one for key, one in sorted(self.items.items()) if key.startswith(prefix)]
        return Listing(revision=1, items=tuple(found))

    def transact(self, conditions: Any, operations: Any) -> TransactionResult:
        self.asked.append((conditions, operations))
        return self.result


def absent(key: str) -> Condition:
    return Condition(key=key, aspect="created", wanted=0)


def lost() -> Etcd:
    """The coordinator has epoch 12 and round 3; peers know of rounds 5 and 7, and hold round 7."""
    etcd = Etcd()
    etcd.put(KEYS.epoch, "12", modified=41)
    etcd.put(KEYS.commit(3), commit(3))
    etcd.put(KEYS.member("b"), member("b", epoch=30, round=7, digest="d"))
    etcd.put(KEYS.member("a"), member("a", epoch=31, round=7, digest="d"))
    shares = RoundShares(round=8, position=Position(consumed=9), shares={"a": ()}, live=1)
    etcd.put(KEYS.recovery_record("a"), example.recovery_record(epoch=33, commit=commit(7), shares=shares))
    etcd.put(KEYS.recovery_record("b"), example.recovery_record(epoch=32, commit=commit(5), held=commit(3)))
    return etcd


def test_every_commit_that_lacks_is_written_with_the_newest_shares_above_every_epoch() -> None:
    etcd = lost()
    restored = adopt(etcd, KEYS)  # type: ignore[arg-type]
    assert restored == RestoredRun(epoch=34, round=7, peers_ahead=("a",), holders=("a", "b"))
    ((conditions, operations),) = etcd.asked
    assert conditions == [
        Condition(key=KEYS.epoch, aspect="modified", wanted=41),
        absent(KEYS.commit(8)),
        absent(KEYS.commit(7)),
        absent(KEYS.commit(5)),
    ]
    shares = RoundShares(round=8, position=Position(consumed=9), shares={"a": ()}, live=1)
    assert operations == [
        Put(key=KEYS.adopted, value="34"),
        Put(key=KEYS.epoch, value="34"),
        Put(key=KEYS.commit(7), value=encode_text(commit(7))),
        Put(key=KEYS.commit(5), value=encode_text(commit(5))),
        Put(key=KEYS.shares(8), value=encode_text(shares)),
    ]


def test_a_coordinator_that_has_the_newest_round_gets_a_higher_epoch_alone() -> None:
    etcd = Etcd()
    etcd.put(KEYS.member("a"), member("a", epoch=4, round=7, digest="d"))
    etcd.put(KEYS.commit(7), commit(7))
    restored = adopt(etcd, KEYS)  # type: ignore[arg-type]
    assert restored == RestoredRun(epoch=5, round=7, peers_ahead=(), holders=("a",))
    assert etcd.asked == [
        (
            [absent(KEYS.epoch), absent(KEYS.commit(8))],
            [Put(key=KEYS.adopted, value="5"), Put(key=KEYS.epoch, value="5")],
        )
    ]
    fresh = Etcd()
    fresh.put(KEYS.member("a"), member("a", epoch=0, round=0, digest="d"))
    assert adopt(fresh, KEYS) == RestoredRun(epoch=1, round=-1, peers_ahead=(), holders=())  # type: ignore[arg-type]


def test_keys_that_any_peer_may_have_spoilt_are_told_and_replaced(caplog) -> None:
    etcd = lost()
    etcd.put(KEYS.epoch, "garbage", modified=41)
    for key in (f"{KEYS.commits}x", KEYS.commits, f"{KEYS.commit(4)}/more"):
        etcd.put(key, "1")
    etcd.put(KEYS.commit(7), "{", modified=50)
    etcd.put(KEYS.commit(8), commit(9), modified=51)
    restored = adopt(etcd, KEYS)  # type: ignore[arg-type]
    assert (restored.epoch, restored.round) == (34, 7)
    ((conditions, operations),) = etcd.asked
    assert [(one.key, one.aspect, one.wanted) for one in conditions] == [
        (KEYS.epoch, "modified", 41),
        (KEYS.commit(8), "modified", 51),
        (KEYS.commit(7), "modified", 50),
        (KEYS.commit(5), "created", 0),
    ]
    assert Put(key=KEYS.commit(7), value=encode_text(commit(7))) in operations
    etcd.put(KEYS.commit(9_000), commit(9_000))
    assert adopt(etcd, KEYS).round == 7  # type: ignore[arg-type]
    assert "the commit of round 9000 is left out" in caplog.text
    assert "the epoch in the coordinator is replaced" in caplog.text and f"{KEYS.commits}x" in caplog.text


@pytest.mark.parametrize("result", [TransactionResult.REFUSED, TransactionResult.UNKNOWN])
def test_a_run_that_was_changed_meanwhile_is_not_restored(result: TransactionResult) -> None:
    etcd = lost()
    etcd.result = result
    with pytest.raises(CoordinatorError, match="'r' was changed by another process meanwhile"):
        adopt(etcd, KEYS)  # type: ignore[arg-type]


def test_the_member_that_is_furthest_ahead_of_what_can_be_restored_is_named() -> None:
    etcd = lost()
    for name, round in (("x", 8), ("y", 11), ("z", 9)):
        etcd.put(KEYS.member(name), member(name, round=round))
    with pytest.raises(CoordinatorError, match="'y' holds round 11, and no peer has reported"):
        adopt(etcd, KEYS)  # type: ignore[arg-type]
    assert etcd.asked == []


def test_a_record_that_cannot_be_read_is_told_and_left_out(caplog) -> None:
    etcd = lost()
    etcd.put(KEYS.recovery_record("a"), "{")
    for name in "ab":
        etcd.put(KEYS.member(name), member(name, epoch=31, round=5, digest="d"))
    restored = adopt(etcd, KEYS)  # type: ignore[arg-type]
    assert "the record 'testimony' of 'a' is left out" in caplog.text
    assert (restored.epoch, restored.round, restored.peers_ahead) == (33, 5, ("b",))


@pytest.mark.parametrize(
    ("record", "round"), [(example.recovery_record(), 0), (example.recovery_record(commit=commit(6)), 6)]
)
def test_a_recovery_record_lies_on_the_lease_until_its_round_is_over(record: Any, round: int) -> None:
    offered: list[Any] = []

    class Lease:
        def offer(self, key: str, value: str, *, round: int) -> None:
            offered.append((key, value, round))

    write_recovery_record(Lease(), KEYS, "a", record)  # type: ignore[arg-type]
    assert offered == [(KEYS.recovery_record("a"), encode_text(record), round)]


def test_of_two_commits_of_one_round_that_of_the_peer_in_the_later_round_is_restored() -> None:
    etcd = Etcd()
    for name, epoch, round in (("a", 1, 7), ("b", 9, 6)):
        etcd.put(KEYS.member(name), member(name, epoch=epoch, round=round))
        record = example.recovery_record(
            epoch=epoch, commit=commit(round), held=commit(5, digest=f"of {name}")
        )
        etcd.put(KEYS.recovery_record(name), record)
    adopt(etcd, KEYS)  # type: ignore[arg-type]
    ((_, operations),) = etcd.asked
    written = {one.key: one.value for one in operations}
    assert written[KEYS.commit(5)] == encode_text(commit(5, digest="of a"))


def test_of_two_commits_of_one_round_that_of_the_later_epoch_is_restored() -> None:
    etcd = Etcd()
    for name, epoch in (("a", 1), ("b", 9)):
        etcd.put(KEYS.member(name), member(name, epoch=epoch, round=6))
        record = example.recovery_record(epoch=epoch, commit=commit(6, digest=f"of {name}"))
        etcd.put(KEYS.recovery_record(name), record)
    adopt(etcd, KEYS)  # type: ignore[arg-type]
    ((_, operations),) = etcd.asked
    written = {one.key: one.value for one in operations}
    assert written[KEYS.commit(6)] == encode_text(commit(6, digest="of b"))
