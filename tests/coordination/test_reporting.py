"""Threads on which a peer's part rests: one that ends by an error says so."""

import base64
import threading

import pytest
from tests.coordination.test_membership import WITHIN_S, joined, member, until

from bloomery.agent.agent_context import CoordinatorWriter
from bloomery.coordination.membership import Membership
from bloomery.coordination.run_view import RunView
from bloomery.coordination.snapshot_builder import SnapshotBuilder
from bloomery.errors import ThreadEnded
from bloomery.protocol.encoding import encode_text


def unforeseen(*_, **__):
    raise OverflowError("int too large to convert to float")


class AgentMessage:
    """Collects what ended a thread."""

    def __init__(self) -> None:
        self.errors, self._there = [], threading.Event()

    def __call__(self, error) -> None:
        self.errors.append(error)
        self._there.set()

    def wait(self):
        assert self._there.wait(WITHIN_S), "nobody was told that the thread ended"
        return self.errors[0]


def test_a_view_whose_thread_ends_raises_wherever_it_is_asked(etcd, keys, monkeypatch):
    with RunView(etcd, keys) as view:
        monkeypatch.setattr(SnapshotBuilder, "take", unforeseen)
        etcd.put(keys.epoch, "1")
        with pytest.raises(ThreadEnded, match="the thread 'view' of this peer ended: OverflowError"):
            until(view, lambda snapshot: snapshot.epoch == 1)
        with pytest.raises(ThreadEnded):
            _ = view.snapshot


def test_a_lease_whose_thread_ends_is_told(etcd, keys, monkeypatch):
    told = AgentMessage()
    membership = Membership(etcd, keys, lease_s=60.0, heartbeat_s=0.01, failed=told)
    with membership:
        membership.join(member("a"))
        monkeypatch.setattr(etcd, "keep_alive", unforeseen)
        assert "'lease'" in str(told.wait())


def test_a_writer_whose_thread_ends_is_told():
    told = AgentMessage()
    writer = CoordinatorWriter(wake=lambda: None, failed=told)
    writer.write("anything", unforeseen)
    assert "'writer'" in str(told.wait())
    writer.close(within_s=WITHIN_S)


def test_a_key_or_a_value_that_is_no_text_ends_no_view_and_no_listing(etcd, keys, caplog):
    """Written as bytes, past this client: as a peer may that does not use it."""

    def put_bytes(key: bytes, value: bytes) -> None:
        coded = {"key": base64.b64encode(key).decode(), "value": base64.b64encode(value).decode()}
        etcd.call("kv/put", coded)

    with RunView(etcd, keys) as view:
        put_bytes(keys.member("b").encode(), b"\xff\xfe\x00")
        put_bytes(keys.ready(0, "b").encode() + b"\xff", encode_text(member("b")).encode())
        with joined(etcd, keys, "a"), RunView(etcd, keys) as later:
            for one in (view, later):
                assert set(until(one, lambda snapshot: snapshot.members).members) == {"a"}
    assert caplog.text.count("is ignored") == 4  # two keys, for two views
