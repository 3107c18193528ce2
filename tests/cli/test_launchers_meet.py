"""How launchers of several machines meet at a store, number their ranks, and hear of each other's end."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.cli import nodes
from bloomery.cli.nodes import LauncherGroup, LauncherNode, rendezvous
from bloomery.cli.ranks import RankRange
from bloomery.errors import BloomeryError, RankLost, TrainingFailed


class Store:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def add(self, key: str, count: int) -> int:
        total = int(self.values.get(key, b"0")) + count
        self.values[key] = str(total).encode()
        return total

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        self.values.setdefault(key, desired.encode())


def node(host: str, *, ranks: int = 2, count: int = 3, recipe: str = "1") -> LauncherNode:
    return LauncherNode(host=host, ranks=ranks, nodes=count, recipe={"a.b": recipe})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves; no launcher has a thread of its own."""
    now = [1_000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        assert now[0] < 10_000.0, "it waits without end"

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(nodes, "ask_store", lambda call, *, by, within_s: call())
    monkeypatch.setattr(LauncherGroup, "_watch", lambda group: None)
    return now


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(nodes, "_store", lambda host, port, *, timeout_s: (store, True))
    return store


def test_ranks_are_numbered_by_host_and_then_by_arrival(store: Store, clock: list[float]) -> None:
    store.values |= {"arrived": b"2", "node/0": json.dumps(asdict(node("n10", ranks=1))).encode()}
    store.values["node/1"] = json.dumps(asdict(node("n2", ranks=4))).encode()
    group = rendezvous("n2:29400", node("n2", ranks=8), timeout_s=5.0, say=print)
    assert [one.host for one in group.nodes] == ["n2", "n2", "n10"]
    assert [one.ranks for one in group.nodes] == [4, 8, 1]
    assert group.share == RankRange(first=4, count=8, world=13)
    assert json.loads(store.values["node/2"]) == {
        "host": "n2", "ranks": 8, "nodes": 3, "recipe": {"a.b": "1"},
    }  # fmt: skip
    with pytest.raises(TrainingFailed, match="3 nodes have already joined at n2:29400: this one, n7"):
        rendezvous("n2:29400", node("n7"), timeout_s=5.0, say=print)


def test_a_launcher_that_waits_says_so_once_and_gives_up_in_time(store: Store, clock: list[float]) -> None:
    said: list[tuple[float, str]] = []
    with pytest.raises(RankLost, match=r"2 of 3 nodes were not at n1:29400 within 50 s") as lost:
        rendezvous("n1:29400", node("n1"), timeout_s=50.0, say=lambda line: said.append((clock[0], line)))
    assert clock[0] == pytest.approx(1_050.1, abs=0.11)
    assert said == [(pytest.approx(1_020.0, abs=0.11), "waiting at n1:29400 for 2 of 3 nodes")]
    assert "the same --nnodes and --rdzv" in str(lost.value.remedy)


def test_launchers_with_another_recipe_leave_before_they_refuse(store: Store, clock: list[float]) -> None:
    for number in range(2):
        store.values[f"node/{number}"] = json.dumps(asdict(node(f"n{number}"))).encode()
    store.values |= {"arrived": b"2", "left": b"2"}
    with pytest.raises(TrainingFailed, match="n9 has another recipe than n0"):
        rendezvous("n0:29400", node("n9", recipe="2"), timeout_s=5.0, say=print)
    assert store.values["left"] == b"3" and clock[0] == 1_000.0


def group_of(store: Store, *, serves: bool = False, number: int = 0) -> LauncherGroup:
    found: Any = store
    return LauncherGroup(
        found, number, [node("n1"), node("n2")], serves=serves, store_at="n1:29400", silence_s=30.0
    )


def test_the_server_of_the_store_leaves_last_and_waits_no_longer_than_for_silence(
    store: Store, clock: list[float]
) -> None:
    group_of(store).leave()
    assert clock[0] == 1_000.0 and store.values["left"] == b"1"
    group_of(store, serves=True).leave()
    assert clock[0] == 1_000.0 and store.values["left"] == b"2"
    group_of(Store(), serves=True).leave()
    assert clock[0] == pytest.approx(1_030.0, abs=0.25)


@pytest.mark.parametrize(("serves", "waits_s"), [(True, 60.0), (False, 0.0)])
def test_of_launchers_that_met_the_one_that_serves_the_store_waits_for_the_others_to_leave(
    serves: bool, waits_s: float, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    store.values |= {"arrived": b"1", "node/0": json.dumps(asdict(node("n1", count=2))).encode()}
    monkeypatch.setattr(nodes, "_store", lambda host, port, *, timeout_s: (store, serves))
    group = rendezvous("n1:29400", node("n2", count=2), timeout_s=5.0, say=print)
    group.leave()
    assert clock[0] == pytest.approx(1_000.0 + waits_s, abs=0.25)


def test_a_launcher_is_silent_from_its_last_sign_on(store: Store, clock: list[float]) -> None:
    group = group_of(store)
    assert group._exchange_heartbeats() == "" and store.values["sign/0"] == b"1"
    clock[0] += 20.0
    store.add("sign/1", 1)
    assert group._exchange_heartbeats() == ""
    clock[0] += 30.0
    assert group._exchange_heartbeats() == ""
    clock[0] += 0.5
    silent = "the launcher on n2 has been silent for 30 s; ending the ranks here"
    assert group._exchange_heartbeats() == silent and store.values["sign/0"] == b"4"
    store.set("failure", "rank 3 failed")
    assert group._exchange_heartbeats() == "rank 3 failed"


def test_only_the_first_report_of_a_failure_counts(store: Store, clock: list[float]) -> None:
    group_of(store).report_failure("rank 1 failed")
    group_of(store, number=1).report_failure("rank 7 failed")
    assert store.values["failure"] == b"rank 1 failed"


def test_a_store_that_has_not_answered_is_told_after_the_silence(store: Store, clock: list[float]) -> None:
    group = group_of(store)
    clock[0] += 30.0
    assert group.failure() == ""
    group._exchange_heartbeats()
    clock[0] += 30.0
    assert group.failure() == ""
    clock[0] += 0.5
    told = "the launcher that serves n1:29400 has not answered for 30 s; ending the ranks here"
    assert group.failure() == told and group.failure() == told


def test_what_was_heard_of_a_failure_is_not_replaced_by_the_silence_after_it(
    store: Store, clock: list[float]
) -> None:
    group = group_of(store)
    group._lost = "rank 3 failed"
    clock[0] += 100.0
    assert group.failure() == "rank 3 failed"


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_launcher_that_left_watches_no_more_and_waits_for_no_answer_longer_than_for_silence(
    is_gone: bool, store: Store, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    def ask(call: Callable[[], int], *, by: str, within_s: float) -> int:
        asked.append((by, within_s))
        if is_gone:
            raise RankLost("gone", remedy="")
        return call()

    monkeypatch.setattr(nodes, "ask_store", ask)
    group = group_of(store)
    group.leave()
    assert group._left.is_set() and set(asked) == {("the launcher that serves n1:29400", 30.0)}


def test_a_watch_ends_with_the_first_failure_and_tells_a_server_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    group = group_of(Store())
    waits: list[float] = []
    group._left = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or len(waits) > 5)  # type: ignore[assignment]
    answers: list[Callable[[], str]] = [lambda: "", lambda: "rank 3 failed"]
    monkeypatch.setattr(group, "_exchange_heartbeats", lambda: answers.pop(0)())
    group._watch()
    assert group._lost == "rank 3 failed" and waits == [2.0, 2.0]

    def gone() -> str:
        raise RuntimeError("closed")

    group._lost, answers[:] = "", [gone]
    group._watch()
    assert group._lost == "the launcher that serves n1:29400 is gone; ending the ranks here"


def test_a_port_is_free_in_use_or_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert nodes._can_bind("127.0.0.1", port) == (True, False)
    assert nodes._can_bind("127.0.0.1", port) == (True, True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    assert nodes._can_bind("127.0.0.1", port) == (True, True), "a connection of before still fades away"

    def elsewhere(probe: socket.socket, address: Any) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "not here")

    monkeypatch.setattr("socket.socket.bind", elsewhere)
    assert nodes._can_bind("127.0.0.1", port) == (False, False)
    with pytest.raises(BloomeryError, match=r"The host no\.such\.invalid of --rdzv has no address"):
        nodes._can_bind("no.such.invalid", port)


def test_the_first_launcher_on_the_host_serves_the_store_and_the_others_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    bound, client, refuses = [(True, True)], ["a client"], [False]

    def tcp_store(host: str, port: int, **options: Any) -> str:
        made.append((host, port, options["is_master"], options["timeout"].total_seconds()))
        assert options["wait_for_workers"] is False, "it would not answer before all have come"
        if refuses[0]:
            raise RuntimeError("in use")
        return "the store"

    monkeypatch.setattr(nodes, "TCPStore", tcp_store)
    monkeypatch.setattr(nodes, "_can_bind", lambda host, port: bound[0])
    monkeypatch.setattr(
        nodes, "_connected", lambda host, port, *, wait_s: (client[0], wait_s) if client[0] else None
    )
    assert nodes._store("n1", 29400, timeout_s=70.0) == ("the store", True)
    assert made == [("n1", 29400, True, 70.0)]
    refuses[0] = True
    assert nodes._store("n1", 29400, timeout_s=70.0) == (("a client", 20.0), False)
    bound[0] = (True, False)
    assert nodes._store("n1", 29400, timeout_s=70.0) == (("a client", 20.0), False)
    bound[0] = (False, False)
    assert nodes._store("n1", 29400, timeout_s=70.0) == (("a client", 70.0), False)
    assert len(made) == 2
    client[0] = ""
    with pytest.raises(RankLost, match="No launcher answered at n1:29400 within 70 s"):
        nodes._store("n1", 29400, timeout_s=70.0)
    bound[0] = (True, False)
    with pytest.raises(TrainingFailed, match="Port 29400 of n1 is in use") as used:
        nodes._store("n1", 29400, timeout_s=70.0)
    assert "--rdzv n1:29401" in str(used.value.remedy)


@pytest.mark.parametrize("refusal", [None, RuntimeError("no store"), ValueError("no address")])
def test_what_does_not_answer_as_a_store_is_none(
    refusal: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def tcp_store(host: str, port: int, *, is_master: bool, timeout: Any) -> str:
        made.append((host, port, is_master, timeout.total_seconds()))
        if refusal is not None:
            raise refusal
        return "the store"

    monkeypatch.setattr(nodes, "TCPStore", tcp_store)
    assert nodes._connected("n1", 29400, wait_s=7.0) == ("the store" if refusal is None else None)
    assert made == [("n1", 29400, False, 7.0)]
