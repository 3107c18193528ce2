"""What a peer knows of its run when it starts again."""

from contextlib import closing

import pytest
from tests.diloco.elastic_peers import until
from tests.protocol import example

from bloomery.agent.known_commits import KnownCommits
from bloomery.coordination.snapshot import ListedShares, RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.protocol.records import RoundShares


def commit(round, **changed):
    position = Position(consumed=9, skips=(range(20, 25),))
    usual = dict(epoch=round, members=("a",), digest=f"d{round}", position=position, sources=("a",))
    return example.commit(round=round, **usual | changed)


def snapshot(round, **changed):
    shares = RoundShares(
        round=round + 1, position=Position(consumed=9, holes=(range(9, 13),)), shares={}, live=1
    )
    usual = dict(
        epoch=round,
        own_highest=round,
        commits={round: commit(round)},
        standing=ListedShares(shares=shares, modified=1),
    )
    return RunSnapshot(**usual | changed)


def holding(round, digest, **changed):
    usual = dict(step=3, samples=4, position=Position(consumed=5))
    return example.state_held(round=round, digest=digest, **usual | changed)


def known(path, run="r"):
    knowledge = KnownCommits(path, run=run, peer="a")
    knowledge.close()
    return knowledge


def test_the_newest_round_is_known_again_after_a_restart_and_that_of_another_run_is_not(tmp_path):
    path = tmp_path / "run" / "known.json"
    knowledge = KnownCommits(path, run="r", peer="a")
    assert knowledge.remembered is None
    for round in range(5):
        knowledge.note(snapshot(round))
    knowledge.close()
    remembered = known(path).remembered
    assert remembered is not None and remembered.commit == commit(4)
    assert (remembered.epoch, remembered.shares) == (4, snapshot(4).shares)
    assert known(path, run="another").remembered is None


def test_what_is_noted_is_in_the_file_while_the_peer_goes_on(tmp_path):
    path = tmp_path / "known.json"
    with closing(KnownCommits(path, run="r", peer="a")) as knowledge:
        knowledge.note(snapshot(3))
        until(path.exists)
        assert known(path).remembered.commit == commit(3)


def test_what_a_coordinator_that_lost_its_data_says_is_not_kept(tmp_path):
    path = tmp_path / "known.json"
    knowledge = KnownCommits(path, run="r", peer="a")
    knowledge.note(snapshot(7))
    knowledge.note(snapshot(0, forgotten=True, own_highest=7))
    knowledge.note(RunSnapshot())
    knowledge.close()
    assert known(path).remembered.commit == commit(7)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"run": "r"}', b'{"run": "r", "epoch": -1}', b'{"run": "\xff"}', b"\xff"]
)
def test_a_garbled_file_is_refused_and_named(tmp_path, content):
    path = tmp_path / "known.json"
    path.write_bytes(content)
    with pytest.raises(PeerError, match=r"known\.json which round of the run is the newest") as refused:
        KnownCommits(path, run="r", peer="a")
    assert "Restore it from a copy" in refused.value.remedy and "move it away" in refused.value.remedy


def test_a_peer_testifies_where_the_coordinator_knows_less_and_of_the_checkpoint_it_holds(tmp_path):
    knowledge = known(tmp_path / "known.json")
    assert knowledge.recovery_record(snapshot(7), holding(7, "d7")) is None
    assert knowledge.recovery_record(snapshot(7), None) is None
    assert knowledge.recovery_record(RunSnapshot(), holding(0, "fresh")) is None
    told = knowledge.recovery_record(RunSnapshot(forgotten=True), holding(31, "d31"))
    assert told is not None and told.commit is None and told.round == 31
    assert (told.held.digest, told.held.position) == ("d31", Position(consumed=5))
    # The commit of a save long ago is not kept any more.
    assert knowledge.recovery_record(snapshot(7), holding(3, "d3")).held.round == 3
    assert knowledge.recovery_record(RunSnapshot(forgotten=True), holding(31, "d31", position=None)) is None


def test_another_run_of_the_same_name_is_told_from_this_peers(tmp_path):
    knowledge = KnownCommits(tmp_path / "known.json", run="r", peer="a")
    knowledge.note(snapshot(7))
    other = {3: commit(3, digest="theirs"), 7: commit(7, digest="theirs"), 9: commit(9)}
    assert knowledge.contradiction(snapshot(7), holding(7, "d7")) is None
    assert knowledge.contradiction(snapshot(9), None) is None
    assert "another run called 'r': its round 7" in knowledge.contradiction(RunSnapshot(commits=other), None)
    knowledge.close()
    again = known(tmp_path / "known.json")
    assert "its round 7" in again.contradiction(RunSnapshot(commits=other), None), "after a restart, too"
    assert "its round 3" in again.contradiction(RunSnapshot(commits=other), holding(3, "mine"))
    earlier = RunSnapshot(commits={3: other[3], 7: commit(7)})
    assert "its round 3" in again.contradiction(earlier, holding(3, "mine")), "of what the ranks hold, too"
    fresh = known(tmp_path / "nothing.json")
    assert "its round 3" in fresh.contradiction(RunSnapshot(commits=other), holding(3, "mine"))
    assert fresh.contradiction(RunSnapshot(commits=other), holding(0, "fresh")) is None


def test_a_disk_that_refuses_is_told_and_the_next_round_is_tried_again(tmp_path, caplog):
    blocked = tmp_path / "run"
    blocked.write_text("")  # a file where the directory should be
    with pytest.raises(Exception, match="Reading what is known"):
        KnownCommits(blocked / "known.json", run="r", peer="a")
    blocked.unlink()
    knowledge = KnownCommits(blocked / "known.json", run="r", peer="a")
    blocked.write_text("")
    knowledge.note(snapshot(1))
    knowledge.close()
    assert "Keeping the newest round failed" in caplog.text
    blocked.unlink()
    knowledge = KnownCommits(blocked / "known.json", run="r", peer="a")
    knowledge.note(snapshot(2))
    knowledge.close()
    assert known(blocked / "known.json").remembered.commit == commit(2)
