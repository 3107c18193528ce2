"""Lines that are slow, silent or gone, and stores that refuse: by progress, with patience, told once."""

import errno
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import obstore
import pytest
import xxhash
from obstore import exceptions
from tests.disk_calls import recorded
from tests.range_server import Served, serving

from bloomery import objects
from bloomery.errors import StorageError
from bloomery.objects import (
    AccessDenied,
    LocalFileError,
    MissingOrDenied,
    Objects,
    StoreUnreachable,
    storage_failure,
)
from bloomery.objects.refusals import PermanentStoreError
from bloomery.objects.uploads import regrouped

CONTENT = random.Random(3).randbytes(4000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "one").write_bytes(CONTENT)
    with serving(tmp_path) as served:
        yield served


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(objects, "_LONGEST_PAUSE_S", 0.001)


def test_an_error_of_a_file_here_is_not_told_as_one_of_the_store(tmp_path: Path) -> None:
    error = PermissionError(13, "Permission denied", str(tmp_path / "notes"))
    told = storage_failure(error, doing="The backup")
    assert f"failed at {tmp_path / 'notes'}: Permission denied" in told.message and "writable" in told.remedy
    assert "Credentials" in storage_failure(PermissionError(13, "denied"), doing="The backup").remedy


def test_a_file_here_that_cannot_be_read_is_no_error_of_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects._Retry, "pause_or_raise", lambda retry, error: pytest.fail(str(error)))
    (tmp_path / "directory").mkdir()
    store = Objects(f"file://{tmp_path}/store")
    for name, problem in (("directory", "Is a directory"), ("gone", "No such file or directory")):
        with pytest.raises(LocalFileError) as refused:
            store.send("key", tmp_path / name)
        told = storage_failure(refused.value, doing="The backup")
        assert told.message == f"The backup failed at {tmp_path / name}: {problem}"


def test_what_is_written_to_a_disk_is_synced_and_so_are_the_names_that_lead_to_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    with recorded() as calls:
        store = Objects(f"file://{tmp_path}/disk/run")
        store.send("step-1/data", tmp_path / "file")
        store.send_pieces("step-1/more", size=3, pieces=lambda: [memoryview(b"abc")])
        store.put("step-1/index", b"{}")
        store.create("step-1/manifest", b"{}")
    synced = [str(path.relative_to(tmp_path)) for call, path in calls.paths if call == "sync"]
    assert synced[:2] == [".", "disk"]  # which hold the names of `disk` and of `run`
    assert synced[2:5] == ["disk/run/step-1/data", "disk/run/step-1", "disk/run"]
    rest = [path for name in ("more", "index", "manifest") for path in (f"step-1/{name}", "step-1")]
    assert synced[5:] == [f"disk/run/{path}" for path in rest]
    with recorded() as calls:
        store.delete("step-1/manifest")
    assert calls.names == [("sync", "step-1")]


def test_a_directory_that_is_gone_is_not_made_anew_by_what_is_written(tmp_path: Path) -> None:
    store = Objects(f"file://{tmp_path}/disk/run")
    store.put("first", CONTENT)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    for write in (store.put, store.create):
        with pytest.raises(StorageError, match="does not exist") as told:
            write("second", CONTENT)
        assert "mounted" in told.value.remedy
    assert not (tmp_path / "disk").exists()
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    assert store.create("second", CONTENT)


def test_what_killed_uploads_left_on_a_disk_is_removed_and_what_is_being_sent_stays(tmp_path: Path) -> None:
    store = Objects(f"file://{tmp_path}/disk")
    for name in ("step-1/data", "step-1/data#1", "step-1/more#12", "step-1/no#1.txt", "else/x#1"):
        (tmp_path / "disk" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "disk" / name).write_bytes(b"half")
        os.utime(tmp_path / "disk" / name, (0, 0))
    (tmp_path / "disk" / "step-1" / "now#3").write_bytes(b"half")
    store.remove_unfinished("step-1/")
    left = {path.name for path in (tmp_path / "disk").rglob("*") if path.is_file()}
    assert left == {"data", "no#1.txt", "x#1", "now#3"}


def test_a_line_that_gives_a_little_at_a_time_gives_all_and_no_byte_twice(server: Served) -> None:
    server.most_bytes = 100
    pieces = Objects(server.url, patience_s=60).pieces("one", end=len(CONTENT), piece_bytes=50)
    assert b"".join(pieces) == CONTENT
    assert sum(given for _, given in server.ranges) >= len(CONTENT)
    assert sorted({begin for begin, _ in server.ranges})[-1] >= len(CONTENT) - 100
    assert len(server.ranges) >= len(CONTENT) // 100, "many more than a count of tries would allow"


def test_the_patience_with_a_line_begins_anew_with_each_byte_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(objects.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    asked: list[int] = []

    def breaking(
        key: str, begin: int, end: int, piece_bytes: int, etag: str
    ) -> tuple[str, Iterator[memoryview]]:
        asked.append(begin)
        clock[0] += 6.0

        def pieces() -> Iterator[memoryview]:
            yield memoryview(CONTENT[begin : begin + 10])
            raise StoreUnreachable("it broke off")

        return "", pieces()

    store = Objects(tmp_path.as_uri(), patience_s=10.0)
    monkeypatch.setattr(store, "_stream", breaking)
    assert b"".join(store.pieces("one", end=50)) == CONTENT[:50]
    assert asked == [0, 10, 20, 30, 40]


def test_a_line_that_falls_silent_is_left_and_what_came_is_kept(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_SILENCE_S", 1.0)
    server.silences = 2
    pieces = Objects(server.url, patience_s=600).pieces("one", begin=1000, piece_bytes=50)
    assert b"".join(pieces) == CONTENT[1000:]
    assert server.silences == 0 and len(server.ranges) >= 3
    assert any(begin > 1000 for begin, _ in server.ranges), "it goes on where it ended"


def test_ranges_are_what_was_asked_for(server: Served) -> None:
    store = Objects(server.url, patience_s=60)
    assert store.content("one", begin=10, end=30) == CONTENT[10:30]
    assert store.content("one", begin=3990, end=5000) == CONTENT[3990:]
    assert store.content("one", begin=7, end=7) == b""
    assert b"".join(store.pieces("one", piece_bytes=64)) == CONTENT
    assert store.stat("one").bytes == len(CONTENT)


@pytest.mark.parametrize("kind", ["file", "http"])
def test_what_begins_at_the_end_of_an_object_is_empty_and_nobody_is_asked_twice(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: pytest.fail("it was asked again"))
    store = Objects(server.url if kind == "http" else tmp_path.as_uri())
    size = len(CONTENT)
    assert store.content("one", begin=size - 3, end=size + 9) == CONTENT[-3:]
    for begin, end in ((size, size + 9), (size + 1, None), (size, None)):
        assert store.content("one", begin=begin, end=end) == b""
    with pytest.raises(FileNotFoundError):
        store.content("two", begin=size, end=size + 9)


def test_what_is_not_there_is_told_from_what_is_not_reached(server: Served, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Objects(server.url).stat("other")
    with serving(tmp_path) as gone:
        url = gone.url
    with pytest.raises(StoreUnreachable) as refused:
        Objects(url, patience_s=0.05).content("one")
    assert not isinstance(refused.value, AccessDenied)
    assert "reachable" in storage_failure(refused.value, doing="It").remedy


def test_an_address_of_no_kind_is_refused() -> None:
    with pytest.raises(StorageError, match="cannot be used"):
        Objects("ftp://host/path")


@pytest.mark.parametrize("name", ["disk/there", "~/there", "there"])
def test_a_file_url_without_a_whole_path_is_refused_and_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = list[Path]()
    monkeypatch.setattr("bloomery.durable.make_directory", made.append)
    with pytest.raises(StorageError, match="names no directory of this machine") as refused:
        Objects(f"file://{name}")
    assert "file:///path" in refused.value.remedy and not made
    Objects(f"file://localhost{tmp_path}/x")
    assert set(made) == {tmp_path / "x"}


def test_all_pieces_of_a_read_are_of_one_version_of_the_object(server: Served, tmp_path: Path) -> None:
    store = Objects(server.url, patience_s=5)
    mark = store.stat("one").mark
    assert b"".join(store.pieces("one", begin=5, end=99, mark=mark)) == CONTENT[5:99]
    server.most_bytes = 100
    pieces = store.pieces("one", end=len(CONTENT), piece_bytes=50)
    next(pieces)
    (tmp_path / "one").write_bytes(CONTENT[::-1])
    with pytest.raises(StoreUnreachable, match="written again while it was read"):
        list(pieces)
    with pytest.raises(StoreUnreachable, match="written again"):
        list(store.pieces("one", begin=5, end=99, mark=mark))


def test_each_request_of_a_read_asks_for_the_version_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    store, asked = Objects(f"file://{tmp_path}"), []
    get = obstore.get

    def watched(place: object, key: str, options: dict[str, object]) -> object:
        asked.append(options.get("if_match", ""))
        return get(place, key, options=options)

    monkeypatch.setattr(obstore, "get", watched)
    mark = store.stat("one").mark
    assert b"".join(store.pieces("one", begin=1, end=9, mark=mark)) == CONTENT[1:9]
    assert asked == [mark] and mark.startswith('"')
    (tmp_path / "one").write_bytes(b"another")
    with pytest.raises(StoreUnreachable, match="written again"):
        list(store.pieces("one", end=3, mark=mark))


@pytest.mark.parametrize("may_list", [True, False])
def test_a_missing_object_that_is_told_as_denied_is_told_apart_by_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_list: bool
) -> None:
    """S3 answers 403 to a HEAD of a missing key where the credentials may not list the bucket."""
    (tmp_path / "there").write_bytes(b"x")
    store = Objects(f"file://{tmp_path}", patience_s=0)

    def denied(*_: object) -> None:
        raise exceptions.PermissionDeniedError("403 Forbidden")

    monkeypatch.setattr(obstore, "head", denied)
    if not may_list:
        monkeypatch.setattr(obstore, "list", denied)
    with pytest.raises(FileNotFoundError if may_list else MissingOrDenied) as told:
        store.stat("missing")
    if not may_list:
        assert "s3:ListBucket" in storage_failure(told.value, doing="The backup").remedy
    with pytest.raises(AccessDenied):
        store.stat("there")


def test_a_service_of_credentials_that_times_out_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    failures = ["PUT http://169.254.169.254/latest/api/token: operation timed out", "credential: 503"]
    head = obstore.head

    def slow(*arguments: object) -> object:
        if failures:
            raise exceptions.GenericError(failures.pop(0))
        return head(*arguments)

    monkeypatch.setattr(obstore, "head", slow)
    assert Objects(f"file://{tmp_path}", patience_s=60).stat("one").bytes == len(CONTENT)
    failures.append("PUT http://169.254.169.254/latest/api/token: no route to host")
    with pytest.raises(AccessDenied):
        Objects(f"file://{tmp_path}", patience_s=60).stat("one")


def test_a_store_that_does_not_answer_is_told_once_while_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    retry = objects._Retry(60.0)
    for told in (0, 0, 1, 1, 1):
        retry.pause_or_raise(StoreUnreachable("http://h/one: connection refused"))
        assert len(caplog.records) == told
    assert caplog.records[0].message == "http://h/one: connection refused; it is tried again for 60 s"


def test_a_full_disk_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def full(*given: object, **named: object) -> None:
        tries.append(given)
        raise exceptions.GenericError("Unable to copy data to file: No space left on device (os error 28)")

    monkeypatch.setattr(obstore, "put", full)
    with pytest.raises(StoreUnreachable) as refused:
        Objects(f"file://{tmp_path}").put("a", b"x")
    assert len(tries) == 1
    assert "free some space" in storage_failure(refused.value, doing="Copying").remedy


def test_pieces_of_any_size_are_sent_in_their_order() -> None:
    content = bytes(range(256))
    for cuts in ((0, 3, 13, 23, 24), (0, 10, 20, 27), (0, 256), (0, 1, 11, 30)):
        pieces = [content[low:high] for low, high in pairwise([*cuts, 256])]
        for given in (pieces, [memoryview(piece) for piece in pieces]):
            parts = list(regrouped(given, 10))
            assert b"".join(parts) == content
            assert [len(part) for part in parts] == [10] * 25 + [6]


@pytest.mark.parametrize("is_conditional", [True, False])
def test_of_several_who_create_an_object_the_first_content_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_conditional: bool
) -> None:
    put = obstore.put

    def without_conditions(place: object, key: str, content: bytes, **more: object) -> object:
        if more:
            raise exceptions.NotSupportedError("no conditions here")
        return put(place, key, content)

    if not is_conditional:
        monkeypatch.setattr(obstore, "put", without_conditions)
    store = Objects(f"file://{tmp_path}", patience_s=0)
    assert store.create("a/one", b"first") and store.create("a/one", b"first")
    assert not store.create("a/one", b"second")
    assert store.content("a/one") == b"first" and store.exists("a/one") and not store.exists("a/two")


def test_objects_are_listed_by_their_keys_and_removed_though_some_are_gone(tmp_path: Path) -> None:
    store = Objects(f"file://{tmp_path}")
    for key in ("b/2", "b/1", "a/3", "bb"):
        store.put(key, key.encode() * 2)
    assert [(entry.key, entry.stat.bytes) for entry in store.entries("b/")] == [("b/1", 6), ("b/2", 6)]
    assert [entry.key for entry in store.entries()] == ["a/3", "b/1", "b/2", "bb"]
    assert store.digest("b/1") == xxhash.xxh3_128_hexdigest(b"b/1b/1")
    store.delete_all(["b/0", "b/1", "b/2", "c"])
    assert [entry.key for entry in store.entries()] == ["a/3", "bb"]
    store.delete_all([])
    store.delete("bb")
    assert [entry.key for entry in store.entries()] == ["a/3"]


def test_what_is_tried_again_waits_ever_longer_and_ends_when_nothing_came_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses, now = list[float](), [1000.0]

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(objects.time, "sleep", pause)
    monkeypatch.setattr(objects.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(objects.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(objects, "_LONGEST_PAUSE_S", 20.0)
    retry, error = objects._Retry(60.0), StoreUnreachable(errno.EIO, "no answer")
    with pytest.raises(StoreUnreachable):
        for _ in range(100):
            retry.pause_or_raise(error)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 20, 8.5], "no longer than until the deadline"
    pauses.clear()
    now[0] += 500.0  # while bytes came
    retry.got_on()
    retry.pause_or_raise(error)
    assert pauses == [0.5]
    for lasting in (AccessDenied(errno.EACCES, "no"), PermanentStoreError(errno.EIO, "no bucket")):
        with pytest.raises(type(lasting)):
            objects._Retry(60.0).pause_or_raise(lasting)
    assert pauses == [0.5]


def test_a_mark_that_names_no_bytes_binds_no_read(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    store = Objects(f"file://{tmp_path}", patience_s=0)
    for mark in ('W/"weak"', "2026-01-01", ""):
        assert b"".join(store.pieces("one", begin=3, end=9, mark=mark)) == CONTENT[3:9]
    assert objects._stat({"size": 7, "e_tag": None, "last_modified": "monday"}).mark == "monday"
    assert objects._stat({"size": 7, "e_tag": '"a"', "last_modified": "monday"}).mark == '"a"'
