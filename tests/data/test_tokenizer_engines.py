"""The fast engine gives the ids of the reference, or is not used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import models
from tokenizers.processors import TemplateProcessing

from bloomery.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from bloomery.data.tokenizer_engines import (
    CODE,
    HARD_TEXTS,
    Encoded,
    HuggingFaceCoder,
    disagreement,
    fast_coder,
)

EOD = "<|endoftext|>"
CORPUS = [Path(json.decoder.__file__).read_text(), "naïve café 日本語 Ελληνικά " * 50, *HARD_TEXTS]
CHARACTERS = st.one_of(
    st.sampled_from(" \t\n\r'\u00a0_09aZé語\u0301\u2028\ufeff🏳"), st.characters(codec="utf-8")
)
TRICKY = st.text(CHARACTERS, max_size=60)


@pytest.fixture(scope="module", params=["text", "code"])
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer, by the reference and by the fast engine."""
    slow, fast = (
        train_tokenizer(CORPUS, vocabulary=700, end_of_document=EOD, split=request.param) for _ in range(2)
    )
    fast.use_fast()
    assert (slow.engine, fast.engine, fast.engine_note) == ("tokenizers", "fastokens", "")
    return slow, fast


def test_the_fast_engine_is_the_reference_on_real_and_hard_texts(pair: tuple[Tokenizer, Tokenizer]) -> None:
    slow, fast = pair
    library = Path(json.__file__).parents[1]
    texts = [
        *HARD_TEXTS,
        *CODE,
        f"a {EOD} b",
        *(path.read_text() for path in sorted(library.glob("[a-d]*.py"))),
    ]
    ours, theirs = fast.encode_batch(texts), slow.encode_batch(texts)
    assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.lengths, theirs.lengths)
    assert (ours.ids == fast.eod).sum() == len(texts)


@settings(max_examples=150)
@given(texts=st.lists(TRICKY, max_size=3))
def test_the_fast_engine_is_the_reference_on_any_text(
    pair: tuple[Tokenizer, Tokenizer], texts: list[str]
) -> None:
    slow, fast = pair
    ours, theirs = fast.encode_batch(texts), slow.encode_batch(texts)
    assert [one.tolist() for one in ours.split()] == [one.tolist() for one in theirs.split()]


class Wrong:
    """An engine that is off by one where a text holds an x."""

    name = "wrong"

    def __init__(self, right: HuggingFaceCoder) -> None:
        self.right = right

    def encode(self, texts: list[str]) -> Encoded:
        found = self.right.encode(texts)
        shift = np.repeat(["x" in text for text in texts], found.lengths)
        return Encoded(ids=found.ids + shift.astype(np.uint32), lengths=found.lengths)


def test_an_engine_that_differs_on_a_proof_is_dropped_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(CORPUS, vocabulary=300, end_of_document=EOD)
    reference = tokenizer.encode("box")
    monkeypatch.setattr("bloomery.data.tokenizer_engines.HARD_TEXTS", ("",))
    monkeypatch.setattr("bloomery.data.tokenizer.HARD_TEXTS", ("",))
    monkeypatch.setattr("bloomery.data.tokenizer.probe_texts", lambda _: [])
    wrong = Wrong(tokenizer._reference)  # type: ignore[arg-type]
    monkeypatch.setattr("bloomery.data.tokenizer.fast_coder", lambda _: wrong)
    tokenizer.use_fast()
    assert tokenizer.engine == "wrong" and tokenizer.encode("box") != reference
    tokenizer.prove(["no", "such"])
    assert tokenizer.engine == "wrong"
    tokenizer.prove(["no", "box"])
    assert tokenizer.engine == "tokenizers" and tokenizer.encode("box") == reference
    assert "'box'" in tokenizer.engine_note
    assert disagreement(wrong, tokenizer._reference, ["a", "x"])  # type: ignore[arg-type]


def test_without_the_package_or_with_a_kind_it_does_not_take_the_reference_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Engine(models.WordLevel({"a": 0, EOD: 1}, unk_token="a"))
    engine.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(tmp_path / "words.json", end_of_document=EOD)
    before = tokenizer.encode("a")
    tokenizer.use_fast()
    assert tokenizer.encode("a") == before
    assert tokenizer.engine == "fastokens" or "slower engine" in tokenizer.engine_note
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert fast_coder("{}") == "the package fastokens is not installed"


def test_a_tokenizer_that_would_cut_or_pad_texts_does_neither(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(CORPUS, vocabulary=300, end_of_document=EOD)
    tokenizer.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": EOD,
    }
    (tmp_path / "cutting.json").write_text(json.dumps(content))
    cutting = load_tokenizer(tmp_path / "cutting.json", end_of_document=EOD)
    for text in ("ab", "abc def ghi jkl mno pqr"):
        assert cutting.encode(text) == tokenizer.encode(text)
    cutting.use_fast()
    assert cutting.engine == "fastokens"
    assert cutting.encode("abc def ghi jkl mno pqr") == tokenizer.encode("abc def ghi jkl mno pqr")


def test_a_tokenizer_that_would_put_a_token_before_each_text_puts_none(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(CORPUS, vocabulary=300, end_of_document=EOD)
    tokenizer.save(tmp_path / "tokenizer.json")
    beginning = Engine.from_file(str(tmp_path / "tokenizer.json"))
    beginning.post_processor = TemplateProcessing(
        single=f"{EOD} $A", special_tokens=[(EOD, beginning.token_to_id(EOD))]
    )
    assert beginning.encode("ab").ids[0] == tokenizer.eod
    beginning.save(str(tmp_path / "beginning.json"))
    read = load_tokenizer(tmp_path / "beginning.json", end_of_document=EOD)
    assert read.encode("abc def") == tokenizer.encode("abc def")
    read.use_fast()
    assert read.engine == "fastokens" and read.encode("abc def") == tokenizer.encode("abc def")


def test_ids_are_laid_out_text_by_text() -> None:
    encoded = Encoded(ids=np.array([5, 6, 7], np.uint32), lengths=np.array([0, 2, 0, 1]))
    ended = encoded.with_last(9)
    assert ended.ids.tolist() == [9, 5, 6, 9, 9, 7, 9] and ended.lengths.tolist() == [1, 3, 1, 2]
    assert [one.tolist() for one in encoded.split()] == [[], [5, 6], [], [7]]
    assert Encoded(ids=np.array([], np.uint32), lengths=np.array([], np.int64)).with_last(1).split() == []


def test_a_file_that_the_fast_engine_cannot_read_is_told_with_its_reason() -> None:
    assert "fastokens does not take this tokenizer (" in str(fast_coder("{}"))
