"""The loop end to end, in one process, on real text."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from bloomery.config.load import LoadedRecipe
from bloomery.data_loader.batches import Batches
from bloomery.errors import ConfigError, RunBusy, StoppedBySwitch
from bloomery.events.heartbeat import Heartbeat, RankActivity
from bloomery.events.journal import loss_curve, read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import lock_run
from bloomery.optim import clip
from bloomery.train.loop import train
from bloomery.train.settings import StartOptions
from bloomery.train.state import TrainingOutcome

Start = Callable[..., tuple[LoadedRecipe, Path]]
Z_SCORE = ("optim.clip_method=z-score", "optim.clip_z_score=0.5", "optim.skip_outliers=1.5")


def go(
    loaded: LoadedRecipe,
    path: Path,
    *,
    while_it_starts: Callable[[], object] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> TrainingOutcome:
    def data_progress() -> AbstractContextManager[Callable[..., None]]:
        while_it_starts()
        return nullcontext(lambda *told: None)

    options = StartOptions(say=say, data_progress=data_progress)
    return train(loaded, RunDirectory(path), options)


def events(path: Path, name: str) -> list[dict]:
    return [record for record in read_journal(RunDirectory(path).journal()) if record["event"] == name]


def test_a_resumed_run_is_bit_identical_to_the_unbroken_one(start: Start) -> None:
    unbroken = start(name="unbroken")
    assert go(*unbroken).finished
    for stop in (3, 9):
        loaded, path = start(f"guard.stop_at_step={stop}", name="broken")
        assert not go(loaded, path).finished
    assert go(*start(name="broken")).finished
    curves = [loss_curve(RunDirectory(path)) for path in (unbroken[1], path)]
    assert len(curves[0]) > 12
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    "switches",
    [
        ("model.qk_norm=true", *Z_SCORE),
        ("optim.qk_clip=0.1", "optim.qk_clip_stride=2", "optim.clip_method=tensor"),
    ],
    ids=["qk_norm, z-score, outliers", "qk_clip, tensor"],
)
def test_a_resumed_run_with_switches_against_spikes_is_bit_identical_too(
    start: Start, switches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Z_SCORE_WARMUP", "TENSOR_WARMUP", "OUTLIER_MINIMUM"):
        monkeypatch.setattr(clip, name, 3)  # so that each acts before the run ends
    unbroken = start(*switches, name="unbroken")
    assert go(*unbroken).finished
    loaded, path = start(*switches, "guard.stop_at_step=8", name="broken")
    assert not go(loaded, path).finished
    assert go(*start(*switches, name="broken")).finished
    curves = [loss_curve(RunDirectory(path)) for path in (unbroken[1], path)]
    assert len(curves[0]) > 12
    assert curves[0] == curves[1]
    if Z_SCORE[-1] in switches:
        assert any(not record["update_applied"] for record in events(path, "step"))


def test_a_switch_may_be_turned_on_and_off_at_a_resume(start: Start) -> None:
    for stop, method in ((3, "norm"), (6, "z-score"), (9, "tensor")):
        loaded, path = start(f"guard.stop_at_step={stop}", f"optim.clip_method={method}")
        assert go(loaded, path).step == stop
    assert go(*start()).finished


def test_deterministic_kernels_are_asked_for_while_a_run_trains_and_on_cpu_give_the_same_bits(
    start: Start,
) -> None:
    asked: list[bool] = []
    loaded, path = start("train.deterministic=true", name="deterministic")
    options = StartOptions(say=lambda line: asked.append(torch.are_deterministic_algorithms_enabled()))
    assert train(loaded, RunDirectory(path), options).finished
    assert any(asked) and not torch.are_deterministic_algorithms_enabled()
    plain = start(name="plain")
    assert go(*plain).finished
    assert loss_curve(RunDirectory(path)) == loss_curve(RunDirectory(plain[1]))


def test_training_lowers_the_held_out_loss(start: Start) -> None:
    loaded, path = start("train.samples=240", "model.hidden_dropout=0.0")
    go(loaded, path)
    held_out = [r["held_out_loss"] for r in events(path, "step") if r["held_out_loss"] is not None]
    assert held_out[-1] < held_out[0] - 0.3


def test_ramp_up_makes_the_batch_a_function_of_the_position(start: Start) -> None:
    loaded, path = start()
    go(loaded, path)
    batches = [(r["consumed_samples"] - r["global_batch"], r["global_batch"]) for r in events(path, "step")]
    assert batches[0] == (0, 4)
    assert all(batch == (4 if before < 24 else 8) for before, batch in batches)


def test_the_first_step_of_each_batch_may_compile_and_its_heartbeat_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor compares such a step with first steps, not with those before it."""
    seen: list[tuple[int, bool]] = []
    enter = Heartbeat.enter

    def entered(self: Heartbeat, activity: RankActivity) -> None:
        enter(self, activity)
        if activity == RankActivity.COMPUTING:
            seen.append((self.record().step, self.record().may_compile))

    monkeypatch.setattr(Heartbeat, "enter", entered)
    loaded, path = start("train.ramp_up=[2,2,24]")
    assert go(loaded, path).finished
    begins = [record["step"] for record in events(path, "phase")][1:]  # eager: nothing compiles before
    early = {step for step, may_compile in seen if may_compile}
    assert (
        len(begins) > 2 and early == {step + later for step in begins for later in (0, 1)} & dict(seen).keys()
    )
    assert early != dict(seen).keys()


def test_an_evaluation_moves_the_heartbeat_between_its_batches(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a supervisor can tell a long one from one that stands still."""
    moves: list[int] = []
    tick = Heartbeat.tick

    def ticked(self: Heartbeat) -> None:
        tick(self)
        if self.record().activity == RankActivity.EVALUATING:
            moves.append(self.record().moves)

    monkeypatch.setattr(Heartbeat, "tick", ticked)
    loaded, path = start("evaluate.every_steps=2", "evaluate.samples=20", "guard.stop_at_step=2")
    go(loaded, path)
    assert len(moves) > 1 and moves == sorted(set(moves))


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_micro_batch_does_not_change_what_is_learnt(start: Start, micro_batch: int) -> None:
    one = start(name="one")
    other = start(f"train.micro_batch={micro_batch}", name="other")
    go(*one)
    go(*other)
    for (_, first), (_, second) in zip(
        *(loss_curve(RunDirectory(p)) for p in (one[1], other[1])), strict=True
    ):
        assert first == pytest.approx(second, abs=2e-5)


def test_a_fixed_setting_cannot_change_at_a_resume(start: Start) -> None:
    loaded, path = start("guard.stop_at_step=2")
    go(loaded, path)
    changed, _ = start("model.layers=3")
    with pytest.raises(ConfigError, match=r"model\.layers"):
        go(changed, path)


def test_a_journalled_change_is_in_the_journal(start: Start) -> None:
    loaded, path = start("guard.stop_at_step=2")
    go(loaded, path)
    changed, _ = start("optim.learning_rate=0.005")
    go(changed, path)
    assert events(path, "start")[-1]["changes"] == {"optim.learning_rate": [0.01, 0.005]}


def test_a_second_trainer_is_refused_while_the_first_lives(start: Start) -> None:
    loaded, path = start()
    with lock_run(RunDirectory(path).create()), pytest.raises(RunBusy, match="is being trained by process"):
        go(loaded, path)


def test_a_stop_file_saves_and_stops(start: Start) -> None:
    loaded, path = start()
    stop = RunDirectory(path).create().control("stop")
    outcome = go(loaded, path, while_it_starts=stop.touch)
    assert (outcome.finished, outcome.failed, outcome.step) == (False, False, 1)
    assert [r["path"] for r in events(path, "checkpoint")] == ["step-000001.i001"]
    with pytest.raises(StoppedBySwitch, match=r"control/stop is armed"):
        go(loaded, path)
    assert len(events(path, "start")) == 1
    stop.unlink()
    assert go(loaded, path).finished


def test_control_set_changes_a_free_setting_and_refuses_others(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, path = start()
    control = RunDirectory(path).create().control
    control("set").write_text("checkpoint.every_steps = 2\nmodel.layers = 9\n")
    control("skip").write_text("20:24\n")
    control("set").with_name("sav").touch()
    said: list[str] = []
    go(loaded, path, say=said.append)
    assert any(
        line.startswith("control/set: checkpoint.every_steps = 2 from step 2 on, until") for line in said
    )
    assert "control/skip: samples 20 to 23 are left out from now on" in said
    assert [one.getMessage() for one in caplog.records if "asks for nothing" in one.getMessage()] == [
        "control/sav asks for nothing: there are save, stop, skip, rewind, set"
    ]
    assert [r["key"] for r in events(path, "setting")] == ["checkpoint.every_steps"]
    assert [r["key"] for r in events(path, "setting_refused")] == ["model.layers"]
    assert [r["step"] for r in events(path, "checkpoint")][:3] == [2, 4, 6]


def test_a_request_that_is_just_being_written_is_left_until_it_is(start: Start) -> None:
    loaded, path = start()
    request = RunDirectory(path).create().control("set")
    request.touch()
    os.utime(request, times=(soon := time.time() + 3600, soon))  # just made, however long the run takes
    go(loaded, path)
    assert request.exists() and not events(path, "setting")


def test_skipped_samples_are_never_used_and_survive_a_resume(start: Start) -> None:
    loaded, path = start("guard.stop_at_step=4")
    RunDirectory(path).create().control("skip").write_text("8:40\n")
    go(loaded, path)
    go(*start())
    cursors = [(r["consumed_samples"], r["cursor"]) for r in events(path, "step")]
    assert cursors[0] == (4, 4)  # the request is taken after the first step
    assert all(cursor == consumed + 32 for consumed, cursor in cursors if consumed >= 8)


def test_a_spike_rewinds_the_run_and_leaves_its_samples_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.train import loop

    real = loop.train_step

    def spiking(parts, micro_batches, state):
        result = real(parts, micro_batches, state)
        if 320 <= state.position.cursor < 400:
            result.cross_entropy.mul_(6)
        return result

    monkeypatch.setattr(loop, "train_step", spiking)
    loaded, path = start(
        "train.samples=520",
        "guard.spike_patience=4",
        "guard.spike_rewind_steps=2",
        "guard.spike_skip_steps=16",
        "checkpoint.every_steps=2",
        "checkpoint.keep_best=0",  # or the run would go back to just before the spike
    )
    assert go(loaded, path).finished
    repeat, skip = events(path, "rewind")
    assert (repeat["rung"], skip["rung"]) == ("repeat", "skip") and len(range(*repeat["skip"])) == 0
    assert skip["skip"][0] <= 320 and skip["skip"][1] >= 400
    assert "made again, 11 of them with the same bits. The run goes back and leaves" in skip["reason"]
    judged = [record for record in events(path, "guard") if record["action"] == "rewind"]
    assert [each["guard"] for each in judged] == ["spike", "spike"]
    assert [each["reason"] for each in judged] == [repeat["reason"], skip["reason"]]
    assert judged[0]["numbers"]["spreads"] > 3
    assert {r["incarnation"] for r in events(path, "step")} == {1, 2, 3}
    curve = loss_curve(RunDirectory(path))
    assert [step for step, _ in curve] == list(range(1, len(curve) + 1))
    assert max(loss for _, loss in curve) < 8


def test_a_rewind_to_before_the_first_checkpoint_stops_the_run_and_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.guard.verdict import Rewind
    from bloomery.train import loop

    real = loop.judge

    def judge(guards, report):
        usual = real(guards, report)
        if report.step != 3:
            return usual
        return Rewind(judged_step=3, to_step=1, latest_step=2, skip=range(8, 12), reason="planned")

    monkeypatch.setattr(loop, "judge", judge)
    loaded, path = start("checkpoint.every_steps=0", "checkpoint.every_minutes=0.0")
    outcome = go(loaded, path)
    assert outcome.failed and outcome.step == 3
    assert outcome.reason == "planned; but no checkpoint at or before step 2 is there to go back to"
    assert events(path, "rewind") == [] and len(events(path, "rewind_impossible")) == 1
    assert {r["incarnation"] for r in events(path, "step")} == {1}


@pytest.mark.parametrize(("to_step", "back"), [(3, 2), (1, 4)])
def test_a_rewind_takes_a_later_checkpoint_where_none_is_as_early_as_it_wants(
    start: Start, monkeypatch: pytest.MonkeyPatch, to_step: int, back: int
) -> None:
    from bloomery.guard.verdict import Rewind
    from bloomery.train import loop

    real, asked = loop.judge, []

    def judge(guards, report):
        usual = real(guards, report)
        if report.step != 6 or asked:
            return usual
        asked.append(report.step)
        return Rewind(judged_step=6, to_step=to_step, latest_step=5, skip=range(40, 44), reason="planned")

    monkeypatch.setattr(loop, "judge", judge)
    loaded, path = start("checkpoint.every_steps=2", "guard.stop_at_step=7")
    go(loaded, path)
    (begun, again) = events(path, "start")
    assert (begun["step"], again["step"]) == (0, back)


def test_a_start_is_told_with_what_a_person_needs_to_reproduce_it(start: Start) -> None:
    loaded, path = start("guard.stop_at_step=1")
    go(loaded, path)
    (begun,) = events(path, "start")
    assert {"versions", "threads", "precision", "compiled", "compiled_why", "ranks"} <= begun.keys()
    assert json.loads((path / "incarnations" / "000001.json").read_text())


def test_saves_by_samples_come_at_the_first_step_that_passes_a_multiple(start: Start) -> None:
    only_by_samples = (
        "checkpoint.every_steps=0",
        "checkpoint.every_minutes=0",
        "checkpoint.every_samples=21",
    )
    loaded, path = start(*only_by_samples, "checkpoint.keep_last=100", "guard.stop_at_step=8")
    go(loaded, path)
    saves = {record["step"] for record in events(path, "checkpoint")} - {8}  # stopping saves, too
    go(*start(*only_by_samples, "checkpoint.keep_last=100"))
    steps = [(r["step"], r["consumed_samples"], r["global_batch"]) for r in events(path, "step")]
    passed = [step for step, after, batch in steps if (after - batch) // 21 < after // 21]
    assert len(passed) == 96 // 21 and {batch for *_, batch in steps} == {4, 8}
    assert saves == {step for step in passed if step < 8} != set()
    every = {record["step"] for record in events(path, "checkpoint")}
    assert every == {*passed, 8, steps[-1][0]}, "a resume counts on from where it was"


def test_a_step_takes_the_learning_rate_of_its_end(start: Start) -> None:
    steps = ("train.samples=0", "train.steps=8", "train.ramp_up=[]")
    schedule = ("schedule.unit=steps", "schedule.shape=linear", "schedule.warmup=4", "schedule.decay=8")
    loaded, path = start(*steps, *schedule, "optim.learning_rate=0.01")
    go(loaded, path)
    rates = [record["learning_rate"] for record in events(path, "step")]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(0.0)


def test_the_batches_of_the_next_steps_are_read_ahead_and_every_batch_but_the_first_was(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect, batch = Batches.expect, Batches.batch
    expected: list[tuple] = []
    ahead: list[int] = []
    """For each step, how many of the batches that were asked for before it had not been taken yet."""

    def noted_expect(batches: Batches, span: tuple, micro_batch: int) -> None:
        if (span, micro_batch) not in expected:
            expected.append((span, micro_batch))
        expect(batches, span, micro_batch)

    def noted_batch(batches: Batches, span: tuple, micro_batch: int) -> object:
        ahead.append(len(expected))
        if expected:
            assert expected.pop(0) == (span, micro_batch)
        return batch(batches, span, micro_batch)

    monkeypatch.setattr(Batches, "expect", noted_expect)
    monkeypatch.setattr(Batches, "batch", noted_batch)
    run = start("data.prefetch=2", "train.ramp_up=[]", "train.samples=48", "evaluate.every_steps=0")
    assert go(*run).finished
    assert ahead == [0, 2, 2, 2, 2, 1]
