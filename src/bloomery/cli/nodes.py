"""The launchers of one run on several machines: how they meet, and how each learns that another failed.

They meet at a c10d store that the launcher on the named host serves. Nothing is unpickled from it: what
crosses is JSON. Ranks use the same store to find each other, so there is one port to open.
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

from torch._C._distributed_c10d import Store, TCPStore

from bloomery.cli.ranks import Share
from bloomery.errors import BloomeryError, RankLost, TrainingFailed
from bloomery.parallel.answers import ANSWER_S, answered
from bloomery.parallel.meeting import difference

CONNECT_S = 20.0
"""How long something that holds our port on this machine may take to answer as a launcher does."""
SILENCE_S = 60.0
"""A launcher that gave no sign of life for so long is lost."""
_SIGN_EVERY_S = 2.0
_POLL_S = 0.1

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a launcher says of itself. recipe: every setting by key."""

    host: str
    ranks: int
    nodes: int
    recipe: Mapping[str, str]


class Nodes:
    """A launcher among those of the other machines.

    A thread of its own gives signs of life and looks for those of others: a store that no longer answers
    holds it up, and not who asks `lost`. store_at: where it is, to name it; silence_s: how long is lost.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        nodes: list[Node],
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
    def share(self) -> Share:
        """The ranks of this machine."""
        first = sum(node.ranks for node in self.nodes[: self._number])
        world = sum(node.ranks for node in self.nodes)
        return Share(first=first, count=self.nodes[self._number].ranks, world=world)

    def lost(self) -> str:
        """Why the run cannot go on, as another launcher said or by its silence; empty while it can."""
        if not self._lost and time.monotonic() - self._answered > self._silence_s:
            self._lost = f"{self._server} has not answered for {self._silence_s:.0f} s; ending the ranks here"
        return self._lost

    def tell(self, failure: str) -> None:
        """Say to the others that a rank of this machine failed. The first failure counts."""
        with suppress(RankLost):  # whoever served the store is gone, and the others see that themselves
            self._ask(lambda: self._store.compare_set("failure", "", failure))

    def leave(self) -> None:
        """Say that this machine's ranks have ended; who serves the store stays until all have."""
        with suppress(RankLost):
            self._ask(lambda: self._store.add("left", 1))
            deadline = time.monotonic() + self._silence_s
            while self._serves and self._ask(lambda: self._store.add("left", 0)) < len(self.nodes):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        self._left.set()

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        return answered(call, by=self._server, within_s=min(ANSWER_S, self._silence_s))

    def _watch(self) -> None:
        """Until this launcher leaves, or something is lost."""
        while not self._lost and not self._left.wait(_SIGN_EVERY_S):
            try:
                self._lost = self._looked()
            except RuntimeError:  # what the store raises when whoever serves it is gone
                self._lost = f"{self._server} is gone; ending the ranks here"

    def _looked(self) -> str:
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


def meet_nodes(endpoint: str, mine: Node, *, timeout_s: float, say: Callable[[str], None]) -> Nodes:
    """Wait at `endpoint` (host:port) for the launchers of all nodes. Ranks go by host name, then by arrival.

    Raises BloomeryError for a port that something else holds, for nodes that do not come within `timeout_s`,
    and, on every node, for a recipe that is another node's.
    """
    host, port = _read_endpoint(endpoint)
    store, serves = _store(host, port, timeout_s=timeout_s)

    def ask(call: Callable[[], _Answer]) -> _Answer:
        return answered(call, by=f"the launcher that serves {endpoint}", within_s=ANSWER_S)

    arrival = ask(lambda: store.add("arrived", 1)) - 1
    if arrival >= mine.nodes:
        raise TrainingFailed(
            f"{mine.nodes} nodes are already at {endpoint}: this one, {mine.host}, is one too many.",
            remedy="Another run uses this port, or --nnodes is too small: choose another --rdzv port.",
        )
    ask(lambda: store.set(f"node/{arrival}", json.dumps(asdict(mine))))
    found = _all_nodes(store, mine, endpoint, ask, timeout_s=timeout_s, say=say)
    order = sorted(range(mine.nodes), key=lambda number: (_natural(found[number].host), number))
    nodes = Nodes(
        store, order.index(arrival), [found[number] for number in order], serves=serves, store_at=endpoint
    )
    try:
        _refuse_unequal(nodes.nodes)
    except TrainingFailed:
        nodes.leave()
        raise
    return nodes


def _read_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BloomeryError(
            f"--rdzv {endpoint} is not HOST:PORT.",
            remedy="Name the first node and a free port there, the same on all nodes: --rdzv node-1:29400",
        )
    return host, int(port)


def _store(host: str, port: int, *, timeout_s: float) -> tuple[TCPStore, bool]:
    """The store at host:port, and whether it is served from here: on that host, the first launcher does."""
    here, free = _can_bind(host, port)
    if here and free:
        try:
            return TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            ), True
        except RuntimeError:
            pass  # another launcher on this machine was quicker
    wait_s = CONNECT_S if here else timeout_s
    store = _connected(host, port, wait_s=wait_s)
    if store is not None:
        return store, False
    if here:
        raise TrainingFailed(
            f"Port {port} of {host} is in use by something that is no launcher of ours.",
            remedy=f"Choose a free port, on all nodes: --rdzv {host}:{port + 1}",
        )
    raise RankLost(
        f"No launcher answered at {host}:{port} within {wait_s:.0f} s.",
        remedy=f"Start the same command on {host} too; port {port} must be open to this machine.",
    )


def _connected(host: str, port: int, *, wait_s: float) -> TCPStore | None:
    """The store that somebody serves at host:port; None where nothing answers as a store does."""
    found: list[TCPStore] = []

    def connect() -> None:
        with suppress(RuntimeError, ValueError):
            timeout = timedelta(seconds=wait_s)
            found.append(TCPStore(host, port, is_master=False, timeout=timeout))

    # In a thread: a store's timeout does not cover a server that takes the connection and says nothing.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(wait_s + 2.0)
    return found[0] if found else None


def _can_bind(host: str, port: int) -> tuple[bool, bool]:
    """(whether `host` is this machine, whether its port is free)."""
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
    mine: Node,
    endpoint: str,
    ask: Callable[[Callable[[], list[Any]]], list[Any]],
    *,
    timeout_s: float,
    say: Callable[[str], None],
) -> list[Node]:
    deadline, told = time.monotonic() + timeout_s, time.monotonic() + CONNECT_S
    missing = [f"node/{number}" for number in range(mine.nodes)]

    def still_missing() -> list[str]:
        return [key for key in missing if not store.check([key])]

    while missing := ask(still_missing):
        if time.monotonic() > deadline:
            raise RankLost(
                f"{len(missing)} of {mine.nodes} nodes were not at {endpoint} within {timeout_s:.0f} s.",
                remedy="Start the same command on each node, with the same --nnodes and --rdzv.",
            )
        if time.monotonic() > told:
            say(f"waiting at {endpoint} for {len(missing)} of {mine.nodes} nodes")
            told = float("inf")
        time.sleep(_POLL_S)
    texts = ask(lambda: [store.get(f"node/{number}") for number in range(mine.nodes)])
    return [Node(**json.loads(text)) for text in texts]


def _refuse_unequal(nodes: list[Node]) -> None:
    """Raise TrainingFailed where a node has another recipe or counts other nodes than the first."""
    first = nodes[0]
    for node in nodes:
        if node.nodes != first.nodes:
            raise TrainingFailed(
                f"{node.host} was started with --nnodes {node.nodes}, {first.host} with {first.nodes}.",
                remedy="Give every node the same --nnodes.",
            )
        if node.recipe != first.recipe:
            found = difference(node.recipe, first.recipe, there=f"on {node.host}", here=f"on {first.host}")
            raise TrainingFailed(
                f"{node.host} has another recipe than {first.host}: {found}.",
                remedy="Give every node the same recipe file and the same overrides.",
            )


def _natural(host: str) -> list[tuple[int, str]]:
    """Sorts node-2 before node-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]
