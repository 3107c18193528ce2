"""What a rank tells its agent, and what it hears when that ends, over a pair of sockets."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.protocol import example

from bloomery.data.position import Position
from bloomery.diloco.agent_client import AgentClient
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import (
    DataIdentity,
    FlushRound,
    Moving,
    RankLeaves,
    RankMessage,
    RankReady,
    RankRingDone,
    RankRingFailed,
    StateCopied,
    StateRefused,
    decode_rank_message,
    encode_local,
)

DEADLINE_S = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[AgentClient, socket.socket]]:
    mine, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = AgentClient(mine)
    with agents:
        agents.settimeout(DEADLINE_S)
        yield client, agents
        client.close()


def test_what_a_rank_tells_reaches_its_agent_as_it_was_told(ends: tuple[AgentClient, socket.socket]) -> None:
    client, agents = ends

    def heard() -> RankMessage:
        return decode_rank_message(agents.recv(1 << 16))

    client.report_activity("step", step=3)
    assert heard() == Moving(activity="step", step=3)
    client.report_data_identity({"data": "x"})
    assert heard() == DataIdentity(identity={"data": "x"})
    for position in (None, Position(consumed=9, holes=(range(4, 6),))):
        held = example.state_held(round=2, digest="ab", step=3, samples=4, position=position, saves=(1, 2))
        client.report_state(round=2, digest="ab", step=3, samples=4, position=position, saves=[1, 2])
        assert heard() == held
    client.report_copy(round=2, digest="ab", directory=Path("/tmp/x"))
    assert heard() == StateCopied(round=2, digest="ab", directory=Path("/tmp/x"))
    client.refuse_state("another digest")
    assert heard() == StateRefused(why="another digest")
    client.offer_part(example.ready(round=3), number=7)
    assert heard() == RankReady(ready=example.ready(round=3), number=7)
    client.report_ring_done(epoch=7, digest="cd")
    assert heard() == RankRingDone(epoch=7, digest="cd")
    client.report_ring_failed(epoch=7, kind="stalled", culprit="next", why="no byte")
    assert heard() == RankRingFailed(epoch=7, kind="stalled", culprit="next", why="no byte")
    client.leave("SIGTERM")
    assert heard() == RankLeaves(why="SIGTERM")


def test_a_rank_that_waits_is_woken_by_the_end_of_its_agent(ends: tuple[AgentClient, socket.socket]) -> None:
    client, agents = ends
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                heard.put(client.receive(10 * DEADLINE_S))
        except PeerError as error:
            heard.put(error.message)

    threading.Thread(target=listen, daemon=True).start()
    agents.send(encode_local(FlushRound(round=1)))
    assert heard.get(timeout=DEADLINE_S) == FlushRound(round=1)
    agents.close()
    assert "agent of this rank is gone" in heard.get(timeout=DEADLINE_S)
