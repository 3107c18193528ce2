"""Turns of a rank's activities: how long they took, and which of them may compile."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.events.test_heartbeat import beating

from bloomery.events.heartbeat import Heartbeat, RankActivity, read_beat


def test_the_first_turn_of_an_activity_is_not_measured(tmp_path: Path) -> None:
    """It holds compilation and the first allocations."""
    heartbeat = beating(tmp_path / "0-0")
    heartbeat.enter(RankActivity.COMPUTING)
    heartbeat.enter(RankActivity.REDUCING)
    assert heartbeat.record().longest_s == {}
    heartbeat.enter(RankActivity.COMPUTING)
    heartbeat.enter(RankActivity.REDUCING)
    assert set(heartbeat.record().longest_s) == {RankActivity.COMPUTING}


def test_two_turns_of_an_activity_are_early_ones_and_again_after_shapes_have_changed(tmp_path: Path) -> None:
    heartbeat = beating(tmp_path / "0-0")
    seen, seen_of_others = [], []
    for turn in range(8):
        if turn == 4:
            heartbeat.expect_compilation()
        heartbeat.enter(RankActivity.COMPUTING)
        heartbeat.write()
        beat = read_beat(heartbeat.path)
        assert beat is not None
        seen.append(beat.may_compile)
        heartbeat.enter(RankActivity.REDUCING)
        seen_of_others.append(heartbeat.record().may_compile)
    assert seen == [True, True, False, False, True, True, False, False]
    assert seen_of_others == [True, True, False, False, True, False, False, False]
    assert set(beat.first_s) == {RankActivity.COMPUTING, RankActivity.REDUCING}


def test_a_process_that_compiles_nothing_has_early_turns_only_after_shapes_have_changed(
    tmp_path: Path,
) -> None:
    heartbeat = beating(tmp_path / "0-0")
    heartbeat.expect_no_compilation()
    seen = []
    for turn in range(5):
        if turn == 2:
            heartbeat.expect_compilation()
        heartbeat.enter(RankActivity.COMPUTING)
        seen.append(heartbeat.record().may_compile)
        heartbeat.enter(RankActivity.REDUCING)
    assert seen == [False, False, True, True, False]


def test_before_the_first_forward_pass_no_shapes_have_changed(tmp_path: Path) -> None:
    heartbeat = beating(tmp_path / "0-0")
    heartbeat.expect_no_compilation()
    heartbeat.enter(RankActivity.LOADING)
    heartbeat.enter(RankActivity.COMPUTING)
    heartbeat.expect_compilation()
    assert not heartbeat.record().may_compile
    heartbeat.enter(RankActivity.REDUCING)
    heartbeat.expect_compilation()
    assert heartbeat.record().may_compile


def test_the_longest_of_the_last_64_turns_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("bloomery.events.heartbeat.time.monotonic", lambda: now[0])
    heartbeat, longest = Heartbeat(tmp_path / "0-0"), []
    for seconds in (1.0, 9.0, *[2.0] * 63, 3.0):
        heartbeat.enter(RankActivity.UPDATING)
        now[0] += seconds
        heartbeat.enter(RankActivity.COMPUTING)
        longest.append(heartbeat.record().longest_s.get("updating the weights"))
    assert longest[:2] == [None, 9.0] and longest[-2:] == [9.0, 3.0]


def test_of_the_first_turns_since_shapes_have_changed_the_longest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("bloomery.events.heartbeat.time.monotonic", lambda: now[0])
    heartbeat, first = Heartbeat(tmp_path / "0-0"), []
    for seconds in (9.0, 4.0, 12.0):
        heartbeat.enter(RankActivity.COMPUTING)
        now[0] += seconds
        heartbeat.enter(RankActivity.BETWEEN_STEPS)
        first.append(heartbeat.record().first_s["forward and backward"])
        heartbeat.expect_compilation()
    assert first == [9.0, 9.0, 12.0] and "forward and backward" not in heartbeat.record().longest_s
