"""Makes the tokenizer of a run and tokenises its sources: what `prepare` keeps for later starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bloomery.config.data import DataSection
from bloomery.data.documents import BadDocuments, Document
from bloomery.data.pair_files import PARTS
from bloomery.data.pairs import replace_pair
from bloomery.data.sources import FoundFiles, documents_of, is_held_out
from bloomery.data.tokenize_corpus import tokenize
from bloomery.data.tokenize_worker import Job
from bloomery.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer, train_tokenizer
from bloomery.data.tokenizer_files import tokenizer_in
from bloomery.events.records import ProgressCallback

TRAIN, HELD_OUT, BAD_DOCUMENTS = "train", "held-out", "bad-documents.jsonl"
FORMAT = 1
"""The version of the manifest."""


def build_in(
    building: Path,
    data: DataSection,
    files: FoundFiles,
    wanted: dict[str, Any],
    *,
    progress: ProgressCallback,
) -> dict[str, Any]:
    """Make the tokenizer and the pairs in `building`, and return their manifest."""
    tokenizer = _tokenizer_in(building, data, total_bytes=wanted["source_bytes"], progress=progress)
    job = Job(
        directory="",
        tokenizer=str(building / tokenizer.file_name),
        end_of_document=data.end_of_document_token,
        text_field=data.text_field,
        prompt_field=data.prompt_field,
        separator=data.separator,
        longest_line_mib=data.longest_line_mib,
        fail=data.bad_documents == "fail",
        held_out_every=data.held_out_every,
    )
    cores = len(os.sched_getaffinity(0))
    done = tokenize(
        files.files,
        building / TRAIN,
        job,
        workers=cores,
        report=building / BAD_DOCUMENTS,
        progress=progress,
    )
    if job.held_out_every:
        replace_pair(done.pairs[1].prefix, building / HELD_OUT)
    held_out = done.pairs[1].documents if job.held_out_every else 0
    pairs = {name: pair for name, pair in zip((TRAIN, HELD_OUT), done.pairs, strict=False) if pair.documents}
    written = [building / tokenizer.file_name, building / BAD_DOCUMENTS]
    written += [path(building / name) for name in pairs for path in PARTS.values()]
    return {
        "format": FORMAT,
        "wanted": wanted,
        "files": {file.name: file.stat().st_size for file in written},
        "datasets": {
            name: {"documents": pair.documents, "tokens": pair.tokens, "text_bytes": pair.text_bytes}
            for name, pair in pairs.items()
        },
        "tokenizer_file": tokenizer.file_name,
        "vocabulary_size": tokenizer.vocabulary_size,
        "end_of_document_id": tokenizer.eod,
        "bad_documents": done.bad.count,
        "engine": next(iter(done.engines), ""),
        "notes": [*_notes(data, files, done.bad, held_out=held_out), *done.notes],
    }


def _tokenizer_in(
    building: Path, data: DataSection, *, total_bytes: int, progress: ProgressCallback
) -> Tokenizer:
    """Return the run's tokenizer, saved in `building`; one that is there already was made for the same
    text.
    """
    saved = tokenizer_in(building)
    if saved is not None:
        return load_tokenizer(saved, end_of_document=data.end_of_document_token)
    tokenizer = _tokenizer(data, total_bytes=total_bytes, progress=progress)
    tokenizer.save(building / tokenizer.file_name)
    return tokenizer


def _tokenizer(data: DataSection, *, total_bytes: int, progress: ProgressCallback) -> Tokenizer:
    if data.tokenizer != "train":
        path = find_tokenizer(data.tokenizer)
        return load_tokenizer(path, end_of_document=data.end_of_document_token)
    training = (
        document
        for document in documents_of(data)
        if not is_held_out(document.key, one_in=data.held_out_every)
    )
    return train_tokenizer(
        watched_texts(training, total_bytes=total_bytes, progress=progress),
        vocabulary=data.tokenizer_vocabulary,
        end_of_document=data.end_of_document_token,
        split=data.tokenizer_split,
    )


def watched_texts(
    documents: Iterable[Document], *, total_bytes: int, progress: ProgressCallback
) -> Iterator[str]:
    """Yield the texts of some documents, and report to `progress` how much has been read."""
    done = 0
    for document in documents:
        yield document.text
        done += document.size_bytes
        progress("training the tokenizer", min(done, total_bytes), total_bytes, "bytes")
    progress("training the tokenizer", total_bytes, total_bytes, "bytes")


def _notes(data: DataSection, files: FoundFiles, bad: BadDocuments, *, held_out: int) -> list[str]:
    notes = []
    if bad.count:
        notes.append(f"{bad.summary()}; all are listed in {BAD_DOCUMENTS}.")
    if files.ignored:
        notes.append(files.note())
    if data.held_out_every and not held_out:
        notes.append(
            f"No document is held out: none of these few falls into the 1 in {data.held_out_every}, so there "
            "is no held-out loss. Give more documents, a smaller data.held_out_every, or "
            "data.held_out_datasets."
        )
    return notes
