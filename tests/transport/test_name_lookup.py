"""Lookups of names by a resolver that hangs, is slow, or knows no such name."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, TOKEN

from bloomery.coordination.gateway import Gateway
from bloomery.errors import CoordinatorAway
from bloomery.transport import name_lookup
from bloomery.transport.name_lookup import look_up
from bloomery.transport.sockets import addresses_of, dial, open_listener


class Resolver:
    """Answers for `localhost` at once, and for names that end with `.hangs` once `answers` is set."""

    def __init__(self) -> None:
        self.answers, self.asked = threading.Event(), Counter[str]()
        self._ask = socket.getaddrinfo

    def __call__(self, host, port, *arguments, **options):
        self.asked[host] += 1
        if str(host).endswith(".hangs"):
            assert self.answers.wait(DEADLINE_S)
            host = "127.0.0.1"
        return self._ask(host, port, *arguments, **options)


@pytest.fixture
def resolver(monkeypatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    name_lookup._lookups.cache_clear()
    yield made
    made.answers.set()
    name_lookup._lookups.cache_clear()


def test_a_name_whose_resolver_hangs_is_told_by_its_name_and_keeps_nobody_from_the_next_address(
    resolver: Resolver,
) -> None:
    with closing(open_listener("127.0.0.1:0")) as listener:
        dial(["site.hangs:29600", *addresses_of([listener])], TOKEN, deadline_s=3.0).close()
    for _ in range(3):
        with pytest.raises(ConnectionError, match=r"the name 'site.hangs' was not looked up within 0.2 s"):
            dial(["site.hangs:29600"], TOKEN, deadline_s=0.2)
    assert resolver.asked["site.hangs"] == 1, "one thread waits for a name, however often it is dialled"


def test_a_lookup_that_is_slow_has_ended_by_one_of_the_next_tries(resolver: Resolver) -> None:
    with pytest.raises(socket.gaierror, match=r"was not looked up within 0.0 s"):
        look_up("site.hangs", 7, deadline_s=0.0)
    resolver.answers.set()
    assert look_up("site.hangs", 7, deadline_s=DEADLINE_S) == [(socket.AF_INET, ("127.0.0.1", 7))]
    assert resolver.asked["site.hangs"] <= 2


def test_so_many_names_at_most_are_looked_up_at_the_same_time(resolver: Resolver) -> None:
    for number in range(name_lookup._AT_MOST):
        with pytest.raises(socket.gaierror):
            look_up(f"{number}.hangs", 7, deadline_s=0.0)
    with pytest.raises(socket.gaierror, match=r"64 names are being looked up already, so 'one.hangs' is not"):
        look_up("one.hangs", 7, deadline_s=DEADLINE_S)
    assert look_up("127.0.0.1", 7, deadline_s=0.0) and look_up("::1", 7, deadline_s=0.0)


def test_a_name_that_nobody_has_and_one_that_is_none_are_told_as_they_were(resolver: Resolver) -> None:
    with pytest.raises(ConnectionError, match=r"nobody.invalid:7: "):
        dial(["nobody.invalid:7"], TOKEN, deadline_s=DEADLINE_S)
    with pytest.raises(ConnectionError, match=r"a..b:7: "):
        dial(["a..b:7"], TOKEN, deadline_s=DEADLINE_S)


def test_a_coordinator_whose_name_is_not_looked_up_is_told_by_the_name(resolver: Resolver) -> None:
    gateway = Gateway(["http://etcd.hangs:2379"])
    with pytest.raises(CoordinatorAway, match=r"the name 'etcd.hangs' was not looked up within"):
        gateway.call("kv/range", {}, deadline_s=0.5)
    gateway.close()
    assert resolver.asked["etcd.hangs"] == 1


def test_a_coordinator_is_asked_at_the_address_that_its_name_has(resolver: Resolver) -> None:
    resolver.answers.set()
    with closing(open_listener("127.0.0.1:0")) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(4096)
                heads.append(head)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        heads: list[bytes] = []
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        gateway = Gateway([f"http://etcd.hangs:{port}"])
        assert gateway.call("kv/range", {}, deadline_s=DEADLINE_S) == {}
        gateway.close()
        thread.join(DEADLINE_S)
    assert f"Host: etcd.hangs:{port}".encode() in heads[0]
