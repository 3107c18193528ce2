"""The tokenizer: every text comes back, and no text can end its own document."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.tokenizer import Tokenizer, cut_between_words, load_tokenizer, train_tokenizer
from bloomery.errors import DataError

EOD = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["def name(self, value):\n    return self.value\n" * 3, "the cat sat on the mat " * 5]
    return train_tokenizer(texts, vocabulary=290, end_of_document=EOD)


@settings(max_examples=40, deadline=None)
@given(text=st.text())
def test_every_text_decodes_to_itself(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (document,) = tokenizer.encode_batch([text]).split()
    assert document.tolist() == [*tokenizer.encode(text), tokenizer.eod]


def test_a_text_that_spells_the_end_of_document_does_not_end_the_document(tokenizer: Tokenizer) -> None:
    text = f"one {EOD} two"
    (document,) = tokenizer.encode_batch([text]).split()
    assert document.tolist().count(tokenizer.eod) == 1
    assert tokenizer.decode(document[:-1].tolist()) == text


def test_a_small_text_gives_a_smaller_vocabulary_and_says_its_real_size() -> None:
    small = train_tokenizer(["ab"], vocabulary=5000, end_of_document=EOD)
    assert small.vocabulary_size == 258  # 256 bytes, one merge, the end of document


def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = load_tokenizer(path, end_of_document=EOD)
    text = " def  cat\n\treturn \u00e9\u4e2d"
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.eod, again.vocabulary_size) == (tokenizer.eod, tokenizer.vocabulary_size) == (0, 290)


def test_what_is_no_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"Cannot read the tokenizer .*No such file"):
        load_tokenizer(path, end_of_document=EOD)
    path.write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(path, end_of_document=EOD)
    tokenizer.save(path)
    with pytest.raises(DataError, match="has no token '</s>'"):
        load_tokenizer(path, end_of_document="</s>")


@pytest.mark.parametrize("split", ["text", "code"])
def test_every_text_decodes_to_itself_however_words_are_split(split: str) -> None:
    texts = ["def f(x_1):\n\n    return  x[12345]\t# naïve — 日本\r\n", "\n\n  \n", "__init__._a   "]
    tokenizer = train_tokenizer(texts, vocabulary=300, end_of_document="<|end|>", split=split)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


@pytest.mark.parametrize("split", ["text", "code"])
def test_a_long_text_trains_the_same_tokenizer_in_pieces(split: str) -> None:
    text = " ".join(Path(argparse.__file__).read_text().split("\n")[:700])
    pieces = list(cut_between_words(text, most=500))
    assert "".join(pieces) == text and len(pieces) > 20 and max(map(len, pieces)) <= 1500
    whole, cut = (
        train_tokenizer(given, vocabulary=400, end_of_document=EOD, split=split) for given in ([text], pieces)
    )
    assert whole.encode(text) == cut.encode(text)
    endless = "\u65e5" * 5000
    assert list(map(len, cut_between_words(endless, most=1000))) == [1000, 1000, 1000, 2000]
    assert list(cut_between_words("short text")) == ["short text"]


INTERRUPTED = """
import os, signal, sys, threading
from bloomery.data import tokenizer

class Endless:
    def __init__(self, engine): pass
    pre_tokenizer = decoder = None
    def train_from_iterator(self, texts, trainer):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()  # as native code does, it sees no signal

tokenizer.Engine = Endless
try:
    tokenizer.train_tokenizer(["text"], vocabulary=300, end_of_document="<|end|>")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_ends_the_training_of_a_tokenizer_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=60, check=False)
    assert done.returncode == 130


def test_what_goes_wrong_while_texts_are_read_reaches_who_trains_a_tokenizer() -> None:
    def texts() -> Iterator[str]:
        yield "text"
        raise DataError("broken", remedy="Mend it.")

    with pytest.raises(DataError, match="broken"):
        train_tokenizer(texts(), vocabulary=300, end_of_document=EOD)
