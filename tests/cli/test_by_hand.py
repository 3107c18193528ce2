"""`bloomery skip` and `bloomery rewind`: what they say, what they write, and what the run does with it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.train.test_loop import Start, events, go

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.suspects import mark_suspects
from bloomery.cli import main
from bloomery.cli.control import cursor_after
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import StorageError
from bloomery.events.history import past_steps
from bloomery.events.incarnation import identity
from bloomery.events.run_directory import RunDirectory

SETTINGS = ("train.samples=0", "train.steps=12", "train.ramp_up=[]", "checkpoint.every_steps=3")


@pytest.fixture
def stopped(start: Start):
    """A run that stopped after eight steps of eight samples, with checkpoints at 3, 6 and 8."""
    loaded, path = start(*SETTINGS, "guard.stop_at_step=8")
    go(loaded, path)
    return path


def told(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_dry_run_says_what_would_be_lost_and_asks_for_nothing(stopped, capsys):
    facts = told(capsys, "rewind", str(stopped), "--to-step", "7", "--dry-run")
    undone = [record for record in events(stopped, "step") if record["step"] > 6]
    assert facts["checkpoint"] == "step-000006.i001" and facts["asked"] is False
    assert (facts["steps"], facts["samples"], facts["last_step"]) == (2, 16, 8)
    assert facts["seconds"] == pytest.approx(sum(record["seconds"] for record in undone), abs=1e-3)
    facts = told(capsys, "skip", str(stopped), "--samples", "40:80", "--dry-run")
    assert (facts["left_out"], facts["used_already"], facts["steps_worth"]) == (16, 24, 2.0)
    assert list(RunDirectory(stopped).control_dir.iterdir()) == []
    assert main(["rewind", str(stopped), "--to-step", "7", "--steps", "7:9", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "From step-000006.i001: 2 steps, 16 samples" in out and "this was a dry run" in out
    assert "Samples 48 to 63 of the stream: 16 are left out, 2.0 steps' worth." in out


def test_a_run_goes_back_and_leaves_out_what_was_asked_for(stopped, start: Start, capsys):
    assert main(["rewind", str(stopped), "--to-step", "7", "--steps", "7:9"]) == 0
    assert "its next start takes this after its first step" in capsys.readouterr().out
    go(*start(*SETTINGS))
    (rewind,) = events(stopped, "rewind")
    assert (rewind["step"], rewind["to_step"], rewind["skip"]) == (9, 7, [48, 64])
    assert "by hand" in rewind["reason"] and rewind["rung"] == "watch"
    steps = [record for record in events(stopped, "step") if record["incarnation"] == 3]
    assert [record["step"] for record in steps] == list(range(7, 13))
    assert [record["cursor"] - record["consumed_samples"] for record in steps] == [16] * 6
    assert not RunDirectory(stopped).control("rewind").exists()


def test_steps_to_come_of_several_peers_take_the_samples_of_all(stopped):
    past = past_steps(RunDirectory(stopped), reaching=(7,))
    assert cursor_after(10, past) == 80
    assert past.newest is not None
    shared = replace(past, newest=replace(past.newest, peers=3))
    assert cursor_after(10, shared) == 64 + 2 * 8 * 3 and cursor_after(7, shared) == 56


def test_requests_to_skip_add_up(stopped, start: Start):
    assert main(["skip", str(stopped), "--samples", "80:88"]) == 0
    assert main(["skip", str(stopped), "--steps", "13:14"]) == 0
    assert RunDirectory(stopped).control("skip").read_text() == "80:88\n96:104\n"
    go(*start(*SETTINGS))
    assert [record["skips"] for record in events(stopped, "skip")] == [[[80, 88]], [[80, 88], [96, 104]]]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["rewind", "--to-step", "2"], "no checkpoint at or before step 2 (there are: 3, 6, 8)"),
        (["skip", "--samples", "9:9"], "is not FIRST:END with FIRST below END"),
        (["skip"], "one of the arguments --samples --steps is required"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_message(stopped, capsys, words, why):
    try:
        status = main([words[0], str(stopped), *words[1:]])
    except SystemExit as ended:
        status = ended.code
    assert status != 0 and why in capsys.readouterr().err


def test_a_fork_goes_on_from_a_checkpoint_of_a_run_that_goes_on_too(stopped, start: Start, capsys):
    fork = stopped.parent / "fork"
    facts = told(capsys, "fork", str(stopped), str(fork), "--to-step", "7")
    assert (facts["checkpoint"], facts["name"]) == ("step-000006.i001", "fork")
    recipe = str(RunDirectory(fork).recipe)
    slow = load_recipe(recipe, ["guard.stop_at_step=0", "optim.learning_rate=1e-5"])
    go(slow, fork)
    go(*start(*SETTINGS))
    own, theirs = events(fork, "step"), events(stopped, "step")
    losses = {record["step"]: record["loss"] for record in theirs}
    assert [record["step"] for record in own] == list(range(7, 13)), "the fork's own steps alone"
    assert own[0]["loss"] == losses[7] and own[0]["cursor"] == theirs[6]["cursor"], (
        "the same state and samples"
    )
    assert own[-1]["loss"] != losses[12], "another learning rate"
    assert losses.keys() == set(range(1, 13)), "the first run went on as if there were no fork"
    assert str(stopped) in chronicle(fork) and str(fork) in chronicle(stopped)
    assert identity(RunDirectory(fork)) != identity(RunDirectory(stopped)), (
        "no backup takes one for the other"
    )


def test_a_fork_does_not_sync_to_the_place_of_the_first_run(stopped, capsys):
    recipe = RunDirectory(stopped).recipe
    synced = load_recipe(str(recipe), [f"sync.place='{stopped.parent.as_uri()}/synced'"])
    recipe.write_text(dump_recipe(synced.recipe))
    before = os.umask(0o027)
    try:
        told(capsys, "fork", str(stopped), str(stopped.parent / "not synced"))
    finally:
        os.umask(before)
    assert (stopped.parent / "not synced").stat().st_mode & 0o777 == 0o750, "for those who may read a run"
    forked = load_recipe(str(RunDirectory(stopped.parent / "not synced").recipe)).recipe
    assert forked.run.name == "not-synced"
    assert load_recipe(str(recipe)).recipe.sync.place and forked.sync.place == ""


def test_a_fork_is_refused_where_nothing_or_something_is(stopped, capsys):
    for words, said in (
        ((str(stopped / "new"), "--to-step", "2"), "no checkpoint at or before step 2 (there are: 3, 6, 8)"),
        ((str(stopped),), "is there already"),
        ((str(stopped / "new"),), "lies in the run itself"),
    ):
        assert main(["fork", str(stopped), *words]) != 0
        assert said in capsys.readouterr().err
    assert not (stopped / "new").exists()


def test_a_rewind_is_forecast_where_the_journal_is_lost(stopped, capsys):
    for journal in (stopped / "journal").iterdir():
        journal.write_bytes(b"\xff\x00" * 1000)
    assert main(["rewind", str(stopped), "--to-step", "7", "--dry-run"]) == 0
    assert "step-000006" in capsys.readouterr().out


def test_a_fork_of_a_checkpoint_that_was_cut_short_is_refused(stopped, capsys):
    (weights,) = (stopped / "checkpoints" / "step-000008.i001").glob("model-*")
    os.truncate(weights, 100)
    assert main(["fork", str(stopped), str(stopped.parent / "cut")]) == 1
    assert "is damaged: it has 100 bytes" in capsys.readouterr().err
    assert not (stopped.parent / "cut").exists()


def test_a_fork_of_a_run_that_others_may_not_write_is_made_and_says_what_it_could_not_note(
    stopped, capsys, monkeypatch
):
    def add_note(rundir: RunDirectory, text: str) -> None:
        if rundir.path == stopped:
            raise StorageError("Opening the journal failed", remedy="")

    monkeypatch.setattr("bloomery.operate.ledger.chronicle.add_note", add_note)
    assert main(["fork", str(stopped), str(stopped.parent / "of-a-colleague")]) == 0
    said = capsys.readouterr()
    assert "of-a-colleague begins at step 8" in said.out
    assert f"note: {stopped} does not note the fork: Opening the journal failed" in said.err


def chronicle(path: Path) -> str:
    assert main(["note", str(path)]) == 0
    return RunDirectory(path).chronicle.read_text().replace("\\", "")


def test_a_rewind_passes_over_suspect_checkpoints_as_the_run_does(stopped, capsys):
    rundir = RunDirectory(stopped)
    assert len(mark_suspects(rundir, checkpoints(rundir), clean_step=5, why="other bits")) == 2
    assert told(capsys, "rewind", str(stopped), "--to-step", "7", "--dry-run")["to_step"] == 3
