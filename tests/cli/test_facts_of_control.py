"""What skipping samples and going back mean for a run, in numbers; and switches in several directories."""

from __future__ import annotations

import errno
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.in_process import status_of
from tests.cli.test_ckpt_command import RECIPE
from tests.guard.reports import report

from bloomery import durable
from bloomery.cli.control import (
    _armed,
    cursor_after,
    lost_facts,
    samples_of,
    skipped_facts,
    skipped_words,
    steps_before,
    when_words,
)
from bloomery.errors import BloomeryError, StorageError
from bloomery.events.history import PastSteps, past_steps
from bloomery.events.journal import Journal
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import lock_run


def made(step: int, *, peers: int = 1) -> StepReport:
    """A step of ten samples a peer, which stands 5 indices of the stream beyond the samples that count."""
    at = 10 * peers * step
    return replace(report(step, peers=peers, cursor=at + 5, consumed_samples=at), seconds=0.25 * step)


def past_of(
    rundir: RunDirectory, steps: range, *, peers: int = 1, back_to: int | None = None, reaching: Any = ()
) -> PastSteps:
    """Return what is asked about a run, once these steps are written into its journal."""
    with Journal(rundir.create().journal()) as journal:
        for step in steps:
            journal.write("step", incarnation=1, **made(step, peers=peers).to_json())
    return past_steps(rundir, back_to=back_to, reaching=reaching)


def test_where_the_stream_stood_follows_from_steps_made_and_to_come(tmp_path: Path) -> None:
    past = past_of(RunDirectory(tmp_path), range(3, 9), peers=3, reaching=(1, 3, 7))
    assert [cursor_after(step, past) for step in (0, -1, 3, 7, 8, 9, 11)] == [0, 0, 95, 215, 245, 275, 335]
    assert cursor_after(1, past) == 95, "the first that is known"
    assert cursor_after(5, PastSteps()) == 0


def test_samples_are_those_asked_for_or_those_of_steps(tmp_path: Path) -> None:
    asked = Namespace(samples=None, steps=range(4, 10))
    past = past_of(RunDirectory(tmp_path), range(1, 9), reaching=steps_before(asked))
    assert samples_of(Namespace(samples=range(3, 7), steps=None), past) == range(3, 7)
    assert samples_of(asked, past) == range(35, 95) and steps_before(asked) == (3, 9)
    assert samples_of(Namespace(samples=None, steps=None), past) == range(0)


def test_a_rewind_to_the_newest_step_names_no_steps_that_it_undoes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    past_of(RunDirectory(tmp_path), range(1, 9))
    newest = SimpleNamespace(step=8, name="step-000008.i001", directory=tmp_path / "none")
    monkeypatch.setattr("bloomery.checkpoint.format.catalogue.checkpoints", lambda rundir: [newest])
    assert status_of("rewind", str(tmp_path), "--to-step", "8", "--dry-run") == 0
    assert "0.00 hours of training are undone, and those" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "made_steps", "told"),
    [
        (range(1), range(1, 9), "--steps 0:1 has no samples: the first step of a run is 1"),
        (range(3, 5), range(0), "nobody knows which samples --steps 3:5 are"),
        (range(3, 10**15), range(1, 9), "ends beyond sample 1,000,000,000,000,000"),
    ],
)
def test_steps_without_samples_or_with_too_many_are_not_asked_for(
    tmp_path: Path, steps: range, made_steps: range, told: str
) -> None:
    asked = Namespace(samples=None, steps=steps)
    past = past_of(RunDirectory(tmp_path), made_steps, reaching=steps_before(asked))
    with pytest.raises(BloomeryError, match=told):
        samples_of(asked, past)


@pytest.mark.parametrize(
    ("samples", "left_out", "used"),
    [(range(20, 50), 0, 30), (range(40, 90), 5, 45), (range(85, 90), 5, 0), (range(100, 170), 70, 0)],
)
def test_samples_behind_the_run_stay_used_and_those_ahead_are_left_out(
    samples: range, left_out: int, used: int
) -> None:
    facts = skipped_facts(samples, made(8))
    assert (facts["left_out"], facts["used_already"]) == (left_out, used)
    assert facts["samples"] == [samples.start, samples.stop] and facts["steps_worth"] == left_out / 10
    told = skipped_words(facts)
    assert f"Samples {samples.start} to {samples.stop - 1} of the stream" in told
    assert ("lie behind the run" in told) == bool(used)


def test_steps_of_several_peers_are_as_large_as_all_of_theirs_and_a_new_run_has_no_steps() -> None:
    assert skipped_facts(range(1000, 1090), made(8, peers=3))["steps_worth"] == 3.0
    facts = skipped_facts(range(5, 9), None)
    assert facts == {"samples": [5, 9], "left_out": 4, "used_already": 0, "steps_worth": None}
    assert "worth" not in skipped_words(facts)


def test_what_going_back_undoes_is_what_lies_behind_the_checkpoint(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path)
    past_of(rundir, range(1, 9))

    def lost(step: int) -> dict[str, Any]:
        checkpoint: Any = SimpleNamespace(step=step, name=f"step-{step:06d}.i001")
        return lost_facts(checkpoint, past_steps(rundir, back_to=step))

    assert lost(5) == {
        "checkpoint": "step-000005.i001",
        "to_step": 5,
        "last_step": 8,
        "steps": 3,
        "samples": 30,
        "seconds": 0.25 * (6 + 7 + 8),
    }
    facts = lost(8)
    assert (facts["last_step"], facts["steps"], facts["samples"], facts["seconds"]) == (8, 0, 0, 0)
    assert lost(0)["samples"] == 80


def test_when_a_run_takes_a_request_depends_on_whether_it_trains(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path).create()
    assert "not training" in when_words(rundir, "skip", dry_run=False), "nobody ever held it"
    with lock_run(rundir):
        assert when_words(rundir, "skip", dry_run=False) == "The run takes it after its next step."
    assert "not training" in when_words(rundir, "skip", dry_run=False)
    assert "dry run" in when_words(rundir, "skip", dry_run=True)
    with lock_run(rundir):
        pass  # asking has not kept the lock
    with rundir.lock.open("rb") as another:
        assert durable.try_lock(another.fileno(), shared=True)
        assert "not training" in when_words(rundir, "skip", dry_run=False), "another asks as well"


def test_what_is_asked_of_a_finished_run_waits_for_more_tokens_and_can_be_taken_back(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path).create()
    with Journal(rundir.journal()) as journal:
        journal.write("end", incarnation=1, step=8, reason="the samples are done", finished=True)
    words = when_words(rundir, "rewind", dry_run=False)
    assert "finished" in words and "train.tokens" in words and str(rundir.control("rewind")) in words
    with Journal(rundir.journal()) as journal:
        journal.write("start", incarnation=2, step=8)
    assert "not training" in when_words(rundir, "rewind", dry_run=False)


def test_a_save_tells_whether_the_run_takes_it_now_or_at_its_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = RunDirectory(tmp_path).create()
    said = []
    for name in ("save", "stop"):
        assert status_of(name, str(tmp_path)) == 0
        with lock_run(rundir):
            assert status_of(name, str(tmp_path)) == 0
        said += [line.partition(" is armed: ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said[0] == "the run is not training, and saves after the first step of its next start"
    assert said[1] == "the run saves after its present step"
    assert said[2] == said[3] and said[2].startswith("the run saves and stops after its present step")


def test_where_a_file_system_has_no_locks_a_request_may_be_taken_now_or_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(file: int, *, shared: bool = False) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    rundir = RunDirectory(tmp_path).create()
    rundir.lock.touch()
    monkeypatch.setattr("bloomery.durable.try_lock", refused)
    assert when_words(rundir, "skip", dry_run=False) == (
        "The run takes it after its next step, or after the first step of its next start."
    )
    assert status_of("save", str(tmp_path)) == 0
    assert capsys.readouterr().out.endswith(" is armed: the run saves after its present step\n")


def test_a_switch_is_armed_in_the_first_directory_that_takes_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    closed, other = tmp_path / "file" / "control", tmp_path / "other"
    assert _armed("stop", [closed, other]) == other / "stop" and (other / "stop").is_file()
    with pytest.raises(StorageError, match=str(closed / "save")):
        _armed("save", [closed, tmp_path / "file"])
    with pytest.raises(StorageError, match="Not a directory"):
        _armed("save", [closed, tmp_path / ("long" * 100)])


def test_switches_are_disarmed_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir, group = RunDirectory(tmp_path / "run").create(), tmp_path / "group"
    group.mkdir()
    rundir.recipe.write_text(f'{RECIPE}[control]\ndirectory = "{group}"\n')
    run = str(rundir.path)
    assert status_of("stop", run, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"switch": "stop", "armed": f"{rundir.control_dir}/stop"}
    assert status_of("stop", "--at", str(group)) == 0 and (group / "stop").is_file()
    assert f"`bloomery stop --at {group} --disarm`" in capsys.readouterr().out
    assert status_of("save", run, "--disarm") == 0
    assert "save is not armed in" in capsys.readouterr().out and (group / "stop").is_file()
    assert status_of("stop", run, "--disarm", "--json") == 0
    disarmed = json.loads(capsys.readouterr().out)
    assert disarmed == {"switch": "stop", "disarmed": [f"{rundir.control_dir}/stop", f"{group}/stop"]}
    assert not (group / "stop").exists() and not rundir.control("stop").exists()
    assert status_of("stop", run, "--disarm", "--json") == 0
    assert json.loads(capsys.readouterr().out)["disarmed"] == []
    rundir.recipe.write_text("[run\n")  # a run that trains is stopped all the same
    assert status_of("stop", run) == 0 and rundir.control("stop").exists()
    assert f"only {rundir.control_dir} is used" in capsys.readouterr().err
    rundir.control("stop").unlink()
    rundir.recipe.write_text(RECIPE)
    monkeypatch.chdir(group)
    (group / "stop").touch()
    assert status_of("stop", run, "--disarm") == 0 and (group / "stop").exists(), "a file of another name"
    assert status_of("save", run) == 0 and status_of("save", run, "--disarm") == 0
    told = capsys.readouterr().out
    assert f"{rundir.control_dir}/save is disarmed (armed by " in told
    rundir.recipe.unlink()
    rundir.incarnations.rmdir()
    assert status_of("save", run) == 0, "a directory that was only submitted has a place for switches"
    for words in ((), (run, "--at", str(group))):
        assert status_of("stop", *words) == 2
    assert status_of("stop", "--at", str(tmp_path / "none")) == 1 == status_of("stop", str(group))
    (rundir.control("save")).unlink()
    rundir.control("save").mkdir()
    assert status_of("save", run, "--disarm") == 1 and "Disarming the switch" in capsys.readouterr().err
