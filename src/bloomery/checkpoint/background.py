"""Saving beside the training: staged into shared memory while it computes, written by another process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bloomery.checkpoint.arena import GIVEN_UP, Arena, mapped_bytes, refuse_without_memory
from bloomery.checkpoint.datafile import DataFile
from bloomery.checkpoint.ramcopy import Holdings, label_of, read_holding, remove_label
from bloomery.checkpoint.staging import Pace, Plan, mark_ready, place, stage
from bloomery.checkpoint.writerprocess import WriterProcess
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.events.storage import storage_error

log = logging.getLogger(__name__)

ARENAS = 2
_TICK_S = 0.5
_WINDOWS = 3
"""Of so many steps, the shortest says how long the next one will be: one may have been held up."""


@dataclass(frozen=True, kw_only=True)
class MemoryCopies:
    """That what was staged stays in memory under a name, and that parts of others are kept beside it."""

    root: Path
    run: Path
    identity: str
    rank: int
    token: str
    host: str

    @cached_property
    def holdings(self) -> Holdings:
        """Where it all lies."""
        return Holdings(self.root, self.run, self.identity)

    def slot(self, number: int) -> Path:
        """The file of one of this rank's arenas."""
        return self.holdings.slot(self.rank, number)


@dataclass(kw_only=True)
class Saving:
    """One save on its way. failure, seconds and bytes are there once it is over."""

    step: int
    name: str
    plan: Plan
    order: dict[str, Any]
    arena: int
    failure: BloomeryError | None = None
    seconds: float = 0.0
    bytes: int = 0
    staged: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


class BackgroundSaver:
    """Two arenas, a writer, and the saves on their way: at most one for each arena.

    committed: called in a thread of its own with each save that this rank's writer has finished; it may raise
    BloomeryErrors, which become the save's.
    """

    def __init__(
        self,
        *,
        bytes: int,
        throttled: bool,
        deadline_s: float,
        device: torch.device,
        committed: Callable[[Saving], None],
        memory: MemoryCopies | None = None,
    ) -> None:
        self._memory = memory
        refuse_without_memory(self._bytes_needed(bytes))
        self.pace = Pace(throttled=throttled)
        self.bytes = bytes
        self._deadline_s, self._device, self._committed = deadline_s, device, committed
        self._arenas: list[Arena] = []
        self._writer: WriterProcess | None = None
        self._failure: BloomeryError | None = None
        self._busy: dict[int, Saving] = {}
        self._staging: Saving | None = None
        self._settled_at = 0.0
        self._windows_s: deque[float] = deque(maxlen=_WINDOWS)
        self._closed = False
        # Touching new memory is slow: the first steps go on while it happens.
        self._making = threading.Thread(target=self._make, name="arenas", daemon=True)
        self._making.start()

    @property
    def is_busy(self) -> bool:
        """Whether a save that came now would find no arena."""
        return len(self._busy) >= ARENAS

    def begin(
        self,
        *,
        step: int,
        name: str,
        files: Sequence[DataFile],
        order: Mapping[str, Any],
        partner: tuple[str, int] | None = None,
    ) -> Saving:
        """Begin a save of the state as it is now; it must not be written before `settle`. Not when busy.

        Raises CheckpointError when the arenas could not be made.
        """
        self._wait_for_arenas()
        plan = place(files)
        number = min((number for number in range(ARENAS) if number not in self._busy), key=self._age)
        if plan.bytes > self._arenas[number].bytes:
            raise CheckpointError(
                f"the state has grown to {plan.bytes:,} bytes, beyond its arena",
                remedy="This is a mistake in bloomery, not in your run: please report it with the recipe.",
            )
        listed = [
            {"name": file.name, "offset": offset, "bytes": file.bytes}
            for file, offset in zip(plan.files, plan.offsets, strict=True)
        ]
        whole_order = {**order, "files": listed, "arena": number}
        if self._memory is not None:
            remove_label(self._memory.slot(number))
            slot = str(self._memory.slot(number))
            whole_order["memory"] = {"slot": slot, "token": self._memory.token, "partner": partner}
        saving = Saving(step=step, name=name, plan=plan, order=whole_order, arena=number)
        self._busy[number] = self._staging = saving
        self._arenas[number].filled = 0
        ready = mark_ready(self._device)
        for act, arguments in ((self._stage, (saving, ready)), (self._write, (saving,))):
            threading.Thread(target=act, args=arguments, name=f"save {name}", daemon=True).start()
        return saving

    def settle(self) -> None:
        """Return when the state has been staged and may be written. Costs nothing when no save has begun."""
        staging = self._staging
        if staging is not None and not staging.staged.is_set():
            self.pace.hurry()
            staging.staged.wait()
        self._staging = None
        now = time.monotonic()
        if self._settled_at:
            self._windows_s.append(now - self._settled_at)
        self._settled_at = now

    def wait(self, *, deadline_s: float) -> list[str]:
        """Wait until all saves are over, and return the names of those that are not after the deadline."""
        deadline = time.monotonic() + deadline_s
        self.pace.hurry()
        for saving in tuple(self._busy.values()):
            while not saving.over.wait(min(_TICK_S, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return sorted(one.name for one in self._busy.values() if not one.over.is_set())
        return []

    def close(self) -> None:
        """End the writer and let the memory go. What is not over is not committed."""
        self._closed = True
        self._making.join()
        self.settle()
        if self._writer is not None:
            self._writer.close()
        for saving in tuple(self._busy.values()):
            saving.over.wait(_TICK_S)
        for arena in self._arenas:
            arena.close()
        self._arenas = []
        if self._memory is not None:
            self._memory.holdings.release()

    @property
    def writer_pid(self) -> int | None:
        """The writer's process number, for those who watch or disturb it."""
        return None if self._writer is None else self._writer.pid

    def _make(self) -> None:
        try:
            for number in range(ARENAS):
                if self._closed:
                    return
                path = None if self._memory is None else self._slot_for(number)
                self._arenas.append(Arena.create(self.bytes, name=f"bloomery-arena-{number}", path=path))
            self._writer = WriterProcess(self._arenas, keep=self._keep())
            self._writer.start()
        except BloomeryError as error:
            self._failure = error

    def endpoint(self) -> tuple[str, int] | None:
        """Return where this rank's writer keeps parts of others; waits until it does."""
        if self._memory is None:
            return None
        self._wait_for_arenas()
        assert self._writer is not None
        port = self._writer.port
        return None if port is None else (self._memory.host, port)

    def forget(self) -> None:
        """Leave nothing in memory: the run has ended well. After `close`."""
        if self._memory is not None:
            self._memory.holdings.remove(self._memory.rank)

    def _bytes_needed(self, bytes: int) -> int:
        """Return the memory that is still to be taken: two arenas, and as much for a partner."""
        if self._memory is None:
            return ARENAS * bytes
        there = (self._memory.slot(number) for number in range(ARENAS))
        return bytes * (2 * ARENAS - 2 * sum(slot.exists() for slot in there))

    def _slot_for(self, number: int) -> Path:
        """Return an arena's file; what it held in another size is forgotten. Raises StorageError."""
        assert self._memory is not None
        slot = self._memory.slot(number)
        try:
            self._memory.holdings.create()
            if slot.exists() and slot.stat().st_size != mapped_bytes(self.bytes):
                remove_label(slot)
        except OSError as error:
            raise storage_error(error, path=slot, doing="Taking memory for checkpoints") from error
        return slot

    def _keep(self) -> dict[str, Any] | None:
        memory = self._memory
        if memory is None:
            return None
        root, run = str(memory.root), str(memory.run.resolve())
        return {
            "root": root,
            "run": run,
            "identity": memory.identity,
            "rank": memory.rank,
            "token": memory.token,
            "host": memory.host,
        }

    def _age(self, number: int) -> tuple[int, int]:
        """Return what orders arenas by how little is lost when one is used again."""
        held = None if self._memory is None else read_holding(label_of(self._memory.slot(number)))
        return (-1, -1) if held is None else (held.incarnation, held.step)

    def _wait_for_arenas(self) -> None:
        self._making.join()
        if self._failure is not None:
            raise self._failure

    def _stage(self, saving: Saving, ready: Any) -> None:
        """Copy the state, in a thread of its own."""
        arena = self._arenas[saving.arena]
        try:
            self.pace.begin(saving.plan.bytes, window_s=min(self._windows_s, default=0.0))
            stage(saving.plan, arena, self.pace, ready=ready)
        except Exception:  # a thread's edge: the writer gives this save up, and its trainer is told
            log.exception("copying the state for %s failed", saving.name)
            arena.filled = GIVEN_UP
        finally:
            saving.staged.set()

    def _write(self, saving: Saving) -> None:
        """Have the copy written while it is made, in a thread of its own."""
        begun = time.monotonic()
        try:
            assert self._writer is not None
            answer = self._writer.write(saving.order, deadline_s=self._deadline_s)
            saving.staged.wait()
            saving.bytes = answer["bytes"]
            if answer["copy_failure"]:
                log.warning("%s is not in a partner's memory: %s", saving.name, answer["copy_failure"])
            saving.seconds = time.monotonic() - begun
            self._busy.pop(saving.arena, None)
            self._committed(saving)
        except BloomeryError as error:
            saving.failure = error
        except Exception as error:  # a thread's edge: the save has failed, and its trainer is told
            log.exception("saving %s failed", saving.name)
            saving.failure = CheckpointError(f"saving {saving.name} failed: {error}")
        finally:
            saving.staged.wait()  # until then the arena is not free for another
            self._busy.pop(saving.arena, None)
            saving.over.set()
