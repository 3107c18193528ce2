"""What each command of `bloomery data` hands on, and every line and figure that it prints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.cli.test_data_options import pair, told

from bloomery.cli import data, data_duplicates, data_pairs
from bloomery.cli.data import run
from bloomery.data.readers import SourceFile
from bloomery.data.stream import DatasetRow
from bloomery.data.tokenize_worker import Job
from bloomery.errors import DataError


def said(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> list[str]:
    """Return the lines that a command prints."""
    capsys.readouterr()
    assert run([*map(str, words)]) == status
    return capsys.readouterr().out.splitlines()


def test_an_inspection_tells_counts_lengths_and_the_first_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = pair(tmp_path / "a", list(range(20)), [5, 6], [7, 8, 9], [1] * 1_000)
    facts = told(capsys, "inspect", prefix, "--peek", 2)
    assert facts == {
        "prefix": str(prefix), "documents": 4, "tokens": 1_025, "dtype": "uint16",
        "lengths": [
            {"from": 2, "below": 4, "documents": 2}, {"from": 4, "below": 8, "documents": 0},
            {"from": 8, "below": 16, "documents": 0}, {"from": 16, "below": 32, "documents": 1},
            {"from": 32, "below": 64, "documents": 0}, {"from": 64, "below": 128, "documents": 0},
            {"from": 128, "below": 256, "documents": 0}, {"from": 256, "below": 512, "documents": 0},
            {"from": 512, "below": 1024, "documents": 1},
        ],
        "peek": [
            {"document": 0, "tokens": 20, "ids": list(range(16))},
            {"document": 1, "tokens": 2, "ids": [5, 6]},
        ],
    }  # fmt: skip
    lines = said(capsys, "inspect", prefix)
    assert lines[:4] + lines[6:7] + lines[12:] == [
        f"{prefix}: 4 documents, 1,025 tokens (uint16)",
        "",
        "tokens per document",
        "           2 to          3          2  " + "█" * 40,
        "          16 to         31          1  " + "█" * 20,
        "",
        f"document 0 (20 tokens): {list(range(16))} (no tokenizer.json to decode with)",
        "",
        "document 1 (2 tokens): [5, 6] (no tokenizer.json to decode with)",
        "",
        "document 2 (3 tokens): [7, 8, 9] (no tokenizer.json to decode with)",
    ]


def test_a_peek_decodes_the_first_64_tokens_with_the_tokenizer_that_was_named_or_lies_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    prefix = pair(tmp_path / "a", [3] * 100)

    def load(path: Path, *, end_of_document: str) -> Any:
        asked.append((path, end_of_document))
        return SimpleNamespace(decode=lambda ids: f"{len(ids)} é", vocabulary_size=4)

    monkeypatch.setattr("bloomery.data.tokenizer.load_tokenizer", load)
    monkeypatch.setattr("bloomery.data.tokenizer.find_tokenizer", lambda name: Path("found") / name)
    (tmp_path / "tokenizer.json").touch()
    assert said(capsys, "inspect", prefix)[-1] == "document 0 (100 tokens): '64 é'"
    words = ["--tokenizer", "t", "--end-of-document", "</s>"]
    assert told(capsys, "verify", prefix, *words)["vocabulary"] == 4
    assert asked == [(tmp_path / "tokenizer.json", "<|endoftext|>"), (Path("found/t"), "</s>")]
    asked.clear()
    assert told(capsys, "verify", prefix, "--vocabulary", 5)["vocabulary"] == 5 and not asked
    assert told(capsys, "verify", prefix)["vocabulary"] == 4


def test_a_check_tells_its_findings_and_what_was_not_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = SimpleNamespace(
        findings=["a byte differs"], skipped=["the ids"], documents=1_234, tokens=56_789, vocabulary_size=7
    )
    monkeypatch.setattr("bloomery.data.pairs.verify_pair", lambda prefix, **given: result)
    assert said(capsys, "verify", tmp_path / "a", status=1) == [
        f"{tmp_path}/a: damaged; 1,234 documents, 56,789 tokens", "  a byte differs",
        "  not checked: the ids",
        "  Copy the pair again from an intact copy, or tokenise its source again.",
    ]  # fmt: skip
    assert told(capsys, "verify", tmp_path / "a", status=1) == {
        "prefix": f"{tmp_path}/a", "ok": False, "findings": ["a byte differs"], "not_looked_at": ["the ids"],
        "documents": 1_234, "tokens": 56_789, "vocabulary": 7,
    }  # fmt: skip
    result.findings = []
    assert said(capsys, "verify", tmp_path / "a")[0] == f"{tmp_path}/a: whole; 1,234 documents, 56,789 tokens"


def test_pairs_and_parts_that_were_joined_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, new = pair(tmp_path / "one", [1, 2, 3]), pair(tmp_path / "other", [4]), tmp_path / "new"
    assert said(capsys, "merge", one, other, "--to", new) == [f"{new}: 2 documents, 4 tokens of 2 pairs"]
    facts = told(capsys, "merge", one, other, "--to", tmp_path / "again")
    assert facts == {
        "prefix": f"{tmp_path}/again", "merged": [str(one), str(other)], "documents": 2, "tokens": 4,
        "dtype": "uint16",
    }  # fmt: skip
    joined = [
        SimpleNamespace(prefix=new, document_count=1_500, token_count=90_000),
        SimpleNamespace(prefix=Path("held"), document_count=3, token_count=40),
    ]
    monkeypatch.setattr(
        "bloomery.data.corpus_parts.join_parts", lambda out, progress: joined if out == new else []
    )
    assert said(capsys, "merge", "--parts", "--to", new) == [
        f"{new}: 1,500 documents, 90,000 tokens", "held: 3 documents, 40 tokens",
        "The parts are still there; what they hold is in the new pair.",
    ]  # fmt: skip
    assert told(capsys, "merge", "--parts", "--to", new) == {
        "datasets": [
            {"prefix": str(new), "documents": 1_500, "tokens": 90_000},
            {"prefix": "held", "documents": 3, "tokens": 40},
        ]
    }


def test_what_was_left_out_as_a_duplicate_is_told_with_its_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(
        documents=8_000, tokens=80_000, removed_equal=2_000, removed_near=3_000, removed_tokens=40_000
    )
    monkeypatch.setattr("bloomery.data.duplicates.deduplicate", lambda *given, **options: done)
    new = tmp_path / "new"
    assert said(capsys, "dedup", "x", "--to", new) == [
        f"{new}: 8,000 documents, 80,000 tokens",
        "left out: 2,000 equal to an earlier document and 3,000 like one, 40,000 tokens; "
        f"{new}-duplicates.jsonl lists them",
    ]
    facts = told(capsys, "dedup", "x", "--to", new)
    assert facts == vars(done) | {"prefix": str(new), "removed_list": f"{new}-duplicates.jsonl"}


def test_held_out_documents_that_are_trained_on_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.data.overlap import Overlap, SharedDocument

    example = SharedDocument(
        held_out="own", held_out_document=1_004, training="other", training_document=2_005, tokens=3_006
    )
    found = Overlap(
        documents={"own": 9_000, "rest": 7}, shared={"own": 1_200, "rest": 0},
        by_training={"own": 0, "other": 1_200}, examples=(example,),
    )  # fmt: skip
    texts: Any = ({"own": 1, "other": 2}, {"own": 3}, None)
    monkeypatch.setattr(data_duplicates, "texts_of", lambda loaded, run: texts)
    monkeypatch.setattr(
        "bloomery.data.overlap.overlap_of",
        lambda training, held_out, progress: found if (training, held_out) == texts[:2] else None,
    )
    loaded: Any = None
    assert data_duplicates.report_overlap(loaded, None, as_json=False) == 1
    assert capsys.readouterr().out.splitlines() == [
        "own: 1,200 of 9,000 held-out documents are in the training text too",
        "rest: 0 of 7 held-out documents are in the training text too",
        "  of them in other: 1,200",
        "  held-out document 1,004 of own is document 2,005 of other (3,006 tokens)",
        "  `bloomery data dedup PREFIX --against HELD-OUT --to NEW` writes training text without them.",
    ]
    assert data_duplicates.report_overlap(loaded, None, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["total"] == 1_200
    found = Overlap(documents={"own": 5}, shared={"own": 0}, by_training={"own": 0}, examples=())
    assert data_duplicates.report_overlap(loaded, None, as_json=False) == 0
    assert capsys.readouterr().out == "own: 0 of 5 held-out documents are in the training text too\n"


ROWS = [
    DatasetRow(name="n" * 31, group="g" * 13, tokens=1_234_567, wanted=0.25, delivered=0.3, epochs=1.25,
               first_epoch_step=12_345),
    DatasetRow(name="m" * 30, group="", tokens=89, wanted=0.75, delivered=0.7, epochs=0.5,
               first_epoch_step=None),
]  # fmt: skip


def test_a_table_of_datasets_cuts_long_names_and_has_groups_only_where_there_are_some() -> None:
    lines = [line.split() for line in data_pairs._table(ROWS, first="dataset").split("\n")]
    assert [*lines[:2], *lines[3:]] == [
        ["first", "epoch"],
        ["dataset", "group", "tokens", "wanted", "delivered", "epochs", "ends"],
        ["n" * 29 + "…", "g" * 11 + "…", "1,234,567", "25.0000%", "30.0000%", "1.250", "step", "12,345"],
        ["m" * 30, "89", "75.0000%", "70.0000%", "0.500", "-"],
    ]
    assert data_pairs._table(ROWS[1:], first="group").split("\n")[0].split()[:2] == ["group", "tokens"]


TEXT = SourceFile(key="a.txt", path=Path("a.txt"))


def tokenizing(monkeypatch: pytest.MonkeyPatch, done: Any) -> list[Any]:
    """Replace what finds files and tokenises them; returns with what it was called."""
    asked: list[Any] = []

    def tokenize(files: Any, out: Path, job: Job, *, report: Path, progress: Any, **options: Any) -> Any:
        report.touch()
        asked.append((files, out, job, report, options))
        return done

    found = SimpleNamespace(files=[TEXT], ignored=True, note=lambda: "2 files were left out")
    monkeypatch.setattr("bloomery.data.sources.find_files", lambda sources: found)
    monkeypatch.setattr("bloomery.data.tokenizer.find_tokenizer", lambda name: f"found/{name}")
    monkeypatch.setattr("bloomery.data.tokenize_corpus.tokenize", tokenize)
    monkeypatch.setattr("time.monotonic", iter(range(100, 1_000, 4)).__next__)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    return asked


def done_with(**changed: Any) -> Any:
    bad = SimpleNamespace(count=changed.pop("bad", 0), summary=lambda: "3 documents skipped")
    pairs = [SimpleNamespace(prefix=Path("own"), documents=1_500, tokens=2_000_000)]
    pairs.append(SimpleNamespace(prefix=Path("own-held-out"), documents=5, tokens=500_000))
    given = {"pairs": pairs, "dtype": "uint16", "text_bytes": 10_000_000, "bad": bad, "engines": ["fast"],
             "notes": ["A note."], "pieces": 8, "pieces_kept": 0}  # fmt: skip
    return SimpleNamespace(**given | changed)


def test_tokenising_gets_its_options_and_tells_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tokenizing(monkeypatch, done_with())
    own = tmp_path / "own"
    given = ["tokenize", "x", "--tokenizer", "t", "--to", own]
    assert said(capsys, *given, "--workers", 3) == [
        "own: 1,500 documents, 2,000,000 tokens",
        "own-held-out: 5 documents, 500,000 tokens",
        "10.0 MB in 4.0 s (2.5 MB/s, fast, 3 at work), 4.00 bytes per token",
        "A note.",
    ]
    job = Job(
        directory="", tokenizer="found/t", end_of_document="<|endoftext|>", text_field="text", separator="",
        longest_line_mib=data.LONGEST_LINE_MIB, fail=False, held_out_every=0, fast=True,
    )  # fmt: skip
    report = Path(f"{own}-bad-documents.jsonl")
    assert asked.pop() == ([TEXT], own, job, report, {"workers": 3, "part": None})
    assert not report.exists(), "it would be empty"
    assert os.environ["RAYON_NUM_THREADS"] == "3"
    words = ["--text-field", "body", "--separator", "==", "--bad-documents", "fail", "--longest-line-mib", 9,
             "--held-out-every", 7, "--end-of-document", "</s>", "--engine", "reference"]  # fmt: skip
    facts = told(capsys, *given, "--workers", 2, "--part", "3/16", *words)
    part = tmp_path / "own-part-03-of-16"
    assert asked[0][2:4] == (
        Job(directory="", tokenizer="found/t", end_of_document="</s>", text_field="body", separator="==",
            longest_line_mib=9, fail=True, held_out_every=7, fast=False),
        Path(f"{part}-bad-documents.jsonl"),
    )  # fmt: skip
    assert facts == {
        "datasets": [{"prefix": "own", "documents": 1_500, "tokens": 2_000_000},
                     {"prefix": "own-held-out", "documents": 5, "tokens": 500_000}],
        "part": 3, "parts": 16, "dtype": "uint16", "text_bytes": 10_000_000, "bad_documents": 0,
        "bad_documents_report": None, "engines": ["fast"], "notes": ["A note."], "workers": 2, "pieces": 8,
        "pieces_kept": 0, "seconds": 4,
    }  # fmt: skip


def test_tokenising_tells_pieces_that_were_kept_and_bad_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = [SimpleNamespace(prefix=Path("own"), documents=0, tokens=0)]
    made = done_with(bad=3, pieces_kept=5, notes=[], engines=["fast", "reference"], pairs=empty)
    tokenizing(monkeypatch, made)
    monkeypatch.setenv("RAYON_NUM_THREADS", "9")
    given = ["tokenize", "x", "--tokenizer", "t", "--to", tmp_path / "own", "--workers", 1]
    report = f"{tmp_path}/own-bad-documents.jsonl"
    assert run([*map(str, given)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "own: 0 documents, 0 tokens",
        "10.0 MB in 4.0 s (2.5 MB/s, fast and reference, 1 at work)",
        "5 of 8 pieces were kept from an earlier start.",
        f"3 documents skipped; all are listed in {report}",
    ]
    assert shown.err == "2 files were left out\n" and Path(report).exists()
    assert os.environ["RAYON_NUM_THREADS"] == "9", "who has set it knows why"
    facts = told(capsys, *given)
    assert (facts["bad_documents"], facts["bad_documents_report"]) == (3, report) and "part" not in facts


def test_a_tokenizer_is_trained_on_what_is_not_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out, trained = tmp_path / "own.jsonl", tmp_path / "t.json", list[Any]()
    text.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(40)) + "{}\n")

    def train(texts: Any, **options: Any) -> Any:
        trained.append(([*texts], options))
        return SimpleNamespace(vocabulary_size=1_300, eod=9, save=lambda path: path.touch())

    monkeypatch.setattr("bloomery.data.tokenizer.train_tokenizer", train)
    monkeypatch.setattr("time.monotonic", iter(np.arange(100.0, 200.0, 1.5)).__next__)
    lines = said(capsys, "tokenizer", text, "--to", out, "--vocabulary", 2_000)
    assert lines[:2] == [
        f"{out}: vocabulary 1,300 in 1.5 s",
        "2,000 entries were asked for; this text does not give more.",
    ]
    assert len(lines) == 3 and lines[2].startswith("1 document skipped: 1 without the field. The first: ")
    options = {"vocabulary": 2_000, "end_of_document": "<|endoftext|>", "split": "text"}
    assert trained[0] == ([f"text {number}" for number in range(40)], options) and out.exists()
    words = ["--vocabulary", 1_300, "--split", "code", "--end-of-document", "</s>", "--held-out-every", 2]
    assert told(capsys, "tokenizer", text, "--to", out, *words) == {
        "tokenizer": str(out), "vocabulary": 1_300, "vocabulary_asked": 1_300, "end_of_document_id": 9,
        "bad_documents": 1, "seconds": 1.5,
    }  # fmt: skip
    assert trained[1][1] == {"vocabulary": 1_300, "end_of_document": "</s>", "split": "code"}
    assert 0 < len(trained[1][0]) < 40 and {*trained[1][0]} < {*trained[0][0]}
    text.write_text("{}\n")
    with pytest.raises(DataError, match=r"train a tokenizer on\. 1 document skipped"):
        run(["tokenizer", str(text), "--to", str(tmp_path / "none.json")])
    assert not (tmp_path / "none.json").exists()


def test_a_tokenizer_is_trained_on_the_field_the_parts_and_the_lines_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[str]] = []

    def train(texts: Any, **options: Any) -> Any:
        trained.append([*texts])
        return SimpleNamespace(vocabulary_size=1_300, eod=9, save=lambda path: None)

    monkeypatch.setattr("bloomery.data.tokenizer.train_tokenizer", train)
    texts, out = tmp_path / "texts", tmp_path / "t.json"
    texts.mkdir()
    (texts / "a.txt").write_text("one==two")
    (texts / "b.jsonl").write_text(json.dumps({"body": "three", "text": "x" * 1_100_000}) + "\n")
    (texts / "c.png").touch()
    given = ["tokenizer", texts, "--to", out, "--separator", "==", "--text-field", "body"]
    assert run([*map(str, given)]) == 0
    assert trained.pop() == ["one", "two", "three"]
    assert "c.png" in capsys.readouterr().err
    assert told(capsys, *given, "--longest-line-mib", 1)["bad_documents"] == 1
    assert trained.pop() == ["one", "two"]
    with pytest.raises(DataError, match=r"b\.jsonl"):
        run([*map(str, given), "--longest-line-mib", "1", "--bad-documents", "fail"])
