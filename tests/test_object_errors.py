"""Errors of stores, told in a line; how stores are opened; and the sums of what is sent in parts."""

import errno
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore import exceptions

from bloomery.errors import StorageError
from bloomery.objects import AccessDenied, Objects, StoreUnreachable, storage_failure, uploads
from bloomery.objects.refusals import BeyondEnd, PermanentStoreError, as_os_error, short_text
from bloomery.objects.uploads import part_size, send_pieces


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
        (exceptions.GenericError("status code: 416 Range Not Satisfiable:"), BeyondEnd, errno.EINVAL),
        (exceptions.GenericError("<Code>InvalidRange</Code>"), BeyondEnd, errno.EINVAL),
        (exceptions.GenericError("Requested range was invalid"), BeyondEnd, errno.EINVAL),
        (exceptions.GenericError("x" * 500 + " 416 Range Not Satisfiable"), BeyondEnd, errno.EINVAL),
        (
            exceptions.GenericError("416 Range Not Satisfiable: <Code>Other</Code>"),
            BeyondEnd,
            errno.EINVAL,
        ),
        (exceptions.GenericError("in 416.5ms: 500 Internal"), StoreUnreachable, errno.EIO),
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
    with monkeypatch.context() as environment:
        environment.setenv("MY_SECRET", "zq9v")
        environment.setenv("MY_TOKEN", "wx7u")
        assert short_text("refused: zq9v, wx7u, zq9v") == "refused: ***, ***, ***"
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
        (OSError(errno.EIO, "of a descriptor", 3), "reachable"),
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
def test_what_is_received_and_what_is_sent_have_their_own_time_and_tries(
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
        "retry_timeout": timedelta(seconds=120),
    }
    assert asked == [
        {**usual, "timeout": timedelta(days=7), "read_timeout": timedelta(seconds=60), "max_retries": 1},
        {**usual, "timeout": (long := timedelta(seconds=900)), "read_timeout": long, "max_retries": 8},
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


def test_a_secret_at_the_end_of_what_is_shown_is_not_shown_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcdefghijklmnop")
    text = short_text("." * 395 + "abcdefghijklmnop and more")
    assert text == "." * 395 + "*** a"


def test_a_part_of_an_object_stays_as_it_was_when_its_memory_is_used_again() -> None:
    memory = bytearray(b"abcd")
    parts = uploads.regrouped([memoryview(memory)], 4)
    part = next(parts)
    memory[:] = b"wxyz"
    assert part == b"abcd"
