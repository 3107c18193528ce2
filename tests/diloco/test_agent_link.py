"""A rank's connection to its agent: whose it may be, what ends it, and how long a rank waits for what."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.diloco import agent_client
from bloomery.diloco.agent_client import AgentClient, CommandInbox, connect_agent
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import (
    Abort,
    AbortAck,
    FlushRound,
    Hello,
    StopTraining,
    decode_rank_message,
    encode_local,
)

DEADLINE_S = 60.0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    """Listens where `tmp_path / "agent"` is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        listener.settimeout(DEADLINE_S)
        yield listener


@pytest.fixture
def ends() -> Iterator[tuple[AgentClient, socket.socket]]:
    mine, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(0.5)
    client = AgentClient(mine)
    with agents:
        agents.settimeout(DEADLINE_S)
        yield client, agents
        client.close()


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_rank_says_at_once_which_one_it_is(
    agent: socket.socket, tmp_path: Path, by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "agent"
    monkeypatch.setenv("BLOOMERY_PARENT", str(place if by_environment else tmp_path / "another"))
    client = connect_agent(rank=3, world=8, path=None if by_environment else place)
    with agent.accept()[0] as accepted:
        said = decode_rank_message(accepted.recv(1 << 16))
        assert said == Hello(rank=3, world=8, process=os.getpid())
        client.close()
        assert accepted.recv(1) == b""


def test_where_nobody_listens_the_place_and_the_cause_are_told_and_nothing_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, opened = tmp_path / "agent", list[socket.socket]()
    make = socket.socket
    monkeypatch.setattr(socket, "socket", lambda *kind: opened.append(make(*kind)) or opened[-1])
    with pytest.raises(PeerError) as absent:
        connect_agent(rank=0, world=1, path=place)
    assert absent.value.message == f"No agent listens at BLOOMERY_PARENT={place}: No such file or directory."
    assert "same command starts the peer again" in absent.value.remedy
    assert [connection.fileno() for connection in opened] == [-1]


@pytest.mark.parametrize(("user", "is_trusted"), [(0, True), (1234, True), (4321, False)])
def test_another_users_process_is_told_nothing(
    agent: socket.socket, tmp_path: Path, user: int, is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = SimpleNamespace(pack=struct.pack, unpack=lambda layout, content: (17, user, 17))
    monkeypatch.setattr(agent_client, "struct", peers)
    monkeypatch.setattr(agent_client.os, "getuid", lambda: 1234)
    place = tmp_path / "agent"
    if is_trusted:
        connect_agent(rank=0, world=1, path=place).close()
        return
    with pytest.raises(PeerError) as refused:
        connect_agent(rank=0, world=1, path=place)
    assert refused.value.message == f"The process at BLOOMERY_PARENT={place} belongs to another user."
    assert "same command starts the peer again" in refused.value.remedy
    with agent.accept()[0] as accepted:
        assert accepted.recv(1 << 16) == b""


def test_a_rank_waits_as_long_as_it_takes_to_read_and_a_minute_to_send(
    ends: tuple[AgentClient, socket.socket],
) -> None:
    client, _ = ends
    assert client._socket.gettimeout() is None
    limit = client._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
    assert struct.unpack("ll", limit) == (60, 0)


def test_an_abort_is_answered_before_the_training_reads_it(ends: tuple[AgentClient, socket.socket]) -> None:
    client, agents = ends
    agents.send(encode_local(Abort(epoch=5, why="a test")))
    assert decode_rank_message(agents.recv(1 << 16)) == AbortAck(epoch=5)
    agents.send(encode_local(FlushRound(round=2)))
    assert client.receive(DEADLINE_S) == Abort(epoch=5, why="a test")
    assert client.receive(DEADLINE_S) == FlushRound(round=2)
    assert client.receive(0.0) is None and client.receive(-1.0) is None and client.peek() == ()


def test_an_agent_that_died_without_reading_what_it_was_told_is_heard_to_its_end() -> None:
    mine, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.send(b"which it never reads")
    agents.send(encode_local(FlushRound(round=1)))
    agents.close()
    with closing(AgentClient(mine)) as client:
        assert client.receive(DEADLINE_S) == FlushRound(round=1)
        with pytest.raises(PeerError, match=r"agent of this rank is gone\."):
            client.receive(DEADLINE_S)


def test_an_agent_hears_of_a_rank_that_closes_its_connection_while_it_listens(
    ends: tuple[AgentClient, socket.socket],
) -> None:
    client, agents = ends
    agents.send(encode_local(Abort(epoch=5, why="a test")))
    assert decode_rank_message(agents.recv(1 << 16)) == AbortAck(epoch=5)
    assert client.receive(DEADLINE_S) == Abort(epoch=5, why="a test")
    client.close()
    agents.settimeout(5.0)
    assert agents.recv(1) == b""


def test_what_an_agent_said_before_it_died_is_read_and_then_its_death_each_time(
    ends: tuple[AgentClient, socket.socket],
) -> None:
    client, agents = ends
    agents.send(encode_local(FlushRound(round=1)))
    agents.close()
    with client._arrived:
        assert client._arrived.wait_for(lambda: client._failure, DEADLINE_S)
    assert client.peek() == (FlushRound(round=1),)
    assert client.receive(DEADLINE_S) == FlushRound(round=1)
    for ask in (lambda: client.receive(DEADLINE_S), client.peek, lambda: client.receive(0.0)):
        with pytest.raises(PeerError, match="agent of this rank is gone") as gone:
            ask()
        assert "same command starts the peer again" in gone.value.remedy
    with pytest.raises(PeerError, match=r"The agent of this rank is gone \(Broken pipe\)"):
        client.leave("enough")


def test_what_is_no_message_ends_the_connection_and_its_descriptors_are_closed(
    ends: tuple[AgentClient, socket.socket],
) -> None:
    client, agents = ends
    reading, writing = os.pipe()
    socket.send_fds(agents, [b"garbage"], [writing])
    os.close(writing)
    os.set_blocking(reading, False)
    with pytest.raises(PeerError):
        client.receive(DEADLINE_S)
    assert os.read(reading, 1) == b"", "nobody has the other end open"
    os.close(reading)


class Silent:
    """An agent that says nothing while a made-up clock goes on, and then one thing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, says_at_s: float) -> None:
        self.now, self.says_at_s = 1000.0, 1000.0 + says_at_s
        self.waits_s, self.left = list[float](), list[str]()
        monkeypatch.setattr(agent_client, "time", SimpleNamespace(monotonic=lambda: self.now))

    def receive(self, timeout_s: float) -> Any:
        self.waits_s.append(timeout_s)
        if self.now >= self.says_at_s:
            return FlushRound(round=1)
        self.now += 25.0
        return None

    def peek(self) -> tuple[Any, ...]:
        return ()

    def leave(self, why: str) -> None:
        self.left.append(why)


def test_a_rank_that_waits_says_every_minute_what_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Silent(monkeypatch, says_at_s=200.0)
    asked = list[float]()
    inbox = CommandInbox(agent, lambda value: [value], asked_to_stop=lambda: asked.append(agent.now) or "")  # type: ignore[arg-type]
    assert inbox.wait("round 3 to begin") == FlushRound(round=1)
    assert caplog.messages == [f"waiting for round 3 to begin since {s} s" for s in (75, 125, 200)]
    assert set(agent.waits_s) == {0.5} and asked == [1000.0 + 25.0 * n for n in range(9)]


def test_a_rank_waits_for_a_day_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "_REPORT_S", 1e9)
    day = Silent(monkeypatch, says_at_s=24 * 3600.0)
    assert CommandInbox(day, lambda value: [value]).wait("x") == FlushRound(round=1)  # type: ignore[arg-type]
    never = Silent(monkeypatch, says_at_s=1e9)
    with pytest.raises(PeerError) as gave_up:
        CommandInbox(never, lambda value: [value]).wait("round 3 to begin")  # type: ignore[arg-type]
    assert never.now == 1000.0 + 24 * 3600.0 + 25.0
    assert gave_up.value.message == "The agent sent nothing for 24 hours: waited for round 3 to begin."
    assert "Is the coordinator up?" in gave_up.value.remedy


def test_a_rank_that_never_gets_what_the_first_one_got_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Silent(monkeypatch, says_at_s=1e9)
    with pytest.raises(PeerError, match="received different commands") as told:
        CommandInbox(agent, lambda count: [1, count]).between_steps()  # type: ignore[arg-type]
    assert "same command starts the peer again" in told.value.remedy
    assert agent.waits_s == [120.0]


def test_whether_it_is_asked_to_stop_is_looked_up_twice_a_second_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, answers = Silent(monkeypatch, says_at_s=0.0), iter(["", "", "signal 15"])
    asked = list[float]()
    inbox = CommandInbox(
        agent,  # type: ignore[arg-type]
        lambda value: [value],
        asked_to_stop=lambda: asked.append(agent.now) or next(answers),
    )
    for now in (0.0, 0.4, 0.5, 0.9, 1.0, 2.0, 3.0):
        agent.now = 1000.0 + now
        inbox._pass_on_stop()
    assert asked == [1000.0, 1000.5, 1001.0] and agent.left == ["signal 15"]


def test_a_stop_ends_a_ring_wherever_it_stands_among_what_the_agent_said() -> None:
    said = (FlushRound(round=1), Abort(epoch=6, why=""), StopTraining(why="enough", failed=False))
    agent = SimpleNamespace(peek=lambda: said)
    polled = list[float]()
    inbox = CommandInbox(agent, lambda value: [value])  # type: ignore[arg-type]
    assert not inbox.while_reducing(7, lambda timeout_s: bool(polled.append(timeout_s)))
    assert polled == [0.02]
