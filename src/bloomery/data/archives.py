"""Reads documents of archives: files, and lines of .jsonl, in a .zip; records of text in a WARC file."""

from __future__ import annotations

import codecs
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bloomery.data.documents import (
    BadDocuments,
    BadText,
    Document,
    decoded_text,
    document_of,
    json_text,
    lines_until,
    size_in_utf8,
)
from bloomery.data.tables import ARRAY, TABLE, array_documents, table_documents
from bloomery.errors import DataError

ZIP, WARC = (".zip",), (".warc", ".warc.gz", ".wet", ".wet.gz")
_LINES = (".jsonl", ".ndjson")
_PACKING = (zlib.error, lzma.LZMAError)
_NAMES = (UnicodeDecodeError, IndexError)  # what zipfile raises for names that are no UTF-8, or empty
_COPY_AGAIN = "Copy it again from where it is whole, or take it out of data.sources."


def zip_documents(
    path: Path,
    key: str,
    *,
    text_field: str,
    prompt_field: str = "",
    longest_bytes: int,
    endings: tuple[str, ...],
    bad: BadDocuments,
) -> Iterator[Document]:
    """Yield the documents of a .zip file's members, by their names: lines of .jsonl, rows of .csv and .tsv,
    records of .json, else a member is one.

    key: path of the file below its source. endings: of members that are read whole; others are left out.
    longest_bytes: a longer line or member is a bad document, which is not held in memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.filename)
            for member in members:
                name = member.filename
                if member.is_dir() or any(part.startswith((".", "__")) for part in name.split("/")):
                    continue
                place = f"{path}!{name}"
                if name.endswith(_LINES):
                    with archive.open(member) as stream:
                        lines = lines_until(stream, None, longest_bytes=longest_bytes)
                        yield from _lines(lines, place, fields=(text_field, prompt_field), bad=bad)
                elif name.endswith(TABLE):
                    with archive.open(member) as stream:
                        yield from table_documents(
                            stream, place, text_field=text_field, longest_bytes=longest_bytes, bad=bad
                        )
                elif name.endswith((*ARRAY, *endings)):
                    if member.file_size > longest_bytes:
                        why = f"a member of {member.file_size:,} bytes; at most {longest_bytes:,} are read"
                        bad.add(BadText(kind="too long", why=why).at(place, 0))
                        continue
                    content = archive.read(member).removeprefix(codecs.BOM_UTF8)
                    if name.endswith(ARRAY):
                        fields = text_field, prompt_field
                        yield from array_documents(content, place, fields=fields, bad=bad)
                        continue
                    text = decoded_text(content)
                    if isinstance(text, BadText):
                        bad.add(text.at(place, 0))
                    else:
                        yield Document(name=f"{key}/{name}", text=text, place=place, size_bytes=len(content))
    except (zipfile.BadZipFile, *_PACKING, *_NAMES, EOFError, NotImplementedError, RuntimeError) as damaged:
        raise DataError(f"{path} is no whole .zip file: {damaged}.", remedy=_COPY_AGAIN) from damaged


def _lines(
    lines: Iterator[bytes | BadText], place: str, *, fields: tuple[str, str], bad: BadDocuments
) -> Iterator[Document]:
    for number, line in enumerate(lines, 1):
        content = line.removeprefix(codecs.BOM_UTF8) if isinstance(line, bytes) and number == 1 else line
        if isinstance(content, BadText):
            bad.add(content.at(place, number))
            continue
        found = json_text(content, text_field=fields[0], prompt_field=fields[1])
        if isinstance(found, BadText):
            bad.add(found.at(place, number))
        else:
            yield document_of(found, f"{place}:{number}")


def warc_documents(path: Path, *, longest_bytes: int, bad: BadDocuments) -> Iterator[Document]:
    """Yield the plain texts of a WARC file: conversion records (WET files), and others of type text/plain.

    A page of HTML is a bad document: its text is in the WET file beside it. Records about the crawl
    (requests, metadata) are no documents. Places are numbers of records.
    """
    from warcio.exceptions import ArchiveLoadFailed

    number = 0
    try:
        opened = (
            gzip.open if path.name.endswith(".gz") else open
        )  # warcio's own takes a cut .gz for a short one
        with opened(path, "rb") as stream:
            for number, record in enumerate(_records(stream), 1):
                if record.rec_type not in ("conversion", "response", "resource"):
                    _read_on(record, path, number)
                    continue
                text = _record_text(record, path, number, longest_bytes=longest_bytes)
                if isinstance(text, str):
                    yield Document(text=text, place=f"{path}:{number}", size_bytes=size_in_utf8(text))
                else:
                    bad.add(text.at(path, number))
            while stream.read(1 << 20):  # warcio takes a broken end for the end; reading on tells
                pass
    except (ArchiveLoadFailed, gzip.BadGzipFile, EOFError, zlib.error) as damaged:
        raise DataError(
            f"{path} is no whole WARC file after record {number:,}: {damaged}.", remedy=_COPY_AGAIN
        ) from damaged


def _records(stream: Any) -> Iterator[Any]:  # Any: a binary file; warcio has no types
    """Yield the records of a WARC file. Raises ArchiveLoadFailed where it is damaged."""
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    try:
        yield from ArchiveIterator(stream)
    except AttributeError as lacking:  # warcio takes it for granted
        raise ArchiveLoadFailed("a response without its WARC-Target-URI") from lacking


def _record_text(record: Any, path: Path, number: int, *, longest_bytes: int) -> str | BadText:
    """Return the text of a record, or why it holds none. Any: warcio has no types."""
    headers = record.http_headers or record.rec_headers
    kind = str(headers.get_header("Content-Type", "text/plain")).partition(";")[0].strip().lower()
    if record.rec_type != "conversion" and kind != "text/plain":
        _read_on(record, path, number)
        return BadText(kind="not plain text", why=f"{kind}; its text is in the WET file of the same crawl")
    if record.http_headers is not None:  # chunked, compressed: its length on the wire is another
        content = record.content_stream().read(longest_bytes + 1)
    else:
        content = record.raw_stream.read(longest_bytes + 1)
    if len(content) > longest_bytes:
        _read_on(record, path, number)
        why = f"a record of more than {longest_bytes:,} bytes (data.longest_line_mib)"
        return BadText(kind="too long", why=why)
    _read_on(record, path, number)
    return decoded_text(content)


def _read_on(record: Any, path: Path, number: int) -> None:
    """Read a record to its end, and refuse a file that ends before it."""
    stream = record.raw_stream
    while stream.read(1 << 20):
        pass
    if missing := getattr(stream, "limit", 0):  # bytes of the record that were not there
        wanted = int(record.rec_headers.get_header("Content-Length"))
        raise DataError(
            f"{path} ends within record {number:,}: {wanted - missing:,} of its {wanted:,} bytes are there.",
            remedy=_COPY_AGAIN,
        )
