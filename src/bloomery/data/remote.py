"""Corpora elsewhere: what lies under an address, and bytes of it, tried again while that may help."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from bloomery.config.offline import refuse_network
from bloomery.errors import DataError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

SUMS = "SHA256SUMS"
_KNOWN = "s3://, gs://, http://, https://, file:// or a directory"
_TRIES, _WAIT_S, _LONGEST_WAIT_S, _TIMEOUT_S = 6, 0.5, 20.0, 60
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file under an address. sha256: where a list gives its checksum, else ''; version: its ETag, or ''."""

    path: str
    size_bytes: int
    sha256: str
    version: str


class Remote:
    """An address that holds files. Opening it uses no network; a forbidden network is refused here."""

    def __init__(self, url: str) -> None:
        self.url = url
        if "://" not in url:
            url = Path(url).expanduser().absolute().as_uri()
        told = urlsplit(url)
        if told.username or told.password or told.query:
            raise DataError(
                f"The address of {told.hostname} holds credentials, and it would be printed and kept.",
                remedy="Put them into the environment (AWS_ACCESS_KEY_ID, …) and give the address alone.",
            )
        if not url.startswith("file://"):
            refuse_network(
                f"read {self.url}", remedy="Fetch it where there is a network, and bring the files here."
            )
        self._root = url.removesuffix("/" + SUMS).rstrip("/")
        self._has_no_listing = url.startswith(("http://", "https://"))
        self._store = self._opened(self._root)

    def files(self) -> list[RemoteFile]:
        """Every file under the address, sorted; over http(s) those that its SHA256SUMS lists."""
        sums = self._sums()
        if self._has_no_listing:
            if not sums:
                raise DataError(
                    f"{self._root} has no {SUMS}, and over http(s) nothing else lists its files.",
                    remedy=f"Make one there: find . -type f | xargs sha256sum > {SUMS}",
                )
            return [self._described(path, digest) for path, digest in sorted(sums.items())]
        with self._named(self._root):
            found = again(self._listed)
        return sorted(
            (
                RemoteFile(path=path, size_bytes=size, sha256=sums.get(path, ""), version=version)
                for path, size, version in found
                if path != SUMS
            ),
            key=lambda file: file.path,
        )

    def read(self, path: str, *, start: int, length: int) -> bytes:
        """Bytes of a file. Raises DataError when they are not to be had after several tries."""
        import obstore

        with self._named(f"{self._root}/{path}"):
            return again(lambda: bytes(obstore.get_range(self._store, path, start=start, length=length)))

    def _listed(self) -> list[tuple[str, int, str]]:
        import obstore

        return [
            (entry["path"], entry["size"], entry["e_tag"] or "")
            for entries in obstore.list(self._store)
            for entry in entries
        ]

    def _described(self, path: str, digest: str) -> RemoteFile:
        import obstore

        with self._named(f"{self._root}/{path}"):
            head = again(lambda: obstore.head(self._store, path))
        return RemoteFile(path=path, size_bytes=head["size"], sha256=digest, version=head["e_tag"] or "")

    def _sums(self) -> dict[str, str]:
        """Checksums by path, as `sha256sum` writes them; none where there is no list."""
        import obstore

        with self._named(f"{self._root}/{SUMS}"):
            try:
                content = again(lambda: bytes(obstore.get(self._store, SUMS).bytes()))
            except FileNotFoundError:
                return {}
        found = {}
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            digest, _, path = line.partition(" ")
            path = path.lstrip(" *").removeprefix("./")
            if len(digest) != 64 or not path or ".." in Path(path).parts or path.startswith("/"):
                raise DataError(
                    f"{self._root}/{SUMS}:{number} is not a checksum and a path below: {line[:80]!r}.",
                    remedy="Write it with `sha256sum`, in the directory that it lists.",
                )
            found[path] = digest.lower()
        return found

    def _opened(self, root: str) -> ObjectStore:
        import obstore.exceptions
        from obstore.store import HTTPStore, LocalStore, from_url

        client: ClientConfig = {
            "timeout": timedelta(seconds=_TIMEOUT_S),
            "connect_timeout": timedelta(seconds=_TIMEOUT_S / 3),
        }
        retry: RetryConfig = {"max_retries": 1}  # `again` tries again, what ended in the middle too
        try:
            if root.startswith("file://"):
                return LocalStore.from_url(root)
            if root.startswith("http://") or os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
                client["allow_http"] = True
            if self._has_no_listing:
                return HTTPStore.from_url(root, client_options=client, retry_config=retry)
            return from_url(root, client_options=client, retry_config=retry)
        except (obstore.exceptions.BaseError, ValueError) as wrong:
            raise DataError(
                f"Cannot open {self.url}: {_first_line(wrong)}.", remedy=f"Give an address with {_KNOWN}."
            ) from wrong

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        import obstore.exceptions

        try:
            yield
        except (obstore.exceptions.BaseError, OSError) as refused:
            raise DataError(
                f"Cannot read {what}: {_first_line(refused)}.",
                remedy="Check the address, the credentials in the environment, and that the server gives "
                "ranges. What was fetched is kept: the same command goes on.",
            ) from refused


def again(attempt: Callable[[], Result]) -> Result:
    """What `attempt` returns, tried a few times with growing pauses while its failure may be passing."""
    from obstore import exceptions

    final = (
        FileNotFoundError,
        exceptions.NotFoundError,
        exceptions.NotSupportedError,
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
        exceptions.InvalidPathError,
    )
    for number in range(_TRIES):
        try:
            return attempt()
        except final:
            raise
        except (exceptions.BaseError, OSError):
            if number == _TRIES - 1:
                raise
            pause_s = min(_LONGEST_WAIT_S, _WAIT_S * 2**number)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
