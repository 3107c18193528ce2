"""What the outer optimizer keeps and takes, and that small pieces lead to what one large piece leads to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.diloco.test_pseudo_gradient import OneTensor

from bloomery.config.elastic import ElasticSection
from bloomery.diloco import outer_update, pseudo_gradient
from bloomery.diloco.outer_update import Reduced, StoredAverage
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.transport.gradient_codec import decode, encode

SCRIPT = str(Path(__file__).with_name("peer_memory.py"))


def test_a_peer_keeps_eight_bytes_a_parameter_and_takes_two_more_while_a_round_is_made() -> None:
    sizes, told = (4_000_000, 12_000_000), []
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed goes
    for elements in sizes:
        ended = subprocess.run(
            [sys.executable, SCRIPT, str(elements), "int8"],
            env=os.environ | at_once,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        told.append(json.loads(ended.stdout))
    # Buffers of bounded size are the same in both runs, so the difference is what each parameter takes.
    each = {what: (told[1][what] - told[0][what]) / (sizes[1] - sizes[0]) for what in told[0]}
    assert each["kept"] <= 8.1, each
    assert each["peak"] <= 10.0, each
    assert each["average"] <= 1.02, each


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("members", [1, 2, 3, 7])
def test_an_average_is_kept_to_the_bit_in_the_bytes_of_the_ring(
    codec: str, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer_update, "BLOCK", 1024)
    count = 10_007
    drawn = np.random.default_rng(members).normal(size=count).astype(np.float32)
    values = np.empty_like(drawn)
    for segment in range(members):  # as the ring rounds what it sends round: native/src/frame.h, begin_of
        begin, end = (
            count // members * edge + count % members * edge // members for edge in (segment, segment + 1)
        )
        part = np.ascontiguousarray(drawn[begin:end])
        decode(encode(part, codec), codec, values[begin:end])
    stored = StoredAverage(codec, members=members)
    for piece in (values, values):
        stored.append(torch.from_numpy(piece))
    twice = np.concatenate((values, values))
    assert np.array_equal(stored.whole().numpy().view(np.uint32), twice.view(np.uint32))
    assert stored.nbytes <= 2.2 * 2 * count and stored.numel == 2 * count
    assert stored.squares == pytest.approx(float(np.dot(twice.astype(np.float64), twice)))
    for start, stop in ((0, 5), (1000, 9000), (10_000, 10_020), (2 * count - 3, 2 * count)):
        pieces = list(stored.pieces(start, stop))
        assert pieces[0][0] == start
        assert np.array_equal(torch.cat([values for _, values in pieces]).numpy(), twice[start:stop])


@pytest.mark.parametrize("zeros", [0.0, 0.4, 0.95, 1.0])
def test_a_sparse_average_is_kept_to_the_bit_in_at_most_the_bytes_of_fp32(zeros: float) -> None:
    random = np.random.default_rng(3)
    values = random.normal(size=5_000).astype(np.float32) * (random.random(5_000) >= zeros)
    values[:2] = 0.0, -0.0
    stored = StoredAverage("sparse", members=3)
    stored.append(torch.from_numpy(values))
    assert np.array_equal(stored.whole().numpy().view(np.uint32), values.view(np.uint32))
    assert stored.nbytes <= min(4 * values.size, 8 * np.count_nonzero(values.view(np.uint32)))


def test_an_average_that_no_ring_rounded_is_kept_as_it_is() -> None:
    values = torch.randn(3_000, generator=torch.Generator().manual_seed(1))
    stored = StoredAverage("int8", members=2)
    stored.append(values)
    assert torch.equal(stored.whole(), values)


@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize("overlap", [0, 2])
def test_small_pieces_lead_to_the_same_state_as_one_large_piece(
    fragments: int, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ElasticSection(inner_steps=6, fragments=fragments, codec="int4", overlap_steps=overlap)
    states = []
    for block, piece in ((1 << 22, 1 << 27), (5, 7)):
        monkeypatch.setattr(outer_update, "BLOCK", block)
        monkeypatch.setattr(pseudo_gradient, "BLOCK", block)
        vector = OneTensor(64)
        update = PseudoGradient(vector, section, piece=piece)
        update.begin()
        squares, prepared = [], []
        for round in range(1, 5):
            vector.weights += torch.sin(torch.arange(64.0) * round)
            squares.append(update.offer(round))
            average, residuals = StoredAverage("fp32", members=1), []
            if overlap:
                vector.weights += 1.0  # the steps that overlap are no part of the round
            for part in update.pieces():
                values, residual = update.values(0.5, part)
                assert residual is not None
                average.append(0.5 * values)
                residuals.append(residual + values)
            prepared.append(update.prepare(Reduced(average=average, residual=torch.cat(residuals))))
            update.adopt()
            assert update.digest() == prepared[-1]
        states.append((squares, prepared, vector.weights, update.residual))
    (squares, prepared, weights, residual), small = states
    assert np.allclose(squares, small[0], rtol=1e-9) and prepared == small[1]
    assert torch.equal(weights, small[2]) and residual is not None and torch.equal(residual, small[3])
