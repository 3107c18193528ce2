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
from bloomery.diloco import pseudo_gradient, stored_average
from bloomery.diloco.outer_update import Reduced
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.diloco.stored_average import StoredAverage

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


@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize("overlap", [0, 2])
def test_small_pieces_lead_to_the_same_state_as_one_large_piece(
    fragments: int, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ElasticSection(inner_steps=6, fragments=fragments, codec="int4", overlap_steps=overlap)
    states = []
    for block, piece in ((1 << 22, 1 << 27), (5, 7)):
        monkeypatch.setattr(stored_average, "BLOCK", block)
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
                average.append((0.5 * values).numpy())
                residuals.append(residual + values)
            prepared.append(update.prepare(Reduced(average=average, residual=torch.cat(residuals))))
            update.adopt()
            assert update.digest() == prepared[-1]
        states.append((squares, prepared, vector.weights, update.residual))
    (squares, prepared, weights, residual), small = states
    assert np.allclose(squares, small[0], rtol=1e-9) and prepared == small[1]
    assert torch.equal(weights, small[2]) and residual is not None and torch.equal(residual, small[3])
