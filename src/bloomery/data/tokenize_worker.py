"""The worker process that tokenises pieces of a corpus, each into one pair of indexed files.

A corpus is cut into pieces of about the same size. A worker reads a job and then pieces as JSON lines on
standard input, and answers with JSON lines: the result of a batch, the result of a piece, or why it cannot go
on. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from bloomery.config.data import LONGEST_LINE_MIB
from bloomery.data.answers import encode_documents
from bloomery.data.documents import (
    NO_PROMPT,
    STRAY_END,
    BadDocument,
    BadDocuments,
    BadText,
    Document,
    document_batches,
    read_ahead,
)
from bloomery.data.indexed import IndexedWriter
from bloomery.data.pair_files import bin_path, idx_path, token_dtype
from bloomery.data.readers import LINES, PARQUET, Reading, SourceFile, read_file
from bloomery.data.sources import is_held_out
from bloomery.data.storage import as_storage_error, open_new, write_whole
from bloomery.data.tokenizer import Tokenizer, load_tokenizer
from bloomery.data.tokenizer_engines import Encoded
from bloomery.errors import BloomeryError, DataError, StorageError


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """Some files, or a part of one, that one worker turns into one pair of indexed files."""

    number: int
    files: tuple[SourceFile, ...]
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the piece as plain data, for the plan on disk and for a worker."""
        files = [[file.key, str(file.path), file.start, file.stop] for file in self.files]
        return {"number": self.number, "size_bytes": self.size_bytes, "files": files}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> TextPiece:
        """Return the piece that `to_json` wrote."""
        files = tuple(
            SourceFile(key=key, path=Path(path), start=start, stop=stop)
            for key, path, start, stop in plain["files"]
        )
        return cls(number=plain["number"], files=files, size_bytes=plain["size_bytes"])


def cut_corpus(files: Sequence[SourceFile], *, piece_bytes: int) -> list[TextPiece]:
    """Return pieces of about `piece_bytes`, in reading order: large files in parts, small ones together."""
    pieces: list[TextPiece] = []
    piece: list[SourceFile] = []
    piece_bytes_so_far = 0
    for file in files:
        for part, size in _parts(file, piece_bytes):
            if piece and piece_bytes_so_far + size > piece_bytes:
                pieces.append(
                    TextPiece(number=len(pieces), files=tuple(piece), size_bytes=piece_bytes_so_far)
                )
                piece, piece_bytes_so_far = [], 0
            piece.append(part)
            piece_bytes_so_far += size
    if piece:
        pieces.append(TextPiece(number=len(pieces), files=tuple(piece), size_bytes=piece_bytes_so_far))
    return pieces


def total_bytes(files: Iterable[SourceFile]) -> int:
    """Return the size of some files on the disk, in bytes."""
    return sum(_size(file) for file in files)


def _parts(file: SourceFile, piece_bytes: int) -> Iterator[tuple[SourceFile, int]]:
    size = _size(file)
    if size <= piece_bytes or not file.path.name.endswith((*LINES, *PARQUET)):
        yield file, size
        return
    if file.path.name.endswith(PARQUET):
        yield from _row_groups(file, piece_bytes)
        return
    count = -(-size // piece_bytes)
    bounds = [size * number // count for number in range(count + 1)]
    for start, stop in pairwise(bounds):
        yield SourceFile(key=file.key, path=file.path, start=start, stop=stop), stop - start


def _row_groups(file: SourceFile, piece_bytes: int) -> Iterator[tuple[SourceFile, int]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(file.path)
    except (OSError, pa.ArrowException) as damaged:
        raise DataError(
            f"{file.path} is no whole Parquet file: {damaged}.",
            remedy="Copy it again from where it is whole.",
        ) from damaged
    start, held = 0, 0
    for group in range(metadata.num_row_groups):
        size = sum(
            metadata.row_group(group).column(column).total_compressed_size
            for column in range(metadata.num_columns)
        )
        if group > start and held + size > piece_bytes:
            yield SourceFile(key=file.key, path=file.path, start=start, stop=group), held
            start, held = group, 0
        held += size
    yield SourceFile(key=file.key, path=file.path, start=start, stop=metadata.num_row_groups), held


def _size(file: SourceFile) -> int:
    try:
        return file.path.stat().st_size
    except OSError as missing:
        raise DataError(
            f"Cannot read {file.path}: {missing.strerror}.",
            remedy="Check that it is there and yours to read.",
        ) from missing


HELD_OUT = "-held-out"
_BATCHES_AHEAD = 4
_SAMPLED_PIECES, _SAMPLED_DOCUMENTS, _SAMPLED_CHARACTERS = 64, 4096, 2 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is done to every piece, and where the results go.

    fast: the fast engine may be used.
    engine: the engine that was chosen for all pieces; '' before the choice.
    """

    directory: str
    tokenizer: str
    end_of_document: str
    text_field: str = "text"
    prompt_field: str = ""
    separator: str = ""
    longest_line_mib: int = LONGEST_LINE_MIB
    fail: bool = False
    held_out_every: int = 0
    fast: bool = True
    engine: str = ""

    @property
    def reading(self) -> Reading:
        """How the files become documents."""
        return Reading(
            text_field=self.text_field,
            prompt_field=self.prompt_field,
            separator=self.separator,
            longest_line_mib=self.longest_line_mib,
        )


Tell = Callable[[int, int], None]
"""Is called after each batch with its bytes of text and its number of tokens."""


def prepared_tokenizer(job: Job) -> Tokenizer:
    """Return the job's tokenizer, with the fast engine if the job allows it."""
    tokenizer = load_tokenizer(Path(job.tokenizer), end_of_document=job.end_of_document)
    if job.fast and job.engine != tokenizer.reference:
        tokenizer.use_fast()
    if job.engine not in ("", tokenizer.engine):
        raise DataError(
            f"The corpus is tokenised by {job.engine}, and a worker can only use {tokenizer.engine}. "
            f"{tokenizer.engine_note}",
            remedy="Choose the reference engine (--engine reference).",
        )
    return tokenizer


def sampled_texts(pieces: Sequence[TextPiece], job: Job) -> Iterator[str]:
    """Yield the beginnings of some thousand documents from all over a corpus, or of all documents if there
    are fewer.
    """
    some = [pieces[at * len(pieces) // _SAMPLED_PIECES] for at in range(_SAMPLED_PIECES)]
    chosen = list({piece.number: piece for piece in some}.values())
    each = -(-_SAMPLED_DOCUMENTS // len(chosen))
    characters = _SAMPLED_CHARACTERS // _SAMPLED_DOCUMENTS
    for piece in chosen:
        left = each
        with suppress(BloomeryError):  # problems of a piece are reported when it is its turn
            for file in piece.files:
                for document in islice(read_file(file, reading=job.reading, bad=BadDocuments()), left):
                    yield document.text[:characters]
                    left -= 1
                if not left:
                    break


def refuse_all_bad(pieces: Sequence[TextPiece], job: Job) -> None:
    """Raise DataError where the first thousand documents of a corpus are all bad. It reads up to the first
    good one.

    It is asked before anything is tokenised, of the whole corpus even where a part of it is: so all parts are
    refused or none, and a piece of a few long documents is not taken for a corpus.
    """
    bad = BadDocuments()
    for piece in pieces:
        for file in piece.files:
            for _ in read_file(file, reading=job.reading, bad=bad):
                return


def result_path(directory: Path, number: int) -> Path:
    """Return the path of a finished piece's result, which is written last, so it exists only if the pair
    does.
    """
    return directory / f"{number:06}.json"


def bad_path(directory: Path, number: int) -> Path:
    """Return the path of the list of a piece's bad documents: lines of [number of the file, document]."""
    return directory / f"{number:06}-bad.jsonl"


def tokenize_piece(piece: TextPiece, job: Job, tokenizer: Tokenizer, *, tell: Tell) -> None:
    """Tokenise one piece into `directory/NUMBER.bin` and `.idx`, then write its result beside them."""
    directory = Path(job.directory)
    prefixes = [directory / f"{piece.number:06}"]
    if job.held_out_every:
        prefixes.append(directory / f"{piece.number:06}{HELD_OUT}")
    bad = BadDocuments(fail=job.fail, stop_after=0)
    dtype = token_dtype(tokenizer.vocabulary_size)
    text_bytes, held_out_bytes, files = 0, 0, _Files(bad=bad)
    listed = bad_path(directory, piece.number)
    with as_storage_error(listed):
        listed.unlink(missing_ok=True)
    with ExitStack() as stack:
        bad_list = stack.enter_context(open_new(listed))
        bad.keep = lambda entry: files.list_in(bad_list, entry)
        writers = [stack.enter_context(IndexedWriter(prefix, dtype=dtype)) for prefix in prefixes]
        text = document_batches(files.documents(piece, job))
        ahead = read_ahead(text, count=_BATCHES_AHEAD, what=lambda: f"text of {files.at}")
        for batch in ahead:
            encoded = encode_documents(tokenizer, batch)
            encoded, batch = files.without_bad_tokens(encoded, batch, tokenizer.eod)
            held_out_bytes += _write(encoded, batch, writers, one_in=job.held_out_every)
            size = sum(document.size_bytes for document in batch)
            text_bytes += size
            tell(size, int(encoded.ids.size))
    result = {
        "text_bytes": text_bytes,
        "held_out_bytes": held_out_bytes,
        "lines": files.lines,
        "engine": tokenizer.engine,
        "sizes": {
            path(prefix).name: path(prefix).stat().st_size
            for prefix in prefixes
            for path in (bin_path, idx_path)
        }
        | {listed.name: listed.stat().st_size},
    }
    write_whole(result_path(directory, piece.number), json.dumps(result).encode())


class _Files:
    """Reads the files of a piece, and remembers how many lines each has and which file each bad document is
    from.
    """

    def __init__(self, *, bad: BadDocuments) -> None:
        self._bad = bad
        self._number = 0
        self._numbers: deque[int] = deque()  # of the file of each document that was read and not yet encoded
        self._encoded_number = -1
        self.lines: list[int] = []
        self.at: Path | str = "the first file"

    def documents(self, piece: TextPiece, job: Job) -> Iterator[Document]:
        for number, file in enumerate(piece.files):
            self._bad.lines.clear()
            self.at, self._number = file.path, number
            for document in read_file(file, reading=job.reading, bad=self._bad):
                self._numbers.append(number)
                yield document
            self.lines.append(self._bad.lines.get(str(file.path), 0))

    def list_in(self, file: BinaryIO, bad: BadDocument) -> None:
        """Write a bad document down, with the number of its file in the piece."""
        number = self._encoded_number if bad.kind in (STRAY_END, NO_PROMPT) else self._number
        file.write((json.dumps([number, asdict(bad)]) + "\n").encode())

    def without_bad_tokens(
        self, encoded: Encoded, batch: list[Document], eod: int
    ) -> tuple[Encoded, list[Document]]:
        """Return the documents whose tokens can be used; the others are bad.

        Their only end-of-document token is their last. Text never becomes a special token, but a tokenizer
        may spell one with ordinary pieces, or have its end of a document as a token that its author defined
        for texts. And a prompt has a token: one of blanks has none where the tokenizer strips them, and the
        pair could not tell prompts from answers any more.
        """
        numbers = [self._numbers.popleft() for _ in batch]
        ends = encoded.ids == eod
        prompts = np.ones_like(encoded.lengths) if encoded.prompts is None else encoded.prompts
        if np.count_nonzero(ends) == len(batch) and prompts.all():
            return encoded, batch
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        strays = np.add.reduceat(ends, starts, dtype=np.int64) - 1
        for at in np.flatnonzero((strays > 0) | (prompts == 0)).tolist():
            file, _, line = batch[at].place.rpartition(":")
            self._encoded_number = numbers[at]
            bad = BadText(kind=NO_PROMPT, why="its prompt has no token: the tokenizer leaves nothing of it")
            if strays[at]:
                why = f"its text becomes the end-of-document token, {strays[at]} times"
                bad = BadText(kind=STRAY_END, why=why)
            place = (file, int(line)) if line.isdecimal() else (batch[at].place, 0)
            self._bad.add(bad.at(*place))
        good = (strays == 0) & (prompts > 0)
        good_documents = [document for document, is_good in zip(batch, good.tolist(), strict=True) if is_good]
        ids = encoded.ids[np.repeat(good, encoded.lengths)]
        kept = None if encoded.prompts is None else prompts[good]
        return Encoded(ids=ids, lengths=encoded.lengths[good], prompts=kept), good_documents


def _write(encoded: Encoded, batch: list[Document], writers: list[IndexedWriter], *, one_in: int) -> int:
    """Write a batch to its pair or pairs, and return how many bytes of text were held out."""
    if not one_in:
        writers[0].add_documents(encoded.ids, encoded.lengths, prompts=encoded.prompts)
        return 0
    held_out_mask = np.array([is_held_out(document.key, one_in=one_in) for document in batch], dtype=bool)
    of_token = np.repeat(held_out_mask, encoded.lengths)
    masks = ((~held_out_mask, ~of_token), (held_out_mask, of_token))
    for writer, (own, tokens) in zip(writers, masks, strict=True):
        prompts = None if encoded.prompts is None else encoded.prompts[own]
        writer.add_documents(encoded.ids[tokens], encoded.lengths[own], prompts=prompts)
    return sum(document.size_bytes for document, is_kept in zip(batch, held_out_mask, strict=True) if is_kept)


def serve(messages: TextIO) -> None:
    """Tokenise pieces until the input ends."""

    def say(**what: Any) -> None:  # Any: plain JSON
        messages.write(json.dumps(what) + "\n")
        messages.flush()

    first = sys.stdin.readline()
    if not first:
        return
    job = Job(**json.loads(first))
    number = -1
    try:
        tokenizer = prepared_tokenizer(job)
        for line in sys.stdin:
            piece = TextPiece.from_json(json.loads(line))
            number = piece.number
            tokenize_piece(piece, job, tokenizer, tell=lambda size, tokens: say(batch=[size, tokens]))
            say(done=number)
    except BloomeryError as refused:
        kind = "storage" if isinstance(refused, StorageError) else "data"
        say(refused={"kind": kind, "message": refused.message, "remedy": refused.remedy})
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the process that started this worker is gone or ending, and reports that itself


def output_for_messages() -> TextIO:
    """Return this process's output for messages alone; what a library prints goes to standard error."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return messages


if __name__ == "__main__":
    serve(output_for_messages())
