"""The rendezvous of the launchers of one run on several machines, and how each learns of another's failure.

The launcher on the host of --rdzv serves a c10d store. Launchers exchange JSON through it and unpickle
nothing. The ranks use the same store for their own rendezvous, so only one port must be open.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from bloomery.cli.argument_values import read_endpoint
from bloomery.cli.ranks import RankRange
from bloomery.errors import BloomeryError, RankLost, TrainingFailed
from bloomery.events.timeouts import STORE_TIMEOUT_S
from bloomery.parallel.rendezvous import ask_store, setting_difference
from bloomery.torch_private import Store, TCPStore

CONNECT_S = 20.0
"""A process that holds our port on this machine must answer as a store within this time, in seconds."""
SILENCE_S = 60.0
"""A launcher is lost when its heartbeat has not changed for this time, in seconds."""
_HEARTBEAT_EVERY_S = 2.0
_POLL_S = 0.1

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class LauncherNode:
    """What a launcher tells the others about itself.

    host: name of its machine.
    ranks: number of ranks it starts.
    nodes: number of machines it expects, its own included.
    recipe: every setting as TOML text, by key.
    """

    host: str
    ranks: int
    nodes: int
    recipe: Mapping[str, str]


class LauncherGroup:
    """The launchers on all machines after the rendezvous, as one of them sees the others.

    A thread writes this launcher's heartbeat and reads the others'. A store that no longer answers blocks
    that thread alone; `failure` returns at once.

    store: the store of the rendezvous.
    number: this launcher's index in `nodes`.
    nodes: the launchers in the order of their ranks.
    serves: whether this launcher serves the store.
    store_at: address of the store, for messages.
    silence_s: seconds without a heartbeat after which a launcher is lost.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        nodes: list[LauncherNode],
        *,
        serves: bool,
        store_at: str,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._store, self._number, self._serves = store, number, serves
        self._server, self._silence_s = f"the launcher that serves {store_at}", silence_s
        self.nodes = nodes
        self._signs = {other: (0, time.monotonic()) for other in range(len(nodes)) if other != number}
        self._lost, self._answered = "", time.monotonic()
        self._left = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="other launchers").start()

    @property
    def share(self) -> RankRange:
        """The ranks of this machine."""
        first = sum(node.ranks for node in self.nodes[: self._number])
        world = sum(node.ranks for node in self.nodes)
        return RankRange(first=first, count=self.nodes[self._number].ranks, world=world)

    def failure(self) -> str:
        """Return why the run cannot go on: another launcher's report, or its silence. Empty while it can."""
        if not self._lost and time.monotonic() - self._answered > self._silence_s:
            self._lost = f"{self._server} has not answered for {self._silence_s:.0f} s; ending the ranks here"
        return self._lost

    def report_failure(self, failure: str) -> None:
        """Tell the other launchers that a rank of this machine failed. Only the first report counts."""
        with suppress(RankLost):  # the server of the store is gone, which the others see themselves
            self._ask(lambda: self._store.compare_set("failure", "", failure))

    def leave(self) -> None:
        """Tell the others that the ranks here have ended. The server of the store waits for all to leave."""
        with suppress(RankLost):
            self._ask(lambda: self._store.add("left", 1))
            deadline = time.monotonic() + self._silence_s
            while self._serves and self._ask(lambda: self._store.add("left", 0)) < len(self.nodes):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        self._left.set()

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        return ask_store(call, by=self._server, within_s=min(STORE_TIMEOUT_S, self._silence_s))

    def _watch(self) -> None:
        """Exchange heartbeats until this launcher leaves or the run cannot go on."""
        while not self._lost and not self._left.wait(_HEARTBEAT_EVERY_S):
            try:
                self._lost = self._exchange_heartbeats()
            except RuntimeError:  # the store raises it when its server is gone
                self._lost = f"{self._server} is gone; ending the ranks here"

    def _exchange_heartbeats(self) -> str:
        self._store.add(f"sign/{self._number}", 1)
        if self._store.check(["failure"]):
            return self._store.get("failure").decode()
        now = time.monotonic()
        silent = self._silent(now)
        self._answered = now
        return silent

    def _silent(self, now: float) -> str:
        for other, (seen, since) in self._signs.items():
            count = self._store.add(f"sign/{other}", 0)
            if count != seen:
                self._signs[other] = (count, now)
            elif now - since > self._silence_s and self._store.add("left", 0) == 0:
                return (
                    f"the launcher on {self.nodes[other].host} has been silent for {self._silence_s:.0f} s; "
                    "ending the ranks here"
                )
        return ""


def rendezvous(
    endpoint: str, own: LauncherNode, *, timeout_s: float, say: Callable[[str], None]
) -> LauncherGroup:
    """Wait at `endpoint` (host:port) for the launchers of all machines. Every launcher calls it.

    Ranks are numbered by host name, then by arrival. `say` prints a message while this waits.

    Raises BloomeryError when another program holds the port, when a launcher does not arrive within
    `timeout_s` seconds, and, on every machine, when two launchers have different recipes.
    """
    host, port = read_endpoint(endpoint)
    store, serves = _store(host, port, timeout_s=timeout_s)

    def ask(call: Callable[[], _Answer]) -> _Answer:
        return ask_store(call, by=f"the launcher that serves {endpoint}", within_s=STORE_TIMEOUT_S)

    arrival = ask(lambda: store.add("arrived", 1)) - 1
    if arrival >= own.nodes:
        raise TrainingFailed(
            f"{own.nodes} nodes have already joined at {endpoint}: this one, {own.host}, is one too many.",
            remedy="Another run uses this port, or --nnodes is too small: choose another --rdzv port.",
        )
    ask(lambda: store.set(f"node/{arrival}", json.dumps(asdict(own))))
    arrived = _all_nodes(store, own, endpoint, ask, timeout_s=timeout_s, say=say)
    order = sorted(range(own.nodes), key=lambda number: (_natural(arrived[number].host), number))
    nodes = LauncherGroup(
        store, order.index(arrival), [arrived[number] for number in order], serves=serves, store_at=endpoint
    )
    try:
        _check_equal(nodes.nodes)
    except TrainingFailed:
        nodes.leave()
        raise
    return nodes


def _store(host: str, port: int, *, timeout_s: float) -> tuple[TCPStore, bool]:
    """Return the store at host:port and whether this process serves it, as the host's first launcher does."""
    is_here, is_free = _can_bind(host, port)
    if is_here and is_free:
        try:
            return TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            ), True
        except RuntimeError:
            pass  # another launcher on this machine took the port first
    wait_s = CONNECT_S if is_here else timeout_s
    store = _connected(host, port, wait_s=wait_s)
    if store is not None:
        return store, False
    if is_here:
        raise TrainingFailed(
            f"Port {port} of {host} is in use by a program that is no launcher.",
            remedy=f"Choose a free port, on all nodes: --rdzv {host}:{port + 1}",
        )
    raise RankLost(
        f"No launcher answered at {host}:{port} within {wait_s:.0f} s.",
        remedy=f"Start the same command on {host} too; port {port} must be open to this machine.",
    )


def _connected(host: str, port: int, *, wait_s: float) -> TCPStore | None:
    """Return a client of the store at host:port; None where nothing answers as a store does."""
    connected: list[TCPStore] = []

    def connect() -> None:
        with suppress(RuntimeError, ValueError):
            timeout = timedelta(seconds=wait_s)
            connected.append(TCPStore(host, port, is_master=False, timeout=timeout))

    # In a thread, because a store's timeout does not cover a server that accepts and never answers.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(wait_s + 2.0)
    return connected[0] if connected else None


def _can_bind(host: str, port: int) -> tuple[bool, bool]:
    """Return (whether `host` is this machine, whether its port is free)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BloomeryError(
            f"The host {host} of --rdzv has no address: {error}.", remedy="Name it as the nodes know it."
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE, False
    return True, True


def _all_nodes(
    store: Store,
    own: LauncherNode,
    endpoint: str,
    ask: Callable[[Callable[[], list[Any]]], list[Any]],
    *,
    timeout_s: float,
    say: Callable[[str], None],
) -> list[LauncherNode]:
    deadline, report_at = time.monotonic() + timeout_s, time.monotonic() + CONNECT_S
    missing = [f"node/{number}" for number in range(own.nodes)]

    def still_missing() -> list[str]:
        return [key for key in missing if not store.check([key])]

    while missing := ask(still_missing):
        if time.monotonic() > deadline:
            raise RankLost(
                f"{len(missing)} of {own.nodes} nodes were not at {endpoint} within {timeout_s:.0f} s.",
                remedy="Start the same command on each node, with the same --nnodes and --rdzv.",
            )
        if time.monotonic() > report_at:
            say(f"waiting at {endpoint} for {len(missing)} of {own.nodes} nodes")
            report_at = float("inf")
        time.sleep(_POLL_S)
    texts = ask(lambda: [store.get(f"node/{number}") for number in range(own.nodes)])
    return [LauncherNode(**json.loads(text)) for text in texts]


def _check_equal(nodes: list[LauncherNode]) -> None:
    """Raise TrainingFailed where a node has another recipe, or another --nnodes, than the first node."""
    first = nodes[0]
    for node in nodes:
        if node.nodes != first.nodes:
            raise TrainingFailed(
                f"{node.host} was started with --nnodes {node.nodes}, {first.host} with {first.nodes}.",
                remedy="Give every node the same --nnodes.",
            )
        if node.recipe != first.recipe:
            differences = setting_difference(
                node.recipe, first.recipe, there=f"on {node.host}", here=f"on {first.host}"
            )
            raise TrainingFailed(
                f"{node.host} has another recipe than {first.host}: {differences}.",
                remedy="Give every node the same recipe file and the same overrides.",
            )


def _natural(host: str) -> list[tuple[int, str]]:
    """Return a key that sorts node-2 before node-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]
