"""The recipe that a run keeps, what a phase and a rewind make of it, and the environment of a step."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.test_run_settings import STATE, Run, restrained, run

from bloomery.config.convert import dump_recipe
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.resume import SettingChange, SettingChanges
from bloomery.diloco.outer import UnderWay
from bloomery.errors import ConfigError, StorageError
from bloomery.events.records import ignore_progress
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import Rung
from bloomery.plan.schedule import Phase, learning_rate
from bloomery.train import settings as settings_module
from bloomery.train import step as step_module
from bloomery.train.settings import StartOptions, changes_of, keep_recipe
from bloomery.train.step import decide_compilation, deterministic_kernels, lacking_toolchain

__all__ = ["run"]


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def demo(*settings: str) -> LoadedRecipe:
    return load_recipe("demo", settings)


def test_a_run_keeps_its_recipe_and_where_each_value_came_from(rundir: RunDirectory) -> None:
    loaded = replace(demo(), sources={"run.name": 'a "file"', "data.split": "the command line"})
    assert changes_of(loaded, rundir) == SettingChanges()
    (rundir.path / ".recipe.toml.abc.draft").write_text("left by a crash")
    keep_recipe(loaded, rundir)
    assert not list(rundir.path.glob(".*"))
    assert rundir.recipe.read_text() == dump_recipe(loaded.recipe)
    assert rundir.sources.read_text() == ('"data.split" = "the command line"\n"run.name" = "a \\"file\\""\n')
    assert changes_of(loaded, rundir) == SettingChanges()


def test_a_start_is_compared_with_the_recipe_that_the_run_keeps(rundir: RunDirectory) -> None:
    keep_recipe(demo("log.every_steps=3"), rundir)
    changes = changes_of(demo("log.every_steps=4"), rundir)
    assert changes.free == (SettingChange(key="log.every_steps", old=3, new=4),)
    other = demo("model.layers=9")
    with pytest.raises(ConfigError) as refused:
        changes_of(other, rundir)
    (mistake,) = refused.value.mistakes
    assert (mistake.key, mistake.value, mistake.source) == ("model.layers", 9, other.sources["model.layers"])


@pytest.mark.parametrize("journal", ["", '{"event": "start", "step": 0}\n'])
def test_a_damaged_recipe_that_the_journal_does_not_know_either_is_put_aside(
    journal: str, rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    rundir.recipe.write_text("[model\n")
    rundir.journal().write_text(journal)
    assert changes_of(demo(), rundir) == SettingChanges()
    assert not rundir.recipe.exists()
    assert (rundir.path / "recipe.damaged.toml").read_text() == "[model\n"
    assert "it is kept as recipe.damaged.toml" in caplog.text


def test_a_recipe_that_cannot_be_written_is_told_with_its_path(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*told: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(settings_module.durable, "write_whole", refuse)
    with pytest.raises(StorageError, match=r"(?i)writing the run's recipe.*") as refused:
        keep_recipe(demo(), rundir)
    assert str(rundir.recipe) in str(refused.value)


def test_a_phase_has_the_precision_that_auto_means_on_this_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "resolve_precision", lambda asked, device: f"{asked} on {device}")
    asked = ("train.precision=auto", "train.precision_changes=[[160, 'fp8']]", "train.micro_batch=2")
    settings = Run(tmp_path / "journal.jsonl", *asked).settings
    assert settings.phase(STATE) == Phase(
        global_batch=8, micro_batch=2, precision="auto on cpu", recompute=settings.recipe.train.recompute
    )
    ahead = replace(STATE, under_way=UnderWay(committed=40, live=3))  # 40 + 3 × 40 samples of all peers
    assert settings.phase(ahead).precision == "fp8 on cpu"


@pytest.mark.parametrize(("inner_steps", "clamp"), [(0, 50.0), (4, 0.0)])
def test_peers_rescale_no_heads(inner_steps: int, clamp: float, tmp_path: Path) -> None:
    options = ("elastic.peers=2", "elastic.minimum_peers=1", "guard.clamp_qk=50.0")
    made = Run(tmp_path / "journal.jsonl", f"elastic.inner_steps={inner_steps}", *options)
    clamps = made.settings.clamps(restrained(z_score=2.5, qk_clip=50.0))
    assert (clamps.z_score, clamps.qk_clip) == (2.5, clamp)
    for change in ((), (("checkpoint.every_steps", "7"),)):
        made.asked(STATE, settings_requested=change)
        new = made.settings.restraint(Rung.CLAMP, STATE, before=STATE)
        assert new is not None and new.qk_clip == clamp
    assert made.settings.recipe.checkpoint.every_steps == 7


def test_a_run_between_peers_counts_its_own_steps(tmp_path: Path) -> None:
    options = ("elastic.peers=2", "elastic.minimum_peers=1", "elastic.inner_steps=4")
    assert Run(tmp_path / "journal.jsonl", *options).settings.run_length_steps == 40


def test_samples_are_made_up_for_under_the_recipe_that_is_asked_for(run: Run) -> None:
    longer = load_recipe("demo", ["train.global_batch=8", "train.ramp_up=[]", "train.samples=800"]).recipe
    run.settings.spread_budgets(STATE, recipe=longer)
    run.settings.spread_budgets(STATE)
    assert run.demanded == [720, 560]


def test_a_run_without_held_out_text_may_change_its_settings(run: Run) -> None:
    run.settings._held_out = None
    state = run.asked(
        STATE, settings_requested=(("checkpoint.every_steps", "7"), ("evaluate.every_steps", "x"))
    )
    assert run.settings.recipe.checkpoint.every_steps == 7 and state.goal == run.settings.goal
    (refused,) = run.events("setting_refused")
    assert refused["key"] == "evaluate.every_steps" and (refused["step"], refused["incarnation"]) == (10, 3)
    assert run.said == [
        "control/set: checkpoint.every_steps = 7 from step 11 on, until this process ends; "
        "give the next start checkpoint.every_steps=7 to keep it"
    ]


def test_kernels_are_deterministic_until_the_end_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda *, mode, warn_only=False: asked.append(mode)
    )
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    module: Any = torch.utils.deterministic
    monkeypatch.setattr(module, "fill_uninitialized_memory", True)
    with deterministic_kernels(wanted=False):
        assert asked == [] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with pytest.raises(ValueError, match="x"), deterministic_kernels(wanted=True):
        assert asked == [True] and module.fill_uninitialized_memory is False
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise ValueError("x")
    assert asked == [True, False] and module.fill_uninitialized_memory is True
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic_kernels(wanted=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_deterministic_kernels_that_were_asked_for_before_a_run_stay_so_after_it() -> None:
    try:
        for warns in (True, False):
            torch.use_deterministic_algorithms(mode=True, warn_only=warns)
            with deterministic_kernels(wanted=True):
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize(
    ("compilers", "has_headers", "lacks"),
    [
        ((), True, "no C++ compiler (install g++)"),
        (("g++",), True, ""),
        (("clang++",), True, ""),
        (("g++",), False, "no Python headers at {header} (install python3-dev)"),
    ],
)
def test_what_a_compilation_lacks_is_named_with_its_package(
    compilers: tuple[str, ...], has_headers: bool, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "Python.h"
    if has_headers:
        header.touch()
    monkeypatch.setattr(step_module.shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(step_module, "python_header", lambda: header)
    assert lacking_toolchain() == lacks.format(header=header)


def test_a_decision_to_compile_or_not_is_told_as_a_person_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(choice: str, flops: float = 0.0) -> str:
        return decide_compilation(choice, device=torch.device("cpu"), run_flops=flops).why

    monkeypatch.setattr(step_module, "lacking_toolchain", lambda: "")
    assert [why("off"), why("on"), why("auto"), why("auto", 1e30)] == [
        "train.compile = off",
        "train.compile = on",
        "the run is shorter than a compilation would pay for",
        "the run is long enough to pay for it",
    ]
    monkeypatch.setattr(step_module, "lacking_toolchain", lambda: "no C++ compiler (install g++)")
    assert why("on") == "no C++ compiler (install g++): training eagerly, which is slower"
    assert why("off") == "train.compile = off"


def test_a_damaged_recipe_is_mended_from_the_last_start_in_the_journal(
    rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    rundir.recipe.write_text("[model\n")
    text = dump_recipe(demo("model.layers=3").recipe)
    older = dump_recipe(demo("model.layers=2").recipe)
    lines = [{"event": "start", "step": 0, "recipe": each} for each in (older, text)]
    rundir.journal().write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert changes_of(demo("model.layers=3"), rundir) == SettingChanges()
    assert rundir.recipe.read_text() == text, "the last start's"
    (told,) = caplog.records
    assert told.levelno == logging.WARNING and "is mended from the journal" in told.getMessage()
    assert told.getMessage().startswith(f"{rundir.recipe} was damaged (")
    assert not (rundir.path / "recipe.damaged.toml").exists()


def test_what_a_rewind_restrains_is_asked_of_the_ladder_of_the_run(run: Run) -> None:
    asked: list[Any] = []
    run.settings.guards = SimpleNamespace(  # type: ignore[assignment]
        ladder=SimpleNamespace(restraint=lambda rung, **told: asked.append((rung, told)) or "restraint")
    )
    assert run.settings.restraint("rung", STATE, before=STATE) == "restraint"  # type: ignore[arg-type]
    assert asked == [("rung", {"consumed": 80, "problem": 80, "samples_per_step": 8})]


def test_a_recipe_that_cannot_be_mended_is_told_with_its_path(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*told: Any) -> None:
        raise OSError(28, "No space left on device")

    rundir.recipe.write_text("[model\n")
    line = {"event": "start", "step": 0, "recipe": dump_recipe(demo().recipe)}
    rundir.journal().write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(settings_module.durable, "write_whole", refuse)
    with pytest.raises(StorageError, match="Mending the run's recipe") as refused:
        changes_of(demo(), rundir)
    assert str(rundir.recipe) in str(refused.value)


def test_a_rate_by_samples_is_read_where_the_step_will_have_come_to(tmp_path: Path) -> None:
    warming = ("schedule.warmup=160", "schedule.unit=samples", "optim.learning_rate=0.01")
    made = Run(tmp_path / "journal.jsonl", *warming)
    recipe = made.settings.recipe
    wanted = learning_rate(recipe.optim, recipe.schedule, at=88, length=640)
    assert made.settings.learning_rate(STATE) == pytest.approx(wanted) and wanted < 0.01
    made.journal.close()


def test_a_start_that_chooses_nothing_takes_the_newest_checkpoint_and_the_recipes_form() -> None:
    options = StartOptions(say=print)
    assert (options.form, options.columns, options.take_fallback) == ("", 100, False)
    assert (options.started, options.peering, options.ends_process) == (0.0, None, False)
    with options.data_progress() as progress:
        assert progress is ignore_progress
