"""When a run saves, what it does about a save that failed, and what it goes back to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from bloomery.checkpoint.format.state import SaveResult
from bloomery.data.position import Position
from bloomery.errors import DataError, RunBusy, StorageError
from bloomery.events.history import EvenSteps
from bloomery.guard.restraint import Restraint
from bloomery.guard.verdict import Rewind, Rung
from bloomery.train import data_stream
from bloomery.train.data_stream import DataForecast, DataStream
from bloomery.train.saver import RETRY_S, RunSaver
from bloomery.train.state import Goal, TrainState

REFUSED = StorageError("the disk is full", remedy="")
STATE = TrainState(goal=Goal(samples=1000), step=9, position=Position(consumed=36, skips=(range(50, 52),)))
PROMISE = SimpleNamespace(to_json=lambda: {"count": 4})


class Recorded:
    """A saver of a run whose parts note what is asked of them, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.results: list[SaveResult] = []
        self.degraded: list[str] = []
        self.reachable: set[int] = set()
        self.begins: Any = True
        self.refuses_save: StorageError | None = None
        self.newest, self.oldest = -1, ""
        self.attention: dict[str, Any] = {}
        self.restored = replace(STATE, step=4, position=Position(consumed=16))
        self.new_restraint: Restraint | None = None
        self.mesh = SimpleNamespace(is_first=True)
        self.saver = object.__new__(RunSaver)
        parts = dict(
            _learner=SimpleNamespace(
                model=SimpleNamespace(weights="weights"),
                optimizers="optimizers",
                loss_scale="loss scale",
                initialise=lambda seed: self.note("initialise", seed),
                attention=SimpleNamespace(
                    begin=lambda saved: self.note("attention", saved), to_json=lambda: self.attention
                ),
            ),
            _outer=SimpleNamespace(load_state_values=lambda values: self.note("outer", values)),
            _settings=SimpleNamespace(
                guards=SimpleNamespace(
                    state_values=lambda: {"history": len(self.calls)},
                    load_state_values=lambda values: self.note("guards", values),
                    rewound=lambda values, rung: self.note("rewound", values, rung),
                    resumed=lambda: self.note("resumed"),
                    step_before_climb=lambda: 2,
                ),
                recipe=SimpleNamespace(
                    data=SimpleNamespace(sequence_length=8),
                    run=SimpleNamespace(seed=77),
                    elastic=SimpleNamespace(inner_steps=0),
                ),
                stream_end=lambda cursor, consumed: 1000 + cursor - consumed,
                run_length_steps=250,
                goal=Goal(samples=1000),
                restraint=lambda rung, state, before: self.new_restraint,
                spread_budgets=lambda state: self.note("budgets", state.position),
            ),
            _data_stream=SimpleNamespace(
                to_json=lambda: {"text": "x"}, about=lambda cursor, **of: {"cursor": cursor, **of}
            ),
            _store=SimpleNamespace(
                incarnation=3,
                begin_save=self.begin_save,
                save=self.save,
                wait_for_saves=lambda: self.newest,
                take_save_results=self.take_results,
                take_background_failures=self.take_degraded,
                reaches_back_to=lambda step: self.note("reaches", step) or step in self.reachable,
                oldest_name=lambda: self.oldest,
                restore=lambda parts, **told: self.note("restore", told),
            ),
            _control=SimpleNamespace(
                restart_save_clock=lambda: self.note("clock"), save_in=lambda s: self.note("save in", s)
            ),
            _journal=SimpleNamespace(write=self.write),
            _mesh=self.mesh,
            _on_begin=lambda state, reason, incarnation: self.note("begin", state, reason, incarnation),
            _take_fallback=True,
            _enter=lambda activity: None,
            _receipts=SimpleNamespace(
                promise=lambda state: PROMISE, expect_another_loss=lambda: self.note("another loss")
            ),
            _promises={},
            last_report=None,
        )
        for name, part in parts.items():
            setattr(self.saver, name, part)

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    def write(self, event: str, *, incarnation: int, step: int, **fields: Any) -> None:
        assert incarnation == 3
        self.events.append((event, step, fields))

    def begin_save(self, state: Any) -> bool:
        self.note("begin save", state)
        if isinstance(self.begins, Exception):
            raise self.begins
        return self.begins

    def save(self, state: Any) -> None:
        self.note("save", state)
        if self.refuses_save is not None:
            raise self.refuses_save

    def take_results(self) -> list[SaveResult]:
        results, self.results = self.results, []
        return results

    def take_degraded(self) -> list[str]:
        degraded, self.degraded = self.degraded, []
        return degraded

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]


@pytest.fixture
def run() -> Recorded:
    return Recorded()


def result(name: str, *, step: int = 9, failure: Exception | None = None) -> Any:
    return SimpleNamespace(name=name, step=step, failure=failure)


def test_a_save_that_has_begun_restarts_the_clock_and_one_that_has_to_wait_is_tried_soon(run) -> None:
    run.saver.save(STATE)
    assert run.named("clock", "save in") == [("clock",)]
    run.begins = False
    run.saver.save(STATE)
    assert run.named("clock", "save in") == [("clock",), ("save in", 1.0)]
    run.begins = REFUSED
    run.saver.save(STATE)
    assert run.named("save in")[-1] == ("save in", 60.0) and len(run.named("clock")) == 1
    assert run.events == [("checkpoint_failed", 9, {"why": "the disk is full"})]


def test_what_is_saved_is_the_whole_state_with_its_promise_and_what_lists_show_of_it(run) -> None:
    run.saver.last_report = SimpleNamespace(step=9, loss=2.5, held_out_loss=2.75)
    run.saver.save(STATE)
    ((_, saved),) = run.named("begin save")
    assert (saved.step, saved.run_length_steps) == (9, 250)
    assert saved.values == {"train": STATE.to_json(), "data": {"text": "x"}}
    assert set(saved.parts) == {"model", "optim", "loss_scale", "guards", "outer"}
    assert saved.parts["optim"] == "optimizers" and saved.parts["loss_scale"] == "loss scale"
    assert saved.about == {
        "consumed_samples": 36,
        "consumed_tokens": 288,
        "loss": 2.5,
        "held_out_loss": 2.75,
        "before_climb": 2,
        "cursor": 36,
        "skips": STATE.position.skips,
        "below": 1000,
        "promise": {"count": 4},
    }
    run.saver.last_report.step = 8  # it was measured before
    run.saver.save(STATE)
    assert run.named("begin save")[1][1].about["held_out_loss"] is None


def test_a_checkpoint_is_journalled_once_with_its_promise_by_the_first_rank(run) -> None:
    run.saver.save(STATE)
    (name,) = run.saver._promises
    run.results = [result(name)]
    run.saver.journal_ended_saves()
    run.saver.journal_ended_saves()
    assert run.events == [("checkpoint", 9, {"path": name, "promise": {"count": 4}})]
    assert run.saver._promises == {}
    run.mesh.is_first = False
    run.results = [result(name)]
    run.saver.journal_ended_saves()
    assert len(run.events) == 1


def test_a_save_that_failed_beside_the_training_is_told_and_tried_again_unless_the_run_is_anothers(
    run,
) -> None:
    run.results, run.degraded = [result("x", step=7, failure=REFUSED)], ["no memory"]
    run.saver.last_report = SimpleNamespace(step=11)
    run.saver.journal_ended_saves()
    assert run.events == [
        ("checkpoint_failed", 7, {"why": "the disk is full"}),
        ("checkpoint_degraded", 11, {"why": "no memory"}),
    ]
    assert run.named("save in") == [("save in", RETRY_S)]
    run.results = [result("x", failure=RunBusy("another process holds the run", remedy=""))]
    with pytest.raises(RunBusy):
        run.saver.journal_ended_saves()


@pytest.mark.parametrize(
    ("newest", "saves", "is_saved"), [(9, True, False), (8, True, True), (8, False, False)]
)
def test_a_run_that_ends_saves_unless_that_step_is_saved_already(run, newest, saves, is_saved) -> None:
    run.newest = newest
    run.saver.finish(STATE, save=saves)
    assert bool(run.named("save")) is is_saved and bool(run.named("clock")) is is_saved


def test_the_last_save_of_a_run_may_fail_aloud(run) -> None:
    run.refuses_save = REFUSED
    with pytest.raises(StorageError):
        run.saver.finish(STATE, save=True)
    assert not run.named("clock")


WANTED = Rewind(judged_step=9, to_step=5, skip=range(30, 36), rung=Rung.SLOW, reason="spike")


def going_back(run: Recorded, wanted: Rewind) -> TrainState:
    run.saver._restore = lambda *, reason, up_to_step, takes_older: (  # type: ignore[method-assign]
        run.note("restored", reason, up_to_step) or run.restored
    )
    return run.saver.rewind(STATE, wanted)


def test_a_rewind_restores_a_checkpoint_early_enough_skips_samples_for_ever_and_saves_at_once(run) -> None:
    run.reachable = {5}
    after = going_back(run, WANTED)
    assert run.named("restored") == [("restored", "rewind: spike", 5)]
    assert (after.step, after.position.consumed) == (4, 16)
    assert after.position.skips == (range(30, 36), range(50, 52))
    ((_, histories, rung),) = run.named("rewound")
    assert rung is Rung.SLOW
    assert histories["history"] < run.calls.index(("restored", "rewind: spike", 5)) + 1  # of before
    assert run.events == [("rewind", 9, {"to_step": 5, "skip": [30, 36], "rung": "slow", "reason": "spike"})]
    assert run.named("another loss") and run.named("budgets") == [("budgets", after.position)]
    ((_, saved),) = run.named("save")
    assert saved.step == 4 and saved.values["train"] == after.to_json()
    order = ["restored", "rewound", "another loss", "budgets", "save", "clock"]
    assert [call[0] for call in run.calls if call[0] in order] == order


def test_the_loss_is_another_after_a_rewind_only_if_something_changed(run) -> None:
    run.reachable = {5}
    going_back(run, replace(WANTED, skip=range(30, 30)))
    assert not run.named("another loss")


def test_a_rewind_whose_save_fails_goes_on_and_the_save_is_tried_again(run) -> None:
    run.reachable, run.refuses_save = {5}, REFUSED
    assert going_back(run, WANTED).step == 4
    assert run.events[-1] == ("checkpoint_failed", 4, {"why": "the disk is full"})


def test_a_rewind_asks_for_the_restraint_of_its_rung_from_where_it_goes_on(run) -> None:
    run.reachable, asked = {5}, list[Any]()
    run.saver._settings.restraint = lambda rung, state, *, before: asked.append(
        (rung, state.step, before.step)
    )
    going_back(run, WANTED)
    assert asked == [(Rung.SLOW, 4, 9)]


def test_saves_that_ended_before_a_rewind_are_journalled_before_it(run) -> None:
    run.reachable, run.results = {5}, [result("x", step=8)]
    going_back(run, WANTED)
    assert [(event, step) for event, step, _ in run.events] == [("checkpoint", 8), ("rewind", 9)]


def test_where_a_rewind_names_no_later_step_none_is_looked_for(run) -> None:
    assert going_back(run, WANTED).stopped is not None
    assert run.named("reaches") == [("reaches", 5)]


def test_a_save_that_is_over_at_once_is_journalled_at_once(run) -> None:
    run.results = [result("x", step=9)]
    run.saver.save(STATE)
    assert [(event, step) for event, step, _ in run.events] == [("checkpoint", 9)]


def test_why_there_is_no_checkpoint_is_told_with_its_step(run, caplog: pytest.LogCaptureFixture) -> None:
    run.begins = False
    run.saver.save(STATE)
    assert "no checkpoint at step 9: two are still being written" in caplog.text
    run.begins = REFUSED
    run.saver.save(STATE)
    assert "no checkpoint at step 9, training goes on: the disk is full" in caplog.text


def test_a_run_that_cannot_save_beside_the_training_says_so_before_its_first_step_too(run) -> None:
    run.degraded = ["no memory"]
    run.saver.journal_ended_saves()
    assert run.events == [("checkpoint_degraded", 0, {"why": "no memory"})]


def test_restraints_of_before_a_rewind_hold_on_beside_its_own(run) -> None:
    run.reachable = {5}
    old = Restraint(start=0, stop=100, rate=0.5, clip=1.0)
    run.new_restraint = Restraint(start=16, stop=200, rate=0.25, clip=0.5)
    run.restored = replace(run.restored, restraints=(old,))
    run.saver._restore = lambda *, reason, up_to_step, takes_older: run.restored  # type: ignore[method-assign]
    later = Restraint(start=20, stop=80, rate=0.75, clip=1.0)
    after = run.saver.rewind(replace(STATE, restraints=(later, old)), replace(WANTED, skip=range(0)))
    assert after.restraints == (old, later, run.new_restraint)
    assert run.events[-1][0] == "restraint" and run.named("another loss")


def test_a_later_checkpoint_is_taken_where_none_is_as_early_as_it_wants_and_else_the_run_stops(run) -> None:
    run.reachable = {7}
    going_back(run, replace(WANTED, latest_step=7))
    assert [step for _, step in run.named("reaches")] == [5, 7]
    assert run.named("restored")[-1][2] == 7
    stopped = going_back(run, replace(WANTED, latest_step=6))
    assert stopped.stopped is not None and stopped.stopped.failed and stopped.step == 9
    event, step, fields = run.events[-1]
    assert (event, step, fields["to_step"]) == ("rewind_impossible", 9, 5)
    assert "step 6" in fields["reason"] and len(run.named("restored")) == 1
    run.oldest = "step-000008.i003"
    within = going_back(run, replace(WANTED, latest_step=6)).stopped
    assert within is not None and within.reason == (
        "spike; but no checkpoint at or before step 6 is there to go back to, here or in a backup: the "
        "oldest here is step-000008.i003, which was saved after the problem began"
    )
    by_hand = going_back(run, WANTED).stopped
    assert by_hand is not None and by_hand.reason.endswith("the oldest here is step-000008.i003")
    run.oldest = ""
    only_there = going_back(run, WANTED)
    assert only_there.stopped is not None and "at or before step 5 is" in only_there.stopped.reason
    run.calls.clear()
    going_back(run, replace(WANTED, may_start_anew=True))
    assert run.named("restored")[-1][2] == 5


def test_a_run_goes_on_where_a_person_asked_to_go_back_further_than_any_checkpoint(
    run, caplog: pytest.LogCaptureFixture
) -> None:
    before = replace(STATE, step=9)
    assert run.saver.rewind(before, replace(WANTED, may_go_on=True)) == before
    assert [event for event, *_ in run.events] == ["rewind_impossible"] and not run.named("restored")
    assert "at or before step 5 is there to go back to: the run goes on" in caplog.text


def test_a_run_without_a_checkpoint_begins_with_nothing_remembered(run) -> None:
    state = run.saver.restore()
    assert (state.step, state.position, state.goal) == (0, Position(), Goal(samples=1000))
    ((_, told),) = run.named("restore")
    assert told == {"reason": "start", "up_to_step": None, "fallback": True}
    assert run.named("initialise", "guards", "outer") == [("initialise", 77), ("guards", {}), ("outer", {})]
    assert run.named("begin") == [("begin", state, "start", 3)] and run.calls[-1] == ("resumed",)


def stream_of(ends: list[tuple[int, int]]) -> DataStream:
    made = DataStream(
        stream=SimpleNamespace(order="order"),  # type: ignore[arg-type]
        batches=None,  # type: ignore[arg-type]
        names=("web", "code"),
        fingerprint="f",
        is_tokenised_here=True,
    )
    made._epoch_ends = lambda below: tuple(ends)  # type: ignore[method-assign]
    return made


def test_lists_of_checkpoints_show_the_next_end_of_an_epoch_and_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_stream, "first_repeat", lambda order, below, skips: 44)
    data = stream_of([(0, 40), (1, 90)])
    of_all = {"first_epoch_end": 40, "first_repeat": 44}
    assert data.about(39, below=100) == {"cursor": 39, "epoch_end_ahead": 40, **of_all}
    assert data.about(40, below=100)["epoch_end_ahead"] == 90
    assert data.about(90, below=100) == {"cursor": 90, "epoch_end_ahead": None, **of_all}
    assert stream_of([]).about(5, below=100)["first_epoch_end"] is None


def test_an_end_of_an_epoch_is_told_once() -> None:
    data = stream_of([(0, 40), (1, 90)])
    assert data.epochs_ended(39, below=100) == []
    assert data.epochs_ended(95, below=100) == [
        {"dataset": "web", "sample": 40},
        {"dataset": "code", "sample": 90},
    ]
    assert data.epochs_ended(99, below=100) == []


def test_a_run_that_tokenised_its_text_does_not_go_on_with_other_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="other text"):
        stream_of([]).follow({"fingerprint": "g", "mixtures": []}, "step-000001", at=1, left=2)


def test_the_step_that_passes_an_index_is_the_one_that_was_made_or_will_be() -> None:
    train = SimpleNamespace()
    forecast = DataForecast(
        stream=None,  # type: ignore[arg-type]
        samples=100,
        step=3,
        position=Position(consumed=14),
        past=(EvenSteps(first=1, cursor=4, each=4, count=2), EvenSteps(first=3, cursor=14)),
        recipe=SimpleNamespace(train=train),  # type: ignore[arg-type]
    )
    assert [forecast.step_of(index) for index in (1, 4, 5, 8, 9, 14)] == [1, 1, 2, 2, 3, 3]


def test_samples_that_were_left_out_before_a_resume_take_no_place_ahead() -> None:
    def of_two_samples(train: object, until: int, *, start: int) -> list[tuple[int, None]]:
        return [((until - start) // 2, None)]

    with patch.object(data_stream, "stretches", of_two_samples):
        forecast = DataForecast(
            stream=None,  # type: ignore[arg-type]
            samples=100,
            step=5,
            position=Position(consumed=10, skips=(range(4, 8), range(16, 20))),
            past=(EvenSteps(first=5, cursor=14),),
            recipe=SimpleNamespace(train=None),  # type: ignore[arg-type]
        )
        assert forecast.position.cursor == 14
        assert [forecast.step_of(index) for index in (16, 20, 22, 24)] == [6, 6, 7, 8]


@pytest.mark.parametrize(("inner_steps", "takes_older"), [(0, True), (20, False)])
def test_peers_go_back_to_one_round_and_take_no_older_checkpoint(run, inner_steps, takes_older) -> None:
    run.reachable, told = {5}, list[bool]()
    run.saver._settings.recipe.elastic.inner_steps = inner_steps
    run.saver._restore = lambda *, reason, up_to_step, takes_older: told.append(takes_older) or run.restored
    run.saver.rewind(STATE, WANTED)
    assert told == [takes_older]
