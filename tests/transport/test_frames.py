"""What a member does with frames that no member sent, or not now. The other ends are played by the test."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

import numpy as np
import pytest

from bloomery.transport.gradient_codec import encode, functions
from bloomery.transport.ring_all_reduce import Ring, RingError

WORD = (1 << 64) - 1
DATA, END, WAITING = 0, 1, 2
HEADER = struct.Struct("<IBBHIIQQQII")
EPOCH, ROUND, LANE = 5, 9, 3
CALL = {"round": ROUND, "epoch": EPOCH, "stall_s": 120, "deadline_s": 240}
COUNT = 1000  # of two members: a segment of 500 each, in one chunk


# --- a second, slow implementation of the keyed checksum


def rotated(word, bits):
    return ((word << bits) | (word >> (64 - bits))) & WORD


def sip_rounds(state, count):
    a, b, c, d = state
    for _ in range(count):
        a, c = (a + b) & WORD, (c + d) & WORD
        b, d, a = rotated(b, 13) ^ a, rotated(d, 16) ^ c, rotated(a, 32)
        c, a = (c + b) & WORD, (a + d) & WORD
        b, d, c = rotated(b, 17) ^ c, rotated(d, 21) ^ a, rotated(c, 32)
    return [a, b, c, d]


def absorbed(key, words, *, tweak=0):
    first, second = struct.unpack("<QQ", key)
    state = [0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573]
    state = [state[0] ^ first, state[1] ^ second ^ tweak, state[2] ^ first, state[3] ^ second]
    for word in words:
        state[3] ^= word
        state = sip_rounds(state, 2)
        state[0] ^= word
    return state


def siphash128(key, data):
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) % 256])
    state = absorbed(key, struct.unpack(f"<{len(padded) // 8}Q", padded), tweak=0xEE)
    state[2] ^= 0xEE
    state = sip_rounds(state, 4)
    low = state[0] ^ state[1] ^ state[2] ^ state[3]
    state[1] ^= 0xDD
    state = sip_rounds(state, 4)
    return struct.pack("<QQ", low, state[0] ^ state[1] ^ state[2] ^ state[3])


def lane_hash(key, words):
    state = absorbed(key, words)
    state[2] ^= 0xFF
    state = sip_rounds(state, 4)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def slow_mac(key, epoch, header, payload):
    lanes_key = siphash128(key[:16], b"lanes\0\0\0" + struct.pack("<Q", epoch))
    whole_key = siphash128(key[16:], b"whole\0\0\0" + struct.pack("<Q", epoch))
    padded = payload + bytes(-len(payload) % 64)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    lanes = [lane_hash(lanes_key, words[lane::8]) for lane in range(8)]
    return siphash128(whole_key, header + struct.pack("<8Q", *lanes))


def fast_mac(key, epoch, header, payload):
    frame = np.frombuffer(bytearray(header + bytes(16) + payload), np.uint8)
    functions()["seal_frame"](key, epoch, frame.ctypes.data)
    return frame[48:64].tobytes()


def test_the_hash_is_siphash_as_its_authors_published_it():
    key, out = bytes(range(16)), np.zeros(16, np.uint8)
    for data, published in (
        (b"", "a3817f04ba25a8e66df67214c7550293"),
        (b"\0", "da87c1d86b99af44347659119b22fc45"),
    ):
        functions()["siphash128"](key, data, len(data), out.ctypes.data)
        assert out.tobytes().hex() == siphash128(key, data).hex() == published


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 127, 128, 200, 516, 4099])
def test_the_checksum_of_a_frame_is_what_a_slow_implementation_computes(size):
    key, payload = os.urandom(32), os.urandom(size)
    header = os.urandom(40) + struct.pack("<II", size, 0)

    assert fast_mac(key, 77, header, payload) == slow_mac(key, 77, header, payload)
    assert fast_mac(key, 78, header, payload) != fast_mac(key, 77, header, payload)


# --- one member, between ends that the test plays


class Neighbours:
    """The other ends of one member of a ring of two, and the key of what is sent to it."""

    def __init__(self, **options):
        self.previous, receiving = socket.socketpair()
        self.next, sending = socket.socketpair()
        self.ends = (self.previous, receiving, self.next, sending)
        self.key, self.sequence, self.geometry = os.urandom(32), 0, 0
        self.ring = Ring(
            index=0,
            size=2,
            next_fds=[sending.fileno()],
            previous_fds=[receiving.fileno()],
            send_keys=[os.urandom(32)],
            receive_keys=[self.key],
            **{"codec": "fp32", "rank": LANE} | options,
        )

    def frame(self, kind=DATA, payload=b"", *, key=None, mac_epoch=None, **changed):
        fields = dict(
            magic=0x314D4C42, version=1, kind=kind, lane=LANE, step=0, chunk=0, epoch=EPOCH, round=ROUND
        )
        fields |= dict(sequence=self.sequence, length=len(payload), geometry=self.geometry) | changed
        header = HEADER.pack(*fields.values())
        sealed_for = fields["epoch"] if mac_epoch is None else mac_epoch
        self.sequence += 1
        honest = struct.pack(
            "<I", len(payload)
        )  # the checksum covers what is there, whatever the header says
        mac = fast_mac(key or self.key, sealed_for, header[:40] + honest + header[44:], payload)
        if fields["length"] == len(payload):
            assert mac == fast_mac(key or self.key, sealed_for, header, payload)
        return header + mac + payload

    def close(self):
        self.ring.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def neighbours():
    """A maker of lone members, closed at the end of the test."""
    made = []

    def make(**options):
        made.append(Neighbours(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def answered(neighbours, make_bytes, *, count=COUNT, values=None, **call):
    """What a member's all-reduce returns or raises when its previous sends `make_bytes(neighbours)`."""
    values = np.ones(count, np.float32) if values is None else values
    ended = []

    def reduce():
        try:
            ended.append(neighbours.ring.all_reduce(values, **CALL | call))
        except RingError as error:
            ended.append(error)

    member = threading.Thread(target=reduce)
    member.start()
    neighbours.geometry = fingerprint(count=count, chunk=8192, members=2, codec=0)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        neighbours.previous.sendall(make_bytes(neighbours))
    member.join()
    return ended[0]


def payload_of(value):
    return encode(np.full(500, value, np.float32), "fp32").tobytes()


def sound_round(one):
    return one.frame(payload=payload_of(2)) + one.frame(payload=payload_of(7), step=1) + one.frame(END)


def test_what_a_member_would_send_is_taken(neighbours):
    values, one = np.ones(COUNT, np.float32), neighbours()

    ended = answered(one, sound_round, values=values)

    assert not isinstance(ended, RingError), ended
    # It adds what came to its second segment, and takes the first as it is handed round.
    assert values.tolist() == [7.0] * 500 + [3.0] * 500
    sent = one.next.recv(1 << 20)
    assert len(sent) == ended.sent_bytes == 2 * (64 + 2000) + 64
    assert sent[64 + 2000 + 64 : 2 * (64 + 2000)] == payload_of(3)


def test_frames_that_say_the_sender_waits_change_nothing(neighbours):
    one = neighbours()
    assert not isinstance(
        answered(one, lambda one: one.frame(WAITING) + one.frame(WAITING) + sound_round(one)), RingError
    )


def test_a_member_that_waits_tells_the_next(neighbours):
    one, ended = neighbours(), []

    def reduce():
        try:
            one.ring.all_reduce(np.ones(COUNT, np.float32), **CALL | {"stall_s": 20})
        except RingError as error:
            ended.append(error)

    caller = threading.Thread(target=reduce)
    caller.start()
    own = one.next.recv(64 + 2000, socket.MSG_WAITALL)
    waiting = one.next.recv(64, socket.MSG_WAITALL)
    one.ring.cancel()
    caller.join()

    assert [HEADER.unpack(frame[:48])[2] for frame in (own, waiting)] == [DATA, WAITING]
    assert [HEADER.unpack(frame[:48])[8] for frame in (own, waiting)] == [0, 1]
    assert ended[0].kind == "cancelled"


@pytest.mark.parametrize("size", [1, 3, 64, 65, 1000])
def test_bytes_may_come_in_pieces_of_any_size(neighbours, size):
    one, values = neighbours(), np.ones(COUNT, np.float32)
    member = threading.Thread(target=lambda: one.ring.all_reduce(values, **CALL))
    member.start()
    one.geometry = fingerprint(count=COUNT, chunk=8192, members=2, codec=0)

    data = sound_round(one)
    for at in range(0, len(data), size):
        one.previous.send(data[at : at + size])
    member.join()

    assert values.tolist() == [7.0] * 500 + [3.0] * 500


ATTACKS = {
    "no bloomery": (lambda one: os.urandom(4096), "garbage"),
    "http": (lambda one: b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n".ljust(64), "garbage"),
    "a frame of zeros": (lambda one: bytes(64), "garbage"),
    "a key of another run": (lambda one: one.frame(payload=payload_of(2), key=bytes(32)), "authentication"),
    "a key of another epoch": (lambda one: one.frame(payload=payload_of(2), mac_epoch=4), "authentication"),
    "an end under another key": (lambda one: one.frame(END, key=bytes(32)), "authentication"),
    "a sign of life under another key": (
        lambda one: one.frame(WAITING, key=bytes(32)) + one.frame(payload=payload_of(2)),
        "authentication",
    ),
    "a frame of another epoch": (lambda one: one.frame(payload=payload_of(2), epoch=4), "garbage"),
    "a frame of another round": (lambda one: one.frame(payload=payload_of(2), round=8), "garbage"),
    "a frame of another rank": (lambda one: one.frame(payload=payload_of(2), lane=0), "garbage"),
    "a frame of another array": (lambda one: one.frame(payload=payload_of(2), geometry=1), "garbage"),
    "a replayed frame": (lambda one: 2 * one.frame(payload=payload_of(2)), "authentication"),
    "a frame left out": (lambda one: one.frame() and one.frame(payload=payload_of(2)), "authentication"),
    "an oversized length": (lambda one: one.frame(payload=payload_of(2), length=0xFFFFFFFF), "garbage"),
    "a length one too long": (lambda one: one.frame(payload=payload_of(2) + b"!"), "garbage"),
    "a length of nothing": (lambda one: one.frame(), "garbage"),
    "an end with a payload": (lambda one: one.frame(END, payload=b"12345678"), "garbage"),
    "a step beyond the last": (lambda one: one.frame(payload=payload_of(2), step=2), "garbage"),
    "a step that is negative": (lambda one: one.frame(payload=payload_of(2), step=0xFFFFFFFF), "garbage"),
    "a chunk beyond the last": (lambda one: one.frame(payload=payload_of(2), chunk=1), "garbage"),
    "another type": (lambda one: one.frame(3), "garbage"),
    "another version": (lambda one: one.frame(payload=payload_of(2), version=2), "garbage"),
    "a chunk twice": (
        lambda one: one.frame(payload=payload_of(2)) + one.frame(payload=payload_of(2)),
        "garbage",
    ),
    "an end too early": (lambda one: one.frame(END), "garbage"),
    "values that are not finite": (
        lambda one: one.frame(payload=payload_of(2)[:-4] + b"\xff" * 4),
        "garbage",
    ),
    "a sum that is handed round and not finite": (
        lambda one: one.frame(payload=payload_of(2)[:-4] + b"\xff" * 4, step=1),
        "garbage",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_ends_the_round_and_names_the_previous(neighbours, attack):
    make_bytes, kind = ATTACKS[attack]

    ended = answered(neighbours(), make_bytes)

    assert isinstance(ended, RingError)
    assert (ended.kind, ended.culprit) == (kind, "previous")


def test_one_bit_anywhere_in_a_frame_is_noticed(neighbours):
    for bit in (0, 37, 8 * 8 + 1, 8 * 40, 8 * 48 + 3, 8 * 63, 8 * 64, 8 * 1000 + 5, 8 * 2063 + 7):

        def flipped(one, bit=bit):
            data = bytearray(one.frame(payload=payload_of(2)))
            data[bit // 8] ^= 1 << bit % 8
            return bytes(data)

        assert answered(neighbours(), flipped).kind in ("garbage", "authentication"), bit


def test_a_frame_of_an_earlier_round_is_refused_in_the_next(neighbours):
    one, recorded = neighbours(), []

    def first_round(one):
        recorded.append(sound_round(one))
        return recorded[0]

    assert not isinstance(answered(one, first_round), RingError)
    one.next.recv(1 << 20)

    assert answered(one, lambda one: recorded[0], round=ROUND + 1).kind == "garbage"


def test_a_frame_of_the_same_round_is_refused_when_it_is_played_again_later(neighbours):
    one, recorded = neighbours(), []
    answered(one, lambda one: recorded.append(sound_round(one)) or recorded[0])
    one.next.recv(1 << 20)

    assert answered(one, lambda one: recorded[0]).kind == "authentication"


def test_a_member_that_takes_nothing_stalls_the_one_before_it(neighbours):
    one, count = neighbours(), 10_000
    one.ends[3].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    one.geometry = fingerprint(count=count, chunk=8192, members=2, codec=0)
    payload = np.zeros(count // 2, np.float32).tobytes()
    one.previous.sendall(one.frame(payload=payload) + one.frame(payload=payload, step=1) + one.frame(END))

    with pytest.raises(RingError) as ended:
        one.ring.all_reduce(np.zeros(count, np.float32), **CALL | {"stall_s": 0.3})

    assert (ended.value.kind, ended.value.culprit) == ("stalled", "next")


def fingerprint(**layout):
    """Of an array and how it is cut; chunk: the least one, where none is asked for and the array is short."""
    return struct.unpack("<I", siphash128(bytes(16), struct.pack("<4Q", *layout.values()))[:4])[0]
