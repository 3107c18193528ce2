"""Prompts with answers: two sequences of a document, of which the answer alone counts in the loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.validate_data import sample_mistakes
from bloomery.data.answers import AnswerTokens
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.order import Order
from bloomery.data.pair_files import HEADER, idx_path
from bloomery.data.pairs import merge_pairs
from bloomery.data.prepare import prepare
from bloomery.data.readers import SourceFile
from bloomery.data.sample_layout import layout_of
from bloomery.data.seal import SealFacts
from bloomery.data.tokenize_worker import Job, TextPiece, bad_path, prepared_tokenizer, tokenize_piece
from bloomery.data.tokenizer import load_tokenizer, train_tokenizer
from bloomery.data_loader.batches import IGNORED, Batches, MicroBatch, held_out_batches
from bloomery.errors import DataError

LENGTH, EOD = 8, 0


def written(prefix: Path, sizes: list[tuple[int, int]]) -> IndexedDataset:
    """Prompts of ids from 100 on, answers of ids from 1 on that end with EOD: the ids tell them apart."""
    with IndexedWriter(prefix, dtype="<u2") as writer:
        for prompt, answer in sizes:
            tokens = np.array([*range(100, 100 + prompt), *range(1, answer), EOD])
            writer.add_documents(tokens, np.array([prompt + answer]), prompts=np.array([prompt]))
    return IndexedDataset(prefix)


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    draw = np.random.default_rng(3)
    return written(tmp_path / "pairs", [tuple(row) for row in draw.integers(1, 12, size=(40, 2)).tolist()])


def test_counts_and_masks_are_those_that_the_ids_tell(dataset: IndexedDataset) -> None:
    answers, is_answer = AnswerTokens(dataset), np.asarray(dataset.flat) < 100
    for part in (dataset, dataset.part(range(7, 30))):
        answers, is_answer = AnswerTokens(part), np.asarray(part.flat) < 100
        starts = np.arange(part.token_count - LENGTH + 1)
        for start in starts.tolist():
            assert answers.mask(start, LENGTH).tolist() == is_answer[start : start + LENGTH].tolist()
            assert (
                answers.count(np.array([start]), np.array([LENGTH]))
                == is_answer[start : start + LENGTH].sum()
            )
        assert answers.count(starts, np.full_like(starts, LENGTH)) == sum(
            is_answer[s : s + LENGTH].sum() for s in starts
        )


def test_merged_pairs_keep_where_answers_begin(dataset: IndexedDataset, tmp_path: Path) -> None:
    merged = merge_pairs([dataset.prefix, dataset.prefix], tmp_path / "both")
    is_answer = np.asarray(merged.flat) < 100
    assert AnswerTokens(merged).mask(0, merged.token_count).tolist() == is_answer.tolist()


def test_documents_without_a_prompt_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "plain", dtype="<u2") as writer:
        writer.add_document([1, 2, EOD])
    with pytest.raises(DataError, match="1 sequences in 1 documents; prompts with answers have two each"):
        AnswerTokens(IndexedDataset(tmp_path / "plain"))


def test_an_index_that_is_damaged_tells_of_no_answer(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "pairs", dtype="<u2", seal=SealFacts()) as writer:
        writer.add_documents(np.arange(40), np.full(4, 10), prompts=np.full(4, 3))
    path = idx_path(tmp_path / "pairs")
    content = bytearray(path.read_bytes())
    content[HEADER.size + 4 * 8 + 8 * 3] ^= 2  # of eight sequences, where the fourth begins
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"pairs\.idx is not what was written"):
        AnswerTokens(IndexedDataset(tmp_path / "pairs"))


def micro_batches(
    dataset: IndexedDataset, packing: str, *, rank: int, degree: int, size: int
) -> list[MicroBatch]:
    kept_in = dataset.prefix.parent / "orders"
    layout = layout_of(dataset, packing, length=LENGTH, seed=5, number=0, kept_in=kept_in)
    with Batches(
        Order([layout.sample_count], [1.0], 5),
        [dataset],
        sequence_length=LENGTH,
        mask_documents=False,
        rank=rank,
        degree=degree,
        eod=EOD,
        prefetch=0,
        layouts=[layout],
        answers_alone=True,
    ) as batches:
        return list(batches.batch((range(3, 15),), size))


@pytest.mark.parametrize("packing", ["windows", "shifted", "documents"])
def test_targets_of_prompts_do_not_count_and_every_rank_knows_how_many_do(
    packing: str, dataset: IndexedDataset
) -> None:
    (whole,) = micro_batches(dataset, packing, rank=0, degree=1, size=12)
    if whole.documents is None:
        following = whole.tokens[:, 1:]
        assert (whole.targets[:, :-1] == following.where(following < 100, IGNORED)).all()
    else:  # a document's end is the input of the next one's first token, which a prompt is
        inside = whole.documents[:, 1:] == whole.documents[:, :-1]
        following = whole.tokens[:, 1:].where(inside, IGNORED)
        own = whole.targets[:, :-1].where(inside, IGNORED)
        assert (own == following.where(following < 100, IGNORED)).all()
    counting = whole.targets[whole.targets != IGNORED]
    assert (counting < 100).all()
    assert whole.global_targets == int((whole.targets != IGNORED).sum()) > 0
    parts = [
        batch for rank in (0, 1) for batch in micro_batches(dataset, packing, rank=rank, degree=2, size=3)
    ]
    assert {batch.global_targets for batch in parts} == {whole.global_targets}
    assert sum(int((batch.targets != IGNORED).sum()) for batch in parts) == whole.global_targets


def test_held_out_windows_count_answers_alone(dataset: IndexedDataset) -> None:
    counted = [
        target
        for batch in held_out_batches(dataset, sequence_length=LENGTH, rows=4, eod=EOD, answers_alone=True)
        for target in batch.targets.flatten().tolist()
        if target != IGNORED
    ]
    answers = np.asarray(dataset.flat)
    assert sorted(counted) == sorted(answers[answers < 100].tolist())


def recipe(file: Path, *more: str) -> LoadedRecipe:
    settings = ("data.prompt_field=question", "data.text_field=answer", "data.tokenizer_vocabulary=300")
    short = ("data.sequence_length=16", "data.held_out_every=3")
    return load_recipe("demo", [f"data.sources={file}", *settings, *short, *more])


def test_a_prompt_is_encoded_as_it_will_be_without_its_answer(tmp_path: Path) -> None:
    records = [{"question": f"What is {n} and {n}?", "answer": f" It is {2 * n}."} for n in range(40)]
    records.insert(3, {"question": "Nothing?"})
    records.insert(9, {"question": "", "answer": "nothing"})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepared = prepare(recipe(file).recipe.data, tmp_path / "data")
    tokenizer = load_tokenizer(prepared.tokenizer_path, end_of_document="<|endoftext|>")
    seen = []
    for pair in (*prepared.train, *prepared.held_out):
        dataset = IndexedDataset(pair.prefix)
        is_answer = AnswerTokens(dataset).mask(0, dataset.token_count)
        for start, stop in zip(dataset.document_starts[:-1], dataset.document_starts[1:], strict=True):
            tokens, own = dataset.window(int(start), int(stop - start)), is_answer[start:stop]
            question = tokenizer.decode(tokens[~own].tolist())
            assert tokens[~own].tolist() == tokenizer.encode(question)
            assert tokens[-1] == tokenizer.eod
            seen.append((question, tokenizer.decode(tokens[own][:-1].tolist())))
    good = [(record["question"], record["answer"]) for record in records if len(record) == 2]
    assert sorted(seen) == sorted(pair for pair in good if pair[0])
    told = " ".join(prepared.notes)
    assert "2 documents skipped" in told and "no field 'answer' (data.text_field)" in told


def test_a_prompt_of_which_the_tokenizer_leaves_nothing_is_a_bad_document(tmp_path: Path) -> None:
    """SentencePiece and BERT's tokenizers strip blanks; without its prompt, a document has one sequence."""
    trained = train_tokenizer(["question one answer two " * 9], vocabulary=300, end_of_document="<eod>")
    spec = json.loads(trained._engine.to_str()) | {
        "normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    records = [{"prompt": prompt, "text": " answer"} for prompt in ("question", " \n", "one")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    file = SourceFile(key="in.jsonl", path=tmp_path / "in.jsonl")
    job = Job(
        directory=str(tmp_path),
        tokenizer=str(tmp_path / "tokenizer.json"),
        end_of_document="<eod>",
        prompt_field="prompt",
        fast=False,
    )
    piece = TextPiece(number=0, files=(file,), size_bytes=1)
    tokenize_piece(piece, job, prepared_tokenizer(job), tell=lambda size, tokens: None)
    dataset = IndexedDataset(tmp_path / "000000")
    assert dataset.document_count == 2 and AnswerTokens(dataset).mask(0, 1).tolist() == [False]
    (number, bad) = json.loads(bad_path(tmp_path, 0).read_text())
    assert number == 0 and bad["line"] == 2 and "its prompt has no token" in bad["why"]


def test_what_has_no_prompts_is_refused_by_name(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a plain text " * 100)
    with pytest.raises(DataError, match=r"text\.txt holds no prompts"):
        prepare(recipe(text).recipe.data, tmp_path / "data")
    (mistake,) = sample_mistakes(recipe(text, "data.order=megatron").recipe.data)
    assert mistake.key == "data.prompt_field"
