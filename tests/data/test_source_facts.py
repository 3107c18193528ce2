"""What a source names and what is said where it names nothing, to the word; and which hashes are kept."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import xxhash

from bloomery.data import sources
from bloomery.data.readers import KNOWN
from bloomery.data.sources import FoundFiles, SourceHashes, find_files, standard_library
from bloomery.errors import DataError


def made(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return directory


def keys(*named: Path | str) -> list[str]:
    return [file.key for file in find_files([str(source) for source in named]).files]


def test_sources_are_read_in_their_order_and_each_sorted_by_its_own_paths(tmp_path: Path) -> None:
    made(tmp_path, "one/b.txt", "one/a/z.txt", "one/a.txt", "two/c.jsonl", "two/a.zip", "d.txt")
    assert keys(tmp_path / "two", tmp_path / "one", tmp_path / "d.txt") == [
        *("a.zip", "c.jsonl", "a.txt", "a/z.txt", "b.txt", "d.txt")
    ]
    assert keys(tmp_path / "*/*.txt") == ["one/a.txt", "one/b.txt"]
    assert keys(tmp_path / "one" / "**" / "*.txt") == ["a.txt", "a/z.txt", "b.txt"]
    assert keys(tmp_path / "one" / "?.txt") == ["a.txt", "b.txt"]
    found = find_files([str(tmp_path / "one" / "b.txt")]).files[0]
    assert (found.key, found.path, found.start, found.stop) == ("b.txt", tmp_path / "one" / "b.txt", 0, None)
    assert len(keys(sources.STANDARD_LIBRARY)) == len(standard_library()) > 100


@pytest.mark.parametrize("name", ["a.md", "a.csv", "a.tsv", "a.py", "a.json", "a.html"])
def test_files_of_many_endings_are_read_where_they_are_named_alone(tmp_path: Path, name: str) -> None:
    made(tmp_path, name, "b.txt")
    assert keys(tmp_path / name) == [name] == keys(tmp_path / f"*{Path(name).suffix}")
    found = find_files([str(tmp_path)])
    assert [file.key for file in found.files] == ["b.txt"] and found.ignored == (tmp_path / name,)


def test_a_home_is_found_and_folders_with_the_names_of_files_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made(tmp_path, "text/a.txt/inner.txt")
    assert keys("~/text") == ["a.txt/inner.txt"] == keys("~/text/*/*.txt")


@pytest.mark.parametrize(
    ("source", "said", "remedy"),
    [
        (
            "{}/none",
            "The source '{0}/none' does not exist (looked for {0}/none).",
            "Check data.sources; relative paths start where the command is run.",
        ),
        (
            "{}/a.txt,b.txt",
            "The source '{0}/a.txt,b.txt' does not exist (looked for {0}/a.txt,b.txt).",
            'Several sources are a list: data.sources=\'["a.txt", "b.txt"]\'.',
        ),
        (
            "s3://bucket/text",
            "The source 's3://bucket/text' is an address, and data.sources are read from a disk.",
            "Bring it here first: `bloomery data fetch`.",
        ),
        ("{}/*.txt", "The source '{0}/*.txt' holds no text file.", f"bloomery reads {KNOWN}."),
        (
            '["{}/a", "b"]',
            'The source \'["{0}/a", "b"]\' holds no text file.',
            'Several sources are a list with commas: data.sources=\'["a.txt", "b.txt"]\'.',
        ),
        (
            "{}/pair.*",
            "The source '{0}/pair.*' holds no text file.",
            "A .bin/.idx pair is tokens already: name it in data.datasets, or join pairs with `data merge`.",
        ),
    ],
)
def test_a_source_that_names_nothing_is_told_with_what_would(
    tmp_path: Path, source: str, said: str, remedy: str
) -> None:
    made(tmp_path, "pair.bin", "pair.idx")
    with pytest.raises(DataError) as refused:
        find_files([source.format(tmp_path)])
    assert refused.value.message == said.format(tmp_path) and refused.value.remedy == remedy


def test_no_source_at_all_is_told_with_what_may_be_one() -> None:
    with pytest.raises(DataError) as refused:
        find_files([])
    assert refused.value.message == "No text is given."
    assert (
        refused.value.remedy
        == f"Set data.sources to 'python:stdlib', or files, directories or globs of {KNOWN}."
    )


def test_a_pipe_and_a_link_to_itself_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "loop"):
        with pytest.raises(DataError, match=f"{name}' is neither a file nor a directory: a pipe, a device"):
            find_files([str(tmp_path / name)])


def test_a_name_that_is_no_utf8_is_refused_as_it_is_shown(tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.txt").write_text("x")
    with pytest.raises(DataError) as refused:
        find_files([str(tmp_path)])
    assert refused.value.message == r"The name of the file 'caf\xe9.txt' is not UTF-8."


def test_what_was_left_out_is_one_sentence(tmp_path: Path) -> None:
    made(tmp_path, "a.txt", "b.png")
    end = " Files of other endings are read where data.sources names them, or a glob with their ending."
    assert find_files([str(tmp_path)]).note() == (
        f"1 file is no text known here and was left out: {tmp_path}/b.png.{end}"
    )
    made(tmp_path, "c.idx", "c.bin")
    hint = " (.bin/.idx pairs are tokens already: name them in data.datasets)"
    note = find_files([str(tmp_path)]).note()
    assert note.startswith("3 files are no text known here and were left out: ")
    assert note.endswith(f"{tmp_path}/b.png{hint}.{end}")
    assert find_files([str(tmp_path / "a.txt")]).note() == ""


def test_a_dataset_of_one_split_is_read_as_it_is(tmp_path: Path) -> None:
    made(tmp_path, "train/a.txt")
    for content in ('{"splits": ["train"]}', "{", "[]", '{"splits": 3}'):
        (tmp_path / "dataset_dict.json").write_text(content)
        if content != '{"splits": 3}':
            assert keys(tmp_path) == ["train/a.txt"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test", 3]}')
    with pytest.raises(DataError) as refused:
        find_files([str(tmp_path)])
    assert refused.value.message == f"The source {tmp_path} is a dataset with the splits train, test, 3."
    assert refused.value.remedy == f"Name the one to read, for instance {tmp_path}/train."


def test_arrow_files_that_a_state_does_not_name_are_left_out(tmp_path: Path) -> None:
    made(tmp_path, "saved/a.arrow", "saved/cache.arrow", "plain/b.arrow")
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    found = find_files([str(tmp_path)])
    assert [file.key for file in found.files] == ["plain/b.arrow", "saved/a.arrow"]
    assert sorted(path.name for path in found.ignored) == ["cache.arrow", "state.json"]


def test_a_hash_is_known_by_size_and_both_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path, "a.txt") / "a.txt"
    os.utime(path, (1e9, 1e9))
    first = SourceHashes(tmp_path)
    assert first.of(path) == (xxhash.xxh3_128_hexdigest(b"x"), 1)
    first.keep()
    stat = path.stat()
    record = [1, stat.st_mtime_ns, stat.st_ctime_ns, xxhash.xxh3_128_hexdigest(b"x")]
    kept = tmp_path / "source-hashes.json"
    assert json.loads(kept.read_text()) == {str(path): record}
    for place in range(3):
        other = [value + (number == place) for number, value in enumerate(record[:3])]
        kept.write_text(json.dumps({str(path): [*other, "recorded"]}))
        assert SourceHashes(tmp_path).of(path) == (record[3], 1)
    kept.write_text(json.dumps({str(path): [*record[:3], "recorded"]}))
    known = SourceHashes(tmp_path)
    assert known.of(path) == ("recorded", 1)
    kept.unlink()
    known.keep()
    assert not kept.exists(), "nothing new was hashed"
    monkeypatch.chdir(tmp_path)
    relative = SourceHashes(tmp_path)
    relative.of(Path("a.txt"))
    relative.keep()
    assert list(json.loads(kept.read_text())) == [str(path)]


@pytest.mark.parametrize(("age_ns", "is_kept"), [(2_000_000_001, True), (2_000_000_000, False), (5, False)])
def test_a_file_that_was_changed_just_now_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_ns: int, is_kept: bool
) -> None:
    path = made(tmp_path, "a.txt") / "a.txt"
    now = path.stat().st_mtime_ns + age_ns
    monkeypatch.setattr(sources.time, "time_ns", lambda: now)
    hashes = SourceHashes(tmp_path)
    hashes.of(path)
    hashes.keep()
    assert (tmp_path / "source-hashes.json").exists() is is_kept


def test_a_file_that_grows_while_it_is_hashed_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path, "a.txt") / "a.txt"
    os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(sources, "_hashed", lambda path: ("digest", 2))
    hashes = SourceHashes(tmp_path)
    assert hashes.of(path) == ("digest", 2)
    hashes.keep()
    assert not (tmp_path / "source-hashes.json").exists()


def test_files_are_hashed_in_pieces_and_what_cannot_be_read_or_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "_PIECE_BYTES", 3)
    path = tmp_path / "a.txt"
    path.write_bytes(b"0123456789")
    os.utime(path, (1e9, 1e9))
    nowhere = SourceHashes(tmp_path / "a.txt" / "run")
    assert nowhere.of(path) == (xxhash.xxh3_128_hexdigest(b"0123456789"), 10)
    with caplog.at_level(logging.WARNING, logger=sources.__name__):
        nowhere.keep()
    assert "could not be written, so the text is read at each start" in caplog.text
    with pytest.raises(DataError, match=rf"Cannot read {tmp_path / 'none'}: No such file or directory\."):
        nowhere.of(tmp_path / "none")


@pytest.mark.parametrize(
    "record", ["{", "[]", "3", '{"a": 3}', '{"a": [1, 2, 3]}', '{"a": [1, 2, 3, 4, 5]}', '{"a": "four"}']
)
def test_a_record_of_another_form_is_none(tmp_path: Path, record: str) -> None:
    (tmp_path / "source-hashes.json").write_text(record)
    assert SourceHashes(tmp_path)._known == {}


def test_hashes_are_kept_while_others_are_still_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, names = [100.0], ["a.txt", "b.txt", "c.txt"]
    made(tmp_path, *names)
    for name in names:
        os.utime(tmp_path / name, (1e9, 1e9))
    monkeypatch.setattr(sources.time, "monotonic", lambda: clock[0])
    hashes = SourceHashes(tmp_path)
    kept = tmp_path / "source-hashes.json"
    for name, now_s, count in zip(names, (130.0, 161.0, 200.0), (0, 2, 2), strict=True):
        clock[0] = now_s
        hashes.of(tmp_path / name)
        assert (len(json.loads(kept.read_text())) if kept.exists() else 0) == count, name
    hashes.keep()
    assert len(json.loads(kept.read_text())) == 3


def test_the_state_of_a_saved_dataset_is_read_once_whatever_the_number_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"data-{number}.arrow" for number in range(5)]
    made(tmp_path, *names, "cache.arrow")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    read, loads = list[object](), json.loads

    def counted(content: bytes) -> object:
        read.append(content)
        return loads(content)

    monkeypatch.setattr(sources.json, "loads", counted)
    found = find_files([str(tmp_path)])
    assert [file.key for file in found.files] == names and len(read) == 1
    assert sorted(path.name for path in found.ignored) == ["cache.arrow", "state.json"]


def test_a_note_compares_no_file_that_is_left_out_with_each_other() -> None:
    class Lone(type(Path())):  # type: ignore[misc]
        """A path that is like no other."""

        __hash__ = Path.__hash__

        def __eq__(self, other: object) -> bool:
            raise AssertionError("of a million files that are left out, each would be compared with each")

    names = ["a.png", "b.bin", "c.idx", "d.png", "e.png", "f.png", "g.png"]
    note = FoundFiles(files=(), ignored=tuple(Lone(name) for name in names)).note()
    assert (
        "7 files are no text known here and were left out: b.bin, c.idx, a.png, d.png, e.png and 2 more"
        in note
    )
