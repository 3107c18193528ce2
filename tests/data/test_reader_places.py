"""Where each document of each format is, to the line, and which formats hold what."""

from __future__ import annotations

import csv
import gzip
import json
import zipfile
from pathlib import Path
from typing import IO

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.data.test_readers import as_zstd, write_arrow

from bloomery.data import fetch
from bloomery.data.documents import BadDocuments, BadText, Document, count_lines
from bloomery.data.readers import Reading, SourceFile, read_file
from bloomery.errors import DataError


def of(path: Path, bad: BadDocuments | None = None, **reading: object) -> list[Document]:
    settings = Reading(**reading)  # type: ignore[arg-type]
    file = SourceFile(key=f"below/{path.name}", path=path)
    return list(read_file(file, reading=settings, bad=bad or BadDocuments()))


def placed(documents: list[Document], path: Path) -> list[tuple[str, str]]:
    return [(document.text, document.place.removeprefix(str(path))) for document in documents]


def test_a_file_that_cannot_be_read_is_named_with_the_systems_reason(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.txt", "a.txt.gz", "a.json", "a.csv", "a.arrow", "a.parquet", "a.zip"):
        with pytest.raises(DataError) as refused:
            of(tmp_path / name)
        assert refused.value.message.startswith(f"Cannot read {tmp_path / name}: "), name
        assert "No such file or directory" in refused.value.message
        assert refused.value.remedy == "Check that the file is there, whole, and yours to read."


def test_good_documents_are_counted_as_they_come(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{}\n{"text": "y"}\n')
    bad = BadDocuments()
    counts = []
    file = SourceFile(key="a", path=tmp_path / "a.jsonl")
    for document in read_file(file, reading=Reading(), bad=bad):
        counts.append((document.text, bad.good, bad.count))
    assert counts == [("x", 1, 0), ("y", 2, 1)] and bad.lines == {str(tmp_path / "a.jsonl"): 3}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.zst"])
def test_lines_have_their_numbers_prompts_and_sizes_packed_or_not(tmp_path: Path, name: str) -> None:
    lines = b'{"q": "wi\xc3\xa9? ", "text": "so \xc3\xa9"}\n{"q": 3, "text": "x"}\n\n{"q": "a", "text": "b"}'
    packed = {"gz": gzip.compress, "st": as_zstd}.get(name[-2:], bytes)
    (tmp_path / name).write_bytes(packed(lines))
    bad = BadDocuments()
    path = tmp_path / name
    assert of(path, bad, prompt_field="q") == [
        Document(text="wié? so é", prompt=5, place=f"{path}:1", size_bytes=11),
        Document(text="ab", prompt=1, place=f"{path}:4", size_bytes=2),
    ]
    assert [(one.place, one.kind) for one in bad.entries] == [
        (f"{path}:2", "not text"),
        (f"{path}:3", "malformed JSON"),
    ]
    assert bad.lines == {str(path): 4}


def test_lines_of_a_part_are_counted_from_its_beginning_unless_the_first_bad_one_ends_the_work(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{}\n{"text": "four"}\n')
    part = SourceFile(key="a", path=path, start=16, stop=40)
    bad = BadDocuments()
    (two, four) = read_file(part, reading=Reading(), bad=bad)
    assert (two.place, four.place) == (f"{path}:1", f"{path}:3") and bad.entries[0].line == 2
    failing = BadDocuments(fail=True)
    with pytest.raises(DataError, match=r"a\.jsonl:3: no field"):
        list(read_file(part, reading=Reading(), bad=failing))


def test_the_lines_before_a_part_are_counted_only_where_a_bad_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, counted = tmp_path / "a.jsonl", list[int]()
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n{"text": "four"}\n')

    def count(stream: IO[bytes], stop: int) -> int:
        counted.append(stop)
        return count_lines(stream, stop)

    monkeypatch.setattr("bloomery.data.readers.count_lines", count)
    parts = [SourceFile(key="a", path=path, start=start, stop=start + 16) for start in (0, 16, 32)]
    failing = BadDocuments(fail=True)
    read = [one for part in parts for one in read_file(part, reading=Reading(), bad=failing)]
    assert [one.text for one in read] == ["one", "two", "three"] and counted == []
    late = BadText(kind="with an end of document inside", why="found when it was encoded")
    with pytest.raises(DataError, match=r"a\.jsonl:3: found"):
        failing.add(late.at(path, int(read[2].place.rpartition(":")[2])))
    assert counted == [32]


def test_only_at_the_beginning_of_a_file_is_a_byte_order_mark_no_text(tmp_path: Path) -> None:
    path, bad = tmp_path / "a.jsonl", BadDocuments()
    line = b'\xef\xbb\xbf{"text": "one"}\n'
    path.write_bytes(line * 2)
    assert placed(of(path, bad), path) == [("one", ":1")]
    assert list(read_file(SourceFile(key="a", path=path, start=len(line)), reading=Reading(), bad=bad)) == []
    assert [entry.line for entry in bad.entries] == [2, 1]
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext,id\none,1\n")
    assert placed(of(tmp_path / "a.csv"), tmp_path / "a.csv") == [("one", ":2")]


def test_line_ends_within_a_cell_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text\r\n"a\r\nb\nc\rd"\r\n')
    assert [document.text for document in of(tmp_path / "a.csv")] == ["a\r\nb\nc\rd"]


def test_a_text_file_is_one_document_with_its_name(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "c.py"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbfeins\xc3\xa9\n")
        assert of(tmp_path / name) == [
            Document(text="einsé\n", place=str(tmp_path / name), size_bytes=7, name=f"below/{name}")
        ]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz"])
@pytest.mark.parametrize(
    ("content", "separator", "found", "wrong"),
    [
        ("a\nb%%c%%d", "%%", [("a\nb", ":1"), ("c", ":2"), ("d", ":2")], []),
        ("a\n%%\nb\nc\n%%\nd", "\n%%\n", [("a", ":1"), ("b\nc", ":3"), ("d", ":6")], []),
        ("a\n\n\n\nb", "\n\n", [("a", ":1"), ("b", ":5")], [(3, "empty")]),
        ("%%a%%", "%%", [("a", ":1")], []),
        ("%%%%", "%%", [], [(1, "empty")]),
        ("x\n%%y\n\udcff%%z", "%%", [("x\n", ":1"), ("z", ":3")], [(3, "not UTF-8")]),
    ],
)
def test_pieces_between_separators_begin_at_their_lines(
    tmp_path: Path,
    name: str,
    content: str,
    separator: str,
    found: list[tuple[str, str]],
    wrong: list[tuple[int, str]],
) -> None:
    raw = content.encode(errors="surrogateescape")
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    bad = BadDocuments()
    assert placed(of(tmp_path / name, bad, separator=separator), tmp_path / name) == found
    assert [(entry.line, entry.kind) for entry in bad.entries] == wrong


def test_rows_of_a_table_end_at_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text,more\n1,"two\nlines, é",x\n2,,\n3\n4,last,\n', encoding="utf-8")
    bad = BadDocuments()
    assert of(path, bad) == [
        Document(text="two\nlines, é", place=f"{path}:3", size_bytes=13),
        Document(text="last", place=f"{path}:6", size_bytes=4),
    ]
    assert [(entry.line, entry.kind, entry.why) for entry in bad.entries] == [
        (4, "empty", "the document is empty"),
        (5, "malformed row", "the row ends before the column"),
    ]
    assert placed(of(path, text_field="more"), path) == [("x", ":3")]


def test_a_table_that_cannot_be_taken_apart_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,id\nshort,1\n" + "x" * 200_000 + ",2\n")
    usual = csv.field_size_limit(1000)
    monkeypatch.setattr(csv, "field_size_limit", lambda limit: None)
    try:
        with pytest.raises(DataError) as refused:
            of(path)
    finally:
        monkeypatch.undo()
        csv.field_size_limit(usual)
    assert refused.value.message.startswith(f"{path} is no table at line 3: ")
    assert refused.value.message.endswith(": field larger than field limit (1000).")
    assert refused.value.remedy == (
        "Save it as CSV in UTF-8, or as .jsonl or .parquet, or allow for longer texts: data.longest_line_mib."
    )
    assert [len(document.text) for document in of(path)] == [5, 200_000]


def test_records_of_an_array_are_numbered_from_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": {"b": "é"}}, 5, {"a": {}}, {"a": {"b": "z"}}]), encoding="utf-8")
    bad = BadDocuments()
    assert of(path, bad, text_field="a.b") == [
        Document(text="é", place=f"{path}[1]", size_bytes=2),
        Document(text="z", place=f"{path}[4]", size_bytes=1),
    ]
    assert [(entry.place, entry.kind) for entry in bad.entries] == [
        (f"{path}:2", "not an object"),
        (f"{path}:3", "without the field"),
    ]
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"a\.json is no JSON in UTF-8"):
        of(path)


def test_row_groups_of_a_part_are_those_between_its_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"other": [9] * 9, "text": [f"t{number}é" for number in range(9)]})
    parquet.write_table(table, path, row_group_size=2)  # five groups
    for start, stop, rows in ((0, None, range(9)), (1, 3, range(2, 6)), (4, None, range(8, 9)), (2, 2, [])):
        part = SourceFile(key="a", path=path, start=start, stop=stop)
        found = list(read_file(part, reading=Reading(), bad=BadDocuments()))
        assert found == [Document(text=f"t{row}é", place=f"{path}:{row + 1}", size_bytes=4) for row in rows]


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_text_within_several_structures_is_found_by_all_of_their_names(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    rows = [{"in": {"text": f"inner {number}", "b": "other"}, "text": "outer"} for number in range(3)]
    table = pa.table({"text": ["no"] * 3, "s": rows, "s.text": ["dotted"] * 3})
    if ending == ".parquet":
        parquet.write_table(table, path)
    else:
        write_arrow(path, table, rows=2)
    assert placed(of(path, text_field="s.in.text"), path) == [(f"inner {n}", f":{n + 1}") for n in range(3)]
    assert {text for text, _ in placed(of(path, text_field="s.text"), path)} == {"dotted"}


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_column_of_something_else_is_told_with_its_type(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    table = pa.table({"text": [3, None], "s": [{"x": "inner"}, {"x": ""}], "b": [b"raw\xff", b"fine"]})
    if ending == ".parquet":
        parquet.write_table(table, path)
    else:
        write_arrow(path, table, rows=1)
    bad = BadDocuments()
    assert of(path, bad) == []
    assert [(entry.line, entry.kind, entry.why) for entry in bad.entries] == [
        (1, "not text", "column 'text' holds int, not text"),
        (2, "not text", "column 'text' holds NoneType, not text"),
    ]
    assert placed(of(path, text_field="s.x"), path) == [("inner", ":1")]
    assert placed(of(path, text_field="b"), path) == [("fine", ":2")]
    for wrong in ("s.y", "text.x", "s.x.y"):
        with pytest.raises(DataError) as refused:
            of(path, text_field=wrong)
        said = f"{path} has no column {wrong!r}; its columns are text, s, b, s.x."
        assert refused.value.message == said, wrong
        assert refused.value.remedy == ("Name the one that holds the text: data.text_field, or --text-field.")


@pytest.mark.parametrize(
    ("name", "has_prompts"),
    [
        ("a.jsonl", True),
        ("a.jsonl.gz", True),
        ("a.json.zst", True),
        ("a.json", True),
        ("a.txt", False),
        ("a.txt.gz", False),
        ("a.csv", False),
        ("a.parquet", False),
        ("a.arrow", False),
        ("a.zip", False),
        ("a.warc.gz", False),
    ],
)
def test_prompts_are_fields_of_json_records_alone(tmp_path: Path, name: str, has_prompts: bool) -> None:
    line = b'{"q": "p", "text": "t"}\n'
    content = {"a.json": b"[" + line + b"]", "a.jsonl.gz": gzip.compress(line), "a.json.zst": as_zstd(line)}
    (tmp_path / name).write_bytes(content.get(name, line))
    if has_prompts:
        assert [(one.text, one.prompt) for one in of(tmp_path / name, prompt_field="q")] == [("pt", 1)]
    else:
        with pytest.raises(DataError) as refused:
            of(tmp_path / name, prompt_field="q")
        said = f"{tmp_path / name} holds no prompts: data.prompt_field = 'q' names a field of JSON records."
        assert refused.value.message == said


def test_members_of_an_archive_are_read_by_their_endings_in_the_order_of_their_names(tmp_path: Path) -> None:
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("d.ndjson", '{"text": "four"}\n')
        made.writestr("c.rst", "three")
        made.writestr("b.jsonl", '{"text": "two"}\n{"text": 2}\n')
        made.writestr("a.md", "\ufeffone é")
        made.writestr("deep/__init__.py", "hidden by its name")
        made.writestr("deep/e.html", b"\xff")
        made.writestr("deep/f.bin", b"left out")
        made.mkdir("empty.txt")
    bad = BadDocuments()
    assert of(path, bad) == [
        Document(text="one é", place=f"{path}!a.md", size_bytes=6, name="below/all.zip/a.md"),
        Document(text="two", place=f"{path}!b.jsonl:1", size_bytes=3),
        Document(text="three", place=f"{path}!c.rst", size_bytes=5, name="below/all.zip/c.rst"),
        Document(text="four", place=f"{path}!d.ndjson:1", size_bytes=4),
    ]
    assert [(entry.place, entry.kind) for entry in bad.entries] == [
        (f"{path}!b.jsonl:2", "not text"),
        (f"{path}!deep/e.html", "not UTF-8"),
    ]


def test_a_packed_file_that_breaks_off_says_after_which_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    first = b"".join(b'{"text": "%d"}\n' % number for number in range(7))
    path.write_bytes(gzip.compress(first) + gzip.compress(b'{"text": "x"}\n' * 9)[:-9])
    with pytest.raises(DataError, match=rf"{path} is damaged after line \d+: ") as refused:
        of(path)
    assert refused.value.remedy.startswith("Copy it again from where it is whole, or take it out")
    monkeypatch.setattr("bloomery.data.readers.CHUNK_BYTES", 16)
    with pytest.raises(DataError, match=rf"{path} is damaged after line 16: "):
        of(path)


def test_the_list_that_a_fetch_keeps_beside_its_files_holds_no_documents(tmp_path: Path) -> None:
    path, bad = tmp_path / fetch.FILES, BadDocuments()
    path.write_text('{"name": "web/a.jsonl", "bytes": 3}\n')
    assert of(path, bad, text_field="name") == [
        Document(text="web/a.jsonl", place=f"{path}:1", size_bytes=11)
    ], "a file that is only called so"
    (tmp_path / fetch.RECORD).write_text("{}")
    assert of(path, bad, text_field="name") == [] and of(path, bad) == [] and not bad.count
