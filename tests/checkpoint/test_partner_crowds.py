"""Strangers and partners in numbers: who is not known yet keeps no partner out, nor takes all threads."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.test_partner import DEADLINE_S, LIMITS, TOKEN, Kept, closed, content, replica, wait_for

from bloomery.checkpoint.writer import partner
from bloomery.checkpoint.writer.partner import send_replica


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    keeping = Kept(tmp_path)
    yield keeping
    keeping.keeper.close()
    keeping.replicas.release()


def test_a_crowd_of_strangers_keeps_no_partner_out(kept: Kept, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partner, "AUTHENTICATION_S", 2 * DEADLINE_S)
    crowd = [socket.create_connection(kept.address, timeout=DEADLINE_S) for _ in range(30)]
    try:
        assert wait_for(lambda: closed(crowd[13]))
        assert all(map(closed, crowd[:14])) and not any(map(closed, crowd[14:])), "the newest 16 stay"
        send_replica(kept.address, TOKEN, replica(), content(1000))
        assert kept.listed() == [(1, 1)]
        handling = [thread for thread in threading.enumerate() if thread.name == "replica"]
        assert handling and all(thread.daemon for thread in handling), "none keeps a process alive"
    finally:
        for one in crowd:
            one.close()


def test_more_parts_than_there_is_room_for_are_refused_at_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(partner, "AUTHENTICATION_S", 2 * DEADLINE_S)
    crowd = [socket.create_connection(kept.address, timeout=DEADLINE_S) for _ in range(10)]
    try:
        for one in crowd:
            one.sendall(TOKEN.encode())
        most = len(LIMITS.owners) + partner._FURTHER_PARTS_AT_ONCE
        assert wait_for(lambda: sum(map(closed, crowd)) == len(crowd) - most)
        refused = "a partner's part was not kept: too many parts at once"
        assert wait_for(lambda: caplog.messages == [refused] * (len(crowd) - most))
    finally:
        for one in crowd:
            one.close()


def test_a_server_that_can_start_no_thread_for_a_moment_keeps_parts_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "replica":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refusing)
        with pytest.raises(OSError):
            send_replica(kept.address, TOKEN, replica(), content(1000))
    assert "was closed: can't start new thread" in caplog.text
    send_replica(kept.address, TOKEN, replica(), content(1000))
    assert kept.listed() == [(1, 1)]
