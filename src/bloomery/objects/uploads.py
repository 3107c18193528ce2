"""Multipart uploads of one object, checksums compared with the store's; ends unfinished ones, also on a disk.

Parts are hashed on the way. An unfinished upload costs money and no listing shows it. obstore can neither
list nor end one, so those requests are signed here, by AWS's signature version 4
(docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html), with the keys of the environment.
Google's store takes such requests with its HMAC keys (docs.cloud.google.com/storage/docs/interoperability).
Azure needs none: it discards blocks that nobody has committed within a week (Put Block, in its REST API).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

import xxhash

from bloomery import durable
from bloomery.config.environment import refuse_network
from bloomery.objects.refusals import (
    AccessDenied,
    LocalFileError,
    PermanentStoreError,
    StoreUnreachable,
    short_text,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PART_BYTES, _MOST_PARTS = 5 << 20, 9_000
"""S3 takes 10,000 parts of an object, none but the last below 5 MiB."""


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A file that was sent. xxh3_128: of the bytes that were read from the disk and sent.

    is_proven: whether the store answered with the MD5 of these bytes. Stores that speak S3 do, unless they
    encrypt with keys of their own; nothing is known where they do not.
    """

    xxh3_128: str
    is_proven: bool


def send_file(store: ObjectStore, key: str, path: Path) -> SentFile:
    """Send a file, hashed while it is read. Raises LocalFileError where it cannot be read."""
    whole = xxhash.xxh3_128()
    with _of_file(path):
        size = path.stat().st_size

    def pieces() -> Iterator[bytes]:
        with _of_file(path):
            file = path.open("rb")
        with file:
            while True:
                with _of_file(path):
                    piece = file.read(part_size(size))
                if not piece:
                    return
                whole.update(piece)
                yield piece

    is_proven = send_pieces(store, key, size=size, pieces=pieces())
    return SentFile(xxh3_128=whole.hexdigest(), is_proven=is_proven)


@contextmanager
def _of_file(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalFileError(error.errno, error.strerror or str(error), str(path)) from error


def send_pieces(store: ObjectStore, key: str, *, size: int, pieces: Iterable[bytes | memoryview]) -> bool:
    """Send `size` bytes that come in pieces; say whether the store answered with the checksum of them.

    The ETag of an object that was sent in parts is the MD5 of the parts' MD5s, and their number. See
    docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html. Where the sending fails,
    obstore aborts the upload, and the store keeps no part of it.
    """
    import obstore

    part_bytes, sums = part_size(size), list[bytes]()

    def parts() -> Iterator[bytes]:
        for part in regrouped(pieces, part_bytes):
            sums.append(hashlib.md5(part, usedforsecurity=False).digest())
            yield part

    if size <= part_bytes:
        result = obstore.put(store, key, b"".join(parts()), use_multipart=False)
        expected = sums[0].hex() if sums else ""
    else:
        result = obstore.put(store, key, parts(), chunk_size=part_bytes)
        expected = f"{hashlib.md5(b''.join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"
    mark = (result["e_tag"] or "").strip('"')
    return bool(expected) and mark == expected


def part_size(size: int) -> int:
    """Return the bytes of each part of an object of `size` bytes."""
    return max(_PART_BYTES, -(-size // _MOST_PARTS))


def regrouped(pieces: Iterable[bytes | memoryview], part_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of the pieces in parts of `part_bytes`; the last may be shorter."""
    held = bytearray()
    for piece in pieces:
        if not held and len(piece) == part_bytes and isinstance(piece, bytes):
            yield piece
            continue
        held += piece
        while len(held) >= part_bytes:
            yield bytes(held[:part_bytes])
            del held[:part_bytes]
    if held:
        yield bytes(held)


ABANDONED_AFTER = timedelta(days=1)
"""The age from which an upload is abandoned: one is a file of a checkpoint, of 1 GiB or one tensor."""
_TIMEOUT_S = 60.0
_ANSWER_BYTES_AT_MOST = 16 << 20
_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, kw_only=True)
class UnfinishedUpload:
    """A multipart upload that was begun and not finished."""

    key: str
    upload: str
    begun: datetime


@dataclass(frozen=True, kw_only=True)
class _Dialect:
    """How one store is asked. key, secret, endpoint: the variables of the environment that hold them."""

    key: str
    secret: str
    endpoint: str
    region: str
    default_endpoint: str

    @classmethod
    def of(cls, url: str) -> _Dialect:
        """Return that of gs:// or s3://."""
        environment = os.environ
        if url.startswith("gs://"):
            return cls(
                key="GS_ACCESS_KEY_ID",  # as GDAL calls them; Google's own programs have no names for them
                secret="GS_SECRET_ACCESS_KEY",
                endpoint="GOOGLE_BASE_URL",
                region="auto",
                default_endpoint="https://storage.googleapis.com",
            )
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        return cls(
            key="AWS_ACCESS_KEY_ID",
            secret="AWS_SECRET_ACCESS_KEY",
            endpoint="AWS_ENDPOINT_URL" if environment.get("AWS_ENDPOINT_URL") else "AWS_ENDPOINT",
            region=region,
            default_endpoint=f"https://s3.{region}.amazonaws.com",
        )


class UnfinishedUploads:
    """The unfinished multipart uploads below one URL, of s3:// or gs://.

    Methods raise AccessDenied, also where the environment has no keys (a machine's role is not asked),
    PermanentStoreError where the store answers with an error, such as for a missing bucket, and
    StoreUnreachable, also for an answer that cannot be read. OfflineRefused is raised at once.
    """

    def __init__(self, url: str) -> None:
        refuse_network(f"reach {url}", remedy="Leave it out: nothing else needs it.")
        self._dialect = _Dialect.of(url)
        self._bucket, _, path = url.partition("://")[2].partition("/")
        self.url, self._prefix = url.rstrip("/"), path.rstrip("/") + "/" if path else ""
        endpoint = os.environ.get(self._dialect.endpoint) or self._dialect.default_endpoint
        self._endpoint = endpoint.rstrip("/")

    def list(self, *, begun_before: timedelta = ABANDONED_AFTER) -> list[UnfinishedUpload]:
        """Return the uploads that began at least this long ago, by the store's own clock."""
        found: list[UnfinishedUpload] = []
        position: dict[str, str] = {}
        while True:
            answer, date = self._ask("GET", "", {"uploads": "", "prefix": self._prefix, **position})
            page = _parsed(answer)
            try:
                found += _begun_before(page, date, begun_before)
            except (ValueError, TypeError) as error:  # TypeError: one of the times has no zone
                problem = f"{self.url} (unfinished uploads): a time cannot be read: {short_text(str(error))}"
                raise StoreUnreachable(errno.EIO, problem) from error
            following = {
                "key-marker": page.findtext("NextKeyMarker", ""),
                "upload-id-marker": page.findtext("NextUploadIdMarker", ""),
            }
            if page.findtext("IsTruncated") != "true" or following == position:
                return found
            position = following

    def end(self, upload: UnfinishedUpload) -> None:
        """End an upload; the store removes its parts. One that is gone is no error."""
        self._ask("DELETE", upload.key, {"uploadId": upload.upload})

    def _ask(self, method: str, key: str, query: Mapping[str, str]) -> tuple[bytes, str | None]:
        """Return the store's answer, and the date that it gives it."""
        import urllib3

        path = quote(f"/{self._bucket}/{key}" if key else f"/{self._bucket}", safe="/-_.~")
        asked = "&".join(
            f"{quote(name, safe='')}={quote(query[name], safe='-_.~')}" for name in sorted(query)
        )
        address = f"{self._endpoint}{path}?{asked}"
        place = f"{self.url} (unfinished uploads)"
        try:
            response = urllib3.request(
                method,
                address,
                headers=self._signed(method, path, asked),
                timeout=_TIMEOUT_S,
                retries=urllib3.Retry(total=3, backoff_factor=0.5, status_forcelist=(500, 502, 503, 504)),
                preload_content=False,
            )
            content = response.read(_ANSWER_BYTES_AT_MOST)
            response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise StoreUnreachable(errno.EIO, f"{place}: {short_text(str(error))}") from error
        if response.status in (401, 403):
            raise AccessDenied(errno.EACCES, f"{place}: {short_text(content.decode(errors='replace'))}")
        if response.status >= 300 and (method, response.status) != ("DELETE", 404):
            text = short_text(content.decode(errors="replace"))
            raise PermanentStoreError(errno.EIO, f"{place}: {response.status} {text}")
        return content, response.headers.get("date")

    def _signed(self, method: str, path: str, query: str) -> dict[str, str]:
        """Return the headers of a request without a body."""
        dialect = self._dialect
        key, secret = os.environ.get(dialect.key), os.environ.get(dialect.secret)
        if not key or not secret:
            raise AccessDenied(
                errno.EACCES,
                f"{self.url}: unfinished uploads are listed only with {dialect.key} and {dialect.secret} "
                "in the environment",
            )
        time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {
            "host": urlsplit(self._endpoint).netloc,
            "x-amz-content-sha256": _EMPTY,
            "x-amz-date": time,
        }
        token = os.environ.get("AWS_SESSION_TOKEN")
        if token and dialect.key.startswith("AWS"):
            headers["x-amz-security-token"] = token
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{_EMPTY}"
        scope = f"{time[:8]}/{dialect.region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{time}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signing_key = f"AWS4{secret}".encode()
        for part in scope.split("/"):
            signing_key = hmac.digest(signing_key, part.encode(), "sha256")
        signature = hmac.digest(signing_key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers


def _parsed(answer: bytes) -> ElementTree.Element:
    """Return an answer's XML, its names without their namespace."""
    try:
        page = ElementTree.fromstring(answer)
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # an encoding that is none, too
        raise StoreUnreachable(errno.EIO, f"the list of unfinished uploads is no XML: {error}") from error
    for element in page.iter():
        element.tag = element.tag.rpartition("}")[2]
    return page


def _begun_before(page: ElementTree.Element, date: str | None, age: timedelta) -> list[UnfinishedUpload]:
    """Return the page's uploads that began at least this long before its date; None: before now."""
    now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    begun = [datetime.fromisoformat(upload.findtext("Initiated", "")) for upload in page.iter("Upload")]
    return [
        UnfinishedUpload(key=upload.findtext("Key", ""), upload=upload.findtext("UploadId", ""), begun=time)
        for upload, time in zip(page.iter("Upload"), begun, strict=True)
        if now - time >= age
    ]


_UNFINISHED = re.compile(r".+#\d+")
_ABANDONED_S = 900.0
"""The seconds without a new byte after which an upload is abandoned; so long one part may take."""


class Disk:
    """The directory of a file:// URL, whose objects are files: makes them outlive a power cut.

    obstore writes an object beside its name, as `NAME#1`, and then renames it, without a sync. Of a process
    that is killed the file `NAME#1` stays: no listing shows it, and the next upload takes `NAME#2`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._named: set[Path] = set()
        """Directories below the root whose own names are durable."""

    def keep(self, key: str) -> None:
        """Sync an object, and the names that lead to it. Raises OSError."""
        path = self._root / key
        durable.sync_tree(path)
        self._sync_names(path.parent)

    def forget(self, key: str) -> None:
        """Make the removal of an object durable. Raises OSError."""
        durable.sync_directory((self._root / key).parent)

    def remove_unfinished(self, prefix: str) -> None:
        """Remove what killed uploads left under a prefix. Raises no error."""
        for path in (self._root / prefix).rglob("*#*"):
            with suppress(OSError):
                if _UNFINISHED.fullmatch(path.name) and time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _sync_names(self, directory: Path) -> None:
        """Sync the names in a directory, and once those that lead to it. Raises OSError."""
        durable.sync_directory(directory)
        while directory != self._root and directory not in self._named:
            self._named.add(directory)
            directory = directory.parent
            durable.sync_directory(directory)
