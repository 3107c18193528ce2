"""Launchers around a store that one of them serves, and what they do when it answers no more."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.parallel.frozen import relayed_store

from bloomery.cli import nodes
from bloomery.cli.nodes import LauncherGroup, LauncherNode

DEADLINE_S = 120.0
PAIR = [LauncherNode(host=f"node-{number}", ranks=2, nodes=2, recipe={}) for number in (1, 2)]


def until(told: Callable[[], str]) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := told()):
        assert time.monotonic() < deadline, "nothing was told"
        time.sleep(0.05)
    return found


def test_a_launcher_whose_store_froze_ends_its_ranks_and_names_who_serves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "_HEARTBEAT_EVERY_S", 3.0)  # the store freezes before the first look
    with relayed_store() as relay:
        mine = LauncherGroup(relay.client(), 1, PAIR, serves=False, store_at="node-1:29400", silence_s=1.0)
        relay.freeze()
        lost = until(mine.failure)
        assert lost.startswith("the launcher that serves node-1:29400 has not answered for 1 s")
        mine.report_failure("rank 3 failed")  # neither waits for an answer
        mine.leave()


def test_a_launcher_hears_which_rank_failed_elsewhere_and_who_fell_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "_HEARTBEAT_EVERY_S", 0.1)
    with relayed_store() as relay:
        first = LauncherGroup(relay.served, 0, PAIR, serves=True, store_at="node-1:29400")
        second = LauncherGroup(relay.client(), 1, PAIR, serves=False, store_at="node-1:29400")
        first.report_failure("rank 0 (process 7) on node-1 failed")
        assert until(second.failure) == "rank 0 (process 7) on node-1 failed"
        second.leave()
        first.leave()
    with relayed_store() as relay:
        alone = LauncherGroup(relay.served, 0, PAIR, serves=True, store_at="node-1:29400")
        alone._signs[1] = (0, time.monotonic() - nodes.SILENCE_S)  # instead of waiting for so long
        assert "node-2 has been silent for 60 s" in until(alone.failure)


def test_a_launcher_whose_ranks_ended_well_may_fall_silent() -> None:
    with relayed_store() as relay:
        alone = LauncherGroup(relay.served, 0, PAIR, serves=True, store_at="node-1:29400")
        alone._signs[1] = (0, time.monotonic() - nodes.SILENCE_S - 1.0)
        assert "node-2 has been silent" in alone._exchange_heartbeats()
        relay.served.add("left", 1)
        assert alone._exchange_heartbeats() == ""
        alone._left.set()
