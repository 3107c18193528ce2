"""The samples of pairs as Megatron-LM writes them, against its algorithm written out slowly."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from tests.data.test_megatron_order import slow_row

from bloomery.data import native_kernels
from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.pair_files import bin_path, idx_path
from bloomery.data.pairs import verify_pair
from bloomery.data_loader.reading import Samples

Sequences = list[list[int]]


@pytest.fixture(params=["native", "numpy"], autouse=True)
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native_kernels, "_functions", dict)
    elif not native_kernels._functions():
        pytest.skip("the native library is not built")


def index_of(lengths: list[int], documents: list[int], *, code: int, item_bytes: int) -> bytes:
    """What `IndexedDatasetBuilder` of Megatron writes. documents: number of sequences in each."""
    pointers, indices = [0], [0]
    for length in lengths:
        pointers.append(pointers[-1] + length * item_bytes)
    for count in documents:
        indices.append(indices[-1] + count)
    numbers = [*pointers[:-1], *indices]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(indices))
    return header + struct.pack(f"<{len(lengths)}i{len(numbers)}q", *lengths, *numbers)


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "<u1")])
@pytest.mark.parametrize("samples", [9, 31, 64])
def test_documents_of_several_sequences_and_of_none_give_megatrons_samples(
    tmp_path: Path, code: int, kind: str, samples: int
) -> None:
    """Megatron shuffles sequences, whichever document they are of; one without tokens changes the shuffle."""
    random, length = np.random.default_rng(7), 16
    documents = [0, 3, 1, 0, 0, 2, 5, 1, 4, 0, 1, 1, 2, 0]
    sizes = random.integers(0, 25, sum(documents)).tolist()
    sizes[4] = sizes[9] = 0
    tokens = random.integers(0, 120, sum(sizes))
    bin_path(tmp_path / "pair").write_bytes(tokens.astype(kind).tobytes())
    index = index_of(sizes, documents, code=code, item_bytes=np.dtype(kind).itemsize)
    idx_path(tmp_path / "pair").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "pair")
    dataset.refuse_stray_sequences()
    dataset.refuse_contradictions()
    assert (dataset.sequence_count, dataset.document_count) == (len(sizes), len(documents))

    ends = np.cumsum(sizes)
    sequences = [tokens[end - size : end].tolist() for end, size in zip(ends, sizes, strict=True)]
    order, _, shuffle = slow_row(sizes, samples, length, 1234)
    row = [token for number in order for token in sequences[number]]
    expected = [row[at * length : at * length + length + 1] for at in shuffle[:samples].tolist()]
    ours = MegatronOrder([dataset.sequence_lengths], None, samples=samples, sequence_length=length, seed=1234)
    inputs, targets = Samples(ours, [dataset], sequence_length=length).read(np.arange(samples))
    assert [[*one, last[-1]] for one, last in zip(inputs.tolist(), targets.tolist(), strict=True)] == expected

    starts = [0, *np.cumsum([sum(sizes[at : at + count]) for at, count in _runs(documents)]).tolist()]
    assert dataset.document_starts.tolist() == starts


def _runs(documents: list[int]) -> list[tuple[int, int]]:
    return [(sum(documents[:number]), count) for number, count in enumerate(documents)]


def test_pointers_behind_four_gib_are_followed(tmp_path: Path) -> None:
    """A file with a hole: four sequences of 1.6 GB of zeros each, then four whose tokens are numbers."""
    long, small, length = [400_000_000] * 4, [50, 70, 3, 900], 1 << 22
    with bin_path(tmp_path / "pair").open("wb") as file:
        file.seek(4 * sum(long))
        file.write(np.arange(1, sum(small) + 1, dtype="<i4").tobytes())
    index = index_of([*long, *small], [4, 0, 1, 3], code=4, item_bytes=4)
    idx_path(tmp_path / "pair").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "pair")
    assert dataset.document(3).tolist() == list(range(51, 1024))

    random, count = np.random.RandomState(3), (sum(long) + sum(small) - 1) // length
    order, shuffle = np.arange(8, dtype=np.int32), np.arange(count)
    random.shuffle(order)
    random.shuffle(shuffle)
    place, at, expected = 0, {}, []  # samples that hold numbers, and these numbers in their order
    for number in order.tolist():
        size = [*long, *small][number]
        if number >= 4:
            at |= {(place + token) // length: None for token in (0, size - 1)}
            first = 1 + sum(small[: number - 4])
            expected += range(first, first + size)
        place += size
    ours = MegatronOrder([dataset.sequence_lengths], None, samples=count, sequence_length=length, seed=3)
    turns = np.array([int(np.flatnonzero(shuffle == sample)[0]) for sample in at])
    inputs, _ = Samples(ours, [dataset], sequence_length=length).read(turns)
    assert inputs[inputs > 0].tolist() == expected


def test_a_pair_of_megatron_without_a_seal_is_whole(tmp_path: Path) -> None:
    bin_path(tmp_path / "pair").write_bytes(struct.pack("<6H", *range(6)))
    idx_path(tmp_path / "pair").write_bytes(index_of([2, 1, 3], [2, 0, 1], code=8, item_bytes=2))
    found = verify_pair(tmp_path / "pair", vocabulary_size=6)
    assert (found.findings, found.documents, found.tokens) == ((), 3, 6)
