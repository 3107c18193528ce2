"""A coordinator whose data is gone, and peers that remember."""

import pytest
from tests.coordination.test_membership import WITHIN_S, member, until
from tests.protocol import example

from bloomery.coordination.decide import TakeShare, Wait, decide
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_process import start_single
from bloomery.coordination.membership import Membership
from bloomery.coordination.recovery import adopt, write_recovery_record
from bloomery.coordination.run_view import RunView
from bloomery.data.position import Position
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import RoundShares

SETTINGS = RoundSettings(inner_steps=2, total_samples=10_000)


def commit(round, **changed):
    usual = dict(epoch=30 + round, members=("a",), digest="d", position=Position(consumed=9), sources=("a",))
    return example.commit(round=round, **usual | changed)


def test_a_run_goes_on_from_what_its_peers_remember_above_every_epoch_they_have_seen(tmp_path):
    server, keys = start_single(tmp_path / "first"), Keys("run")
    position = Position(consumed=9, holes=(range(9, 13),))
    shares = RoundShares(round=5, position=position, shares={"a": (range(9, 13),)}, live=1)
    with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd:
        for round in range(5):
            etcd.put(keys.commit(round), encode_text(commit(round)))
        etcd.put(keys.shares(5), encode_text(shares))
        etcd.put(keys.epoch, "34")
    with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd, RunView(etcd, keys, idle_s=1.0) as view:
        membership = Membership(etcd, keys, lease_s=60.0, heartbeat_s=0.2)
        membership.join(member("a", digest="d", round=4))
        until(view, lambda snapshot: snapshot.epoch == 34 and snapshot.shares == shares)
        server.kill()
        server = start_single(tmp_path / "second", port=server.member.port)
        lost = until(view, lambda snapshot: snapshot.forgotten and "a" in snapshot.members)
        waiting = decide(lost, me="a", settings=SETTINGS, now=0.0)
        assert isinstance(waiting, Wait) and "--adopt" in waiting.why
        write_recovery_record(membership, keys, "a", lost.remembered)
        adopted = adopt(etcd, keys)
        assert (adopted.epoch, adopted.round, adopted.peers_ahead) == (35, 4, ("a",))
        back = until(view, lambda snapshot: snapshot.epoch == 35)
        assert not back.forgotten and back.commit == commit(4) and back.shares == shares
        assert back.remembered is None
        membership.leave()
    server.stop()


def test_what_the_coordinator_knows_better_is_kept_and_the_epoch_only_grows(etcd, keys):
    etcd.put(keys.commit(7), encode_text(commit(7)))
    etcd.put(keys.epoch, "50")
    with RunView(etcd, keys) as view:
        etcd.put(keys.member("a"), encode_text(member("a", epoch=41)))
        adopted = adopt(etcd, keys)
        assert (adopted.epoch, adopted.round, adopted.peers_ahead) == (51, 7, ())
        assert until(view, lambda snapshot: snapshot.epoch == 51).commit == commit(7)


def test_a_round_that_commits_meanwhile_is_not_adopted_over(etcd, keys, monkeypatch):
    etcd.put(keys.commit(7), encode_text(commit(7)))
    etcd.put(keys.member("a"), encode_text(member("a", epoch=41)))
    lists = etcd.list

    def list_before_the_commit(prefix):
        found = lists(prefix)
        if prefix == keys.commits:
            etcd.put(keys.commit(8), encode_text(commit(8)))
        return found

    monkeypatch.setattr(etcd, "list", list_before_the_commit)
    with pytest.raises(CoordinatorError, match="changed by another process"):
        adopt(etcd, keys)
    assert etcd.get(keys.epoch) is None


def tell(etcd, keys, peer, **told):
    usual = dict(epoch=0, commit=None, shares=None, held=None)
    etcd.put(f"{keys.of_peer(peer)}what-else-it-writes", "")
    etcd.put(keys.recovery_record(peer), encode_text(example.recovery_record(**usual | told)))


def test_what_checkpoints_tell_is_restored_beside_the_newest_round_so_that_the_run_can_go_back(etcd, keys):
    newest, saved = commit(37, epoch=90), commit(30, digest="saved")
    shares = RoundShares(round=38, position=newest.position, shares={"a": ()}, live=1)
    with RunView(etcd, keys) as view:
        for name, read in (("a", commit(31)), ("b", saved)):
            etcd.put(keys.member(name), encode_text(member(name, round=30, digest="saved", epoch=90)))
            tell(etcd, keys, name, epoch=90, commit=read, held=commit(30, digest="saved", epoch=0))
        tell(etcd, keys, "c", epoch=91, commit=newest, shares=shares)
        lost = until(view, lambda snapshot: "c" in snapshot.peers_ahead and len(snapshot.members) == 2)
        assert isinstance(decide(lost, me="a", settings=SETTINGS, now=0.0), Wait)
        adopted = adopt(etcd, keys)
        assert (adopted.epoch, adopted.round) == (92, 37)
        assert (adopted.peers_ahead, adopted.holders) == (("c",), ())
        back = until(view, lambda snapshot: snapshot.epoch == 92)
        assert not back.forgotten and back.commit == newest and back.shares == shares
        assert back.commits == {30: saved, 31: commit(31), 37: newest}


def test_where_only_checkpoints_are_left_the_newest_of_them_is_the_run_and_peers_take_new_shares(etcd, keys):
    with RunView(etcd, keys) as view:
        for name, round in (("a", 30), ("b", 28)):
            etcd.put(keys.member(name), encode_text(member(name, round=round, digest=f"d{round}")))
            tell(etcd, keys, name, held=commit(round, digest=f"d{round}"))
        adopted = adopt(etcd, keys)
        assert (adopted.round, adopted.peers_ahead, adopted.holders) == (30, ("a",), ("a",))
        back = until(view, lambda snapshot: snapshot.epoch == adopted.epoch)
        assert not back.forgotten and back.commit.position == Position(consumed=9)
        assert back.shares == RoundShares(round=31, position=Position(consumed=9), shares={}, live=0)
        assert decide(back, me="a", settings=SETTINGS, now=0.0) == TakeShare(round=31)


def test_a_round_that_somebody_holds_and_nobody_can_tell_of_is_not_dropped_by_adopting(etcd, keys):
    etcd.put(keys.member("a"), encode_text(member("a", round=31, digest="d")))
    etcd.put(keys.member("b"), encode_text(member("b", round=0, digest="fresh")))
    with pytest.raises(CoordinatorError, match="'a' holds round 31, and no peer has reported"):
        adopt(etcd, keys)
    assert not etcd.list(keys.commits).items and etcd.get(keys.epoch) is None


def test_where_nobody_remembers_nothing_is_adopted(etcd, keys):
    with pytest.raises(CoordinatorError, match="no peer of the run"):
        adopt(etcd, keys)
