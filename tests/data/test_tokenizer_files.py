"""The vocabulary of a tokenizer's file, counted without a library, against `tokenizers` itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Engine

from bloomery.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from bloomery.data.tokenizer_files import local_vocabulary_size

EOD = "<end>"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BYTES = {"type": "BPE", "merges": []}


@pytest.mark.parametrize(
    ("model", "added"),
    [
        ({**BYTES, "vocab": {"a": 0, "b": 1}}, [(2, EOD), (3, "<pad>")]),
        ({**BYTES, "vocab": {"a": 0, EOD: 1}}, [(1, EOD)]),
        ({**BYTES, "vocab": {"a": 0, "b": 9}}, [(10, EOD)]),  # the library gives it 2, whatever the file says
        ({**BYTES, "vocab": {"a": 0, "b": 9}}, [(9, "b"), (2, EOD)]),
        ({**BYTES, "vocab": {"a": 0, "b": 2}}, [(2, EOD), (7, "<pad>"), (0, "a"), (4, "<more>")]),
        ({**BYTES, "vocab": {"a": 0, "b": 1}}, [(70, EOD), (80, "<pad>"), (90, "<pad>"), (100, "")]),
        ({"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1.0], [EOD, -2.0]]}, [(3, "<pad>")]),
        ({"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, EOD: 4}}, []),
    ],
)
def test_the_vocabulary_is_counted_as_training_counts_it(
    tmp_path: Path, model: dict[str, Any], added: list[tuple[int, str]]
) -> None:
    tokens = [{"id": number, "content": content, **FLAGS} for number, content in added]
    text = json.dumps({"version": "1.0", "added_tokens": tokens, "model": model})
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    wanted = Tokenizer(Engine.from_str(text), end_of_document=EOD, origin="here").vocabulary_size
    assert local_vocabulary_size(str(path)) == local_vocabulary_size(str(tmp_path)) == wanted


def test_the_file_of_a_trained_tokenizer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    train_tokenizer(["a text of some words, and words"], vocabulary=270, end_of_document=EOD).save(path)
    size = local_vocabulary_size(str(path))
    assert size == load_tokenizer(path, end_of_document=EOD).vocabulary_size == 270


@pytest.mark.parametrize(
    "content", [b"", b"\x0a\x0e\x0a\x05<unk>", b"[]", b"{}", b'{"model": {"vocab": {}}}']
)
def test_another_file_and_another_name_have_no_known_vocabulary(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    for name in (str(path), str(tmp_path), str(tmp_path / "none.json"), "hf:gpt2"):
        assert local_vocabulary_size(name) is None
