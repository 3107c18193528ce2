"""Two engines that encode texts as ids: Hugging Face's, and a fast one that must give the same ids.

The fast one may be used for byte-level BPE that splits words by one of the patterns below. For each of these,
the tests compare both engines on every Unicode character beside letters, digits, blanks and marks, on random
sequences of what the patterns tell apart, and on random merges. The reference encodes for all others: other
patterns (in Oniguruma a dollar also matches before a line's end, and some classes hold other characters),
normalisers, and added tokens that are cut out of the text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# Where tokenizers differ first: blanks, line ends, digits, marks, scripts, unassigned characters.
HARD_TEXTS = (
    "",
    " ",
    "  a   b\t\tc \n\n\n  d\r\n\r\n e\u00a0\u2003f\u3000g\u0085h",
    "it's I'LL they'Re don't \u2019s 'S '' ' \"quoted\" _under__score_ a_b",
    "0123456789 3.14159 1,000,000 \u0663\u0664 \u00bd\u00b2 \u2167 12abc34",
    "na\u00efve caf\u00e9 cafe\u0301 \u01c5 \ufb01 \u1e9e \u0130stanbul \u03a3\u03c2",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940 \u0639\u0631",
    "\U0001f469\u200d\U0001f4bb\U0001f3f3\ufe0f\u200d\U0001f308 \U00020000 \U0010fffd \ue000 \u200b \ufeff x",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\u0080\u2028\u2029",
    "def f(x):\n    return {'a': [1, 2]}  # \u2014\n\n\n\tif x != y: pass;\n" + "=" * 70 + " " * 70 + "\n",
)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The ids of several texts, one after another.

    lengths: number of ids of each text.
    prompts: how many of each text's first ids are a prompt; None where the texts have none.
    """

    ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64] | None = None

    def with_last(self, token: int) -> Encoded:
        """Return the same texts with a token after each."""
        ends = np.cumsum(self.lengths)
        ids = np.insert(self.ids, ends, np.uint32(token))
        return Encoded(ids=ids, lengths=self.lengths + 1)

    def split(self) -> list[npt.NDArray[np.uint32]]:
        """Return the ids of each text."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


class Coder(Protocol):
    """Encodes texts as ids, without special tokens of any kind; several texts at once use all cores."""

    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text."""


class HuggingFaceCoder:
    """Encodes with `tokenizers`, which takes every kind of tokenizer.json and is right by definition."""

    name = "tokenizers"

    def __init__(self, engine: Any) -> None:  # Any: the engine's package has no stubs
        self._engine = engine

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text."""
        return joined(
            [
                encoding.ids
                for encoding in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
            ]
        )


class FastCoder:
    """Encodes with `fastokens`, which gives the same ids for byte-level BPE at many times the speed."""

    name = "fastokens"

    def __init__(self, tokenizer_json: str) -> None:
        from fastokens import Tokenizer

        self._engine = Tokenizer.from_json_str(tokenizer_json)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text."""
        ids, offsets = self._engine.encode_batch_flat(list(texts), split_special_tokens=True)
        places = np.frombuffer(offsets, "<u8").astype(np.int64)
        return Encoded(ids=np.frombuffer(ids, "<u4"), lengths=np.diff(places))


def joined(lists: Sequence[Sequence[int]]) -> Encoded:
    """Return lists of ids as one flat buffer."""
    lengths = np.array([len(tokens) for tokens in lists], dtype=np.int64)
    ids_in_order = (token for tokens in lists for token in tokens)
    ids = np.fromiter(ids_in_order, dtype=np.uint32, count=int(lengths.sum()))
    return Encoded(ids=ids, lengths=lengths)


def fast_coder(tokenizer_json: str) -> FastCoder | str:
    """Return the fast engine for a tokenizer, or the reason why there is none."""
    try:
        return FastCoder(tokenizer_json)
    except ImportError:
        return "the package fastokens is not installed"
    except (ValueError, RuntimeError, NotImplementedError) as refused:
        return f"fastokens does not take this tokenizer ({refused})"


def disagreement(engine: Coder, reference: Coder, texts: Sequence[str]) -> str:
    """Return a sentence about the first text on which two engines differ; '' if they agree."""
    for text, ours, theirs in zip(
        texts, engine.encode(texts).split(), reference.encode(texts).split(), strict=True
    ):
        if not np.array_equal(ours, theirs):
            shown = text if len(text) <= 60 else text[:60] + "…"
            return f"{engine.name} and {reference.name} give other ids for {shown!r}"
    return ""


CODE = r" ?\p{L}+|_+\p{L}*| ?\p{N}{1,3}| ?[^\s\p{L}_\p{N}]+(?:\n+ *)?|\s*\n *|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
PATTERNS = (CODE, GPT2, LLAMA3, QWEN2, BLOOM)
NOT_PROVEN = "\u180e"
"""The Mongolian vowel separator, which is a blank to the fast engine's patterns and not to the reference."""

_TOP = frozenset(
    (
        *("version", "truncation", "padding", "added_tokens", "normalizer"),
        *("pre_tokenizer", "post_processor", "decoder", "model"),
    )
)
_MODEL_OFF = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_MODEL = frozenset(("type", "vocab", "merges", "fuse_unk", "byte_fallback", "ignore_merges", *_MODEL_OFF))
_BYTE_LEVEL = frozenset(("type", "add_prefix_space", "trim_offsets", "use_regex"))
_TOKEN = frozenset(("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"))
_FRAGMENTS = (
    *" \t\n\r'",
    "\r\n",
    "  ",
    "a",
    "Z",
    "é",
    "ß",
    "语",
    "\u0301",
    "\u0939",
    "\u093f",
    "1",
    "\u0663",
)
_MORE_FRAGMENTS = (
    "½",
    ".",
    "_",
    "/",
    "$",
    "\u00a0",
    "\u2028",
    "\u200d",
    "\U0001f469",
    "'s",
    "'LL",
    "\x00",
    "\x1c",
)
_TEXTS, _LONGEST = 400, 40


def unproven(content: Mapping[str, Any]) -> str:
    """Return the first part of a tokenizer.json that the fast engine is not proven on; '' if it may be
    used.
    """
    model, tokens = content.get("model") or {}, content.get("added_tokens") or []
    if unknown := sorted(set(content) - _TOP):
        return f"its key {unknown[0]!r} is not known"
    if content.get("normalizer"):
        return f"it has the normaliser {content['normalizer'].get('type')}"
    if reason := _unproven_words(content.get("pre_tokenizer")):
        return reason
    if model.get("type") != "BPE" or set(model) - _MODEL:
        return "its model is not a plain BPE"
    if any(model.get(key) for key in (*_MODEL_OFF, "byte_fallback")):
        return "its BPE has more than bytes and merges"
    if missing := _byte_letters() - set(model["vocab"]):
        return f"its vocabulary lacks {len(missing)} of the 256 bytes"
    for token in tokens:
        if not token.get("special") or set(token) - _TOKEN:
            return f"it has the added token {token.get('content')!r}, which is cut out of the text"
    return ""


def probe_texts(content: Mapping[str, Any]) -> list[str]:
    """Return texts that exercise what is particular to a tokenizer: its pattern, added tokens and
    vocabulary.
    """
    draw = random.Random(json.dumps(content.get("pre_tokenizer"), sort_keys=True))
    patterns = json.dumps(content.get("pre_tokenizer"), ensure_ascii=False)
    added = [str(token["content"]) for token in content.get("added_tokens") or []]
    letters = {letter: byte for byte, letter in _letters_of_bytes().items()}
    words = [word for word in content["model"]["vocab"] if set(word) <= set(letters)]
    drawn = [
        bytes(letters[letter] for letter in word).decode("utf-8", "ignore")
        for word in draw.sample(words, min(len(words), _TEXTS))
    ]
    fragments = [*_FRAGMENTS, *_MORE_FRAGMENTS, *sorted(set(patterns)), *added[:_TEXTS], *added[-_TEXTS:]]
    return [
        "".join(
            draw.choice(draw.choice((fragments, drawn)) or [""]) for _ in range(draw.randint(1, _LONGEST))
        )
        for _ in range(_TEXTS)
    ]


def _unproven_words(plain: Mapping[str, Any] | None) -> str:
    """Return what is not proven about how text is split into words; '' if all is."""
    steps: list[Any] = plain["pretokenizers"] if plain and plain.get("type") == "Sequence" else [plain]
    splits, last = steps[:-1], steps[-1] if steps else None
    if not last or last.get("type") != "ByteLevel" or set(last) - _BYTE_LEVEL:
        return "its words do not become bytes in the last step"
    if last.get("add_prefix_space", True):
        return "it puts a blank before each text"
    if len(splits) > 1 or (splits and last.get("use_regex", True)):
        return "it splits words more than once"
    for split in splits:
        if split.get("type") != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
            return f"it splits words by {split.get('type')}"
        if split.get("pattern") not in [{"Regex": pattern} for pattern in PATTERNS]:
            return "its pattern is not one of those that the fast engine is proven on"
    return ""


def _byte_letters() -> set[str]:
    return set(_letters_of_bytes().values())


def _letters_of_bytes() -> dict[int, str]:
    """Return the letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    shown: Sequence[int] = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(shown)]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(others)}
