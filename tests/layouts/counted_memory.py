"""Bytes of the CPU's memory that tensors take, as torch's allocator tells them, of compiled code too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(kw_only=True)
class CountedMemory:
    """What was allocated while it counted. held: and not freed by its end. most: at once."""

    held: int = 0
    most: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)

    def _add(self, address: int, size: int) -> None:
        if size > 0:
            self._sizes[address] = size
            self.held += size
        else:
            self.held -= self._sizes.pop(address, 0)  # what was allocated before is not counted
        self.most = max(self.most, self.held)


@contextmanager
def counted_memory() -> Iterator[CountedMemory]:
    """Count what the block allocates; the figures are there after it."""
    counted = CountedMemory()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield counted
        gc.collect()
    assert profiler.profiler is not None
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    events = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    for _, address, size in sorted(events, key=lambda one: one[0]):
        counted._add(address, size)
