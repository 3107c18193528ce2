"""What a peer writes to a coordinator that knows less of the run than it does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.agent.agent_parts import SETTINGS, Listing, Writer
from tests.agent.test_known_commits import commit, holding, known, snapshot
from tests.protocol import example

from bloomery.agent import known_commits
from bloomery.agent.known_commits import RecoveryReporter
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.protocol.encoding import decode
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import RecoveryRecord

KEYS = Keys("r")


class Reporting:
    """A peer that reports to a coordinator, which takes its token or has another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Any, *, token: str = "secret") -> None:
        self.restored: list[Any] = []
        self.takes_token = True
        monkeypatch.setattr(known_commits, "restore_token", self._restore)
        self.writer = Writer(wake=lambda: None, failed=lambda error: None, notes=[])
        self.membership = Listing(None, KEYS)
        self.knowledge = known(path)
        context: Any = SimpleNamespace(
            me="a", keys=KEYS, etcd="etcd", settings=replace(SETTINGS, token=token), writer=self.writer
        )
        self.reporter = RecoveryReporter(context, self.membership, self.knowledge)  # type: ignore[arg-type]

    def follow(self, seen: RunSnapshot, held: Any, *, is_listed: bool = True) -> list[RecoveryRecord]:
        self.reporter.follow(seen, held, is_listed=is_listed)
        return [decode(text, RecoveryRecord) for _, text, _ in self.membership.offered]

    def _restore(self, *asked: Any) -> bool:
        self.restored.append(asked)
        return self.takes_token


LOST = RunSnapshot(forgotten=True, own_highest=9)


def test_a_record_is_written_once_in_each_listing_with_the_runs_token_before_it(
    monkeypatch, tmp_path
) -> None:
    peer = Reporting(monkeypatch, tmp_path / "known.json")
    assert peer.follow(snapshot(3), holding(3, "d3")) == [] == peer.follow(LOST, None)
    assert peer.follow(LOST, holding(3, "d3"), is_listed=False) == []
    for _ in range(2):
        (record,) = peer.follow(LOST, holding(3, "d3"))
    assert (record.epoch, record.commit, record.shares) == (9, None, None)
    assert record.held == example.commit(
        round=3,
        epoch=0,
        members=(),
        digest="d3",
        position=holding(3, "d3").position,
        sources=("a",),
        why="as a checkpoint tells it",
    )
    assert peer.writer.jobs == ["the run's token", "recovery record"]
    assert peer.restored == [("etcd", KEYS, "secret")]
    ((key, _, round),) = peer.membership.offered
    assert (key, round) == (KEYS.recovery_record("a"), 3)
    assert len(peer.follow(LOST, holding(4, "d4"))) == 2, "it says something new"
    peer.follow(LOST, holding(4, "d4"), is_listed=False)
    assert len(peer.follow(LOST, holding(4, "d4"))) == 3, "the former went with the lease"


def test_what_was_read_of_the_run_before_its_data_was_lost_is_told(monkeypatch, tmp_path) -> None:
    peer = Reporting(monkeypatch, tmp_path / "known.json")
    remembered = example.recovery_record(epoch=7, commit=commit(7), shares=snapshot(7).shares)
    lost = replace(LOST, remembered=remembered)
    (record,) = peer.follow(lost, None)
    assert record == example.recovery_record(epoch=9, commit=commit(7), shares=snapshot(7).shares)
    nothing = example.recovery_record(epoch=7)
    assert peer.knowledge.recovery_record(replace(LOST, remembered=nothing), None) is None


def test_peers_that_have_another_token_by_now_are_told_of(monkeypatch, tmp_path, caplog) -> None:
    peer = Reporting(monkeypatch, tmp_path / "known.json")
    peer.follow(LOST, holding(3, "d3"))
    assert not caplog.text
    peer.takes_token = False
    peer.follow(LOST, holding(4, "d4"))
    assert "have another token than this one" in caplog.text
    certified = Reporting(monkeypatch, tmp_path / "other.json", token="")
    certified.follow(LOST, holding(3, "d3"))
    assert certified.restored == []


@pytest.mark.parametrize(("round", "is_other"), [(0, False), (1, True)])
def test_round_0_has_another_digest_in_each_run_and_says_nothing(
    tmp_path, round: int, is_other: bool
) -> None:
    knowledge = known(tmp_path / "run" / "known.json")
    theirs = RunSnapshot(commits={round: commit(round, digest="theirs")})
    told = knowledge.contradiction(theirs, holding(round, "mine"))
    assert (told is not None) is is_other
    if told is not None:
        assert f"its round {round} is not" in told and told.endswith(f"stays in {tmp_path / 'run'}")
    assert knowledge.contradiction(snapshot(1), holding(1, "d1")) is None


def test_a_commit_is_noted_with_the_highest_epoch_that_was_read(tmp_path) -> None:
    path = tmp_path / "known.json"
    knowledge = known(path)
    knowledge.note(snapshot(3, own_highest=8, highest=99, epoch=5))
    knowledge._write_all()
    assert known(path).remembered == example.recovery_record(
        epoch=8, commit=commit(3), shares=snapshot(3).shares
    )
