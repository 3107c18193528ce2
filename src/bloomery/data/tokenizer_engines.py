"""Two engines that encode texts as ids: Hugging Face's, and a fast one that must give the same ids."""

from __future__ import annotations

from collections.abc import Sequence
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
    """

    ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]

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
