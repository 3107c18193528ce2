"""What the runs and pairs that exist rely on, to the bit, against digests of what they were made by.

A test that fails here says that a checkpoint would go on with other samples, or that other versions would not
read a pair.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.mixture import BLOCK
from bloomery.data.order import Order
from bloomery.data.sample_layout import Packs, Windows
from bloomery.data.seal import SealFacts

SAMPLES = np.concatenate([np.arange(500), np.arange(BLOCK - 300, BLOCK + 300), 7 * BLOCK + np.arange(50)])


def digest(*arrays: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(np.ascontiguousarray(one, "<i8").tobytes() for one in arrays))


@pytest.mark.parametrize(
    ("rule", "kept"), [(1, "3846e8661075d179"), (2, "02f313358327e4ff"), (3, "3bd184f50581e0f3")]
)
def test_the_order_of_each_rule_is_what_it_was(rule: int, kept: str) -> None:
    order = Order([5000, 300, 70_001], [0.6, 0.1, 0.3], 1234, rule=rule)
    changed = order.changed([5000, 300, 70_001, 9], [0.2, 0.1, 0.6, 0.1], at=BLOCK + 77, rule=rule)
    assert digest(*changed.locate_samples(SAMPLES)) == kept


def test_megatrons_order_is_what_it_was() -> None:
    lengths = [np.full(60, 31, np.int32), np.arange(1, 90, dtype=np.int32), np.full(9, 40, np.int32)]
    order = MegatronOrder(lengths, [0.3, 0.7, 0.0], samples=900, sequence_length=16, seed=7)
    datasets, samples = order.locate_samples(np.arange(900))
    pieces = [
        piece for row in order.rows for sample in range(row.sample_count) for piece in row.pieces(sample)
    ]
    assert digest(datasets, samples, np.array(pieces)) == "bdb945f681cd1cba"


def test_shifted_windows_and_packs_are_what_they_were(tmp_path: Path) -> None:
    windows = Windows.of(10_000, length=16, is_shifted=True, seed=5, dataset=2)
    starts = windows.starts(np.arange(300), np.arange(300) // 100)
    with IndexedWriter(tmp_path / "pair", dtype="<u2") as writer:
        writer.add_documents(np.arange(9045) % 99, np.arange(134) + 1)
    packed = Packs(IndexedDataset(tmp_path / "pair"), length=64).pieces(np.arange(100))
    assert digest(starts) == "e710d8e50dcdd1b3"
    assert (
        digest(packed.row, packed.column, packed.start, packed.length, packed.continues) == "b5d46b65c93d48e5"
    )


def test_a_sealed_pair_is_written_as_it_was(tmp_path: Path) -> None:
    facts = SealFacts(vocabulary_size=300, end_of_document_id=0, engine="an engine")
    with IndexedWriter(tmp_path / "pair", dtype="<u2", seal=facts, block_bytes=8192) as writer:
        writer.add_documents(np.arange(9000) % 99, np.full(90, 100))
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert xxhash.xxh3_64_hexdigest(written) == "7ace91d7d36fbce2"
