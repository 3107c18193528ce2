"""Sources that send a byte now and then: each keeps the time-outs of a silent one from ending anything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.elastic_peers import until
from tests.diloco.served_states import make_checkpoint

from bloomery.checkpoint.format.manifest import MANIFEST, read_manifest
from bloomery.state_transfer import client, source
from bloomery.state_transfer.client import _Fetch
from bloomery.state_transfer.partial_checkpoint import FetchSource
from bloomery.state_transfer.source import PeerSource, ServedState, SourceFailed
from bloomery.transport.trust import Trust

TRUST = Trust(token=b"a secret")
SIZE = 400
HEAD = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nX: %s\r\n\r\n" % (SIZE, b"x" * SIZE)


@contextmanager
def dripping(at_once: bytes, slowly: bytes) -> Iterator[ServedState]:
    """The state at a peer that answers with some bytes at once, and then with others one by one."""
    is_over = threading.Event()

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(at_once)
                for place in range(len(slowly)):
                    connection.sendall(slowly[place : place + 1])
                    if is_over.wait(0.01):
                        return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        origin = PeerSource(peer="a", url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        state = ServedState(origin, "ab12", TRUST)
        try:
            yield state
        finally:
            is_over.set()
            state.close()
            thread.join()


def test_bytes_that_come_one_by_one_are_looked_at_and_keep_no_deadline_off() -> None:
    looks = list[int]()
    with dripping(HEAD, b"y" * SIZE) as state, pytest.raises(SourceFailed, match="it is too slow"):
        state.fetch_range(
            "f",
            memoryview(bytearray(SIZE)),
            begin=0,
            until=time.monotonic() + 0.1,
            is_wanted=lambda: not looks.append(1),
        )
    assert 1 < len(looks) < SIZE


def test_a_head_that_comes_byte_by_byte_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "HEAD_S", 0.1)
    with dripping(HEAD[:5], HEAD[5:] + b"y" * SIZE) as state, pytest.raises(SourceFailed):
        state.fetch_range("f", memoryview(bytearray(SIZE)), begin=0, until=time.monotonic() + 60.0)


def test_a_head_in_time_leaves_the_rest_of_an_answer_the_time_that_it_takes() -> None:
    view = memoryview(bytearray(SIZE))
    with dripping(HEAD + b"y" * (SIZE - 2), b"yy") as state:
        assert state.fetch_range("f", view, begin=0, until=time.monotonic() + 60.0)
        until(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))
    assert view == b"y" * SIZE


def test_a_leader_is_left_for_another_where_its_index_comes_slowly_and_nobody_waits_who_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path / "theirs", own=1, size=1000)
    manifest = replace(read_manifest(checkpoint), index_bytes=1 << 20)
    state, asked = SimpleNamespace(origin=None, name=checkpoint.name), list[Any]()

    def content(file: str, *, at_most: int, is_wanted: Any) -> bytes:
        asked.append(is_wanted)
        raise SourceFailed("it came too slowly")

    state.content = content
    leader = FetchSource(
        state=state,  # type: ignore[arg-type]
        manifest=manifest,
        text=(checkpoint / MANIFEST).read_bytes(),
        records=frozenset(manifest.files),
    )
    fetch = _Fetch(list, "ab12", tmp_path / "here", TRUST, stall_s=1.0, streams=1)
    clock, gave_up = SimpleNamespace(now=0.0), list[int]()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now))
    fetch.leader_s, fetch.cancelled = 20.0, lambda: bool(gave_up)
    fetch.sources = [leader, other := replace(leader, is_out=True)]
    with pytest.raises(SourceFailed):
        fetch._planned(leader)
    (is_wanted,) = asked
    clock.now = 27.9  # a mebibyte of 128 KiB a second, after 20 s
    assert is_wanted()
    clock.now = 28.0
    assert is_wanted(), "there is no other that could lead"
    other.is_out = False
    assert not is_wanted()
    clock.now = 0.0
    assert is_wanted()
    gave_up.append(1)
    assert not is_wanted()
