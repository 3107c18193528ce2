"""Numbers that one member may write, so large that nothing could come after them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.coordination.test_adopting import KEYS as LOST_RUN
from tests.coordination.test_adopting import lost
from tests.coordination.test_adoption import commit as committed
from tests.coordination.test_membership import member
from tests.coordination.test_whole_snapshot import KEYS, SHARES, Reading, commit
from tests.protocol import example

from bloomery.coordination.commits import EPOCHS_AT_MOST, shares_of
from bloomery.coordination.etcd import Put
from bloomery.coordination.etcd_watch import KeyValue, WatchEvent
from bloomery.coordination.recovery import adopt
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import NUMBER_AT_MOST


@pytest.mark.parametrize("huge", [7 + EPOCHS_AT_MOST + 1, NUMBER_AT_MOST, 10**10, 10**400])
def test_an_epoch_far_above_the_newest_commits_is_ignored_and_not_remembered(huge: int, caplog) -> None:
    run = Reading()
    run.put(KEYS.commit(2), commit(2, epoch=7))
    assert run.put(KEYS.epoch, "9").epoch == 9
    snapshot = run.put(KEYS.epoch, str(huge))
    assert snapshot.own_highest == snapshot.highest == 9 and snapshot.epoch == 0 and snapshot.forgotten
    assert f"the key {KEYS.epoch} is ignored" in caplog.text
    assert not run.put(KEYS.epoch, "10").forgotten


def test_an_epoch_that_many_failed_attempts_led_to_and_one_that_was_adopted_count() -> None:
    run = Reading()
    run.put(KEYS.commit(2), commit(2, epoch=7))
    assert run.put(KEYS.epoch, str(7 + EPOCHS_AT_MOST)).epoch == 7 + EPOCHS_AT_MOST
    adopted = str(8 + EPOCHS_AT_MOST)
    for key in (KEYS.adopted, KEYS.epoch):
        item = KeyValue(key=key, value=adopted, created=1, modified=99)
        run.builder.take(WatchEvent(key=key, item=item))
    assert run.builder.snapshot(changed=True).epoch == 8 + EPOCHS_AT_MOST


def written_epoch(etcd) -> int:
    ((_, operations),) = etcd.asked
    return next(int(put.value) for put in operations if isinstance(put, Put) and put.key == LOST_RUN.epoch)


def test_a_run_is_adopted_above_what_can_have_been_seen_and_not_above_any_claim(caplog) -> None:
    etcd = lost()
    etcd.put(LOST_RUN.epoch, str(NUMBER_AT_MOST), modified=41)
    etcd.put(LOST_RUN.member("z"), member("z", epoch=NUMBER_AT_MOST, round=-1, digest=""))
    etcd.put(
        LOST_RUN.recovery_record("y"), example.recovery_record(epoch=NUMBER_AT_MOST - 1, commit=committed(5))
    )
    adopt(etcd, LOST_RUN)
    assert written_epoch(etcd) == 34
    for who in ("the coordinator", "z", "y"):
        assert f"that {who} names epoch" in caplog.text


def test_a_run_without_any_commit_is_not_adopted_beyond_the_last_number() -> None:
    etcd = lost()
    etcd.items.clear()
    etcd.put(LOST_RUN.member("z"), member("z", epoch=NUMBER_AT_MOST, round=-1, digest=""))
    with pytest.raises(CoordinatorError, match=f"there is no epoch above {NUMBER_AT_MOST}"):
        adopt(etcd, LOST_RUN)
    assert etcd.asked == []


def test_shares_count_no_more_peers_than_have_one() -> None:
    assert shares_of(encode_text(SHARES), round=3) == SHARES
    with pytest.raises(ValueError, match="it counts 4611686018427387904 peers, and 1 have a share"):
        shares_of(encode_text(replace(SHARES, live=1 << 62)), round=3)
