"""Reads and writes objects in a remote store: s3://, gs://, az://, http(s):// and file://, through obstore.

Credentials come from the environment or the machine (AWS_ACCESS_KEY_ID or the machine's role,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, …), never from a recipe, and no message of this
module shows one.

A time-out bounds the time without any byte, not the time of a whole transfer. A download that breaks off
goes on where it broke off, until no byte has arrived for `patience_s`.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import xxhash

from bloomery import durable
from bloomery.config.checkpoint import WHOLE_PATH, names_a_directory
from bloomery.config.environment import refuse_network
from bloomery.errors import StorageError
from bloomery.objects.refusals import (
    WRONG_CREDENTIALS,
    AccessDenied,
    BeyondEnd,
    MissingOrDenied,
    PermanentStoreError,
    as_os_error,
    short_text,
    written_again,
)
from bloomery.objects.refusals import LocalFileError as LocalFileError
from bloomery.objects.refusals import StoreUnreachable as StoreUnreachable
from bloomery.objects.refusals import storage_failure as storage_failure
from bloomery.objects.refusals import without_secrets as without_secrets
from bloomery.objects.uploads import Disk, send_file, send_pieces
from bloomery.objects.uploads import SentFile as SentFile

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""The seconds without a byte after which a transfer is given up."""
_SILENCE_S, _CONNECT_S = 60.0, 20.0
_SENDING_S = 900.0
"""The seconds for sending one part (5 MB, twelve at once), since obstore reports no progress of it."""
_SENDING_TRIES = 8
"""How often a part is sent again, within seconds: where it fails for good, its whole object is sent anew."""
_WHOLE_S = 7 * 86_400.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
_LOGGED_AT = 3  # failures in a row, after about two seconds
_PIECE_BYTES = 64 << 10
"""The bytes of a piece, lost when the connection breaks within it; larger pieces were no faster."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ObjectStat:
    """An object's size, and a mark that changes when it is written again ("" where the store gives none)."""

    bytes: int
    mark: str


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """An object below a prefix."""

    key: str
    stat: ObjectStat


class Objects:
    """The objects under one URL, by key. Opening it uses no network.

    Methods raise FileNotFoundError where there is no such object, and StoreUnreachable when it could not be
    learned for `patience_s`. create: make the directory of a file:// URL. Raises StorageError for a URL that
    cannot be used, for writes to a file:// URL whose directory is gone, and OfflineRefused.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S, create: bool = True) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        receiving, sending = (_WHOLE_S, _SILENCE_S, 1), (_SENDING_S, _SENDING_S, _SENDING_TRIES)
        self._receiving, self._sending = (
            _opened(
                self.url,
                total_s=total_s,
                silence_s=silence_s,
                retry={"max_retries": tries, "retry_timeout": timedelta(seconds=patience_s)},
                create=create,
            )
            for total_s, silence_s, tries in (receiving, sending)
        )
        self._disk = Disk(directory_of(self.url)) if self.url.startswith("file://") else None

    def put(self, key: str, content: Path | bytes) -> None:
        """Write an object, large ones in parts. Nobody sees it before it is whole."""
        import obstore

        self._written(key, lambda: obstore.put(self._sending, key, content))

    def send(self, key: str, path: Path) -> SentFile:
        """Write a file as an object, in parts, hashed on the way; say whether the store's hash agrees."""
        return self._written(key, lambda: send_file(self._sending, key, path))

    def send_pieces(self, key: str, *, size: int, pieces: Callable[[], Iterable[memoryview]]) -> bool:
        """Write an object of `size` bytes that lies in memory; say whether the store's hash proves it.

        pieces: returns its bytes from the first on; called again where the line broke.
        """
        return self._written(key, lambda: send_pieces(self._sending, key, size=size, pieces=pieces()))

    def create(self, key: str, content: bytes) -> bool:
        """Write an object that is not there yet; say whether it now holds `content`.

        Of several who try at once, with different contents, one succeeds. A store that knows no conditional
        writes is asked before and after, which tells all but those who write at the same moment.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        def create() -> None:
            try:
                obstore.put(self._sending, key, content, mode="create")
            except AlreadyExistsError:
                return
            except NotSupportedError:
                if not self.exists(key):
                    obstore.put(self._sending, key, content)

        self._written(key, create)
        return self.content(key) == content

    def exists(self, key: str) -> bool:
        """Say whether there is such an object."""
        try:
            self.stat(key)
        except FileNotFoundError:
            return False
        return True

    def delete_all(self, keys: Iterable[str]) -> None:
        """Remove objects, many with one request where the store can. Those that are gone are no error."""
        import obstore

        listed = sorted(keys)
        if listed:
            self._patiently(listed[0], lambda: _delete_all(obstore.delete, self._sending, listed))

    def delete(self, key: str) -> None:
        """Remove an object."""
        import obstore

        self._patiently(key, lambda: obstore.delete(self._sending, key))
        if self._disk is not None:  # else a power cut may bring it back beside what was removed after it
            with as_os_error(self.place(key)):
                self._disk.forget(key)

    def remove_unfinished(self, prefix: str) -> None:
        """Remove what killed uploads left under a prefix of a file:// URL (else see UnfinishedUploads)."""
        if self._disk is not None:
            self._disk.remove_unfinished(prefix)

    def stat(self, key: str) -> ObjectStat:
        """Return an object's size and mark.

        Some stores answer "denied" for a missing object where the credentials may not list the bucket, and
        some do where they may: a list then tells which it is.
        """
        import obstore

        try:
            return _stat(self._patiently(key, lambda: obstore.head(self._receiving, key)))
        except AccessDenied as denied:
            try:
                listed = {entry.key for entry in self.entries(key[: key.rfind("/") + 1])}
            except AccessDenied as refused:
                if any(word in str(refused) for word in WRONG_CREDENTIALS):
                    raise
                raise MissingOrDenied(denied.errno, denied.strerror) from denied
            if key in listed:
                raise
            raise FileNotFoundError(errno.ENOENT, f"{self.place(key)} does not exist: not found") from denied

    def entries(self, prefix: str = "") -> list[ObjectEntry]:
        """Return the objects under a prefix, which ends at a `/`, sorted by key."""
        import obstore

        raw_entries = self._patiently(
            prefix,
            lambda: [raw for batch in obstore.list(self._receiving, prefix or None) for raw in batch],
        )
        listed = [ObjectEntry(key=raw["path"], stat=_stat(raw)) for raw in raw_entries]
        return sorted(listed, key=lambda raw: raw.key)

    def directories(self, prefix: str) -> list[str]:
        """Return the first words of the keys below a prefix that have further ones behind a `/`, sorted."""
        import obstore

        listed = self._patiently(prefix, lambda: obstore.list_with_delimiter(self._receiving, prefix))
        return sorted(path.rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"])

    def content(self, key: str, *, begin: int = 0, end: int | None = None) -> bytes:
        """Return an object's bytes [begin, end), fewer where it ends before."""
        return b"".join(self.pieces(key, begin=begin, end=end))

    def pieces(
        self,
        key: str,
        *,
        begin: int = 0,
        end: int | None = None,
        piece_bytes: int = _PIECE_BYTES,
        mark: str = "",
    ) -> Iterator[memoryview]:
        """Yield an object's bytes [begin, end) as they come, fewer where it ends before.

        All are of one version: each request asks for the ETag that the first answer bore, or for `mark`, that
        of an earlier `stat`. StoreUnreachable is raised where the object was written again meanwhile.
        """
        position, retry, etag = begin, _Retry(self._patience_s), mark if _is_etag(mark) else ""
        while end is None or position < end:
            try:
                etag, stream = self._stream(key, position, end, piece_bytes, etag)
                for piece in stream:
                    position += len(piece)
                    retry.got_on()
                    yield piece
                return
            except BeyondEnd:  # it ends here, whoever thought that it went on
                return
            except StoreUnreachable as error:
                retry.pause_or_raise(error)

    def digest(self, key: str) -> str:
        """Return the xxh3-128 of an object, read back from its beginning to its end."""
        hasher = xxhash.xxh3_128()
        for piece in self.pieces(key):
            hasher.update(piece)
        return hasher.hexdigest()

    def place(self, key: str = "") -> str:
        """Return an object's URL, for messages."""
        return f"{self.url}/{key}" if key else self.url

    def _stream(
        self, key: str, begin: int, end: int | None, piece_bytes: int, etag: str
    ) -> tuple[str, Iterator[memoryview]]:
        """Return the ETag of an object and its bytes; etag: the one that it must have, "" for any."""
        import obstore

        options: GetOptions = {"if_match": etag} if etag else {}
        if end is not None:
            options["range"] = (begin, end)
        elif begin:
            options["range"] = {"offset": begin}
        with as_os_error(self.place(key)):
            response = obstore.get(self._receiving, key, options=options)
            stream = iter(response.stream(min_chunk_size=piece_bytes))
        given = str(response.meta["e_tag"] or "")
        if etag and given and given != etag:  # not every server looks at what was asked for
            raise written_again(self.place(key))
        return (given if _is_etag(given) else ""), self._received(key, stream)

    def _received(self, key: str, stream: Iterator[Any]) -> Iterator[memoryview]:  # Any: obstore's bytes
        while True:
            with as_os_error(self.place(key)):
                piece = next(stream, None)
            if piece is None:
                return
            yield memoryview(piece)

    def _written(self, key: str, write: Callable[[], Result]) -> Result:
        """Return what `write` returns once the object outlives a power cut.

        A store answers when it does; of a disk, the file is synced, and so are the names that lead to it.
        """

        def write_durably() -> Result:
            if self._disk is None:
                return write()
            _refuse_no_directory(self.url)  # a write would make it, where a disk was mounted above
            result = write()
            self._disk.keep(key)
            return result

        return self._patiently(key, write_durably)

    def _patiently(self, key: str, act: Callable[[], Result]) -> Result:
        retry = _Retry(self._patience_s)
        while True:
            try:
                with as_os_error(self.place(key)):
                    return act()
            except StoreUnreachable as error:
                retry.pause_or_raise(error)


class _Retry:
    """When to try again: with growing pauses, until nothing has come for `patience_s`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._deadline = 0.0
        self._failures = 0

    def got_on(self) -> None:
        """Something came."""
        self._failures = 0

    def pause_or_raise(self, error: StoreUnreachable) -> None:
        """Wait before another try; raise where there is to be none."""
        if isinstance(error, AccessDenied | PermanentStoreError):
            raise error
        if not self._failures:
            self._deadline = time.monotonic() + self._patience_s
        if time.monotonic() >= self._deadline:
            raise error
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._failures) * random.uniform(0.5, 1.0)
        self._failures += 1
        if self._failures == _LOGGED_AT:
            log.warning("%s; it is tried again for %.0f s", error, self._patience_s)
        time.sleep(max(0.0, min(pause_s, self._deadline - time.monotonic())))


def _opened(url: str, *, total_s: float, silence_s: float, retry: RetryConfig, create: bool) -> ObjectStore:
    """Open a store. retry: for single requests; `_Retry` tries again what ended in the middle, too."""
    from obstore.exceptions import BaseError
    from obstore.store import HTTPStore, LocalStore, from_url

    scheme = url.partition("://")[0]
    endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "timeout": timedelta(seconds=total_s),
        "read_timeout": timedelta(seconds=silence_s),
        "allow_http": scheme == "http" or endpoint.startswith("http://"),
    }
    try:
        if scheme == "file":
            if not names_a_directory(url):  # the path behind a machine's name is another one
                raise StorageError(f"{url} names no directory of this machine", remedy=WHOLE_PATH)
            if create:
                durable.make_directory(directory_of(url))
            else:
                _refuse_no_directory(url)
            return LocalStore.from_url(url, mkdir=create)
        refuse_network(f"reach {without_secrets(url)}", remedy="Copy it by way of a disk: file:///path.")
        if scheme in ("http", "https"):
            return HTTPStore.from_url(url, client_options=client, retry_config=retry)
        return from_url(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise StorageError(
            f"{without_secrets(url)} cannot be used: {short_text(reason)}",
            remedy="Is the URL right, and are the credentials in the environment?",
        ) from error


def directory_of(url: str) -> Path:
    """Return the directory of a file:// URL."""
    return Path(unquote(urlsplit(url).path))


def _refuse_no_directory(url: str) -> None:
    if not (path := directory_of(url)).is_dir():
        problem = "is no directory" if path.exists() else "does not exist"
        raise StorageError(f"{without_secrets(url)} {problem}", remedy="Check the path. Is its disk mounted?")


def _is_etag(mark: str) -> bool:
    """Whether a mark is an ETag that names these very bytes: a weak one (W/…) does not."""
    return mark.startswith('"')


def _delete_all(delete: Callable[..., None], store: ObjectStore, keys: list[str]) -> None:
    try:
        delete(store, keys)
    except FileNotFoundError:  # a file system says so of one, and leaves those after it
        for key in keys:
            with suppress(FileNotFoundError):
                delete(store, key)


def _stat(raw: Any) -> ObjectStat:  # Any: obstore's mapping
    return ObjectStat(bytes=raw["size"], mark=str(raw["e_tag"] or raw["last_modified"] or ""))
