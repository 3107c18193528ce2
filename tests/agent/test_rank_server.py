"""The socket between parent and ranks: messages whole and in order, descriptors with them, ends noticed."""

from __future__ import annotations

import errno
import gc
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.protocol import example

from bloomery.agent.rank_server import RankGone, RankSent, RankServer, _duplicates
from bloomery.data.position import Position
from bloomery.diloco.agent_client import AgentClient, connect_agent
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import (
    MAX_BYTES,
    Abort,
    AbortAck,
    FlushRound,
    Hello,
    HopConnections,
    Moving,
    RankLeaves,
    Reduce,
    StartRound,
    StopTraining,
    decode_agent_message,
    descriptors_of,
    encode_local,
)

DEADLINE_S = 60.0

ATTEMPT = example.attempt(round=2, epoch=9, members=("b", "a"), weights=(0.25, 0.75))


@pytest.fixture
def events() -> queue.SimpleQueue[RankSent | RankGone]:
    return queue.SimpleQueue()


@pytest.fixture
def rank_server(events: queue.SimpleQueue[RankSent | RankGone]) -> Iterator[RankServer]:
    with RankServer(events.put) as opened:
        yield opened


def connected(
    rank_server: RankServer, events: queue.SimpleQueue[RankSent | RankGone], *, rank: int = 0
) -> AgentClient:
    link = connect_agent(rank=rank, world=2, path=rank_server.path)
    hello = events.get(timeout=DEADLINE_S)
    assert isinstance(hello, RankSent) and hello == RankSent(rank=rank, message=hello.message)
    assert hello.message == Hello(rank=rank, world=2, process=os.getpid())
    assert isinstance(link, AgentClient)
    return link


def reduce_over(*pairs: socket.socket) -> Reduce:
    following, preceding = pairs
    hop = HopConnections(
        rank=0,
        next_fds=(following.fileno(),),
        previous_fds=(preceding.fileno(),),
        send_keys=(bytes(range(32)),),
        receive_keys=(bytes(32),),
    )
    return Reduce(attempt=ATTEMPT, index=1, hops=(hop,), stall_s=5.0, deadline_s=60.0, norm_limit=None)


def test_descriptors_arrive_with_their_message_and_are_others_names_of_the_same_connection(
    rank_server, events
):
    link = connected(rank_server, events)
    here, there = socket.socketpair()
    with here, there:
        rank_server.send(reduce_over(here, there), rank=0)
        got = link.receive(DEADLINE_S)
        assert isinstance(got, Reduce) and got.attempt == ATTEMPT and got.index == 1
        (hop,) = got.hops
        assert hop.send_keys == (bytes(range(32)),) and hop.receive_keys == (bytes(32),)
        with (
            socket.socket(fileno=hop.next_fds[0]) as here_too,
            socket.socket(fileno=hop.previous_fds[0]) as there_too,
        ):
            here_too.sendall(b"through")
            assert there_too.recv(7) == b"through"
            assert not os.get_inheritable(here_too.fileno())
        here.close()
        there.settimeout(DEADLINE_S)
        assert there.recv(1) == b"", "a copy of the other end is open still"
    link.close()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Nothing can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_connections_are_not_handed_over_and_all_else_goes_on(rank_server, events):
    link = connected(rank_server, events)
    here, there = socket.socketpair()
    with here, there:
        with no_descriptors_left(), pytest.raises(PeerError, match="cannot be handed to a rank") as told:
            rank_server.send(reduce_over(here, there), rank=0)
        assert "ulimit -n" in told.value.remedy
        rank_server.send(Abort(epoch=9, why="so this attempt is over"))
        assert isinstance(link.receive(DEADLINE_S), Abort)
        rank_server.send(reduce_over(here, there), rank=0)
        again = link.receive(DEADLINE_S)
        assert isinstance(again, Reduce)
        for fd in (*again.hops[0].next_fds, *again.hops[0].previous_fds):
            os.close(fd)
    link.close()


def test_where_not_all_copies_can_be_made_none_stays_open(monkeypatch):
    copies, copy = [], os.dup

    def dup(fd):
        if len(copies) == 3:
            raise OSError(errno.EMFILE, "Too many open files")
        copies.append(copy(fd))
        return copies[-1]

    here, there = socket.socketpair()
    with here, there, pytest.raises(PeerError, match="2 connections cannot be handed to a rank"):
        monkeypatch.setattr(os, "dup", dup)
        _duplicates([here.fileno(), there.fileno()], times=2)
    monkeypatch.undo()
    for fd in copies:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_rank_that_comes_while_no_descriptor_is_left_is_let_in_later(rank_server, events, caplog):
    link = connected(rank_server, events)
    late = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with no_descriptors_left():
        late.connect(str(rank_server.path))
        late.send(encode_local(Hello(rank=1, world=2, process=7)))
        until_s = time.monotonic() + DEADLINE_S
        while "a rank cannot connect" not in caplog.text:
            assert time.monotonic() < until_s
        link.report_activity("step", step=1)  # who is here is heard meanwhile
        assert events.get(timeout=DEADLINE_S) == RankSent(rank=0, message=Moving(activity="step", step=1))
    assert events.get(timeout=DEADLINE_S) == RankSent(rank=1, message=Hello(rank=1, world=2, process=7))
    late.close()
    link.close()


def test_descriptors_without_a_place_are_refused():
    here, there = socket.socketpair()
    with here, there:
        reduce = reduce_over(here, there)
        assert descriptors_of(reduce) == (here.fileno(), there.fileno())
        with pytest.raises(PeerError):
            decode_agent_message(encode_local(reduce), [here.fileno()])
        with pytest.raises(PeerError):
            decode_agent_message(encode_local(FlushRound(round=1)), [here.fileno()])


def test_messages_keep_their_order_and_peek_takes_nothing_away(rank_server, events):
    link = connected(rank_server, events)
    for epoch in range(500):
        rank_server.send(Abort(epoch=epoch, why=""))
    first = link.receive(DEADLINE_S)
    assert first == Abort(epoch=0, why="")
    while len(link.peek()) < 499:
        pass
    assert link.receive(0.0) == Abort(epoch=1, why="")
    assert [told.epoch for told in link.peek()] == list(range(2, 500))
    acknowledged = [events.get(timeout=DEADLINE_S).message for _ in range(500)]
    assert acknowledged == [AbortAck(epoch=epoch) for epoch in range(500)]
    link.close()


def test_a_rank_that_does_not_read_delays_nobody(rank_server, events):
    deaf, quick = connected(rank_server, events, rank=0), connected(rank_server, events, rank=1)
    long = StartRound(
        round=1,
        position=Position(),
        live=2,
        samples=tuple(range(2 * i, 2 * i + 1) for i in range(12_000)),
        number=0,
    )
    for _ in range(40):
        rank_server.send(long, rank=0)
    rank_server.send(FlushRound(round=1), rank=1)
    assert quick.receive(DEADLINE_S) == FlushRound(round=1)
    assert [deaf.receive(DEADLINE_S) for _ in range(40)] == [long] * 40
    deaf.close()
    quick.close()


def test_a_killed_rank_is_noticed_by_its_socket(rank_server, events):
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from bloomery.diloco.agent_client import connect_agent\n"
        "connect_agent(rank=5, world=8, path=Path(sys.argv[1])).receive(1e6)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", script, str(rank_server.path)])
    try:
        assert events.get(timeout=DEADLINE_S) == RankSent(
            rank=5, message=Hello(rank=5, world=8, process=rank.pid)
        )
        rank.send_signal(signal.SIGKILL)
        gone = events.get(timeout=DEADLINE_S)
        assert isinstance(gone, RankGone) and gone.rank == 5
    finally:
        rank.kill()
        rank.wait()


def test_connections_that_wait_for_a_rank_that_is_sent_away_are_closed(rank_server, events):
    hello = encode_local(Hello(rank=0, world=2, process=os.getpid()))
    here, there = socket.socketpair()
    with here, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(str(rank_server.path))
        rank.send(hello)
        assert isinstance(events.get(timeout=DEADLINE_S), RankSent)
        with there:
            for _ in range(2000):  # more than its socket holds
                rank_server.send(FlushRound(round=1), rank=0)
            rank_server.send(reduce_over(here, there), rank=0)
        rank.send(hello)  # out of turn
        assert isinstance(events.get(timeout=DEADLINE_S), RankGone)
        here.settimeout(DEADLINE_S)
        assert here.recv(1) == b"", "nobody has the other end any more"


def test_a_rank_whose_parent_ends_is_told_what_was_said_before(events):
    rank_server = RankServer(events.put)
    link = connected(rank_server, events)
    rank_server.send(StopTraining(why="over", failed=False))
    rank_server.close()
    assert link.receive(DEADLINE_S) == StopTraining(why="over", failed=False)
    with pytest.raises(PeerError, match="agent of this rank is gone"):
        link.receive(DEADLINE_S)
    with pytest.raises(PeerError, match="agent of this rank is gone"):
        link.report_activity("step", step=1)
    link.close()
    assert not rank_server.path.parent.exists()


def test_a_rank_answers_an_abort_while_it_computes(rank_server, events):
    link = connected(rank_server, events)
    rank_server.send(Abort(epoch=7, why=""))  # it hears nothing: its main thread is at something else
    assert events.get(timeout=DEADLINE_S) == RankSent(rank=0, message=AbortAck(epoch=7))
    assert link.receive(DEADLINE_S) == Abort(epoch=7, why="")
    link.close()


def test_last_words_are_heard_though_nobody_is_left_to_be_told(rank_server, events):
    link = connected(rank_server, events)
    for round in range(200):  # unheard when the rank ends
        rank_server.send(FlushRound(round=round))
    for step in range(200):
        link.report_activity("step", step=step)
    link.leave("SIGTERM")
    link.close()
    rank_server.send(StopTraining(why="", failed=False))
    heard = [events.get(timeout=DEADLINE_S) for _ in range(202)]
    assert heard[:200] == [
        RankSent(rank=0, message=Moving(activity="step", step=step)) for step in range(200)
    ]
    assert heard[200] == RankSent(rank=0, message=RankLeaves(why="SIGTERM"))
    assert isinstance(heard[201], RankGone)


def test_last_words_of_a_parent_are_heard_though_it_heard_nothing(events):
    rank_server = RankServer(events.put)
    link = connected(rank_server, events)
    rank_server.send(StopTraining(why="over", failed=False))
    rank_server.close()
    with suppress(PeerError):
        link.report_activity("step", step=1)
    while (told := link.receive(DEADLINE_S)) is None:
        pass
    assert told == StopTraining(why="over", failed=False)
    link.close()


@pytest.mark.parametrize(
    "content", [b"garbage", encode_local(FlushRound(round=1)), encode_local(Moving(activity="x", step=0))]
)
def test_a_process_that_does_not_begin_with_hello_is_sent_away_and_others_stay(rank_server, events, content):
    link = connected(rank_server, events)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(rank_server.path))
        stranger.settimeout(DEADLINE_S)
        stranger.send(content)
        assert stranger.recv(100) == b""
    link.report_activity("step", step=1)
    assert events.get(timeout=DEADLINE_S) == RankSent(rank=0, message=Moving(activity="step", step=1))
    link.close()


def test_who_has_not_begun_with_hello_is_told_nothing(rank_server, events):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(rank_server.path))
        link = connected(rank_server, events)  # it is accepted after the stranger
        rank_server.send(FlushRound(round=1))
        assert link.receive(DEADLINE_S) == FlushRound(round=1)
        with pytest.raises(BlockingIOError):
            stranger.recv(100, socket.MSG_DONTWAIT)
        link.close()


def test_descriptors_that_come_with_a_message_out_of_turn_are_closed(rank_server, events):
    here, there = socket.socketpair()
    with here, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(rank_server.path))
        stranger.settimeout(DEADLINE_S)
        socket.send_fds(stranger, [b"garbage"], [there.fileno()])
        there.close()
        assert stranger.recv(100) == b""
        here.settimeout(DEADLINE_S)
        assert here.recv(1) == b"", "the other end is open still"


def test_no_parent_is_one_message_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOOMERY_PARENT", str(tmp_path / "nobody"))
    with pytest.raises(PeerError, match="No agent listens") as refused:
        connect_agent(rank=0, world=1)
    assert refused.value.remedy


def test_the_socket_lies_where_only_this_user_may_go(rank_server):
    assert rank_server.path.parent.stat().st_mode & 0o777 == 0o700


def test_what_a_rank_said_last_is_heard_before_it_counts_as_gone(rank_server, events):
    link = connected(rank_server, events)
    link.leave("SIGTERM")
    link.close()

    rank_server.wait_until_gone(DEADLINE_S)

    said = [events.get_nowait(), events.get_nowait()]
    assert said[0] == RankSent(rank=0, message=RankLeaves(why="SIGTERM")) and isinstance(said[1], RankGone)


def test_a_rank_whose_message_is_too_long_is_dropped_and_reported(rank_server, events):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(str(rank_server.path))
        rank.sendall(encode_local(Hello(rank=3, world=4, process=os.getpid())))
        assert events.get(timeout=DEADLINE_S).rank == 3
        rank.sendall(b" " * (MAX_BYTES + 1))
        gone = events.get(timeout=DEADLINE_S)
        assert isinstance(gone, RankGone) and gone.rank == 3 and "longer than" in gone.why
        assert rank.recv(1) == b""


def test_an_agent_that_waits_for_its_ranks_is_woken_by_the_end_of_the_last(rank_server, events):
    links = [connected(rank_server, events, rank=rank) for rank in range(2)]
    waiting = threading.Thread(target=rank_server.wait_until_gone, args=(10 * DEADLINE_S,), daemon=True)
    waiting.start()
    links[0].close()
    assert isinstance(events.get(timeout=DEADLINE_S), RankGone) and waiting.is_alive()
    links[1].close()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()


def test_what_a_killed_parent_left_is_removed_and_what_others_hold_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    abandoned, young = tmp_path / "bloomery-peer-abandoned", tmp_path / "bloomery-peer-young"
    for left in (abandoned, young):
        left.mkdir()
        (left / "parent").touch()
    with RankServer(lambda event: None) as living:
        long_ago = time.time() - 3600
        for place in (abandoned, living.path.parent):
            os.utime(place, (long_ago, long_ago))
        with RankServer(lambda event: None):
            assert not abandoned.exists() and young.exists() and living.path.exists()


def test_a_process_that_fails_before_it_closes_its_server_ends() -> None:
    fails = (
        "import queue\n"
        "from bloomery.agent.rank_server import RankServer\n"
        "server = RankServer(queue.SimpleQueue().put)\n"
        "raise SystemExit(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", fails], timeout=DEADLINE_S, check=False)
    assert ended.returncode == 3


def test_ranks_that_an_agent_lets_go_at_its_end_are_not_told_to_it_as_gone(events):
    rank_server = RankServer(events.put)
    link = connected(rank_server, events)
    rank_server.close()
    assert events.empty() and not rank_server._thread.is_alive()
    link.close()


def test_a_rank_for_which_too_many_messages_wait_is_let_go(rank_server, events, monkeypatch):
    monkeypatch.setattr("bloomery.agent.rank_server._MAX_UNSENT", 10)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.connect(str(rank_server.path))
        deaf.send(encode_local(Hello(rank=3, world=4, process=7)))
        assert isinstance(events.get(timeout=DEADLINE_S), RankSent)
        for _ in range(2000):  # more than its socket holds
            rank_server.send(FlushRound(round=1))
        gone = events.get(timeout=DEADLINE_S)
        assert isinstance(gone, RankGone) and gone.rank == 3
        assert gone.why.endswith(" messages wait to be sent to it")


def test_a_server_that_is_closed_leaves_no_descriptor_open() -> None:
    def opened() -> set[str]:
        return {entry.name for entry in Path("/proc/self/fd").iterdir()}

    gc.collect()
    before = opened()
    with RankServer(lambda event: None):
        assert len(opened()) > len(before)
    assert opened() <= before


def test_a_directory_of_temporary_files_whose_path_is_too_long_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("d" * 100)))
    (tmp_path / ("d" * 100)).mkdir()
    with pytest.raises(PeerError, match=r"Nothing can listen at .*/parent") as refused:
        RankServer(lambda event: None)
    assert "TMPDIR" in refused.value.remedy and not [*(tmp_path / ("d" * 100)).iterdir()]
