"""Threads as the ranks of a peer, with what a load asks of a mesh."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bloomery.checkpoint.writer.ranks import Ranks

DEADLINE_S = 120


class Threads:
    """`world` threads. What one raises is its result; nobody waits for it longer than the deadline."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._barrier = threading.Barrier(world, timeout=DEADLINE_S)
        self._values: list[Any] = [None] * world
        self._sent: list[Mapping[int, torch.Tensor]] = [{}] * world

    def run(self, act: Callable[[Ranks], Any]) -> list[Any]:
        results: list[Any] = [None] * self._world

        def target(rank: int) -> None:
            try:
                results[rank] = act(self._ranks(rank))
            except Exception as error:  # noqa: BLE001  — the test looks at it
                results[rank] = error
                self._barrier.abort() if isinstance(error, threading.BrokenBarrierError) else None

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self._world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def _ranks(self, rank: int) -> Ranks:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        def exchange(sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
            self._sent[rank] = sends
            self._barrier.wait()
            for sender, buffer in receives.items():
                buffer.copy_(self._sent[sender][rank])
            assert all(rank not in sent or sender in receives for sender, sent in enumerate(self._sent))
            self._barrier.wait()

        return Ranks(rank=rank, world=self._world, gather=gather, exchange=exchange)
