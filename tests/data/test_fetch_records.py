"""What a fetch records and tells, file by file, from a source that is a dictionary."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery import durable
from bloomery.data import fetch as fetching
from bloomery.data import storage
from bloomery.data.fetch import FetchSummary, fetch, recorded, refuse_incomplete, refuse_other_share
from bloomery.data.remote_files import FetchRequest, RemoteFile, Shard
from bloomery.errors import DataError, StorageError
from bloomery.events.records import ProgressCallback

FILES = {"a.jsonl": b"0123456789", "deep/b.jsonl": b"abcdefg", "c.txt": b""}
WANTED = FetchRequest(shares=2, share=1, seed=3, ratios={"set": 1.0}, include=("*",), limit=9)


class Source:
    """Files of a dictionary, as `remote_files.FileSource`; each read is noted."""

    def __init__(self, files: dict[str, bytes], url: str = "s3://b/set") -> None:
        self.contents, self.url = dict(files), url
        self.asked: list[tuple[str, int, int]] = []

    def files(self) -> list[RemoteFile]:
        return [file_of(name, content) for name, content in sorted(self.contents.items())]

    def read(self, path: str, *, start: int, length: int) -> bytes:
        self.asked.append((path, start, length))
        return self.contents[path][start : start + length]


def file_of(name: str, content: bytes, *, sha256: str = "", version: str = '"v1"') -> RemoteFile:
    return RemoteFile(path=name, size_bytes=len(content), sha256=sha256, version=version)


def sum_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_CHUNK_BYTES", 4)


def fetched(
    source: Source, to: Path, files: list[RemoteFile] | None = None, *, anew: bool = False
) -> tuple[FetchSummary, list[tuple[str, int, int, str]]]:
    told: list[tuple[str, int, int, str]] = []
    files = source.files() if files is None else files
    shards = [Shard(dataset="set", name=file.path, files=(file,)) for file in files]
    done = fetch(
        shards,
        {"set": source},
        to,
        WANTED,
        threads=1,
        anew=anew,
        progress=lambda what, done, total, unit, note="": told.append((what, done, total, unit)),
    )
    return done, told


def test_a_fetch_tells_each_chunk_and_records_what_it_was_asked_and_what_came(tmp_path: Path) -> None:
    source = Source(FILES)
    done, told = fetched(source, tmp_path)
    assert done == FetchSummary(files=3, size_bytes=17, kept_files=0, kept_bytes=0, removed_files=0)
    amounts = [done for _, done, _, _ in told]
    assert amounts == sorted(amounts) and amounts[0] == 0 and amounts[-1] == 17
    assert {(what, total, unit) for what, _, total, unit in told} == {("fetching", 17, "bytes")}
    assert source.asked == [
        ("a.jsonl", 0, 4),
        ("a.jsonl", 4, 4),
        ("a.jsonl", 8, 2),
        ("deep/b.jsonl", 0, 4),
        ("deep/b.jsonl", 4, 3),
    ]
    assert json.loads((tmp_path / "fetched.json").read_text()) == {
        "format": 1,
        "sources": {"set": "s3://b/set"},
        "shares": 2,
        "share": 1,
        "seed": 3,
        "ratios": {"set": 1.0},
        "include": ["*"],
        "exclude": [],
        "limit": 9,
        "files_wanted": 3,
        "bytes_wanted": 17,
    }
    assert recorded(tmp_path) == {
        f"set/{name}": {
            "name": f"set/{name}",
            "bytes": len(content),
            "version": '"v1"',
            "sha256": sum_of(content),
        }
        for name, content in FILES.items()
    }
    for name, content in FILES.items():
        assert (tmp_path / "set" / name).read_bytes() == content
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        (lambda file: file, True),
        (lambda file: replace(file, sha256=sum_of(FILES["a.jsonl"])), True),
        (lambda file: replace(file, version='"v2"'), False),
        (lambda file: replace(file, size_bytes=9), False),
    ],
    ids=["nothing", "a checksum is known now", "another version", "another size"],
)
def test_a_file_is_kept_where_it_is_still_the_one_that_was_fetched(
    tmp_path: Path, change: Callable[[RemoteFile], RemoteFile], is_kept: bool
) -> None:
    source = Source(FILES)
    fetched(source, tmp_path)
    source.asked.clear()
    first, *rest = source.files()
    done, told = fetched(source, tmp_path, [change(first), *rest])
    if is_kept:
        assert done == FetchSummary(files=0, size_bytes=0, kept_files=3, kept_bytes=17, removed_files=0)
        assert source.asked == [] and told == [("fetching", 17, 17, "bytes")]
    else:
        assert (done.files, done.kept_files, done.kept_bytes) == (1, 2, 7)
        assert {path for path, _, _ in source.asked} == {"a.jsonl"}
        assert told[0] == ("fetching", 7, told[0][2], "bytes")


def test_a_fetch_that_did_not_end_is_told_in_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1_500_000)
    entry = {"name": "a", "bytes": 1_500_000, "version": "", "sha256": ""}
    (tmp_path / "fetched-files.jsonl").write_text(json.dumps(entry) + "\n")
    wanted = {"files_wanted": 2, "bytes_wanted": 3_000_000, "share": 0, "shares": 4}
    (tmp_path / "fetched.json").write_text(json.dumps(wanted))
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "a", Path("a")):
        with pytest.raises(DataError) as refused:
            refuse_incomplete([path])
        assert refused.value.message == (
            f"{tmp_path} holds 1 of the 2 files of share 0 of 4, 1.5 of 3.0 MB: its fetch did not end."
        )


def test_a_recorded_file_with_another_checksum_than_the_list_has_now_comes_again(tmp_path: Path) -> None:
    source = Source({"a.jsonl": b"0123456789"})
    fetched(source, tmp_path)
    source.asked.clear()
    listed = [replace(source.files()[0], sha256="0" * 64)]
    with pytest.raises(DataError) as refused:
        fetched(source, tmp_path, listed)
    assert refused.value.message == (
        f"s3://b/set/a.jsonl came with the checksum {sum_of(b'0123456789')}, and its list says {'0' * 64}."
    )
    assert refused.value.remedy.startswith("The same command fetches it again.")
    assert len(source.asked) == 3 and not list(tmp_path.rglob("*.partial"))


def test_a_file_that_came_in_part_goes_on_where_it_ended(tmp_path: Path) -> None:
    source = Source({"a.jsonl": b"0123456789"})
    source.contents["a.jsonl"] = b"012345"
    whole = file_of("a.jsonl", b"0123456789")
    with pytest.raises(DataError) as refused:
        fetched(source, tmp_path, [whole])
    assert refused.value.message == "s3://b/set/a.jsonl ended at byte 6 of 10."
    assert refused.value.remedy == "It changed while it was fetched: start again."
    (partial,) = (tmp_path / "set").iterdir()
    assert partial.read_bytes() == b"012345" and partial.name.startswith("a.jsonl.")
    source.contents["a.jsonl"] = b"0123456789"
    source.asked.clear()
    done, told = fetched(source, tmp_path, [whole])
    assert source.asked == [("a.jsonl", 6, 4)] and done.size_bytes == 10
    assert [done for _, done, _, _ in told] == [0, 6, 10]
    assert recorded(tmp_path)["set/a.jsonl"]["sha256"] == sum_of(b"0123456789")


@pytest.mark.parametrize(
    ("change", "url"),
    [
        ({"version": '"v2"'}, "s3://b/set"),
        ({"sha256": sum_of(b"0123456789")}, "s3://b/set"),
        ({"size_bytes": 9}, "s3://b/set"),
        ({}, "s3://b/set"),
    ],
    ids=["version", "checksum", "size", "none"],
)
def test_what_came_of_another_version_is_no_beginning_of_this_one(
    tmp_path: Path, change: dict[str, object], url: str
) -> None:
    source = Source({"a.jsonl": b"0123"}, url)
    with pytest.raises(DataError, match="ended at byte 4"):
        fetched(source, tmp_path, [file_of("a.jsonl", b"0123456789")])
    source.contents["a.jsonl"] = b"0123456789"
    source.asked.clear()
    with_change = replace(file_of("a.jsonl", b"0123456789"), **change)  # type: ignore[arg-type]
    fetched(source, tmp_path, [with_change])
    assert source.asked[0][1] == (0 if change else 4)


def test_a_partial_file_that_is_longer_than_the_file_is_cut(tmp_path: Path) -> None:
    source = Source({"a.jsonl": b"0123"})
    with pytest.raises(DataError, match="ended at byte 4"):
        fetched(source, tmp_path, [file_of("a.jsonl", b"0123456789")])
    (partial,) = (tmp_path / "set").iterdir()
    partial.write_bytes(b"0123456789 and more")
    source.contents["a.jsonl"] = b"0123456789"
    fetched(source, tmp_path)
    assert (tmp_path / "set" / "a.jsonl").read_bytes() == b"0123456789"


def test_no_file_is_begun_after_one_that_failed(tmp_path: Path) -> None:
    source = Source(FILES)
    source.contents["a.jsonl"] = b""
    with pytest.raises(DataError, match=r"a\.jsonl ended at byte 0 of 10"):
        fetched(source, tmp_path, [file_of(name, content) for name, content in sorted(FILES.items())])
    counter = fetching._ByteCounter(lambda *_: None, total=5)
    counter.stop.set()
    assert fetching._bring(Source(FILES), file_of("a.jsonl", b"x" * 10), tmp_path / "new", counter) is None
    assert not (tmp_path / "new").exists()


def test_a_file_under_way_ends_at_its_next_chunk_after_another_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stop = threading.Event(), threading.Event()

    class Counter(fetching._ByteCounter):
        def __init__(self, progress: ProgressCallback, *, total: int) -> None:
            super().__init__(progress, total=total)
            self.stop = stop

    class Failing(Source):
        def read(self, path: str, *, start: int, length: int) -> bytes:
            if path == "a":
                begun.wait(2)
                raise DataError("a is gone.", remedy="")
            begun.set()
            stop.wait(2)
            return super().read(path, start=start, length=length)

    monkeypatch.setattr(fetching, "_ByteCounter", Counter)
    source = Failing({"a": b"0123456789", "b": b"0123456789"})
    shards = [Shard(dataset="set", name=file.path, files=(file,)) for file in source.files()]
    with pytest.raises(DataError, match="a is gone"):
        fetch(shards, {"set": source}, tmp_path, WANTED, threads=2, anew=False)
    assert source.asked == [("b", 0, 4)] and not (tmp_path / "set" / "b").exists()


def test_another_share_is_refused_with_each_difference_and_replaces_with_anew(tmp_path: Path) -> None:
    source = Source(FILES)
    fetched(source, tmp_path)
    refuse_other_share(tmp_path, {"set": source}, WANTED)
    other = replace(WANTED, shares=4, limit=None)
    elsewhere = Source(FILES, "s3://c/set")
    with pytest.raises(DataError) as refused:
        refuse_other_share(tmp_path, {"set": elsewhere}, other)
    assert refused.value.message == (
        f"{tmp_path} holds another share or selection (sources: {{'set': 's3://b/set'}} there, "
        "{'set': 's3://c/set'} asked; shares: 2 there, 4 asked; limit: 9 there, None asked)."
    )
    done, _ = fetched(source, tmp_path, source.files()[:1], anew=True)
    assert (done.removed_files, done.kept_files) == (2, 1)
    assert list(recorded(tmp_path)) == ["set/a.jsonl"] and not (tmp_path / "set" / "c.txt").exists()
    assert json.loads((tmp_path / "fetched.json").read_text())["bytes_wanted"] == 10


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 2}'])
def test_a_record_that_cannot_be_read_is_refused_and_not_overwritten(tmp_path: Path, content: str) -> None:
    (tmp_path / "fetched.json").write_text(content)
    with pytest.raises(DataError, match=r"fetched\.json cannot be read \(.*\), so which share lies here"):
        fetched(Source(FILES), tmp_path)
    assert (tmp_path / "fetched.json").read_text() == content


def test_torn_and_strange_lines_of_a_record_are_left_out_and_the_last_of_a_file_counts(
    tmp_path: Path,
) -> None:
    lines = ['{"name": "a", "bytes": 1}', "[]", "5", '{"bytes": 3}', '{"name": "a", "bytes": 2}', '{"na']
    lines += ['{"name": "b"}', '{"name": "c", "bytes": Infinity}']
    (tmp_path / "fetched-files.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe")
    assert recorded(tmp_path) == {"a": {"name": "a", "bytes": 2, "version": "", "sha256": ""}}
    assert recorded(tmp_path / "none") == {}


def test_a_damaged_name_in_a_record_is_a_file_that_is_not_here(tmp_path: Path) -> None:
    (tmp_path / "fetched.json").write_text('{"format": 1, "files_wanted": 1}')
    (tmp_path / "fetched-files.jsonl").write_text('{"name": "a\\u0000b", "bytes": 1}\n')
    with pytest.raises(DataError, match=r"its fetch did not end; a.b is gone"):
        refuse_incomplete([tmp_path / "file"])


def test_files_that_lie_in_a_fetch_that_did_not_end_are_refused_as_deep_as_they_lie(tmp_path: Path) -> None:
    fetched(Source(FILES), tmp_path)
    refuse_incomplete([tmp_path / "set" / "deep" / "b.jsonl", tmp_path / "not" / "fetched"])
    (tmp_path / "set" / "deep" / "b.jsonl").write_bytes(b"abc")
    (tmp_path / "set" / "c.txt").unlink()
    with pytest.raises(DataError) as refused:
        refuse_incomplete([tmp_path / "set" / "a.jsonl"])
    assert refused.value.message == (
        f"{tmp_path} holds 1 of the 3 files of share 1 of 2, 0.0 of 0.0 MB: its fetch did not end; "
        "set/c.txt is gone or has another size."
    )
    below = tmp_path.joinpath(*"1234567")
    with pytest.raises(DataError, match="did not end"):
        refuse_incomplete([below / "file"])
    refuse_incomplete([below / "8" / "file"])
    record = json.loads((tmp_path / "fetched.json").read_text()) | {"bytes_wanted": 7_340_000}
    (tmp_path / "fetched.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"0\.0 of 7\.3 MB"):
        refuse_incomplete([tmp_path / "file"])
    (tmp_path / "fetched.json").write_text("[]")
    with pytest.raises(DataError, match=r"cannot be read .* whether all files are here is not known"):
        refuse_incomplete([tmp_path / "file"])
    (tmp_path / "fetched.json").write_text('{"format": 1}')
    refuse_incomplete([tmp_path / "file"])  # of a version that recorded no sizes


def test_a_file_beside_the_directory_of_a_fetch_that_did_not_end_is_not_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part" / "set").mkdir(parents=True)
    (tmp_path / "part" / "fetched.json").write_text('{"format": 1, "files_wanted": 1}')
    monkeypatch.chdir(tmp_path / "part")
    refuse_incomplete([Path("../whole.txt"), tmp_path / "part" / ".." / "whole.txt"])
    with pytest.raises(DataError, match="did not end"):
        refuse_incomplete([Path("../part/set/a.txt")])


def test_threads_that_record_and_count_wait_for_each_other_and_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, alone = fetching._Record(tmp_path, {}, anew=False), list[bool]()
    counter = fetching._ByteCounter(lambda *_: alone.append(counter._lock.locked()), total=5)
    counter.add(3)
    append = durable.append

    def watched(path: Path, line: str) -> None:
        alone.append(record._lock.locked())
        append(path, line)

    monkeypatch.setattr(durable, "append", watched)
    record.add("a", file_of("a", b"x"), sha256="s")
    assert alone == [True, True]
    (tmp_path / "fetched-files.jsonl").unlink()
    (tmp_path / "fetched-files.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"failed at .*fetched-files\.jsonl: Is a directory"):
        record.add("a", file_of("a", b"x"), sha256="s")
    assert not record._lock.locked()
    (tmp_path / "set").write_text("in the way")
    with pytest.raises(StorageError, match=r"failed at .*set/a\.jsonl\..*\.partial: "):
        fetching._bring(Source(FILES), file_of("a.jsonl", b"x"), tmp_path / "set" / "a.jsonl", counter)


def test_what_another_process_fetched_while_its_lock_was_waited_for_does_not_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, taken = Source(FILES), list[tuple[Path, str]]()

    @contextmanager
    def waiting(directory: Path, *, name: str) -> Iterator[int]:
        taken.append((directory, name))
        if len(taken) == 1:
            fetched(source, directory)
        with storage.locked_directory(directory, name=name) as file:
            yield file

    monkeypatch.setattr(fetching, "locked_directory", waiting)
    done, _ = fetched(source, tmp_path)
    assert (done.files, done.kept_files, len(source.asked)) == (0, 3, 5)
    assert taken == [(tmp_path, "fetched.lock")] * 2


def test_files_of_one_name_come_each_from_its_own_dataset_in_as_many_threads_as_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, pool = list[int](), fetching.ThreadPoolExecutor
    monkeypatch.setattr(
        fetching, "ThreadPoolExecutor", lambda most, **named: threads.append(most) or pool(most, **named)
    )
    sources = {
        name: Source({"a.jsonl": content}, f"s3://b/{name}")
        for name, content in (("x", b"12345"), ("y", b"67"))
    }
    shards = [
        Shard(dataset=name, name="a.jsonl", files=tuple(source.files())) for name, source in sources.items()
    ]
    done = fetch(shards, sources, tmp_path, WANTED, threads=2, anew=False)
    assert (done.files, done.size_bytes) == (2, 7) and threads == [2]
    assert [(tmp_path / name / "a.jsonl").read_bytes() for name in "xy"] == [b"12345", b"67"]
    assert {name: entry["sha256"] for name, entry in recorded(tmp_path).items()} == {
        "x/a.jsonl": sum_of(b"12345"),
        "y/a.jsonl": sum_of(b"67"),
    }
    told = json.loads((tmp_path / "fetched.json").read_text())
    assert told["sources"] == {"x": "s3://b/x", "y": "s3://b/y"} and told["bytes_wanted"] == 7
