"""Bytes through the shaped internet: all of them, in order, and faults where they were ordered."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from itertools import combinations

import pytest

from bloomery.chaos.shaped_network import Shape, ShapedNetwork


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while chunk := connection.recv(1 << 16):
                    connection.sendall(chunk)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def _through(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        threading.Thread(
            target=lambda: (connection.sendall(sent), connection.shutdown(socket.SHUT_WR)), daemon=True
        ).start()
        got = bytearray()
        while chunk := connection.recv(1 << 16):
            got += chunk
        return bytes(got)


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_arrive_whole_and_in_order_over_a_slow_lossy_link(echo: int) -> None:
    sent = bytes(i * i % 251 for i in range(1_000_000))
    with ShapedNetwork(seed=3) as internet:
        internet.host("a", Shape(rate=20e6, delay=0.005, loss=0.001))
        assert _through(internet.open("a", echo), sent) == sent
        assert internet.traffic("a") == (len(sent), len(sent))


def test_packets_are_lost_by_the_seed_and_otherwise_on_each_host_and_in_each_direction() -> None:
    def late(seed: int) -> list[list[bool]]:
        with ShapedNetwork(seed=seed) as internet:
            for name in "ab":
                internet.host(name, Shape(delay=0.01, loss=0.5))
            pipes = [pipe for name in "ab" for pipe in internet._pipes(name)]
            return [[pipe.arrival(1, now=0.0) > 0.01 for _ in range(64)] for pipe in pipes]

    losses = late(seed=3)
    assert all(one != other for one, other in combinations(losses, 2))
    assert late(seed=3) == losses != late(seed=4)


def test_a_fault_strikes_both_directions_of_its_host_and_no_other() -> None:
    with ShapedNetwork() as internet:
        for name in "ab":
            internet.host(name, Shape(delay=1.0))
        with pytest.raises(ValueError, match="already a host"):
            internet.host("a", Shape())
        now = internet._loop.time()
        internet.cut("a", 500.0)
        late = [pipe.arrival(0, now=now) - now for name in "ab" for pipe in internet._pipes(name)]
        assert late == [pytest.approx(501.0, abs=60.0)] * 2 + [pytest.approx(1.0)] * 2
        internet.slow("b", 40.0, lasting=600.0)
        assert [pipe.arrival(0, now=now) - now for pipe in internet._pipes("b")] == [pytest.approx(41.0)] * 2


def test_dialling_takes_a_round_trip_before_the_first_byte(echo: int) -> None:
    with ShapedNetwork() as internet:
        internet.host("a", Shape(delay=0.05))
        port, begun = internet.open("a", echo), time.monotonic()
        assert _through(port, b"bytes") == b"bytes"
        assert time.monotonic() - begun >= 0.2


def test_what_goes_to_a_host_is_told_before_what_comes_from_it() -> None:
    with ShapedNetwork() as internet:
        internet.host("a", Shape())
        arriving, leaving = internet._pipes("a")
        arriving.arrival(100, now=0.0)
        leaving.arrival(7, now=0.0)
        assert internet.traffic("a") == (100, 7)


def test_a_corruption_is_seen_once(echo: int) -> None:
    sent = bytes(100_000)
    with ShapedNetwork() as internet:
        internet.host("a", Shape())
        port = internet.open("a", echo)
        internet.corrupt("a")
        assert sum(byte.bit_count() for byte in _through(port, sent)) == 1
        assert _through(port, sent) == sent


def test_what_goes_to_a_host_is_corrupted_and_not_what_comes_from_it() -> None:
    with ShapedNetwork() as internet:
        internet.host("a", Shape())
        internet.corrupt("a")
        arriving, leaving = internet._pipes("a")
        assert leaving.spoil(bytes(9)) == bytes(9) != arriving.spoil(bytes(9))


def test_a_severed_connection_is_reset_and_the_next_one_works(echo: int) -> None:
    with ShapedNetwork() as internet:
        internet.host("a", Shape())
        port = internet.open("a", echo)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"one")
            assert connection.recv(3) == b"one"
            internet.sever("a")
            assert _has_ended(connection)
        assert _through(port, b"two") == b"two"


@pytest.mark.parametrize("who", ["dialled", "dialling"])
def test_an_end_that_is_reset_resets_the_other_end(who: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ShapedNetwork() as internet:
        internet.host("a", Shape(delay=0.02))
        port = internet.open("a", listener.getsockname()[1])
        dialling = socket.create_connection(("127.0.0.1", port), timeout=60)
        dialled, _ = listener.accept()
        dialled.settimeout(60)
        dies, stays = (dialled, dialling) if who == "dialled" else (dialling, dialled)
        with stays:
            dies.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dies.close()  # as the kernel ends the connections of a process that was killed before it read all
            assert _has_ended(stays)


def test_a_network_that_is_closed_while_connections_wait_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with ShapedNetwork() as internet:
            internet.host("a", Shape(delay=30.0))
            port = internet.open("a", listener.getsockname()[1])
            dialling = socket.create_connection(("127.0.0.1", port), timeout=60)
            time.sleep(0.02)
        dialling.close()
    assert caplog.text == ""


def test_dialling_a_host_where_nobody_listens_is_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused = listener.getsockname()[1]
    with ShapedNetwork() as internet:
        internet.host("a", Shape())
        port = internet.open("a", unused)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            assert _has_ended(connection)


@pytest.mark.parametrize("fault", ["cut", "slow"])
def test_a_cut_or_slow_link_holds_bytes_back_and_loses_none(echo: int, fault: str) -> None:
    with ShapedNetwork() as internet:
        internet.host("a", Shape())
        port = internet.open("a", echo)
        begun = time.monotonic()
        if fault == "cut":
            internet.cut("a", 0.3)
        else:
            internet.slow("a", 0.3, lasting=60.0)
        assert _through(port, b"bytes") == b"bytes"
        assert time.monotonic() - begun >= 0.3


def test_a_closed_network_has_no_thread_and_may_be_closed_again(echo: int) -> None:
    before = _threads()
    internet = ShapedNetwork()
    assert len(_threads() - before) == 1
    internet.host("a", Shape())
    assert _through(internet.open("a", echo), b"all") == b"all"
    for _ in range(2):
        internet.close()
        assert not _threads() - before


def _threads() -> set[threading.Thread]:
    """The threads of shaped networks; threads of earlier tests in this process may come and go."""
    return {thread for thread in threading.enumerate() if thread.name == "shaped-network"}
