"""Averages kept for who missed a round, copies of states for newcomers, and what a checkpoint keeps."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.diloco.elastic_peers import until
from tests.diloco.recorder import Recorder

from bloomery.data.position import Position
from bloomery.diloco.kept_states import MissedRounds, StateCopies, restored_rounds, stored_rounds
from bloomery.diloco.outer_loop_state import (
    CheckpointLoaded,
    HeldState,
    Idle,
    MissedRoundMade,
    Progress,
    Resumed,
    RoundState,
    TrainingRound,
)
from bloomery.diloco.peer_vector import FragmentHistory
from bloomery.diloco.stored_average import StoredAverage
from bloomery.protocol.rank_messages import CatchUp, CopyState, KeepAverage, StartRound

AVERAGE = StoredAverage.of(np.arange(5, dtype=np.float32))
POSITION = Position(consumed=8, skips=(range(2, 3),), holes=(range(8, 16),))
HELD = HeldState(round=3, digest="ab", position=POSITION)


def missed_of(
    update: object, *, fits: bool = True, others: tuple[str, ...] = (), digest: str = "ef"
) -> MissedRounds:
    """Of a peer whose other ranks bring `others` to a gathering, and whose whole state has this digest."""
    attempts = SimpleNamespace(fits=lambda command: fits and command.digest == "cd")
    return MissedRounds(
        update,  # type: ignore[arg-type]
        attempts,  # type: ignore[arg-type]
        gather=lambda value: [value, *others],
        digest_of=lambda rank_digest: digest if rank_digest == "of this rank" else "wrong",
    )


@pytest.mark.parametrize(
    ("average", "fits", "is_kept"), [(AVERAGE, True, True), (AVERAGE, False, False), (None, True, False)]
)
def test_the_average_of_the_prepared_state_is_kept_where_the_agent_says(
    tmp_path: Path, average: StoredAverage | None, fits: bool, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[dict[str, Any]]()
    started = SimpleNamespace(start=lambda: threads[-1]["target"](*threads[-1]["args"]))
    thread = lambda **made: threads.append(made) or started  # noqa: E731
    monkeypatch.setattr("bloomery.diloco.kept_states.threading", SimpleNamespace(Thread=thread))
    update = SimpleNamespace(average=lambda: average)
    missed = missed_of(update, fits=fits)
    assert missed.take(KeepAverage(epoch=4, digest="cd", file=tmp_path / "kept")) is None
    assert [path.name for path in tmp_path.iterdir()] == (["kept"] if is_kept else [])
    assert [made["daemon"] for made in threads] == [True] * is_kept  # it never holds up the end of a rank
    if is_kept:
        assert StoredAverage.load(tmp_path / "kept").whole().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_where_there_is_no_average_or_no_room_for_it_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = KeepAverage(epoch=4, digest="cd", file=tmp_path / "nowhere" / "kept")
    assert missed_of(SimpleNamespace(average=lambda: None)).take(asked) is None
    with caplog.at_level(logging.WARNING):
        missed_of(SimpleNamespace(average=lambda: AVERAGE)).take(asked)
        until(lambda: "the average of a round is not kept for those who missed it: " in caplog.text)
    assert "No such file" in caplog.text


def test_a_missed_round_is_made_of_its_file_and_judged_by_the_digest_of_the_whole_state(
    tmp_path: Path,
) -> None:
    asked = CatchUp(round=9, digest="ef", position=POSITION, file=tmp_path / "fetched")
    prepared = list[tuple[int, list[float]]]()

    def prepare(round: int, average: StoredAverage) -> str:
        prepared.append((round, average.whole().tolist()))
        return "of this rank"

    update = SimpleNamespace(prepare_missed=prepare)
    absent = missed_of(update).take(asked)
    assert absent is not None and absent.asked == asked and "No such file" in absent.why
    assert prepared == []
    AVERAGE.save(asked.file)
    assert missed_of(update).take(asked) == MissedRoundMade(asked=asked, why="")
    assert prepared == [(9, [0.0, 1.0, 2.0, 3.0, 4.0])]
    wrong = missed_of(update, digest="another").take(asked)
    why = "with this average, round 9 ends with another state than the run's"
    assert wrong == MissedRoundMade(asked=asked, why=why)


def test_a_missed_round_that_one_rank_cannot_make_is_made_by_none(tmp_path: Path) -> None:
    asked = CatchUp(round=9, digest="ef", position=POSITION, file=tmp_path / "fetched")
    AVERAGE.save(asked.file)
    update = SimpleNamespace(prepare_missed=lambda round, average: "of this rank")
    made = missed_of(update, others=("", "7 elements")).take(asked)
    assert made == MissedRoundMade(asked=asked, why="7 elements")

    def refuse(round: int, average: StoredAverage) -> str:
        raise ValueError("5 elements")

    both = missed_of(SimpleNamespace(prepare_missed=refuse), others=("later",)).take(asked)
    assert both == MissedRoundMade(asked=asked, why="5 elements")


def test_a_copy_is_made_of_the_committed_weights_and_told_and_the_training_goes_on_from_its_own() -> None:
    calls: list[Any] = []
    state = SimpleNamespace(step=11)
    trainer = Recorder("trainer", calls, copy=Path("/copy"))
    copies = StateCopies(Recorder("update", calls), trainer, Recorder("agent", calls))  # type: ignore[arg-type]
    copies.take(CopyState(keep=(), makes="ab"))
    assert copies.is_due("ab") and calls == []
    copies.make(state, HELD)
    assert calls == [
        ("agent", "report_activity", "offer", {"step": 11}),
        ("trainer", "wait_staged"),
        ("update", "swap_in_committed"),
        ("trainer", "copy", state),
        ("update", "swap_back"),
        ("agent", "report_copy", {"round": 3, "digest": "ab", "directory": Path("/copy")}),
        ("agent", "report_activity", "wait", {"step": 11}),
    ]


def test_a_copy_is_due_while_it_is_asked_for_and_not_made_and_goes_when_nobody_wants_it() -> None:
    calls: list[Any] = []
    directories = iter([Path("/one"), Path("/two"), None])
    trainer = Recorder("trainer", calls, copy=lambda state: next(directories))
    agent = Recorder("agent", [])
    copies = StateCopies(Recorder("update", []), trainer, agent)  # type: ignore[arg-type]
    assert not copies.is_due("ab")
    for digest in ("ab", "cd"):
        copies.take(CopyState(keep=("ab",), makes=digest))
        assert copies.is_due(digest)
        copies.make(SimpleNamespace(step=1), replace(HELD, digest=digest))
        assert not copies.is_due(digest) and not copies.is_due("a later one")
    copies.take(CopyState(keep=("ab", "cd"), makes="ab"))
    assert not copies.is_due("ab"), "it is there"
    copies.take(CopyState(keep=("cd",), makes=""))
    assert not copies.is_due("ef")
    removed = [call for call in calls if call[1] == "remove_copy"]
    assert removed == [("trainer", "remove_copy", Path("/one"))]
    copies.take(CopyState(keep=("cd",), makes="ab"))
    assert copies.is_due("ab"), "it was removed"
    copies.make(SimpleNamespace(step=1), HELD)  # for which there is no room
    assert not copies.is_due("ab"), "until the agent asks anew"
    copies.take(CopyState(keep=("cd",), makes="ab"))
    assert copies.is_due("ab")
    copies.take(CopyState(keep=(), makes=""))
    assert [call for call in calls if call[1] == "remove_copy"][1:] == [
        ("trainer", "remove_copy", Path("/two"))
    ]


START = StartRound(round=4, position=POSITION, live=2, samples=(range(8, 16),), number=0)
PASTS = (FragmentHistory(steps=1, samples=4, parts=((2, 0.5),)), FragmentHistory())


def test_a_checkpoint_keeps_the_committed_state_and_the_steps_since_in_words_of_its_format() -> None:
    phase = TrainingRound(start=START, steps=2, spent=(range(8, 10), range(12, 14)))
    state = RoundState(averages_gradients=False, phase=phase, held=HELD, fragments=PASTS)
    stored = stored_rounds(state, has_feedback=True)
    assert stored == {
        "round": 3,
        "digest": "ab",
        "feedback": True,
        "feedback_of": "average",
        "inside": True,
        "within": [4, 2, [[8, 10], [12, 14]]],
        "position": POSITION.to_json(),
        "fragments": [[1, 4, [[2, 0.5]]], [0, 0, []]],
    }
    done = Progress(round=4, steps=2, spent=(range(8, 10), range(12, 14)))
    assert restored_rounds(stored) == CheckpointLoaded(held=HELD, rest=Resumed(done=done), fragments=PASTS)
    waiting = replace(state, phase=Idle(ahead=done), held=replace(HELD, position=None))
    between = stored_rounds(waiting, has_feedback=False)
    assert (between["inside"], between["feedback"], between["position"]) == (False, False, None)
    assert restored_rounds(between).rest == Idle(ahead=done)


def test_a_checkpoint_of_an_earlier_version_has_no_position_and_no_histories() -> None:
    stored = {"round": 3, "digest": "ab", "inside": False, "within": None}
    held = HeldState(round=3, digest="ab", position=None)
    assert restored_rounds(stored) == CheckpointLoaded(held=held, rest=Idle(), fragments=())
    for lacking in stored:
        with pytest.raises(KeyError):
            restored_rounds({key: value for key, value in stored.items() if key != lacking})
