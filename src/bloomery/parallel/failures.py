"""Which of the errors that torch's backends raise say that another rank is gone, and not that we erred.

Backends say so in words alone: the store has types of its own, gloo raises bare RuntimeErrors, and NCCL's
DistBackendError is also raised for wrong use and for errors of this rank's own device.
"""

from __future__ import annotations

import torch.distributed as dist

SOCKETS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection timed out",
    "connection was likely closed",
    "closed by peer",
    "closed by remote peer",
    "broken pipe",
    "no route to host",
    "network is unreachable",
    "socket timeout",
    "connect timeout",
    "timed out connecting",
)
"""What gloo, the store and NCCL's sockets say."""
WAITS = (
    "timed out waiting",
    "operation timed out",
    "application timeout caused pair closure",
    "collective operation timeout",
    "wait timeout",
)
"""What gloo, NCCL's watchdog and the store say of an answer that did not come."""
NCCL = (
    "ncclremoteerror",
    "remote process exited",
    "nccl communicator was aborted",
    "got completion from peer",
)
"""What NCCL says besides: of the other side, of a communicator that the watchdog has ended, of InfiniBand."""


def tells_of_a_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective or the store failed because another rank, or who serves the store, is gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    said = str(error).lower()
    return any(words in said for words in (*SOCKETS, *WAITS, *NCCL))
