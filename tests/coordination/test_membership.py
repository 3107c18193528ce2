"""Members, and views of them, against a real etcd: leases that end, coordinators that are killed."""

import threading

import pytest
from tests.protocol import example

from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_answers import Lost
from bloomery.coordination.etcd_process import start_single
from bloomery.coordination.gateway import Gateway
from bloomery.coordination.membership import Membership, NameTaken
from bloomery.coordination.run_view import RunView
from bloomery.errors import CoordinatorAway
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Member

WITHIN_S = 60.0


def member(name, incarnation="1", **changed):
    usual = dict(
        peer=name,
        incarnation=incarnation,
        addresses=("127.0.0.1:1",),
        serves=("http://127.0.0.1:2",),
        round=-1,
        digest="",
        ranks=1,
        recipe="r",
        samples=4,
    )
    return example.member(**usual | changed)


def ready(name, round):
    return example.ready(peer=name, round=round, steps=1, tokens=8, spent=(range(4),), norm=1.0, finite=True)


def joined(etcd, keys, name, *, lease_s=60.0, heartbeat_s=0.2, **changed):
    membership = Membership(etcd, keys, lease_s=lease_s, heartbeat_s=heartbeat_s)
    membership.join(member(name, **changed), deadline_s=WITHIN_S)
    return membership


def until(view, holds):
    """Wait for a snapshot of which this holds."""
    snapshot = view.snapshot
    for _ in range(10_000):
        if holds(snapshot):
            return snapshot
        before = snapshot.version
        snapshot = view.changed(before, timeout_s=WITHIN_S)
        assert snapshot.version > before, f"nothing came in {WITHIN_S:.0f} s"
    raise AssertionError("changes do not end")


def test_a_member_knows_how_long_a_round_trip_to_the_coordinator_takes(etcd, keys):
    with joined(etcd, keys, "a", heartbeat_s=0.02) as membership:
        for _ in range(3000):
            if membership.round_trip_s:
                break
            threading.Event().wait(0.02)
        assert 0 < membership.round_trip_s < WITHIN_S


def test_members_see_one_another_come_and_leave(etcd, keys):
    with joined(etcd, keys, "a"), RunView(etcd, keys) as view:
        assert set(view.snapshot.members) == {"a"}
        b = joined(etcd, keys, "b")
        life = until(view, lambda snapshot: "b" in snapshot.members).members["b"].life
        b.update(member("b", round=3, digest="d"))
        snapshot = until(view, lambda snapshot: snapshot.members["b"].member.round == 3)
        assert snapshot.members["b"].life == life
        b.leave()
        assert set(until(view, lambda snapshot: "b" not in snapshot.members).members) == {"a"}


def test_a_lease_is_renewed_and_that_of_a_peer_that_says_nothing_ends(etcd, keys):
    with joined(etcd, keys, "a", heartbeat_s=1.5) as a, RunView(etcd, keys) as view:
        etcd.put(keys.member("b"), encode_text(member("b")), lease=etcd.grant(3))
        until(view, lambda snapshot: "b" in snapshot.members)
        assert "a" in until(view, lambda snapshot: "b" not in snapshot.members).members
        left = [60]
        while left[-1] <= min(left):  # it falls by the second, and rises when the lease is renewed
            left.append(int(etcd.call("lease/timetolive", {"ID": str(a.lease)})["TTL"]))
            assert left[-1] > 0
            threading.Event().wait(0.05)


def test_what_was_offered_vanishes_with_the_peer(etcd, keys):
    with RunView(etcd, keys) as view:
        a = joined(etcd, keys, "a")
        a.offer(keys.ready(0, "a"), encode_text(ready("a", 0)), round=0)
        assert until(view, lambda snapshot: snapshot.readies).readies["a"].ready == ready("a", 0)
        a.leave()
        assert until(view, lambda snapshot: not snapshot.members).readies == {}


def test_a_peer_whose_lease_was_lost_comes_back_with_what_it_offered_and_another_life(etcd, keys):
    with RunView(etcd, keys) as view, joined(etcd, keys, "a") as a:
        a.offer(keys.ready(0, "a"), encode_text(ready("a", 0)), round=0)
        life = until(view, lambda snapshot: snapshot.readies).members["a"].life
        etcd.revoke(a.lease)
        snapshot = until(
            view, lambda snapshot: "a" in snapshot.members and snapshot.members["a"].life != life
        )
        assert set(until(view, lambda snapshot: snapshot.readies).readies) == {"a"}
        assert snapshot.members["a"].life > life


def test_two_processes_of_one_name_are_told_apart(etcd, keys):
    with joined(etcd, keys, "a"):
        second = Membership(etcd, keys, lease_s=60.0, heartbeat_s=0.2)
        with pytest.raises(NameTaken, match="'a'"):
            second.join(member("a", incarnation="2"), deadline_s=0.2)


def test_a_peer_that_was_killed_and_started_again_takes_its_name_when_its_old_lease_ends(etcd, keys, caplog):
    caplog.set_level("INFO")
    etcd.put(keys.member("a"), encode_text(member("a")), lease=etcd.grant(3))
    with joined(etcd, keys, "a", incarnation="2"):
        assert decode(etcd.get(keys.member("a")).value, Member).incarnation == "2"
    assert [record.message for record in caplog.records if "lease" in record.message] == [
        "another process is listed as 'a': waiting until its lease runs out"
    ], "one line, however often it has looked"


def test_an_offer_whose_answer_is_lost_is_written_once(etcd, keys, monkeypatch):
    ask, lost = Gateway._ask, []

    def ask_and_lose(self, number, path, body, **limits):
        answer = ask(self, number, path, body, **limits)
        if "failure" in body and not lost:
            lost.append(etcd.get(keys.ready(1, "a")).modified)
            raise Lost("the connection ended before the answer")
        return answer

    with joined(etcd, keys, "a") as membership:
        monkeypatch.setattr(Gateway, "_ask", ask_and_lose)
        membership.offer(keys.ready(1, "a"), encode_text(ready("a", 1)), round=1)
        assert lost == [etcd.get(keys.ready(1, "a")).modified]


def test_an_offer_that_is_repeated_stays_what_attempts_call_it(etcd, keys):
    with joined(etcd, keys, "a") as membership:
        key, text = keys.ready(1, "a"), encode_text(ready("a", 1))
        membership.offer(key, text, round=1)
        first = etcd.get(key).modified
        membership.offer(key, text, round=1)  # as when no answer came though it was written
        assert etcd.get(key).modified == first
        etcd.delete(key)
        membership.offer(key, text, round=1)  # as when it was not
        assert etcd.get(key).value == text


def test_an_offer_after_a_failed_listing_lists_the_peer_again_and_lies_on_its_lease(etcd, keys, monkeypatch):
    key, text = keys.ready(1, "a"), encode_text(ready("a", 1))

    def away(*arguments, **limits):
        raise CoordinatorAway("no answer")

    with joined(etcd, keys, "a", heartbeat_s=60.0) as membership:
        etcd.revoke(membership.lease)
        with monkeypatch.context() as patch:
            patch.setattr(etcd, "transact", away)
            with pytest.raises(CoordinatorAway):
                membership.offer(key, text, round=1)
        membership.offer(key, text, round=1)
        assert 0 < membership.lease == etcd.get(key).lease == etcd.get(keys.member("a")).lease
    assert etcd.get(key) is None


def test_an_offer_of_a_peer_that_has_left_is_not_written_before_it_joins(etcd, keys):
    with joined(etcd, keys, "a") as membership:
        membership.withdraw()
        membership.offer(keys.ready(1, "a"), encode_text(ready("a", 1)), round=1)
        assert etcd.get(keys.ready(1, "a")) is None
        membership.join(member("a"))
        assert etcd.get(keys.ready(1, "a")).lease == membership.lease


def test_what_is_kept_lies_on_the_lease_of_a_listed_peer_in_every_round(etcd, keys):
    membership = Membership(etcd, keys, lease_s=60.0, heartbeat_s=0.2)
    membership.keep(keys.settings("a"), "{}")
    assert etcd.get(keys.settings("a")) is None
    for _ in range(2):
        membership.join(member("a"))
        membership.keep(keys.rate("a"), "{}")
        for round in range(1, 5):
            membership.offer(keys.ready(round, "a"), encode_text(ready("a", round)), round=round)
        leases = {etcd.get(key).lease for key in (keys.member("a"), keys.settings("a"), keys.rate("a"))}
        assert leases == {membership.lease}
        membership.leave()
        assert not etcd.list(keys.of_peer("a")).items


def test_a_peer_removes_what_it_wrote_for_rounds_long_over_and_keeps_that_of_the_last(etcd, keys):
    with joined(etcd, keys, "a") as membership:
        before = etcd.list(keys.of_peer("a")).revision
        for round in range(1, 6):
            membership.offer(keys.ready(round, "a"), encode_text(ready("a", round)), round=round)
        listing = etcd.list(keys.of_peer("a"))
        lying = {item.key for item in listing.items}
        assert lying == {keys.member("a"), keys.ready(4, "a"), keys.ready(5, "a")}
        assert listing.revision - before == 5  # removed with what was written, so that others hear once


def test_a_record_that_makes_no_sense_is_passed_over_and_told(etcd, keys, caplog):
    with RunView(etcd, keys) as view:
        etcd.put(keys.member("b"), '{"peer": "b"}')
        etcd.put(keys.member("c"), encode_text(member("another")))
        etcd.put(f"{keys.of_peer('y')}ready/x", "{}")
        etcd.put(f"{keys.root}of/tomorrow", "{}")
        joined(etcd, keys, "a").leave()
        with joined(etcd, keys, "a"):
            assert set(until(view, lambda snapshot: snapshot.members).members) == {"a"}
    assert caplog.text.count("is ignored") == 3


def test_a_coordinator_that_is_killed_and_comes_back_has_lost_nobody(tmp_path):
    server = start_single(tmp_path)
    keys = Keys("run")
    with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd, RunView(etcd, keys) as view:
        members = [joined(etcd, keys, name) for name in "abc"]
        lives = {
            name: one.life
            for name, one in until(view, lambda snapshot: len(snapshot.members) == 3).members.items()
        }
        etcd.put(keys.epoch, "7")
        until(view, lambda snapshot: snapshot.epoch == 7)
        server.kill()
        with pytest.raises(CoordinatorAway):
            etcd.get(keys.epoch, deadline_s=0.2)
        server = start_single(tmp_path, port=server.member.port)
        try:
            etcd.put(keys.epoch, "8")
            snapshot = until(view, lambda snapshot: snapshot.epoch == 8)
            assert {name: one.life for name, one in snapshot.members.items()} == lives
            assert not snapshot.forgotten
        finally:
            for one in members:
                one.leave()
            server.stop()


def test_a_coordinator_that_lost_its_data_is_recognised_and_members_list_themselves_again(tmp_path):
    server = start_single(tmp_path / "first")
    keys = Keys("run")
    with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd, RunView(etcd, keys, idle_s=1.0) as view:
        with joined(etcd, keys, "a"):
            for epoch in range(1, 30):
                etcd.put(keys.epoch, str(epoch))
            until(view, lambda snapshot: snapshot.epoch == 29 and "a" in snapshot.members)
            server.kill()
            server = start_single(tmp_path / "second", port=server.member.port)
            snapshot = until(view, lambda snapshot: snapshot.epoch == 0 and "a" in snapshot.members)
            assert snapshot.forgotten
            etcd.put(keys.epoch, "30")
            assert not until(view, lambda snapshot: snapshot.epoch == 30).forgotten
        server.stop()


def test_whoever_waits_for_a_change_is_woken_by_what_happens_here(etcd, keys):
    with RunView(etcd, keys) as view:
        version = view.snapshot.version
        threading.Timer(0.1, view.wake).start()
        assert view.changed(version, timeout_s=WITHIN_S).version > version


def test_whoever_waits_for_a_change_is_woken_by_the_end(etcd, keys):
    view = RunView(etcd, keys)
    version = view.start().version
    threading.Timer(0.1, view.close).start()
    assert view.changed(version, timeout_s=WITHIN_S).version == version
