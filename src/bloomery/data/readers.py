"""Reads the documents of one source file: JSON lines, plain text, tables, Parquet or Arrow."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from bloomery.config.data import LONGEST_LINE_MIB
from bloomery.data.archives import WARC, ZIP, warc_documents, zip_documents
from bloomery.data.columns import column_documents, path_in
from bloomery.data.documents import (
    CHUNK_BYTES,
    BadDocuments,
    BadText,
    Document,
    RecordText,
    count_lines,
    decoded_text,
    document_of,
    json_text,
    lines_until,
    size_in_utf8,
    skip_line,
)
from bloomery.data.tables import ARRAY, TABLE, array_documents, table_documents
from bloomery.data.text_pieces import split_stream, whole_text
from bloomery.errors import DataError

LINES, PACKED_LINES = (".jsonl",), (".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
TEXT, PACKED_TEXT, PARQUET, ARROW = (".txt",), (".txt.gz", ".txt.zst"), (".parquet",), (".arrow",)
BY_NAME = (
    *(*ARRAY, *TABLE, ".md", ".markdown", ".rst", ".tex", ".html", ".xml", ".log", ".sh"),
    *(".py", ".js", ".ts", ".c", ".h", ".cpp", ".rs", ".go", ".java"),
)
"""Endings of files that are read only if a source names them; in a directory they are left out."""
ENDINGS = (*TEXT, *PACKED_TEXT, *LINES, *PACKED_LINES, *PARQUET, *ARROW, *ZIP, *WARC)
KNOWN = (
    ".txt, .jsonl (one document a line), both also .gz and .zst, .parquet, .zip of texts, WARC files, "
    "datasets that Hugging Face saved to disk (.arrow); and, where they are named or the glob ends so, "
    "arrays of .json, tables of .csv and .tsv, and text such as .md, .rst, .html, .py"
)

_LIST_OF_FETCH, _RECORD_OF_FETCH = "fetched-files.jsonl", "fetched.json"  # as `fetch` names them
_COPY_AGAIN = "Copy it again from where it is whole, or take it out of data.sources."


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of text, or a part of one, and its path below the source that named it.

    key: the path below the source, with slashes.
    start, stop: of a .jsonl file, the bytes between which the part's lines begin; of a .parquet file, its row
    groups; None for the whole file. No other file is divided.
    """

    key: str
    path: Path
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files become documents.

    text_field: the field of a record that holds its text.
    prompt_field: the field of a record that holds the prompt, which goes before its text; '' for none.
    separator: what separates the documents of a .txt file; '' makes the file one document.
    longest_line_mib: the most MiB of a line, or of a .txt document. A longer one is a bad document, which is
    not held in memory.
    """

    text_field: str = "text"
    prompt_field: str = ""
    separator: str = ""
    longest_line_mib: int = LONGEST_LINE_MIB

    @property
    def longest_line_bytes(self) -> int:
        """The longest line that is read."""
        return self.longest_line_mib << 20


def read_file(file: SourceFile, *, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    """Yield the good documents of one file, and add every other one to `bad`."""
    try:
        for document in _reader_of(file, reading)(file, reading, bad):
            bad.good += 1
            yield document
    except OSError as unreadable:
        raise DataError(
            f"Cannot read {file.path}: {unreadable.strerror or unreadable}.",
            remedy="Check that the file is there, whole, and yours to read.",
        ) from unreadable


_Reader = Callable[[SourceFile, Reading, BadDocuments], Iterator[Document]]


def _reader_of(file: SourceFile, reading: Reading) -> _Reader:
    name = file.path.name
    if name == _LIST_OF_FETCH and file.path.with_name(_RECORD_OF_FETCH).is_file():
        return _no_text
    if name.endswith(LINES):
        return _lines
    if name.endswith(PACKED_LINES):
        return _packed_lines
    if reading.prompt_field and not name.endswith(ARRAY):
        raise DataError(
            f"{file.path} holds no prompts: data.prompt_field = {reading.prompt_field!r} names a field of "
            "JSON records.",
            remedy="Give .jsonl files (or an array in a .json file), or leave data.prompt_field out.",
        )
    if name.endswith(PARQUET):
        return _parquet
    if name.endswith(ARROW):
        return _arrow
    if name.endswith(ZIP):
        return _zip
    if name.endswith(WARC):
        return _warc
    if name.endswith(ARRAY):
        return _array
    if name.endswith(TABLE):
        return _table
    return _separated_text if reading.separator else _whole_text


def _no_text(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    """Yield nothing of the list that a fetch keeps of its files. It counts as a source as it always did."""
    return iter(())


def _zip(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    yield from zip_documents(
        file.path,
        file.key,
        text_field=reading.text_field,
        prompt_field=reading.prompt_field,
        longest_bytes=reading.longest_line_bytes,
        endings=(*TEXT, *(ending for ending in BY_NAME if ending not in (*ARRAY, *TABLE))),
        bad=bad,
    )


def _warc(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    yield from warc_documents(file.path, longest_bytes=reading.longest_line_bytes, bad=bad)


def _whole_text(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    with _stream_of(file) as stream:
        content = whole_text(stream, longest_bytes=reading.longest_line_bytes)
    text = content if isinstance(content, BadText) else decoded_text(content)
    if isinstance(text, BadText):
        bad.add(text.at(file.path, _line_of(content)))
    else:
        yield Document(name=file.key, text=text, place=str(file.path), size_bytes=size_in_utf8(text))


def _array(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    """Yield the texts of a JSON file that holds a list of records. The whole file is held in memory."""
    fields = reading.text_field, reading.prompt_field
    yield from array_documents(file.path.read_bytes(), str(file.path), fields=fields, bad=bad)


def _table(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    with file.path.open("rb") as stream:
        yield from table_documents(
            stream,
            str(file.path),
            text_field=reading.text_field,
            longest_bytes=reading.longest_line_bytes,
            bad=bad,
        )


def _line_of(content: bytes | BadText) -> int:
    """Return the line of the first byte that is not UTF-8; 0 where there is none."""
    if isinstance(content, BadText):
        return 0
    try:
        content.decode()
    except UnicodeDecodeError as wrong:
        return content.count(b"\n", 0, wrong.start) + 1
    return 0


def _separated_text(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    """Yield the pieces between separators; an empty one at the beginning or end is no document."""
    line = 1
    with _stream_of(file) as stream:
        limit = reading.longest_line_bytes
        for piece in split_stream(stream, reading.separator.encode(), longest_bytes=limit):
            content = piece.content
            text = content if isinstance(content, BadText) else decoded_text(content)
            if not isinstance(text, BadText):
                yield Document(text=text, place=f"{file.path}:{line}", size_bytes=size_in_utf8(text))
            elif content or not piece.is_edge:
                bad.add(text.at(file.path, line + max(_line_of(content) - 1, 0)))
            line += piece.newlines + reading.separator.count("\n")


def _lines(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    with file.path.open("rb", buffering=CHUNK_BYTES) as stream:
        if file.start:
            bad.lines_before[str(file.path)] = partial(_lines_to, file.path, file.start)
            stream.seek(file.start - 1)
            # The rest of a line that began before this part, which may end behind it: each of the many parts
            # of one huge line would read to its end.
            skip_line(stream, at_most=None if file.stop is None else file.stop - file.start + 1)
        lines = lines_until(stream, file.stop, longest_bytes=reading.longest_line_bytes)
        yield from _parsed(lines, file, reading, bad)


def _lines_to(path: Path, stop: int) -> int:
    with path.open("rb") as stream:
        return count_lines(stream, stop)


def _packed_lines(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    with _stream_of(file, lines_read=lambda: bad.lines.get(str(file.path), 0)) as stream:
        lines = lines_until(stream, None, longest_bytes=reading.longest_line_bytes)
        yield from _parsed(lines, file, reading, bad)


@contextmanager
def _stream_of(file: SourceFile, *, lines_read: Callable[[], int] | None = None) -> Iterator[IO[bytes]]:
    """Yield the bytes of a file, unpacked where its name ends in .gz or .zst.

    lines_read: the number of lines that were read so far, for the DataError of a damaged file.
    """
    with file.path.open("rb") as plain:  # a missing file is reported before its compression is looked at
        if not file.path.name.endswith((".gz", ".zst")):
            yield plain
            return
    import pyarrow as pa

    packing = "gzip" if file.path.name.endswith(".gz") else "zstd"
    with closing(pa.input_stream(str(file.path), compression=packing, buffer_size=1 << 20)) as stream:
        try:
            yield io.BufferedReader(stream, CHUNK_BYTES)
        except (OSError, pa.ArrowException) as damaged:
            after = f" after line {lines_read()}" if lines_read else ""
            raise DataError(f"{file.path} is damaged{after}: {damaged}.", remedy=_COPY_AGAIN) from damaged


def _parsed(
    lines: Iterator[bytes | BadText], file: SourceFile, reading: Reading, bad: BadDocuments
) -> Iterator[Document]:
    number, path = 0, str(file.path)
    try:
        for number, line in enumerate(lines, 1):
            text: RecordText | BadText
            if isinstance(line, BadText):
                text = line
            else:
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 and not file.start else line
                fields = reading.text_field, reading.prompt_field
                text = json_text(content, text_field=fields[0], prompt_field=fields[1])
            if isinstance(text, BadText):
                bad.add(text.at(path, number))
            else:
                yield document_of(text, f"{path}:{number}")
    finally:
        bad.lines[path] = number


def _parquet(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file.path, memory_map=True) as table:
            path = path_in(table.schema_arrow, reading.text_field, file.path)
            groups = range(file.start, table.num_row_groups if file.stop is None else file.stop)
            row = sum(table.metadata.row_group(group).num_rows for group in range(file.start))
            batches = table.iter_batches(1024, row_groups=list(groups), columns=[reading.text_field])
            for batch in batches:
                # 'a.b' reads the column of this name and, if there is one, b inside the structure a, too.
                texts = batch.select([batch.schema.names.index(path[0])])
                yield from column_documents(texts, path, file.path, bad, before=row)
                row += batch.num_rows
    except (pa.ArrowException, UnicodeError) as damaged:  # UnicodeError: of a column's name
        raise DataError(f"{file.path} is no whole Parquet file: {damaged}.", remedy=_COPY_AGAIN) from damaged


def _arrow(file: SourceFile, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
    import pyarrow as pa

    row = 0
    try:
        with pa.memory_map(str(file.path)) as stream, pa.ipc.open_stream(stream) as batches:
            path = path_in(batches.schema, reading.text_field, file.path)
            for batch in batches:
                texts = batch.select([path[0]])
                yield from column_documents(texts, path, file.path, bad, before=row)
                row += batch.num_rows
    except (pa.ArrowException, UnicodeError) as damaged:
        raise DataError(
            f"{file.path} is damaged after row {row}: {damaged}.", remedy=_COPY_AGAIN
        ) from damaged
