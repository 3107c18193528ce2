"""Seals, verifies and merges pairs of indexed files.

The seal, `PREFIX.seal.json`, holds the sizes of a pair and the checksums of its blocks, so that verification
can say where a pair is damaged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bloomery import durable
from bloomery.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from bloomery.data.progress import ProgressCallback, silent
from bloomery.data.storage import refusals_named, write_whole
from bloomery.errors import DataError

_BLOCK_BYTES = 256 << 10  # one read of a remote pair fetches this much
_CHECKED_AT_START_BYTES = 1 << 30  # takes 0.1 to 0.3 s
_FORMAT = 1


def seal_path(prefix: Path) -> Path:
    """Return the file that holds a pair's checksums."""
    return prefix.with_name(prefix.name + ".seal.json")


def seal(
    prefix: Path,
    *,
    vocabulary_size: int | None,
    end_of_document_id: int | None,
    engine: str | None = None,
    block_bytes: int = _BLOCK_BYTES,
) -> None:
    """Write down the sizes and checksums that a pair has now.

    vocabulary_size, end_of_document_id: of the tokenizer that made the ids; None if not known.
    engine: name of the engine that turned the text into ids; None if not known.
    """
    with refusals_named(prefix):
        files = {
            path.suffix: _sums(path, block_bytes=block_bytes) for path in (bin_path(prefix), idx_path(prefix))
        }
    content = {
        "format": _FORMAT,
        "vocabulary_size": vocabulary_size,
        "end_of_document_id": end_of_document_id,
        "engine": engine,
        "block_bytes": block_bytes,
        "files": files,
    }
    write_whole(seal_path(prefix), json.dumps(content).encode())


PARTS = {".bin": bin_path, ".idx": idx_path, ".seal.json": seal_path}
"""Where each file of a sealed pair lies."""


def replace_pair(staged: Path, target: Path) -> None:
    """Replace a sealed pair by another on the same file system. After an interruption the call can be
    repeated.

    At every moment the seal and the tokens belong together, and an index never lies on other tokens. On the
    way there is a moment without an index, which readers report as a missing pair.
    """
    with refusals_named(bin_path(target)):
        if bin_path(staged).exists():
            seal_path(target).unlink(missing_ok=True)
            idx_path(target).unlink(missing_ok=True)
            durable.sync_directory(target.parent)
        for path in PARTS.values():  # tokens first, because an index says that they are there
            if path(staged).exists():
                durable.replace(path(staged), path(target))


def sealed(prefix: Path) -> dict[str, Any] | None:
    """Return what `seal` wrote about a pair, or None if there is no valid seal."""
    try:
        content = json.loads(seal_path(prefix).read_bytes())
        return content if content["format"] == _FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_damaged(prefixes: Iterable[Path]) -> None:
    """Raise DataError if a pair differs from its seal: all sizes are compared, and the bytes of the first
    GiB.

    A start calls this for the pairs that it will read. `bloomery data verify` checks larger pairs whole. A
    pair without a seal passes.
    """
    left = _CHECKED_AT_START_BYTES
    for prefix in prefixes:
        left -= _refuse_damaged(prefix, at_most=left)


def _refuse_damaged(prefix: Path, *, at_most: int) -> int:
    """Check one pair, reading at most `at_most` bytes, and return how many bytes were read."""
    content = sealed(prefix)
    if content is None:
        if seal_path(prefix).exists():
            raise DataError(
                f"{seal_path(prefix)} is damaged: it no longer says what was written.",
                remedy="Copy the pair and its seal again from where they are whole, or tokenise again.",
            )
        return 0
    paths = (bin_path(prefix), idx_path(prefix))
    damage = [
        f"{path} has {path.stat().st_size:,} bytes; {content['files'][path.suffix]['bytes']:,} were written."
        for path in paths
        if path.stat().st_size != content["files"][path.suffix]["bytes"]
    ]
    size = sum(path.stat().st_size for path in paths)
    is_read = not damage and size <= at_most
    if is_read:
        damage = differences(prefix, content)
    if damage:
        raise DataError(
            damage[0],
            remedy="Copy the pair again from where it is whole, or remove it and tokenise again; "
            "`bloomery data verify` names all that differs.",
        )
    return size if is_read else 0


def differences(prefix: Path, content: dict[str, Any]) -> list[str]:
    """Return a sentence for each way in which a pair differs from its seal."""
    findings = []
    for path in (bin_path(prefix), idx_path(prefix)):
        expected = content["files"][path.suffix]
        now = _sums(path, block_bytes=content["block_bytes"])
        if now["bytes"] != expected["bytes"]:
            findings.append(f"{path} has {now['bytes']:,} bytes; {expected['bytes']:,} were written.")
        for number, (actual, sealed) in enumerate(zip(now["xxh3_64"], expected["xxh3_64"], strict=False)):
            if actual != sealed and now["bytes"] >= min(
                expected["bytes"], (number + 1) * content["block_bytes"]
            ):
                first = number * content["block_bytes"]
                last = min(first + content["block_bytes"], expected["bytes"]) - 1
                findings.append(f"{path} is not what was written, somewhere in bytes {first:,} to {last:,}.")
    return findings


def _sums(path: Path, *, block_bytes: int) -> dict[str, Any]:
    sums = []
    size = 0
    with path.open("rb") as stream:
        while block := stream.read(block_bytes):
            sums.append(xxhash.xxh3_64_hexdigest(block))
            size += len(block)
    return {"bytes": size, "xxh3_64": sums}


_CHUNK_TOKENS = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a verification found.

    findings: a sentence for each thing that is wrong.
    skipped: a sentence for each check that was left out, and why.
    """

    documents: int
    tokens: int
    vocabulary_size: int | None
    findings: tuple[str, ...]
    skipped: tuple[str, ...]


def verify_pair(
    prefix: Path, *, vocabulary_size: int | None = None, progress: ProgressCallback = silent
) -> Verified:
    """Read all of a pair and compare it with its seal and its vocabulary.

    vocabulary_size: number of valid token ids; None takes it from the seal.
    Raises DataError if the pair cannot be read at all.
    """
    dataset = IndexedDataset(prefix)
    dataset.refuse_elsewhere()
    content = sealed(prefix)
    findings = [*_index_findings(dataset)]
    skipped = []
    if content is None:
        skipped.append("checksums: there is no seal beside it (`data tokenize` and `data merge` write one)")
    else:
        findings += differences(prefix, content)
        vocabulary_size = vocabulary_size or content["vocabulary_size"]
    if vocabulary_size is None:
        skipped.append("ids: no vocabulary is known (give --tokenizer or --vocabulary)")
    else:
        findings += _strange_ids(dataset, vocabulary_size, progress=progress)
    return Verified(
        documents=dataset.document_count,
        tokens=dataset.token_count,
        vocabulary_size=vocabulary_size,
        findings=tuple(findings),
        skipped=tuple(skipped),
    )


def _index_findings(dataset: IndexedDataset) -> Iterator[str]:
    index = idx_path(dataset.prefix)
    lengths = dataset.sequence_lengths.astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
    apart = np.flatnonzero(dataset.pointers != starts * dataset.dtype.itemsize)
    if len(apart):
        first = int(apart[0])
        yield (
            f"{index}: sequence {first:,} begins at byte {dataset.pointers[first]:,} and not where the one "
            f"before it ends, byte {starts[first] * dataset.dtype.itemsize:,}."
        )
    if len(lengths) and lengths.min() < 1:
        yield f"{index}: sequence {int(np.argmin(lengths)):,} has {lengths.min()} tokens."
    back = np.flatnonzero(np.diff(dataset.document_indices) < 0)
    if len(back):
        yield f"{index}: document {int(back[0]) + 1:,} begins before the one before it."


def _strange_ids(
    dataset: IndexedDataset, vocabulary_size: int, *, progress: ProgressCallback
) -> Iterator[str]:
    """Yield a sentence about the first id that is not in the vocabulary, if there is one."""
    for start in range(0, dataset.token_count, _CHUNK_TOKENS):
        count = min(_CHUNK_TOKENS, dataset.token_count - start)
        tokens = dataset.window(start, count)
        strange = np.flatnonzero((tokens >= vocabulary_size) | (tokens < 0))
        if len(strange):
            place = start + int(strange[0])
            document = int(np.searchsorted(dataset.document_starts, place, "right")) - 1
            yield (
                f"{bin_path(dataset.prefix)}: token {place:,} (byte {place * dataset.dtype.itemsize:,}, "
                f"document {document:,}) has id {tokens[strange[0]]:,}; the vocabulary has "
                f"{vocabulary_size:,}."
            )
            return
        progress("looking at ids", start + count, dataset.token_count, "tokens")


def merge_pairs(
    prefixes: Sequence[Path], out: Path, *, progress: ProgressCallback = silent
) -> IndexedDataset:
    """Write the documents of several pairs, in the order given, to `out`. The pairs stay as they are.

    The new pair is joined and sealed beside `out`, so that an older pair there stays whole until then.
    """
    if any(prefix.absolute() == out.absolute() for prefix in prefixes):
        raise DataError(
            f"{out} is one of the pairs to merge.", remedy="Write to another path; then remove the parts."
        )
    pairs = [IndexedDataset(prefix) for prefix in prefixes]
    seals = [sealed(prefix) or {} for prefix in prefixes]
    staged = out.with_name(out.name + ".merging") / out.name
    try:
        _write(pairs, seals, staged, progress=progress)
        replace_pair(staged, out)
    finally:
        shutil.rmtree(staged.parent, ignore_errors=True)
    return IndexedDataset(out)


def _write(
    pairs: Sequence[IndexedDataset],
    seals: Sequence[dict[str, int | None]],
    staged: Path,
    *,
    progress: ProgressCallback,
) -> None:
    """Join the pairs, and seal the result."""
    total = sum(pair.token_count for pair in pairs)
    with IndexedWriter(staged, dtype=pairs[0].dtype) as writer:
        for pair in pairs:
            writer.add_pair(pair)
            progress("merging", writer.token_count, total, "tokens")
    vocabulary, end = (_agreed(seals, name) for name in ("vocabulary_size", "end_of_document_id"))
    seal(staged, vocabulary_size=vocabulary, end_of_document_id=end)


def _agreed(seals: Sequence[dict[str, int | None]], name: str) -> int | None:
    """Return the value that all seals have, or None if they differ or one has none."""
    values = {seal.get(name) for seal in seals}
    return values.pop() if len(values) == 1 else None
