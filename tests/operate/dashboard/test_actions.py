"""What the page's buttons do to a run: samples are skipped, nodes excluded, and the rest is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import BloomeryError
from bloomery.events.journal import read_journal
from bloomery.operate.dashboard import actions
from bloomery.operate.dashboard.actions import ActionRequest, carry_out
from bloomery.operate.schedulers.interface import SchedulerError
from bloomery.operate.submission import keep_submission, submission_of


@pytest.mark.parametrize(
    ("what", "kept"),
    [
        ("400:480", "400:480\n"),
        ("1,000:2_000", "1000:2000\n"),
        ("5:5", ""),
        ("5", ""),
        ("-5:9", ""),
        ("a:9", ""),
    ],
)
def test_samples_are_skipped_where_their_numbers_are_some(run: WrittenRun, what: str, kept: str) -> None:
    request = ActionRequest(run=0, action="skip", what=what, why="a\nspike " * 99)
    if not kept:
        with pytest.raises(BloomeryError, match="FIRST:END") as refused:
            carry_out(run.rundir, request, by="ann")
        assert "Give sample numbers" in refused.value.remedy
        assert not run.rundir.operations.exists() and not run.rundir.control("skip").exists()
        return
    answer = carry_out(run.rundir, request, by="ann")
    first, end = map(int, kept.split(":"))
    assert f"{first:,} to {end - 1:,}" in answer and run.rundir.control("skip").read_text() == kept
    (record,) = read_journal(run.rundir.operations)
    assert (record["event"], record["action"], record["by"], record["what"]) == (
        "request",
        "skip",
        "ann",
        what,
    )
    assert record["why"].startswith("a spike a spike") and len(record["why"]) == 300


def test_an_action_that_nobody_knows_and_one_of_no_run_are_refused(run: WrittenRun, tmp_path: Path) -> None:
    for rundir, action, advice in (
        (run.rundir, "rm", "There are save, stop, skip, exclude."),
        (type(run.rundir)(tmp_path / "none"), "save", "Look at the messages"),
    ):
        with pytest.raises(BloomeryError) as refused:
            carry_out(rundir, ActionRequest(run=0, action=action), by="ann")
        assert advice in refused.value.remedy
    assert not run.rundir.operations.exists()


@pytest.mark.parametrize("name", ["", "a b", "n1;rm", "n1\n", "../x"])
def test_only_the_name_of_a_node_is_excluded(run: WrittenRun, name: str) -> None:
    request = ActionRequest(run=0, action="exclude", what=name)
    if name.strip() == "n1":
        assert "n1 takes no further job" in carry_out(run.rundir, request, by="ann")
        return
    with pytest.raises(BloomeryError, match="is not the name of a node") as refused:
        carry_out(run.rundir, request, by="ann")
    assert "Give its host name" in refused.value.remedy
    assert not (run.rundir.path / "exclusions.json").exists()


def test_a_node_is_excluded_where_the_queue_cannot_be_told(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*, name: str, run: Path) -> None:
        raise SchedulerError("SLURM has not answered squeue for 60 s.", remedy="Wait.")

    run.rundir.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    keep_submission(run.rundir, submission_of("demo", [], nproc=None))
    monkeypatch.setattr(actions, "scheduler_of", lambda section, path: SimpleNamespace(jobs=silent))
    answer = carry_out(run.rundir, ActionRequest(run=0, action="exclude", what="n1"), by="ann")
    assert answer == (
        "n1 takes no further job of this run; the queue could not be told: "
        "SLURM has not answered squeue for 60 s."
    )
    assert [event["what"] for event in read_journal(run.rundir.operations)] == ["n1"]
