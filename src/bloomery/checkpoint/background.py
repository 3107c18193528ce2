"""Saving beside the training: staged into shared memory while it computes, written by another process."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bloomery.checkpoint.arena import GIVEN_UP, Arena, mapped_bytes
from bloomery.checkpoint.deadlines import (
    ARENAS_S,
    LAST_WORDS_S,
    SAVES_ON_THEIR_WAY,
    WRITER_END_S,
    Deadlines,
)
from bloomery.checkpoint.partnote import give_up, told
from bloomery.checkpoint.ramcopy import label_of, read_holding, remove_label
from bloomery.checkpoint.room import MemoryCopies
from bloomery.checkpoint.share import Share
from bloomery.checkpoint.staging import Pace, Ready, mark_ready, pin, stage, unpin
from bloomery.checkpoint.state import StateEntry
from bloomery.checkpoint.writerprocess import WriterLost, WriterProcess
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.events.storage import storage_error

log = logging.getLogger(__name__)

ARENAS = SAVES_ON_THEIR_WAY
_WINDOWS = 3
"""Of so many steps, the shortest says how long the next one will be: one may have been held up."""


@dataclass(kw_only=True)
class Saving:
    """One save on its way. failure, seconds and bytes are there once it is over.

    texts: what of the order is JSON already. run_length_steps: for retention.
    """

    step: int
    name: str
    run_length_steps: int | None
    share: Share
    order: dict[str, Any]
    texts: Mapping[str, str]
    arena: int
    pace: Pace
    deadlines: Deadlines
    failure: BloomeryError | None = None
    seconds: float = 0.0
    bytes: int = 0
    staged: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


class BackgroundSaver:
    """Two arenas, a writer, and the saves on their way: at most one for each arena.

    bytes: of an arena. committed: called in a thread of its own with each save that this rank's writer has
    finished; it may raise BloomeryErrors, which become the save's. throttled: may be changed while it lives.
    """

    def __init__(
        self,
        *,
        bytes: int,
        throttled: bool,
        device: torch.device,
        committed: Callable[[Saving], None],
        memory: MemoryCopies | None = None,
    ) -> None:
        self.bytes, self.throttled = bytes, throttled
        self._memory, self._device, self._committed = memory, device, committed
        self._arenas: list[Arena] = []
        self._pinned: list[Arena] = []
        self._newest_in: dict[int, tuple[int, int]] = {}
        self._writer: WriterProcess | None = None
        self._failure: BloomeryError | None = None
        self._busy: dict[int, Saving] = {}
        self._open: list[Saving] = []
        self._unsettled: list[Saving] = []
        self._settled_at = 0.0
        self._windows_s: deque[float] = deque(maxlen=_WINDOWS)
        # Threads that are there already: starting one holds up whoever does it.
        self._copying: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writing: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = self._made = False
        # Touching new memory is slow: the first steps go on while it happens.
        self._making = threading.Thread(target=self._make, name="arenas", daemon=True)
        self._making.start()

    @property
    def is_busy(self) -> bool:
        """Whether a save that came now would find no arena."""
        return len(self._busy) >= ARENAS

    @property
    def under_way(self) -> list[str]:
        """The names of the saves that are not over."""
        return [saving.name for saving in tuple(self._open)]

    def refusal(self) -> str | None:
        """Return why nothing can be saved here, None where it can. Waits until the memory was taken."""
        self._making.join(ARENAS_S)
        if self._making.is_alive():
            return f"taking {ARENAS * self.bytes / 1e9:,.1f} GB of memory takes longer than {ARENAS_S:.0f} s"
        return None if self._failure is None else self._failure.message

    def begin(
        self,
        entries: Sequence[StateEntry],
        share: Share,
        *,
        step: int,
        name: str,
        run_length_steps: int | None,
        order: Mapping[str, Any],
        texts: Mapping[str, str],
        deadlines: Deadlines,
        partner: tuple[str, int] | None = None,
    ) -> Saving:
        """Begin a save of the state as it is now; it must not be written before `settle`.

        Only where there was no `refusal`, not while busy, and not for more than an arena holds. texts: what
        of the order is JSON already.
        """
        number = min((number for number in range(ARENAS) if number not in self._busy), key=self._age)
        listed = [{"name": file.name, "offset": file.offset, "bytes": file.bytes} for file in share.files]
        whole_order = {**order, "files": listed, "arena": number, "parts_s": deadlines.parts_s}
        if self._memory is not None:
            whole_order["memory"] = self._forgotten(self._memory, number, partner)
        window_s = min(self._windows_s, default=0.0)
        saving = Saving(
            step=step,
            name=name,
            run_length_steps=run_length_steps,
            share=share,
            order=whole_order,
            texts=texts,
            arena=number,
            pace=Pace(share.bytes, window_s=window_s, throttled=self.throttled),
            deadlines=deadlines,
        )
        for earlier in tuple(self._open):
            self._arenas[earlier.arena].is_hurried = True  # it has taken as long as there is between two
        self._busy[number] = saving
        self._open.append(saving)
        self._unsettled.append(saving)
        self._arenas[number].filled = 0
        self._arenas[number].is_hurried = not self.throttled
        self._copying.put(partial(self._stage, saving, entries, mark_ready(self._device)))
        self._writing.put(partial(self._write, saving))
        return saving

    def settle(self) -> None:
        """Return when the state has been staged and may be written. Costs nothing when no save has begun.

        Raises CheckpointError when the copying does not come to an end.
        """
        while self._unsettled:
            saving = self._unsettled[0]
            if not saving.staged.is_set():
                saving.pace.hurry()
                if not saving.staged.wait(saving.deadlines.staging_s):
                    raise CheckpointError(
                        f"Copying the state for {saving.name} does not come to an end.",
                        remedy="Does the device still answer (nvidia-smi, dmesg)? Start again where it does.",
                    )
            del self._unsettled[0]
        now = time.monotonic()
        if self._settled_at:
            self._windows_s.append(now - self._settled_at)
        self._settled_at = now

    def wait(self, *, deadline_s: float) -> list[str]:
        """Wait until all saves are over, and what comes after them: pruning, too.

        Returns the names of those that are not after the deadline.
        """
        deadline = time.monotonic() + deadline_s
        for saving in tuple(self._open):
            saving.pace.hurry()
            self._arenas[saving.arena].is_hurried = True
        for saving in tuple(self._open):
            saving.over.wait(max(0.0, deadline - time.monotonic()))
        return sorted(self.under_way)

    def close(self) -> None:
        """End the writer and let the memory go. What is not over is not committed."""
        with self._closing:
            self._closed = True
        self._making.join(WRITER_END_S)
        if self._making.is_alive():
            return  # it lets go of what it took
        for saving in tuple(self._open):
            saving.pace.hurry()
            saving.staged.wait(LAST_WORDS_S)
        if self._writer is not None:
            self._writer.close()
        for saving in tuple(self._open):
            saving.over.wait(WRITER_END_S)
        self._let_go()

    @property
    def writer_pid(self) -> int | None:
        """The writer's process number, for those who watch or disturb it."""
        return None if self._writer is None else self._writer.pid

    def endpoint(self) -> tuple[str, int] | None:
        """Return where this rank's writer keeps parts of others, once it does. After `refusal`."""
        if self._memory is None or self._writer is None or self._writer.port is None:
            return None
        return self._memory.host, self._writer.port

    def forget(self) -> None:
        """Leave nothing in memory: the run has ended well. After `close`."""
        if self._memory is not None:
            self._memory.holdings.remove(self._memory.rank)

    def _make(self) -> None:
        try:
            for number in range(ARENAS):
                if not self._closed:
                    path = None if self._memory is None else self._slot_for(self._memory, number)
                    arena = Arena.create(self.bytes, name=f"bloomery-arena-{number}", path=path)
                    self._arenas.append(arena)
                    if pin(arena, self._device):
                        self._pinned.append(arena)
            if not self._closed:
                self._writer = WriterProcess(self._arenas, keep=self._keep())
                self._writer.start()
            for lane in (self._copying, *(ARENAS * [self._writing])):
                threading.Thread(target=_serve, args=(lane,), name="save", daemon=True).start()
        except BloomeryError as error:
            self._failure = error
        except WriterLost as lost:
            self._failure = CheckpointError(f"the process that writes checkpoints does not live: {lost}")
        except Exception as error:  # a thread's edge: whoever wants to save is told
            log.exception("what saves in the background could not be made")
            self._failure = CheckpointError(f"what saves in the background could not be made: {error}")
        with self._closing:
            self._made = True
            if self._closed:
                self._let_go()

    def _let_go(self) -> None:
        for lane in (self._copying, *(ARENAS * [self._writing])):
            lane.put(None)
        if self._writer is not None:
            self._writer.close()
        arenas, self._arenas = self._arenas, []
        for arena in arenas:
            if arena in self._pinned:
                unpin(arena)
            arena.close()
        if self._memory is not None:
            self._memory.holdings.release()

    def _slot_for(self, memory: MemoryCopies, number: int) -> Path:
        """Return an arena's file; what it held in another size is forgotten. Raises StorageError."""
        slot = memory.slot(number)
        try:
            memory.holdings.create()
            if slot.exists() and slot.stat().st_size != mapped_bytes(self.bytes):
                remove_label(slot)
        except OSError as error:
            raise storage_error(error, path=slot, doing="Taking memory for checkpoints") from error
        held = read_holding(label_of(slot))
        if held is not None:
            self._newest_in[number] = (held.incarnation, held.step)
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
            "limits": memory.limits.to_json(),
        }

    def _age(self, number: int) -> tuple[int, int]:
        """Return what orders arenas by how little is lost when one is used again."""
        return self._newest_in.get(number, (-1, -1))

    def _forgotten(
        self, memory: MemoryCopies, number: int, partner: tuple[str, int] | None
    ) -> dict[str, Any]:
        """Say of an arena's slot that it holds nothing, and return what the writer is to do with it later."""
        slot = memory.slot(number)
        try:
            remove_label(slot)
        except OSError as error:
            log.warning("%s cannot be used for a copy in memory: %s", slot, error)
        self._newest_in.pop(number, None)
        return {"slot": str(slot), "token": memory.token, "partner": partner}

    def _stage(self, saving: Saving, entries: Sequence[StateEntry], ready: Ready | None) -> None:
        """Copy the state, in a thread of its own."""
        arena = self._arenas[saving.arena]
        try:
            stage(saving.share, entries, arena, saving.pace, ready=ready)
        except Exception:  # a thread's edge: the writer gives this save up, and its trainer is told
            log.exception("copying the state for %s failed", saving.name)
            arena.filled = GIVEN_UP
        finally:
            saving.staged.set()

    def _write(self, saving: Saving) -> None:
        """Have the copy written while it is made, in a thread of its own."""
        begun, is_written = time.monotonic(), False
        try:
            assert self._writer is not None
            answer = self._writer.write(
                saving.order, texts=saving.texts, deadline_s=saving.deadlines.answer_s
            )
            is_written = True
            saving.bytes, saving.seconds = answer["bytes"], time.monotonic() - begun
            if answer["copy_failure"]:
                log.warning("%s is not in a partner's memory: %s", saving.name, answer["copy_failure"])
            self._free(saving)
            self._committed(saving)
        except BloomeryError as error:
            saving.failure = error
        except Exception as error:  # a thread's edge: the save has failed, and its trainer is told
            log.exception("saving %s failed", saving.name)
            saving.failure = CheckpointError(f"saving {saving.name} failed: {error}")
        finally:
            if saving.failure is not None and not is_written:
                files = [file.name for file in saving.share.files]
                order = saving.order
                give_up(Path(order["partial"]), order["rank"], files=files, why=told(saving.failure))
            self._free(saving)
            self._open.remove(saving)
            saving.over.set()

    def _free(self, saving: Saving) -> None:
        """Let another save have the arena, unless something still copies into it."""
        if saving.staged.wait(saving.deadlines.staging_s) and self._busy.get(saving.arena) is saving:
            about = saving.order["checkpoint"]
            if saving.failure is None:
                self._newest_in[saving.arena] = (about["incarnation"], about["step"])
            del self._busy[saving.arena]


def _serve(lane: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (act := lane.get()) is not None:
        act()
