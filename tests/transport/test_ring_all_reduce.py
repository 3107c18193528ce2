from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bloomery.diloco.outer_update import digest
from bloomery.transport.connection import HopRateLimit
from bloomery.transport.gradient_codec import Codec, decode, encode
from bloomery.transport.ring_all_reduce import Ring, RingError

SIZES = [0, 1, 2, 3, 4, 5, 9, 511, 513, 2049, 70_001]


def parts_of(members, size, seed=0):
    random = np.random.default_rng((seed, members, size))
    return [random.standard_normal(size).astype(np.float32) for _ in range(members)]


def through(values, kind):
    out = np.empty(values.size, np.float32)
    decode(encode(values, kind), kind, out)
    return out


def slow_all_reduce(parts, weights, kind, *, partial=None):
    """What a ring computes, member by member: (sum, what each lost over its weight). partial: sums' codec."""
    members, size = len(parts), parts[0].size
    total, lost = np.empty(size, np.float32), [np.zeros(size, np.float32) for _ in parts]
    for segment in range(members):
        where = slice(size * segment // members, size * (segment + 1) // members)
        sent = np.zeros(where.stop - where.start, np.float32)
        for hop in range(members):
            member = (segment + hop) % members
            here = sent + parts[member][where] * np.float32(weights[member])
            sent = through(here, kind if hop == members - 1 else partial or kind)
            if weights[member]:
                lost[member][where] = (here - sent) * (np.float32(1) / np.float32(weights[member]))
        total[where] = sent
    return total, lost


@pytest.mark.parametrize("kind", Codec)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_member_gets_to_the_bit_what_a_slow_ring_computes(members, kind, size):
    ring = members(size, kind, threads=1)
    weights = [1.0, 0.3, 0.0, 2.5][:size]
    for round_number, count in enumerate(SIZES):
        parts = parts_of(size, count)
        expected, lost = slow_all_reduce(parts, weights, kind)
        residuals = [np.ones(count, np.float32) for _ in parts]

        more = [{"weight": weight, "residual": one} for weight, one in zip(weights, residuals, strict=True)]

        ended = ring.all_reduce(parts, round=round_number, each=more.__getitem__)

        assert all(not isinstance(one, Exception) for one in ended), ended
        for part, residual, own in zip(parts, residuals, lost, strict=True):
            assert part.tobytes() == expected.tobytes()
            np.testing.assert_array_equal(residual, 1 + own)


@pytest.mark.parametrize(
    ("partial", "kind"), [("int8", "int4"), ("bf16", "int8"), ("fp32", "int4"), ("bf16", "int4")]
)
def test_partial_sums_travel_in_a_wider_codec_where_one_is_given(members, partial, kind):
    weights = [1.0, 0.3, 0.0]
    ring = members(3, kind, reduce_codec=partial, threads=1)
    for count in (0, 1, 3, 130, 513, 70_001):
        parts = parts_of(3, count)
        expected, lost = slow_all_reduce(parts, weights, kind, partial=partial)
        residuals = [np.zeros(count, np.float32) for _ in parts]
        more = [{"weight": weight, "residual": one} for weight, one in zip(weights, residuals, strict=True)]

        ended = ring.all_reduce(parts, round=count, each=more.__getitem__)

        assert all(not isinstance(one, Exception) for one in ended), ended
        for part, residual, own in zip(parts, residuals, lost, strict=True):
            assert part.tobytes() == expected.tobytes()
            np.testing.assert_array_equal(residual, own)
    if partial == "int8":  # per value a byte on the way up and half a one on the way back, and scales
        assert sum(one.sent_bytes for one in ended) < 1.05 * 2 * 70_001 * 1.55


def test_partial_sums_do_not_travel_in_a_narrower_codec(members):
    with pytest.raises(ValueError, match="no ring"):
        members(2, "int8", reduce_codec="int4")


@pytest.mark.parametrize("kind", [Codec.INT8, Codec.INT4])
def test_what_quantising_loses_is_kept_for_the_next_round(members, kind):
    ring, weights = members(3, kind), [1.0, 0.25, 3.0]
    parts = parts_of(3, 10_000)
    exact = sum(np.float64(weight) * part for weight, part in zip(weights, parts, strict=True))
    residuals = [np.zeros(10_000, np.float32) for _ in parts]

    ring.all_reduce(parts, each=lambda i: {"weight": weights[i], "residual": residuals[i]})

    kept = sum(np.float64(weight) * residual for weight, residual in zip(weights, residuals, strict=True))
    assert np.abs(parts[0] - exact).max() > 1e-3
    np.testing.assert_allclose(parts[0] + kept, exact, atol=2e-5)


@pytest.mark.parametrize("kind", Codec)
def test_hashes_are_equal_after_every_one_of_many_rounds_of_random_sizes(members, kind):
    random = np.random.default_rng(Codec(kind).number)
    noise = random.standard_normal(1 << 16).astype(np.float32)
    rings = [members(size, kind, streams=streams, threads=0) for size, streams in ((2, 1), (3, 2), (4, 3))]
    for round_number in range(1000):
        ring = rings[round_number % 3]
        count, places = int(random.integers(0, 3000)), random.integers(0, 60_000, ring.size)
        parts = [noise[place : place + count].copy() for place in places]

        ended = ring.all_reduce(parts, round=round_number, epoch=round_number // 7)

        assert all(not isinstance(one, Exception) for one in ended), ended
        assert len({digest(part) for part in parts}) == 1
        scale = np.abs(parts[0]).max(initial=1.0)
        exact = sum(noise[place : place + count].astype(np.float64) for place in places)
        assert (
            np.abs(parts[0] - exact).max(initial=0.0) <= {"int4": 0.5, "int8": 0.03}.get(kind, 0.02) * scale
        )


@pytest.mark.parametrize("threads", [0, 3])
def test_many_chunks_on_many_streams_of_real_connections(members, threads):
    ring = members(3, "int8", streams=4, pair=connected, threads=threads, chunk=1024)
    parts = parts_of(3, 400_000)
    expected, _ = slow_all_reduce(parts, [1, 1, 1], "int8")

    ended = ring.all_reduce(parts)

    assert all(part.tobytes() == expected.tobytes() for part in parts), ended
    assert sum(one.sent_bytes for one in ended) == sum(one.received_bytes for one in ended)


def connected():
    """Two ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def test_two_members_can_share_one_connection_for_both_directions():
    ends, keys = socket.socketpair(), [os.urandom(32), os.urandom(32)]
    rings = [
        Ring(
            index=index,
            size=2,
            next_fds=[end.fileno()],
            previous_fds=[end.fileno()],
            send_keys=[keys[index]],
            receive_keys=[keys[1 - index]],
            codec="fp32",
        )
        for index, end in enumerate(ends)
    ]
    parts = parts_of(2, 300_000)
    exact = parts[0] + parts[1]
    call = {"round": 1, "epoch": 1, "stall_s": 120, "deadline_s": 120}

    other = threading.Thread(target=lambda: rings[1].all_reduce(parts[1], **call))
    other.start()
    rings[0].all_reduce(parts[0], **call)
    other.join()

    assert np.array_equal(parts[0], exact) and np.array_equal(parts[1], exact)
    for ring, end in zip(rings, ends, strict=True):
        ring.close()
        end.close()


def test_with_a_place_for_the_sum_the_values_stay_as_they_are(members):
    ring = members(2, "int8")
    parts = parts_of(2, 5000)
    before, sums = [part.copy() for part in parts], [np.empty(5000, np.float32) for _ in parts]

    ring.all_reduce(parts, each=lambda i: {"out": sums[i]})

    assert all(np.array_equal(*pair) for pair in zip(parts, before, strict=True))
    assert sums[0].tobytes() == sums[1].tobytes() == slow_all_reduce(parts, [1, 1], "int8")[0].tobytes()


def test_a_ring_of_one_weighs_its_values_and_refuses_what_others_would():
    ring = Ring(index=0, size=1, next_fds=[], previous_fds=[], send_keys=[], receive_keys=[], codec="int4")
    values = np.array([1, -3, 0.5], np.float32)

    ended = ring.all_reduce(values, round=0, epoch=0, stall_s=1, deadline_s=1, weight=0.5)

    assert values.tolist() == [0.5, -1.5, 0.25]
    assert (ended.sent_bytes, ended.received_bytes) == (0, 0)
    with pytest.raises(RingError) as refused:
        ring.all_reduce(np.array([np.nan], np.float32), round=0, epoch=0, stall_s=1, deadline_s=1)
    assert refused.value.kind == "not finite"


def test_a_rate_limit_is_kept(members):
    ring = members(2, "int8", pace=HopRateLimit(2e6))
    parts = parts_of(2, 600_000)

    ended = ring.all_reduce(parts)

    assert all(one.seconds >= 0.9 * (one.sent_bytes - 65_536) / 2e6 for one in ended)
    assert parts[0].tobytes() == parts[1].tobytes()


def test_what_the_kernel_delivered_is_told(members):
    ring = members(2, "int8", pair=connected)
    parts = parts_of(2, 3_000_000)

    ended = ring.all_reduce(parts)

    # An estimate: the segments acknowledged meanwhile, of which some left before, by their mean size.
    told = [(one.delivered.delivered_bytes, one.sent_bytes) for one in ended]
    assert all(0 < delivered <= 1.25 * sent for delivered, sent in told), told
    assert all(one.delivered.lost_bytes >= 0 for one in ended)
    beside = members(2, "int8").all_reduce(parts)
    assert all(one.delivered.delivered_bytes == 0 for one in beside), "these sockets are no TCP"


def test_the_best_rate_is_that_of_a_part_of_the_round_and_not_of_all_that_came_until_then(members):
    ring = members(2, "int8", pair=connected, pace=HopRateLimit(1e6))

    ended = ring.all_reduce(parts_of(2, 1_000_000))

    told = [one.delivered.best_bytes_s for one in ended]
    assert all(0 < best < 2e6 for best in told), told


def test_ends_that_disagree_about_the_array_find_out(members):
    ring = members(2, "int8")

    ended = ring.all_reduce([np.zeros(1000, np.float32), np.zeros(1001, np.float32)], stall_s=0.5)

    assert any(one.kind == "garbage" and "another array" in one.message for one in ended)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"send_keys": [b"short"]}, "32 bytes"),
        ({"next_fds": [0, 1]}, "a descriptor and a key"),
        ({"index": 2}, "no ring: index 2 of 2"),
        ({"chunk": 100}, "chunk 100"),
        ({"codec": "int7"}, "int7"),
    ],
)
def test_what_makes_no_ring_is_refused(wrong, message):
    right = dict(index=0, size=2, next_fds=[0], previous_fds=[0], codec="int8")
    right |= dict(send_keys=[bytes(32)], receive_keys=[bytes(32)])
    with pytest.raises(ValueError, match=message):
        Ring(**right | wrong)


def test_arrays_that_cannot_be_summed_are_refused(members):
    ring = members(2, "int8").rings[0]
    call = dict(round=0, epoch=0, stall_s=1, deadline_s=1)

    with pytest.raises(ValueError, match="contiguous, writeable float32"):
        ring.all_reduce(np.zeros(3), **call)
    with pytest.raises(ValueError, match="beside one of"):
        ring.all_reduce(np.zeros(3, np.float32), **call, residual=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="out of bounds"):
        ring.all_reduce(np.zeros(3, np.float32), **call | {"stall_s": 0})


def test_without_the_library_a_ring_says_what_to_install(monkeypatch):
    monkeypatch.setattr("bloomery.transport.ring_all_reduce.functions", dict)
    with pytest.raises(Exception, match="install g"):
        Ring(
            index=0,
            size=2,
            next_fds=[0],
            previous_fds=[0],
            send_keys=[bytes(32)],
            receive_keys=[bytes(32)],
            codec="int8",
        )


def test_codecs_have_the_numbers_that_the_library_knows():
    assert [kind.number for kind in Codec] == [0, 1, 2, 3]
    assert 512 % max(kind.block for kind in Codec) == 0


_WITHOUT_THREADS = """
import ctypes, resource, sys, threading
from pathlib import Path
import numpy as np
from conftest import Members
from bloomery.transport.gradient_codec import Codec

allowed, stack = int(sys.argv[1]), 1 << 30
threading.stack_size(1 << 20)  # Python's own threads are small
ring = Members(2, Codec.INT8, threads=4)
parts = [np.full(100_000, value, np.float32) for value in (1.0, 2.0)]
libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(256)
libc.pthread_attr_init(attributes)
assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(stack)) == 0
assert libc.pthread_setattr_default_np(attributes) == 0  # for the native ones
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
room = used + allowed * stack + stack // 2
resource.setrlimit(resource.RLIMIT_AS, (room, room))
print([type(one).__name__ for one in ring.all_reduce(parts)], parts[0].min(), parts[1].max())
"""


@pytest.mark.parametrize("some", [0, 1], ids=["none", "fewer"])
def test_a_ring_that_gets_no_threads_or_fewer_goes_on(some):
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_THREADS, str(some)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-2:] == ["3.0", "3.0"], ended.stdout
