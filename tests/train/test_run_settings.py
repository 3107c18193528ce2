"""What the recipe says at a position of the run, restrained or not, and how requests change it on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.guard.reports import report

from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.position import Position
from bloomery.errors import DataError
from bloomery.events.journal import Journal, read_journal
from bloomery.events.records import Facts
from bloomery.guard.judge import judge
from bloomery.guard.restraint import Restraint
from bloomery.optim.clip import Clamps
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.plan.recomputation import Recomputation
from bloomery.plan.schedule import learning_rate
from bloomery.train.settings import RunSettings
from bloomery.train.state import Goal, TrainState

PLAIN = ("train.global_batch=8", "train.ramp_up=[]", "train.samples=640", "schedule.shape=constant")
STATE = TrainState(goal=Goal(samples=640), step=10, position=Position(consumed=80))


class Run:
    """Settings of a run with stand-ins for what they tell of changes."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.said: list[str] = []
        self.demanded: list[int] = []
        self.refuses = False
        self.store = SimpleNamespace(incarnation=3, section=None, reach_steps=None)
        self.held_out = SimpleNamespace(section=None)
        stream = SimpleNamespace(demand=SimpleNamespace(claims={}), windows=(500, 200))
        self.journal = Journal(path)
        self.settings = RunSettings(
            load_recipe("demo", [*PLAIN, *overrides]).recipe,
            mesh=Mesh(device=torch.device("cpu")),
            data_stream=SimpleNamespace(stream=stream, demand=self._demand),  # type: ignore[arg-type]
            store=self.store,  # type: ignore[arg-type]
            held_out=self.held_out,  # type: ignore[arg-type]
            journal=self.journal,
            say=self.said.append,
            auto_recompute=self.chosen,
        )

    def chosen(self, recipe: Recipe) -> Recomputation:
        mode = recipe.train.recompute
        return Recomputation(mode="mlp" if mode == "auto" else mode, why="")

    def _demand(self, demand: object, *, at: int, left: int) -> dict[str, Any] | None:
        if self.refuses:
            raise DataError("the budgets do not fit")
        self.demanded.append(left)
        return {"at": at}

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_journal(self.journal.path) if event["event"] == name]

    def asked(self, state: TrainState, **facts: Any) -> TrainState:
        def skip(state: TrainState, samples: range) -> TrainState:
            return replace(state, position=state.position.skipping(samples))

        return self.settings.apply_requests(state, Facts(**facts), skip=skip)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "journal.jsonl")
    yield made
    made.journal.close()


def restrained(**limits: float) -> TrainState:
    given = {"start": 0, "stop": 1000, "rate": 1.0, "clip": 1.0, **limits}
    return replace(STATE, restraints=(Restraint(**given),))  # type: ignore[arg-type]


def test_the_run_ends_at_its_samples_or_where_the_recipe_counts_steps_at_those(tmp_path: Path) -> None:
    by_samples, by_steps = (
        Run(tmp_path / name, *overrides).settings
        for name, overrides in (("a", ()), ("b", ("train.samples=0", "train.steps=20")))
    )
    assert by_samples.goal == Goal(samples=640) and by_samples.run_length_steps == 80
    assert by_steps.goal == Goal(steps=20) and by_steps.run_length_steps == 20
    assert by_samples.stream_end(cursor=100, consumed=80) == 660, "twenty were left out on the way"
    assert by_samples.indices_left(STATE) == 560
    skipping = replace(STATE, position=STATE.position.skipping(range(200, 230)))
    assert by_samples.indices_left(skipping) == 590


def test_the_learning_rate_is_read_at_the_end_of_the_step_and_restrained_by_its_factor(
    tmp_path: Path,
) -> None:
    warming = ("schedule.warmup=20", "schedule.unit=steps", "optim.learning_rate=0.01")
    settings = Run(tmp_path / "journal.jsonl", *warming).settings
    recipe = settings.recipe
    wanted = learning_rate(recipe.optim, recipe.schedule, at=11, length=80)
    assert settings.learning_rate(STATE) == pytest.approx(wanted) and wanted < 0.01
    assert settings.learning_rate(restrained(rate=0.25)) == pytest.approx(0.25 * wanted)


@pytest.mark.parametrize(("clip", "plain", "halved"), [("2.0", 2.0, 1.0), ("0.0", 0.0, 0.5)])
def test_a_restraint_scales_the_clip_and_makes_one_where_there_is_none(
    tmp_path: Path, clip: str, plain: float, halved: float
) -> None:
    settings = Run(tmp_path / "journal.jsonl", f"optim.clip={clip}").settings
    assert settings.clip(STATE) == settings.clip(restrained()) == plain
    assert settings.clip(restrained(clip=0.5)) == halved


def test_a_clamp_holds_as_long_as_its_restraint(run: Run) -> None:
    held = restrained(z_score=2.5, qk_clip=50.0)
    clamps = run.settings.clamps(held)
    assert clamps == Clamps(z_score=2.5, qk_clip=50.0)
    assert run.settings.clamps(restrained(clip=0.25)) == Clamps(holds_norm=True)
    clamps = run.settings.clamps(replace(held, position=Position(consumed=1000)))
    assert clamps == Clamps()


def test_nothing_that_is_asked_changes_nothing(run: Run) -> None:
    assert run.asked(STATE) is STATE
    assert (run.said, run.demanded, list(read_journal(run.journal.path))) == ([], [], [])


def test_samples_that_somebody_leaves_out_are_told_journalled_and_made_up_for(run: Run) -> None:
    state = run.asked(STATE, skip_requested=((100, 120), (300, 310)))
    assert [(each.start, each.stop) for each in state.position.skips] == [(100, 120), (300, 310)]
    first, second = run.events("skip")
    assert (first["first"], first["end"], first["skips"]) == (100, 120, [[100, 120]])
    assert second["skips"] == [[100, 120], [300, 310]] and second["step"] == 10
    assert second["incarnation"] == 3
    assert run.said[0] == "control/skip: samples 100 to 119 are left out from now on"
    assert run.demanded == [580, 590] and [event["at"] for event in run.events("mixture")] == [80, 80]


def test_a_skip_of_more_than_the_run_and_its_data_hold_is_refused(run: Run) -> None:
    state = run.asked(STATE, skip_requested=((60, 781), (100, 10**15), (90, 91)))
    assert [(each.start, each.stop) for each in state.position.skips] == [(90, 91)]
    short, long = run.events("setting_refused")
    assert (short["key"], short["value"], long["value"]) == ("control/skip", "60:781", "100:1000000000000000")
    assert short["why"] == "60:781 leaves out 701 samples, and the run takes 640 of the 700 of its datasets"
    assert run.asked(STATE, skip_requested=((60, 780),)).position.cursor == 780


def test_a_free_setting_is_in_force_everywhere_once_it_was_asked_for(run: Run) -> None:
    guards, recipe = run.settings.guards, run.settings.recipe
    guards.load_state_values({})
    before = guards.state_values()
    judge(guards, report(10))
    settings = (("train.samples", "800"), ("checkpoint.every_steps", "7"), ("evaluate.every_steps", "9"))
    state = run.asked(STATE, settings_requested=settings)
    assert state.goal == Goal(samples=800) == run.settings.goal
    assert run.settings.recipe is not recipe and run.settings.guards is not guards
    assert run.store.section.every_steps == 7 and run.store.section is run.settings.recipe.checkpoint
    assert run.held_out.section.every_steps == 9
    assert run.store.reach_steps == run.settings.recipe.guard.reach_steps
    assert [(event["key"], event["value"]) for event in run.events("setting")] == list(settings)
    assert run.said[0] == (
        "control/set: train.samples = 800 from step 11 on, until this process ends; "
        "give the next start train.samples=800 to keep it"
    )
    assert run.settings.guards.state_values() == guards.state_values() != before


def test_batches_that_the_run_is_past_do_not_keep_a_setting_from_being_changed(tmp_path: Path) -> None:
    made = Run(tmp_path / "journal.jsonl", "train.global_batch=12", "train.ramp_up=[4, 4, 90]")
    asked = (("train.micro_batch", "12"),)
    early, late = (replace(STATE, position=Position(consumed=consumed)) for consumed in (89, 90))
    made.asked(early, settings_requested=asked)
    assert made.settings.recipe.train.micro_batch != 12
    made.asked(late, settings_requested=asked)
    assert made.settings.recipe.train.micro_batch == 12
    made.journal.close()


def test_a_micro_batch_has_to_fit_the_data_parallel_ranks_and_not_all_ranks(run: Run) -> None:
    run.settings._mesh = Mesh(device=torch.device("cpu"), world=4, data=Axis(ranks=(0, 1)))
    run.asked(STATE, settings_requested=(("train.micro_batch", "4"), ("train.micro_batch", "8")))
    assert run.settings.recipe.train.micro_batch == 4
    assert [event["value"] for event in run.events("setting_refused")] == ["8"]


@pytest.mark.parametrize(("key", "value"), [("model.layers", "3"), ("no.such", "1"), ("optim.clip", "x")])
def test_a_setting_that_cannot_be_changed_is_refused_and_the_run_goes_on(
    run: Run, key: str, value: str
) -> None:
    recipe = run.settings.recipe
    assert run.asked(STATE, settings_requested=((key, value),)) == STATE
    (refused,) = run.events("setting_refused")
    assert (refused["key"], refused["value"]) == (key, value) and refused["why"]
    assert run.settings.recipe is recipe and run.said == [] and run.events("setting") == []


def test_a_length_that_the_budgets_cannot_fill_is_refused_as_a_whole(run: Run) -> None:
    run.refuses, recipe = True, run.settings.recipe
    assert run.asked(STATE, settings_requested=(("train.samples", "800"),)) == STATE
    (refused,) = run.events("setting_refused")
    assert "the budgets do not fit" in refused["why"]
    assert run.settings.recipe is recipe and run.store.section is None
