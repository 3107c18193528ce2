"""`PREFIX.seal.json`: sizes and checksums of a pair, by the block, so that damage can be found and placed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from bloomery.data.indexed import bin_path, idx_path
from bloomery.data.storage import refusals_named, settle_directory, write_whole

_BLOCK_BYTES = 256 << 10  # what one read of a pair elsewhere brings
_FORMAT = 1


def seal_path(prefix: Path) -> Path:
    """The file that holds a pair's checksums."""
    return prefix.with_name(prefix.name + ".seal.json")


def seal(
    prefix: Path,
    *,
    vocabulary_size: int | None,
    end_of_document_id: int | None,
    block_bytes: int = _BLOCK_BYTES,
) -> None:
    """Write down what a pair is now. None: not known."""
    with refusals_named(prefix):
        files = {
            path.suffix: _sums(path, block_bytes=block_bytes) for path in (bin_path(prefix), idx_path(prefix))
        }
    content = {
        "format": _FORMAT,
        "vocabulary_size": vocabulary_size,
        "end_of_document_id": end_of_document_id,
        "block_bytes": block_bytes,
        "files": files,
    }
    write_whole(seal_path(prefix), json.dumps(content).encode())


PARTS = {".bin": bin_path, ".idx": idx_path, ".seal.json": seal_path}
"""Where each file of a sealed pair lies."""


def replace_pair(staged: Path, target: Path) -> None:
    """Put a sealed pair in the place of another, of the same file system. Broken off, it can be done again.

    The seal that goes with each token is never another's, and an index is never put over other tokens: on
    the way there is a moment without an index, which is told as a missing pair.
    """
    with refusals_named(bin_path(target)):
        if bin_path(staged).exists():
            seal_path(target).unlink(missing_ok=True)
            idx_path(target).unlink(missing_ok=True)
        for path in PARTS.values():  # tokens first: an index says that they are there
            if path(staged).exists():
                path(staged).replace(path(target))
        settle_directory(target.parent)


def sealed(prefix: Path) -> dict[str, Any] | None:
    """What `seal` wrote about a pair, or None where there is nothing of the kind."""
    try:
        content = json.loads(seal_path(prefix).read_bytes())
        return content if content["format"] == _FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def differences(prefix: Path, content: dict[str, Any]) -> list[str]:
    """Where a pair differs from its seal, a sentence each; empty when it does not."""
    found = []
    for path in (bin_path(prefix), idx_path(prefix)):
        expected = content["files"][path.suffix]
        now = _sums(path, block_bytes=content["block_bytes"])
        if now["bytes"] != expected["bytes"]:
            found.append(f"{path} has {now['bytes']:,} bytes; {expected['bytes']:,} were written.")
        for number, (one, other) in enumerate(zip(now["xxh3_64"], expected["xxh3_64"], strict=False)):
            if one != other and now["bytes"] >= min(expected["bytes"], (number + 1) * content["block_bytes"]):
                first = number * content["block_bytes"]
                last = min(first + content["block_bytes"], expected["bytes"]) - 1
                found.append(f"{path} is not what was written, somewhere in bytes {first:,} to {last:,}.")
    return found


def _sums(path: Path, *, block_bytes: int) -> dict[str, Any]:
    sums = []
    size = 0
    with path.open("rb") as stream:
        while block := stream.read(block_bytes):
            sums.append(xxhash.xxh3_64_hexdigest(block))
            size += len(block)
    return {"bytes": size, "xxh3_64": sums}
