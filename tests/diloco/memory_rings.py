"""Rings of peers in one process: arithmetic at a table, or real ones over socket pairs."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from bloomery.diloco.all_reduce import RingFailed
from bloomery.protocol.rank_messages import HopConnections
from bloomery.protocol.records import Attempt

DEADLINE_S = 240.0


def connected(size: int) -> list[tuple[HopConnections, ...]]:
    """Each member's hop of a ring over socket pairs."""
    pairs = [socket.socketpair() for _ in range(size)]
    keys = [secrets.token_bytes(32) for _ in range(size)]
    if size == 1:
        return [()]
    return [
        (
            HopConnections(
                rank=0,
                next_fds=(pairs[index][0].detach(),),
                previous_fds=(pairs[index - 1][1].detach(),),
                send_keys=(keys[index],),
                receive_keys=(keys[index - 1],),
            ),
        )
        for index in range(size)
    ]


class Table:
    """Where the members of one attempt put their values; the last one adds them up."""

    def __init__(self, attempt: Attempt, fails: Callable[[str], bool]) -> None:
        self.attempt, self.fails = attempt, fails
        self.condition = threading.Condition()
        self.values: dict[int, tuple[float, Tensor]] = {}
        self.sum: Tensor | None = None
        self.cancelled = False


class TableRing:
    """Implements RingConnections: arithmetic, in the order of the members."""

    def __init__(self, table: Table, index: int) -> None:
        self.table, self.index = table, index

    codec = "fp32"

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        table = self.table
        if table.fails(table.attempt.members[self.index]):
            values.fill_(torch.nan)  # a ring that breaks leaves anything
            raise RingFailed("cut", kind="cut", culprit=None)
        with table.condition:
            table.values[self.index] = weight, values.clone()
            if len(table.values) == len(table.attempt.members):
                parts = [table.values[index] for index in sorted(table.values)]
                table.sum = sum(weight * part.double() for weight, part in parts).float()
                table.condition.notify_all()
            table.condition.wait_for(lambda: table.sum is not None or table.cancelled, DEADLINE_S)
            if table.sum is None:
                raise RingFailed("cancelled", kind="cancelled")
            values.copy_(table.sum)

    def cancel(self) -> None:
        with self.table.condition:
            self.table.cancelled = True
            self.table.condition.notify_all()

    def close(self) -> None:
        pass
