"""A store behind a relay that can freeze: it keeps its connections, and passes nothing on any more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

_TIMEOUT = timedelta(seconds=120)


@dataclass
class Relay:
    """served: the store, as its server has it; port: where the relay listens."""

    served: TCPStore
    port: int
    passes: threading.Event

    def client(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=_TIMEOUT)

    def freeze(self) -> None:
        self.passes.clear()


@contextmanager
def relayed_store() -> Iterator[Relay]:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        relay = Relay(served, listening.getsockname()[1], threading.Event())
        relay.passes.set()
        threading.Thread(target=_accept, args=(listening, relay), daemon=True).start()
        try:
            yield relay
        finally:
            relay.passes.set()  # so that no thread stays behind in a call


def _accept(listening: socket.socket, relay: Relay) -> None:
    with suppress(OSError):
        while True:
            near, _ = listening.accept()
            far = socket.create_connection(("127.0.0.1", relay.served.port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink, relay.passes), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, passes: threading.Event) -> None:
    with suppress(OSError):
        while content := source.recv(65536):
            passes.wait()
            sink.sendall(content)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
