"""What a rewind leaves behind in a run: its rung, its restraints, and that a later resume remembers both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.train.planted import Faults, faulty, samples_of
from tests.train.test_loop import Start, events, go

from bloomery.config.load import load_recipe
from bloomery.data.position import Position
from bloomery.diloco.outer import UnderWay
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import Rewind, Rung
from bloomery.optim.clip import Clamps
from bloomery.parallel.mesh import Mesh
from bloomery.plan.recomputation import Recomputation
from bloomery.train import loop
from bloomery.train.settings import RunSettings
from bloomery.train.state import Goal, TrainState

STEADY = (
    "train.samples=0",
    "train.steps=12",
    "train.ramp_up=[]",
    "schedule.shape=constant",
    "optim.clip=0.5",
)
SETTINGS = (*STEADY, "schedule.warmup=0", "checkpoint.every_steps=2", "guard.restrain_steps=5")


@pytest.fixture
def rewinding(monkeypatch: pytest.MonkeyPatch):
    """Let the run be sent back once, after step 6 to step 4, on a rung; clips are what each step used."""
    real_judge, real_step, asked, clips, clamps = loop.judge, loop.train_step, [], [], []

    def on(rung: Rung) -> tuple[list[tuple[int, float]], list[Clamps]]:
        asked.clear()

        def judge(guards, report):
            usual = real_judge(guards, report)
            if report.step != 6 or asked:
                return usual
            asked.append(report.step)
            return Rewind(judged_step=6, to_step=4, skip=range(40, 48), rung=rung, reason="planned")

        def step(parts, micro_batches, state):
            clips.append((state.step + 1, parts.clip(state)))
            clamps.append(parts.clamps(state))
            return real_step(parts, micro_batches, state)

        monkeypatch.setattr(loop, "judge", judge)
        monkeypatch.setattr(loop, "train_step", step)
        return clips, clamps

    return on


@pytest.mark.parametrize("rung", [Rung.SKIP, Rung.SLOW, Rung.CLAMP])
def test_steps_after_a_rewind_are_restrained_as_its_rung_says_also_after_a_resume(
    start: Start, rewinding, rung: Rung
) -> None:
    clips, clamps = rewinding(rung)
    for stop in (
        "guard.stop_at_step=7",
        "guard.stop_at_step=0",
    ):  # which is within the stretch
        loaded, path = start(*SETTINGS, stop)
        go(loaded, path)
    again = [record for record in events(path, "step") if record["incarnation"] > 1]
    assert [record["step"] for record in again] == list(range(5, 13))
    factors = [record["learning_rate"] / 0.01 for record in again]
    slow = 0.5 if rung >= Rung.SLOW else 1.0
    # Until five steps beyond step 6, where the problem was judged, however far back the checkpoint is.
    assert factors == [slow] * 7 + [1.0]
    clamp = 0.25 if rung is Rung.CLAMP else 1.0
    assert [clip for _, clip in clips[6:]] == [0.5 * clamp] * 7 + [0.5]
    held = Clamps(z_score=2.5, holds_norm=True, qk_clip=100.0) if rung is Rung.CLAMP else Clamps()
    assert clamps[6:] == [held] * 7 + [Clamps()]
    assert all(record["cursor"] == record["consumed_samples"] + 8 for record in again if record["step"] > 5)
    assert [record["rung"] for record in events(path, "rewind")] == [rung.name.lower()]


def test_a_restrained_run_that_is_resumed_is_bit_identical_to_the_unbroken_one(
    start: Start, rewinding
) -> None:
    curves = []
    for name, stops in (("unbroken", (0,)), ("broken", (7, 0))):
        rewinding(Rung.CLAMP)
        for stop in stops:
            loaded, path = start(*SETTINGS, f"guard.stop_at_step={stop}", name=name)
            go(loaded, path)
        curves.append(loss_curve(RunDirectory(path)))
    assert len(curves[0]) == 12 and curves[0] == curves[1]


@pytest.mark.parametrize(("inner_steps", "peers"), [(0, 1), (20, 3)])
def test_a_restraint_lasts_as_many_steps_of_the_whole_run_as_the_recipe_says(
    inner_steps: int, peers: int
) -> None:
    options = [f"elastic.inner_steps={inner_steps}", f"elastic.peers={peers}", "guard.restrain_steps=5"]
    recipe = load_recipe("demo", ["train.global_batch=32", "train.ramp_up=[]", *options]).recipe
    settings = RunSettings(
        recipe,
        mesh=Mesh(device=torch.device("cpu")),
        data_stream=None,
        store=None,
        held_out=None,
        journal=None,
        say=lambda line: None,
        auto_recompute=lambda recipe: Recomputation(mode=recipe.train.recompute, why=""),
    )
    state = TrainState(goal=Goal(steps=9), position=Position(consumed=640))
    before = replace(state, position=Position(consumed=960))
    held = settings.restraint(Rung.SLOW, state, before=before)
    assert held is not None and (held.start, held.stop) == (640, 960 + 5 * 32 * peers)
    within = replace(before, under_way=UnderWay(committed=800, live=peers))  # equal on all peers
    held = settings.restraint(Rung.SLOW, state, before=within)
    assert held is not None and (held.start, held.stop) == (640, 800 + 5 * 32 * peers)
    # Outer momentum would carry a rescaling of heads on, round after round.
    clamped = settings.restraint(Rung.CLAMP, state, before=before)
    assert clamped is not None and clamped.qk_clip == (0.0 if inner_steps else 100.0)
    restored = replace(state, restraints=(replace(clamped, qk_clip=100.0),))
    assert settings.clamps(restored).qk_clip == clamped.qk_clip


def test_what_one_rewind_left_out_stays_left_out_when_a_later_one_goes_back_further(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, wanted = loop.judge, [(4, range(40, 48)), (2, range(24, 28))]

    def judge(guards, report):
        usual = real(guards, report)
        if report.step != 6 or not wanted:
            return usual
        to_step, skip = wanted.pop(0)
        return Rewind(judged_step=6, to_step=to_step, skip=skip, rung=Rung.SKIP, reason="planned")

    monkeypatch.setattr(loop, "judge", judge)
    loaded, path = start(*SETTINGS, "guard.stop_at_step=8")
    go(loaded, path)
    assert [record["to_step"] for record in events(path, "rewind")] == [4, 2]
    last = events(path, "step")[-1]
    assert last["cursor"] == last["consumed_samples"] + 8 + 4


LONGER = (
    "train.samples=0",
    "train.ramp_up=[]",
    "optim.name=adamw",
    "schedule.shape=constant",
    "model.hidden_dropout=0.0",
    "evaluate.every_steps=0",
    "guard.spike_rewind_steps=10",
    "guard.spike_skip_steps=5",
)


def test_a_nan_that_struck_once_is_undone_bit_for_bit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    curves, real = [], loop.train_step
    for name, faults in (("clean", Faults()), ("nan", Faults(nan_rank=0, steps=range(20, 24)))):
        monkeypatch.setattr(loop, "train_step", faulty(real, faults))
        loaded, path = start(*LONGER, "train.steps=30", name=name)
        assert go(loaded, path).finished
        curves.append(loss_curve(RunDirectory(path)))
    (rewind,) = events(path, "rewind")
    assert (rewind["step"], rewind["rung"]) == (22, "repeat") and "not finite" in rewind["reason"]
    assert len(curves[0]) == 30 and curves[0] == curves[1]


def test_a_spike_is_undone_and_its_samples_stay_left_out_after_a_restart(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A learning rate of a hundred times the right one for six steps leaves the loss high for long.
    faults = Faults(rate=100.0, steps=range(41, 47), record=tmp_path)
    monkeypatch.setattr(loop, "train_step", faulty(loop.train_step, faults))
    settings = (
        *LONGER,
        "guard.repeat=false",
        "guard.spike_patience=2",
        "guard.trial_steps=6",
        "train.steps=60",
    )
    for stop in (52, 0):
        loaded, path = start(*settings, f"guard.stop_at_step={stop}", name="spiking")
        go(loaded, path)
    (rewind,) = events(path, "rewind")
    assert rewind["rung"] == "skip" and rewind["to_step"] <= 31 and rewind["step"] < 52
    first, last = rewind["skip"]
    assert (first, last) == (8 * rewind["to_step"], 8 * (rewind["step"] + 5))
    assert samples_of(tmp_path) == [*range(first), *range(last, last + 8 * 60 - first)]
    assert max(loss for _, loss in loss_curve(RunDirectory(path))[40:]) < 5.5
    (adopted,) = (told for told in events(path, "guard") if told.get("kind") == "remedy adopted")
    assert adopted["step"] == rewind["step"] + 6 and adopted["numbers"]["base_step"] <= rewind["to_step"]
