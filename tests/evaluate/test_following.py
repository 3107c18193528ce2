"""Following a training with tasks: when there is nothing more to wait for."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_streamed
from bloomery.cli import evaluate
from bloomery.cli.evaluate import _has_ended, _next, _of_dataset, _print
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.tokenizer import train_tokenizer
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("events", "ended"),
    [
        ([("start", {})], False),
        ([("start", {}), ("end", {"finished": False})], False),
        ([("start", {}), ("end", {"finished": True})], True),
        ([("start", {}), ("end", {"finished": True}), ("start", {})], False),
    ],
)
def test_a_job_that_was_stopped_is_not_the_end_of_the_run(
    tmp_path: Path, events: list[tuple[str, dict[str, bool]]], ended: bool
) -> None:
    rundir = RunDirectory(tmp_path).create()
    with Journal(rundir.journal()) as journal:
        for name, fields in events:
            journal.write(name, incarnation=1, step=0, **fields)
    assert _has_ended(rundir) is ended


def test_a_checkpoint_that_was_scored_once_is_printed_and_the_command_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {
        "step": 8,
        "checkpoint": "step-000008.i001",
        "scores": [{"task": "words", "samples": 3, "acc": 0.5}],
    }
    monkeypatch.setattr(evaluate, "_score", lambda options, path: record)
    assert evaluate.score_once(Namespace(json=False, path=Path("run"))) == 0
    assert "step-000008.i001" in capsys.readouterr().out


def test_a_checkpoint_whose_scores_have_the_names_of_the_tasks_of_a_group_counts_as_scored(
    tmp_path: Path,
) -> None:
    rundir = RunDirectory(tmp_path).create()
    save_streamed(rundir.checkpoints, [whole("model.weight", torch.ones(4))], step=5, incarnation=1)
    asked = Namespace(tasks="ai2_arc, words,", every_steps=1, window=None, limit=None, shots=None)
    newest = rundir.checkpoints / "step-000005.i001"
    for tasks, names in ((None, "easy hard"), (["ai2_arc"], "easy hard"), (["words"], "words")):
        assert _next(rundir, asked) == newest
        more = {} if tasks is None else {"tasks": tasks}  # earlier versions wrote none
        scores = [{"task": name, "samples": 1} for name in names.split()]
        with Journal(rundir.evaluations) as journal:
            journal.write("tasks", incarnation=1, step=5, checkpoint=newest.name, scores=scores, **more)
    together = [{"task": name, "samples": 1} for name in ("easy", "hard", "words")]
    with Journal(rundir.evaluations) as journal:
        fields = {"checkpoint": newest.name, "scores": together, "tasks": ["ai2_arc", "words"]}
        journal.write("tasks", incarnation=1, step=5, **fields)
    assert _next(rundir, asked) is None


def test_a_table_of_scores_has_the_metrics_without_their_standard_errors(capsys: pytest.CaptureFixture[str]):
    score = {"task": "words", "samples": 3, "acc": 0.5, "acc_stderr": 0.25}
    _print([{"step": 1200, "checkpoint": "step-001200.i001", "scores": [score]}], Namespace(json=False))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "words" in line]
    assert row.split() == ["1,200", "step-001200.i001", "words", "3", "acc", "0.5"]


def test_a_held_out_document_is_scored_without_the_token_that_ends_it(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["to be or not to be"] * 9, vocabulary=270, end_of_document="<end>")
    words = tokenizer.encode("to be")
    with IndexedWriter(tmp_path / "kept", dtype="<u2") as writer:
        writer.add_document([*words, tokenizer.eod])
        writer.add_document(words)
        writer.add_document([])
    loaded = SimpleNamespace(saved=SimpleNamespace(tokenizer=tokenizer))
    found = list(_of_dataset("kept", IndexedDataset(tmp_path / "kept"), loaded))
    assert [(list(each.tokens), each.size) for each in found] == [(words, 5), (words, 5), ([], 0)]
