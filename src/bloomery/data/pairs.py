"""Verifies pairs of token files (.bin, .idx), merges several into one, and replaces one by another."""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery import durable
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import HEADER, PARTS, bin_path, idx_path, seal_path
from bloomery.data.seal import (
    PAGE_BYTES,
    PageSums,
    Seal,
    SealFacts,
    damaged_sums,
    page_sums,
    read_seal,
    refuse_other_sizes,
)
from bloomery.data.storage import as_storage_error, locked_directory
from bloomery.errors import DataError
from bloomery.events.records import ProgressCallback, counting, ignore_progress

_CHECKED_AT_START_BYTES = 1 << 30  # 0.1 to 0.3 s


def replace_pair(staged: Path, target: Path) -> None:
    """Replace a sealed pair by another on the same file system. After an interruption the call can be
    repeated.

    At every moment the seal and the tokens belong together, and an index never lies on other tokens. On the
    way there is a moment without an index, which readers report as a missing pair.
    """
    with as_storage_error(bin_path(target)):
        if bin_path(staged).exists():
            withdraw_pair(target)
        for path in PARTS.values():  # tokens first, because an index says that they are there
            if path(staged).exists():
                durable.replace(path(staged), path(target))


def withdraw_pair(target: Path) -> None:
    """Take the seal and the index from a pair that is about to be replaced: without these it is none."""
    with as_storage_error(bin_path(target)):
        seal_path(target).unlink(missing_ok=True)
        idx_path(target).unlink(missing_ok=True)
        durable.sync_directory(target.parent)


def refuse_damaged(prefixes: Iterable[Path], *, may_have_gaps: bool = False) -> None:
    """Raise DataError if a pair differs from its seal: all sizes are compared, and the bytes of the first
    GiB. The index of a pair without a seal, up to as many bytes, must not contradict itself.

    may_have_gaps: sequences are read where the index says, as in Megatron's order, and need not adjoin. All
    other reading takes the tokens as they lie, those that no sequence has too.

    A start asks it of the pairs that it will read. What is larger is checked as it is read, where its seal
    has sums of pages (`sealing.py`); all of it by `bloomery data verify`.
    """
    left = _CHECKED_AT_START_BYTES
    for prefix in prefixes:
        left -= _refuse_damaged(prefix, at_most=left, may_have_gaps=may_have_gaps)


def _refuse_damaged(prefix: Path, *, at_most: int, may_have_gaps: bool) -> int:
    """The same of one pair; returns how many bytes were read."""
    seal = read_seal(prefix)
    if seal is None:
        size = idx_path(prefix).stat().st_size
        if may_have_gaps or size > at_most:
            return 0
        IndexedDataset(prefix).refuse_contradictions()
        return size
    refuse_other_sizes(prefix, seal)
    size = sum(file.bytes for file in seal.files.values())
    if size > at_most:
        return 0
    for difference in differences(prefix, seal):
        raise DataError(
            difference,
            remedy="Copy the pair again from where it is whole, or remove it and tokenise again; "
            "`bloomery data verify` names all that differs.",
        )
    return size


def differences(prefix: Path, seal: Seal) -> Iterator[str]:
    """Where a pair differs from its seal: a sentence for each run of pages (or blocks) that do."""
    for finding in damaged_sums(prefix):
        yield finding
        return
    for path in (bin_path(prefix), idx_path(prefix)):
        expected, actual = seal.files[path.suffix].bytes, path.stat().st_size
        if actual != expected:
            yield f"{path} has {actual:,} bytes; {expected:,} were written."
        for first, last in _joined(_other_ranges(path, seal)):
            yield f"{path} is not what was written, somewhere in bytes {first:,} to {last - 1:,}."


def _other_ranges(path: Path, seal: Seal) -> Iterator[tuple[int, int]]:
    """Byte ranges [first, end) that differ from their sums; those that the file lacks are left out."""
    sealed, size = seal.files[path.suffix], seal.block_bytes
    with path.open("rb") as file:
        for number in range(sealed.block_sums.size):
            begin = number * size
            length = min(size, sealed.bytes - begin)
            block = file.read(size)[:length]
            if len(block) < length:
                return
            if xxhash.xxh3_64_intdigest(block) != int(sealed.block_sums[number]):
                yield from _other_pages(block, begin, sealed.page_sums)


def _other_pages(block: bytes, begin: int, sums: PageSums | None) -> list[tuple[int, int]]:
    """The pages of a block that differs which differ themselves, or the block where no page can be named."""
    end = begin + len(block)
    pages = []
    if sums is not None and begin % PAGE_BYTES == 0:
        actual = page_sums(np.frombuffer(block, dtype=np.uint8))
        first = begin // PAGE_BYTES
        places = (np.flatnonzero(actual != sums[first : first + actual.size]) + first) * PAGE_BYTES
        pages = [(place, min(place + PAGE_BYTES, end)) for place in places.tolist()]
    return pages or [(begin, end)]


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same bytes in as few ranges as there are gaps between them."""
    joined: tuple[int, int] | None = None
    for begin, end in ranges:
        if joined and begin <= joined[1]:
            joined = joined[0], end
            continue
        if joined:
            yield joined
        joined = begin, end
    if joined:
        yield joined


_CHUNK_TOKENS, _CHUNK_ENTRIES = 1 << 23, 1 << 20
Fact = TypeVar("Fact")


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
    prefix: Path, *, vocabulary_size: int | None = None, progress: ProgressCallback = ignore_progress
) -> Verified:
    """Read all of a pair and compare it with its seal and its vocabulary.

    vocabulary_size: number of valid token ids; None takes it from the seal.
    Raises DataError if the pair cannot be read at all.
    """
    dataset = IndexedDataset(prefix, is_checked=False)  # all that differs is told, not the first of it
    dataset.refuse_elsewhere()
    seal = read_seal(prefix)
    findings = [*_index_findings(dataset)]
    skipped = []
    if seal is None:
        skipped.append("checksums: there is no seal beside it (`data tokenize` and `data merge` write one)")
    else:
        findings += differences(prefix, seal)
        vocabulary_size = vocabulary_size or seal.facts.vocabulary_size
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
    """Yield a sentence for each thing that is wrong in the index, which is read some sequences at a time."""
    index, end = idx_path(dataset.prefix), 0
    is_apart = is_empty = False
    for start in range(0, dataset.sequence_count, _CHUNK_ENTRIES):
        count = min(_CHUNK_ENTRIES, dataset.sequence_count - start)
        lengths = _column(index, "<i4", HEADER.size + 4 * start, count).astype(np.int64)
        pointers = _column(index, "<i8", HEADER.size + 4 * dataset.sequence_count + 8 * start, count)
        starts = end + (np.cumsum(lengths) - lengths) * dataset.dtype.itemsize
        apart, empty = np.flatnonzero(pointers != starts), np.flatnonzero(lengths < 1)
        if apart.size and not is_apart:
            is_apart, first = True, int(apart[0])
            yield (
                f"{index}: sequence {start + first:,} begins at byte {pointers[first]:,} and not where the "
                f"one before it ends, byte {starts[first]:,}."
            )
        if empty.size and not is_empty:
            is_empty, first = True, int(empty[0])
            yield f"{index}: sequence {start + first:,} has {lengths[first]} tokens."
        end = int(starts[-1] + lengths[-1] * dataset.dtype.itemsize)
    for start in range(0, dataset.document_count, _CHUNK_ENTRIES):
        count = min(_CHUNK_ENTRIES, dataset.document_count - start) + 1
        indices = _column(index, "<i8", HEADER.size + 12 * dataset.sequence_count + 8 * start, count)
        back = np.flatnonzero(np.diff(indices) < 0)
        if back.size:
            yield f"{index}: document {start + int(back[0]) + 1:,} begins before the one before it."
            return


def _column(path: Path, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    """Return numbers read from a file, not mapped: reading all of a file must not fill the memory with it."""
    numbers: npt.NDArray[Any] = np.fromfile(path, dtype=dtype, count=count, offset=offset)
    return numbers


def _strange_ids(
    dataset: IndexedDataset, vocabulary_size: int, *, progress: ProgressCallback
) -> Iterator[str]:
    """Yield a sentence about the first id that is not in the vocabulary, if there is one."""
    path, item_bytes = bin_path(dataset.prefix), dataset.dtype.itemsize
    for start in range(0, dataset.token_count, _CHUNK_TOKENS):
        count = min(_CHUNK_TOKENS, dataset.token_count - start)
        tokens = _column(path, dataset.dtype.str, start * item_bytes, count)
        strange = np.flatnonzero((tokens >= vocabulary_size) | (tokens < 0))
        if len(strange):
            place = start + int(strange[0])
            sequence = bisect_right(dataset.pointers, place * item_bytes) - 1
            document = bisect_right(dataset.document_indices, sequence) - 1
            yield (
                f"{path}: token {place:,} (byte {place * item_bytes:,}, "
                f"document {document:,}) has id {tokens[strange[0]]:,}; the vocabulary has "
                f"{vocabulary_size:,}."
            )
            return
        progress("checking ids", start + count, dataset.token_count, "tokens")


def merge_pairs(
    prefixes: Sequence[Path], out: Path, *, progress: ProgressCallback = ignore_progress
) -> IndexedDataset:
    """Write the documents of several pairs, in the order given, to `out`. The pairs stay as they are.

    They are joined and sealed beside `out`, so that an older pair there stays whole until the new one is.
    What the seals of the pairs say is compared with every byte that is copied: damage is refused, and never
    sealed anew. A pair without a seal is copied as it is. One process at a time may write to one `out`.
    """
    return merge_together({out: prefixes}, progress=progress)[0]


def merge_together(
    groups: Mapping[Path, Sequence[Path]], *, progress: ProgressCallback = ignore_progress
) -> list[IndexedDataset]:
    """Do what `merge_pairs` does for several pairs of one corpus; no older one is replaced before all new
    ones are whole.

    groups: the pairs to join, by the pair to write; what is trained on first, and then what is held out of
    it. At no moment an older held-out pair lies beside the new training documents, which may hold its own.
    """
    with ExitStack() as stack:
        staged = [
            (_staged(prefixes, out, stack=stack, progress=progress), out) for out, prefixes in groups.items()
        ]
        for out in list(groups)[1:]:
            withdraw_pair(out)
        for made, out in staged:
            replace_pair(made, out)
    return [IndexedDataset(out) for out in groups]


def _staged(prefixes: Sequence[Path], out: Path, *, stack: ExitStack, progress: ProgressCallback) -> Path:
    """Join pairs in a directory beside `out`, and return the joined one; `stack` removes the directory."""
    if any(prefix.resolve() == out.resolve() for prefix in prefixes):
        raise DataError(
            f"{out} is one of the pairs to merge.", remedy="Write to another path; then remove the parts."
        )
    pairs = [IndexedDataset(prefix) for prefix in prefixes]
    staged = out.with_name(out.name + ".merging") / out.name
    copied = counting(progress, "merging", sum(pair.token_count * pair.dtype.itemsize for pair in pairs))
    stack.enter_context(locked_directory(staged.parent, name="lock"))
    stack.callback(shutil.rmtree, staged.parent, ignore_errors=True)
    with IndexedWriter(staged, dtype=pairs[0].dtype, seal=agreed_facts(pairs)) as writer:
        for pair in pairs:
            writer.add_pair(pair, copied)
    return staged


def agreed_facts(pairs: Sequence[IndexedDataset]) -> SealFacts:
    """Return what all seals say; None for what they differ in, or where one says nothing."""

    def agreed(values: set[Fact]) -> Fact | None:
        return values.pop() if len(values) == 1 else None

    facts = [pair.seal.facts if pair.seal else SealFacts() for pair in pairs]
    return SealFacts(
        vocabulary_size=agreed({seal.vocabulary_size for seal in facts}),
        end_of_document_id=agreed({seal.end_of_document_id for seal in facts}),
        engine=agreed({seal.engine for seal in facts}),
    )
