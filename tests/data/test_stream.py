"""The stream of a run as it begins, and as the demand of its recipe changes."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from bloomery.config.data import DataSection
from bloomery.data import megatron_order, storage
from bloomery.data.dataset_shares import Claim, Demand
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import idx_path
from bloomery.data.position import RULE_KEY
from bloomery.data.stream import begin_stream, stream_identity
from bloomery.errors import DataError

LENGTH = 16


def pair(prefix: Path, *, documents: int = 20) -> IndexedDataset:
    with IndexedWriter(prefix, dtype="<u2") as writer:
        for _ in range(documents):
            writer.add_document(np.arange(100))
    return IndexedDataset(prefix)


def demand(*budgets: int, samples: int = 100) -> Demand:
    claims = (
        Claim(name=f"d{number}", samples=budget, weight=Fraction(1)) for number, budget in enumerate(budgets)
    )
    return Demand(claims=tuple(claims), samples=samples, slack=8, sequence_length=LENGTH)


def test_megatrons_order_refuses_an_index_that_leads_out_of_its_file(tmp_path: Path) -> None:
    dataset = pair(tmp_path / "pair")
    index = bytearray(idx_path(tmp_path / "pair").read_bytes())
    pointers = 34 + 4 * dataset.sequence_count
    struct.pack_into("<q", index, pointers + 8, 1 << 40)
    idx_path(tmp_path / "pair").write_bytes(index)
    section = DataSection(sources=("x",), sequence_length=LENGTH, order="megatron")
    with pytest.raises(DataError, match="sequence 1 has 100 tokens from byte 1,099,511,627,776 on"):
        begin_stream(section, [IndexedDataset(tmp_path / "pair")], demand(0), seed=1, samples=100)


def test_the_orders_of_many_datasets_in_one_directory_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 0)
    fill, filled = megatron_order._fill_row, list[object]()

    def watched(*about: object) -> None:
        filled.append(about)
        fill(*about)

    monkeypatch.setattr(megatron_order, "_fill_row", watched)
    datasets = [pair(tmp_path / f"pair-{number}", documents=20 + number) for number in range(6)]
    section = DataSection(sources=("x",), sequence_length=LENGTH, order="megatron")
    for _ in range(2):
        begin_stream(section, datasets, demand(*[0] * 6), seed=1, samples=100)
    assert len(filled) == 6


def test_a_run_at_its_end_takes_what_the_recipe_asks_now_and_mixes_as_before(tmp_path: Path) -> None:
    datasets = [pair(tmp_path / name) for name in "ab"]
    section = DataSection(sources=("x",), sequence_length=LENGTH)
    stream = begin_stream(section, datasets, demand(0, 0), seed=1, samples=100)
    later = stream.demanding(demand(0, 30), at=100, left=0)
    assert later.demand == demand(0, 30) and later.mixtures == stream.mixtures


def test_the_identity_of_a_run_names_the_rule_that_its_latest_mixture_follows(tmp_path: Path) -> None:
    datasets = {name: pair(tmp_path / name) for name in "ab"}
    section = DataSection(sources=("x",), sequence_length=LENGTH)
    stream = begin_stream(section, list(datasets.values()), demand(0, 0), seed=1, samples=100)
    stored = stream.to_json()
    of_rule_2 = {**stored, "mixtures": [{**stored["mixtures"][0], "rule": 2}]}
    begun = stream.following(of_rule_2, at=10, left=90)
    changed = begun.demanding(demand(0, 30), at=10, left=90)
    assert [mixture.rule for mixture in changed.mixtures] == [2, 3]
    assert stream_identity(changed, datasets, text="t")[RULE_KEY] == "3"


def test_a_run_that_goes_on_after_its_mixture_changed_reads_the_same_windows(tmp_path: Path) -> None:
    datasets = [pair(tmp_path / name) for name in "ab"]
    section = DataSection(sources=("x",), sequence_length=LENGTH)
    begun = begin_stream(section, datasets, demand(0, 0), seed=7, samples=100)
    changed = begun.demanding(demand(0, 30), at=40, left=60)
    today = begin_stream(section, datasets, demand(0, 30), seed=7, samples=100)
    resumed = today.following(changed.to_json(), at=60, left=40)
    assert resumed.mixtures == changed.mixtures and len(resumed.mixtures) == 2
    located = [stream.order.locate_samples(np.arange(100)) for stream in (changed, resumed)]
    assert np.array_equal(*located)
