"""Tokenizers by small ones made by hand: which texts end documents, what is proven, and what is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers

from bloomery.data import tokenizer as module
from bloomery.data import tokenizer_engines as engines
from bloomery.data.tokenizer import (
    PieceModel,
    Tokenizer,
    cut_between_words,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from bloomery.data.tokenizer_engines import (
    HARD_TEXTS,
    NOT_PROVEN,
    Encoded,
    disagreement,
    fast_coder,
    joined,
    probe_texts,
    unproven,
)
from bloomery.data.tokenizer_files import tokenizer_in
from bloomery.errors import DataError

EOD = "<end>"


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a"], vocabulary=257, end_of_document=EOD)


def content_of(tokenizer: Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer._engine.to_str())
    return content


def loose(tokenizer: Tokenizer, **tokens: bool) -> Tokenizer:
    """The same with more added tokens, by their content; True: it is special, and text never becomes it."""
    content = content_of(tokenizer)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for number, (text, special) in enumerate(tokens.items()):
        content["added_tokens"].append({"id": 300 + number, "content": text, "special": special, **plain})
    return Tokenizer(Engine.from_str(json.dumps(content)), end_of_document=EOD, origin="here")


class Coder:
    """A coder of one id for each character; of texts in `wrong` another one."""

    name = "mine"

    def __init__(self, *, eod_for: str = "", wrong: tuple[str, ...] = ()) -> None:
        self.eod_for, self.wrong = eod_for, wrong
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> Encoded:
        self.asked += texts
        return joined(
            [
                [0 if self.eod_for and self.eod_for in text else 9, *([8] if text in self.wrong else [])]
                for text in texts
            ]
        )


def test_a_tokenizer_says_which_texts_end_a_document_in_any_form_of_theirs(tokenizer: Tokenizer) -> None:
    assert tokenizer.texts_that_end_documents() == []
    more = loose(tokenizer, **{"Stop\u2603": True, "other\u2603": True})
    for spelt, found in (
        ("Stop\u2603", ["Stop\u2603"]),
        ("stop\u2603", ["Stop\u2603"]),
        ("STOP\u2603", ["Stop\u2603"]),
        ("aStop\u2603b", ["Stop\u2603"]),
        ("\nStop\u2603\n", ["Stop\u2603"]),
        ("<Stop\u2603>", ["Stop\u2603"]),
        (f"{HARD_TEXTS[3]}Stop\u2603{HARD_TEXTS[3]}", ["Stop\u2603"]),
        (EOD, [EOD]),
        ("\u2603", ["Stop\u2603", "other\u2603"]),
        ("zzz", []),
    ):
        more._coder = Coder(eod_for=spelt)
        assert more.texts_that_end_documents() == found, spelt


def test_of_very_many_added_tokens_the_first_are_tried(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TRIED", 2)
    more = loose(tokenizer, **{"first": True, "\u2603": True})
    more._coder = Coder(eod_for="\u2603")
    assert more.texts_that_end_documents() == []
    monkeypatch.setattr(module, "_TRIED", 3)
    assert more.texts_that_end_documents() == ["\u2603"]


def test_text_beyond_what_is_proven_goes_to_the_reference_as_a_whole(tokenizer: Tokenizer) -> None:
    fast = Coder()
    tokenizer._coder = fast
    assert tokenizer.engine == "mine" and tokenizer.reference == "tokenizers"
    assert tokenizer.encode("ab") == [9] and tokenizer.encode_batch(["a", "b"]).ids.tolist() == [9, 0, 9, 0]
    assert len(tokenizer.encode(f"ab{NOT_PROVEN}")) > 2
    assert len(tokenizer.encode_batch(["a", NOT_PROVEN]).ids) > 4
    assert fast.asked == ["ab", "a", "b"]
    tokenizer.prove([NOT_PROVEN, f"a{NOT_PROVEN}"])
    assert tokenizer.engine == "mine" and fast.asked == ["ab", "a", "b"], "it is proven on other texts"
    tokenizer.prove(["b", "long " * 20])
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.engine_note == ("The slower engine is used: mine and tokenizers give other ids for 'b'.")


def test_the_first_text_that_differs_is_shown_and_cut(tokenizer: Tokenizer) -> None:
    one, other = Coder(), Coder(wrong=("x" * 60, "y" * 61, "z"))
    assert disagreement(one, other, ["a", "b"]) == "" == disagreement(one, other, [])
    for text, shown in (("x" * 60, "x" * 60), ("y" * 61, "y" * 60 + "…")):
        told = disagreement(one, other, ["a", text, "z"])
        assert told == f"mine and mine give other ids for {shown!r}"


def test_the_fast_engine_is_proven_on_hard_texts_and_on_the_tokenizers_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven: list[str] = []
    monkeypatch.setattr(module, "fast_coder", lambda content: Coder())
    monkeypatch.setattr(module, "probe_texts", lambda content: [content["model"]["type"]])
    monkeypatch.setattr(tokenizer, "prove", proven.extend)
    tokenizer.use_fast()
    assert tokenizer.engine == "mine" and proven == [*HARD_TEXTS, "BPE"]
    tokenizer.use_reference("A note.")
    assert (tokenizer.engine, tokenizer.engine_note) == ("tokenizers", "A note.")
    monkeypatch.setattr(module, "fast_coder", lambda content: "it is gone")
    tokenizer.use_fast()
    assert tokenizer.engine_note == "The slower engine is used: it is gone."
    monkeypatch.setattr(module, "unproven", lambda content: "it is new")
    tokenizer.use_fast()
    assert tokenizer.engine_note == "The slower engine is used: it is new."


CHANGES: list[tuple[str, Any]] = [
    ("", lambda c: None),
    ("its key 'more' is not known", lambda c: c.update(more=1)),
    ("it has the normaliser NFC", lambda c: c.update(normalizer={"type": "NFC"})),
    ("its words do not become bytes in the last step", lambda c: c.update(pre_tokenizer=None)),
    (
        "its words do not become bytes in the last step",
        lambda c: c.update(pre_tokenizer={"type": "Sequence", "pretokenizers": []}),
    ),
    (
        "its words do not become bytes in the last step",
        lambda c: c["pre_tokenizer"].update(unknown=1),
    ),
    ("it puts a blank before each text", lambda c: c["pre_tokenizer"].update(add_prefix_space=True)),
    ("it puts a blank before each text", lambda c: c["pre_tokenizer"].pop("add_prefix_space")),
    ("its model is not a plain BPE", lambda c: c["model"].update(type="Unigram")),
    ("its model is not a plain BPE", lambda c: c["model"].update(more=1)),
    ("its BPE has more than bytes and merges", lambda c: c["model"].update(dropout=0.1)),
    ("its BPE has more than bytes and merges", lambda c: c["model"].update(unk_token="a")),
    ("its BPE has more than bytes and merges", lambda c: c["model"].update(continuing_subword_prefix="#")),
    ("its BPE has more than bytes and merges", lambda c: c["model"].update(end_of_word_suffix="#")),
    ("its BPE has more than bytes and merges", lambda c: c["model"].update(byte_fallback=True)),
    ("its vocabulary lacks 2 of the 256 bytes", lambda c: [c["model"]["vocab"].pop(k) for k in "ab"]),
    (
        "it has the added token '<end>', which is cut out of the text",
        lambda c: c["added_tokens"][0].update(special=False),
    ),
    (
        "it has the added token '<end>', which is cut out of the text",
        lambda c: c["added_tokens"][0].update(more=1),
    ),
]


@pytest.mark.parametrize(("told", "change"), CHANGES)
def test_each_part_that_is_not_proven_is_told(tokenizer: Tokenizer, told: str, change: Any) -> None:
    content = content_of(tokenizer)
    change(content)
    assert unproven(content) == told


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ({}, ""),
        ({"type": "Digits"}, "it splits words by Digits"),
        ({"behavior": "Removed"}, "it splits words by Split"),
        ({"invert": True}, "it splits words by Split"),
        (
            {"pattern": {"Regex": r"\w+"}},
            "its pattern is not one of those that the fast engine is proven on",
        ),
        (
            {"pattern": {"String": engines.GPT2}},
            "its pattern is not one of those that the fast engine is proven on",
        ),
    ],
)
def test_a_split_of_words_is_proven_by_its_pattern_alone(split: dict[str, Any], told: str) -> None:
    tokenizer = train_tokenizer(["a"], vocabulary=257, end_of_document=EOD, split="code")
    content = content_of(tokenizer)
    first, last = content["pre_tokenizer"]["pretokenizers"]
    for pattern in engines.PATTERNS:
        first["pattern"] = {"Regex": pattern}
        assert unproven(content) == ""
    first.update(split)
    assert unproven(content) == told
    if not told:
        last["use_regex"] = True
        assert unproven(content) == "it splits words more than once"
        del last["use_regex"]
        assert unproven(content) == "it splits words more than once", "where nothing is said, it does"
        last["use_regex"] = False
        content["pre_tokenizer"]["pretokenizers"] = [first, first, last]
        assert unproven(content) == "it splits words more than once"


def test_the_letters_of_bytes_are_those_of_the_reference() -> None:
    letters = engines._letters_of_bytes()
    assert set(letters) == set(range(256)) and engines._byte_letters() == set(
        pre_tokenizers.ByteLevel.alphabet()
    )
    engine = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("A z~", "é\u00ad\n\x7f", "語\u0100"):
        ((shown, _),) = engine.pre_tokenize_str(text)
        assert shown == "".join(letters[byte] for byte in text.encode())
    assert (letters[33], letters[0], letters[32], letters[173]) == ("!", "Ā", "Ġ", "Ń")


def test_texts_that_try_a_tokenizer_are_the_same_each_time_and_hold_what_is_its_own() -> None:
    tokenizer = train_tokenizer(["zebra zebra"], vocabulary=270, end_of_document=EOD)
    content = content_of(tokenizer)
    content["added_tokens"].append({"content": "<|mine|>"})
    texts = probe_texts(content)
    assert texts == probe_texts(content) and len(texts) == 400
    whole = "".join(texts)
    for part in ("<|mine|>", EOD, "zebra", "\u0301", "'LL", "\x1c"):
        assert part in whole
    content["pre_tokenizer"]["trim_offsets"] = not content["pre_tokenizer"]["trim_offsets"]
    assert probe_texts(content) != texts, "another pattern is tried by other texts"


def test_text_is_cut_between_words_and_not_within_them() -> None:
    assert list(cut_between_words("ab cd ef gh", most=4)) == ["ab cd", " ef gh"]
    assert list(cut_between_words("abcdefgh", most=4)) == ["abcdefgh"]
    assert list(cut_between_words("abcdefghi", most=4)) == ["abcd", "efghi"]
    assert list(cut_between_words("a1 2b 3c_ d, e  f", most=3)) == [
        "a1 ",
        "2b ",
        "3c_",
        " d, e  f"[:3],
        " e  f",
    ]
    assert list(cut_between_words("")) == [""]


def test_a_directory_has_the_tokenizer_that_is_json_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenizer_in(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert tokenizer_in(tmp_path) == tmp_path / "tokenizer.model"
    (tmp_path / "tokenizer.json").mkdir()
    assert tokenizer_in(tmp_path) == tmp_path / "tokenizer.model"
    (tmp_path / "tokenizer.json").rmdir()
    (tmp_path / "tokenizer.json").write_bytes(b"x")
    assert tokenizer_in(tmp_path) == tmp_path / "tokenizer.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_tokenizer("~") == tmp_path / "tokenizer.json"
    for name in ("none.json", "none.model", "a/b/none", "some none"):
        assert find_tokenizer(str(name)) == Path(name), "it is told as missing when it is read"


def test_the_end_of_a_document_and_the_vocabulary_are_by_the_largest_id() -> None:
    engine = Engine(models.WordLevel({"a": 0, EOD: 7, "b": 3}, unk_token="a"))
    found = Tokenizer(engine, end_of_document=EOD, origin="a file")
    assert (found.eod, found.vocabulary_size, found.file_name) == (7, 8, "tokenizer.json")
    assert (found.end_of_document, found.engine_note) == (EOD, "")
    with pytest.raises(DataError) as refused:
        Tokenizer(engine, end_of_document="<no>", origin="a file")
    assert refused.value.message == (
        "The tokenizer a file has no token '<no>', which is to end each document."
    )


def test_special_tokens_are_spelt_or_left_out(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ab"), tokenizer.eod]
    assert tokenizer.decode(ids) == f"ab{EOD}" and tokenizer.decode(ids, spells_special=False) == "ab"


def test_what_ids_add_is_told_by_those_shortly_before_them() -> None:
    engine = Engine(models.WordLevel({"a": 0, EOD: 1}, unk_token="a"))
    engine.decoder = decoders.WordPiece()
    found = Tokenizer(engine, end_of_document=EOD, origin="here")
    asked: list[list[int]] = []
    decode = found.decode

    def watched(ids: Sequence[int], **more: bool) -> str:
        asked.append(list(ids))
        return decode(ids, **more)

    found.decode = watched  # type: ignore[method-assign, assignment]
    assert found.decode_after([0, 0], before=[*[0] * 38, 1, 0]) == " a a"
    assert asked == [[*[0] * 14, 1, 0], [*[0] * 14, 1, 0, 0, 0]]
    assert found.decode_after([0], before=[]) == "a"


def test_a_file_is_a_model_unless_it_begins_as_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content, why in (
        (b"  \n{", "is not a tokenizer: "),
        (b"[]", "it is neither JSON nor a model of SentencePiece"),
        (b"", "it is neither JSON nor a model of SentencePiece"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=why):
            load_tokenizer(path, end_of_document=EOD)
    tokenizer = train_tokenizer(["a"], vocabulary=257, end_of_document=EOD)
    tokenizer.save(path)
    path.write_bytes(b" \n" + path.read_bytes())
    assert load_tokenizer(path, end_of_document=EOD).encode("ab") == tokenizer.encode("ab")


def test_lists_of_ids_lie_one_after_another() -> None:
    found = joined([[1, 2], [], [3]])
    assert (found.ids.tolist(), found.lengths.tolist(), found.ids.dtype) == ([1, 2, 3], [2, 0, 1], np.uint32)
    none = joined([])
    assert none.ids.size == 0 and none.split() == [] and none.prompts is None
    assert isinstance(fast_coder("{}"), str)


def pieces_of(*words: str) -> PieceModel:
    """A model whose id 1 is the control symbol </s>; texts lose the blank with which they begin."""
    model = PieceModel.__new__(PieceModel)
    pieces = (" a", "</s>", *words)
    model.content = b"the model"
    model._model = SimpleNamespace(
        get_piece_size=lambda: len(pieces),
        is_control=lambda token: token == 1,
        id_to_piece=pieces.__getitem__,
        decode=lambda ids: "".join(pieces[token] for token in ids).removeprefix(" "),
        encode=lambda texts, out_type: [[1 if text == "</s>" else 3] for text in texts],
    )
    return model


def test_ids_of_sentencepiece_are_decoded_between_its_control_symbols(tmp_path: Path) -> None:
    model = pieces_of(" b", "c")
    ids = [0, 2, 3, 1, 2, 4, 0, 1, 1, 9]
    assert model.decode(ids, skip_special_tokens=False) == "a bc</s>b a</s></s>"
    assert model.decode(ids, skip_special_tokens=True) == "a bcb a"
    assert model.get_vocab(with_added_tokens=True) == {" a": 0, "</s>": 1, " b": 2, "c": 3}
    with pytest.raises(ValueError, match="it is empty"):
        PieceModel(b"")
    found = Tokenizer(model, end_of_document="</s>", origin="here")
    assert (found.eod, found.vocabulary_size, found.file_name) == (1, 4, "tokenizer.model")
    assert found.engine == found.reference == "sentencepiece" and found.texts_that_end_documents() == ["</s>"]
    found.use_fast()
    assert found.engine == "sentencepiece"
    assert found.engine_note == "SentencePiece models have no faster engine here."
    found.save(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == b"the model"
