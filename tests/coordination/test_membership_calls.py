"""What a membership asks of the coordinator, in which order and for how long; without a coordinator."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.coordination.test_membership import member
from tests.protocol import example

from bloomery.coordination import membership as membership_module
from bloomery.coordination.etcd import Condition, LeaseGone, Put, TransactionResult
from bloomery.coordination.etcd_watch import KeyValue
from bloomery.coordination.membership import Membership, NameTaken
from bloomery.errors import CoordinatorAway, CoordinatorError
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys

KEYS = Keys("r")
DONE, REFUSED, UNKNOWN = TransactionResult.DONE, TransactionResult.REFUSED, TransactionResult.UNKNOWN
MINE = member("a")
FREE = Condition(key=KEYS.member("a"), aspect="created", wanted=0)


class Coordinator:
    """Notes each call. results: of transactions, DONE where none is left; leases count from 1."""

    def __init__(self, *results: TransactionResult | LeaseGone) -> None:
        self.results, self.calls = list(results), list[Any]()
        self.leases = 0
        self.listed: KeyValue | None = None
        self.lives = True
        self.gone = False
        self.transactions: list[tuple[list[Condition], list[Put]]] = []

    def grant(self, ttl_s: int, *, deadline_s: float | None = None) -> int:
        self.leases += 1
        self.calls.append(("grant", ttl_s, deadline_s))
        return self.leases

    def transact(self, conditions: list[Condition], operations: list[Put]) -> TransactionResult:
        self.transactions.append((conditions, operations))
        result = self.results.pop(0) if self.results else DONE
        if isinstance(result, LeaseGone):
            raise result
        return result

    def get(self, key: str) -> KeyValue | None:
        assert key == KEYS.member("a")
        return self.listed

    def revoke(self, lease: int, *, deadline_s: float | None = None) -> None:
        self.calls.append(("revoke", lease, deadline_s))

    def keep_alive(self, lease: int, *, deadline_s: float | None = None) -> bool:
        self.calls.append(("keep alive", lease, deadline_s))
        return self.lives

    def put(self, key: str, value: str, *, lease: int) -> None:
        self._put(("put", key, value, lease))

    def put_once(self, key: str, value: str, *, lease: int, delete: Any = ()) -> None:
        self._put(("put once", key, value, lease, list(delete)))

    def _put(self, call: Any) -> None:
        if self.gone:
            self.gone = False
            raise LeaseGone("it is gone")
        self.calls.append(call)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, which only tests and waits move."""
    now = [100.0]
    monkeypatch.setattr(membership_module.time, "monotonic", lambda: now[0])
    return now


def membership_of(etcd: Coordinator, clock: list[float], **how: Any) -> Membership:
    """A membership whose thread does nothing, and whose waits pass at once."""
    made = Membership(etcd, KEYS, **dict(lease_s=9.5, heartbeat_s=600.0) | how)  # type: ignore[arg-type]

    def wait(seconds: float) -> bool:
        clock[0] += seconds
        return made._ended.is_set()

    made._keep = lambda: None  # type: ignore[method-assign]
    made._ended.wait = wait  # type: ignore[method-assign, assignment]
    return made


def other_process(incarnation: str, *, lease: int) -> KeyValue:
    value = encode_text(member("a", incarnation=incarnation))
    return KeyValue(key=KEYS.member("a"), value=value, created=1, modified=1, lease=lease)


@pytest.mark.parametrize(("deadline_s", "answer_s"), [(None, 60.0), (40.0, 40.0), (0.5, 30.0)])
def test_a_peer_is_listed_on_a_new_lease_with_what_waits_and_has_time_for_that(
    clock: list[float], deadline_s: float | None, answer_s: float
) -> None:
    etcd = Coordinator()
    membership = membership_of(etcd, clock)
    membership.keep("settings", "s")
    membership.offer("ready", "x", round=4)
    clock[0] = 107.0
    membership.join(MINE, deadline_s=deadline_s)
    assert etcd.calls == [("grant", 10, answer_s)]
    assert etcd.transactions == [
        (
            [FREE],
            [
                Put(key=KEYS.member("a"), value=encode_text(MINE), lease=1),
                Put(key="settings", value="s", lease=1),
                Put(key="ready", value="x", lease=1),
            ],
        )
    ]
    assert membership.lease == 1 and membership.silent_s == 0.0
    clock[0] += 5.0
    assert membership.silent_s == 5.0


def test_a_short_lease_is_waited_for_for_half_a_minute_at_least(clock: list[float]) -> None:
    etcd = Coordinator()
    membership_of(etcd, clock, lease_s=2.0).join(MINE)
    assert etcd.calls == [("grant", 2, 30.0)]
    membership_of(etcd, clock, lease_s=0.0).join(MINE)
    assert etcd.calls[-1] == ("grant", 1, 30.0), "etcd has no shorter leases"


def test_an_earlier_lease_of_this_very_process_is_revoked_and_the_name_taken(clock: list[float]) -> None:
    etcd = Coordinator(REFUSED)
    etcd.listed = other_process(MINE.incarnation, lease=55)
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    assert etcd.calls[1:] == [("revoke", 55, None)] and membership.lease == 1


def test_the_former_process_of_a_peer_is_waited_for_and_then_the_new_lease_is_given_back(
    clock: list[float],
) -> None:
    etcd = Coordinator(*[REFUSED] * 9)
    etcd.listed = other_process("former", lease=55)
    membership = membership_of(etcd, clock)
    with pytest.raises(NameTaken) as told:
        membership.join(MINE, deadline_s=0.25)
    assert told.value.message == "another process is listed as the peer 'a'"
    waited = [("keep alive", 1, None)] * 3
    assert etcd.calls == [("grant", 10, 30.0), *waited, ("revoke", 1, None)]
    assert membership.lease == 0 and clock[0] == pytest.approx(100.3)


def test_a_lease_that_ends_during_the_wait_is_taken_anew(clock: list[float]) -> None:
    etcd = Coordinator(REFUSED, DONE)
    etcd.listed, etcd.lives = other_process("former", lease=55), False
    membership = membership_of(etcd, clock)
    membership.join(MINE, deadline_s=60.0)
    assert etcd.calls == [("grant", 10, 60.0), ("keep alive", 1, None), ("grant", 10, None)]
    assert membership.lease == 2 and etcd.transactions[1][1][0].lease == 2


@pytest.mark.parametrize(("lease", "is_mine"), [(1, True), (55, False)])
def test_a_listing_without_an_answer_was_carried_out_where_the_key_lies_on_its_lease(
    clock: list[float], lease: int, is_mine: bool
) -> None:
    etcd = Coordinator(UNKNOWN)
    etcd.listed = other_process(MINE.incarnation, lease=lease)
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    assert membership.lease == 1 and len(etcd.transactions) == (1 if is_mine else 2)
    other = Coordinator(UNKNOWN)  # the key is not there
    membership_of(other, clock).join(MINE)
    assert len(other.transactions) == 2


def test_a_lost_listing_is_written_again_where_no_other_process_is_listed(clock: list[float]) -> None:
    etcd = Coordinator()
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    etcd.gone, etcd.results = True, [UNKNOWN, REFUSED]  # no answer came; the former entry has just ended
    membership.offer("ready", "x", round=4)
    assert membership.lease == 2 and len(etcd.transactions) == 4
    etcd.gone, etcd.results = True, [UNKNOWN] * 1_000
    with pytest.raises(CoordinatorAway, match="has not listed the peer 'a'"):
        membership.offer("ready", "y", round=4)
    assert membership.lease == 0 and etcd.calls[-1] == ("revoke", 3, None)
    etcd.gone, etcd.listed = False, other_process("another", lease=55)
    with pytest.raises(NameTaken):
        membership.offer("ready", "z", round=4)


def test_a_lease_that_ended_before_its_peer_was_listed_is_taken_anew(clock: list[float]) -> None:
    etcd = Coordinator(LeaseGone("it is gone"), DONE)
    etcd.lives = False
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    assert membership.lease == 2 and len(etcd.transactions) == 2


def test_a_former_process_of_another_version_is_waited_for(clock: list[float]) -> None:
    etcd = Coordinator(REFUSED, DONE)
    etcd.listed = KeyValue(key=KEYS.member("a"), value='{"peer":"a"}', created=1, modified=1, lease=55)
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    assert membership.lease == 1 and ("revoke", 55, None) not in etcd.calls


def test_a_record_is_written_as_it_is_and_an_offer_once_with_the_outdated_ones_going(
    clock: list[float],
) -> None:
    etcd = Coordinator()
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    etcd.calls.clear()
    membership.update(MINE)
    for round in (4, 5, 6):
        membership.offer(f"ready {round}", "x", round=round)
    membership.offer("done 5", "y", round=5)
    membership.keep("rates", "{}")
    membership.offer("ready 9", "x", round=9)
    assert etcd.calls == [
        ("put", KEYS.member("a"), encode_text(MINE), 1),
        ("put once", "ready 4", "x", 1, []),
        ("put once", "ready 5", "x", 1, []),
        ("put once", "ready 6", "x", 1, ["ready 4"]),
        ("put once", "done 5", "y", 1, []),
        ("put once", "rates", "{}", 1, []),
        ("put once", "ready 9", "x", 1, ["ready 5", "ready 6", "done 5"]),
    ]


def test_of_thousands_of_attempts_in_a_round_the_last_reports_are_kept(clock: list[float]) -> None:
    etcd = Coordinator()
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    membership.offer("ready 4", "x", round=4)
    kept = set[str]()
    for epoch in range(1_000):
        membership.offer(f"failed {epoch}", "x", round=4, is_report=True)
        _, key, _, _, deleted = etcd.calls[-1]
        kept = (kept | {key}) - set(deleted)
        assert len(kept) <= 129 and {f"failed {n}" for n in range(max(0, epoch - 63), epoch)} <= kept
    etcd.gone = True
    membership.offer("failed 1000", "x", round=4, is_report=True)
    written = [put.key for put in etcd.transactions[-1][1]]
    assert written[:2] == [KEYS.member("a"), "ready 4"] and 64 < len(written) <= 131
    membership.offer("ready 5", "x", round=5)
    membership.offer("ready 6", "x", round=6)
    assert set(etcd.calls[-1][4]) == {*written[1:]}


def test_what_was_lost_with_the_lease_is_written_again_on_the_next_one(clock: list[float]) -> None:
    etcd, lost = Coordinator(), list[int]()
    membership = membership_of(etcd, clock, lost=lambda: lost.append(membership.lease))
    membership.join(MINE)
    membership.keep("settings", "s")
    membership.offer("ready 4", "x", round=4)
    later = example.member(peer="a", round=5)
    etcd.gone = True
    membership.update(later)
    assert lost == [1] and membership.lease == 2 and etcd.calls[-1] == ("grant", 10, 30.0)
    keys = [(put.key, put.value, put.lease) for put in etcd.transactions[-1][1]]
    assert keys == [
        (KEYS.member("a"), encode_text(later), 2),
        ("settings", "s", 2),
        ("ready 4", "x", 2),
    ]
    etcd.gone = True
    membership.offer("ready 5", "z", round=5)
    assert [put.key for put in etcd.transactions[-1][1]] == [KEYS.member("a"), "settings", "ready 5"]
    membership.offer("ready 7", "z", round=7)
    assert etcd.calls[-1] == ("put once", "ready 7", "z", 3, ["ready 5"])


def test_who_withdraws_gives_the_lease_back_and_keeps_only_what_belongs_to_no_round(
    clock: list[float], caplog
) -> None:
    etcd = Coordinator()
    membership = membership_of(etcd, clock)
    membership.withdraw()
    assert etcd.calls == []
    membership.join(MINE)
    membership.keep("settings", "s")
    membership.offer("ready 4", "x", round=4)
    with membership:
        pass
    assert etcd.calls[-1] == ("revoke", 1, 2.0) and membership.lease == 0
    membership.update(MINE)
    assert etcd.transactions[-1][1][0].lease == 2, "it is listed again by what it writes"
    assert [put.key for put in etcd.transactions[-1][1]] == [KEYS.member("a"), "settings"]

    def away(lease: int, *, deadline_s: float) -> None:
        raise CoordinatorAway("no answer")

    etcd.revoke = away  # type: ignore[assignment]
    membership.withdraw()
    assert "the lease is left to run out in 10 s: no answer" in caplog.text and membership.lease == 0


class Heartbeats:
    """A coordinator that answers renewals in turn: whether the lease lives, or an error."""

    def __init__(self, clock: list[float], *answers: Any) -> None:
        self.clock, self.answers, self.asked = clock, list(answers), list[Any]()

    def keep_alive(self, lease: int, *, deadline_s: float) -> bool:
        self.asked.append((lease, deadline_s))
        answer, seconds = self.answers.pop(0)
        self.clock[0] += seconds
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)


def test_the_lease_is_renewed_until_the_end_and_a_lost_one_is_taken_anew(clock: list[float], caplog) -> None:
    etcd: Any = Heartbeats(
        clock, (True, 0.25), (CoordinatorError("away"), 40.0), (True, 0.75), (False, 1.0), (True, 0.5)
    )
    membership = Membership(etcd, KEYS, lease_s=9.5, heartbeat_s=3.0)
    again: list[float] = []
    membership._list_again = lambda *, deadline_s: again.append(deadline_s)  # type: ignore[method-assign, assignment]
    membership._lease = 7
    waits = iter([False] * 5 + [True])
    membership._ended.wait = lambda seconds: next(waits)  # type: ignore[method-assign, assignment]
    membership._keep()
    assert etcd.asked == [(7, 3.0)] * 5 and again == [3.0]
    assert membership.round_trip_s == 0.5, "the median of three renewals"
    assert membership.silent_s == 0.0
    assert caplog.messages == ["the lease was not renewed for 40 s: away"]
    quick = Membership(etcd, KEYS, lease_s=9.5, heartbeat_s=0.2)
    etcd.answers = [(True, 0.0)]
    waits = iter([False, True])
    quick._ended.wait = lambda seconds: next(waits)  # type: ignore[method-assign, assignment]
    quick._keep()
    assert etcd.asked[-1] == (0, 1.0)


@pytest.mark.parametrize("meanwhile", ["another lease", "the end"])
def test_a_lease_that_ended_while_a_peer_left_or_took_another_is_not_replaced(
    clock: list[float], meanwhile: str
) -> None:
    class Late:
        def keep_alive(self, lease: int, *, deadline_s: float) -> bool:
            if meanwhile == "another lease":
                membership._lease = 8
            else:
                membership._ended.set()
            return False

    etcd: Any = Late()
    membership = Membership(etcd, KEYS, lease_s=9.5, heartbeat_s=3.0)
    again: list[float] = []
    membership._list_again = lambda *, deadline_s: again.append(deadline_s)  # type: ignore[method-assign, assignment]
    membership._lease = 7
    waits = iter([False, True])
    membership._ended.wait = lambda seconds: next(waits)  # type: ignore[method-assign, assignment]
    membership._keep()
    assert again == []


def test_all_that_was_offered_in_a_round_is_written_again_with_a_lost_lease(clock: list[float]) -> None:
    etcd = Coordinator()
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    membership.offer("ready 4", "x", round=4)
    etcd.gone = True
    membership.offer("done 4", "y", round=4)
    assert [put.key for put in etcd.transactions[-1][1]] == [KEYS.member("a"), "ready 4", "done 4"]


def test_a_peer_that_left_is_not_listed_again_by_what_it_offers(clock: list[float]) -> None:
    etcd = Coordinator()
    membership = membership_of(etcd, clock)
    membership.join(MINE)
    membership._thread = threading.current_thread()  # as when it leaves because its lease was lost
    membership.withdraw()
    membership.offer("ready 4", "x", round=4)
    assert len(etcd.transactions) == 1 and membership.lease == 0


def test_a_peer_that_leaves_no_longer_waits_for_its_former_process(clock: list[float]) -> None:
    etcd = Coordinator(*[REFUSED] * 9)
    etcd.listed = other_process("former", lease=55)
    membership = membership_of(etcd, clock)
    membership._ended.wait = lambda seconds: membership._ended.set()  # type: ignore[method-assign, assignment]
    with pytest.raises(NameTaken):
        membership.join(MINE, deadline_s=60.0)
    assert etcd.calls[1:] == [("keep alive", 1, None), ("revoke", 1, None)]


def test_a_lost_lease_is_none_though_no_other_is_granted(clock: list[float]) -> None:
    etcd = Coordinator()
    membership = membership_of(etcd, clock)
    membership.join(MINE)

    def away(ttl_s: int, *, deadline_s: float) -> int:
        raise CoordinatorAway("no answer")

    etcd.gone, etcd.grant = True, away  # type: ignore[assignment]
    with pytest.raises(CoordinatorAway):
        membership.update(MINE)
    assert membership.lease == 0


def test_a_thread_that_ended_is_replaced_by_the_next_listing(clock: list[float]) -> None:
    membership = membership_of(Coordinator(), clock)
    membership.join(MINE)
    first = membership._thread
    assert first is not None
    first.join()
    membership.join(MINE)
    assert membership._thread is not first


def test_a_peer_that_comes_back_renews_its_lease_again(clock: list[float]) -> None:
    membership = membership_of(Coordinator(), clock)
    membership.join(MINE)
    membership.withdraw()
    assert membership._ended.is_set()
    membership.join(MINE)
    assert not membership._ended.is_set() and membership.lease == 2
