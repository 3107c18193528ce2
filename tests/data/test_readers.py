"""Every format gives the same documents, and nothing that is wrong with one goes unsaid."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from bloomery.data import documents
from bloomery.data.documents import BadDocuments, Document
from bloomery.data.readers import Reading, SourceFile, read_file
from bloomery.data.sources import find_files, read_documents
from bloomery.data.text_pieces import split_stream
from bloomery.errors import DataError

TEXTS = ["first\nwith two lines", "zweites: ä ö ü", "日本語", "x" * 5000, "last"]


def read(path: Path, *, fail: bool = False, separator: str = "") -> tuple[list[Document], BadDocuments]:
    bad = BadDocuments(fail=fail)
    files = find_files([str(path)]).files
    return list(read_documents(files, text_field="text", separator=separator, bad=bad)), bad


def as_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def as_zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(content)
    return sink.getvalue().to_pybytes()


def write_arrow(path: Path, table: pa.Table, *, rows: int = 2) -> None:
    """As `datasets` does: a stream of record batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=rows)


def saved_dataset(directory: Path, texts: list[str]) -> None:
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    write_arrow(directory / "data-00000-of-00002.arrow", table.slice(0, 3))
    write_arrow(directory / "data-00001-of-00002.arrow", table.slice(3))
    write_arrow(directory / "cache-1234.arrow", table)  # what a map() left behind is no document
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (directory / "state.json").write_text(json.dumps({"_data_files": files}))


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    table = pa.table({"text": TEXTS, "id": range(5)})
    packed = as_zstd(as_lines(TEXTS[:2])) + as_zstd(as_lines(TEXTS[2:]))
    (tmp_path / "a.jsonl").write_bytes(as_lines(TEXTS))
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(as_lines(TEXTS[:2])) + gzip.compress(as_lines(TEXTS[2:]))
    )
    (tmp_path / "c.jsonl.zst").write_bytes(packed)
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(as_lines(TEXTS)))
    parquet.write_table(table, tmp_path / "e.parquet", row_group_size=2)
    write_arrow(tmp_path / "f.arrow", table)
    large = table.set_column(0, "text", table["text"].cast(pa.large_string()))
    parquet.write_table(large, tmp_path / "g.parquet", compression="zstd")
    coded = table.set_column(0, "text", table["text"].combine_chunks().dictionary_encode())
    write_arrow(tmp_path / "h.arrow", coded)
    (tmp_path / "i.txt").write_text("<end>".join(TEXTS))
    saved_dataset(tmp_path / "saved", TEXTS)
    expected = [(text, len(text.encode())) for text in TEXTS]
    for path in sorted(tmp_path.iterdir()):
        documents, bad = read(path, separator="<end>")
        assert [(one.text, one.size_bytes) for one in documents] == expected, path
        assert not bad.entries
    assert len(read(tmp_path, separator="<end>")[0]) == 10 * 5


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_parts_of_a_file_of_lines_hold_each_line_once(tmp_path: Path, parts: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(TEXTS).rstrip(b"\n"))  # the last line may lack its end
    size = path.stat().st_size
    bounds = [size * number // parts for number in range(parts + 1)]
    found = []
    for start, stop in pairwise(bounds):
        part = SourceFile(key="a.jsonl", path=path, start=start, stop=stop)
        found += [one.text for one in read_file(part, reading=Reading(), bad=BadDocuments())]
    assert found == TEXTS


def test_a_bad_line_in_a_later_part_is_refused_with_its_place_in_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = as_lines(["x"] * 20).splitlines(keepends=True)
    lines[15] = b"{}\n"
    path.write_bytes(b"".join(lines))
    for start in (1, len(lines[0]), len(lines[0]) * 3 + 2):
        part = SourceFile(key="a.jsonl", path=path, start=start, stop=path.stat().st_size)
        with pytest.raises(DataError, match=r"a\.jsonl:16: no field"):
            list(read_file(part, reading=Reading(), bad=BadDocuments(fail=True)))


def test_rows_without_text_are_named_by_their_number(tmp_path: Path) -> None:
    wrong = pa.array([b"fine", b"", b"b\xe4d", None, b"fine too"], pa.binary())
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
        if path.suffix == ".parquet":
            parquet.write_table(pa.table({"text": wrong}), path, row_group_size=2)
        else:
            write_arrow(path, pa.table({"text": wrong.view(pa.string())}))
        documents, bad = read(path)
        assert [one.text for one in documents] == ["fine", "fine too"]
        assert [(entry.place, entry.kind) for entry in bad.entries] == [
            (f"{path}:2", "empty"),
            (f"{path}:3", "not UTF-8"),
            (f"{path}:4", "not text"),
        ]
        with pytest.raises(DataError, match=rf"a{path.suffix}:2: the document is empty"):
            read(path, fail=True)


def test_a_table_without_the_column_is_refused_with_those_it_has(tmp_path: Path) -> None:
    table = pa.table({"content": ["a"], "id": [1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", table)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(DataError, match=r"no column 'text'; its columns are content, id") as refused:
            read(path)
        assert "--text-field" in refused.value.remedy


@pytest.mark.parametrize("ending", ["jsonl.zst", "jsonl.gz", "parquet", "arrow"])
def test_a_file_cut_short_is_refused_and_not_taken_for_a_short_one(tmp_path: Path, ending: str) -> None:
    texts = [f"{number**50} {number}" for number in range(3000)]
    path = tmp_path / f"cut.{ending}"
    if ending == "parquet":
        parquet.write_table(pa.table({"text": texts}), path)
    elif ending == "arrow":
        write_arrow(path, pa.table({"text": texts}), rows=100)
    else:
        path.write_bytes(as_zstd(as_lines(texts)) if "zst" in ending else gzip.compress(as_lines(texts)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=r"cut\.\w+") as refused:
        read(path)
    assert refused.value.remedy


def test_pieces_between_separators_are_documents_and_empty_ones_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"<s>one\n<s><s>b\xe4d<s>two\n\nlines<s>")
    documents, bad = read(tmp_path / "a.txt", separator="<s>")
    assert [(one.text, one.place) for one in documents] == [
        ("one\n", f"{tmp_path}/a.txt:1"),
        ("two\n\nlines", f"{tmp_path}/a.txt:2"),
    ]
    assert [(entry.line, entry.kind) for entry in bad.entries] == [(2, "empty"), (2, "not UTF-8")]


def test_a_dataset_of_several_splits_is_not_taken_as_a_whole(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved_dataset(tmp_path / split, TEXTS)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="splits train, test") as refused:
        read(tmp_path)
    assert f"{tmp_path}/train" in refused.value.remedy
    assert len(read(tmp_path / "train")[0]) == 5
    (tmp_path / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json"):
        read(tmp_path / "train")


def test_token_files_among_the_sources_are_named_with_where_they_belong(tmp_path: Path) -> None:
    for name in ("a.bin", "a.idx"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError) as refused:
        read(tmp_path)
    assert "data.datasets" in refused.value.remedy
    (tmp_path / "b.txt").write_text("text")
    assert "data.datasets" in find_files([str(tmp_path)]).note()


MARK = b"\xef\xbb\xbf"


def test_a_byte_order_mark_costs_no_document_and_is_in_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(MARK + as_lines(TEXTS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(MARK + as_lines(TEXTS)))
    (tmp_path / "c.json").write_bytes(MARK + json.dumps([{"text": text} for text in TEXTS]).encode())
    for name in ("a.jsonl", "b.jsonl.gz", "c.json"):
        documents, bad = read(tmp_path / name)
        assert [document.text for document in documents] == TEXTS and not bad.entries, name
    (tmp_path / "d.txt").write_bytes(MARK + b"one||two")
    assert [one.text for one in read(tmp_path / "d.txt")[0]] == ["one||two"]
    assert [one.text for one in read(tmp_path / "d.txt", separator="||")[0]] == ["one", "two"]


def test_a_mark_within_a_part_of_a_file_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(["x"]) + b'"\xef\xbb\xbf"\n')
    part = SourceFile(key="a", path=path, start=len(as_lines(["x"])))
    bad = BadDocuments()
    assert list(read_file(part, reading=Reading(), bad=bad)) == [] and len(bad.entries) == 1


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_pieces_between_separators_are_those_of_a_split_whatever_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", chunk)
    for content in (b"", b"aba", b"ababa", b"xabaaba", b"abaabaababa", b"aabbaabab" * 5):
        for separator in (b"a", b"ab", b"aba", b"abab", b"zz"):
            pieces = [
                piece.content for piece in split_stream(io.BytesIO(content), separator, longest_bytes=99)
            ]
            assert pieces == content.split(separator), (content, separator)


def test_text_without_the_separator_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four million bytes, 16 at a time: searching all that is held again would take 5 × 10¹¹ comparisons."""
    monkeypatch.setattr(documents, "CHUNK_BYTES", 16)
    content = b"no separator in here" * 200_000
    (piece,) = split_stream(io.BytesIO(content), b"<|doc|>", longest_bytes=1 << 30)
    assert piece == (content, 0, True)


def test_a_corpus_whose_first_thousand_documents_are_all_bad_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = b'{"body": "text"}\n'
    path.write_bytes(line * 1_500)
    bad = BadDocuments()
    with pytest.raises(DataError, match=r"first 1,000 documents are all bad.*body") as refused:
        list(read_file(SourceFile(key="a", path=path), reading=Reading(), bad=bad))
    assert "--text-field" in refused.value.remedy and len(bad.entries) == 1_000
    path.write_bytes(line * 900 + as_lines(["good"]) + line * 900)
    bad = BadDocuments()
    assert len(list(read_file(SourceFile(key="a", path=path), reading=Reading(), bad=bad))) == 1
    assert len(bad.entries) == 1_800, "after a good one, all the rest is read"


def test_packed_text_is_read_as_text_and_with_separators(tmp_path: Path) -> None:
    text = "eins\n%%\nzwei: ä\n%%\ndrei"
    plain, packed, zstd = (tmp_path / name for name in ("a.txt", "b.txt.gz", "c.txt.zst"))
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    zstd.write_bytes(as_zstd(text.encode()))
    for path in (packed, zstd):
        assert [document.text for document in read(path)[0]] == [text]
        pieces, _ = read(path, separator="\n%%\n")
        assert [document.text for document in pieces] == text.split("\n%%\n")
    assert len(find_files([str(tmp_path)]).files) == 3
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"b\.txt\.gz is damaged"):
        read(packed)


def test_a_table_gives_the_column_of_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        rows = csv.writer(stream)
        rows.writerow(["id", "text"])
        rows.writerows([number, text] for number, text in enumerate([*TEXTS, "y" * 300_000]))
    documents, bad = read(path)
    assert [document.text for document in documents] == [*TEXTS, "y" * 300_000] and not bad.entries
    path.write_bytes(b"text,id\nfine,1\n\xff\xfe,2\n,3\n")
    documents, bad = read(path)
    assert [document.text for document in documents] == ["fine"]
    assert [(entry.kind, entry.line) for entry in bad.entries] == [("not UTF-8", 3), ("empty", 4)]
    path.write_text("id,texts\n1\n")
    with pytest.raises(DataError, match=r"no column 'text'; its columns are id, texts"):
        read(path)
    tabs = tmp_path / "table.tsv"
    tabs.write_text("id\ttext\n1\ta, b\n2\n")
    documents, bad = read(tabs)
    assert [document.text for document in documents] == ["a, b"]
    assert [entry.kind for entry in bad.entries] == ["malformed row"]
    assert find_files([str(tmp_path / "*.csv")]).files  # by a glob; in a directory tables are left out


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_column_inside_a_structure_is_named_with_a_dot(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"nested{ending}"
    rows = [{"meta": {"body": text, "id": 1}, "other": 2} for text in TEXTS] + [{"meta": None, "other": 3}]
    table = pa.Table.from_pylist(rows)
    if ending == ".parquet":
        parquet.write_table(table, path)
    else:
        write_arrow(path, table)
    bad = BadDocuments()
    file = SourceFile(key=path.name, path=path)
    texts = [document.text for document in read_file(file, reading=Reading(text_field="meta.body"), bad=bad)]
    assert texts == TEXTS and len(bad.entries) == 1
    with pytest.raises(DataError, match=r"no column 'meta.text'; its columns are .*meta.body"):
        list(read_file(file, reading=Reading(text_field="meta.text"), bad=BadDocuments()))


def test_a_line_beyond_the_limit_is_bad_and_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(as_lines(["before"]) + b'{"text": "')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + as_lines(["after"]))
    bad, reading = BadDocuments(), Reading(longest_line_mib=1)
    file_of_it = SourceFile(key="a", path=path)
    tracemalloc.start()
    documents = list(read_file(file_of_it, reading=reading, bad=bad))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(document.text, document.place[-1]) for document in documents] == [
        ("before", "1"),
        ("after", "3"),
    ]
    assert [(entry.line, entry.kind) for entry in bad.entries] == [(2, "too long")]
    assert "67,108,877 bytes" in bad.entries[0].why and "longest_line_mib" in bad.entries[0].why
    assert peak_bytes < 32 << 20
    part = SourceFile(key="a", path=path, start=1 << 20, stop=(64 << 20) + 100)
    assert [document.text for document in read_file(part, reading=reading, bad=BadDocuments())] == ["after"]


def of(path: Path, **reading: object) -> tuple[list[Document], BadDocuments]:
    bad = BadDocuments()
    return list(read_file(SourceFile(key=path.name, path=path), reading=Reading(**reading), bad=bad)), bad  # type: ignore[arg-type]


def test_rows_are_numbered_through_all_batches_and_row_groups(tmp_path: Path) -> None:
    texts: list[str | None] = [f"text {number}" for number in range(2_500)]
    texts[0] = texts[1_100] = texts[2_400] = None
    parquet.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet", row_group_size=1_500)
    write_arrow(tmp_path / "rows.arrow", pa.table({"text": texts}), rows=1_000)
    for name in ("rows.parquet", "rows.arrow"):
        found, bad = of(tmp_path / name)
        assert [entry.line for entry in bad.entries] == [1, 1_101, 2_401]
        assert (found[0].place, found[-1].place) == (f"{tmp_path / name}:2", f"{tmp_path / name}:2500")
    last = SourceFile(key="rows.parquet", path=tmp_path / "rows.parquet", start=1, stop=2)
    bad = BadDocuments()
    (one, *_) = read_file(last, reading=Reading(), bad=bad)
    assert one.text == "text 1500" and one.place.endswith(":1501")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_columns_of_every_kind_of_text_are_read_and_not_utf8_is_told(
    tmp_path: Path, kind: pa.DataType
) -> None:
    path = tmp_path / "kinds.parquet"
    parquet.write_table(pa.table({"text": pa.array(["one", "zwei ä"]).cast(kind)}), path)
    assert [document.text for document in of(path)[0]] == ["one", "zwei ä"]
    if kind == pa.large_string():
        broken = pa.array([b"fine", b"caf\xe9"], pa.large_binary()).view(kind)
        parquet.write_table(pa.table({"text": broken}), path)
        found, bad = of(path)
        assert [one.text for one in found] == ["fine"]
        assert [(entry.line, entry.kind) for entry in bad.entries] == [(2, "not UTF-8")]


def test_a_list_of_records_has_prompts_and_what_holds_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps([{"q": "how? ", "text": "so"}, {"text": "alone"}, {"q": 3, "text": "x"}]))
    found, bad = of(path, prompt_field="q")
    assert [(one.text, one.prompt, one.place) for one in found] == [("how? so", 5, f"{path}[1]")]
    assert [(entry.line, entry.kind) for entry in bad.entries] == [(2, "without the field"), (3, "not text")]
    (tmp_path / "plain.txt").write_text("x")
    with pytest.raises(DataError, match="holds no prompts"):
        of(tmp_path / "plain.txt", prompt_field="q")


def test_a_table_without_a_row_has_no_column_and_a_dotted_field_needs_an_object(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match=r"no column 'text'; its columns are none"):
        of(tmp_path / "empty.csv")
    (tmp_path / "dotted.jsonl").write_text('{"a": "xbx"}\n{"a": {"b": "found"}}\n{"a.b": "by its name"}\n')
    found, bad = of(tmp_path / "dotted.jsonl", text_field="a.b")
    assert [one.text for one in found] == ["found", "by its name"]
    assert [(entry.line, entry.kind) for entry in bad.entries] == [(1, "without the field")]


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "half.jsonl").write_bytes(b'{"text": "a\\ud800"}\n{"text": ""}\n{"text": "whole"}\n')
    found, bad = of(tmp_path / "half.jsonl")
    assert [one.text for one in found] == ["whole"]
    assert [entry.kind for entry in bad.entries] == ["not UTF-8", "empty"]


def test_an_empty_file_is_bad_as_a_whole_and_one_that_is_not_utf8_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\ncaf\xe9\n")
    entries = [entry for name in ("a.txt", "b.txt") for entry in of(tmp_path / name)[1].entries]
    assert [(entry.line, entry.kind) for entry in entries] == [(0, "empty"), (3, "not UTF-8")]
    assert entries[0].place == str(tmp_path / "a.txt") and entries[1].place == f"{tmp_path / 'b.txt'}:3"


@pytest.mark.parametrize("column", ["plain", "dictionary", "structure"])
def test_an_arrow_file_whose_texts_would_end_beyond_its_data_is_refused(tmp_path: Path, column: str) -> None:
    path, texts = tmp_path / "all.arrow", pa.array(["aaaa", "bbbb"])
    if column == "dictionary":
        texts = texts.dictionary_encode()
    elif column == "structure":
        texts = pa.array([{"text": "aaaa"}, {"text": "bbbb"}])
    write_arrow(path, pa.table({"text": texts}), rows=2)
    whole, ends = path.read_bytes(), struct.pack("<3i", 0, 4, 8)
    assert whole.count(ends) == 1
    path.write_bytes(whole.replace(ends, struct.pack("<3i", 0, 4, 12)))
    with pytest.raises(DataError, match=r"all.arrow is damaged after row 0"):
        of(path, text_field="text.text" if column == "structure" else "text")


def test_a_parquet_file_whose_columns_have_names_that_are_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "all.parquet"
    parquet.write_table(pa.table({"words": ["a"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"words", b"w\xffrds"))
    with pytest.raises(DataError, match=r"all.parquet is no whole Parquet file"):
        of(path)
