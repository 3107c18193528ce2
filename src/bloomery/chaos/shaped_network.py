"""Proxies on this machine that give each peer a link of a given rate, delay and loss, and can cut or slow it.

The sockets and the processes at both ends are real; only the link between them is simulated. One thread
serves all hosts.

`Pipe` computes when a byte arrives in one direction of a link, from its rate, delay, loss and faults.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, TypeVar

SEGMENT_BYTES = 1448
"""The bytes that one lost packet loses: a TCP segment at MTU 1500."""
LEAST_RETRANSMISSION_S = 0.2
"""Linux's shortest retransmission timeout, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The properties of a link, the same in each direction.

    rate: bytes per second; 0: no limit.
    delay: seconds one way.
    loss: the share of packets that is lost, from 0 to below 1.
    """

    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if self.rate < 0 or self.delay < 0 or not 0 <= self.loss < 1:
            raise ValueError(f"not a link: {self}")


class Pipe:
    """One direction of a host's link, shared by all its connections. Bytes leave in order.

    A lost segment delays its chunk by a retransmission, and so delays the chunks behind it, as TCP's ordered
    delivery does. The real sockets at both ends do the congestion control.

    bytes: the bytes that have been offered so far.
    """

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        self.shape = shape
        self.bytes = 0
        self._random = Random(seed)
        self._free_at = 0.0
        self._blocked_until = 0.0
        self._extra_delay = 0.0
        self._extra_until = 0.0
        self._corruptions = 0

    def arrival(self, size: int, *, now: float) -> float:
        """Return when the last of `size` bytes that are offered at the time `now` is delivered."""
        shape = self.shape
        start = max(now, self._free_at, self._blocked_until)
        self._free_at = start + (size / shape.rate if shape.rate else 0.0)
        self.bytes += size
        delay = shape.delay + (self._extra_delay if now < self._extra_until else 0.0)
        return self._free_at + delay + self._lost_s(size)

    def cut(self, until: float) -> None:
        """Deliver nothing before the time `until`; both ends see no error, as when a cable is out."""
        self._blocked_until = max(self._blocked_until, until)

    def slow(self, seconds: float, *, until: float) -> None:
        """Delay what is offered before the time `until` by `seconds` more."""
        self._extra_delay, self._extra_until = seconds, until

    def corrupt_next(self) -> None:
        """Flip one bit of the next chunk that is delivered."""
        self._corruptions += 1

    def spoil(self, chunk: bytes) -> bytes:
        """Return the chunk as it arrives: with a flipped bit if `corrupt_next` asked for that."""
        if not self._corruptions or not chunk:
            return chunk
        self._corruptions -= 1
        spoilt = bytearray(chunk)
        spoilt[self._random.randrange(len(spoilt))] ^= 1 << self._random.randrange(8)
        return bytes(spoilt)

    def _lost_s(self, size: int) -> float:
        if not self.shape.loss:
            return 0.0
        segments = -(-size // SEGMENT_BYTES)
        if self._random.random() < (1 - self.shape.loss) ** segments:
            return 0.0
        # The sender notices a segment lost among many by the acknowledgements of later ones, and one of the
        # last segments by its timer.
        round_trip = 2 * self.shape.delay
        return round_trip if segments > 3 else max(LEAST_RETRANSMISSION_S, 2 * round_trip)


log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16
LEAST_WINDOW_BYTES = 1 << 18
UNLIMITED_WINDOW_BYTES = 1 << 26
"""The most bytes of one connection that are in flight when no rate limits it."""
DEADLINE_S = 30.0
"""Seconds within which the thread that serves the proxies must answer a request."""

Answer = TypeVar("Answer")


@dataclass(kw_only=True)
class Host:
    """A simulated host.

    arriving, leaving: the two directions of its link.
    """

    name: str
    arriving: Pipe
    leaving: Pipe
    ports: dict[int, int] = field(default_factory=dict)
    """The port that the host's process listens on, by the port that others dial."""
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    servers: list[asyncio.Server] = field(default_factory=list)


class ShapedNetwork:
    """Simulated hosts behind shaped links, on loopback. A context manager; closing it ends every connection.

    seed: decides which packets are lost and which bits are flipped.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._hosts: dict[str, Host] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="shaped-network", daemon=True)
        self._thread.start()

    def host(self, name: str, shape: Shape) -> None:
        """Add a host with a link of this shape in each direction."""
        if name in self._hosts:
            raise ValueError(f"{name} is already a host")
        number = 2 * len(self._hosts)
        self._hosts[name] = Host(
            name=name,
            arriving=Pipe(shape, seed=self._seed + number),
            leaving=Pipe(shape, seed=self._seed + number + 1),
        )

    def open(self, name: str, port: int, *, advertised: int = 0) -> int:
        """Let others reach `port` of a host, and return the port that they must dial.

        advertised: the port to dial; 0: a free one is chosen.
        """
        return self._ask(self._open(self._hosts[name], port, advertised))

    def cut(self, name: str, seconds: float) -> None:
        """Deliver nothing to or from a host for `seconds`; both ends see no error."""
        until = self._loop.time() + seconds
        for pipe in self._pipes(name):
            self._do(pipe.cut, until)

    def sever(self, name: str) -> None:
        """Reset every connection of a host."""
        self._do(self._sever, self._hosts[name])

    def slow(self, name: str, seconds: float, *, lasting: float) -> None:
        """Delay everything to and from a host by `seconds` more. lasting: for how many seconds."""
        until = self._loop.time() + lasting
        for pipe in self._pipes(name):
            self._do(partial(pipe.slow, seconds, until=until))

    def corrupt(self, name: str) -> None:
        """Flip one bit of the next chunk that is delivered to a host."""
        self._do(self._hosts[name].arriving.corrupt_next)

    def traffic(self, name: str) -> tuple[int, int]:
        """Return the bytes to and from a host so far, over connections that others dialled."""
        host = self._hosts[name]
        return host.arriving.bytes, host.leaving.bytes

    def close(self) -> None:
        """End every connection and the thread."""
        if self._loop.is_closed():
            return
        self._ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def __enter__(self) -> ShapedNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _ask(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def _do(self, work: Callable[..., None], *arguments: Any) -> None:  # Any: whatever the work takes
        """Call `work` in the thread that serves the proxies, the only one that may touch the pipes."""

        async def done() -> None:
            work(*arguments)

        self._ask(done())

    def _pipes(self, name: str) -> tuple[Pipe, Pipe]:
        return self._hosts[name].arriving, self._hosts[name].leaving

    @staticmethod
    def _sever(host: Host) -> None:
        for writer in list(host.connections):
            writer.transport.abort()

    async def _open(self, host: Host, port: int, wanted: int) -> int:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # A task that `_close` cancelled would be logged by asyncio as an error of its callback.
            with suppress(asyncio.CancelledError):
                await self._connect(host, port, reader, writer)

        server = await asyncio.start_server(accept, "127.0.0.1", wanted, limit=CHUNK_BYTES)
        host.servers.append(server)
        advertised: int = server.sockets[0].getsockname()[1]
        host.ports[advertised] = port
        return advertised

    async def _connect(
        self, host: Host, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host.connections.add(writer)
        try:
            # The handshake takes one round trip, and waits as long as the link is cut.
            loop = asyncio.get_running_loop()
            arrives_at = host.arriving.arrival(0, now=loop.time())
            await asyncio.sleep(max(0.0, arrives_at + host.leaving.shape.delay - loop.time()))
            inner, outer = await asyncio.open_connection("127.0.0.1", port, limit=CHUNK_BYTES)
        except OSError:  # no process listens on that port now: the dialler sees a reset
            writer.transport.abort()
            host.connections.discard(writer)
            return
        host.connections.add(outer)
        try:
            await asyncio.gather(_carry(reader, outer, host.arriving), _carry(inner, writer, host.leaving))
        finally:
            for end in (writer, outer):
                host.connections.discard(end)
                end.transport.abort()

    async def _close(self) -> None:
        for host in self._hosts.values():
            for server in host.servers:
                server.close()
            self._sever(host)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pipe: Pipe) -> None:
    """Copy what is read to the writer, each chunk when the pipe delivers it, until either end closes."""
    loop, underway = asyncio.get_running_loop(), deque[tuple[float, bytes]]()
    arrived, taken, waiting, latest = asyncio.Event(), asyncio.Event(), 0, 0.0
    window = _window_bytes(pipe.shape)

    async def deliver() -> None:
        nonlocal waiting
        try:
            while True:
                while not underway:
                    arrived.clear()
                    await arrived.wait()
                at, chunk = underway.popleft()
                await asyncio.sleep(max(0.0, at - loop.time()))
                if not chunk:
                    writer.write_eof()
                    return
                writer.write(pipe.spoil(chunk))
                await writer.drain()
                waiting -= len(chunk)
                taken.set()
        except OSError as error:
            log.info("a connection ended: %s", error)
        finally:
            taken.set()

    delivering = loop.create_task(deliver())
    try:
        while not delivering.done():
            chunk = await reader.read(CHUNK_BYTES)
            latest = max(latest, pipe.arrival(len(chunk), now=loop.time()))
            waiting += len(chunk)
            underway.append((latest, chunk))  # the end of the stream, an empty chunk, is delayed too
            arrived.set()
            if not chunk:
                await delivering
            while waiting > window and not delivering.done():
                taken.clear()
                await taken.wait()
    except OSError as error:
        log.info("a connection ended: %s", error)
        # The other end would wait for ever if the reset did not reach it, as late as a byte would.
        await asyncio.sleep(max(latest, pipe.arrival(0, now=loop.time())) - loop.time())
        writer.transport.abort()
    finally:
        delivering.cancel()


def _window_bytes(shape: Shape) -> int:
    """Return the bytes that may be in flight: twice rate times round trip, as with a large send buffer."""
    if not shape.rate:
        return UNLIMITED_WINDOW_BYTES
    return max(LEAST_WINDOW_BYTES, int(2 * shape.rate * 2 * shape.delay))
