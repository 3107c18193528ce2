"""Several pairs of indexed files as one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.seal import replace_pair, seal, sealed
from bloomery.data.tokenize import Progress, silent
from bloomery.errors import DataError


def merge_pairs(prefixes: Sequence[Path], out: Path, *, progress: Progress = silent) -> IndexedDataset:
    """Write the documents of several pairs, in the order given, to `out`. The pairs stay as they are.

    They are joined and sealed beside `out`, so that an older pair there stays whole until the new one is.
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
    progress: Progress,
) -> None:
    """Join the pairs, and seal what comes of it."""
    total = sum(pair.token_count for pair in pairs)
    with IndexedWriter(staged, dtype=pairs[0].dtype) as writer:
        for pair in pairs:
            writer.add_pair(pair)
            progress("merging", writer.token_count, total, "tokens")
    vocabulary, end = (_agreed(seals, name) for name in ("vocabulary_size", "end_of_document_id"))
    seal(staged, vocabulary_size=vocabulary, end_of_document_id=end)


def _agreed(seals: Sequence[dict[str, int | None]], name: str) -> int | None:
    """What all seals say, or None where they differ or one says nothing."""
    said = {one.get(name) for one in seals}
    return said.pop() if len(said) == 1 else None
