"""A coordinator whose data is gone, and peers that remember."""

import pytest
from test_membership import WITHIN_S, member, until

from bloomery.data.position import Position
from bloomery.elastic.control.adoption import adopt, bear_witness
from bloomery.elastic.control.codec import COMMIT, MEMBER, SHARES
from bloomery.elastic.control.decision import Wait, decide
from bloomery.elastic.control.etcd import Etcd
from bloomery.elastic.control.keys import Keys
from bloomery.elastic.control.membership import Membership
from bloomery.elastic.control.server import start_single
from bloomery.elastic.control.settings import RoundSettings
from bloomery.elastic.control.view import View
from bloomery.elastic.records import Commit, Shares
from bloomery.errors import CoordinatorError

SETTINGS = RoundSettings(inner_steps=2, total_samples=10_000)


def commit(round, **changed):
    usual = dict(epoch=30 + round, members=("a",), digest="d", position=Position(consumed=9), sources=("a",))
    return Commit(round=round, **usual | changed)


def test_a_run_goes_on_from_what_its_peers_remember_above_every_epoch_they_have_seen(tmp_path):
    server, keys = start_single(tmp_path / "first"), Keys("run")
    position = Position(consumed=9, holes=(range(9, 13),))
    shares = Shares(round=5, position=position, shares={"a": (range(9, 13),)}, live=1)
    with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd, View(etcd, keys, idle_s=1.0) as view:
        membership = Membership(etcd, keys, lease_s=60.0, heartbeat_s=0.2)
        membership.join(member("a", digest="d", round=4))
        for round in range(5):
            etcd.put(keys.commit(round), COMMIT.text(commit(round)))
        etcd.put(keys.shares(5), SHARES.text(shares))
        etcd.put(keys.epoch, "34")
        until(view, lambda snapshot: snapshot.epoch == 34 and snapshot.shares == shares)
        server.kill()
        server = start_single(tmp_path / "second", port=server.member.port)
        lost = until(view, lambda snapshot: snapshot.forgotten and "a" in snapshot.members)
        waiting = decide(lost, me="a", settings=SETTINGS, now=0.0)
        assert isinstance(waiting, Wait) and "--adopt" in waiting.why
        bear_witness(membership, keys, "a", lost)
        adopted = adopt(etcd, keys)
        assert (adopted.epoch, adopted.round, adopted.witnesses) == (35, 4, ("a",))
        back = until(view, lambda snapshot: snapshot.epoch == 35)
        assert not back.forgotten and back.commit == commit(4) and back.shares == shares
        assert back.remembered is None
        membership.leave()
    server.stop()


def test_what_the_coordinator_knows_better_is_kept_and_the_epoch_only_grows(etcd, keys):
    with View(etcd, keys) as view:
        etcd.put(keys.commit(7), COMMIT.text(commit(7)))
        etcd.put(keys.epoch, "50")
        etcd.put(keys.member("a"), MEMBER.text(member("a", epoch=41)))
        adopted = adopt(etcd, keys)
        assert (adopted.epoch, adopted.round) == (51, -1)
        assert until(view, lambda snapshot: snapshot.epoch == 51).commit == commit(7)


def test_where_nobody_remembers_nothing_is_adopted(etcd, keys):
    with pytest.raises(CoordinatorError, match="no peer of the run"):
        adopt(etcd, keys)
