"""Losses of documents are those of whole forward passes, however they are cut and batched."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.train.test_loop import Start, go

from bloomery.cli import main
from bloomery.config.model import ModelSection
from bloomery.data_loader.batches import MicroBatch
from bloomery.evaluate import scoring
from bloomery.evaluate.scoring import (
    DocumentScore,
    ScoredTokens,
    TokenizedDocument,
    compress,
    entropy,
    score_documents,
    score_tokens,
    total_score,
)
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.model.decoder import Decoder, build
from bloomery.model.initial_filling import initialise
from bloomery.model.loss import IGNORED

END = 29


def small(seed: int = 4) -> Decoder:
    section = ModelSection(layers=2, hidden=16, heads=2, ffn=24, init_std=0.5)
    decoder = build(section, vocabulary=30, sequence_length=8)
    initialise(decoder, seed=seed)
    return decoder


def nats_of(decoder: Decoder, inputs: list[int], targets: list[int]) -> float:
    with torch.no_grad():
        logits = decoder.logits(decoder(torch.tensor([inputs])))[0].double()
    return -sum(float(logits[at].log_softmax(-1)[target]) for at, target in enumerate(targets))


def test_a_documents_loss_is_that_of_its_windows_one_by_one() -> None:
    decoder = small()
    texts = [[3, 4, 5], list(range(20)), [], [7] * 8, [1, 2]]
    documents = [TokenizedDocument(f"text {n}", text, 4 * len(text)) for n, text in enumerate(texts)]
    scores = list(score_documents(decoder, documents, opening=[END], end=END, sequence_length=8, rows=3))
    for score, text in zip(scores, texts, strict=True):
        inputs, targets = [END, *text], [*text, END]
        cuts = [slice(start, start + 8) for start in range(0, len(targets), 8)]
        nats = sum(nats_of(decoder, inputs[cut], targets[cut]) for cut in cuts)
        assert score.nats == pytest.approx(nats, rel=1e-5)
        assert (score.tokens, score.bytes) == (len(text) + 1, 4 * len(text))
        assert score.loss == pytest.approx(nats / len(targets), rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(score.loss))
    assert [score.name for score in scores] == [document.name for document in documents]
    together = total_score(scores, name="all")
    assert together.bits_per_byte == pytest.approx(
        sum(score.nats for score in scores) / math.log(2) / together.bytes
    )
    assert math.isnan(scores[2].bits_per_byte)


def test_windows_are_computed_few_at_a_time_and_documents_told_as_soon_as_they_are_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, read = list[int](), list[str]()

    def counted(decoder: Decoder, tokens: torch.Tensor, targets: torch.Tensor) -> ScoredTokens:
        rows.append(len(tokens))
        return score_tokens(decoder, tokens, targets)

    def documents() -> Iterator[TokenizedDocument]:
        for name, length in (("long", 39), ("short", 7), ("last", 1)):
            read.append(name)
            yield TokenizedDocument(name, [3] * length, length)

    monkeypatch.setattr(scoring, "score_tokens", counted)
    scores = score_documents(small(), documents(), opening=[END], end=END, sequence_length=8, rows=2)
    assert next(scores).name == "long" and read == ["long", "short"]
    assert [score.name for score in scores] == ["short", "last"] and rows == [2, 2, 2, 1]
    scores = score_documents(small(), documents(), opening=[END], end=END, sequence_length=8, rows=1)
    assert next(scores).name == "long" and read[3:] == ["long"]
    rows.clear()
    list(score_documents(small(), documents(), opening=[END], end=END, sequence_length=3))
    assert rows == [8, 8, 2], "eight at a time where nobody says otherwise"


def test_as_many_logits_exist_at_a_time_as_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, chunks = small(), list[int]()

    def loss(hidden: torch.Tensor, targets: torch.Tensor, *, chunk: int) -> object:
        chunks.append(chunk)
        return SimpleNamespace(cross_entropy=torch.tensor(2.0))

    monkeypatch.setattr(decoder, "loss", loss)
    tokens = torch.tensor([[1, 2, 3, 4]])
    batch = MicroBatch(tokens=tokens, targets=tokens, documents=None, samples=torch.tensor([0]))
    for given in ({}, {"chunk": 7}):
        assert entropy(decoder, [batch], **given).nats == 2.0
        assert compress(decoder, [batch], text_bytes=3, **given).tokens == 4
    assert chunks == [1024, 1024, 7, 7]


def test_the_sum_of_many_documents_loses_no_small_one() -> None:
    scores = [DocumentScore(name="", nats=nats, tokens=1, bytes=1) for nats in (2.0**53, 1.0, 1.0)]
    assert total_score(scores, name="all").nats == 2.0**53 + 2.0


def test_ids_that_open_a_text_are_seen_and_not_scored() -> None:
    decoder = small()
    (score,) = score_documents(
        decoder, [TokenizedDocument("text", [3, 4], 2)], opening=[5, 6], end=END, sequence_length=8
    )
    whole = nats_of(decoder, [5, 6, 3, 4], [6, 3, 4, END]) - nats_of(decoder, [5], [6])
    assert score.nats == pytest.approx(whole, rel=1e-5) and score.tokens == 3


def test_tokens_that_do_not_count_have_no_score_and_chunks_change_nothing() -> None:
    decoder = small()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 0]])
    targets = torch.tensor([[2, 3, IGNORED], [5, IGNORED, IGNORED]])
    scored = score_tokens(decoder, tokens, targets)
    parts = score_tokens(decoder, tokens, targets, chunk=1)
    torch.testing.assert_close(scored.log_probabilities, parts.log_probabilities)
    assert (scored.log_probabilities != 0).tolist() == (targets != IGNORED).tolist()


def test_the_entropy_of_batches_keeps_documents_apart_and_tells_of_each_batch() -> None:
    decoder, told = small(), list[None]()
    tokens, targets = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, IGNORED, 4, 5]])
    apart = torch.tensor([[0, 0, 1, 1]])
    one, other = (
        MicroBatch(tokens=tokens, targets=targets, documents=documents, samples=torch.tensor([0]))
        for documents in (apart, None)
    )
    found = entropy(decoder, [one, other, one], report_progress=lambda: told.append(None))
    assert found.tokens == 9 and len(told) == 3
    seen, beside = entropy(decoder, [one]).nats, entropy(decoder, [other]).nats
    assert found.nats == pytest.approx(2 * seen + beside, rel=1e-6) and abs(seen - beside) > 1e-3
    with torch.no_grad():
        logits = decoder.logits(decoder(tokens, documents=apart))[0].double().log_softmax(-1)
    assert seen == pytest.approx(-sum(float(logits[at][target]) for at, target in ((0, 2), (2, 4), (3, 5))))


def test_a_loss_that_no_float_holds_the_exponential_of_is_an_infinite_perplexity() -> None:
    score = DocumentScore(name="a", nats=8000.0, tokens=10, bytes=3)
    assert score.perplexity == math.inf and score.loss == 800.0
    for loss, is_held in ((699.9, True), (700.0, False), (709.0, False), (715.0, False)):
        perplexity = DocumentScore(name="a", nats=2 * loss, tokens=2, bytes=3).perplexity
        assert (perplexity < math.inf) is is_held


def test_evaluate_gives_the_runs_own_held_out_loss_and_that_of_any_file(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, path = start("evaluate.samples=100000", "evaluate.every_steps=0", "train.samples=24")
    go(loaded, path)
    capsys.readouterr()
    assert main(["evaluate", str(path), "--json"]) == 0
    (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    steps = [record for record in read_journal(RunDirectory(path).journal()) if record["event"] == "step"]
    assert told["loss"] == pytest.approx(steps[-1]["held_out_loss"], rel=1e-5)
    (tmp_path / "one.txt").write_text("def main():\n    return 1\n")
    (tmp_path / "two.jsonl").write_text('{"text": "import os"}\n{"text": "import sys"}\n')
    files = [str(tmp_path / name) for name in ("one.txt", "two.jsonl")]
    assert main(["evaluate", str(path), *files, "--by-document", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["bytes"] for row in rows] == [25, 9, 10, 44]
    assert rows[-1]["loss"] == pytest.approx(
        sum(row["loss"] * row["tokens"] for row in rows[:-1]) / rows[-1]["tokens"]
    )
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["loss"] * rows[0]["tokens"] / math.log(2) / 25)
    assert main(["evaluate", str(path), *files]) == 0
    assert "all together" in capsys.readouterr().out
    (tmp_path / "three.txt").write_bytes(b"caf\xe9")
    assert main(["evaluate", str(path), str(tmp_path / "three.txt")]) != 0
    assert "three.txt" in capsys.readouterr().err
    assert main(["evaluate", str(path), str(tmp_path / "four.txt")]) != 0
    assert "There is no file" in capsys.readouterr().err
    assert main(["ckpt", "list", str(path), "--json"]) == 0
    newest = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert newest["held_out_loss"] == steps[-1]["held_out_loss"] and "best" in newest["kept"]


def test_held_out_loss_of_each_dataset_is_journalled_by_the_catalogues_ratios(
    start: Start, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.train.held_out import _shares

    assert _shares([3.0, 1.0], 64) == [48, 16]
    assert _shares([999.0, 1.0], 8) == [8, 1]
    loaded, path = start("train.samples=24")
    go(loaded, path)
    prefix = next((path / "data").rglob("held-out.bin")).with_suffix("")
    given = (
        f'data.held_out_datasets=[{{path="{prefix}", weight=3.0, name="a"}}, {{path="{prefix}", name="b"}}]'
    )
    loaded, path = start("train.samples=24", given, name="two")
    go(loaded, path)
    steps = [record for record in read_journal(RunDirectory(path).journal()) if record["event"] == "step"]
    by_dataset = steps[-1]["held_out_by_dataset"]
    assert set(by_dataset) >= {"a", "b"}
    assert all(math.isfinite(loss) and loss > 0 for loss in by_dataset.values())
