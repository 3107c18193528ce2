"""Finds a tokenizer's file, and counts the ids of a `tokenizer.json`, without a library of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bloomery.config.data import HUB_PREFIX
from bloomery.config.find import from_home

JSON_FILE, MODEL_FILE = "tokenizer.json", "tokenizer.model"


def tokenizer_in(directory: Path) -> Path | None:
    """Return the tokenizer's file in a directory, or None."""
    files = [directory / name for name in (JSON_FILE, MODEL_FILE) if (directory / name).is_file()]
    return files[0] if files else None


def is_json(content: bytes) -> bool:
    """Whether the file of a tokenizer is a `tokenizer.json`, and not a model of SentencePiece."""
    return content.lstrip()[:1] == b"{"


def local_vocabulary_size(name: str) -> int | None:
    """Return what `Tokenizer.vocabulary_size` is for the value of `data.tokenizer`, without the network.

    None where that is neither a readable `tokenizer.json` nor a directory with one.
    """
    if name.startswith(HUB_PREFIX):
        return None
    path = from_home(name)
    file = (tokenizer_in(path) or path) if path.is_dir() else path
    try:
        content = json.loads(file.read_bytes())
        return _ids(content["model"]["vocab"], content.get("added_tokens") or ())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # missing, a model of SentencePiece, or damaged, which the start of a training explains


def _ids(vocabulary: Any, added_tokens: Iterable[Mapping[str, Any]]) -> int:
    """Return one more than the largest id that `tokenizers` gives to a token.

    vocabulary: ids by token, or a list of (token, score), whose places are the ids.
    added_tokens: those that the vocabulary lacks get the ids from its length on, whatever the file says.
    """
    is_by_token = isinstance(vocabulary, dict)
    known = vocabulary if is_by_token else {token for token, _ in vocabulary}
    added = {token["content"] for token in added_tokens if token["content"]} - set(known)
    largest = max(vocabulary.values()) if is_by_token else len(vocabulary) - 1
    return max(largest + 1, len(vocabulary) + len(added) if added else 0)
