"""What a peer answers to another that measures the link to it."""

import io
import socket
import threading
from types import SimpleNamespace

import pytest

from bloomery.transport import bandwidth_probe
from bloomery.transport.bandwidth_probe import MAX_LOAD, ProbeSizes, answer_probe, measure
from bloomery.transport.trust import PeerRefused

DEADLINE_S = 60.0


@pytest.mark.parametrize(("load", "is_answered"), [(1 << 16, True), (MAX_LOAD + 1, False)])
def test_a_load_is_taken_up_to_the_limit_and_one_beyond_it_ends_the_connection(
    load: int, is_answered: bool
) -> None:
    asking, answering = socket.socketpair()
    answer = threading.Thread(target=answer_probe, args=(SimpleNamespace(connection=answering),))
    answer.start()
    sizes = ProbeSizes(streams=1, pings=1, first=load, most=load)
    with asking:
        if is_answered:
            assert measure([asking], sizes, deadline_s=DEADLINE_S).mbit_s > 0.0
        else:
            with pytest.raises((OSError, PeerRefused)):
                measure([asking], sizes, deadline_s=DEADLINE_S)
    answer.join(DEADLINE_S)
    assert not answer.is_alive()


@pytest.mark.parametrize("pongs", [0, 1])
def test_a_peer_that_stops_answering_is_waited_for_until_the_deadline(pongs: int) -> None:
    asking, silent = socket.socketpair()
    with asking, silent:
        silent.sendall(b"p" * pongs)
        with pytest.raises(TimeoutError):
            measure([asking], ProbeSizes(streams=1, pings=1, first=1, most=1), deadline_s=0.1)


def test_what_a_link_carries_is_the_last_load_of_all_streams_in_the_time_without_the_way_back(
    monkeypatch,
) -> None:
    round_trips_s, loads = iter([0.3, 0.1, 0.2]), []
    monkeypatch.setattr(bandwidth_probe, "_exchange", lambda *of_ping: next(round_trips_s))

    def load(connections, size: int, until: float) -> float:
        loads.append(size)
        return 0.05 + 0.001 * size

    monkeypatch.setattr(bandwidth_probe, "_load_all", load)
    connections = [socket.socket() for _ in range(3)]
    sizes = ProbeSizes(streams=3, pings=3, first=10, most=1000, enough_s=0.08)
    measured = measure(connections, sizes, deadline_s=DEADLINE_S)
    assert loads == [10, 40, 160] and measured.rtt_ms == pytest.approx(100.0)
    assert measured.mbit_s == pytest.approx(8e-6 * 160 * 3 / 0.16)
    loads.clear()
    round_trips_s = iter([0.1])
    short = ProbeSizes(streams=3, pings=1, first=10, most=50, enough_s=60.0)
    assert measure(connections, short, deadline_s=DEADLINE_S).mbit_s == pytest.approx(8e-6 * 50 * 3 / 0.05)
    assert loads == [10, 40, 50]
    for connection in connections:
        assert connection.gettimeout() == DEADLINE_S
        connection.close()


def test_a_load_has_the_bytes_that_it_announces(monkeypatch) -> None:
    monkeypatch.setattr(bandwidth_probe, "_PIECE", bytes(16))
    until = bandwidth_probe.time.monotonic() + DEADLINE_S
    asking, answering = socket.socketpair()
    with asking, answering:
        answering.sendall(b"l")
        bandwidth_probe._exchange(asking, b"l", 37, until)
        assert answering.recv(1 << 16) == b"l" + (37).to_bytes(4, "big") + bytes(37)
        answering.sendall(b"p")
        with pytest.raises(ConnectionError):
            bandwidth_probe._exchange(asking, b"l", 0, until)


def answering(connection: socket.socket) -> None:
    answer_probe(SimpleNamespace(connection=connection))  # type: ignore[arg-type]


def test_a_probe_has_four_streams_and_loads_of_64_kibibytes_up_to_32_mebibytes() -> None:
    sizes = ProbeSizes()
    assert (sizes.streams, sizes.pings, sizes.enough_s) == (4, 5, 0.2)
    assert (sizes.first, sizes.most) == (64 << 10, 32 << 20) and sizes.most <= MAX_LOAD


def test_each_question_has_its_own_answer_even_if_they_come_together_and_one_that_is_none_ends_it() -> None:
    asking, asked = socket.socketpair()
    with asking:
        load = b"l" + (10).to_bytes(4, "big") + bytes(10)
        ping = b"p" + bytes(4)
        asking.sendall(load + ping + b"x" + bytes(4))
        asking.shutdown(socket.SHUT_WR)
        answering(asked)
        assert asking.recv(9) == b"lp" and asking.recv(9) == b""


def test_of_a_question_no_byte_beyond_it_is_read() -> None:
    sent = io.BytesIO(b"abcdef")
    connection = SimpleNamespace(recv=lambda most: sent.read(min(most, 2)))
    assert bandwidth_probe._receive(connection, 5) == b"abcde" and sent.read() == b"f"  # type: ignore[arg-type]
    assert bandwidth_probe._receive(connection, 5) == b""  # type: ignore[arg-type]


def test_who_asks_and_goes_or_says_nothing_is_left_without_an_error(monkeypatch) -> None:
    monkeypatch.setattr(bandwidth_probe, "_IDLE_S", 0.01)
    asking, asked = socket.socketpair()
    asking.sendall(b"p" + bytes(4))
    asking.close()
    answering(asked)
    silent, waiting = socket.socketpair()
    with silent:
        answering(waiting)
        assert silent.recv(1) == b""
    assert asked.fileno() == waiting.fileno() == -1


def test_an_exchange_has_what_is_left_of_the_time_of_all(monkeypatch) -> None:
    monkeypatch.setattr(bandwidth_probe, "time", SimpleNamespace(monotonic=lambda: 100.0))
    asking, answer = socket.socketpair()
    with asking, answer:
        answer.sendall(b"p")
        bandwidth_probe._exchange(asking, b"p", 0, 105.0)
        assert asking.gettimeout() == 5.0
        with pytest.raises(TimeoutError):
            bandwidth_probe._exchange(asking, b"p", 0, 99.0)


def test_each_piece_of_a_load_has_what_is_left_of_the_time_so_that_a_slow_reader_has_no_more(
    monkeypatch,
) -> None:
    clock, given = SimpleNamespace(now=100.0), list[float]()

    def take(piece: bytes) -> None:
        clock.now += 1.0

    monkeypatch.setattr(bandwidth_probe, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(bandwidth_probe, "_PIECE", bytes(16))
    connection = SimpleNamespace(settimeout=given.append, sendall=take, recv=lambda most: b"l")
    bandwidth_probe._exchange(connection, b"l", 40, 110.0)  # type: ignore[arg-type]
    assert given == [10.0, 9.0, 8.0, 7.0, 6.0]


def test_a_load_goes_over_all_streams_and_fails_where_one_does() -> None:
    until = bandwidth_probe.time.monotonic() + DEADLINE_S
    pairs = [socket.socketpair() for _ in range(3)]
    for _, other in pairs:
        other.sendall(b"l")
    bandwidth_probe._load_all([asking for asking, _ in pairs], 100, until)
    assert [len(other.recv(1 << 10)) for _, other in pairs] == [105] * 3
    for _, other in pairs[:2]:
        other.sendall(b"l")
    pairs[2][1].close()
    with pytest.raises(OSError):
        bandwidth_probe._load_all([asking for asking, _ in pairs], 100, until)
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_load_of_the_most_bytes_is_answered(monkeypatch) -> None:
    assert MAX_LOAD == 256 << 20
    monkeypatch.setattr(bandwidth_probe, "MAX_LOAD", 10)
    asking, asked = socket.socketpair()
    with asking:
        for size in (10, 11):
            asking.sendall(b"l" + size.to_bytes(4, "big") + bytes(size))
        asking.shutdown(socket.SHUT_WR)
        answering(asked)
        assert asking.recv(9) == b"l"
