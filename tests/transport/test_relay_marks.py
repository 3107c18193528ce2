"""Which ends of one circuit a relay joins: a member that is neither may name the circuit too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, connection_manager, until
from tests.transport.test_connection_manager import dialled

from bloomery.transport.relay import UNMARKED, mark_of


@pytest.fixture
def opened() -> Iterator[Callable]:
    """Makes the connections of the peer of a name."""
    with ExitStack() as stack:

        def make(name: str, *, is_relay: bool = False):
            made = connection_manager(name, is_relay=is_relay)
            stack.callback(made.close)
            return made

        yield make


def named(circuit: str, other: str) -> dict[str, object]:
    rank, stream = mark_of(circuit, other)
    return {"purpose": "relay", "circuit": circuit, "rank": rank, "stream": stream}


UNNAMED = {"purpose": "relay", "circuit": "x"}


@pytest.mark.parametrize("as_the_hostile_one", [UNNAMED, named("x", "a"), named("x", "b")])
def test_an_end_is_joined_to_the_peer_that_it_expects_and_not_to_who_names_its_circuit_first(
    opened: Callable, as_the_hostile_one: dict[str, object]
) -> None:
    relay = opened("r", is_relay=True)
    with ExitStack() as stack:
        hostile, first, second = (
            stack.enter_context(dialled(opened(name), relay, **how))
            for name, how in (("h", as_the_hostile_one), ("a", named("x", "b")), ("b", named("x", "a")))
        )
        first.sendall(b"through")
        second.settimeout(DEADLINE_S)
        assert second.recv(7) == b"through"
        hostile.setblocking(False)
        with pytest.raises(BlockingIOError):
            hostile.recv(1)


def test_an_end_of_an_older_version_is_joined_to_any_and_one_that_came_again_by_its_newest(
    opened: Callable,
) -> None:
    relay, a, b = opened("r", is_relay=True), opened("a"), opened("b")
    with ExitStack() as stack:
        stack.enter_context(dialled(a, relay, **named("x", "b")))  # given up, as after a time-out
        until(lambda: len(relay._relay._waiting.get("x", ())) == 1)
        first = stack.enter_context(dialled(a, relay, **named("x", "b")))
        until(lambda: len(relay._relay._waiting["x"]) == 2)
        second = stack.enter_context(dialled(b, relay, **UNNAMED))
        second.sendall(b"back")
        first.settimeout(DEADLINE_S)
        assert first.recv(4) == b"back"


def test_a_mark_fits_into_the_fields_that_carry_it_and_does_not_change() -> None:
    marks = [mark_of(circuit, f"peer-{number}") for circuit in ("x", "y") for number in range(500)]
    assert len(set(marks)) > 990 and UNMARKED not in marks
    assert all(0 <= rank < 4096 and 0 <= stream < 256 for rank, stream in marks)
    assert mark_of("x", "b") == (276, 214)  # as other peers compute it
