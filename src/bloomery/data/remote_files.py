"""Lists and reads the files of a remote corpus, with retries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bloomery.config.environment import refuse_network
from bloomery.errors import DataError, StorageError
from bloomery.objects import PATIENCE_S, Objects

SUMS = "SHA256SUMS"
_KNOWN = "s3://, gs://, http://, https://, file:// or a directory"
_SCHEMES = ("s3", "gs", "az", "http", "https", "file")
_PATIENCE_S = PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file under a remote address.

    sha256: its checksum if a list gives it, else ''.
    version: its ETag, or ''.
    """

    path: str
    size_bytes: int
    sha256: str
    version: str


class Remote:
    """A remote address that holds files. Opening it uses no network; it is refused if the network is
    forbidden.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        if "://" not in url:
            url = Path(url).expanduser().absolute().as_uri()
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query:
            raise DataError(
                f"The address of {parts.hostname} holds credentials, and it would be printed and kept.",
                remedy="Put them into the environment (AWS_ACCESS_KEY_ID, …) and give the address alone.",
            )
        if not url.startswith("file://"):
            refuse_network(
                f"read {self.url}", remedy="Fetch it where there is a network, and bring the files here."
            )
        self._root = url.removesuffix("/" + SUMS).rstrip("/")
        self._has_no_listing = url.startswith(("http://", "https://"))
        self._objects = self._opened(self._root)

    def files(self) -> list[RemoteFile]:
        """Return every file under the address, sorted; over http(s), those that its SHA256SUMS lists."""
        sums = self._sums()
        if self._has_no_listing:
            if not sums:
                raise DataError(
                    f"{self._root} has no {SUMS}, and over http(s) nothing else lists its files.",
                    remedy=f"Make one there: find . -type f | xargs sha256sum > {SUMS}",
                )
            return [self._described(path, digest) for path, digest in sorted(sums.items())]
        with self._named(self._root):
            listed = self._objects.entries()
        return [
            RemoteFile(
                path=entry.key,
                size_bytes=entry.stat.bytes,
                sha256=sums.get(entry.key, ""),
                version=entry.stat.mark,
            )
            for entry in listed
            if entry.key != SUMS
        ]

    def read(self, path: str, *, start: int, length: int) -> bytes:
        """Return bytes of a file. Raises DataError if retries do not get them."""
        with self._named(f"{self._root}/{path}"):
            return self._objects.content(path, begin=start, end=start + length)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raises DataError if there is none."""
        return self._described(path, "").size_bytes

    def _described(self, path: str, digest: str) -> RemoteFile:
        with self._named(f"{self._root}/{path}"):
            stat = self._objects.stat(path)
        return RemoteFile(path=path, size_bytes=stat.bytes, sha256=digest, version=stat.mark)

    def _sums(self) -> dict[str, str]:
        """Return checksums by path, from a list as `sha256sum` writes it; without a list there are none."""
        with self._named(f"{self._root}/{SUMS}"):
            try:
                content = self._objects.content(SUMS)
            except FileNotFoundError:
                return {}
        sums = {}
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            digest, _, path = line.partition(" ")
            path = path.lstrip(" *").removeprefix("./")
            if len(digest) != 64 or not path or ".." in Path(path).parts or path.startswith("/"):
                raise DataError(
                    f"{self._root}/{SUMS}:{number} is not a checksum and a path below: {line[:80]!r}.",
                    remedy="Write it with `sha256sum`, in the directory that it lists.",
                )
            sums[path] = digest.lower()
        return sums

    def _opened(self, root: str) -> Objects:
        if root.partition("://")[0] not in _SCHEMES:
            raise DataError(
                f"Cannot open {self.url}: no such kind of address.", remedy=f"Give an address with {_KNOWN}."
            )
        try:
            return Objects(root, patience_s=_PATIENCE_S, create=False)
        except StorageError as wrong:
            raise DataError(
                f"Cannot open {self.url}: {wrong.message}.", remedy=f"Give an address with {_KNOWN}."
            ) from wrong

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as refused:
            raise DataError(
                f"Cannot read {what}: {refused.strerror or refused}.",
                remedy="Check the address, the credentials in the environment, and that the server gives "
                "ranges. What was fetched is kept: the same command goes on.",
            ) from refused
