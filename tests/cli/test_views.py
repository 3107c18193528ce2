"""What `guard replay`, `mesh`, `calibrate` and imports say of findings, machines and files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.cli.test_ckpt_command import RECIPE

from bloomery.cli import ckpt_export, guard, mesh
from bloomery.cli.calibrate import _refuse_other_file
from bloomery.config.load import parse_recipe
from bloomery.config.model import ModelSection
from bloomery.config.parallel import ParallelSection
from bloomery.errors import BloomeryError, CheckpointError, ConfigError, TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.replay import ReplayFinding
from bloomery.guard.verdict import Rewind, Rung, Stop, Watch


def finding(verdict: Any, **more: Any) -> ReplayFinding:
    return ReplayFinding(guard="spike", line=4, step=1200, verdict=verdict, **more)


TOLD = finding(Watch(judged_step=1200, kind="fast spike", reason="it rose"))
STOPPED = finding(Stop(judged_step=1200, reason="it is over", failed=True))
SKIPPED = Rewind(judged_step=1200, to_step=1100, skip=range(50, 4550), reason="again", rung=Rung.SKIP)
REPEATED = Rewind(judged_step=1200, to_step=1100, skip=range(50, 50), reason="once", rung=Rung.REPEAT)


def test_each_finding_of_a_replay_says_what_a_run_would_do() -> None:
    assert guard._line(TOLD) == "  step 1,200 | spike | would tell (fast spike): it rose"
    assert guard._line(STOPPED) == "  step 1,200 | spike | would stop: it is over"
    assert guard._action(finding(SKIPPED)) == "would rewind to step 1,100 and skip 4,500 samples"
    assert guard._action(finding(SKIPPED, in_steps=True)).endswith("skip 4,500 steps' samples")
    again = guard._action(finding(REPEATED, again=SKIPPED))
    assert again.endswith("make the same steps again and, if it came again, skip 4,500 samples")
    assert guard._action(finding(REPEATED, again=STOPPED.verdict)).endswith("came again, stop")
    assert guard._counted([]) == "nothing would have been said"
    assert guard._counted([finding(SKIPPED), TOLD, STOPPED, TOLD]) == "2 told, 1 rewinds, 1 stops"


def test_a_replays_facts_have_what_would_follow_and_the_unit_of_a_skip() -> None:
    columns: Any = SimpleNamespace(step=np.array([3.0, 4.0, 9.0]), __len__=lambda: 3)

    class Columns:
        step = columns.step

        def __len__(self) -> int:
            return 3

    told: Any = Columns()
    facts = guard._facts(told, [finding(REPEATED, again=SKIPPED, in_steps=True), TOLD])
    assert (facts["lines"], facts["first_step"], facts["last_step"]) == (3, 3, 9)
    first, second = facts["findings"]
    assert (first["step"], first["line"], first["guard"], first["rung"]) == (1200, 4, "spike", "repeat")
    assert first["if_it_came_again"]["skip"] == [50, 4550] and first["skip_in"] == "steps"
    assert second["action"] == "watch" and "if_it_came_again" not in second and "skip_in" not in second


def test_a_log_is_judged_by_the_runs_settings_and_those_given_and_by_no_others(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path).create()
    rundir.recipe.write_text(RECIPE.replace("spike = false", "spike_patience = 33"))
    assert guard._section(tmp_path, []).spike_patience == 33
    section = guard._section(tmp_path, ["guard.repeat=false"])
    assert section.spike_patience == 33 and not section.repeat
    assert guard._section(tmp_path / "a.log", ["guard.spike_patience=7"]).spike_patience == 7
    with pytest.raises(ConfigError) as refused:
        guard._section(tmp_path, ["train.steps=5", "guard.repeat=false", "x"])
    assert [mistake.key for mistake in refused.value.mistakes] == ["train.steps=5", "x"]
    with pytest.raises(TrainingFailed, match="has no journal: nothing was ever started"):
        guard._log(tmp_path)
    (tmp_path / "journal" / "alice-0.jsonl").touch()
    assert guard._log(tmp_path) == rundir.journal(peer="alice")
    rundir.journal().touch()
    assert guard._log(tmp_path) == rundir.journal() and guard._log(tmp_path / "a.log") == tmp_path / "a.log"


def test_ranks_fill_machines_one_after_the_other() -> None:
    layout = ParallelSection(tensor=2, pipeline=3, data=4, ranks_per_node=4)
    assert mesh._usual_world(layout) == 24 and mesh._usual_world(ParallelSection(tensor=2, pipeline=3)) == 6
    hosts = mesh._hosts(None, layout, world=10)
    assert hosts == [*["node-1"] * 4, *["node-2"] * 4, *["node-3"] * 2]
    assert mesh._hosts(None, layout, world=3) == ["node-1"] * 3
    assert mesh._hosts(None, ParallelSection(), world=9) == ["node-1"] * 9
    assert mesh._hosts("b,a[1-2]", layout, world=6) == ["b", "b", "a1", "a1", "a2", "a2"]


def test_measurements_replace_no_file_but_those_of_machines(tmp_path: Path) -> None:
    _refuse_other_file(tmp_path / "new.toml")
    (tmp_path / "machine.toml").write_text('name = "x"\n[accelerator]\n')
    _refuse_other_file(tmp_path / "machine.toml")
    (tmp_path / "recipe.toml").write_text("[run]\n")
    with pytest.raises(BloomeryError, match="describes no machine"):
        _refuse_other_file(tmp_path / "recipe.toml")
    with pytest.raises(BloomeryError, match="is a directory"):
        _refuse_other_file(tmp_path)


def test_a_directory_without_a_model_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        ckpt_export._refuse_no_model(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ckpt_export._refuse_no_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(BloomeryError, match="abacus"):
        ckpt_export._refuse_no_model(tmp_path)
    for name in (".metadata", "layer_00.pt"):
        foreign = tmp_path / name.strip(".")
        foreign.mkdir()
        (foreign / name).touch()
        ckpt_export._refuse_no_model(foreign)


def test_the_recipe_of_an_import_trains_on_with_its_model_and_at_most_its_positions(tmp_path: Path) -> None:
    def imported(**model: Any) -> Any:
        return SimpleNamespace(model=ModelSection(layers=2, hidden=32, heads=2, **model))

    def recipe(**model: Any) -> Any:
        return ckpt_export._recipe(imported(**model), name="x", origin=Path("/m"), end_of_document="<e>")

    made = recipe(position="learned", max_positions=64)
    assert made.data.sequence_length == 64 and made.data.end_of_document_token == "<e>"
    assert made.run.name == "x" and "/m" in made.run.notes and made.model.hidden == 32
    most = ckpt_export._SEQUENCE_AT_MOST
    assert recipe().data.sequence_length == most == recipe(max_positions=10 * most).data.sequence_length
    text = ckpt_export._continuing_recipe(tmp_path / "my run", sequence_length=64)
    whole = f"{text}\n[model]\nlayers = 2\nhidden = 32\nheads = 2\n"
    loaded = parse_recipe(whole, label="continue").recipe
    assert loaded.run.name == "my-run-continued" and loaded.init.from_ == str(tmp_path / "my run")
    assert loaded.data.sequence_length == 64 and loaded.schedule.unit == "steps"
