"""What a peer answers to another that measures the link to it."""

import socket
import threading
from types import SimpleNamespace

import pytest

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
