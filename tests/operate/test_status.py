"""What `bloomery status` prints of a run, for people and for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.guard.reports import report

from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import status
from bloomery.config.load import dump_recipe, load_recipe, override
from bloomery.events.heartbeat import Heartbeat
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.exclusions import Exclusions, QuarantinedNode
from bloomery.operate.overview import last_losses, overview, runs_under
from bloomery.operate.run_state import RunStatus


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    rundir = RunDirectory(tmp_path / "runs" / "mine").create()
    with Journal(rundir.journal()) as journal:
        journal.write("start", incarnation=1, step=0)
        reported = report(7, loss=2.5, held_out_loss=2.75).to_json()
        journal.write("step", incarnation=1, **reported)
    return rundir


def test_programs_get_every_run_as_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    status.run(["--under", str(run.path.parent), "--json"])
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    assert (shown["name"], shown["step"], shown["loss"]) == ("mine", 7, 2.5)


def test_people_see_the_losses_of_a_run_that_has_some(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    status.run([str(run.path)])
    assert "2.5" in (shown := capsys.readouterr().out) and "held-out 2.75" in shown
    RunDirectory(run.path.parent / "young").create()
    status.run([str(run.path.parent / "young")])
    assert "held-out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "damage"),
    (
        ("step", {"seconds": "x"}),
        ("step", {"consumed_samples": None}),
        ("step", {"step": [], "loss": {}}),
        ("step", {"held_out_loss": 10**400, "loss": "x"}),
        ("checkpoint", {"time": {}}),
        ("checkpoint", {"step": None}),
    ),
)
def test_damaged_numbers_leave_what_is_known_of_a_run(
    run: RunDirectory, name: str, damage: dict[str, object]
) -> None:
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    before = overview(run)
    whole = {"time": 5.0, "step": 9, "incarnation": 1, "loss": 3.0, "seconds": 1.0, "consumed_samples": 9}
    with run.journal().open("a") as journal:
        journal.write(json.dumps({"event": name, **whole, **damage}) + "\n")
        journal.write(json.dumps({"event": {}, **whole}) + "\n")
    after = overview(run)
    assert (after.step, after.loss, after.held_out_loss) == (7, 2.5, 2.75)
    assert (after.saved, after.saved_step, after.done) == (before.saved, before.saved_step, before.done)


def test_the_peers_of_a_damaged_step_count_as_one(run: RunDirectory) -> None:
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    step = {"event": "step", "step": 9, "loss": 3.0, "seconds": 1.0, "consumed_samples": 9, "peers": [1]}
    with run.journal().open("a") as journal:
        journal.write(json.dumps(step) + "\n")
    assert overview(run).done is not None


def test_a_scheduler_that_is_not_set_up_is_no_matter_of_a_run_that_nobody_submitted(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("squeue", "sbatch", "scontrol", "sacct"):
        (tmp_path / command).write_text("#!/bin/sh\necho 'fatal: no configuration source' >&2; exit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    assert overview(run).warnings == ()
    (run.path / "submission.json").write_text("{}")
    assert "no configuration source" in " ".join(overview(run).warnings)


def test_a_run_that_is_gone_or_was_given_up_says_the_command_that_goes_on_and_why(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.run([str(run.path)]) == 1
    assert f"bloomery launch {run.path} --supervise" in capsys.readouterr().out
    with Journal(run.operations) as journal:
        journal.write("attempt_end", incarnation=0, step=7, attempt="a", status=137)
        said = {"cause": "killed", "summary": "rank 1 was ended by SIGKILL", "remedy": "Find out who did"}
        journal.write("diagnosis", incarnation=0, step=7, attempt="a", gives_up="3 restarts", **said)
    run.control("stop").write_text("")
    assert status.run([str(run.path)]) == 1
    shown = capsys.readouterr().out
    assert "killed: rank 1 was ended by SIGKILL; not started again: 3 restarts" in shown
    assert f"bloomery stop {run.path} --disarm" in shown


def test_progress_and_the_time_left_follow_from_the_samples_and_the_newest_steps(run: RunDirectory) -> None:
    length = ["train.samples=1000", "train.tokens=0", "train.steps=0", "train.global_batch=10"]
    recipe = override(load_recipe("demo").recipe, [*length, "train.ramp_up=[]"])
    run.recipe.write_text(dump_recipe(recipe))
    with Journal(run.journal()) as journal:
        for step, seconds in ((8, 1.0), (9, 2.0), (25, 3.0)):
            journal.write("step", incarnation=1, **report(step, seconds=seconds).to_json())
    seen = overview(run)
    assert (seen.step, seen.done, seen.step_s) == (25, 0.25, 1.5), "the fixture's step took 0.1 s"
    assert seen.left_s == 75 * 1.5
    with Journal(run.journal()) as journal:
        journal.write("step", incarnation=1, **report(101).to_json())
    seen = overview(run)
    assert (seen.done, seen.left_s) == (1.0, 0.0)


def test_what_went_wrong_is_told_and_a_failed_save_only_until_the_next_one(run: RunDirectory) -> None:
    with Journal(run.journal()) as journal:
        journal.write("checkpoint_failed", incarnation=1, step=8, why="no room")
        for _ in range(2):
            journal.write("rewind", incarnation=1, step=8)
        journal.write("step", incarnation=1, **report(9, float("nan"), refused_in_a_row=3).to_json())
    told = overview(run).warnings
    assert told == (
        "no checkpoint at step 8: no room",
        "rewound 2 times",
        "the last loss is NaN",
        "the last 3 updates were refused",
    )
    with Journal(run.journal()) as journal:
        journal.write("checkpoint", incarnation=1, step=9, path="checkpoints/step-9")
    seen = overview(run)
    assert seen.saved_step == 9 and seen.saved is not None and seen.warnings == told[1:]


def test_a_save_is_told_however_many_steps_follow_it(run: RunDirectory) -> None:
    with Journal(run.journal()) as journal:
        for step in (8, 9):
            journal.write("checkpoint", incarnation=1, step=step, path=f"checkpoints/step-{step}")
        journal.write("step", incarnation=1, step=10, text=" " * (9 << 20))
        journal.write("step", incarnation=1, **report(11).to_json())
    seen = overview(run)
    assert (seen.step, seen.saved_step) == (11, 9) and seen.saved is not None


def test_events_that_lack_fields_are_passed_over(run: RunDirectory) -> None:
    before = overview(run)
    with run.journal().open("a") as journal:
        journal.write(
            '{"event": "step", "step": 9}\n{"event": "checkpoint"}\n{"event": "checkpoint", "step": 9}\n'
        )
    after = overview(run)
    assert (after.step, after.loss, after.saved, after.warnings) == (7, 2.5, None, before.warnings)


def test_runs_that_were_written_last_come_first(run: RunDirectory) -> None:
    other = RunDirectory(run.path.parent / "other").create()
    with Journal(other.journal()) as journal:
        journal.write("start", incarnation=1, step=0)
    (run.path.parent / "no run").mkdir()
    for first, second in ((run, other), (other, run)):
        os.utime(first.journal(), (2000.0, 2000.0))
        os.utime(second.journal(), (1000.0, 1000.0))
        assert [found.path for found in runs_under(run.path.parent)] == [first.path, second.path]


def test_a_run_whose_heartbeat_is_newest_comes_first_whatever_its_journal_says(run: RunDirectory) -> None:
    other = RunDirectory(run.path.parent / "other").create()
    for place, beat, journal in ((run, 2000.0, 1000.0), (other, 1000.0, 3000.0)):
        place.heartbeat().parent.mkdir(parents=True, exist_ok=True)
        place.heartbeat().write_text("{}")
        place.journal().touch()
        os.utime(place.heartbeat(), (beat, beat))
        os.utime(place.journal(), (journal, journal))
    assert [found.path for found in runs_under(run.path.parent)] == [run.path, other.path]


def test_one_run_among_others_that_a_person_should_look_at_is_told_by_the_exit_status(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    young = RunDirectory(run.path.parent / "young").create()
    young.control("stop").touch()
    assert status.run([str(young.path)]) == 0
    assert status.run(["--under", str(run.path.parent)]) == 1
    assert "young" in capsys.readouterr().out


def test_the_loss_on_held_out_text_is_the_newest_that_was_measured(run: RunDirectory) -> None:
    assert last_losses(run) == {"loss": 2.5, "held_out_loss": 2.75}
    with Journal(run.journal()) as journal:
        journal.write("evaluation", incarnation=1, step=7, held_out_loss=2.25)
        journal.write("evaluation", incarnation=1, step=7)
        journal.write("step", incarnation=1, **report(8, loss=2.0).to_json())
    assert last_losses(run) == {"loss": 2.0, "held_out_loss": 2.25}


def test_the_time_left_is_shared_by_the_peers_and_measured_by_the_newest_steps(run: RunDirectory) -> None:
    length = ["train.samples=4000", "train.tokens=0", "train.steps=0", "train.global_batch=10"]
    run.recipe.write_text(dump_recipe(override(load_recipe("demo").recipe, [*length, "train.ramp_up=[]"])))
    with Journal(run.journal()) as journal:
        for step in range(8, 58):
            journal.write("step", incarnation=1, **report(step, seconds=9.0, peers=2).to_json())
        for step in range(58, 100):
            journal.write("step", incarnation=1, **report(step, seconds=2.0, peers=2).to_json())
    seen = overview(run)
    assert seen.step_s == 2.0, "of the last fifty, 42 took 2 s"
    assert seen.left_s == 302.0, "151 steps of 20 samples for the 3010 that are left"


def test_what_is_kept_of_a_run_is_shown(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "switches"
    elsewhere.mkdir()
    (elsewhere / "stop").touch()
    directory = "control.directory=~/switches"
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = override(load_recipe("demo").recipe, [directory, "submit.scheduler=slurm"])
    run.recipe.write_text(dump_recipe(recipe))
    exclusions = Exclusions.of(run, recipe.submit)
    exclusions.add(QuarantinedNode(host="n7", cause="bad GPU", since=1e9, evidence="Xid 79"))
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = overview(run)
    assert seen.verdict.state == "unknown" and "squeue" in " ".join(seen.warnings), "the recipe wants SLURM"
    assert (
        len(seen.excluded) == 1 and "n7 since 2001-09-09" in seen.excluded[0] and "Xid 79" in seen.excluded[0]
    )
    run.recipe.write_text(dump_recipe(override(load_recipe("demo").recipe, [directory])))
    seen = overview(run)
    assert seen.verdict.state == "stopped" and str(elsewhere / "stop") in seen.verdict.why
    exclusions.path.write_text("{")
    assert any("is damaged" in line for line in overview(run).warnings)


def test_a_run_has_its_name_from_within_its_directory_too(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path)
    assert overview(RunDirectory(Path())).name == "mine"


def test_a_save_before_the_first_step_and_a_loss_of_zero_are_told(run: RunDirectory) -> None:
    with Journal(run.journal()) as journal:
        journal.write("checkpoint", incarnation=1, step=0, path="checkpoints/step-0")
        journal.write("step", incarnation=1, **report(8, loss=0.0, held_out_loss=0.0).to_json())
    seen = overview(run)
    assert (seen.saved_step, seen.step, seen.loss, seen.held_out_loss) == (0, 8, 0.0, 0.0)


def test_a_journal_that_was_cut_hides_neither_the_end_of_the_ranks_nor_their_last_save(
    run: RunDirectory,
) -> None:
    for step in (4, 8):
        save_checkpoint(run.checkpoints, [], step=step, incarnation=1)
    with Journal(run.journal()) as journal:
        journal.write("checkpoint", incarnation=1, step=4, path="step-000004.i001")
    lines = run.journal().read_bytes()
    run.journal().write_bytes(lines + b'{"event": "step", "time": 17')
    with Heartbeat(run.heartbeat()).start() as beat:
        beat.at(step=8, incarnation=1)
    seen = overview(run)
    assert (seen.step, seen.saved_step, seen.verdict.state) == (7, 8, RunStatus.STOPPED)
    assert seen.verdict.why.endswith("without an error; the journal has no `end`: it was cut or removed")
    with pytest.raises(OSError), Heartbeat(run.heartbeat()).start():
        raise OSError("no disk")
    assert overview(run).verdict.state == RunStatus.FAILED
