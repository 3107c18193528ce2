"""Keeps the generation files of an imported model in the run, and copies them into an export.

They are special tokens (BOS, EOS, PAD), chat templates and generation settings. They are kept unchanged in
RUN/data/transformers.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import Tokenizer as Engine

from bloomery import durable
from bloomery.data.storage import write_whole
from bloomery.data.tokenizer import Tokenizer, load_tokenizer
from bloomery.data.tokenizer_engines import HARD_TEXTS
from bloomery.data.tokenizer_files import MODEL_FILE, is_json
from bloomery.errors import CheckpointError
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.directories import read_object

log = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"
_KEPT = (
    CONFIG,
    GENERATION,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates"
_BOUNDS = "bounds.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class TextBounds:
    """The token ids with which texts begin and end.

    begins: token ids before a text.
    empty: the token id that stands for an empty text.
    ends: token ids that end a text.
    """

    begins: tuple[int, ...]
    empty: int
    ends: frozenset[int]

    def opening(self, prompt: Sequence[int]) -> list[int]:
        """Return the ids that a model goes on from, given a prompt's own ids."""
        return [*self.begins, *prompt] or [self.empty]


def generation_files_of(rundir: RunDirectory) -> Path | None:
    """Return the directory in which an imported run keeps these files; None for a run that began here."""
    directory = rundir.data / "transformers"
    return directory if directory.is_dir() else None


def keep_generation_files(
    model: Path, rundir: RunDirectory, *, tokenizer: Path, end_of_document: int, vocabulary: int
) -> None:
    """Copy the files beside `model`, a Hugging Face directory, into the run, with the bounds of its texts.

    tokenizer: the file that the run uses.
    vocabulary: number of ids that the model has.
    Raises CheckpointError if a file is not the JSON that it should be.
    """
    directory = rundir.data / "transformers"
    directory.mkdir(parents=True)
    for name in _KEPT:
        if (model / name).is_file():
            if name.endswith(".json"):
                read_object(model / name)
            write_whole(directory / name, (model / name).read_bytes())
    templates = sorted((model / _TEMPLATES).glob("*.jinja"))
    if templates:
        (directory / _TEMPLATES).mkdir()
    for template in templates:
        write_whole(directory / _TEMPLATES / template.name, template.read_bytes())
    generation = read_object(model / GENERATION) if (model / GENERATION).is_file() else {}
    ids = {**token_ids(directory), **{key: generation[key] for key in _TOKEN_IDS if key in generation}}
    bos, eos = ids.get("bos_token_id"), ids.get("eos_token_id")
    has_bos = isinstance(bos, int) and 0 <= bos < vocabulary
    listed = eos if isinstance(eos, list) else [eos]
    ends = {end_of_document, *(id for id in listed if isinstance(id, int) and 0 <= id < vocabulary)}
    content = {
        "begins": _begins(model, tokenizer, bos if has_bos else None),
        "empty": bos if has_bos else end_of_document,
        "ends": sorted(ends),
    }
    write_whole(directory / _BOUNDS, json.dumps(content).encode())


def export_generation_files(companions: Path, export: Path) -> None:
    """Copy the kept generation files, except config.json, into an export, over what was written there."""
    shutil.copytree(companions, export, ignore=shutil.ignore_patterns(CONFIG, _BOUNDS), dirs_exist_ok=True)


def export_sentencepiece_model(export: Path, tokenizer: Path, end_of_document: str) -> int:
    """Copy a SentencePiece model into an export, and return the id of its end-of-document piece.

    `tokenizer_config.json` names a class of transformers only where that class gives the model's own ids for
    hard texts: most models normalise text in ways that transformers does not follow. Else a warning says so.
    """
    pieces = load_tokenizer(tokenizer, end_of_document=end_of_document)
    pieces.save(export / MODEL_FILE)
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        **{"add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False},
        **{"bos_token": end_of_document, "eos_token": end_of_document},
    }
    for legacy in (False, True):
        durable.write_whole(
            export / "tokenizer_config.json", json.dumps(settings | {"legacy": legacy}) + "\n"
        )
        if _gives_equal_ids(export, pieces):
            return pieces.eod
    (export / "tokenizer_config.json").unlink()
    log.warning(
        "transformers would give other ids than this SentencePiece model, so %s names no class: encode texts "
        "with the package sentencepiece and %s, which is there",
        export.name.removesuffix(".partial"),
        MODEL_FILE,
    )
    return pieces.eod


def _gives_equal_ids(export: Path, pieces: Tokenizer) -> bool:
    from transformers import AutoTokenizer

    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        theirs = AutoTokenizer.from_pretrained(export, local_files_only=True, trust_remote_code=False)
        return all(
            theirs(text, add_special_tokens=False).input_ids == pieces.encode(text) for text in HARD_TEXTS
        )
    return False


def token_ids(companions: Path) -> dict[str, Any]:  # Any: an id, a list of ids, or None
    """Return the special tokens that the model's own config.json names."""
    content = read_object(companions / CONFIG)
    return {key: content[key] for key in _TOKEN_IDS if key in content}


def text_bounds(companions: Path | None, *, end_of_document: int) -> TextBounds:
    """Return how texts begin and end; an imported model's tokenizer and generation settings say it.

    companions: None for a model that was trained here, each of whose documents follows an end of document.
    """
    if companions is None:
        return TextBounds(begins=(end_of_document,), empty=end_of_document, ends=frozenset({end_of_document}))
    path = companions / _BOUNDS
    settings = read_object(path)
    begins, empty, ends = (settings.get(key) for key in ("begins", "empty", "ends"))
    if not (_are_ids(begins) and _are_ids(ends) and isinstance(empty, int) and empty >= 0):
        raise CheckpointError(
            f"{path} does not say how texts begin and end: it needs token ids in begins and ends, and one in "
            "empty.",
            remedy="Import the model again, with `bloomery ckpt import`, into a run of another name.",
        )
    return TextBounds(begins=tuple(begins), empty=empty, ends=frozenset(ends))


def _are_ids(values: Any) -> TypeGuard[list[int]]:  # Any: a value of JSON
    """Return whether `values` is a list of token ids."""
    return isinstance(values, list) and all(isinstance(value, int) and value >= 0 for value in values)


def _begins(model: Path, tokenizer: Path, bos: int | None) -> list[int]:
    """Return the ids that the tokenizer puts before a text, as transformers does, which knows its classes'
    rules.
    """
    if tokenizer.parent == model:
        from transformers import AutoTokenizer

        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
            theirs = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
            return _before(theirs("a").input_ids, theirs("a", add_special_tokens=False).input_ids)
    if tokenizer.name == MODEL_FILE or not is_json(tokenizer.read_bytes()):
        return [] if bos is None else [bos]  # SentencePiece does not say it; transformers' Llama adds BOS
    engine: Any = Engine.from_file(str(tokenizer))  # Any: a package without stubs
    engine.no_padding()
    return _before(engine.encode("a").ids, engine.encode("a", add_special_tokens=False).ids)


def _before(whole: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return what precedes `part` in `whole`."""
    start = next((at for at in range(len(whole)) if list(whole[at : at + len(part)]) == list(part)), 0)
    return list(whole[:start])
