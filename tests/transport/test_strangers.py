"""Hundreds of strangers, and no descriptors left: members are served during it and after it."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, TOKEN, connection_manager, until
from tests.diloco.served_states import make_checkpoint

from bloomery.transport import listener
from bloomery.transport.bandwidth_probe import ProbeSizes
from bloomery.transport.connection import Contact
from bloomery.transport.listener import MemberQuota, StrangerQuota, _network, raise_descriptor_limit

LIMIT = 256
AUTHORIZED = {"Authorization": f"Bearer {TOKEN.token.hex()}"}
ROOT = Path(__file__).parents[2]


class Limited:
    """The process, and a member that uses it."""

    def __init__(self, process: subprocess.Popen[str], member, errors: Path) -> None:
        self._process, self._member, self._errors = process, member, errors
        self.link_address, self.state_address = process.stdout.readline().split()

    def order(self, what: str) -> int:
        """How many threads accept connections."""
        print(what, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def idle(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=DEADLINE_S)

    def serves_members(self) -> bool:
        contact = Contact(peer="b", incarnation="b1", addresses=(self.link_address,))
        measured = self._member.probe(
            contact, sizes=ProbeSizes(streams=1, most=1 << 16), deadline_s=DEADLINE_S
        )
        connection = http.client.HTTPConnection(self.state_address, timeout=DEADLINE_S)
        connection.request("GET", "/state/ab12", headers=AUTHORIZED)
        status = connection.getresponse().status
        connection.close()
        return measured.mbit_s > 0 and status == 200

    def said(self, words: str) -> int:
        return self._errors.read_text().count(words)


@pytest.fixture
def limited(tmp_path):
    with _limited(tmp_path) as opened:
        yield opened


@contextmanager
def _limited(tmp_path):
    state = make_checkpoint(tmp_path, own=1, size=1000)
    command = [sys.executable, str(Path(__file__).with_name("limited_process.py")), str(LIMIT), str(state)]
    errors = tmp_path / "errors"
    with ExitStack() as stack:
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(errors.open("w")),
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        member = stack.enter_context(closing(connection_manager("a", listen=())))
        yield Limited(process, member, errors)


def test_hundreds_of_idle_strangers_keep_no_member_from_its_connections_or_the_state(limited):
    raise_descriptor_limit()  # this side holds them all
    with ExitStack() as idle:
        for _ in range(2 * LIMIT):
            for address in (limited.link_address, limited.state_address):
                idle.enter_context(limited.idle(address))
        assert limited.serves_members()
    assert limited.serves_members()
    assert limited.said("Too many open files") == 0


def test_a_peer_whose_descriptors_ran_out_goes_on_once_there_are_some(limited):
    assert limited.serves_members()
    assert limited.order("exhaust") == 2
    with ExitStack() as idle:
        for address in (limited.link_address, limited.state_address):
            for _ in range(3):
                idle.enter_context(limited.idle(address))
        until(lambda: limited.said("no connection can be accepted") == 2 or limited.order("count") < 2)
        assert limited.order("free") == 2, "a thread that accepts has ended"
        assert limited.serves_members()
    assert limited.said("no connection can be accepted") == 2, "once for each port"
    assert limited.said("Traceback") == 0


@pytest.fixture
def connection():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours


def test_who_opens_many_connections_ends_its_own_and_nobody_elses(connection):
    strangers = StrangerQuota(total=8, per_address=6)
    member = strangers.enter(connection, "192.0.2.1")
    with ExitStack() as opened:
        ends = []
        for number in range(40):
            mine, other = socket.socketpair()
            opened.enter_context(mine)
            ends.append(opened.enter_context(other))
            opened.callback(strangers.enter(mine, f"2001:db8::{number:x}").leave)  # one site's addresses
        assert [_is_ended(end) for end in ends] == [True] * 34 + [False] * 6
        more, other = socket.socketpair()
        with more, other, strangers.enter(more, "::ffff:192.0.2.1"), strangers.enter(more, "192.0.2.7"):
            assert not _is_ended(other)
        connection.send(b"still open")
    member.leave()
    member.leave()


def test_a_member_holds_no_more_than_its_part_and_all_no_more_than_there_is():
    quota = MemberQuota(2, total=3)
    assert [quota.enter("a"), quota.enter("a"), quota.enter("a"), quota.enter("b")] == [
        True,
        True,
        False,
        True,
    ]
    assert not quota.enter("c"), "nothing is left"
    quota.leave("a")
    assert quota.enter("c") and not quota.enter("b")
    assert [MemberQuota(1).enter("") for _ in range(2)] == [True, True]


def test_a_place_is_free_again_once_a_stranger_left(connection):
    strangers = StrangerQuota(total=4, per_address=1)
    for _ in range(100):
        with strangers.enter(connection, "192.0.2.1"):
            connection.send(b"still open")


def _is_ended(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_limit_of_open_descriptors_is_raised_and_never_lowered():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = before[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        limit = raise_descriptor_limit()
        assert limit == (1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)) > 512
        assert raise_descriptor_limit() == limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("descriptors", "total", "of_address"),
    [(1024, 64, 16), (48, 4, 1), (1 << 20, 256, 64), (resource.RLIM_INFINITY, 256, 64)],
)
def test_strangers_hold_an_eighth_of_the_descriptors_and_those_of_one_address_a_fourth_of_that(
    descriptors, total, of_address, monkeypatch
):
    monkeypatch.setattr(listener.resource, "getrlimit", lambda kind: (descriptors, descriptors))
    strangers = StrangerQuota()
    assert (strangers._total, strangers._per_address) == (total, of_address)
    asked = StrangerQuota(total=9, per_address=5)
    assert (asked._total, asked._per_address) == (9, 5)


def test_an_address_counts_as_the_site_that_it_belongs_to():
    assert _network("192.0.2.1") == _network("::ffff:192.0.2.1") != _network("192.0.2.2")
    assert _network("2001:db8:0:1::1") == _network("2001:db8:0:1:ffff::2") != _network("2001:db8:0:2::1")
    assert _network("fe80::1%eth0") == _network("fe80::1%eth1")
    assert _network("a name") == "a name"
