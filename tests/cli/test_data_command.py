"""`bloomery data`: the steps of preparing, one by one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from bloomery.cli.data import run
from bloomery.data.indexed import IndexedDataset
from bloomery.data.sources import is_held_out
from bloomery.data.tokenizer import load_tokenizer
from bloomery.errors import DataError

EOD = "<|endoftext|>"
TEXTS = [f"line {number}: to be or not to be, {number**3}\n" for number in range(30)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS) + "{}\n")
    return path


@pytest.fixture
def tokenizer(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "made" / "tokenizer.json"
    path.parent.mkdir()
    assert (
        run(["tokenizer", str(text), "--text-field", "body", "--vocabulary", "270", "--out", str(path)]) == 0
    )
    assert "vocabulary 270" in capsys.readouterr().out
    return path


def test_text_becomes_a_dataset_that_decodes_to_it(
    text: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tokenizer.parent / "own"
    arguments = [
        "tokenize",
        str(text),
        "--text-field",
        "body",
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(prefix),
    ]
    assert run([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    dataset, engine = IndexedDataset(prefix), load_tokenizer(tokenizer, end_of_document=EOD)
    decoded = [engine.decode(dataset.document(number).tolist()) for number in range(dataset.document_count)]
    assert decoded == [text + EOD for text in TEXTS]
    assert facts["datasets"] == [{"prefix": str(prefix), "documents": 30, "tokens": dataset.token_count}]
    assert facts["text_bytes"] == sum(map(len, TEXTS)) and facts["bad_documents"] == 1
    report = Path(facts["bad_documents_report"]).read_text()
    assert json.loads(report)["line"] == 31

    assert run([*arguments, "--held-out-every", "3"]) == 0
    said = capsys.readouterr().out
    kept = IndexedDataset(prefix.with_name("own-held-out"))
    keys = [hashlib.sha256(text.encode()).hexdigest() for text in TEXTS]
    assert kept.document_count == sum(is_held_out(key, one_in=3) for key in keys) > 0
    assert kept.document_count + IndexedDataset(prefix).document_count == 30
    assert "1 document skipped: 1 without the field" in said and f"{kept.token_count:,} tokens" in said


def test_what_tokenising_writes_beside_its_text_is_no_text_of_a_later_start(
    text: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(text.parent)
    Path("own.parts").mkdir()
    Path("own.parts", "000000-bad.jsonl").write_text('[0, "of an interrupted start"]\n')
    Path("own-part-2-of-3-bad-documents.jsonl").write_text('{"why": "of another machine"}\n')
    Path("other-bad-documents.jsonl").write_text('{"body": "text"}\n')
    words = ["tokenize", ".", "--text-field", "body", "--tokenizer", str(tokenizer), "--to", "own", "--json"]
    for _ in range(2):
        assert run(words) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["datasets"][0]["documents"], facts["bad_documents"]) == (31, 1)


def test_inspect_shows_counts_lengths_and_a_peek(
    text: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tokenizer.parent / "own"
    run(["tokenize", str(text), "--text-field", "body", "--tokenizer", str(tokenizer), "--out", str(prefix)])
    capsys.readouterr()
    assert run(["inspect", str(prefix), "--json", "--peek", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    dataset = IndexedDataset(prefix)
    assert (facts["documents"], facts["tokens"], facts["dtype"]) == (30, dataset.token_count, "uint16")
    assert sum(row["documents"] for row in facts["lengths"]) == 30
    assert [peek["text"] for peek in facts["peek"]] == [text + EOD for text in TEXTS[:2]]
    assert run(["inspect", str(prefix), "--peek", "1"]) == 0
    said = capsys.readouterr().out
    assert "30 documents" in said and repr(TEXTS[0] + EOD) in said and "█" in said
    tokenizer.unlink()
    run(["inspect", str(prefix)])
    assert "no tokenizer.json" in capsys.readouterr().out


def test_what_cannot_be_done_is_said_with_a_remedy(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    missing, out = str(tmp_path / "none"), str(tmp_path / "out")
    for arguments in (
        ["tokenizer", missing, "--out", out],
        ["tokenize", str(text), "--tokenizer", missing, "--out", out],
        ["tokenize", str(text), "--tokenizer", str(tokenizer), "--out", out],  # no field 'text' anywhere
        ["tokenize", str(text), "--tokenizer", str(tokenizer), "--out", out, "--bad-documents", "fail"],
        ["inspect", missing],
    ):
        with pytest.raises(DataError) as refused:
            run(arguments)
        assert refused.value.remedy
    assert not (tmp_path / "out.bin").exists()
    with pytest.raises(SystemExit) as usage:
        run(["tokenize"])
    assert usage.value.code == 2


def test_a_part_that_gets_no_document_is_a_part_and_the_parts_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.txt").write_text(TEXTS[number])
    tokenizer = tmp_path / "tokenizer.json"
    assert run(["tokenizer", str(folder), "--vocabulary", "260", "--to", str(tokenizer)]) == 0
    whole = ["tokenize", str(folder), "--tokenizer", str(tokenizer), "--held-out-every", "0"]
    for part in range(1, 9):
        assert run([*whole, "--to", str(tmp_path / "own"), "--part", f"{part}/8"]) == 0
    assert "0 documents, 0 tokens" in capsys.readouterr().out
    assert run(["merge", "--parts", "--to", str(tmp_path / "own")]) == 0
    assert run([*whole, "--to", str(tmp_path / "at-once")]) == 0
    assert (tmp_path / "own.bin").read_bytes() == (tmp_path / "at-once.bin").read_bytes()


def test_half_of_what_was_to_be_fetched_is_no_corpus(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "fetched"
    source.mkdir()
    for number in range(4):
        (source / f"{number}.jsonl").write_bytes(text.read_bytes())
    assert run(["fetch", f"own={source}", "--to", str(target)]) == 0
    to = ["--text-field", "body", "--to", str(tmp_path / "out")]
    assert run(["tokenize", str(target), "--tokenizer", str(tokenizer), *to]) == 0
    (target / "own" / "2.jsonl").unlink()
    tokenising = ["tokenize", str(target / "own"), "--tokenizer", str(tokenizer), *to]
    for arguments in (tokenising, ["tokenizer", str(target), *to]):
        with pytest.raises(DataError, match="3 of the 4 files"):
            run(arguments)
