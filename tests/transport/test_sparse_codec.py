"""The sparse codec against a slow second implementation, its size, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from bloomery.plan.peer_round import sparse_bytes
from bloomery.transport.sparse_codec import (
    CHUNK,
    NotSendable,
    add_sparse,
    average_sparse,
    encode_sparse,
    sparse_words,
)

SIZES = (0, 1, 2, 63, 65, CHUNK, CHUNK + 1, 3 * CHUNK + 777)
DENSITIES = (0.001, 0.01, 1 / 64, 0.03, 0.25)


def gaussian(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, size)).standard_normal(size).astype(np.float32)


def least_lost(magnitudes: np.ndarray) -> float:
    """What the best two levels lose: all ways of cutting the sorted magnitudes in two are tried."""
    ordered = np.sort(magnitudes.astype(np.float64))
    halves = [(ordered[:cut], ordered[cut:]) for cut in range(1, ordered.size)] or [(ordered, ordered)]
    return min(sum(half.var() * half.size for half in pair) for pair in halves)


def decoded(code: np.ndarray, density: float, size: int) -> np.ndarray:
    out = np.zeros(size, np.float32)
    add_sparse(code, density, out, weight=1.0)
    return out


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", SIZES)
def test_the_largest_values_of_each_chunk_are_sent_with_their_signs_and_two_levels(size, density):
    values = gaussian(size)
    sent = decoded(encode_sparse(values, density), density, size)
    for start in range(0, size, CHUNK):
        chunk, here = values[start : start + CHUNK], sent[start : start + CHUNK]
        kept = max(1, round(density * chunk.size))
        largest = sorted(range(chunk.size), key=lambda place: -abs(chunk[place]))[:kept]
        assert sorted(largest) == list(np.flatnonzero(here))
        assert (np.sign(here[largest]) == np.sign(chunk[largest])).all()
        assert len(np.unique(np.abs(here[largest]))) <= 2
        magnitudes = np.abs(chunk[largest])
        lost = np.square(np.abs(here[largest]) - magnitudes).sum()
        assert lost <= 1.0001 * least_lost(magnitudes) + 1e-4 * np.square(magnitudes).sum()
        assert np.linalg.norm(here) <= np.linalg.norm(chunk)


def test_two_levels_lose_less_than_a_tenth_of_what_is_sent():
    values = gaussian(64 * CHUNK)
    sent = decoded(encode_sparse(values, 1 / 64), 1 / 64, values.size)
    chosen = sent != 0
    assert np.linalg.norm((values - sent)[chosen]) < 0.1 * np.linalg.norm(values[chosen])


@pytest.mark.parametrize("density", DENSITIES)
def test_the_size_follows_from_count_and_density_and_is_the_one_that_the_plan_counts(density):
    assert 4 * sparse_words(8 * CHUNK, density) == 8 * CHUNK * sparse_bytes(density)
    assert encode_sparse(np.zeros(8 * CHUNK, np.float32), density).size == sparse_words(8 * CHUNK, density)


def test_a_chunk_of_the_usual_density_takes_84_bytes():
    assert 4 * sparse_words(CHUNK, 1 / 64) == 84


def test_weighted_sums_are_each_product_and_each_sum_rounded_by_itself():
    size, weights = 2 * CHUNK + 5, (0.3, 0.0, 0.7)
    codes = [encode_sparse(gaussian(size, seed), 0.03) for seed in range(3)]
    out = np.zeros(size, np.float32)
    slow = np.zeros(size, np.float32)
    for weight, code in zip(weights, codes, strict=True):
        add_sparse(code, 0.03, out, weight=weight)
        for place, value in enumerate(decoded(code, 0.03, size)):
            slow[place] = np.float32(slow[place] + np.float32(value * np.float32(weight)))
    assert np.array_equal(out.view(np.uint32), slow.view(np.uint32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**121])
def test_values_that_are_not_finite_or_too_large_are_not_encoded(value):
    values = gaussian(100)
    values[7] = value
    with pytest.raises(ValueError, match="not finite"):
        encode_sparse(values, 0.03)


@pytest.mark.parametrize("level", [0x7F80, 0x7FC0, 0xFFFF, 0x8000, 0x7B81])
def test_levels_that_are_not_finite_negative_or_too_large_are_refused(level):
    code = encode_sparse(gaussian(CHUNK), 1 / 64)
    code.view(np.uint16)[1] = level
    with pytest.raises(ValueError, match="level"):
        decoded(code, 1 / 64, CHUNK)


def test_any_flipped_bit_is_refused_or_decodes_to_as_many_places_within_the_chunk():
    size, density = CHUNK + 333, 1 / 64
    code = encode_sparse(gaussian(size), density)
    bits, refused = code.size * 32, 0
    for bit in range(0, bits, 3):
        hostile = code.copy()
        hostile[bit // 32] ^= np.uint32(1 << bit % 32)
        try:
            sent = decoded(hostile, density, size)
        except ValueError:
            refused += 1
        else:
            assert np.isfinite(sent).all()
            assert np.count_nonzero(sent) <= 64 + 5
    assert refused > bits // 3 // 8  # the bitmap and the order of places; other bits are values


@pytest.mark.parametrize("size", [100, CHUNK + 333])
def test_a_place_beyond_the_last_value_is_refused(size):
    values = np.zeros(size, np.float32)
    values[-1] = 1.0
    code, refused = encode_sparse(values, 0.01), 0
    for bit in range(code.size * 32):
        hostile = code.copy()
        hostile[bit // 32] ^= np.uint32(1 << bit % 32)
        try:
            decoded(hostile, 0.01, size)
        except ValueError as error:
            refused += "outside it" in str(error)
    assert refused


@pytest.mark.parametrize("words", [0, 20, 22, 10_000])
def test_another_length_is_refused(words):
    with pytest.raises(ValueError, match="words are not"):
        decoded(np.zeros(words, np.uint32), 1 / 64, CHUNK)


def test_random_bytes_never_write_outside_the_values():
    random = np.random.default_rng(0)
    for _ in range(200):
        code = random.integers(0, 2**32, sparse_words(CHUNK, 0.01), np.uint32)
        code.view(np.uint16)[:2] = 1, 2
        with pytest.raises(ValueError, match="places"):
            decoded(code, 0.01, CHUNK)


def test_what_fills_the_last_word_is_nothing():
    code = encode_sparse(gaussian(CHUNK + 1), 1 / 64)  # 84 and 5 bytes, in words of four
    code.view(np.uint8)[89] = 1
    with pytest.raises(ValueError, match="there are bits after the end"):
        add_sparse(code, 1 / 64, np.zeros(CHUNK + 1, np.float32), weight=1.0)


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_lower_level_above_the_higher_one_is_refused_in_any_chunk(chunk):
    code = encode_sparse(gaussian(2 * CHUNK), 1 / 64)
    levels = code.view(np.uint8)[84 * chunk :][:4].view(np.uint16)
    levels[0] = levels[1]
    assert np.isfinite(decoded(code, 1 / 64, 2 * CHUNK)).all()
    levels[0] += 1
    with pytest.raises(ValueError, match="above the next one"):
        decoded(code, 1 / 64, 2 * CHUNK)


def test_what_fills_the_last_byte_of_a_chunk_is_nothing():
    code = encode_sparse(gaussian(2 * CHUNK), 1 / 64)  # 639 bits behind the levels of each chunk
    code.view(np.uint8)[83] |= 1
    with pytest.raises(ValueError, match="there are bits after the end of a chunk"):
        decoded(code, 1 / 64, 2 * CHUNK)


@pytest.mark.parametrize(("bit", "place"), [(11, 10), (2, 14)], ids=["twice", "falling"])
def test_places_that_come_twice_or_fall_are_refused(bit, place):
    """Of two places, 10 and 11, each has eleven low bits, the lowest first."""
    values = np.zeros(CHUNK, np.float32)
    values[10:12] = 1.0
    code = encode_sparse(values, 2 / CHUNK)
    assert list(np.flatnonzero(decoded(code, 2 / CHUNK, CHUNK))) == [10, 11]
    code.view(np.uint8)[4 + bit // 8] ^= 0x80 >> bit % 8
    with pytest.raises(ValueError, match="not in order"):
        decoded(code, 2 / CHUNK, CHUNK)


@pytest.mark.parametrize(
    ("value", "weight", "is_sent"),
    [
        (2.0**100, 1.0, True),
        (1.5 * 2.0**100, 0.5, False),
        (2.0**99, 2.0, True),
        (1.5 * 2.0**99, 2.0, False),
    ],
)
def test_values_are_sent_up_to_a_limit_that_holds_for_them_and_for_what_their_weight_makes_of_them(
    value, weight, is_sent
):
    values, gathered = np.full(3, value, np.float32), []
    average = dict(gather=gathered.append, weights=(weight,), index=0, density=1.0, residual=None)
    if is_sent:
        average_sparse(values, **average)
        assert (values == np.float32(value * weight)).all()
    else:
        with pytest.raises(NotSendable):
            average_sparse(values, **average)
    assert len(gathered) == is_sent


def test_a_code_lies_on_the_wire_as_other_versions_read_it():
    values = np.zeros(20, np.float32)
    values[[1, 3, 6, 10, 15, 18]] = 1.0, -2.0, 4.0, -0.5, 8.0, 3.0
    levels = np.array([2.5, 8.0], np.float32).view(np.uint16)[1::2]  # of 1, 2, 4 and 3, and of 8
    low = "10 11 01 11 01"  # of the places 1, 3, 6, 15 and 18, the lowest bit first
    high = "11 01 0 01 01"  # a one for each place, a zero for each four values
    negative, is_high = "01000", "00010"
    bits = "".join((low + high + negative + is_high).split())
    expected = levels.tobytes() + int(bits.ljust(32, "0"), 2).to_bytes(4, "big")
    assert encode_sparse(values, 0.25).tobytes() == expected
