"""Lines that are slow, silent or gone, and stores that refuse: by progress, with patience, told once."""

import errno
import random
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import obstore
import pytest
import xxhash
from obstore import exceptions
from tests.range_server import Served, serving

from bloomery import objects
from bloomery.errors import StorageError
from bloomery.objects import (
    AccessDenied,
    MissingOrDenied,
    Objects,
    StoreUnreachable,
    storage_failure,
    uploads,
)
from bloomery.objects.refusals import PermanentStoreError, as_os_error, short_text
from bloomery.objects.uploads import part_size, regrouped, send_pieces

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


def test_a_line_that_gives_a_little_at_a_time_gives_all_and_no_byte_twice(server: Served) -> None:
    server.most_bytes = 100
    pieces = Objects(server.url, patience_s=60).pieces("one", end=len(CONTENT), piece_bytes=50)
    assert b"".join(pieces) == CONTENT
    assert sum(given for _, given in server.ranges) >= len(CONTENT)
    assert sorted({begin for begin, _ in server.ranges})[-1] >= len(CONTENT) - 100
    assert len(server.ranges) >= len(CONTENT) // 100, "many more than a count of tries would allow"


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


@pytest.mark.parametrize(
    ("raised", "kind", "number"),
    [
        (exceptions.NotFoundError("404"), FileNotFoundError, errno.ENOENT),
        (exceptions.NotFoundError("<Code>NoSuchBucket</Code>"), PermanentStoreError, errno.EIO),
        (exceptions.UnauthenticatedError("401"), AccessDenied, errno.EACCES),
        (PermissionError(errno.EACCES, "no"), AccessDenied, errno.EACCES),
        (exceptions.InvalidPathError("a//b"), PermanentStoreError, errno.EINVAL),
        (exceptions.NotSupportedError("no"), PermanentStoreError, errno.EINVAL),
        (exceptions.PreconditionError("412"), PermanentStoreError, errno.ESTALE),
        (exceptions.GenericError("<Code>SignatureDoesNotMatch</Code>"), AccessDenied, errno.EACCES),
        (exceptions.GenericError("AccessDenied"), AccessDenied, errno.EACCES),
        (exceptions.GenericError("AccessDenied: 503 slow down"), StoreUnreachable, errno.EIO),
        (exceptions.GenericError("500 Internal"), StoreUnreachable, errno.EIO),
        (OSError(errno.ENOSPC, "No space left on device"), PermanentStoreError, errno.ENOSPC),
        (OSError(errno.EIO, "input/output error"), StoreUnreachable, errno.EIO),
    ],
)
def test_each_error_of_a_store_says_whether_it_is_to_be_tried_again(
    raised: Exception, kind: type[OSError], number: int
) -> None:
    with pytest.raises(OSError, match=r"s3://b/key") as told, as_os_error("s3://b/key"):
        raise raised
    assert type(told.value) is kind and told.value.errno == number


def test_of_an_error_one_line_is_shown_that_says_what_happened_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = "<Error><Code>SlowDown</Code><Message>Reduce\n your rate</Message></Error>"
    assert short_text(answer.replace("\n", "")) == "SlowDown: Reduce your rate"
    assert short_text("<Code>SlowDown</Code> and more") == "SlowDown"
    assert short_text("a  line\nof two\n\nDebug source:\n{ much }") == "a line of two"
    assert short_text("x" * 500) == "x" * 400
    for name in ("MY_SECRET", "hf_token", "DB_PASSWORD", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_SAS"):
        with monkeypatch.context() as environment:
            environment.setenv(name, "zq9v")
            assert short_text("refused: zq9v") == "refused: ***"
    monkeypatch.setenv("A_KEY", "zq9")
    monkeypatch.setenv("A_PLACE", "zq9v")
    assert short_text("zq9 zq9v") == "zq9 zq9v", "what is too short, or no secret by its name, is shown"
    signed = "https://h/a?X-Amz-Credential=AKIA/2026&X-Amz-Date=1&X-Amz-Signature=abc&Signature=d&token=e f"
    shown = "https://h/a?X-Amz-Credential=***&X-Amz-Date=1&X-Amz-Signature=***&Signature=***&token=*** f"
    assert short_text(signed) == shown


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), "Is the URL right"),
        (PermissionError(errno.EACCES, "no"), "Credentials are missing"),
        (OSError(errno.ENOSPC, "full"), "free some space"),
        (OSError(errno.EIO, "broken"), "reachable"),
    ],
)
def test_each_failure_of_a_store_has_its_remedy(error: OSError, said: str) -> None:
    told = storage_failure(error, doing="The backup")
    assert said in told.remedy and told.message == f"The backup failed: {error.strerror}"


@pytest.mark.parametrize(
    ("url", "endpoint", "may_be_plain"),
    [
        ("s3://b/run", None, False),
        ("s3://b/run", "http://127.0.0.1:9000", True),
        ("s3://b/run", "https://minio", False),
        ("gs://b/run", None, False),
        ("http://host/run", None, True),
        ("https://host/run", None, False),
    ],
)
def test_what_is_received_and_what_is_sent_have_their_own_time_and_no_more_tries_below(
    monkeypatch: pytest.MonkeyPatch, url: str, endpoint: str | None, may_be_plain: bool
) -> None:
    asked: list[dict[str, object]] = []

    def opened(given: str, *, client_options: dict[str, object], retry_config: dict[str, object]) -> object:
        asked.append({"url": given, **client_options, **retry_config})
        return object()

    monkeypatch.setattr("obstore.store.from_url", opened)
    monkeypatch.setattr("obstore.store.HTTPStore.from_url", opened)
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT", endpoint)
    store = Objects(f"{url}/")
    usual = {
        "url": url,
        "connect_timeout": timedelta(seconds=20),
        "allow_http": may_be_plain,
        "max_retries": 1,
    }
    assert asked == [
        {**usual, "timeout": timedelta(days=7), "read_timeout": timedelta(seconds=60)},
        {**usual, "timeout": timedelta(seconds=900), "read_timeout": timedelta(seconds=900)},
    ]
    assert store.place("a/b") == f"{url}/a/b" and store.place() == url


def test_a_directory_that_is_only_read_must_be_there_and_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "two words").mkdir()
    for name, said in (("none", "does not exist"), ("file", "is no directory")):
        with pytest.raises(StorageError, match=said):
            Objects(f"file://{tmp_path}/{name}", create=False)
    assert not (tmp_path / "none").exists()
    Objects(f"file://{tmp_path}/two%20words", create=False)
    Objects(f"file://{tmp_path}/none")
    assert (tmp_path / "none").is_dir()


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


def test_an_object_of_terabytes_is_sent_in_as_many_parts_as_a_store_takes() -> None:
    least = 5 << 20
    for size, expected in ((0, least), (9000 * least, least), (9000 * least + 1, least + 1)):
        assert part_size(size) == expected
    assert part_size(5 * 10**12) == 555_555_556


@pytest.mark.parametrize(
    ("size", "mark", "is_proven"),
    [
        (3, '"47bce5c74f589f4867dbd57e9ca9f808"', True),  # the MD5 of aaa
        (3, "47bce5c74f589f4867dbd57e9ca9f808", True),
        (3, '"47bce5c74f589f4867dbd57e9ca9f809"', False),
        (3, None, False),
        (0, None, False),
        (0, "", False),
    ],
)
def test_bytes_are_proven_only_by_their_own_sum(
    monkeypatch: pytest.MonkeyPatch, size: int, mark: str | None, is_proven: bool
) -> None:
    monkeypatch.setattr(obstore, "put", lambda *given, **named: {"e_tag": mark})
    assert send_pieces(object(), "key", size=size, pieces=[b"a"] * size) is is_proven  # type: ignore[arg-type]


def test_large_content_is_sent_in_parts_of_the_size_that_its_sum_is_made_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[list[bytes], int]] = []

    def put(store: object, key: str, parts: Iterator[bytes], *, chunk_size: int) -> dict[str, str]:
        sent.append((list(parts), chunk_size))
        return {"e_tag": '"b8ac3a4f1c54f8a0fb9eb35e16f2ba2c-3"'}

    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr(uploads, "_PART_BYTES", 4)
    assert not send_pieces(object(), "key", size=10, pieces=[b"abc", b"defghij"])  # type: ignore[arg-type]
    assert sent == [([b"abcd", b"efgh", b"ij"], 4)]
