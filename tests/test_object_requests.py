"""Which requests a store gets, one by one, and what is made of its answers."""

import errno
import hashlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import obstore
import pytest
import xxhash
from obstore import exceptions
from tests.checkpoint.object_store import ENVIRONMENT

from bloomery import objects
from bloomery.config.environment import SWITCH, OfflineRefused
from bloomery.errors import StorageError
from bloomery.objects import AccessDenied, MissingOrDenied, ObjectEntry, Objects, ObjectStat, StoreUnreachable
from bloomery.objects.refusals import PermanentStoreError, storage_failure
from bloomery.objects.uploads import SentFile, part_size, regrouped, send_file

CONTENT = bytes(range(100))


class Store:
    """Answers as obstore's functions do, and notes what it was asked: (function, store, key, …)."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Any]] = {}

    def function(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            content = [b"".join(one) if isinstance(one, Iterator) else one for one in given]
            self.asked.append((name, *content, *([more] if more else [])))
            answer = self.answers[name].pop(0) if self.answers.get(name) else None
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.0)
    for name in ("put", "get", "head", "list", "delete"):
        monkeypatch.setattr(obstore, name, made.function(name))

    def opened(url: str, *, total_s: float, silence_s: float, retry: object, create: bool) -> str:
        return "receiving" if total_s == 7 * 86_400 else "sending"

    monkeypatch.setattr(objects, "_opened", opened)
    return made


def raw(path: str, size: int = 3, e_tag: str | None = '"a"') -> dict[str, Any]:
    return {"path": path, "size": size, "e_tag": e_tag, "last_modified": "monday"}


def response(*pieces: bytes | Exception, e_tag: str | None = '"a"') -> Any:
    def stream(min_chunk_size: int) -> Iterator[bytes]:
        sizes.append(min_chunk_size)
        for piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    sizes: list[int] = []
    return SimpleNamespace(meta={"e_tag": e_tag}, stream=stream, sizes=sizes)


def test_each_method_asks_for_its_object_where_its_time_is_counted(store: Store, tmp_path: Path) -> None:
    place = Objects("s3://b/run/")
    store.answers["head"] = [raw("a/b", 7), raw("a/b", 7), exceptions.NotFoundError("no")]
    store.answers["list"] = [[[raw("b", 2, None), raw("a", 1)], [raw("c")]], []]
    place.put("a/b", b"123")
    assert place.stat("a/b") == ObjectStat(bytes=7, mark='"a"')
    assert (place.exists("a/b"), place.exists("a/b")) == (True, False)
    assert place.entries("a/") == [
        ObjectEntry(key="a", stat=ObjectStat(bytes=1, mark='"a"')),
        ObjectEntry(key="b", stat=ObjectStat(bytes=2, mark="monday")),
        ObjectEntry(key="c", stat=ObjectStat(bytes=3, mark='"a"')),
    ]
    assert place.entries() == []
    place.delete("a/b")
    place.delete_all({"c", "a", "b"})
    place.delete_all([])
    assert store.asked == [
        ("put", "sending", "a/b", b"123"),
        *[("head", "receiving", "a/b")] * 3,
        ("list", "receiving", "a/"),
        ("list", "receiving", None),
        ("delete", "sending", "a/b"),
        ("delete", "sending", ["a", "b", "c"]),
    ]


def test_a_store_that_says_of_one_that_it_is_gone_is_asked_for_each(store: Store) -> None:
    gone = FileNotFoundError(errno.ENOENT, "gone")
    store.answers["delete"] = [gone, None, gone, None]
    Objects("s3://b").delete_all(["a", "b", "c"])
    assert [asked[2] for asked in store.asked] == [["a", "b", "c"], "a", "b", "c"]


@pytest.mark.parametrize(
    ("bounds", "ranges"),
    [
        ({}, {}),
        ({"begin": 5}, {"range": {"offset": 5}}),
        ({"end": 9}, {"range": (0, 9)}),
        ({"begin": 5, "end": 9}, {"range": (5, 9)}),
    ],
)
def test_the_bytes_that_are_wanted_are_asked_for(
    store: Store, bounds: dict[str, int], ranges: dict[str, Any]
) -> None:
    answer = response(b"56", b"78")
    store.answers["get"] = [answer]
    pieces = list(Objects("s3://b").pieces("a", **bounds, piece_bytes=17))
    assert [bytes(piece) for piece in pieces] == [b"56", b"78"]
    assert all(isinstance(piece, memoryview) for piece in pieces) and answer.sizes == [17]
    assert store.asked == [("get", "receiving", "a", {"options": ranges})]


def test_a_read_of_nothing_asks_for_nothing_and_the_usual_piece_is_of_64_kib(store: Store) -> None:
    place = Objects("s3://b")
    assert place.content("a", begin=5, end=5) == b"" == place.content("a", end=0) and store.asked == []
    store.answers["get"] = [response(b"abc"), answer := response(b"abc")]
    assert place.digest("a") == xxhash.xxh3_128_hexdigest(b"abc")
    assert place.content("a") == b"abc" and answer.sizes == [65_536]


@pytest.mark.parametrize("kind", ["while it streams", "at once"])
def test_a_read_that_breaks_off_goes_on_behind_what_came_and_with_the_same_version(
    store: Store, kind: str
) -> None:
    cut = exceptions.GenericError("connection reset")
    broken = [response(b"0123", cut)] if kind == "while it streams" else [response(b"0123", cut), cut]
    store.answers["get"] = [*broken, response(b"45", cut), response(b"6789")]
    assert Objects("s3://b", patience_s=60).content("a", begin=10, end=20) == b"0123456789"
    options = [asked[-1]["options"] for asked in store.asked]
    again = [{"if_match": '"a"', "range": (14, 20)}] * len(broken)
    assert options == [{"range": (10, 20)}, *again, {"if_match": '"a"', "range": (16, 20)}]


@pytest.mark.parametrize(
    ("first", "mark", "asked_for"),
    [
        ('W/"a"', "", None),
        (None, "", None),
        ('"a"', "", '"a"'),
        ('"a"', '"a"', '"a"'),
        ('"a"', "monday", '"a"'),
    ],
)
def test_only_an_etag_that_names_the_bytes_binds_what_follows(
    store: Store, first: str | None, mark: str, asked_for: str | None
) -> None:
    cut = exceptions.GenericError("connection reset")
    store.answers["get"] = [response(b"0", cut, e_tag=first), response(b"1", e_tag=first)]
    assert b"".join(Objects("s3://b", patience_s=60).pieces("a", mark=mark)) == b"01"
    begun, went_on = (asked[-1]["options"].get("if_match") for asked in store.asked)
    assert begun == (mark if mark.startswith('"') else None) and went_on == asked_for


def test_another_version_is_told_though_the_server_does_not_look_for_it(store: Store) -> None:
    cut = exceptions.GenericError("connection reset")
    store.answers["get"] = [response(b"0", cut), response(b"1", e_tag='"b"')]
    with pytest.raises(PermanentStoreError) as told:
        Objects("s3://b", patience_s=60).content("a")
    assert told.value.errno == errno.ESTALE
    assert told.value.strerror == "s3://b/a: the object was written again while it was read"
    store.answers["get"] = [response(b"1", e_tag=None)]
    assert b"".join(Objects("s3://b").pieces("a", mark='"x"')) == b"1", "it says nothing of its version"


@pytest.mark.parametrize(
    ("listed", "kind", "said"),
    [
        ([[[raw("a/b")]]], AccessDenied, "403"),
        ([[[raw("a/bc"), raw("a/")]]], FileNotFoundError, "s3://x/a/b does not exist: not found"),
        ([exceptions.PermissionDeniedError("403 Forbidden")], MissingOrDenied, "403 first"),
        ([exceptions.PermissionDeniedError("InvalidAccessKeyId")], AccessDenied, "InvalidAccessKeyId"),
    ],
)
def test_a_denial_is_told_from_a_missing_object_by_what_is_listed_beside_it(
    store: Store, listed: list[Any], kind: type[OSError], said: str
) -> None:
    store.answers |= {"head": [exceptions.PermissionDeniedError("403 first")], "list": listed}
    with pytest.raises(OSError) as told:
        Objects("s3://x").stat("a/b")
    assert type(told.value) is kind and said in str(told.value)
    assert store.asked[1] == ("list", "receiving", "a/")


@pytest.mark.parametrize("there", [None, b"mine", b"theirs"])
def test_a_store_without_conditions_is_asked_before_and_after(store: Store, there: bytes | None) -> None:
    store.answers = {
        "put": [exceptions.NotSupportedError("no conditions")],
        "head": [exceptions.NotFoundError("no") if there is None else raw("a")],
        "get": [response(there or b"mine")],
    }
    assert Objects("s3://b").create("a", b"mine") is (there != b"theirs")
    puts = [asked for asked in store.asked if asked[0] == "put"]
    first = ("put", "sending", "a", b"mine", {"mode": "create"})
    assert puts == [first, *([("put", "sending", "a", b"mine")] if there is None else [])]


def test_what_is_sent_is_sent_again_from_its_first_byte(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    mark = {"e_tag": f'"{hashlib.md5(CONTENT).hexdigest()}"'}
    cut = exceptions.GenericError("connection reset")
    store.answers["put"] = [cut, mark, cut, mark, {"e_tag": '"other"'}]
    place = Objects("s3://b", patience_s=60)
    whole = SentFile(xxh3_128=xxhash.xxh3_128_hexdigest(CONTENT), is_proven=True)
    assert place.send("k", path) == whole
    calls = []

    def pieces() -> list[memoryview]:
        calls.append(1)
        return [memoryview(CONTENT[:7]), memoryview(CONTENT[7:])]

    assert place.send_pieces("k", size=100, pieces=pieces) is True and len(calls) == 2
    assert place.send_pieces("k", size=100, pieces=pieces) is False
    assert store.asked == [("put", "sending", "k", CONTENT, {"use_multipart": False})] * 5


def test_a_file_is_read_in_parts_and_hashed_as_a_whole(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.objects.uploads._PART_BYTES", 30)
    (tmp_path / "file").write_bytes(CONTENT)
    sums = b"".join(hashlib.md5(CONTENT[at : at + 30]).digest() for at in range(0, 100, 30))
    store.answers["put"] = [{"e_tag": f"{hashlib.md5(sums).hexdigest()}-4"}]
    sent = send_file("a store", "k", tmp_path / "file")  # type: ignore[arg-type]
    assert sent == SentFile(xxh3_128=xxhash.xxh3_128_hexdigest(CONTENT), is_proven=True)
    assert store.asked == [("put", "a store", "k", CONTENT, {"chunk_size": 30})]
    assert list(regrouped([b"ab", b"cdef", memoryview(b"ghij"), b""], 4)) == [b"abcd", b"efgh", b"ij"]


def test_a_file_of_just_one_part_is_sent_at_once(store: Store, tmp_path: Path) -> None:
    content = bytes(part_size(0))
    (tmp_path / "file").write_bytes(content)
    store.answers["put"] = [{"e_tag": f'"{hashlib.md5(content).hexdigest()}"'}]
    assert send_file("a store", "k", tmp_path / "file").is_proven  # type: ignore[arg-type]
    assert store.asked == [("put", "a store", "k", content, {"use_multipart": False})]


def test_patience_counts_from_the_first_failure_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [0.0], list[float]()
    monkeypatch.setattr(objects.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(objects.time, "sleep", slept.append)
    monkeypatch.setattr(objects.random, "uniform", lambda low, high: low)
    retry, error = objects._Retry(10.0), StoreUnreachable(errno.EIO, "no answer")
    retry.pause_or_raise(error)
    now[0] = 9.9
    retry.pause_or_raise(error)
    retry.got_on()
    now[0] = 500.0
    retry.pause_or_raise(error)
    now[0] = 510.0
    with pytest.raises(StoreUnreachable):
        retry.pause_or_raise(error)
    assert slept == pytest.approx([0.25, 0.1, 0.25])


def test_where_the_network_is_forbidden_no_store_but_a_directory_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setenv("A_SECRET", "zq9v-long")
    Objects(f"file://{tmp_path}")
    for url in ("s3://b/zq9v-long", "https://h/x"):
        with pytest.raises(OfflineRefused) as told:
            Objects(url)
        shown = url.replace("zq9v-long", "***")
        assert f"needed to reach {shown}," in told.value.message and "file:///path" in told.value.remedy
    monkeypatch.delenv(SWITCH)
    with pytest.raises(StorageError, match="are the credentials in the environment") as refused:
        Objects("ftp://h/zq9v-long")
    assert refused.value.message.startswith("ftp://h/*** cannot be used: ")


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (MissingOrDenied(errno.EACCES, "no"), "The object is missing, or may not be read"),
        (AccessDenied(errno.EACCES, "no"), "Credentials are missing, wrong, or not allowed"),
        (PermanentStoreError(errno.ENOSPC, "full"), "The disk there is full"),
        (PermanentStoreError(errno.EIO, "no bucket"), "Is the store reachable from here"),
        (FileNotFoundError(errno.ENOENT, "gone"), "Is the URL right?"),
        (OSError("without a number"), "Is the store reachable from here"),
    ],
)
def test_a_failure_of_a_store_has_the_remedy_of_its_kind(error: OSError, begins: str) -> None:
    told = storage_failure(error, doing="It")
    assert told.remedy.startswith(begins)
    assert told.message == f"It failed: {error.strerror or 'without a number'}"


class _Parts(BaseHTTPRequestHandler):
    """Takes an upload in parts as S3 does, and cuts the line of the first tries of its second part."""

    tries: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        is_new = "uploads" in self.path
        self._answer("<R><UploadId>u</UploadId></R>" if is_new else '<R><ETag>"x-3"</ETag></R>')
        self.tries["begun"] += is_new

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        (part,) = parse_qs(urlsplit(self.path).query)["partNumber"]
        self.tries[part] += 1
        if part == "2" and self.tries[part] < 4:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._answer("")

    def _answer(self, content: str) -> None:
        self.send_response(200)
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *about: object) -> None:
        """Say nothing."""


def test_of_a_file_on_a_shaky_line_only_the_part_that_was_cut_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Parts)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}.items():
        monkeypatch.setenv(name, value)
    content = memoryview(bytes(11 << 20))
    try:
        Objects("s3://b").send_pieces("key", size=len(content), pieces=lambda: [content])
    finally:
        server.shutdown()
        server.server_close()
    assert _Parts.tries == {"begun": 1, "1": 1, "2": 4, "3": 1}
