"""Archives of texts: .zip files, and WARC files that warcio wrote."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from bloomery.data.archives import zip_documents
from bloomery.data.documents import BadDocuments, Document
from bloomery.data.sources import find_files, read_documents
from bloomery.errors import DataError

TEXTS = ["a first text, é\n", "the second 語", "a third, longer one " * 200]


def read(path: Path, bad: BadDocuments | None = None, **reading: int) -> list[Document]:
    files = find_files([str(path)]).files
    return list(read_documents(files, text_field="a.text", bad=bad or BadDocuments(), **reading))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Lines, a text, what is no text, what is hidden, and what is not UTF-8."""
    path = tmp_path / "texts" / "all.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("b/lines.jsonl", "".join(json.dumps({"a": {"text": t}}) + "\n" for t in TEXTS) + "{}\n")
        made.writestr("a.txt", "\ufeff" + TEXTS[0])
        made.writestr("picture.png", b"\x89PNG")
        made.writestr("__MACOSX/a.txt", "a fork")
        made.writestr("wrong.md", b"\xff\xfe")
    return path


def test_the_members_of_a_zip_file_are_documents_by_their_names(archive: Path) -> None:
    bad = BadDocuments()
    found = read(archive.parent, bad)  # a directory: .zip is an ending that is read there
    assert [document.text for document in found] == [TEXTS[0], *TEXTS]
    assert [document.place for document in found[:2]] == [f"{archive}!a.txt", f"{archive}!b/lines.jsonl:1"]
    assert found[0].key == "all.zip/a.txt"
    assert [(entry.place, entry.kind) for entry in bad.entries] == [
        (f"{archive}!b/lines.jsonl:4", "without the field"),
        (f"{archive}!wrong.md", "not UTF-8"),
    ]


def test_a_member_that_is_too_long_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("bomb.txt", bytes(3 << 20))
        made.writestr("lines.jsonl", b'{"a": "' + b"x" * (3 << 20) + b'"}\n')
        made.writestr("small.txt", "small")
    bad = BadDocuments()
    assert [document.text for document in read(path, bad, longest_line_mib=1)] == ["small"]
    assert [entry.kind for entry in bad.entries] == ["too long", "too long"]


def test_a_damaged_zip_file_stops_the_work(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    for damaged in (content[:-30], content[:200] + bytes(40) + content[240:]):
        archive.write_bytes(damaged)
        with pytest.raises(DataError, match=r"all.zip is no whole .zip file"):
            read(archive)


@pytest.mark.parametrize("name", [b"\xff\xbc", b"\0\xbc"], ids=["no UTF-8", "empty"])
def test_a_zip_file_with_a_damaged_name_is_refused(tmp_path: Path, name: bytes) -> None:
    path = zipped(tmp_path / "texts.zip", {"\u00fc.txt": "text"})
    path.write_bytes(path.read_bytes().replace("\u00fc".encode(), name))
    with pytest.raises(DataError, match=r"texts\.zip is no whole \.zip file"):
        read(path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_file_with_a_damaged_member_is_refused_however_it_is_packed(
    tmp_path: Path, packing: int
) -> None:
    path = tmp_path / "texts.zip"
    with zipfile.ZipFile(path, "w", packing) as made:
        made.writestr("a.txt", "".join(map(str, range(3000))))
        place = made.getinfo("a.txt").header_offset
    content = bytearray(path.read_bytes())
    content[place + 100 : place + 140] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"texts.zip"):
        read(path)


def written(path: Path) -> Path:
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=path.name.endswith(".gz"))
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "a test"}))
        for number, text in enumerate(TEXTS):
            record = writer.create_warc_record(
                f"http://example.org/{number}",
                "conversion",
                payload=io.BytesIO(text.encode()),
                warc_content_type="text/plain",
            )
            writer.write_record(record)
        for kind, content in (
            ("text/html; charset=utf-8", b"<p>"),
            ("text/plain", b"plain"),
            ("text/plain", b"\xff"),
        ):
            headers = StatusAndHeaders("200 OK", [("Content-Type", kind)], protocol="HTTP/1.1")
            record = writer.create_warc_record(
                "http://example.org/", "response", payload=io.BytesIO(content), http_headers=headers
            )
            writer.write_record(record)
    return path


@pytest.mark.parametrize(
    "name", ["crawl.warc", "crawl.warc.gz", "crawl.wet", "crawl.warc.wet.gz", "crawl.x.wet"]
)
def test_the_plain_texts_of_a_warc_file_are_documents(tmp_path: Path, name: str) -> None:
    path, bad = written(tmp_path / name), BadDocuments()
    found = read(path, bad)
    assert [document.text for document in found] == [*TEXTS, "plain"]
    assert [document.place for document in found] == [f"{path}:{number}" for number in (2, 3, 4, 6)]
    assert [(entry.line, entry.kind) for entry in bad.entries] == [(5, "not plain text"), (7, "not UTF-8")]
    assert "WET" in bad.entries[0].why


@pytest.mark.parametrize("name", ["crawl.warc", "crawl.warc.gz"])
def test_half_a_warc_file_is_not_a_short_file(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name)
    content = path.read_bytes()
    place = content.index(b"third") + 50 if name.endswith("c") else len(content) // 3
    path.write_bytes(content[:place])
    with pytest.raises(DataError, match=r"crawl.warc\S* (ends within record|is no whole WARC file)"):
        read(path)


@pytest.mark.parametrize("kind", ["metadata", "resource"])
def test_a_warc_file_that_ends_within_a_record_that_is_no_document_is_not_a_short_file(
    tmp_path: Path, kind: str
) -> None:
    path, page = tmp_path / "crawl.warc", b"<p>a page of HTML</p>"
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        record = writer.create_warc_record(
            "http://example.org/", kind, payload=io.BytesIO(page), warc_content_type="text/html"
        )
        writer.write_record(record)
    assert read(path) == []
    content = path.read_bytes()
    path.write_bytes(content[: content.index(page) + len(page) // 2])
    with pytest.raises(DataError, match=f"ends within record 1: {len(page) // 2} of its {len(page)} bytes"):
        read(path)


def test_a_record_that_is_too_long_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "long.warc"
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        for content in (b"x" * (3 << 20), b"short"):
            record = writer.create_warc_record(
                "http://example.org/",
                "conversion",
                payload=io.BytesIO(content),
                warc_content_type="text/plain",
            )
            writer.write_record(record)
    bad = BadDocuments()
    assert [document.text for document in read(path, bad, longest_line_mib=1)] == ["short"]
    assert [entry.kind for entry in bad.entries] == ["too long"]


def test_a_file_that_ends_within_a_record_that_is_too_long_is_not_a_short_file(tmp_path: Path) -> None:
    path, text = tmp_path / "crawl.warc", b"x" * (3 << 20)
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        record = writer.create_warc_record(
            "http://example.org/", "conversion", payload=io.BytesIO(text), warc_content_type="text/plain"
        )
        writer.write_record(record)
    bad = BadDocuments()
    assert read(path, bad, longest_line_mib=1) == [] and [entry.kind for entry in bad.entries] == ["too long"]
    path.write_bytes(path.read_bytes()[: -(1 << 20)])
    with pytest.raises(DataError, match="ends within record 1"):
        read(path, longest_line_mib=1)


def test_a_mark_of_utf8_before_the_first_line_of_a_member_is_no_part_of_it(tmp_path: Path) -> None:
    path, mark = tmp_path / "lines.zip", "\ufeff"
    line = json.dumps({"a": {"text": "one"}}) + "\n"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("lines.jsonl", mark + line + mark + line)
        made.writestr("deep/.hidden/x.jsonl", line)
    bad = BadDocuments()
    assert [document.text for document in read(path, bad)] == ["one"]
    assert [(entry.place, entry.kind) for entry in bad.entries] == [
        (f"{path}!lines.jsonl:2", "malformed JSON")
    ]


def zipped(path: Path, members: dict[str, bytes | str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(name, content)
    return path


def test_a_member_of_just_the_longest_size_is_read(tmp_path: Path) -> None:
    path = zipped(tmp_path / "all.zip", {"a.txt": "x" * (1 << 20), "b.txt": "x" * ((1 << 20) + 1)})
    bad = BadDocuments()
    (found,) = read(path, bad, longest_line_mib=1)
    assert found.key == "all.zip/a.txt" and [entry.kind for entry in bad.entries] == ["too long"]


def test_documents_of_a_member_have_the_size_of_their_utf8(tmp_path: Path) -> None:
    text = "é" * 100
    path = zipped(tmp_path / "all.zip", {"a.txt": text, "b.jsonl": json.dumps({"a": {"text": text}}) + "\n"})
    assert [document.size_bytes for document in read(path)] == [200, 200]


def test_a_line_of_a_member_that_is_too_long_does_not_end_the_member(tmp_path: Path) -> None:
    lines = [json.dumps({"a": {"text": text}}) for text in ("one", "x" * (1 << 20), "two")]
    path, bad = zipped(tmp_path / "all.zip", {"a.jsonl": "\n".join(lines)}), BadDocuments()
    found = read(path, bad, longest_line_mib=1)
    assert [document.text for document in found] == ["one", "two"]
    assert found[-1].place == f"{path}!a.jsonl:3"
    assert [(entry.line, entry.kind) for entry in bad.entries] == [(2, "too long")]


def test_members_of_lines_are_known_by_either_ending(tmp_path: Path) -> None:
    line = json.dumps({"a": {"text": "one"}}) + "\n"
    path = zipped(tmp_path / "all.zip", {f"a.{ending}": 2 * line for ending in ("jsonl", "ndjson", "x")})
    places = [document.place for document in read(path)]
    assert places == [f"{path}!a.{ending}:{number}" for ending in ("jsonl", "ndjson") for number in (1, 2)]


def test_lines_of_a_member_have_their_prompts(tmp_path: Path) -> None:
    path = zipped(tmp_path / "all.zip", {"a.jsonl": json.dumps({"ask": "two?", "answer": "2"}) + "\n"})
    fields = {"text_field": "answer", "prompt_field": "ask"}
    (found,) = zip_documents(path, path.name, **fields, longest_bytes=99, endings=(), bad=BadDocuments())
    assert found.text[: found.prompt] == "two?" and found.text[found.prompt :].endswith("2")


def test_a_zip_file_with_a_password_is_refused_with_what_helps(tmp_path: Path) -> None:
    path = zipped(tmp_path / "all.zip", {"a.txt": "a text"})
    content = bytearray(path.read_bytes())
    content[6] |= 1  # of the member's own header, and of that in the list
    content[content.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"all\.zip is no whole \.zip file: .*encrypted") as refused:
        read(path)
    assert "take it out of data.sources" in refused.value.remedy


def crawled(path: Path, records: list[tuple[str, str, bytes, dict[str, str]]]) -> Path:
    """Write records of (kind, type of content, content, further HTTP headers of a response)."""
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        for kind, content_type, content, further in records:
            fields = [("Content-Type", content_type), *further.items()]
            http = StatusAndHeaders("200 OK", fields, protocol="HTTP/1.1") if kind == "response" else None
            record = writer.create_warc_record(
                "http://example.org/",
                kind,
                payload=io.BytesIO(content),
                warc_content_type="" if http else content_type,
                http_headers=http,
            )
            writer.write_record(record)
    return path


def test_plain_text_of_any_record_is_a_document(tmp_path: Path) -> None:
    squeezed, chunks = gzip.compress("gepackt, é".encode()), b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    records = [
        ("resource", "text/plain", "a file, é".encode(), {}),
        ("response", "Text/Plain; charset=UTF-8", b"in capitals", {}),
        ("response", "text/plain", squeezed, {"Content-Encoding": "gzip"}),
        ("response", "text/plain", chunks, {"Transfer-Encoding": "chunked"}),
    ]
    found = read(crawled(tmp_path / "crawl.warc", records))
    assert [document.text for document in found] == ["a file, é", "in capitals", "gepackt, é", "abcde"]
    assert [document.size_bytes for document in found] == [10, 11, 11, 5]


@pytest.mark.parametrize("kind", ["conversion", "response"])
def test_a_record_of_just_the_longest_size_is_read(tmp_path: Path, kind: str) -> None:
    records = [(kind, "text/plain", b"x" * ((1 << 20) + more), {}) for more in (0, 1)]
    bad = BadDocuments()
    (found,) = read(crawled(tmp_path / "crawl.warc", records), bad, longest_line_mib=1)
    assert len(found.text) == 1 << 20 and [entry.kind for entry in bad.entries] == ["too long"]


@pytest.mark.parametrize("name", ["crawl.warc", "crawl.warc.gz"])
def test_what_helps_against_half_a_warc_file_is_told_with_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    crawled(tmp_path / "whole", [("conversion", "text/plain", TEXTS[0].encode(), {})])
    content = (tmp_path / "whole").read_bytes()
    path.write_bytes(gzip.compress(content)[:-9] if name.endswith(".gz") else content[:-9])
    with pytest.raises(DataError, match=r"crawl\.warc") as refused:
        read(path)
    assert "take it out of data.sources" in refused.value.remedy


def test_a_response_that_names_no_page_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "crawl.warc")
    path.write_bytes(path.read_bytes().replace(b"WARC-Target-URI: http://example.org/\r\n", b"", 1))
    with pytest.raises(
        DataError, match=r"crawl.warc is no whole WARC file after record 4: .*WARC-Target-URI"
    ):
        read(path)
