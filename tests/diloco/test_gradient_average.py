"""Averaged gradients as an outer update: what is sent, what a digest covers, and what a lost step leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from bloomery.diloco import gradient_average, outer_update
from bloomery.diloco.gradient_average import GradientAverage
from bloomery.diloco.outer_update import (
    Reduced,
    digest,
    digest_of_pieces,
    pieces_of,
    rank_digest,
    squared_norm,
)
from bloomery.diloco.stored_average import StoredAverage


class Vector:
    """Weights and gradients of a rank."""

    numel = 10

    def __init__(self) -> None:
        self.weights, self.gradients = torch.arange(10.0), torch.arange(10.0) - 4.0
        self.is_spoiled = False

    def zeros(self) -> Tensor:
        return torch.zeros(10)

    def read_masters(self, into: Tensor, start: int = 0) -> None:
        into.copy_(self.weights[start : start + len(into)])

    def read_gradients(self, into: Tensor, start: int = 0) -> None:
        into.copy_(self.gradients[start : start + len(into)])

    def write_gradients(self, values: Tensor) -> None:
        self.gradients = values.clone()

    def spoil_gradients(self) -> None:
        self.is_spoiled = True


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_average, "BLOCK", 4)


AVERAGE = StoredAverage.of(np.arange(10, dtype=np.float32) / 2)


def test_a_part_is_the_gradients_piece_by_piece_without_an_error_to_keep() -> None:
    update = GradientAverage(Vector(), piece=7)  # type: ignore[arg-type]
    assert update.offer(1)() == (16 + 9 + 4 + 1 + 0 + 1 + 4 + 9 + 16 + 25, 0.0)
    assert update.pieces() == [range(0, 7), range(7, 10)]
    values, residual = update.values(0.5, range(7, 10))
    assert values.tolist() == [3.0, 4.0, 5.0] and residual is None
    assert (update.has_feedback, update.digest_is_of_state, list(update.state_entries())) == (
        False,
        False,
        [],
    )


def test_the_digest_of_a_round_is_of_the_weights_before_it_and_the_average() -> None:
    vector = Vector()
    update = GradientAverage(vector)  # type: ignore[arg-type]
    prepared = update.prepare(Reduced(average=AVERAGE, residual=None))
    assert prepared == rank_digest((vector.weights, torch.arange(10.0) / 2))
    assert update.digest() == rank_digest((vector.weights,))
    assert vector.gradients.tolist() == (torch.arange(10.0) - 4.0).tolist()
    update.adopt()
    assert vector.gradients.tolist() == (torch.arange(10.0) / 2).tolist() and not vector.is_spoiled
    with pytest.raises(AssertionError, match="nothing was prepared"):
        update.adopt()


@pytest.mark.parametrize("forget", ["reset", "follow_loaded", "drop_offer"])
def test_what_was_prepared_is_gone_once_the_round_is_not_the_peers(forget: str) -> None:
    vector = Vector()
    update = GradientAverage(vector)  # type: ignore[arg-type]
    update.prepare(Reduced(average=AVERAGE, residual=None))
    getattr(update, forget)()
    with pytest.raises(AssertionError, match="nothing was prepared"):
        update.adopt()
    assert vector.is_spoiled is (forget == "drop_offer"), "the optimizer refuses a step without an average"


def test_who_brings_nothing_offers_zeros_and_no_step_of_others_is_made_up_for() -> None:
    vector = Vector()
    update = GradientAverage(vector)  # type: ignore[arg-type]
    vector.gradients[3] = torch.inf
    update.offer_nothing()
    assert vector.gradients.tolist() == [0.0] * 10 and update.offer(1)() == (0.0, 0.0)
    assert update.average() is None
    for call in (lambda: update.prepare_missed(1, AVERAGE), update.rebase):
        with pytest.raises(ValueError, match="cannot be made up for"):
            call()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_digest_is_of_the_bytes_in_blocks_and_of_their_number_however_they_are_split(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer_update, "BLOCK_BYTES", 8)
    content = np.arange(45, dtype=np.uint8)
    expected = hashlib.blake2b(digest_size=32)
    for begin in range(0, 45, 8):
        expected.update(xxhash.xxh3_128(content[begin : begin + 8].tobytes()).digest())
    expected.update(b"\x2d" + bytes(7))
    for cuts in ((), (0,), (3, 8, 9), (8, 16), (44,)):
        pieces = np.split(content, cuts)
        assert digest(*pieces, threads=threads) == expected.hexdigest()
        assert digest_of_pieces(iter(pieces), nbytes=45, threads=threads) == expected.hexdigest()
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest(matrix.T, threads=1) == digest(np.ascontiguousarray(matrix.T), threads=1)
    assert digest(matrix.T, threads=1) != digest(matrix, threads=1)


def test_a_digest_on_a_machine_of_many_cores_holds_no_more_pieces_than_on_one_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = hashed = most = 0
    hash_block = outer_update._hash

    def counted(block: list[memoryview]) -> bytes:
        nonlocal hashed
        hashed += 1
        return hash_block(block)

    def pieces() -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        nonlocal made, most
        for _ in range(2000):
            made += 1
            most = max(most, made - hashed)
            yield np.zeros(8, np.uint8)

    monkeypatch.setattr(outer_update, "BLOCK_BYTES", 8)
    monkeypatch.setattr(outer_update, "_hash", counted)
    monkeypatch.setattr(outer_update.os, "sched_getaffinity", lambda process: set(range(192)))
    digest_of_pieces(pieces(), nbytes=2000 * 8)
    assert hashed == 2000 and most <= 8 * 64


def test_pieces_cover_every_element_once_and_nothing_is_one_empty_piece() -> None:
    assert pieces_of(0, 4) == [range(0, 0)]
    assert pieces_of(4, 4) == [range(0, 4)]
    assert pieces_of(9, 4) == [range(0, 4), range(4, 8), range(8, 9)]


def test_squares_are_added_up_in_fp64_and_are_not_finite_where_an_element_is_not() -> None:
    assert squared_norm(torch.tensor([3e30, 4e30])) == pytest.approx(25e60)
    assert squared_norm(torch.tensor([1.0, torch.inf])) == torch.inf
    assert np.isnan(squared_norm(torch.tensor([1.0, torch.nan])))
