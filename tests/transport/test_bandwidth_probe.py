"""What a peer answers to another that measures the link to it."""

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
    sizes = ProbeSizes(streams=3, pings=3, first=10, most=1000, enough_s=0.16)
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
