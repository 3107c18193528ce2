"""Lists and reads files of remote datasets, with retries, and computes which files belong to one share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np

from bloomery.config.environment import refuse_network
from bloomery.config.find import from_home
from bloomery.data.order import derive_key, permute
from bloomery.errors import DataError, StorageError
from bloomery.objects import PATIENCE_S, Objects

SUMS = "SHA256SUMS"
_SCHEMES = ("s3", "gs", "az", "http", "https", "file")
_KNOWN = f"{', '.join(f'{scheme}://' for scheme in _SCHEMES)} or a directory"
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


class FileSource(Protocol):
    """An address whose files can be listed, and read in pieces.

    url: the address, without credentials.
    """

    url: str

    def files(self) -> list[RemoteFile]:
        """Return every file, sorted. Raises DataError."""
        ...

    def read(self, path: str, *, start: int, length: int) -> bytes:
        """Return at most `length` bytes of a file. Raises DataError if retries do not get them."""
        ...


class Remote:
    """A remote address that holds files. Opening it uses no network; it is refused if the network is
    forbidden.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        if "://" not in url:
            url = from_home(url).absolute().as_uri()
        try:
            parts = urlsplit(url)
        except ValueError as wrong:  # a bracket, which is for addresses of IPv6
            raise DataError(
                f"Cannot open {self.url}: {wrong}.", remedy=f"Give an address with {_KNOWN}."
            ) from wrong
        if parts.username or parts.password or parts.query:
            raise DataError(
                f"The address of {parts.hostname} holds credentials, and it would be printed and kept.",
                remedy="Put them into the environment (AWS_ACCESS_KEY_ID, …) and give only the address.",
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
            if path != SUMS:  # a list that was made again in its place has the sum of an unfinished one
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


_TOGETHER = (".seal.json", ".seal.sums", ".bin", ".idx")


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """Which files of the datasets one peer wants.

    shares: number of shares that the datasets are divided into.
    share: index of the wanted share.
    ratios: part of the bytes that each dataset shall give; without any, each gives all.
    include, exclude: patterns of file names.
    limit: largest number of shards; None for no limit.
    """

    shares: int = 1
    share: int = 0
    seed: int = 0
    ratios: Mapping[str, float]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Files that are never divided between shares: a .bin/.idx pair, or one other file."""

    dataset: str
    name: str
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        """The size of its files in bytes."""
        return sum(file.size_bytes for file in self.files)


def plan_share(datasets: Mapping[str, Sequence[RemoteFile]], wanted: FetchRequest) -> list[Shard]:
    """Return the shards of one share, dataset by dataset, each in its order.

    At each position a share holds the permuted shard `position · shares + share` of its dataset. So the
    shares of all peers are disjoint, and together they are everything. With ratios, each dataset gives its
    first shards, as many as its part of the bytes takes; the scarcest dataset gives all.
    """
    _check(datasets, wanted)
    taken = {
        name: _share_of(_shards(name, files, wanted), wanted, number)
        for number, (name, files) in enumerate(sorted(datasets.items()))
    }
    for name, shards in taken.items():
        if not shards:
            raise DataError(
                f"Share {wanted.share} of {wanted.shares} of the dataset {name!r} holds no file"
                f"{' that the filters leave' if wanted.include or wanted.exclude else ''}.",
                remedy="Ask for fewer shares, or let more names through.",
            )
    if wanted.ratios:
        taken = _in_ratio(taken, wanted.ratios)
    return [shard for shards in taken.values() for shard in shards[: wanted.limit]]


def shard_numbers(*, share: int, shares: int, count: int, seed: int, dataset: int) -> list[int]:
    """Return which of a dataset's `count` sorted shards a share holds, position by position."""
    places = np.arange(share, count, shares, dtype=np.int64)
    if not count or not places.size:
        return []
    numbers: list[int] = permute(places, count, derive_key(seed, dataset)).tolist()
    return numbers


def _check(datasets: Mapping[str, Sequence[RemoteFile]], wanted: FetchRequest) -> None:
    if not 0 <= wanted.share < wanted.shares:
        raise DataError(
            f"There is no share {wanted.share} of {wanted.shares}.",
            remedy=f"Shares are numbered from 0 to {wanted.shares - 1}.",
        )
    if not wanted.ratios:
        return
    odd = sorted(set(wanted.ratios) ^ set(datasets))
    if odd:
        raise DataError(
            f"Ratios and datasets differ: {', '.join(odd)}.", remedy="Give each dataset a ratio, or none."
        )
    if any(not ratio > 0 for ratio in wanted.ratios.values()):
        raise DataError(
            f"The ratios {dict(wanted.ratios)} are not all above 0.", remedy="Leave out what is not wanted."
        )


def _shards(dataset: str, files: Sequence[RemoteFile], wanted: FetchRequest) -> list[Shard]:
    """Return the shards that the filters leave, sorted by name."""
    pairs = {file.path.removesuffix(".idx") for file in files if file.path.endswith(".idx")}
    grouped: dict[str, list[RemoteFile]] = {}
    for file in files:
        stem = next((file.path.removesuffix(end) for end in _TOGETHER if file.path.endswith(end)), file.path)
        grouped.setdefault(stem if stem in pairs else file.path, []).append(file)
    shards = [Shard(dataset=dataset, name=name, files=tuple(grouped[name])) for name in sorted(grouped)]
    return [shard for shard in shards if _is_wanted(shard, wanted)]


def _is_wanted(shard: Shard, wanted: FetchRequest) -> bool:
    names = [shard.name, *(file.path for file in shard.files)]

    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch(name, pattern) for name in names for pattern in patterns)

    return (not wanted.include or matches(wanted.include)) and not matches(wanted.exclude)


def _share_of(shards: Sequence[Shard], wanted: FetchRequest, dataset: int) -> list[Shard]:
    numbers = shard_numbers(
        share=wanted.share, shares=wanted.shares, count=len(shards), seed=wanted.seed, dataset=dataset
    )
    return [shards[number] for number in numbers]


def _in_ratio(taken: Mapping[str, list[Shard]], ratios: Mapping[str, float]) -> dict[str, list[Shard]]:
    sizes = {name: sum(shard.size_bytes for shard in shards) for name, shards in taken.items()}
    whole = min(sizes[name] / ratios[name] for name in taken)
    kept_shards: dict[str, list[Shard]] = {}
    for name, shards in taken.items():
        taken_bytes, wanted_bytes = 0, whole * ratios[name]
        kept_shards[name] = []
        for shard in shards:
            if taken_bytes >= wanted_bytes:
                break
            kept_shards[name].append(shard)
            taken_bytes += shard.size_bytes
    return kept_shards
