"""One piece of text to one pair of indexed files; and the worker process that does one after another.

A worker reads a job, then pieces, as JSON lines on standard input, and answers with JSON lines: what a batch
came to, what a piece came to, or why it cannot go on. It ends when its input does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.data.ahead import read_ahead
from bloomery.data.coder import Encoded
from bloomery.data.documents import BadDocuments, Document
from bloomery.data.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from bloomery.data.pieces import Piece
from bloomery.data.readers import Reading, read_file
from bloomery.data.sources import is_held_out
from bloomery.data.storage import write_whole
from bloomery.data.tokenize import batches, proof_texts
from bloomery.data.tokenizer import Tokenizer, load_tokenizer
from bloomery.errors import BloomeryError, StorageError

HELD_OUT = "-held-out"
_BATCHES_AHEAD = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is done to every piece, and where the results go."""

    directory: str
    tokenizer: str
    end_of_document: str
    text_field: str = "text"
    separator: str = ""
    fail: bool = False
    held_out_every: int = 0
    fast: bool = True


Tell = Callable[[int, int], None]
"""Told, after each batch, how many bytes of text and how many tokens it was."""


def prepared_tokenizer(job: Job) -> Tokenizer:
    """The job's tokenizer, by the fast engine where the job allows it."""
    tokenizer = load_tokenizer(Path(job.tokenizer), end_of_document=job.end_of_document)
    if job.fast:
        tokenizer.use_fast()
    return tokenizer


def result_path(directory: Path, number: int) -> Path:
    """What a finished piece came to; it is written last, so it is there only when the pair is."""
    return directory / f"{number:06}.json"


def do_piece(piece: Piece, job: Job, tokenizer: Tokenizer, *, tell: Tell) -> None:
    """Tokenise one piece into `directory/NUMBER.bin` and `.idx`, then write its result beside them."""
    directory = Path(job.directory)
    prefixes = [directory / f"{piece.number:06}"]
    if job.held_out_every:
        prefixes.append(directory / f"{piece.number:06}{HELD_OUT}")
    bad = BadDocuments(fail=job.fail)
    dtype = token_dtype(tokenizer.vocabulary_size)
    text_bytes, held_out_bytes, files = 0, 0, _Files(bad=bad)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, dtype=dtype)) for prefix in prefixes]
        text = batches(files.documents(piece, job))
        ahead = read_ahead(text, count=_BATCHES_AHEAD, what=lambda: f"text of {files.at}")
        for number, batch in enumerate(ahead):
            texts = [document.text for document in batch]
            if number == 0:
                tokenizer.prove(proof_texts(texts))
            encoded = tokenizer.encode_batch(texts)
            held_out_bytes += _write(encoded, batch, writers, every=job.held_out_every)
            size = sum(document.size_bytes for document in batch)
            text_bytes += size
            tell(size, int(encoded.ids.size))
    result = {
        "text_bytes": text_bytes,
        "held_out_bytes": held_out_bytes,
        "bad": [[at, asdict(entry)] for at, entry in zip(files.places, bad.entries, strict=True)],
        "lines": files.lines,
        "engine": tokenizer.engine,
        "engine_note": tokenizer.engine_note,
        "sizes": {
            path(one).name: path(one).stat().st_size for one in prefixes for path in (bin_path, idx_path)
        },
    }
    write_whole(result_path(directory, piece.number), json.dumps(result).encode())


class _Files:
    """Reads the files of a piece; remembers of each how many lines it had, and whose each bad document is."""

    def __init__(self, *, bad: BadDocuments) -> None:
        self._bad = bad
        self.lines: list[int] = []
        self.places: list[int] = []
        self.at: Path | str = "the first file"

    def documents(self, piece: Piece, job: Job) -> Iterator[Document]:
        reading = Reading(text_field=job.text_field, separator=job.separator)
        for number, file in enumerate(piece.files):
            self._bad.lines.clear()
            self.at = file.path
            yield from read_file(file, reading=reading, bad=self._bad)
            self.lines.append(self._bad.lines.get(str(file.path), 0))
            self.places += [number] * (len(self._bad.entries) - len(self.places))


def _write(encoded: Encoded, batch: list[Document], writers: list[IndexedWriter], *, every: int) -> int:
    """Write a batch to its pair or pairs; the bytes of text that were held out."""
    if not every:
        writers[0].add_documents(encoded.ids, encoded.lengths)
        return 0
    kept = np.array([is_held_out(document.key, every=every) for document in batch], dtype=bool)
    of_token = np.repeat(kept, encoded.lengths)
    writers[0].add_documents(encoded.ids[~of_token], encoded.lengths[~kept])
    writers[1].add_documents(encoded.ids[of_token], encoded.lengths[kept])
    return sum(document.size_bytes for document, held in zip(batch, kept, strict=True) if held)


def serve() -> None:
    """Do pieces until the input ends."""
    first = sys.stdin.readline()
    if not first:
        return
    job = Job(**json.loads(first))
    number = -1
    try:
        tokenizer = prepared_tokenizer(job)
        for line in sys.stdin:
            piece = Piece.from_json(json.loads(line))
            number = piece.number
            do_piece(piece, job, tokenizer, tell=lambda size, tokens: _say(batch=[size, tokens]))
            _say(done=number)
    except BloomeryError as refused:
        kind = "storage" if isinstance(refused, StorageError) else "data"
        _say(refused={"kind": kind, "message": refused.message, "remedy": refused.remedy})
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # whoever started this worker is gone or going, and says so itself


def _say(**what: Any) -> None:  # Any: plain JSON
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
