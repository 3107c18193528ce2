"""Mounts remote pairs as local ones: downloads the index whole, and blocks of tokens when they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bloomery import durable
from bloomery.config.offline import refuse_network
from bloomery.data.block_cache import Mirror, Outline, punch
from bloomery.data.remote_files import Remote
from bloomery.data.storage import alone_in, refusals_named, write_whole
from bloomery.errors import DataError

MARKER = ".mirror.json"
_FORMAT = 1
_LEAST_BLOCKS = 16
_FETCH_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class CacheLocation:
    """The directory of cached blocks, and the most bytes that they may take together."""

    directory: Path
    limit_bytes: int


def is_elsewhere(path: str) -> bool:
    """Whether a dataset's path is a remote address."""
    return "://" in path


def mount(addresses: Sequence[str], cache: CacheLocation) -> dict[str, Path]:
    """Return the prefix under which the pair at each address can be opened.

    It downloads the indices and seals that are missing, and divides the cache by the pairs' sizes. Without a
    network, pairs that were mounted before are mounted again. Raises DataError for what cannot be downloaded.
    """
    prefixes = {address: _prefix(address, cache) for address in addresses}
    for address, prefix in prefixes.items():
        with refusals_named(prefix.parent):
            prefix.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(prefix.parent, name="lock"):
            if not _is_mounted(prefix, address):
                _bring_index(prefix, address)
    markers = {address: _marker(prefix) for address, prefix in prefixes.items()}
    whole = sum(marker["files"][".bin"]["bytes"] for marker in markers.values())
    for address, prefix in prefixes.items():
        size = markers[address]["files"][".bin"]["bytes"]
        part = min(size, cache.limit_bytes * size // max(whole, 1))
        capacity = max(_LEAST_BLOCKS, part // markers[address]["block_bytes"])
        if capacity != markers[address].get("capacity"):
            write_whole(_marker_path(prefix), json.dumps({**markers[address], "capacity": capacity}).encode())
    return prefixes


def mirror_of(prefix: Path, bin_path: Path) -> Mirror | None:
    """Return the block cache behind the `.bin` of a mounted prefix; None for a local pair."""
    if not _marker_path(prefix).exists():
        return None
    marker = _marker(prefix)
    facts, address = marker["files"][".bin"], marker["address"] + ".bin"
    remote: list[Remote] = []

    def fetch(start: int, length: int) -> bytes:
        if not address.startswith("file://"):
            refuse_network(
                f"read bytes {start:,} to {start + length - 1:,} of {address}, which {prefix.parent} lacks",
                remedy="Bring all of it here first: `bloomery data fetch`.",
            )
        if not remote:
            remote.append(Remote(_parent(marker["address"])))
        return remote[0].read(_name(marker["address"]) + ".bin", start=start, length=length)

    outline = Outline(
        address=address,
        size_bytes=facts["bytes"],
        block_bytes=marker["block_bytes"],
        sums=facts["xxh3_64"],
    )
    return Mirror(bin_path, outline, capacity=marker["capacity"], fetch=fetch)


def _bring_index(prefix: Path, address: str) -> None:
    """Download and check the seal and the whole index of a pair, and make an empty file in place of its
    tokens.
    """
    remote, name = Remote(_parent(address)), _name(address)
    seal = _seal(remote, name, address)
    content = bytearray()
    facts = seal["files"][".idx"]
    while len(content) < facts["bytes"]:
        length = min(_FETCH_BYTES, facts["bytes"] - len(content))
        content += remote.read(f"{name}.idx", start=len(content), length=length)
    size = seal["block_bytes"]
    sums = [
        xxhash.xxh3_64_hexdigest(bytes(content[start : start + size]))
        for start in range(0, len(content), size)
    ]
    if sums != facts["xxh3_64"]:
        raise DataError(
            f"{address}.idx is not what its seal says.",
            remedy="It was written anew or is damaged there: seal what is there now, or bring the old back.",
        )
    with refusals_named(prefix):
        for leftover in prefix.parent.iterdir():
            if leftover.name.startswith(f"{prefix.name}."):
                leftover.unlink()
        durable.remove_drafts(prefix.parent)
        tokens = prefix.with_name(prefix.name + ".bin")
        with tokens.open("wb") as file:
            file.truncate(seal["files"][".bin"]["bytes"])
            punch(file.fileno(), 0, 1 << 16, path=tokens)
    write_whole(prefix.with_name(prefix.name + ".idx"), bytes(content))
    marker = {**seal, "format": _FORMAT, "address": address, "host": os.uname().nodename}
    write_whole(_marker_path(prefix), json.dumps(marker).encode())


def _seal(remote: Remote, name: str, address: str) -> Mapping[str, Any]:
    try:
        size = remote.size(f"{name}.seal.json")
        content = b""
        while len(content) < size:
            length = min(_FETCH_BYTES, size - len(content))
            content += remote.read(f"{name}.seal.json", start=len(content), length=length)
    except DataError as missing:
        raise DataError(
            f"{missing.message.rstrip('.')}: a pair is streamed by its seal, with sizes and checksums.",
            remedy=f"Put {name}.seal.json beside it: `bloomery data tokenize` and `data merge` write one. "
            f"{missing.remedy}",
        ) from missing
    try:
        seal: dict[str, Any] = json.loads(content)
        wanted = {".bin", ".idx"} <= set(seal["files"]) and seal["block_bytes"] > 0
    except (ValueError, KeyError, TypeError):
        wanted = False
    if not wanted:
        raise DataError(
            f"{address}.seal.json is not a seal.", remedy="Write it again: `data merge` of the one pair does."
        )
    return seal


def _is_mounted(prefix: Path, address: str) -> bool:
    try:
        marker = _marker(prefix)
        index = prefix.with_name(prefix.name + ".idx")
        size = int(marker["files"][".idx"]["bytes"])
        return bool(marker["address"] == address) and index.stat().st_size == size
    except (DataError, OSError):
        return False


def _marker(prefix: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(_marker_path(prefix).read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}")
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise DataError(
            f"{_marker_path(prefix)} cannot be read ({wrong}).",
            remedy="Remove its directory: it comes again.",
        ) from wrong
    return content


def _marker_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + MARKER)


def _prefix(address: str, cache: CacheLocation) -> Path:
    key = xxhash.xxh3_64_hexdigest(address.encode())
    return cache.directory / f"{_name(address)}-{key[:8]}" / _name(address)


def _parent(address: str) -> str:
    return address.rstrip("/").rpartition("/")[0]


def _name(address: str) -> str:
    return address.rstrip("/").rpartition("/")[2]
