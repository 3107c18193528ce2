"""Messages as NCCL passes them, for ranks that are threads: nothing is buffered, and what a rank asks of one
group is done in the order in which it was asked, each thing when the other end has come to it too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor


class Stuck(Exception):
    """Every rank that lives waits for another."""


@dataclass(eq=False)
class Asked:
    """A message that one end has asked for. It is also the work that is waited for."""

    fabric: Fabric
    sends: bool
    other: int
    tensor: Tensor
    done: bool = False

    def wait(self) -> None:
        self.fabric.wait_for(self)


@dataclass
class Fabric:
    """Stands in for torch.distributed. Who asks is told by the name of the thread."""

    asked: dict[tuple[int, Hashable], deque[Asked]] = field(default_factory=dict)
    living: int = 0
    waiting: set[Asked] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self, world: int, life: Callable[[int], None]) -> None:
        """Let all ranks live at once. Raises Stuck where they wait for each other, and what they raise."""
        self.living = world
        with ThreadPoolExecutor(world) as pool:
            for ended in [pool.submit(self._live, rank, life) for rank in range(world)]:
                ended.result()
        assert not any(self.asked.values()), "every message was received"

    def isend(self, tensor: Tensor, *, dst: int, group: Hashable, tag: int = 0) -> Asked:
        return self._ask(Asked(self, sends=True, other=dst, tensor=tensor.clone()), group)

    def irecv(self, tensor: Tensor, *, src: int, group: Hashable, tag: int = 0) -> Asked:
        return self._ask(Asked(self, sends=False, other=src, tensor=tensor), group)

    def send(self, tensor: Tensor, *, dst: int, group: Hashable) -> None:
        self.isend(tensor, dst=dst, group=group).wait()

    def recv(self, tensor: Tensor, *, src: int, group: Hashable) -> None:
        self.irecv(tensor, src=src, group=group).wait()

    def wait_for(self, asked: Asked) -> None:
        with self.changed:
            self.waiting.add(asked)
            self.changed.notify_all()
            try:
                while not asked.done:
                    if self._is_stuck():
                        raise Stuck
                    self.changed.wait()
            finally:
                self.waiting.discard(asked)

    def _live(self, rank: int, life: Callable[[int], None]) -> None:
        threading.current_thread().name = str(rank)
        try:
            life(rank)
        finally:
            with self.changed:
                self.living -= 1
                self.changed.notify_all()

    def _is_stuck(self) -> bool:
        return len(self.waiting) == self.living and not any(one.done for one in self.waiting)

    def _ask(self, asked: Asked, group: Hashable) -> Asked:
        own = int(threading.current_thread().name)
        with self.changed:
            self.asked.setdefault((own, group), deque()).append(asked)
            while self._passed_one():
                pass
            self.changed.notify_all()
        return asked

    def _passed_one(self) -> bool:
        """Pass one message whose two ends are both next in their groups."""
        for (rank, group), here in self.asked.items():
            there = self.asked.get((here[0].other, group)) if here else None
            if here and there and there[0].other == rank and here[0].sends != there[0].sends:
                ends = here.popleft(), there.popleft()
                sender, receiver = ends if ends[0].sends else ends[::-1]
                receiver.tensor.copy_(sender.tensor)
                sender.done = receiver.done = True
                return True
        return False
