"""Messages between a rank and its agent on one machine: descriptors, lengths and the direction of each."""

from __future__ import annotations

import msgspec
import pytest
from tests.protocol import example

from bloomery.data.position import Position
from bloomery.protocol.encoding import (
    TEXT_AT_MOST,
    ProtocolError,
    encode,
)
from bloomery.protocol.rank_messages import (
    MAX_BYTES,
    AbortAck,
    DataIdentity,
    FlushRound,
    HopConnections,
    Reduce,
    StartRound,
    decode_agent_message,
    decode_rank_message,
    descriptors_of,
    encode_local,
)

HOPS = (
    HopConnections(
        rank=0, next_fds=(3, 4), previous_fds=(5,), send_keys=(bytes(32),) * 2, receive_keys=(bytes(32),)
    ),
    HopConnections(
        rank=1, next_fds=(6,), previous_fds=(7,), send_keys=(bytes(32),), receive_keys=(bytes(32),)
    ),
)


REDUCE = Reduce(
    attempt=example.attempt(round=2, epoch=5, members=("b", "a"), weights=(0.3, 0.7)),
    index=1,
    hops=HOPS,
    stall_s=5.0,
    deadline_s=60.0,
    norm_limit=None,
)


def test_descriptors_travel_in_the_order_in_which_they_are_taken():
    assert descriptors_of(REDUCE) == (3, 4, 5, 6, 7)
    taken = decode_agent_message(encode(REDUCE), [13, 14, 15, 16, 17])
    assert [(hop.next_fds, hop.previous_fds) for hop in taken.hops] == [((13, 14), (15,)), ((16,), (17,))]


@pytest.mark.parametrize("count", [4, 6])
def test_as_many_descriptors_come_as_there_are_keys(count):
    with pytest.raises(ProtocolError):
        decode_agent_message(encode(REDUCE), list(range(3, 3 + count)))


@pytest.mark.parametrize(("send", "receive"), [(1, 2), (3, 0), (2, 2), (1, 1)])
def test_each_connection_of_a_hop_has_its_key(send: int, receive: int):
    keys = {"send_keys": (bytes(32),) * send, "receive_keys": (bytes(32),) * receive}
    with pytest.raises(ValueError, match="each connection has one key"):
        HopConnections(rank=0, next_fds=(3, 4), previous_fds=(5,), **keys)


def test_no_descriptor_comes_with_a_message_that_has_none():
    with pytest.raises(ProtocolError):
        decode_rank_message(encode(AbortAck(epoch=1)), [3])
    with pytest.raises(ProtocolError):
        decode_agent_message(encode(FlushRound(round=1)), [3])


@pytest.mark.parametrize("count", [253, 254])
def test_one_message_carries_as_many_descriptors_as_the_kernel_passes(count):
    keys = (bytes(32),)
    many = (
        HopConnections(
            rank=0, next_fds=tuple(range(253)), previous_fds=(), send_keys=keys * 253, receive_keys=()
        ),
        HopConnections(
            rank=1,
            next_fds=tuple(range(count - 253)),
            previous_fds=(),
            send_keys=keys * (count - 253),
            receive_keys=(),
        ),
    )
    reduce = msgspec.structs.replace(REDUCE, hops=many)
    if count == 253:
        assert len(descriptors_of(reduce)) == 253
    else:
        with pytest.raises(ValueError, match="253 fit"):
            descriptors_of(reduce)


def test_a_message_of_any_length_that_the_kernel_takes_at_once_is_sent():
    assert MAX_BYTES == 160 * 1024  # the buffer of a socket by default is 208 KiB, with what the kernel adds
    identity = {f"{number:04}": "x" * 2_000 for number in range(81)} | {"y": ""}
    left = MAX_BYTES - len(encode(DataIdentity(identity=identity)))
    assert 0 < left < TEXT_AT_MOST
    identity["y"] = "z" * left
    assert len(encode_local(DataIdentity(identity=identity))) == MAX_BYTES
    identity["y"] += "z"
    with pytest.raises(ValueError, match="fit"):
        encode_local(DataIdentity(identity=identity))


def test_a_message_that_the_socket_cannot_take_is_not_sent():
    samples = tuple(range(10**9 + 2 * start, 10**9 + 2 * start + 1) for start in range(10_000))
    with pytest.raises(ValueError, match=f"{MAX_BYTES} fit"):
        encode_local(StartRound(round=1, position=Position(), live=1, samples=samples, number=0))


def test_a_rank_cannot_send_what_an_agent_sends():
    with pytest.raises(ProtocolError):
        decode_rank_message(encode(FlushRound(round=1)))
    with pytest.raises(ProtocolError):
        decode_agent_message(encode(AbortAck(epoch=1)))
