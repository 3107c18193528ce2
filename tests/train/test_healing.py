"""What a rewind leaves behind in a run: its rung, its restraints, and that a later resume remembers both."""

from __future__ import annotations

import pytest
import torch
from tests.train.test_loop import Start, events, go

from bloomery.config.load import load_recipe
from bloomery.data.position import Position
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import Rewind, Rung
from bloomery.parallel.mesh import Mesh
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
    from bloomery.train import loop

    real_judge, real_step, asked, clips = loop.judge, loop.train_step, [], []

    def on(rung: Rung) -> list[tuple[int, float]]:
        asked.clear()

        def judge(guards, report):
            usual = real_judge(guards, report)
            if report.step != 6 or asked:
                return usual
            asked.append(report.step)
            return Rewind(judged_step=6, to_step=4, skip=range(40, 48), rung=rung, reason="planned")

        def step(parts, micro_batches, state):
            clips.append((state.step + 1, parts.clip(state)))
            return real_step(parts, micro_batches, state)

        monkeypatch.setattr(loop, "judge", judge)
        monkeypatch.setattr(loop, "train_step", step)
        return clips

    return on


@pytest.mark.parametrize("rung", [Rung.SKIP, Rung.SLOW, Rung.CLAMP])
def test_steps_after_a_rewind_are_restrained_as_its_rung_says_also_after_a_resume(
    start: Start, rewinding, rung: Rung
) -> None:
    clips = rewinding(rung)
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
    assert factors == [slow] * 5 + [1.0] * 3
    clamp = 0.25 if rung is Rung.CLAMP else 1.0
    assert [clip for _, clip in clips[6:]] == [0.5 * clamp] * 5 + [0.5] * 3
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
    )
    held = settings.restraint(Rung.SLOW, TrainState(goal=Goal(steps=9), position=Position(consumed=640)))
    assert held is not None and (held.start, held.stop) == (640, 640 + 5 * 32 * peers)
