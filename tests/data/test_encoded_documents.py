"""Documents that become tokens: prompts apart from answers, and what is left out of a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.data import tokenize_worker
from bloomery.data.answers import AnswerTokens, encode_documents
from bloomery.data.documents import NO_PROMPT, STRAY_END, BadDocument, BadDocuments, Document
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.tokenize_worker import _Files, _write
from bloomery.data.tokenizer_engines import Encoded, joined
from bloomery.errors import DataError

EOD = 0


class Letters:
    """A tokenizer of one id for each letter, by its place in the alphabet from 1; blanks have none."""

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        return joined([[ord(letter) - 96 for letter in text.strip()] for text in texts]).with_last(EOD)


def documents(*texts: tuple[str, int]) -> list[Document]:
    return [
        Document(text=text, prompt=prompt, place=f"/x/a.jsonl:{number}", size_bytes=len(text))
        for number, (text, prompt) in enumerate(texts, 1)
    ]


def encoded(*texts: tuple[str, int]) -> Encoded:
    tokenizer: Any = Letters()
    return encode_documents(tokenizer, documents(*texts))


def plain(found: Encoded) -> tuple[list[int], list[int], list[int] | None]:
    return (
        found.ids.tolist(),
        found.lengths.tolist(),
        None if found.prompts is None else found.prompts.tolist(),
    )


def test_a_prompt_and_its_answer_are_encoded_apart_and_end_once() -> None:
    assert plain(encoded(("abc", 0), ("d", 0))) == ([1, 2, 3, 0, 4, 0], [4, 2], None)
    assert plain(encoded(("abc", 2), ("d e", 2))) == ([1, 2, 3, 0, 4, 5, 0], [4, 3], [2, 1])
    assert plain(encoded((" a", 1), ("bc", 1))) == ([1, 0, 2, 3, 0], [2, 3], [0, 1])


def kept(
    found: Encoded, batch: list[Document], *, fail: bool = False
) -> tuple[Encoded, list[Document], list[BadDocument]]:
    bad = BadDocuments(fail=fail)
    files = _Files(bad=bad)
    files._numbers.extend(range(len(batch)))
    left, some = files.without_bad_tokens(found, batch, EOD)
    assert not files._numbers
    return left, some, bad.entries


def test_documents_with_an_end_within_and_without_a_token_of_their_prompt_are_left_out() -> None:
    ids = np.array([5, 0, 6, 0, 0, 0, 7, 8, 0, 9, 0], dtype=np.uint32)
    found = Encoded(ids=ids, lengths=np.array([2, 4, 3, 2]), prompts=np.array([1, 1, 0, 1]))
    batch = documents(("a", 0), ("b", 0), ("c", 0), ("d", 0))
    left, some, bad = kept(found, batch)
    assert plain(left) == ([5, 0, 9, 0], [2, 2], [1, 1]) and some == [batch[0], batch[3]]
    assert bad == [
        BadDocument(
            file="/x/a.jsonl",
            line=2,
            kind=STRAY_END,
            why="its text becomes the end-of-document token, 2 times",
        ),
        BadDocument(
            file="/x/a.jsonl",
            line=3,
            kind=NO_PROMPT,
            why="its prompt has no token: the tokenizer leaves nothing of it",
        ),
    ]
    with pytest.raises(DataError, match=r"a\.jsonl:2: its text becomes the end-of-document token, 2 times"):
        kept(found, batch, fail=True)
    good = encoded(("abc", 2), ("de", 1))
    same, all_of_them, none = kept(good, batch[:2])
    assert same is good and all_of_them == batch[:2] and none == []


@pytest.mark.parametrize(
    ("place", "file", "line"),
    [("/x/a.txt", "/x/a.txt", 0), ("/x:y/a.txt", "/x:y/a.txt", 0), ("/x:1/a:7", "/x:1/a", 7)],
)
def test_a_document_that_is_left_out_is_placed_by_its_file_and_line(place: str, file: str, line: int) -> None:
    found = Encoded(ids=np.array([0, 0], dtype=np.uint32), lengths=np.array([2]))
    _, some, (bad,) = kept(found, [Document(text="a", place=place, size_bytes=1)])
    assert some == [] and (bad.file, bad.line) == (file, line)


def test_the_list_of_a_piece_names_the_file_that_a_document_was_read_from(tmp_path: Path) -> None:
    """Documents are read ahead of those that are encoded: each kind of bad one has a number of its own."""
    files = _Files(bad=BadDocuments())
    files._number, files._encoded_number = 5, 2
    with (tmp_path / "list").open("wb") as listed:
        for kind in (STRAY_END, "empty", NO_PROMPT):
            files.list_in(listed, BadDocument(file="é", line=3, kind=kind, why="w"))
    rows = [json.loads(line) for line in (tmp_path / "list").read_text().splitlines()]
    entry = {"file": "é", "line": 3, "why": "w"}
    assert rows == [
        [2, entry | {"kind": STRAY_END}],
        [5, entry | {"kind": "empty"}],
        [2, entry | {"kind": NO_PROMPT}],
    ]


def test_held_out_documents_go_to_the_second_pair_with_their_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def is_held_out(key: str, *, one_in: int) -> bool:
        asked.append(one_in)
        return key in ("b", "c")

    monkeypatch.setattr(tokenize_worker, "is_held_out", is_held_out)
    batch = [
        Document(text="x" * size, name=name, place=name, size_bytes=size)
        for name, size in (("a", 3), ("b", 4), ("c", 5), ("d", 6))
    ]
    found = Encoded(
        ids=np.arange(10, dtype=np.uint32), lengths=np.array([2, 3, 1, 4]), prompts=np.array([1, 2, 0, 3])
    )
    writers = [IndexedWriter(tmp_path / name, dtype="<u2") for name in ("train", "kept")]
    with writers[0], writers[1]:
        assert _write(found, batch, writers, one_in=7) == 9 and asked == [7] * 4
        assert _write(found, batch, writers[:1], one_in=0) == 0
    train, held = (IndexedDataset(tmp_path / name) for name in ("train", "kept"))
    assert train.flat.tolist() == [0, 1, 6, 7, 8, 9, *range(10)]
    assert train.sequence_lengths.tolist() == [1, 1, 3, 1, 1, 1, 2, 1, 1, 3, 1]
    assert held.flat.tolist() == [2, 3, 4, 5] and held.sequence_lengths.tolist() == [2, 1, 1]
    assert [held.document(number).tolist() for number in range(2)] == [[2, 3, 4], [5]]


def test_answers_are_every_second_sequence_wherever_a_piece_begins(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "pair", dtype="<u2") as writer:
        writer.add_documents(np.arange(10), np.array([4, 6]), prompts=np.array([1, 4]))
    answers = AnswerTokens(IndexedDataset(tmp_path / "pair"))
    belongs = [False, True, True, True, False, False, False, False, True, True]
    for start in range(10):
        for length in range(1, 11 - start):
            assert answers.mask(start, length).tolist() == belongs[start : start + length]
            assert answers.count(np.array([start]), np.array([length])) == sum(
                belongs[start : start + length]
            )
    assert answers.count(np.array([0, 8]), np.array([2, 2])) == 3
    assert answers.count(np.array([0]), np.array([0])) == 0
