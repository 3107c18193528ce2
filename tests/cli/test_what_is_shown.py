"""What commands print of checkpoints, scores and texts, value by value."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.in_process import status_of

from bloomery.checkpoint.format.catalogue import Problem, RemoteCopy
from bloomery.cli import ckpt, ckpt_list, evaluate, generate
from bloomery.data.tokenizer import Tokenizer
from bloomery.errors import DataError
from bloomery.evaluate.scoring import DocumentScore
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory

RECEIPT = {
    "time": 0.0,
    "ranks": 3,
    "kept": True,
    "broken": [],
    "settings_changed": False,
    "mixture_changed": False,
    "learning_rate": 0.00012345,
    "loss": 2.5,
    "loss_saved": None,
    "loss_made_before": None,
    "same_bits": None,
    "promised_by": "the save",
}


@pytest.mark.parametrize(
    ("changed", "end"),
    [
        (
            {},
            "on 3 ranks: same next samples, same optimizer state, learning rate 0.0001234, loss 2.5 (the",
        ),
        (
            {"ranks": 1},
            "on 1 rank: same next samples, same optimizer state, learning rate 0.0001234, loss 2.5",
        ),
        ({"loss_saved": 2.75}, "loss 2.5 after 2.75 (the save)"),
        ({"same_bits": True, "loss_saved": 2.75}, "loss 2.5 as when the step was made before (the save)"),
        (
            {"same_bits": False, "loss_made_before": 2.25},
            "loss 2.5, 2.25 when the step was made before (the save)",
        ),
        ({"mixture_changed": True}, "another mixture, same optimizer state"),
        ({"settings_changed": True}, "settings of the learning rate changed, loss 2.5 (the save)"),
        ({"kept": False, "broken": ["the stream", "the state"]}, "REFUSED, the stream; the state"),
    ],
)
def test_a_receipt_is_one_line(changed: dict[str, Any], end: str) -> None:
    assert end in ckpt.receipt_words({**RECEIPT, **changed})


def test_receipts_are_those_of_the_checkpoint_in_its_runs_journal(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path).create()
    with Journal(rundir.journal()) as journal:
        for event, checkpoint in (("receipt", "step-1"), ("receipt", "step-2"), ("save", "step-1")):
            journal.write(event, incarnation=1, step=1, checkpoint=checkpoint)
    source: Any = SimpleNamespace(place=lambda: str(rundir.checkpoints / "step-1"))
    (receipt,) = ckpt.receipts_of(source)
    assert receipt["event"] == "receipt" and receipt["checkpoint"] == "step-1"
    elsewhere: Any = SimpleNamespace(place=lambda: str(tmp_path / "exported" / "step-1"))
    assert ckpt.receipts_of(elsewhere) == []


def test_of_many_problems_and_differences_twenty_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    problems = [Problem(file=f"f{number}", offset=None, text="is torn") for number in range(23)]
    ckpt._print_verdict("here", problems)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "here: damaged" and len(lines) == 22 and lines[-1] == "  and 3 more"
    ckpt._print_verdict("here", problems[:20])
    assert len(capsys.readouterr().out.splitlines()) == 21
    ckpt._print_verdict("here", [])
    assert capsys.readouterr().out == "here: intact\n"
    one: Any = SimpleNamespace(place=lambda: "a")
    other: Any = SimpleNamespace(place=lambda: "b")
    differences = {
        "about": {"step": [1, 2]},
        "only in one": [f"t{number}" for number in range(21)],
        "none": [],
    }
    ckpt._print_differences(one, other, differences, contents=False)
    told = capsys.readouterr().out
    assert "one:   a\nother: b\nabout: 1\n  step  1 → 2\nonly in one: 21\n  t0\n" in told
    assert told.endswith("  t19\n  and 1 more\n") and "none" not in told
    for contents, said in ((True, "nothing differs"), (False, "--contents compares")):
        ckpt._print_differences(one, other, {"about": {}}, contents=contents)
        assert said in capsys.readouterr().out
    assert ckpt.about_words({"first": 3, "count": 4}) == "first 3, count 4" and ckpt.about_words(7) == 7


def test_counts_and_texts_of_the_list_are_short_and_a_whole_copy_is_preferred() -> None:
    counts = [999, 9_999_999_999, 10_000_000_000, 1_234_567_000_000, 10**13]
    shown = [ckpt_list._count_words(count) for count in counts]
    assert shown == ["999", "9,999,999,999", "10.0 B", "1,234.6 B", "10.0 T"]
    assert ckpt_list._shortened("abcd", 4) == "abcd" and ckpt_list._shortened("abcde", 4) == "abc…"

    def copy(url: str, what: str) -> RemoteCopy:
        stand_in: Any = SimpleNamespace(url=url, what=what)
        return stand_in

    weights, whole = copy("s3://a", "model"), copy("s3://b", "all")
    assert ckpt_list._backup([weights, whole]) == {"backup": "s3://b", "backup_what": "all"}
    assert ckpt_list._backup([weights]) == {"backup": "s3://a", "backup_what": "model"}
    assert ckpt_list._backup([]) == {"backup": None, "backup_what": None}
    row = dict.fromkeys(("time", "bytes", "tokens", "loss", "held_out_loss", "backup_what"))
    cells = ckpt_list._cells(
        {**row, "step": 1200, "incarnation": 3, "abandoned": True, "state": "x", "kept": []}
    )
    assert cells == ("1,200", "3", *["-"] * 6, "x", "abandoned")


def test_a_score_is_shown_rounded_and_told_without_what_json_does_not_have() -> None:
    score = DocumentScore(name="a", nats=30.0, tokens=12, bytes=40)
    assert evaluate._cells(score) == ("2.5000", "12.18", f"{30 / math.log(2) / 40:.4f}", "12", "40", "a")
    assert evaluate._facts(score) == {
        "text": "a",
        "loss": 2.5,
        "perplexity": math.exp(2.5),
        "bits_per_byte": 30 / math.log(2) / 40,
        "tokens": 12,
        "bytes": 40,
    }
    bad = DocumentScore(name="b", nats=8000.0, tokens=2, bytes=0)
    facts = evaluate._facts(bad)
    assert facts["loss"] == 4000.0 and facts["perplexity"] is None and facts["bits_per_byte"] is None
    assert evaluate._cells(DocumentScore(name="c", nats=20.0, tokens=1, bytes=9))[1] == "4.85e+08"


def committed(tmp_path: Path, *steps: int) -> list[Any]:
    found = []
    for step in steps:
        directory = tmp_path / f"step-{step:06d}.i001"
        directory.mkdir()
        (directory / "manifest.json").touch()
        found.append(SimpleNamespace(step=step, incarnation=1, name=directory.name, directory=directory))
    return found


def test_the_newest_checkpoint_is_scored_once_and_at_its_distance_or_where_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    listed: list[Any] = []
    monkeypatch.setattr(evaluate, "checkpoints", lambda rundir: listed)
    monkeypatch.setattr(evaluate, "MANIFEST", "manifest.json")

    def following(*, every: int = 20, tasks: str = "a,b") -> str | None:
        given = Namespace(tasks=tasks, every_steps=every, window=None, limit=None, shots=None)
        directory = evaluate._next(rundir, given)
        return directory and directory.name

    assert following() is None
    listed += committed(tmp_path, 10, 30)
    assert following() == "step-000030.i001"
    with Journal(rundir.evaluations) as journal:
        scores = [{"task": "a"}, {"task": "b"}, {"task": "c"}]
        journal.write("tasks", incarnation=1, step=10, checkpoint=listed[0].name, scores=scores)
    assert following(every=20) == "step-000030.i001" and following(every=21) is None
    assert following(every=21, tasks="a,d") == "step-000030.i001", "of other tasks none was scored"
    with Journal(rundir.journal()) as journal:
        journal.write("end", incarnation=1, step=30)
    assert following(every=21) == "step-000030.i001", "no other will come"
    with Journal(rundir.evaluations) as journal:
        journal.write("tasks", incarnation=1, step=30, checkpoint=listed[1].name, scores=scores)
    assert following() is None
    with Journal(rundir.evaluations) as journal:
        for step in (60, 20):
            journal.write("tasks", incarnation=1, step=step, checkpoint=f"step-{step}", scores=scores)
    rundir.journal().unlink()
    listed += committed(tmp_path, 40)
    assert following(every=11) is None, "ten steps after the newest that was scored"
    assert following(every=10) == "step-000040.i001", "step 60 was abandoned"
    listed += committed(tmp_path, 70)
    (listed[-1].directory / "manifest.json").unlink()
    assert following() is None, "it was pruned meanwhile"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--follow",), "--follow wants --tasks"),
        (("text.txt", "--tasks", "a"), "leave the files out"),
        (("--limit", "3"), "--limit wants --tasks"),
        (("--shots", "0"), "--shots wants --tasks"),
        (("--include", "x"), "--include wants --tasks"),
        (("--tasks", ", "), "--tasks names no task"),
    ],
)
def test_options_of_an_evaluation_that_lack_another_are_refused(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("evaluate", "run", *words) == 2 and told in capsys.readouterr().err


class Letters:
    """A tokenizer of bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    decode_after = Tokenizer.decode_after


def test_pieces_are_whole_characters_with_the_number_of_tokens_and_the_end() -> None:
    def pieces(*ids: int) -> list[tuple[str, int, bool]]:
        tokenizer: Any = Letters()
        return list(generate._pieces(iter(ids), [120], tokenizer, {0}))

    assert pieces(97, *"é".encode(), 98) == [
        ("a", 1, False),
        ("é", 3, False),
        ("b", 4, False),
        ("", 4, False),
    ]
    assert pieces(97, 0, 98) == [("a", 1, False), ("", 2, True)]
    assert pieces(*"é".encode()[:1]) == [("\ufffd", 1, False)]
    assert pieces(*"é".encode()[:1], 0) == [("\ufffd", 2, True)]


def test_prompts_are_those_of_the_words_then_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")

    def prompts(*, option: str = "", words: tuple[str, ...] = (), file: str | None = None) -> list[str]:
        path = None if file is None else str(tmp_path / file)
        return generate._prompts(Namespace(option=option, prompt=[*words], prompts=path))

    assert prompts() == [""] and prompts(option="a", words=("b",)) == ["a", "b"]
    assert prompts(words=("b",), file="p.txt") == ["b", "one", "two"]
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DataError, match="holds no prompt"):
        prompts(file="empty.txt")


@pytest.mark.parametrize(
    ("opening", "new", "position", "warned"),
    [(60, 4, "rotary", False), (60, 5, "rotary", True), (60, 9, "learned", False)],
)
def test_a_text_that_grows_beyond_what_was_trained_is_told(
    opening: int, new: int, position: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = SimpleNamespace(max_positions=64, section=SimpleNamespace(position=position))
    recipe = SimpleNamespace(data=SimpleNamespace(sequence_length=32))
    saved: Any = SimpleNamespace(model=model, recipe=recipe)
    generate._warn_if_long(saved, opening, new)
    assert (f"up to {opening + new}, and the model was trained with 64" in capsys.readouterr().err) == warned
    assert status_of("generate", "run", "hi", "--system", "be kind") == 2
    assert "--system wants --chat" in capsys.readouterr().err
