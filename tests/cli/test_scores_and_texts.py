"""In which windows tasks are scored, what is refused before it takes hours, and how texts are decoded."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_what_models_tell import Drawn, args, scoring  # noqa: F401

from bloomery.cli import evaluate, generate
from bloomery.errors import StorageError
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory

Scoring = tuple[RunDirectory, list[Any]]


def test_tasks_are_scored_in_the_window_that_was_asked_for_which_is_on_record(
    scoring: Scoring,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rundir, asked = scoring
    monkeypatch.setattr(evaluate, "_window", lambda given, saved: given.window)
    evaluate.score_once(args(rundir.path, window=96))
    (record,) = read_journal(rundir.evaluations)
    assert asked[-1][1]["window"] == 96 == record["window"]


def test_a_run_that_takes_no_scores_is_told_before_they_are_measured(scoring: Scoring) -> None:  # noqa: F811
    rundir, asked = scoring
    rundir.evaluations.mkdir()
    with pytest.raises(StorageError, match=r"evaluations\.jsonl: Is a directory"):
        evaluate.score_once(args(rundir.path))
    assert [what for what in asked if what == "refuse" or what[0] == ["a", "b"]] == ["refuse"]


def test_scores_of_a_checkpoint_that_its_run_does_not_list_have_no_step(
    scoring: Scoring,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rundir, _ = scoring
    monkeypatch.setattr(evaluate, "checkpoints", lambda rundir: [])
    evaluate.score_once(args(rundir.path))
    (record,) = read_journal(rundir.evaluations)
    assert (record["step"], record["incarnation"]) == (0, 0) and record["checkpoint"] == "step-000030.i002"


def test_documents_of_a_text_file_are_divided_where_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one==three")
    tokenizer = SimpleNamespace(encode=lambda text: [len(text)])
    loaded: Any = SimpleNamespace(saved=SimpleNamespace(tokenizer=tokenizer))
    given = Namespace(text_field="text", separator="==")
    found = list(evaluate._documents(given, tmp_path / "a.txt", loaded))
    assert [document.tokens for document in found] == [[3], [5]]


def test_a_piece_of_a_text_is_decoded_after_all_tokens_before_it() -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def decode_after(ids: list[int], *, before: list[int]) -> str:
        asked.append(([*before], [*ids]))
        return "\ufffd" if ids == [195] else "x"

    tokenizer: Any = SimpleNamespace(decode_after=decode_after)
    pieces = [*generate._pieces(iter([97, 195, 169, 0]), [120], tokenizer, {0})]
    assert pieces == [("x", 1, False), ("x", 3, False), ("x", 4, True)]
    assert asked == [
        ([120], [97]), ([120, 97], [195]), ([120, 97], [195, 169]), ([120, 97, 195, 169], []),
    ]  # fmt: skip


def test_texts_of_several_prompts_are_decoded_after_their_own_openings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = SimpleNamespace(generate_together=lambda *given, **options: iter([(1, 2), (0, 3)]))
    monkeypatch.setitem(sys.modules, "bloomery.evaluate.generate", drawn)  # type: ignore[arg-type]
    tokenizer = SimpleNamespace(decode_after=lambda ids, *, before: f"{ids} after {before}")
    saved: Any = SimpleNamespace(tokenizer=tokenizer, bounds=SimpleNamespace(ends={0}))
    options = Namespace(json=False, chat=False, max_tokens=9)
    decoder, sampling = "decoder", Drawn(seed=7)
    generate._write_together(
        options, ["A ", "B "], [[120], [121]], saved, decoder, sampling, first=0  # type: ignore[arg-type]
    )  # fmt: skip
    assert capsys.readouterr().out == "A [1] after [120]\n\nB [2, 3] after [121]\n"


def test_a_checkpoint_that_is_saved_just_before_its_run_ends_is_scored(
    scoring: Scoring,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rundir, _ = scoring
    looks, scored = list[str](), list[Path]()

    def has_ended(rundir: RunDirectory) -> bool:
        looks.append("end")
        return len(looks) > 1

    def newest(rundir: RunDirectory, given: Namespace) -> Path | None:
        looks.append("checkpoint")
        return rundir.checkpoints if len(looks) > 1 and not scored else None

    monkeypatch.setattr(evaluate, "_has_ended", has_ended)
    monkeypatch.setattr(evaluate, "_next", newest)
    monkeypatch.setattr(evaluate, "_score", lambda given, directory: scored.append(directory) or {})
    monkeypatch.setattr(evaluate, "_print", lambda records, given: None)
    assert evaluate.follow(args(rundir.path)) == 0
    assert scored == [rundir.checkpoints]
