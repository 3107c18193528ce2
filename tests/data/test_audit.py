"""The audit of data finds what is planted, and nothing in what is as it should be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bloomery.cli.data import run
from bloomery.data import order_audit, text_audit
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.ngrams import SomeDocuments
from bloomery.data.order import Order
from bloomery.data.order_audit import neighbours_of, sample_counts_of
from bloomery.data.text_audit import Ngrams, whole_ngrams
from bloomery.data.tokenizer import train_tokenizer

EOD = "<|endoftext|>"


class BlockShuffle(Order):
    """Shuffles windows within blocks of 64 alone, as an order that is none."""

    def locate_samples(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(3)
        inside = np.concatenate([64 * block + draw.permutation(64) for block in range(self.windows[0] // 64)])
        return np.zeros_like(samples), inside[samples % inside.size]


def test_an_order_that_shuffles_within_blocks_is_told_and_ours_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, bad = Order([6400], [1.0], 7), BlockShuffle([6400], [1.0], 7)
    for samples in (6400, 20_000):
        (ours,) = neighbours_of(good, [6400], samples=samples)
        assert ours.alarms == () and ours.is_exact and ours.looked_at == samples - 1
        (theirs,) = neighbours_of(bad, [6400], samples=samples)
        assert len(theirs.alarms) == 2 and theirs.correlations[0] > 0.9 and theirs.near > 0.5
    monkeypatch.setattr(order_audit, "COUNTED", 4096)
    monkeypatch.setattr(order_audit, "STRETCH", 1024)
    (some,) = neighbours_of(bad, [6400], samples=20_000)
    assert not some.is_exact and some.looked_at == 4 * 1023 and some.alarms


class Mirrored(Order):
    """Takes every second sample from as far behind the middle as the one before it lay in front of it."""

    def locate_samples(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drawn = np.random.default_rng(3).integers(self.windows[0], size=samples.size // 2)
        return np.zeros_like(samples), np.stack([drawn, self.windows[0] - 1 - drawn], axis=1).reshape(-1)


def test_neighbours_that_avoid_each_other_are_told_as_those_that_lie_near() -> None:
    (found,) = neighbours_of(Mirrored([6400], [1.0], 7), [6400], samples=1 << 16)
    assert found.correlations[0] == pytest.approx(-0.5, abs=0.02) and found.near < found.near_by_chance
    correlate, near = found.alarms
    assert correlate.startswith("samples 1 apart have places that correlate by -0.")
    assert near.endswith("1.99% would by chance")


def test_the_places_of_several_datasets_correlate_as_numpy_says() -> None:
    order = Order([500, 90], [3.0, 1.0], 7)
    found = neighbours_of(order, [500, 90], samples=1000)
    which, windows = order.locate_samples(np.arange(1000))
    for dataset, size in enumerate((500, 90)):
        places = (windows[which == dataset] + 0.5) / size - 0.5
        for lag in (1, 7, 32):
            expected = 12 * np.mean(places[:-lag] * places[lag:])
            assert found[dataset].correlations[lag - 1] == pytest.approx(expected)
        near = np.mean(np.abs(np.diff(places)) <= 0.01 + 1e-12)
        assert found[dataset].near == pytest.approx(near, abs=0.02)


def test_what_is_taken_is_counted_sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order([500, 90], [3.0, 1.0], 7)
    large, small = sample_counts_of(order, [500, 90], samples=1000)
    assert (large.taken, large.epochs, large.least, large.most) == (750, (500, 250), 1, 2)
    assert (small.taken, small.epochs, small.least, small.most) == (250, (90, 90, 70), 2, 3)
    (vast,) = sample_counts_of(Order([1 << 29], [1.0], 7), [1 << 29], samples=10)
    assert (vast.taken, vast.epochs, vast.least, vast.most) == (10, (10,), None, None)
    monkeypatch.setattr(order_audit, "COUNTED", 10)
    assert [found.least for found in sample_counts_of(order, [500, 90], samples=1000)] == [None, None]


def test_memory_for_the_ngrams_of_another_text_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_audit, "_MOST_NGRAMS", 25)
    texts = (np.arange(start, start + 12) for start in (0, 100, 200))
    found = Ngrams.of_texts(texts, 3).result()
    assert (found.ngrams, found.is_whole) == (20, False)
    assert whole_ngrams(np.arange(4), np.array([2, 2]), 3)[0].size == 0


RECIPE = """
[run]
name = "audited"
[model]
layers = 1
hidden = 32
heads = 2
[data]
sequence_length = 16
tokenizer = "{place}/tokenizer.json"
split = [8, 2]
[[data.datasets]]
name = "own"
path = "{place}/own"
weight = 2.0
[[data.datasets]]
name = "other"
path = "{place}/other"
[train]
samples = 600
global_batch = 10
[optim]
name = "adamw"
learning_rate = 1e-3
[schedule]
warmup = 10
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two datasets of random tokens, in which nothing is planted."""
    tokenizer = train_tokenizer(["some text"], vocabulary=270, end_of_document=EOD)
    tokenizer.save(tmp_path / "tokenizer.json")
    draw = np.random.default_rng(5)
    for name in ("own", "other"):
        documents = [[*draw.integers(0, 250, 60).tolist(), tokenizer.eod] for _ in range(100)]
        (tmp_path / f"{name}.json").write_text(json.dumps(documents))
        write(tmp_path, name, documents)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(place=tmp_path))
    return tmp_path


def write(place: Path, name: str, documents: list[list[int]]) -> None:
    with IndexedWriter(place / name, dtype="<u2") as writer:
        for document in documents:
            writer.add_document(document)


def audited(place: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict]:
    recipe = place / "recipe.toml"
    moved = recipe.rename(place / "own-recipe.toml") if recipe.exists() else place / "own-recipe.toml"
    status = run(["audit", str(moved), "--to", str(place / "report"), "--ngram", "8", "--json", *more])
    return status, json.loads(capsys.readouterr().out)


def test_a_report_on_sound_data_finds_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, facts = audited(place, capsys)
    assert (status, facts["look_at"]) == (0, [])
    assert facts["text"]["is_exact"] and facts["text"]["tokens_read"] == 160 * 61
    assert [row["taken"]["taken"] for row in facts["datasets"]] == [400, 200]
    page = (place / "report" / "audit.md").read_text()
    assert "Nothing strange was found." in page
    for picture in ("order.png", "repeats.png"):
        assert f"]({picture})" in page
        assert (place / "report" / picture).read_bytes().startswith(b"\x89PNG")
    assert json.loads((place / "report" / "audit.json").read_text()) == facts


def test_a_report_finds_what_is_planted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = json.loads((place / "own.json").read_text())
    documents[3] = documents[95]  # a held-out document, whole
    documents[4][10:30] = documents[96][10:30]  # a piece of one: 13 n-grams of 8
    documents[5] = [*([1, 2, 3, 4] * 15), documents[5][-1]]  # repeats itself
    texts = place / "task.jsonl"
    texts.write_text(json.dumps({"text": "some text that some text tells"}) + "\n")
    tokenizer_ids = IndexedDataset(place / "own").dtype
    assert tokenizer_ids == np.dtype("<u2")
    from bloomery.data.tokenizer import load_tokenizer

    spelt = load_tokenizer(place / "tokenizer.json", end_of_document=EOD).encode(
        "some text that some text tells"
    )
    documents[6][: len(spelt)] = list(spelt)
    write(place, "own", documents)
    status, facts = audited(place, capsys, "--against", str(texts), "--tasks", "local_pairs")
    assert status == 1
    assert facts["overlap"]["shared"] == {"own": 1, "other": 0}
    shared = facts["text"]["shared"]
    assert (shared["held-out: own"]["found"], shared["held-out: own"]["documents"]) == (54 + 13, 2)
    assert shared["held-out: other"]["found"] == 0
    task = shared[str(texts)]
    assert task["found"] == task["ngrams"] == len(set(zip(*(spelt[n:] for n in range(8)), strict=False)))
    assert task["examples"] == [["own", 6, task["found"]]]
    assert shared["task: local_pairs"]["documents"] == 0 and shared["task: local_pairs"]["ngrams"] > 50
    (most, *_) = facts["text"]["repeated"]["own"]["most"]
    assert most == [5, pytest.approx(49 / 54), 61]
    assert len(facts["look_at"]) == 3
    again, some = audited(place, capsys, "--tokens", "5000")
    assert again == 1 and not some["text"]["is_exact"] and some["text"]["tokens_read"] < 9000
    assert "a sample" in (place / "report" / "audit.md").read_text()


def test_a_dataset_of_documents_too_short_for_an_ngram_repeats_nothing(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "short", dtype="<u2") as writer:
        writer.add_documents(np.array([1, 1, 1, 2, 2]), np.array([3, 2]))
    found = text_audit.audit_text(
        {"short": IndexedDataset(tmp_path / "short")}, {}, size=5, at_most_tokens=100
    )
    assert found.is_exact and found.tokens_read == 5
    assert (found.repeated["short"].share, found.repeated["short"].most) == (0.0, ())


def test_the_documents_that_repeat_themselves_most_are_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_audit, "_SHOWN", 2)
    with IndexedWriter(tmp_path / "some", dtype="<u2") as writer:
        for period in (40, 5, 20):
            writer.add_document([number % period for number in range(60)])
    found = text_audit.audit_text(
        {"some": IndexedDataset(tmp_path / "some")}, {}, size=3, at_most_tokens=1_000_000
    ).repeated["some"]
    assert [document for document, _, _ in found.most] == [1, 2]


def test_examples_of_shared_ngrams_are_numbered_within_the_whole_dataset() -> None:
    ngrams = Ngrams(iter([(np.array([5, 7], dtype=np.uint64), True)]))
    some = SomeDocuments(first=8192, lengths=np.array([2, 1]), tokens=np.zeros(3, dtype=np.uint16))
    ngrams.compare("own", some, np.array([9, 5], dtype=np.uint64), np.array([0, 1]))
    assert [tuple(example) for example in ngrams.result().examples] == [("own", 8193, 1)]


def test_settings_may_follow_options(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, facts = audited(place, capsys, "data.sequence_length=32")
    assert (status, facts["sequence_length"]) == (0, 32)
    with pytest.raises(SystemExit):
        audited(place, capsys, "data.sequence_length=32", "--no-such")


def test_an_order_as_megatrons_is_reported_on_as_ours_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, facts = audited(place, capsys, 'data.order="megatron"', "train.samples=390")
    assert (status, facts["look_at"], facts["order"]) == (0, [], "megatron")
    taken = [row["taken"] for row in facts["datasets"]]
    assert [sum(one["epochs"]) for one in taken] == [one["taken"] for one in taken] == [260, 130]
    assert [one["samples"] for one in taken] == [304, 304]


def test_of_an_order_as_megatrons_an_epoch_is_one_and_places_are_those_in_the_files(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, facts = audited(place, capsys, 'data.order="megatron"', "train.samples=520")
    assert (status, facts["look_at"]) == (0, []), "the short second epoch takes samples of the whole file"
    own, other = (row["taken"] for row in facts["datasets"])
    assert (own["samples"], own["epochs"], own["least"], own["most"]) == (304, [304, 43], None, None)
    assert (other["epochs"], other["least"], other["most"]) == ([173], 0, 1)


def test_a_sample_of_shuffled_documents_lies_where_it_begins_in_its_part_of_the_file(tmp_path: Path) -> None:
    write(tmp_path, "own", [[1] * length for length in (3, 9, 5, 7, 6)])
    part = IndexedDataset(tmp_path / "own").part(range(1, 5))
    order = MegatronOrder([part.sequence_lengths], None, samples=13, sequence_length=4, seed=3)
    row = order.rows[0]
    assert row.epochs == 2 and row.epoch_samples == 6
    samples = np.arange(row.sample_count)
    documents, inside = row.first_tokens(samples)
    assert list(zip(documents.tolist(), inside.tolist(), strict=True)) == [
        row.pieces(sample)[0][:2] for sample in samples.tolist()
    ]
    starts = np.array([0, 9, 14, 21])
    expected = (starts[documents] + inside + 0.5) / 27
    np.testing.assert_allclose(order_audit._places_in_file(row, samples, part), expected)
