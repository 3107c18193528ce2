"""Mounts remote pairs as local ones: downloads the index whole, and blocks of tokens when they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bloomery import durable
from bloomery.config.environment import refuse_network
from bloomery.data.block_cache import BlockCache, RemoteFileInfo, punch_hole
from bloomery.data.pair_files import bin_path, idx_path
from bloomery.data.remote_files import Remote
from bloomery.data.seal import BlockSums, Seal, SealedFile, parse_seal
from bloomery.data.storage import as_storage_error, locked_directory, write_whole
from bloomery.errors import DataError

MARKER = ".mirror.json"
_SUMS = ".block-sums"  # of the tokens' blocks, u64, beside the marker
_FORMAT = 2
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
        with as_storage_error(prefix.parent):
            prefix.parent.mkdir(parents=True, exist_ok=True)
        with locked_directory(prefix.parent, name="lock"):
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


def is_mirror(prefix: Path) -> bool:
    """Whether a prefix is that of a mounted pair, whose tokens lie elsewhere."""
    return _marker_path(prefix).exists()


def block_cache_of(prefix: Path) -> BlockCache | None:
    """Return the block cache behind the `.bin` of a mounted prefix; None for a local pair."""
    if not is_mirror(prefix):
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

    outline = RemoteFileInfo(
        address=address,
        size_bytes=facts["bytes"],
        block_bytes=marker["block_bytes"],
        sums=_block_sums(prefix, facts),
    )
    return BlockCache(bin_path(prefix), outline, capacity=marker["capacity"], fetch=fetch)


def _block_sums(prefix: Path, facts: Mapping[str, Any]) -> BlockSums:
    """The sums of the tokens' blocks, mapped; a marker of format 1 holds them itself, as text."""
    if "xxh3_64" in facts:
        return np.array([int(block_sum, 16) for block_sum in facts["xxh3_64"]], dtype=np.uint64)
    if not facts["bytes"]:
        return np.empty(0, dtype=np.uint64)
    path = prefix.with_name(prefix.name + _SUMS)
    try:
        return np.memmap(path, dtype="<u8", mode="r")
    except (OSError, ValueError) as wrong:
        raise DataError(
            f"{path} cannot be read ({wrong}).", remedy="Remove its directory: it comes again."
        ) from wrong


def _bring_index(prefix: Path, address: str) -> None:
    """Bring the seal, the tokens' block sums and the whole index of a pair, checked, and an empty `.bin`."""
    remote, name = Remote(_parent(address)), _name(address)
    seal = _seal(remote, name, address)
    for ending, sealed in seal.files.items():
        size = remote.size(f"{name}{ending}")
        if size != sealed.bytes:
            raise _other_than_sealed(f"{address}{ending} has {size:,} bytes; {sealed.bytes:,} were sealed.")
    index = idx_path(prefix)
    draft = index.with_name(f".{index.name}.draft")
    with as_storage_error(prefix):
        durable.remove_drafts(prefix.parent)
        _bring_checked(remote, f"{name}.idx", seal, draft)
    tokens = seal.files[".bin"]
    with as_storage_error(prefix):
        for leftover in prefix.parent.iterdir():
            if leftover.name.startswith(f"{prefix.name}."):
                leftover.unlink()
        mirrored = bin_path(prefix)
        with mirrored.open("wb") as file:
            file.truncate(tokens.bytes)
            punch_hole(file.fileno(), 0, 1 << 16, path=mirrored)
    write_whole(prefix.with_name(prefix.name + _SUMS), tokens.block_sums.astype("<u8").tobytes())
    with as_storage_error(index):
        durable.replace(draft, index)
    marker = {
        "format": _FORMAT,
        "block_bytes": seal.block_bytes,
        "files": {ending: {"bytes": file.bytes} for ending, file in seal.files.items()},
        "address": address,
        "host": os.uname().nodename,
    }
    write_whole(_marker_path(prefix), json.dumps(marker).encode())


def _bring_checked(remote: Remote, path: str, seal: Seal, draft: Path) -> None:
    """Bring an index into a new file, each block compared with its sum: one of 10 GB is never held."""
    sealed, place = seal.files[".idx"], 0
    most = max(1, _FETCH_BYTES // seal.block_bytes) * seal.block_bytes
    with durable.open_new(draft) as file:
        while place < sealed.bytes:
            content = _read_all(remote, path, start=place, size=min(most, sealed.bytes - place))
            sums = [
                xxhash.xxh3_64_intdigest(content[start : start + seal.block_bytes])
                for start in range(0, len(content), seal.block_bytes)
            ]
            first = place // seal.block_bytes
            if sums != sealed.block_sums[first : first + len(sums)].tolist():
                raise _other_than_sealed(f"{remote.url}/{path} is not what its seal says.")
            file.write(content)
            place += len(content)


def _other_than_sealed(message: str) -> DataError:
    return DataError(
        message,
        remedy="It was written anew or is damaged there: seal what is there now, or bring the old back.",
    )


def _seal(remote: Remote, name: str, address: str) -> Seal:
    """The seal of a pair elsewhere, with the sums of its blocks."""
    try:
        content = _read_all(remote, f"{name}.seal.json", start=0, size=remote.size(f"{name}.seal.json"))
    except DataError as missing:
        raise DataError(
            f"{missing.message.rstrip('.')}: a pair is streamed by its seal, with sizes and checksums.",
            remedy=f"Put {name}.seal.json beside it: `bloomery data tokenize` and `data merge` write one. "
            f"{missing.remedy}",
        ) from missing
    try:
        parsed = parse_seal(content)
    except ValueError as wrong:
        raise DataError(
            f"{address}.seal.json is not a seal ({wrong}).",
            remedy="Write it again: `data merge` of the one pair does.",
        ) from wrong
    if isinstance(parsed, Seal):
        return parsed
    files = {}
    for ending, size in parsed.sizes.items():
        section = parsed.sections[ending, "blocks"]
        sums = _read_all(remote, f"{name}.seal.sums", start=section.offset, size=section.size)
        if xxhash.xxh3_64_intdigest(sums) != section.xxh3_64:
            raise DataError(
                f"{address}.seal.sums is not what {name}.seal.json says.",
                remedy="Bring back there what was sealed, or seal the pair again: `data merge` of it does.",
            )
        files[ending] = SealedFile(bytes=size, block_sums=np.frombuffer(sums, dtype="<u8"), page_sums=None)
    return Seal(facts=parsed.facts, block_bytes=parsed.block_bytes, files=files)


def _read_all(remote: Remote, path: str, *, start: int, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        length = min(_FETCH_BYTES, size - len(content))
        piece = remote.read(path, start=start + len(content), length=length)
        if not piece:
            raise _other_than_sealed(f"{remote.url}/{path} ends at byte {start + len(content):,}.")
        content += piece
    return bytes(content)


def _is_mounted(prefix: Path, address: str) -> bool:
    try:
        marker = _marker(prefix)
        size = int(marker["files"][".idx"]["bytes"])
        return bool(marker["address"] == address) and idx_path(prefix).stat().st_size == size
    except (DataError, OSError):
        return False


def _marker(prefix: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(_marker_path(prefix).read_bytes())
        if content["format"] not in (1, _FORMAT):
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
