"""What a step, its record and the end of a run do, part by part and in which order."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.data.position import Position
from bloomery.events.heartbeat import RankActivity
from bloomery.guard.corruption import CORRUPTION
from bloomery.guard.trend import THROUGHPUT
from bloomery.guard.verdict import CarryOn, Rewind, Save, Stop, Watch
from bloomery.optim.clip import Clamps
from bloomery.torch_private import compiled_graphs
from bloomery.train import trainer as trainer_module
from bloomery.train.loop import apply_verdict
from bloomery.train.state import Goal, TrainingOutcome, TrainState
from bloomery.train.step import StepParts, follow_update, train_step
from bloomery.train.trainer import Trainer, _finish

STATE = TrainState(goal=Goal(steps=20), step=7, position=Position(consumed=28))
BACK = Rewind(judged_step=7, to_step=3, skip=range(0), reason="spike")
STOP = Stop(judged_step=7, reason="enough", failed=True)


class Noted:
    """Notes each call of a part, in order, and answers it with what it was given for that."""

    def __init__(self, calls: list[tuple[Any, ...]], part: str = "", **answers: Any) -> None:
        self._calls, self._part, self._answers = calls, part, answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self._calls.append((f"{self._part}{name}", *arguments, *named.values()))
            return self._answers.get(name)

        return call


def trainer_of(calls: list[tuple[Any, ...]], **parts: Any) -> Trainer:
    made = object.__new__(Trainer)
    usual = dict(
        mesh=SimpleNamespace(device=torch.device("cpu"), is_first=True),
        store=SimpleNamespace(incarnation=5),
        control=Noted(calls, "control."),
        outer=Noted(calls, "outer."),
        saver=Noted(calls, "saver."),
        settings=SimpleNamespace(
            guards=SimpleNamespace(findings=()),
            stream_end=lambda cursor, consumed: 1000 + cursor - consumed,
            recipe=SimpleNamespace(checkpoint=SimpleNamespace(at_end=True)),
        ),
        _journal=Noted(calls, "journal."),
        _observers=Noted(calls, "observers."),
        _heartbeat=Noted(calls, "heartbeat.", take_spent={"computing": 1.5}),
        _slow_ranks=Noted(calls, "slow.", compare={"slow": [], "usual_s": 1.0, "ranks": 1}),
        _data_stream=Noted(calls, "data.", epochs_ended=[{"dataset": "web", "sample": 27}]),
        _held_out=None,
        _compiled_graphs=compiled_graphs(),
    )
    for name, part in (usual | parts).items():
        setattr(made, name, part)
    return made


def named(calls: list[tuple[Any, ...]], *names: str) -> list[tuple[Any, ...]]:
    return [call for call in calls if call[0] in names]


def report(**fields: Any) -> Any:
    usual = dict(
        step=7,
        cursor=30,
        consumed_samples=28,
        facts="facts",
        values=lambda: {"step": 7, "loss": 2.0},
    )
    return SimpleNamespace(**usual | fields)


def test_a_step_is_journalled_with_what_its_seconds_went_to_before_anything_else_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []
    trainer = trainer_of(calls)
    monkeypatch.setattr(trainer_module, "memory_in_use", lambda device: (5, device.type))
    trainer.record(report(), CarryOn(judged_step=7))
    assert named(calls, "journal.write") == [
        ("journal.write", "step", 5, 7, 2.0, {"computing": 1.5}),
        ("journal.write", "epoch_end", 5, 7, "web", 27),
    ]
    names = [call[0] for call in calls]
    assert (
        names.index("journal.write") < names.index("saver.complete_receipt") < names.index("observers.tell")
    )
    assert trainer.saver.last_report.step == 7
    assert named(calls, "slow.count") == [("slow.count", {"computing": 1.5})]
    assert named(calls, "data.epochs_ended") == [("data.epochs_ended", 30, 1002)]
    assert named(calls, "control.settle") == [("control.settle", "facts", False)]
    assert named(calls, "heartbeat.at") == [("heartbeat.at", 7, (5, "cpu"))]
    assert named(calls, "saver.journal_ended_saves")


def test_graphs_that_a_step_compiled_are_journalled_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    trainer = trainer_of(calls, _compiled_graphs=0)
    for graphs in (3, 3, 4):
        monkeypatch.setattr(trainer_module, "compiled_graphs", lambda graphs=graphs: graphs)
        trainer.record(report(seconds=41.5), CarryOn(judged_step=7))
    compiled = [call for call in named(calls, "journal.write") if call[1] == "compiled"]
    assert compiled == [("journal.write", "compiled", 5, 7, made, 41.5) for made in (3, 1)]


def test_a_save_that_ends_with_a_step_is_journalled_with_its_report() -> None:
    calls: list[tuple[Any, ...]] = []
    seen: list[tuple[str, int]] = []
    saver = Noted(calls, "saver.")
    saver.journal_ended_saves = lambda: seen.append(("saves", saver.last_report.step))
    saver.complete_receipt = lambda told: seen.append(("receipt", saver.last_report.step))
    trainer_of(calls, saver=saver).record(report(), CarryOn(judged_step=7))
    assert seen == [("receipt", 7), ("saves", 7)]


def test_an_epoch_that_ends_beyond_the_run_in_its_last_batch_is_told_too() -> None:
    calls: list[tuple[Any, ...]] = []
    trainer_of(calls).record(report(cursor=1010, consumed_samples=1008), CarryOn(judged_step=7))
    assert named(calls, "data.epochs_ended") == [("data.epochs_ended", 1010, 1010)]


@pytest.mark.parametrize(
    ("finding", "is_suspect"),
    [(BACK, True), (STOP, True), (Watch(judged_step=7, kind="x", reason=""), False)],
)
def test_checkpoints_are_suspect_where_corruption_has_the_run_go_back_or_stop(finding, is_suspect) -> None:
    calls: list[tuple[Any, ...]] = []
    trainer = trainer_of(calls)
    trainer.settings.guards.findings = ((CORRUPTION, finding), ("spike", BACK))
    trainer.record(report(), finding)
    assert bool(named(calls, "saver.suspect")) is is_suspect and len(named(calls, "saver.suspect")) <= 1
    told = [call[1] for call in named(calls, "journal.write")]
    assert told.count("guard") == 2 and not named(calls, "slow.compare")
    assert named(calls, "control.settle")[0][2] is isinstance(finding, Stop)


def test_slow_ranks_are_compared_when_steps_became_slower() -> None:
    calls: list[tuple[Any, ...]] = []
    trainer = trainer_of(calls)
    trainer.settings.guards.findings = ((THROUGHPUT, Watch(judged_step=7, kind="x", reason="slower")),)
    trainer.record(report(), CarryOn(judged_step=7))
    assert ("journal.write", "slow_ranks", 5, 7, [], 1.0, 1) in calls


@pytest.mark.parametrize(
    ("stopped", "at_end", "is_saved"),
    [
        (None, True, True),
        (None, False, False),
        (TrainingOutcome(reason="asked", step=7, finished=False), True, True),
        (TrainingOutcome(reason="error", step=7, finished=False, failed=True), True, False),
    ],
)
def test_the_last_checkpoint_is_of_a_run_that_did_not_fail(stopped, at_end, is_saved) -> None:
    calls: list[tuple[Any, ...]] = []
    trainer = trainer_of(calls)
    trainer.settings.recipe.checkpoint.at_end = at_end
    state = replace(STATE, stopped=stopped)
    outcome = trainer.conclude(state)
    assert named(calls, "saver.finish") == [("saver.finish", state, is_saved)]
    expected = stopped or TrainingOutcome(reason="the samples are done", step=7, finished=True)
    assert outcome == expected
    entered = ("heartbeat.enter", RankActivity.ENDING)
    assert calls.index(entered) < calls.index(("saver.finish", state, is_saved))
    (end,) = named(calls, "journal.write")
    assert end[1:] == ("end", 5, 7, expected.reason, expected.finished, expected.failed, {"computing": 1.5})


@pytest.mark.parametrize(
    ("is_owed", "has_report", "stopped", "is_evaluated"),
    [
        (True, True, False, True),
        (False, True, False, False),
        (True, False, False, False),
        (True, True, True, False),
    ],
)
def test_a_run_that_is_done_makes_the_evaluation_that_it_owes(
    is_owed, has_report, stopped, is_evaluated
) -> None:
    calls: list[tuple[Any, ...]] = []
    held_out = Noted(calls, "held out.", is_owed=is_owed, run={"held_out_loss": 2.5})
    trainer = trainer_of(calls, _held_out=held_out)
    trainer.saver.last_report = report() if has_report else None
    state = STATE.halting("asked", failed=False) if stopped else STATE
    trainer.conclude(state)
    assert bool(named(calls, "held out.run")) is is_evaluated
    assert (("journal.write", "evaluation", 5, 7, 2.5) in calls) is is_evaluated
    assert (("heartbeat.enter", RankActivity.EVALUATING) in calls) is is_evaluated


def test_a_verdict_is_carried_out_as_it_says() -> None:
    calls: list[tuple[Any, ...]] = []
    trainer = SimpleNamespace(saver=Noted(calls, "saver.", rewind="the state of before"))
    for nothing in (CarryOn(judged_step=7), Watch(judged_step=7, kind="x", reason="")):
        assert apply_verdict(trainer, STATE, nothing) is STATE and not calls  # type: ignore[arg-type]
    assert apply_verdict(trainer, STATE, Save(judged_step=7, reason="due")) is STATE  # type: ignore[arg-type]
    assert calls.pop() == ("saver.save", STATE)
    assert apply_verdict(trainer, STATE, BACK) == "the state of before"  # type: ignore[arg-type]
    assert calls.pop() == ("saver.rewind", STATE, BACK)
    for failed in (True, False):
        halted = apply_verdict(trainer, STATE, replace(STOP, failed=failed))  # type: ignore[arg-type]
        assert halted.stopped == TrainingOutcome(reason="enough", step=7, finished=False, failed=failed)


def parts_of(calls: list[tuple[Any, ...]], *, every: int = 0, scale: float | None = None) -> StepParts:
    facts = SimpleNamespace(finite="finite")
    weights = Noted(calls, "weights.", examine="examined")
    model = Noted(calls, "model.")
    model.weights = weights
    model.inner_sizes = Noted(calls, "sizes.", collect="measured")
    check = Noted(calls, "check.", accumulate=("loss", "z"), admit=facts)
    loss_scale = None
    if scale is not None:
        loss_scale = Noted(calls, "scale.")
        loss_scale.scale = torch.tensor(scale)
    return StepParts(
        phase=SimpleNamespace(global_batch=4),  # type: ignore[arg-type]
        model=model,  # type: ignore[arg-type]
        optimizers=Noted(calls, "optimizers.", limit="limited"),  # type: ignore[arg-type]
        loss_scale=loss_scale,  # type: ignore[arg-type]
        clip=lambda state: 1.5,
        sequence_length=8,
        learning_rate=lambda state: 0.25,
        wait_staged=lambda: calls.append(("staged",)),
        average_gradients=lambda state: calls.append(("averaged",)),
        enter=lambda activity: calls.append((activity,)),
        clamps=lambda state: Clamps(qk_clip=30.0, z_score=2.5),
        sizes_every=lambda: every,
        check=check,  # type: ignore[arg-type]
    )


def test_a_step_sums_screens_averages_and_only_then_updates() -> None:
    calls: list[tuple[Any, ...]] = []
    batch = [SimpleNamespace(global_targets=0)]
    result = train_step(parts_of(calls), batch, STATE)  # type: ignore[arg-type]
    assert [call[0] for call in calls] == [
        RankActivity.COMPUTING,
        "model.clip_queries",
        "model.begin_sizes",
        "check.accumulate",
        RankActivity.REDUCING,
        "weights.reduce",
        "check.screen",
        "averaged",
        RankActivity.UPDATING,
        "weights.examine",
        "staged",
        "optimizers.limit",
        "check.admit",
        "optimizers.step",
        "model.after_update",
        "weights.copy_masters_to_working",
    ]
    assert ("model.clip_queries", 30.0) in calls and ("weights.examine", 1.5, 1.0) in calls
    assert ("optimizers.limit", "examined", 1.0, Clamps(qk_clip=30.0, z_score=2.5)) in calls and (
        "check.admit",
        "limited",
    ) in calls
    assert named(calls, "optimizers.step")[0][2] == 0.25
    assert named(calls, "check.accumulate") == [("check.accumulate", batch, 7, 1.0 / 32)]
    assert (result.tokens, result.counted, result.learning_rate) == (32, 32, 0.25)
    assert (result.cross_entropy, result.z_loss, result.loss_scale, result.inner_sizes) == (
        "loss",
        "z",
        None,
        None,
    )


def test_a_loss_counts_the_tokens_that_have_targets_and_is_scaled_for_fp16() -> None:
    calls: list[tuple[Any, ...]] = []
    batch = [SimpleNamespace(global_targets=20)]
    parts = parts_of(calls, scale=1024.0)

    def update(finite: str) -> None:
        calls.append(("scale.update", finite))
        parts.loss_scale.scale.mul_(0.5)  # type: ignore[union-attr]

    parts.loss_scale.update = update  # type: ignore[union-attr,method-assign,assignment]
    result = train_step(parts, batch, STATE)  # type: ignore[arg-type]
    assert float(named(calls, "check.accumulate")[0][3]) == pytest.approx(1024.0 / 20)
    assert (result.tokens, result.counted, float(result.loss_scale)) == (32, 20, 1024.0)  # type: ignore[arg-type]
    ((examined,), (limited,)) = named(calls, "weights.examine"), named(calls, "optimizers.limit")
    assert examined[2] is limited[2] is parts.loss_scale.scale  # type: ignore[union-attr]
    assert named(calls, "scale.update") == [("scale.update", "finite")]


@pytest.mark.parametrize(("every", "measures"), [(0, False), (8, True), (4, True), (7, False)])
def test_inner_sizes_are_measured_in_each_step_whose_number_is_a_multiple(every: int, measures: bool) -> None:
    calls: list[tuple[Any, ...]] = []
    result = train_step(parts_of(calls, every=every), [SimpleNamespace(global_targets=0)], STATE)  # type: ignore[list-item]
    assert named(calls, "model.begin_sizes") == [("model.begin_sizes", measures, every > 0)]
    assert result.inner_sizes == ("measured" if measures else None)
    parts = parts_of(calls, every=every)
    parts.model.inner_sizes = None
    assert train_step(parts, [SimpleNamespace(global_targets=0)], STATE).inner_sizes is None  # type: ignore[list-item]


def test_a_run_without_checks_computes_each_step_once_and_updates_with_what_was_limited() -> None:
    calls: list[tuple[Any, ...]] = []
    parts = replace(parts_of(calls), check=None)
    parts.model.accumulate = lambda *told, **more: calls.append(("model.accumulate", *told)) or ("loss", "z")  # type: ignore[method-assign,assignment]
    batch = [SimpleNamespace(global_targets=0)]
    result = train_step(parts, batch, STATE)  # type: ignore[arg-type]
    assert ("model.accumulate", batch, 7) in calls and result.gradients == "limited"
    assert named(calls, "optimizers.step")[0][1] == "limited" and not any(
        "check" in call[0] for call in calls
    )


def test_the_update_of_others_is_followed_without_a_batch_and_counts_as_a_step() -> None:
    calls: list[tuple[Any, ...]] = []
    after = follow_update(parts_of(calls), STATE)
    assert after == replace(STATE, step=8)
    assert named(calls, "optimizers.step") and not named(calls, "check.accumulate", "weights.reduce")


class Copying:
    """A backup that is at its work until it is told to be over."""

    def __init__(self, *left: str) -> None:
        self.left, self.closes = list(left), list[float | None]()

    def close(self, *, wait_s: float | None = None) -> None:
        self.closes.append(wait_s)
        while wait_s is None and self.left:
            pass

    def due(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.left]


def test_the_end_of_a_backup_is_waited_for_and_told_until_it_is_there(monkeypatch) -> None:
    monkeypatch.setattr(trainer_module, "_POLL_S", 0.001)
    backup, said, ticks = Copying("step-7", "step-9"), list[str](), list[int]()

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 4:
            backup.left.clear()

    _finish(backup, tick, interruptions=lambda: 2, say=said.append)  # type: ignore[arg-type]
    assert backup.closes == [None] and len(said) == 1
    assert said[0].startswith("backing up step-7 and 1 more before the end")


def test_one_more_interruption_leaves_the_backup_to_the_next_start(monkeypatch) -> None:
    monkeypatch.setattr(trainer_module, "_POLL_S", 0.001)
    backup, asked = Copying("step-7"), [2, 2, 3]

    def interruptions() -> int:
        return asked.pop(0) if len(asked) > 1 else asked[0]

    _finish(backup, lambda: None, interruptions=interruptions, say=lambda line: None)  # type: ignore[arg-type]
    assert backup.closes == [None, 0.0]
    backup.left.clear()
