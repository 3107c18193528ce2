"""Tables and lists of records, as files and as members of archives, lose no text silently."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from bloomery.data.documents import BadDocuments, Document
from bloomery.data.readers import Reading, SourceFile, read_file
from bloomery.errors import DataError


def read(path: Path, **how: str) -> tuple[list[Document], BadDocuments]:
    bad = BadDocuments()
    file = SourceFile(key=path.name, path=path)
    return list(read_file(file, reading=Reading(**how), bad=bad)), bad


def test_a_row_with_more_cells_than_columns_is_bad(tmp_path: Path) -> None:
    """Otherwise a comma in a text without quotes cuts the text."""
    path = tmp_path / "table.csv"
    path.write_text("text,n\nhello, world, again,3\nfine,2\n")
    documents, bad = read(path)
    assert [document.text for document in documents] == ["fine"]
    assert [(entry.line, entry.kind) for entry in bad.entries] == [(2, "malformed row")]
    assert "more cells than there are columns" in bad.entries[0].why


@pytest.mark.parametrize("end", ['3,"cut in the mid', '3,"cut at a line\n', '3,"a ""'])
def test_a_table_that_ends_within_quotes_is_not_a_short_one(tmp_path: Path, end: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f'n,text\n1,"of\ntwo lines"\n2,no quotes\n{end}')
    with pytest.raises(DataError, match="ends within a cell that begins with a quote"):
        read(path)
    for whole in ("", "3,without an end of line", '3,"quoted"', "\n\n"):
        path.write_text(f'n,text\n1,"of\ntwo lines"\n2,no quotes\n{whole}')
        documents, bad = read(path)
        assert len(documents) == (3 if whole.strip() else 2) and not bad.count


def test_tables_and_lists_in_a_zip_file_are_read_by_their_records(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "\ufefftext,n\nhello,1\nworld,2\n")
        archive.writestr("b.tsv", "n\ttext\n1\ta, b\n")
        archive.writestr("c.json", json.dumps([{"text": "x", "q": "?"}, {"text": 3}]))
        archive.writestr("d.txt", "plain")
    documents, bad = read(path)
    assert [(document.text, document.place.removeprefix(str(path))) for document in documents] == [
        ("hello", "!a.csv:2"),
        ("world", "!a.csv:3"),
        ("a, b", "!b.tsv:2"),
        ("x", "!c.json[1]"),
        ("plain", "!d.txt"),
    ]
    assert [(entry.file, entry.line, entry.kind) for entry in bad.entries] == [
        (f"{path}!c.json", 2, "not text")
    ]
    with pytest.raises(DataError, match=r"a\.zip!a\.csv has no column 'body'"):
        read(path, text_field="body")


def test_a_response_that_is_cut_short_is_no_short_one(tmp_path: Path) -> None:
    path, text = tmp_path / "crawl.warc", b"a text of some length, of which the end is lost"
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        headers = StatusAndHeaders("200 OK", [("Content-Type", "text/plain")], protocol="HTTP/1.1")
        record = writer.create_warc_record(
            "http://example.org/", "response", payload=io.BytesIO(text), http_headers=headers
        )
        writer.write_record(record)
    assert [document.text for document in read(path)[0]] == [text.decode()]
    content = path.read_bytes()
    path.write_bytes(content[: content.index(text) + 20])
    with pytest.raises(DataError, match="ends within record 1: "):
        read(path)
