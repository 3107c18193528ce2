from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bloomery.plan.peer_round import average_error, codec_of_partial_sums
from bloomery.transport import gradient_codec
from bloomery.transport.gradient_codec import Codec, decode, encode, encoded_size, largest_magnitude

SIZES = [0, 1, 2, 3, 127, 128, 129, 255, 511, 512, 513, 1025, 5000]
STEPS = {Codec.INT8: 127, Codec.INT4: 7}


@pytest.fixture
def without_library(monkeypatch):
    """Within it NumPy does what the library would."""

    def call(function, *arguments):
        with monkeypatch.context() as patched:
            patched.setattr(gradient_codec, "functions", dict)
            return function(*arguments)

    return call


def decoded(encoded, kind, count):
    out = np.empty(count, np.float32)
    decode(encoded, kind, out)
    return out


def test_the_library_is_there():
    assert gradient_codec.functions(), "python setup.py build_ext --inplace"


@pytest.mark.parametrize("kind", Codec)
def test_numpy_and_the_library_give_equal_bytes_and_values_for_every_size(kind, without_library):
    random = np.random.default_rng(1)
    for size in SIZES:
        values = (random.standard_normal(size) * np.exp(random.uniform(-40, 40, size))).astype(np.float32)

        ours, theirs = encode(values, kind), without_library(encode, values, kind)

        assert ours.tobytes() == theirs.tobytes()
        assert ours.size == encoded_size(size, kind)
        assert np.array_equal(decoded(ours, kind, size), without_library(decoded, ours, kind, size))


@pytest.mark.parametrize("kind", Codec)
@given(values=arrays(np.float32, st.integers(0, 700), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_numpy_and_the_library_agree_on_values_of_any_size(kind, values):
    ours = encode(values, kind)

    assert ours.tobytes() == gradient_codec._encode(values, kind).tobytes()
    assert np.array_equal(decoded(ours, kind, values.size), gradient_codec._decode(ours, kind, values.size))


@pytest.mark.parametrize("kind", [Codec.INT8, Codec.INT4])
def test_no_value_is_further_off_than_half_a_step_of_its_block(kind):
    values = np.random.default_rng(2).standard_normal(4096).astype(np.float32)

    error = np.abs(decoded(encode(values, kind), kind, values.size) - values).reshape(-1, kind.block)

    step = np.abs(values).reshape(-1, kind.block).max(axis=1, keepdims=True) / STEPS[kind]
    assert (error <= step * 0.5001).all()


def test_fp32_loses_nothing_and_bf16_rounds_to_nearest_even(without_library):
    values = np.array([1.0, 1.00390625, 1.01171875, -3.0e38 * 2**-10, 1e-40], np.float32)

    assert np.array_equal(decoded(encode(values, "fp32"), "fp32", 5), values)
    encoded = encode(values, "bf16")
    assert without_library(encode, values, "bf16").tobytes() == encoded.tobytes()
    rounded = decoded(encoded, "bf16", 5)
    assert rounded[0] == 1.0
    assert rounded[1] == 1.0  # halfway between 1 and 1.0078125: to the even one
    assert rounded[2] == 1.015625


@pytest.mark.parametrize("kind", [Codec.INT8, Codec.INT4])
def test_what_was_decoded_is_encoded_to_itself(kind):
    values = np.random.default_rng(3).standard_normal(2000).astype(np.float32)
    once = decoded(encode(values, kind), kind, values.size)

    twice = decoded(encode(once, kind), kind, values.size)

    assert np.allclose(once, twice, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [Codec.INT8, Codec.INT4])
def test_blocks_of_nothing_but_tiny_values_travel_as_zeros(kind):
    values = np.full(1000, 2.0**-110, np.float32)

    assert not decoded(encode(values, kind), kind, 1000).any()


@pytest.mark.parametrize("kind", Codec)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_is_refused_by_both(kind, bad, without_library):
    values = np.zeros(1000, np.float32)
    values[700] = bad

    with pytest.raises(ValueError, match="not finite"):
        encode(values, kind)
    with pytest.raises(ValueError, match="not finite"):
        without_library(encode, values, kind)


@pytest.mark.parametrize("kind", Codec)
def test_bytes_that_decode_to_no_finite_values_are_refused(kind, without_library):
    encoded = np.full(encoded_size(600, kind), 255, np.uint8)

    for refuse in (decoded, lambda *arguments: without_library(decoded, *arguments)):
        with pytest.raises(ValueError, match="not finite"):
            refuse(encoded, kind, 600)


def test_bytes_of_another_length_are_refused():
    with pytest.raises(ValueError, match="15 bytes are not 4 values of fp32"):
        decode(bytes(15), "fp32", np.empty(4, np.float32))
    with pytest.raises(ValueError, match="17 bytes are not 4 values of fp32"):
        decode(bytes(17), "fp32", np.empty(4, np.float32))


@pytest.mark.parametrize("kind", Codec)
def test_threads_change_no_byte(kind):
    values = np.random.default_rng(4).standard_normal(300_001).astype(np.float32)
    encoded = encode(values, kind, threads=1)

    assert encode(values, kind, threads=5).tobytes() == encoded.tobytes()
    out = np.empty(values.size, np.float32)
    decode(encoded, kind, out, threads=3)
    assert np.array_equal(out, decoded(encoded, kind, values.size))


def test_adding_what_was_encoded_is_decoding_and_adding():
    random = np.random.default_rng(5)
    for kind in Codec:
        values, total = random.standard_normal((2, 3001)).astype(np.float32)
        encoded = encode(values, kind)
        expected = decoded(encoded, kind, values.size) + total

        status = gradient_codec.functions()["accumulate"](
            kind.number, encoded.ctypes.data, values.size, 1, total.ctypes.data
        )

        assert status == 0
        assert np.array_equal(total, expected)


def test_the_largest_magnitude_is_found_and_what_is_not_finite_shows():
    values = np.random.default_rng(6).standard_normal(200_000).astype(np.float32)
    assert gradient_codec.largest_magnitude(values) == np.abs(values).max()
    values[123_456] = -np.inf
    assert gradient_codec.largest_magnitude(values) == np.inf
    values[5] = np.nan
    assert not np.isfinite(gradient_codec.largest_magnitude(values))


def relative_error(kind, random, *, outliers):
    """Of a sum over two members, as a ring makes it: once each member's part, once the sum."""
    parts = random.standard_normal((2, 1 << 19)).astype(np.float32)
    if outliers:
        parts[random.random(parts.shape) < 0.001] *= 30
    exact = parts.sum(axis=0, dtype=np.float64)
    sent = decoded(encode(parts[0], kind), kind, exact.size) + parts[1]
    total = decoded(encode(sent, kind), kind, exact.size)
    return np.linalg.norm(total - exact) / np.linalg.norm(exact)


def test_int8_is_exact_enough_also_where_few_values_are_large():
    random = np.random.default_rng(7)

    assert relative_error(Codec.INT8, random, outliers=False) <= 0.015
    assert relative_error(Codec.INT8, random, outliers=True) <= 0.05


def through(values, kind):
    out = np.empty(values.size, np.float32)
    decode(encode(values, kind, threads=1), kind, out, threads=1)
    return out


def error_of_a_ring(peers, *, partial, complete, own=None):
    """The relative error of the average of independent parts; own: what each member adds to its part."""
    random = np.random.default_rng(peers)
    total, exact = np.zeros(1 << 14, np.float32), np.zeros(1 << 14)
    for peer in range(peers):
        part = random.standard_normal(1 << 14).astype(np.float32) / np.float32(peers)
        exact += part
        total = total + part if own is None else total + part + own[peer]
        total = through(total, complete if peer == peers - 1 else partial)
    return np.linalg.norm(total - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("codec", ["int4", "int8", "bf16"])
def test_an_average_loses_no_more_by_quantising_however_many_peers_there_are(codec):
    for peers in (2, 4, 16, 64, 256, 500):
        partial = codec_of_partial_sums(codec, peers)
        error = error_of_a_ring(peers, partial=partial, complete=codec)
        assert error == pytest.approx(average_error(codec, peers, reduce_codec=partial), rel=0.2)
        assert error < {"int4": 0.21, "int8": 0.05, "bf16": 0.05}[codec]
    assert [codec_of_partial_sums("int4", peers) for peers in (4, 5, 500)] == ["int4", "int8", "int8"]
    assert [codec_of_partial_sums("int8", peers) for peers in (64, 128)] == ["int8", "bf16"]
    assert error_of_a_ring(64, partial="int4", complete="int4") > 0.6  # what a wider codec prevents


def test_error_feedback_stays_small_where_sixteen_peers_shrink_to_two():
    """A peer's error is lost / its weight in the ring, and WireRing keeps it times that weight."""
    random = np.random.default_rng(1)
    lost, total = [], np.zeros(1 << 14, np.float32)
    for peer in range(16):
        total = total + random.standard_normal(1 << 14).astype(np.float32) / np.float32(16)
        sent = through(total, "int4" if peer == 15 else "int8")
        lost.append(total - sent)
        total = sent
    assert error_of_a_ring(2, partial="int4", complete="int4", own=lost[:2]) < 0.2
    in_units_of_parts = [8 * one for one in lost[:2]]  # divided by 1/16, multiplied by 1/2
    assert error_of_a_ring(2, partial="int4", complete="int4", own=in_units_of_parts) > error_of_a_ring(
        2, partial="int4", complete="int4", own=lost[:2]
    )


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(8, np.float32)[::2],
        np.zeros(4, np.float64),
        np.frombuffer(bytes(16), np.float32),
    ],
    ids=["with gaps", "doubles", "read only"],
)
def test_nothing_is_decoded_into_what_is_no_contiguous_and_writeable_float32_array(out):
    with pytest.raises(ValueError, match="into a contiguous float32 array"):
        decode(encode(np.ones(4, np.float32), Codec.FP32), Codec.FP32, out)
    assert not out.any()


@pytest.mark.parametrize("use", [lambda values: encode(values, Codec.INT8), largest_magnitude])
def test_values_of_another_type_are_refused_and_not_taken_for_float32(use):
    with pytest.raises(ValueError, match="values are float32, not float64"):
        use(np.ones(4))


@pytest.mark.parametrize("kind", Codec)
def test_values_that_do_not_lie_side_by_side_are_encoded_as_those_that_do(kind, without_library):
    values = np.random.default_rng(8).standard_normal((600, 4)).astype(np.float32)
    for apart in (values, values[::2], values[:, 1], values.T):
        expected = encode(apart.reshape(-1).copy(), kind).tobytes()
        assert encode(apart, kind).tobytes() == without_library(encode, apart, kind).tobytes() == expected
        assert largest_magnitude(apart) == np.abs(apart).max()


@pytest.mark.parametrize(
    ("values", "largest"),
    [([], 0.0), ([1.0, -3.0], 3.0), ([2.0, -np.inf], np.inf), ([np.nan, 2.0], np.nan)],
)
def test_the_largest_magnitude_is_the_same_without_the_library(values, largest, without_library):
    given = np.array(values, np.float32)
    for found in (largest_magnitude(given), without_library(largest_magnitude, given)):
        assert found == largest or (np.isnan(found) and np.isnan(largest))
