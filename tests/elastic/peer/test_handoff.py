"""The socket between parent and ranks: messages whole and in order, descriptors with them, ends noticed."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.position import Position
from bloomery.elastic.peer.handoff import Gone, Handoff, Heard
from bloomery.elastic.peer.messages import (
    MAX_BYTES,
    Heeded,
    Hello,
    Holding,
    Leave,
    Moving,
    RingDone,
    RingFailed,
    decode,
    descriptors_of,
    encode,
)
from bloomery.elastic.peer.parentlink import ParentLink, connect_parent
from bloomery.elastic.records import Attempt, Commit, Ready, Shares
from bloomery.elastic.seam import Abort, Committed, Go, Halt, Hop, Hurry, Reduce, Replace
from bloomery.errors import PeerError

DEADLINE_S = 60.0

POSITION = Position(consumed=7, skips=(range(3, 5),), holes=(range(6, 8),))
ATTEMPT = Attempt(round=2, epoch=9, members=("b", "a"), weights=(0.25, 0.75), left_out={"c": "norm 1e9"})
COMMIT = Commit(
    round=2,
    epoch=9,
    members=("b", "a"),
    digest="d1",
    position=POSITION,
    sources=("a",),
    left_out={"c": "norm 1e9"},
    rewind_to=1,
    save=True,
    why="spike",
)
READY = Ready(
    peer="a",
    round=2,
    steps=5,
    tokens=640,
    spent=(range(0, 5),),
    norm=1.5,
    finite=True,
    wants_save=True,
    rewind_to=1,
    kept=(range(8, 9),),
    skip=(range(2, 4),),
    why="spike",
)
MESSAGES = [
    Hello(rank=1, world=2, process=77),
    Moving(phase="step", step=3),
    Holding(round=2, digest="d1", step=10, directory=Path("/dev/shm/x"), samples=8),
    Holding(round=-1, digest="", step=0, directory=None, samples=8),
    READY,
    RingDone(epoch=9, digest="d1"),
    RingFailed(epoch=9, kind="stall", culprit="b", why="no byte for 5 s"),
    RingFailed(epoch=9, kind="cancelled", culprit=None, why=""),
    Heeded(epoch=9),
    Leave(why="SIGTERM"),
    Go(
        shares=Shares(round=3, position=POSITION, shares={"a": (range(8, 16),), "b": ()}, live=2),
        samples=(range(8, 16),),
    ),
    Replace(round=2, digest="ab12", position=POSITION, directory=Path("/tmp/state"), why="it differs"),
    Hurry(round=3),
    Abort(epoch=9, why="b is gone"),
    Committed(commit=COMMIT, included=True),
    Halt(why="the samples are done", failed=False),
]


@pytest.fixture
def events() -> queue.SimpleQueue[Heard | Gone]:
    return queue.SimpleQueue()


@pytest.fixture
def handoff(events: queue.SimpleQueue[Heard | Gone]) -> Iterator[Handoff]:
    with Handoff(events.put) as opened:
        yield opened


def connected(handoff: Handoff, events: queue.SimpleQueue[Heard | Gone], *, rank: int = 0) -> ParentLink:
    link = connect_parent(rank=rank, world=2, path=handoff.path)
    hello = events.get(timeout=DEADLINE_S)
    assert isinstance(hello, Heard) and hello == Heard(rank=rank, message=hello.message)
    assert hello.message == Hello(rank=rank, world=2, process=os.getpid())
    assert isinstance(link, ParentLink)
    return link


def reduce_over(*pairs: socket.socket) -> Reduce:
    following, preceding = pairs
    hop = Hop(
        lane=0,
        next_fds=(following.fileno(),),
        previous_fds=(preceding.fileno(),),
        send_keys=(bytes(range(32)),),
        receive_keys=(bytes(32),),
    )
    return Reduce(attempt=ATTEMPT, index=1, hops=(hop,), stall_s=5.0, deadline_s=60.0)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_each_message_comes_back_as_it_went(message):
    assert decode(encode(message)) == message


def test_a_norm_that_is_no_number_comes_back_as_infinite():
    lost = Ready(peer="a", round=1, steps=1, tokens=1, spent=(), norm=float("nan"), finite=False)
    again = decode(encode(lost))
    assert isinstance(again, Ready)
    assert again.norm == float("inf") and not again.finite


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(content):
    with pytest.raises(PeerError):
        decode(content)


@given(st.data())
def test_a_message_that_was_changed_is_refused_or_means_something(data):
    message = data.draw(st.sampled_from(MESSAGES))
    content = bytearray(encode(message))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    try:
        again = decode(bytes(content))
    except PeerError:
        return
    assert decode(encode(again)) == again


def test_a_missing_or_added_field_is_refused():
    with pytest.raises(PeerError):
        decode(b'{"is":"hurry"}')
    with pytest.raises(PeerError):
        decode(b'{"is":"hurry","round":1,"now":true}')
    with pytest.raises(PeerError):
        decode(b'{"is":"hurry","round":true}')


def test_descriptors_arrive_with_their_message_and_are_others_names_of_the_same_connection(handoff, events):
    link = connected(handoff, events)
    here, there = socket.socketpair()
    with here, there:
        handoff.tell(reduce_over(here, there), rank=0)
        got = link.hear(DEADLINE_S)
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
    link.close()


def test_descriptors_without_a_place_are_refused():
    here, there = socket.socketpair()
    with here, there:
        reduce = reduce_over(here, there)
        assert descriptors_of(reduce) == (here.fileno(), there.fileno())
        with pytest.raises(PeerError):
            decode(encode(reduce), [here.fileno()])
        with pytest.raises(PeerError):
            decode(encode(Hurry(round=1)), [here.fileno()])


def test_messages_keep_their_order_and_peek_takes_nothing_away(handoff, events):
    link = connected(handoff, events)
    for epoch in range(500):
        handoff.tell(Abort(epoch=epoch, why=""))
    first = link.hear(DEADLINE_S)
    assert first == Abort(epoch=0, why="")
    while len(link.peek()) < 499:
        pass
    assert link.hear(0.0) == Abort(epoch=1, why="")
    assert [told.epoch for told in link.peek()] == list(range(2, 500))
    acknowledged = [events.get(timeout=DEADLINE_S).message for _ in range(500)]
    assert acknowledged == [Heeded(epoch=epoch) for epoch in range(500)]
    link.close()


def test_a_rank_that_does_not_read_delays_nobody(handoff, events):
    deaf, quick = connected(handoff, events, rank=0), connected(handoff, events, rank=1)
    long = replace(next(one for one in MESSAGES if isinstance(one, Replace)), why="y" * (MAX_BYTES - 1000))
    for _ in range(40):
        handoff.tell(long, rank=0)
    handoff.tell(Hurry(round=1), rank=1)
    assert quick.hear(DEADLINE_S) == Hurry(round=1)
    assert [deaf.hear(DEADLINE_S) for _ in range(40)] == [long] * 40
    deaf.close()
    quick.close()


def test_a_killed_rank_is_noticed_by_its_socket(handoff, events):
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from bloomery.elastic.peer.parentlink import connect_parent\n"
        "connect_parent(rank=5, world=8, path=Path(sys.argv[1])).hear(1e6)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", script, str(handoff.path)])
    try:
        assert events.get(timeout=DEADLINE_S) == Heard(
            rank=5, message=Hello(rank=5, world=8, process=rank.pid)
        )
        rank.send_signal(signal.SIGKILL)
        gone = events.get(timeout=DEADLINE_S)
        assert isinstance(gone, Gone) and gone.rank == 5
    finally:
        rank.kill()
        rank.wait()


def test_a_rank_whose_parent_ends_is_told_what_was_said_before(events):
    handoff = Handoff(events.put)
    link = connected(handoff, events)
    handoff.tell(Halt(why="over", failed=False))
    handoff.close()
    assert link.hear(DEADLINE_S) == Halt(why="over", failed=False)
    with pytest.raises(PeerError, match="parent of this rank is gone"):
        link.hear(DEADLINE_S)
    with pytest.raises(PeerError, match="parent of this rank is gone"):
        link.moving("step", step=1)
    link.close()


def test_a_rank_answers_an_abort_while_it_computes(handoff, events):
    link = connected(handoff, events)
    handoff.tell(Abort(epoch=7, why=""))  # it hears nothing: its main thread is at something else
    assert events.get(timeout=DEADLINE_S) == Heard(rank=0, message=Heeded(epoch=7))
    assert link.hear(DEADLINE_S) == Abort(epoch=7, why="")
    link.close()


def test_last_words_are_heard_though_nobody_is_left_to_be_told(handoff, events):
    link = connected(handoff, events)
    for round in range(200):  # unheard when the rank ends
        handoff.tell(Hurry(round=round))
    for step in range(200):
        link.moving("step", step=step)
    link.leave("SIGTERM")
    link.close()
    handoff.tell(Halt(why="", failed=False))
    heard = [events.get(timeout=DEADLINE_S) for _ in range(202)]
    assert heard[:200] == [Heard(rank=0, message=Moving(phase="step", step=step)) for step in range(200)]
    assert heard[200] == Heard(rank=0, message=Leave(why="SIGTERM"))
    assert isinstance(heard[201], Gone)


def test_last_words_of_a_parent_are_heard_though_it_heard_nothing(events):
    handoff = Handoff(events.put)
    link = connected(handoff, events)
    handoff.tell(Halt(why="over", failed=False))
    handoff.close()
    with suppress(PeerError):
        link.moving("step", step=1)
    while (told := link.hear(DEADLINE_S)) is None:
        pass
    assert told == Halt(why="over", failed=False)
    link.close()


@pytest.mark.parametrize("content", [b"garbage", encode(Hurry(round=1)), encode(Moving(phase="x", step=0))])
def test_a_process_that_does_not_begin_with_hello_is_sent_away_and_others_stay(handoff, events, content):
    link = connected(handoff, events)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(handoff.path))
        stranger.settimeout(DEADLINE_S)
        stranger.send(content)
        assert stranger.recv(100) == b""
    link.moving("step", step=1)
    assert events.get(timeout=DEADLINE_S) == Heard(rank=0, message=Moving(phase="step", step=1))
    link.close()


def test_no_parent_is_one_message_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOOMERY_PARENT", str(tmp_path / "nobody"))
    with pytest.raises(PeerError, match="No parent listens") as refused:
        connect_parent(rank=0, world=1)
    assert refused.value.remedy


def test_the_socket_lies_where_only_this_user_may_go(handoff):
    assert handoff.path.parent.stat().st_mode & 0o777 == 0o700


def test_what_a_rank_said_last_is_heard_before_it_counts_as_gone(handoff, events):
    link = connected(handoff, events)
    link.leave("SIGTERM")
    link.close()

    handoff.until_gone(DEADLINE_S)

    said = [events.get_nowait(), events.get_nowait()]
    assert said[0] == Heard(rank=0, message=Leave(why="SIGTERM")) and isinstance(said[1], Gone)


def test_what_a_killed_parent_left_is_removed_and_what_others_hold_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    abandoned, young = tmp_path / "bloomery-peer-abandoned", tmp_path / "bloomery-peer-young"
    for left in (abandoned, young):
        left.mkdir()
        (left / "parent").touch()
    with Handoff(lambda event: None) as living:
        long_ago = time.time() - 3600
        for place in (abandoned, living.path.parent):
            os.utime(place, (long_ago, long_ago))
        with Handoff(lambda event: None):
            assert not abandoned.exists() and young.exists() and living.path.exists()
