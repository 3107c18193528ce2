"""Documents out of files: what is read, what is refused, and that nothing vanishes unsaid."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.config.data import DataSection
from bloomery.data.documents import BadDocuments, Document
from bloomery.data.sources import (
    SourceHashes,
    documents_of,
    find_files,
    is_held_out,
    read_documents,
    standard_library,
)
from bloomery.errors import DataError
from bloomery.events.run_directory import RunDirectory


def read(
    *sources: Path | str, fail: bool = False, field: str = "text"
) -> tuple[list[Document], BadDocuments]:
    bad = BadDocuments(fail=fail)
    files = find_files([str(source) for source in sources]).files
    return list(read_documents(files, text_field="text", bad=bad)), bad


def test_the_standard_library_is_its_python_files_without_tests_and_nothing_else() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    found = standard_library()
    keys = [key for key, _ in found]
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

    def files_below(folder: Path) -> Iterator[Path]:
        for entry in folder.iterdir():
            if entry.is_dir() and entry.name not in left_out:
                yield from files_below(entry)
            elif entry.suffix == ".py":
                yield entry

    expected = [path.relative_to(root).as_posix() for path in files_below(root)]
    assert keys == sorted(expected) and {"os.py", "json/decoder.py"} <= set(keys)
    assert all(path == root / key for key, path in found)


def test_held_out_is_decided_by_the_sha256_of_the_key() -> None:
    kept = [key for key in map(str, range(3000)) if is_held_out(key, one_in=10)]
    assert kept == [
        k for k in map(str, range(3000)) if int(hashlib.sha256(k.encode()).hexdigest(), 16) % 10 == 0
    ]
    assert 200 < len(kept) < 400 and not is_held_out("a", one_in=0) and is_held_out("a", one_in=1)


def test_a_directory_gives_its_text_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes("ein\r\nWort é".encode())
    (tmp_path / "a.jsonl").write_text('{"text": "erstes"}\n{"text": "zweites"}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "gepackt"}'))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("not this")
    documents, bad = read(tmp_path)
    assert [document.text for document in documents] == ["erstes", "zweites", "ein\r\nWort é", "gepackt"]
    assert documents[2].key == "b/one.txt" and documents[2].size_bytes == 12
    assert documents[0].key == hashlib.sha256(b"erstes").hexdigest()
    assert [document.place for document in documents[:2]] == [f"{tmp_path}/a.jsonl:{line}" for line in (1, 2)]
    assert not bad.entries and bad.summary() == ""
    assert find_files([str(tmp_path)]).ignored == (tmp_path / "picture.png",)


def test_a_note_names_each_file_that_was_left_out_once_and_pairs_of_tokens_first(tmp_path: Path) -> None:
    for name in ("a.png", "b.bin", "b.idx", "c.txt", "d.png"):
        (tmp_path / name).write_text("x")
    note = find_files([str(tmp_path)]).note()
    assert note.startswith("4 files are no text known here and were left out: ") and "data.datasets" in note
    named = note.partition("left out: ")[2].partition(" (")[0].split(", ")
    assert [Path(name).name for name in named[:2]] == ["b.bin", "b.idx"]
    assert {Path(name).name for name in named[2:]} == {"a.png", "d.png"} and len(named) == 4


def test_a_single_file_and_a_glob_name_their_documents_below_themselves(tmp_path: Path) -> None:
    for name in ("x/one.txt", "y/two.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    assert [one.key for one in read(tmp_path / "x" / "one.txt")[0]] == ["one.txt"]
    assert [one.key for one in read(tmp_path / "*" / "*.txt")[0]] == ["x/one.txt", "y/two.txt"]
    data = DataSection(sources=(str(tmp_path / "**/t*.txt"),), sequence_length=8)
    assert [one.key for one in documents_of(data)] == ["y/two.txt"]


BAD_LINES = [
    (b'{"text": "a"', "malformed JSON", "malformed JSON"),
    (b'{"text": "\xff"}', "not UTF-8", "not UTF-8 at byte 10"),
    (b'{"text": ""}', "empty", "empty"),
    (b'{"body": "a"}', "without the field", "no field 'text' .*'body'"),
    (b'{"text": 5}', "not text", "field 'text' holds int"),
    (b'{"text": {"de": "a"}}', "not text", "field 'text' holds dict, not text; its fields are 'text.de'"),
    (b'["text"]', "not an object", "a JSON list"),
    (b'{"text": "\\ud800"}', "not UTF-8", "surrogate"),
    (b"", "malformed JSON", "blank line"),
]


@pytest.mark.parametrize(("line", "kind", "said"), BAD_LINES)
def test_a_bad_line_is_counted_and_named_or_refused(
    tmp_path: Path, line: bytes, kind: str, said: str
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good too"}\n')
    documents, bad = read(path)
    assert [document.text for document in documents] == ["good", "good too"]
    ((file, number, found),) = [(entry.file, entry.line, entry.kind) for entry in bad.entries]
    assert (file, number) == (str(path), 2) and (found == kind or not line)
    assert f"{path}:2" in bad.summary()
    assert [json.loads(entry.to_json_line())["line"] for entry in bad.entries] == [2]
    with pytest.raises(DataError, match=rf"some\.jsonl:2: .*{said}") as refused:
        read(path, fail=True)
    assert "bad_documents" in refused.value.remedy


def test_a_field_inside_another_one_is_read_and_a_wrong_one_is_told_with_those_that_are_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"id": 1, "meta": {"body": "inner"}, "a.b": "dotted"}\n')

    def texts(field: str) -> list[str]:
        files, bad = find_files([str(path)]).files, BadDocuments(fail=True)
        return [document.text for document in read_documents(files, text_field=field, bad=bad)]

    assert (texts("meta.body"), texts("a.b")) == (["inner"], ["dotted"])
    for wrong in ("text", "meta.text", "meta.body.x"):
        with pytest.raises(DataError, match=r"no field .*'a\.b', 'id', 'meta\.body'") as refused:
            texts(wrong)
        assert "data.text_field" in refused.value.remedy


def test_other_text_and_arrays_of_json_are_read_where_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# one")
    (tmp_path / "b.json").write_text('[{"text": "two"}, {"no": 1}, {"text": "three"}]')
    (tmp_path / "c.txt").write_text("four")
    assert [one.text for one in read(tmp_path / "a.md")[0]] == ["# one"]
    assert [one.text for one in read(tmp_path / "*.md")[0]] == ["# one"]
    documents, bad = read(tmp_path / "b.json")
    assert [one.text for one in documents] == ["two", "three"]
    assert [(entry.line, entry.kind) for entry in bad.entries] == [(2, "without the field")]
    # As before, so that the text of runs that named a directory stays the same.
    for source in (tmp_path, tmp_path / "*"):
        assert [one.text for one in read(source)[0]] == ["four"]
    for content, said in (("{}", "holds a JSON dict"), ("[", "no JSON in UTF-8"), ("\udcff", "no JSON")):
        (tmp_path / "b.json").write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(DataError, match=said):
            read(tmp_path / "b.json")


def test_a_text_file_that_is_empty_or_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"fine\nfine\nb\xe4d")
    (tmp_path / "c.txt").write_bytes(b"fine")
    documents, bad = read(tmp_path)
    assert [document.key for document in documents] == ["c.txt"]
    assert [entry.place for entry in bad.entries] == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt:3"]
    assert "1 empty, 1 not UTF-8" in bad.summary()


def test_a_damaged_archive_says_after_which_line(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % number**30 for number in range(5000)))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz is damaged after line \d+"):
        read(tmp_path / "cut.jsonl.gz")


def test_sources_that_hold_nothing_are_refused_with_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    for source, said in (
        (tmp_path / "none.txt", "does not exist"),
        (tmp_path, "holds no text file"),
        (tmp_path / "picture.png", "holds no text file"),
        (tmp_path / "*.txt", "holds no text file"),
    ):
        with pytest.raises(DataError, match=said) as refused:
            read(source)
        assert refused.value.remedy
    with pytest.raises(DataError, match="No text is given"):
        read()


def test_what_is_hidden_anywhere_below_a_directory_is_left_out(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", ".git/c.txt", "deep/.cache/d.txt", "deep/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for directory in (tmp_path, tmp_path / "deep" / ".." / "."):
        found = find_files([str(directory)])
        assert [file.key for file in found.files] == ["a.txt", "deep/e.txt"] and found.ignored == ()
    found = find_files([str(tmp_path / "deep" / ".cache")])
    assert [file.key for file in found.files] == ["d.txt"], "a hidden directory may be named itself"


def test_what_a_run_writes_below_a_source_is_no_text_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDirectory(tmp_path / "runs" / "mine").create()
    rundir.data.mkdir()
    for path in (
        tmp_path / "a.txt",
        tmp_path / "runs" / "b.txt",
        rundir.data / "c.txt",
        rundir.path / "d.txt",
    ):
        path.write_text("x")
    monkeypatch.chdir(tmp_path)
    for source in (".", str(tmp_path), "**/*.txt", "runs/../**/*.txt"):
        found = find_files([source])
        assert [path.name for path in (file.path for file in found.files)] == ["a.txt", "b.txt"], source
        assert found.ignored == ()
    for source in (str(rundir.data), "runs/mine/data/c.txt", "runs/*/data/*.txt"):
        assert [file.path.name for file in find_files([source]).files] == ["c.txt"], "it may be named itself"


def test_a_link_to_nothing_is_told_as_such_and_not_as_missing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is neither a file nor a directory"):
        find_files([str(tmp_path / "link")])
    with pytest.raises(DataError, match="does not exist"):
        find_files([str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 file is no text"), (7, " and 2 more. "), (5, "5 files are")]
)
def test_files_that_are_left_out_are_named_and_those_beyond_five_counted(
    tmp_path: Path, count: int, said: str
) -> None:
    (tmp_path / "a.txt").write_text("x")
    for number in range(count):
        (tmp_path / f"picture-{number}.png").write_bytes(b"x")
    note = find_files([str(tmp_path)]).note()
    assert said in note and note.count(".png") == min(count, 5) and (" more" in note) is (count > 5)


def test_a_hash_is_kept_for_files_that_are_old_enough_to_have_settled(tmp_path: Path) -> None:
    old, young = tmp_path / "old.txt", tmp_path / "young.txt"
    for path in (old, young):
        path.write_text("one")
    before_s = old.stat().st_mtime - 60
    os.utime(old, (before_s, before_s))
    hashes = SourceHashes(tmp_path / "run")
    (tmp_path / "run").mkdir()
    digests = [hashes.of(path) for path in (old, young)]
    assert digests[0] == digests[1] and digests[0][1] == 3
    hashes.keep()
    record = json.loads((tmp_path / "run" / "source-hashes.json").read_text())
    assert list(record) == [str(old)]
    again = SourceHashes(tmp_path / "run")
    again._known[str(old)][3] = "as recorded"
    assert again.of(old) == ("as recorded", 3), "its content is not read again"
    old.write_text("two")
    os.utime(old, (before_s, before_s))
    changed, _ = again.of(old)
    assert changed not in ("as recorded", digests[0][0]), "the time of its change tells"
    again.keep()
    assert SourceHashes(tmp_path / "run")._known[str(old)][3] == changed
