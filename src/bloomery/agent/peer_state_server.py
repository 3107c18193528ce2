"""Serves a peer's state at each of its addresses, and where it waits at other peers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.state_transfer.rate_limiter import RateLimiter
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.transport.sockets import join_address, split_address
from bloomery.transport.trust import Trust

if TYPE_CHECKING:
    from bloomery.agent.assemble import PeerAccess


class PeerStateServer:
    """Serves the peer's state beside each listening port, on the next port or, if that is 0, on a free one.

    A peer that only dials serves the connections on which it waits at other peers.
    """

    def __init__(
        self, access: PeerAccess, trust: Trust, states: ServedStates, *, limit_bytes_s: float
    ) -> None:
        rate_limiter = RateLimiter(limit_bytes_s)
        self._servers = [
            StateServer(address, trust, states, rate_limiter=rate_limiter)
            for address in [*map(_beside, access.listen)] or [""]
        ]
        dialled = tuple(self._dialled(address) for address in access.advertise if access.listen)
        self._states = states
        self.urls: Sequence[str] = dialled or [url for server in self._servers for url in server.urls]
        self.serve = self._servers[0].serve

    @property
    def is_serving(self) -> bool:
        """Whether there is a state or an average to be served."""
        return not self._states.is_empty

    def offer(self, directory: Path, *, round: int, digest: str) -> None:
        """Serve this checkpoint from now on."""
        self._states.put(digest, directory, round=round)

    def keep(self, digests: Collection[str]) -> None:
        """Serve no other states than these any more."""
        self._states.keep(digests)

    def close(self) -> None:
        """Stop serving."""
        for server in self._servers:
            server.close()

    def _dialled(self, address: str) -> str:
        """Return the URL from which peers that dial `address` for the ring fetch the state."""
        host, port = split_address(address)
        server = self._servers[0]
        _, own = split_address(server.address)
        return f"{server.scheme}://{join_address(host, port + 1 if port else own)}"


def _beside(address: str) -> str:
    """Return the address that is beside one of the rings."""
    host, port = split_address(address)
    return join_address(host, port + 1 if port else 0)
