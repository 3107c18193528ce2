"""What the outer optimizer keeps and takes, and that small pieces lead to what one large piece leads to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

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
            squares.append(update.offer(round)())
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


@pytest.mark.parametrize("fragments", [1, 2])
def test_rounds_that_steps_overlap_lead_to_the_bits_of_those_that_wait(
    fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pseudo_gradient, "BLOCK", 5)
    monkeypatch.setattr(stored_average, "BLOCK", 5)
    peers = []
    for overlap in (0, 1):
        section = ElasticSection(inner_steps=6, fragments=fragments, overlap_steps=overlap)
        vector, told = OneTensor(64), list[Any]()
        vector.weights = vector.weights.mul(64).round()  # so that steps are undone to the bit
        update = PseudoGradient(vector, section, piece=7)
        update.begin()
        for round in range(1, 5):
            vector.weights += torch.arange(64.0) % 8 * round
            measure = update.offer(round)
            ahead = 1.0 if overlap else 0.0
            vector.weights += ahead  # by a step that is no part of the round
            told.append(measure())
            average = StoredAverage("fp32", members=1)
            for piece in update.pieces():
                average.append(0.5 * update.values(1.0, piece)[0].numpy())
            told.append(update.prepare(Reduced(average=average, residual=None)))
            update.adopt()
            assert update.average() is None and update.digest() == told[-1]
            kept = torch.ones(64)  # the elements of other fragments keep what the step did
            for span in update._fragments[(round - 1) % fragments]:
                assert torch.equal(*(flat[span.start : span.stop] for flat in (vector.weights, update.base)))
                kept[span.start : span.stop] = 0.0
            vector.weights -= ahead * kept
        peers.append((told, vector.weights, update.base, update.momentum))
    (waits, *state), (overlaps, *other) = peers
    assert waits[1::2] == overlaps[1::2]
    torch.testing.assert_close(waits[::2], overlaps[::2])
    assert torch.equal(state[1], other[1]) and torch.equal(state[2], other[2])


def test_whoever_reads_the_base_after_a_round_waits_for_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are there at once; base and momentum make their step on a thread."""
    section = ElasticSection(inner_steps=4, overlap_steps=1)
    vector, may_step = OneTensor(64), threading.Event()
    update = PseudoGradient(vector, section)
    update.begin()
    before = update.base.clone()
    vector.weights += 1.0
    update.offer(1)()
    average = StoredAverage.of(update.values(1.0, range(64))[0].numpy())
    prepared = update.prepare(Reduced(average=average, residual=None))
    make_step = update._make_step

    def step_later(*given: Any) -> None:
        assert may_step.wait(60.0)
        make_step(*given)

    monkeypatch.setattr(update, "_make_step", step_later)
    update.adopt()
    assert not torch.equal(vector.weights, before) and torch.equal(update._base, before)
    threading.Timer(0.01, may_step.set).start()
    tensors = {entry.name: entry.tensor for entry in update.state_entries()}
    assert torch.equal(tensors["outer.base.all"], vector.weights) and update.digest() == prepared
