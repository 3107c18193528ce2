"""Links as arithmetic: rate, delay, loss, cuts."""

import pytest

from bloomery.chaos.shaped_network import (
    LEAST_RETRANSMISSION_S,
    LEAST_WINDOW_BYTES,
    SEGMENT_BYTES,
    UNLIMITED_WINDOW_BYTES,
    Pipe,
    Shape,
    _window_bytes,
)


def test_a_chunk_takes_its_length_over_the_rate_and_the_delay() -> None:
    pipe = Pipe(Shape(rate=1000.0, delay=0.5))
    assert pipe.arrival(100, now=10.0) == 10.0 + 0.1 + 0.5


def test_chunks_of_all_connections_share_the_rate() -> None:
    pipe = Pipe(Shape(rate=1000.0))
    arrivals = [pipe.arrival(100, now=0.0) for _ in range(5)]
    assert arrivals == [0.1, 0.2, 0.30000000000000004, 0.4, 0.5]


def test_a_cut_holds_everything_back_and_loses_nothing() -> None:
    pipe = Pipe(Shape(rate=1000.0))
    pipe.cut(5.0)
    assert pipe.arrival(1000, now=1.0) == 6.0
    assert pipe.arrival(1000, now=7.0) == 8.0


def test_a_slow_spell_ends() -> None:
    pipe = Pipe(Shape(delay=0.1))
    pipe.slow(1.0, until=2.0)
    assert pipe.arrival(1, now=1.0) == 2.1
    assert pipe.arrival(1, now=2.0) == 2.1


def test_loss_delays_about_its_share_of_the_packets() -> None:
    pipe = Pipe(Shape(delay=0.05, loss=0.1), seed=1)
    late = sum(pipe.arrival(1000, now=0.0) > 0.051 for _ in range(2000))
    assert 150 < late < 250


@pytest.mark.parametrize(("segments", "late_s"), [(1, 0.4), (3, 0.4), (4, 0.2)])
def test_a_loss_among_the_last_segments_is_noticed_by_the_timer_alone(segments: int, late_s: float) -> None:
    pipe = Pipe(Shape(delay=0.1, loss=1 - 1e-12))
    assert pipe.arrival(segments * SEGMENT_BYTES, now=0.0) == pytest.approx(0.1 + late_s)
    near = Pipe(Shape(delay=0.01, loss=1 - 1e-12))
    assert near.arrival(SEGMENT_BYTES, now=0.0) == pytest.approx(0.01 + LEAST_RETRANSMISSION_S)


def test_one_corruption_changes_one_bit_of_one_chunk() -> None:
    pipe = Pipe(Shape())
    pipe.corrupt_next()
    spoilt = pipe.spoil(bytes(100))
    assert sum(byte.bit_count() for byte in spoilt) == 1
    assert pipe.spoil(bytes(100)) == bytes(100)


def test_a_slow_spell_is_over_at_its_time_and_a_shorter_cut_ends_no_longer_one() -> None:
    pipe = Pipe(Shape(delay=0.1))
    pipe.slow(1.0, until=2.0)
    assert pipe.arrival(1, now=1.9) == 1.9 + 0.1 + 1.0 and pipe.arrival(1, now=2.5) == 2.6
    for until in (9.0, 5.0):
        pipe.cut(until)
    assert pipe.arrival(1, now=3.0) == 9.1


def test_each_corruption_that_was_asked_for_comes() -> None:
    pipe = Pipe(Shape())
    for _ in range(2):
        pipe.corrupt_next()
    assert pipe.spoil(b"") == b""
    flipped = [sum(byte.bit_count() for byte in pipe.spoil(bytes(9))) for _ in range(3)]
    assert flipped == [1, 1, 0]


def test_of_more_segments_one_is_lost_more_often() -> None:
    def late(segments: int) -> int:
        pipe = Pipe(Shape(delay=0.05, loss=0.1), seed=1)
        return sum(pipe.arrival(segments * SEGMENT_BYTES, now=0.0) > 0.051 for _ in range(1000))

    assert 70 < late(1) < 130 and 380 < late(5) < 440, "1 - 0.9 ** 5 is 0.41"


@pytest.mark.parametrize("wrong", [{"rate": -1.0}, {"delay": -0.1}, {"loss": 1.0}, {"loss": -0.1}])
def test_what_is_no_link_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="not a link"):
        Shape(**wrong)


def test_twice_the_bytes_of_a_round_trip_may_be_underway() -> None:
    assert _window_bytes(Shape(rate=1e7, delay=0.05)) == 2_000_000
    assert _window_bytes(Shape(rate=1e3, delay=0.05)) == LEAST_WINDOW_BYTES
    assert _window_bytes(Shape(delay=0.05)) == UNLIMITED_WINDOW_BYTES
