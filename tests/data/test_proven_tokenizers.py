"""The fast engine is used where it equals the reference, by construction; all else goes to the reference."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bloomery.data.tokenizer import Tokenizer, load_tokenizer
from bloomery.data.tokenizer_engines import (
    BLOOM,
    CODE,
    GPT2,
    LLAMA3,
    NOT_PROVEN,
    QWEN2,
    probe_texts,
    unproven,
)
from bloomery.errors import DataError

EOD = "<|end|>"
REPRESENTATIVES = "aZs1 \n\r\t'./_\u00a0\u0301\u0939\u093f語"
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {byte: chr(byte) for byte in BYTES} | {
    byte: chr(256 + at) for at, byte in enumerate(sorted(set(range(256)) - set(BYTES)))
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}]}


PROVEN = {
    "bytes": BYTE_LEVEL,
    "unsplit": BYTE_LEVEL | {"use_regex": False},
    **{
        name: split_by(one)
        for name, one in (
            ("code", CODE),
            ("gpt2", GPT2),
            ("llama3", LLAMA3),
            ("qwen2", QWEN2),
            ("bloom", BLOOM),
        )
    },
}
UNPROVEN = [
    split_by(pattern)
    for pattern in (
        r"\s+$|\S+|\s+",
        r"\w+|[^\w\s]+|\s+",
        r"[[:alpha:]]+|[^[:alpha:]]+",
        GPT2.replace("(?!", "(?="),
        r"^\s+|\p{M}+|\h+",
    )
]


def tokenizer_json(
    pre: dict[str, Any],
    merges: list[tuple[str, str]],
    *,
    added: list[dict[str, Any]] | None = None,
    normalizer: dict[str, Any] | None = None,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    vocabulary = {letter: at for at, letter in enumerate(LETTERS.values())}
    kept = []
    for left, right in dict.fromkeys(merges):
        if left in vocabulary and right in vocabulary:
            vocabulary.setdefault(left + right, len(vocabulary))
            kept.append([left, right])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens: dict[str, dict[str, Any]] = {}
    for one in [{"content": EOD}, *(added or [])]:
        number = vocabulary.setdefault(one["content"], len(vocabulary))
        tokens.setdefault(one["content"], {"id": number, **plain, **one})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(tokens.values(), key=lambda token: int(token["id"])),
        "normalizer": normalizer,
        "pre_tokenizer": pre,
        "post_processor": None,
        "decoder": None,
        "model": {
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocabulary,
            "merges": kept,
        },
    }


def pair_of(content: dict[str, Any], directory: Path) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer, by the reference and as it is used."""
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(content))
    slow, used = (load_tokenizer(path, end_of_document=EOD) for _ in range(2))
    used.use_fast()
    return slow, used


def assert_equal(slow: Tokenizer, used: Tokenizer, texts: list[str]) -> None:
    ours, theirs = used.encode_batch(texts), slow.encode_batch(texts)
    assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.lengths, theirs.lengths)


def pairs_across(letters: list[str]) -> list[tuple[str, str]]:
    """Merges of bytes beside a representative, in some order: ids then show where words end."""
    beside = sorted({LETTERS[byte] for byte in REPRESENTATIVES.encode()})
    merges = list(
        dict.fromkeys([(a, b) for a in beside for b in letters] + [(a, b) for a in letters for b in beside])
    )
    random.Random(7).shuffle(merges)
    return merges


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_every_character_is_of_the_same_kind_to_both_engines(tmp_path: Path, name: str, stride: int) -> None:
    slow, used = pair_of(tokenizer_json(PROVEN[name], pairs_across(list(LETTERS.values()))), tmp_path)
    assert used.engine == "fastokens", used.engine_note
    characters = [chr(code) for code in range(0, 0x110000, stride) if not 0xD800 <= code < 0xE000]
    characters += (
        []
        if stride == 1
        else [chr(code) for code in (*range(0x250), *range(0x1680, 0x1820), *range(0x2000, 0x2070))]
    )
    characters = [one for one in characters if one != NOT_PROVEN]
    for first in range(0, len(characters), 2000):
        some = characters[first : first + 2000]
        assert_equal(slow, used, [f"a{one}1{one} {one}.{one}" for one in some])


def test_what_the_engines_disagree_about_goes_to_the_reference(tmp_path: Path) -> None:
    slow, used = pair_of(tokenizer_json(PROVEN["code"], pairs_across(list(LETTERS.values()))), tmp_path)
    text = f"a{NOT_PROVEN}1{NOT_PROVEN} .{NOT_PROVEN}{NOT_PROVEN}x"
    assert used.engine == "fastokens"
    assert used._coder.encode([text]).ids.tolist() != slow.encode(text)
    assert used.encode(text) == slow.encode(text)


EXAMPLES = int(os.environ.get("BLOOMERY_SOAK_EXAMPLES", "60"))
FRAGMENTS = (
    *(r"\s+$", r"^\s+", r"\w+", r"[^\w\s]+", r"\s+(?!\S)", r"\s+", r"[[:alpha:]]+", r"[[:punct:]]", r"\h+"),
    *(
        r" ?\p{L}+",
        r" ?\p{N}{1,3}",
        r"\p{M}",
        r"'s|'t",
        r"(?i:'s|'LL)",
        r"[\r\n]+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
    ),
    *(r"\b\w", r"a*", r"(?<=a) ", r".", r"\X", r"[a-z&&[^b]]+", r"\S+\z", r"_+\p{L}*"),
)
NORMALIZERS = (
    *({"type": name} for name in ("NFC", "NFD", "NFKC", "Lowercase", "StripAccents", "Nmt")),
    {"type": "Strip", "strip_left": True, "strip_right": False},
    {"type": "Prepend", "prepend": "a"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "s"},
    {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "NFC"}]},
)
SPLITS = (
    {"type": "Digits", "individual_digits": True},
    {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "WhitespaceSplit"},
    {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
)


@st.composite
def splits(draw: st.DrawFn) -> dict[str, Any]:
    """A way of splitting words: proven, or drawn from fragments of patterns and other kinds of steps."""
    kind = draw(st.sampled_from(("proven", "pattern", "changed", "steps")))
    if kind == "proven":
        return draw(st.sampled_from([*PROVEN.values(), *UNPROVEN]))
    if kind == "pattern":
        return split_by("|".join(draw(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=5))))
    if kind == "changed":
        parts = draw(st.sampled_from([CODE, GPT2, LLAMA3, QWEN2])).split("|")
        at = draw(st.integers(0, len(parts) - 1))
        return split_by("|".join((*parts[:at], draw(st.sampled_from(FRAGMENTS)), *parts[at:])))
    first = draw(st.sampled_from(SPLITS))
    return {"type": "Sequence", "pretokenizers": [first, BYTE_LEVEL | {"use_regex": draw(st.booleans())}]}


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_random_tokenizers_give_the_ids_of_the_reference(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    pre = data.draw(splits())
    letters = [LETTERS[byte] for byte in b"abs1 \n'."]
    known, merges = [*letters], []
    for left, right in data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=40)):
        merges.append((known[left % len(known)], known[right % len(known)]))
        known.append("".join(merges[-1]))
    merges = data.draw(st.permutations(merges))
    flags = {flag: st.booleans() for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    token = st.fixed_dictionaries({"content": st.text("abs1 .", min_size=1, max_size=4), **flags})
    content = tokenizer_json(
        pre,
        merges,
        added=data.draw(st.one_of(st.just([]), st.lists(token, max_size=3))),
        normalizer=data.draw(st.one_of(st.none(), st.none(), st.sampled_from(NORMALIZERS))),
        ignore_merges=data.draw(st.booleans()),
    )
    try:
        slow, used = pair_of(content, tmp_path_factory.mktemp("tokenizer"))
    except DataError:
        assume(False)  # the reference itself takes no such pattern
    assert (used.engine == "tokenizers") == bool(unproven(content))
    drawn = data.draw(st.lists(st.text(REPRESENTATIVES, max_size=40), max_size=20))
    assert_equal(slow, used, [*drawn, *probe_texts(content)[:100], "Chapter one\n\nIt begins"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"normalizer": {"type": "NFC"}}, "normaliser NFC"),
        ({"pre_tokenizer": UNPROVEN[0]}, "its pattern"),
        ({"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}}, "a blank before each text"),
        ({"pre_tokenizer": None}, "do not become bytes"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "do not become bytes"),
        ({"something": 1}, "key 'something'"),
    ],
)
def test_what_is_not_proven_is_named(change: dict[str, Any], told: str) -> None:
    content = tokenizer_json(BYTE_LEVEL, [])
    assert not unproven(content)
    assert told in unproven(content | change)


def test_a_model_or_an_added_token_of_another_make_is_not_proven() -> None:
    added = tokenizer_json(BYTE_LEVEL, [], added=[{"content": "ab", "special": False}])
    assert "added token 'ab'" in unproven(added)
    for key, value in (
        ("byte_fallback", True),
        ("dropout", 0.1),
        ("type", "Unigram"),
        ("end_of_word_suffix", "_"),
    ):
        content = tokenizer_json(BYTE_LEVEL, [])
        content["model"][key] = value
        assert unproven(content)
    content = tokenizer_json(BYTE_LEVEL, [])
    del content["model"]["vocab"][LETTERS[7]]
    assert "lacks 1 of the 256 bytes" in unproven(content)
