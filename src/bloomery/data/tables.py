"""Reads documents of tables (.csv, .tsv) and of JSON files that hold a list of records."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator
from typing import IO

from bloomery.data.columns import refuse_without
from bloomery.data.documents import (
    BadDocuments,
    BadText,
    Document,
    decoded_text,
    document_of,
    record_text,
    size_in_utf8,
)
from bloomery.errors import DataError

ARRAY, TABLE = (".json",), (".csv", ".tsv")


def array_documents(
    content: bytes, place: str, *, fields: tuple[str, str], bad: BadDocuments
) -> Iterator[Document]:
    """Yield the texts of a list of records. fields: of the text, and of the prompt or ''."""
    try:
        records = json.loads(content.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError) as wrong:
        raise DataError(
            f"{place} is no JSON in UTF-8: {wrong}.",
            remedy="A file of one record a line is named .jsonl; else mend it.",
        ) from wrong
    if not isinstance(records, list):
        raise DataError(
            f"{place} holds a JSON {type(records).__name__}, not a list of records.",
            remedy="Give a list of objects, or a .jsonl file of one object a line.",
        )
    for number, record in enumerate(records, 1):
        text = record_text(record, text_field=fields[0], prompt_field=fields[1])
        if isinstance(text, BadText):
            bad.add(text.at(place, number))
        else:
            yield document_of(text, f"{place}[{number}]")


def table_documents(
    stream: IO[bytes], place: str, *, text_field: str, longest_bytes: int, bad: BadDocuments
) -> Iterator[Document]:
    """Yield the texts of one column of a table, whose first row has the columns' names.

    place: the path of the file; tabs divide the columns where it ends in .tsv, else commas. A row that has
    more cells than there are columns is bad: a comma in a text without quotes would cut the text.
    longest_bytes: a longer line or cell is refused, before more of it is held in memory.
    """
    csv.field_size_limit(longest_bytes)  # its default is 128 KiB, less than many a document
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = _Lines(text, longest=longest_bytes)
    rows = csv.DictReader(lines, delimiter="\t" if place.endswith(".tsv") else ",")
    try:
        refuse_without(text_field, list(rows.fieldnames or ()), place)
        for row in rows:
            if lines.have_ended:  # a row that is whole ends with its line: half a file is not a short file
                raise csv.Error("it ends within a cell that begins with a quote")
            cell_text = _cell_text(row, text_field)
            if isinstance(cell_text, str):
                size = size_in_utf8(cell_text)
                yield Document(text=cell_text, place=f"{place}:{rows.line_num}", size_bytes=size)
            else:
                bad.add(cell_text.at(place, rows.line_num))
    except csv.Error as damaged:
        raise DataError(
            f"{place} is no table at line {rows.reader.line_num}: {damaged}.",  # `rows` lags by a row
            remedy="Save it as CSV in UTF-8, or as .jsonl or .parquet, or allow for longer texts: "
            "data.longest_line_mib.",
        ) from damaged


class _Lines:
    """Iterates over lines. Raises csv.Error for one of more than `longest` characters, without holding it.

    have_ended: whether more were asked for than there are.
    """

    def __init__(self, text: IO[str], *, longest: int) -> None:
        self._text, self._longest = text, longest
        self.have_ended = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._longest + 1)
        if len(line) > self._longest:
            raise csv.Error(f"a line of more than {self._longest:,} characters")
        if not line:
            self.have_ended = True
            raise StopIteration
        return line


def _cell_text(row: dict[str | None, str | None], text_field: str) -> str | BadText:
    value = row[text_field]
    if value is None:
        return BadText(kind="malformed row", why="the row ends before the column")
    if None in row:
        return BadText(kind="malformed row", why="the row has more cells than there are columns")
    return decoded_text(value.encode(errors="surrogateescape"))
