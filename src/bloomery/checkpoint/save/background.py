"""Saves in the background: stages the state into shared memory during a step; a writer process stores it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bloomery.checkpoint.format.commit import error_to_json
from bloomery.checkpoint.format.deadlines import ABORT_S, BUFFERS_S, CONCURRENT_SAVES, WRITER_END_S, Deadlines
from bloomery.checkpoint.format.state import StateEntry
from bloomery.checkpoint.save.staging import (
    CopyPace,
    PendingSave,
    StateReadyEvent,
    pin,
    record_state_ready,
    stage,
    unpin,
)
from bloomery.checkpoint.save.verification import OwnFilesCheck
from bloomery.checkpoint.save.write_plan import RankWritePlan
from bloomery.checkpoint.writer.client import WriterLost, WriterProcess
from bloomery.checkpoint.writer.memory_replica import label_of, read_replica, remove_label
from bloomery.checkpoint.writer.part_place import part_writer_for
from bloomery.checkpoint.writer.partner import ReplicaSettings
from bloomery.checkpoint.writer.shared_buffer import ABANDONED, SharedBuffer, mapped_bytes
from bloomery.errors import BloomeryError, CheckpointError, storage_error

log = logging.getLogger(__name__)

BUFFERS = CONCURRENT_SAVES
_STEPS_MEASURED = 3
"""The shortest of this many last steps predicts how long the next one takes: one may have been held up."""


class BackgroundSaver:
    """One rank's shared buffers and writer process, and its pending saves: at most one for each buffer.

    bytes: the size of one buffer.
    throttled: whether copying and writing pause in favour of the training; may be changed at any time.
    committed: called in a thread with each save that this rank's writer has finished. A BloomeryError that it
        raises becomes the save's failure.
    memory: how to keep replicas of parts in memory; None where none are kept.
    """

    def __init__(
        self,
        *,
        bytes: int,
        throttled: bool,
        device: torch.device,
        committed: Callable[[PendingSave], None],
        memory: ReplicaSettings | None = None,
    ) -> None:
        self.bytes, self.throttled = bytes, throttled
        self.check = OwnFilesCheck()
        self._memory, self._device, self._committed = memory, device, committed
        self._buffers: list[SharedBuffer] = []
        self._pinned: list[SharedBuffer] = []
        self._newest_in: dict[int, tuple[int, int]] = {}
        self._writer: WriterProcess | None = None
        self._failure: BloomeryError | None = None
        self._busy: dict[int, PendingSave] = {}
        self._open: list[PendingSave] = []
        self._ending = threading.Lock()
        self._unstaged: list[PendingSave] = []
        self._state_free_since = 0.0
        self._step_times_s: deque[float] = deque(maxlen=_STEPS_MEASURED)
        # The threads exist before the first save, because starting one would hold up the training step.
        self._copying: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writing: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = self._created = False
        self._reading_back = threading.Lock()
        # The first touch of new memory is slow, so a thread takes it while the first steps run.
        self._creating = threading.Thread(target=self._create, name="buffers", daemon=True)
        self._creating.start()

    @property
    def is_busy(self) -> bool:
        """Whether every buffer is taken by a save that is not over."""
        return len(self._busy) >= BUFFERS

    @property
    def under_way(self) -> list[str]:
        """The names of the checkpoints that are still being saved."""
        return [saving.name for saving in tuple(self._open)]

    def unavailable_reason(self) -> str | None:
        """Return why this rank cannot save in the background; None where it can.

        Waits until the memory was taken, BUFFERS_S at most.
        """
        self._creating.join(BUFFERS_S)
        if self._creating.is_alive():
            return (
                f"taking {BUFFERS * self.bytes / 1e9:,.1f} GB of memory takes longer than {BUFFERS_S:.0f} s"
            )
        return None if self._failure is None else self._failure.message

    def begin(
        self,
        entries: Sequence[StateEntry],
        plan: RankWritePlan,
        *,
        step: int,
        name: str,
        run_length_steps: int | None,
        order: Mapping[str, Any],
        texts: Mapping[str, str],
        deadlines: Deadlines,
        partner: tuple[str, int] | None = None,
    ) -> PendingSave:
        """Begin a save of the state as it is now. Nobody may change the state before `wait_staged` returns.

        The caller has seen that `unavailable_reason` is None, that a buffer is free, and that the plan fits.

        order: the request to the writer, as JSON values. texts: further fields of it that are JSON texts
            already.
        partner: host and port of the writer that keeps a replica of the part; None where none does.
        """
        number = min((number for number in range(BUFFERS) if number not in self._busy), key=self._age)
        window_s = min(self._step_times_s, default=0.0)  # so long the copying may take, for its pauses
        whole_order = {
            **order,
            "files": [{"name": one.name, "offset": one.offset, "bytes": one.bytes} for one in plan.files],
            "buffer": number,
            "parts_s": deadlines.parts_s,
            "stall_s": deadlines.stall_s + window_s,
        }
        if self._memory is not None:
            self._invalidate_slot(self._memory, number)
            slot = str(self._memory.slot(number))
            whole_order["memory"] = {"slot": slot, "token": self._memory.token, "partner": partner}
        saving = PendingSave(
            step=step,
            name=name,
            run_length_steps=run_length_steps,
            plan=plan,
            order=whole_order,
            texts=texts,
            buffer=number,
            pace=CopyPace(plan.bytes, window_s=window_s, throttled=self.throttled),
            window_s=window_s,
            deadlines=deadlines,
        )
        for earlier in tuple(self._open):
            self._buffers[earlier.buffer].is_urgent = True  # it has had the whole time between two saves
        self._busy[number] = saving
        self._open.append(saving)
        self._stop_reading_back()
        self._unstaged.append(saving)
        self._buffers[number].filled = 0
        self._buffers[number].is_urgent = not self.throttled
        self._copying.put(partial(self._stage, saving, entries, record_state_ready(self._device)))
        self._writing.put(partial(self._write, saving))
        return saving

    def wait_staged(self) -> None:
        """Return when all begun saves have copied the state, which may then be changed.

        Raises CheckpointError where the copying takes longer than `Deadlines.staging_s`.
        """
        while self._unstaged:
            saving = self._unstaged[0]
            if not saving.staged.is_set():
                saving.pace.stop_pausing()
                if not saving.staged.wait(saving.deadlines.staging_s):
                    raise CheckpointError(
                        f"Copying the state for {saving.name} took longer than "
                        f"{saving.deadlines.staging_s:.0f} s.",
                        remedy="Does the device still answer (nvidia-smi, dmesg)? Start again where it does.",
                    )
            del self._unstaged[0]
        now = time.monotonic()
        if self._state_free_since:
            self._step_times_s.append(now - self._state_free_since)
        self._state_free_since = now

    def wait(self, *, deadline_s: float) -> list[str]:
        """Wait until all saves are over, pruning included; return the names of those that are late.

        deadline_s: how long to wait at most, in seconds.
        """
        deadline = time.monotonic() + deadline_s
        for saving in tuple(self._open):
            saving.pace.stop_pausing()
            self._buffers[saving.buffer].is_urgent = True
        with self._ending:
            if self._open:  # else the last save may be being read back, and nobody waits for the writer
                self._stop_reading_back()
        for saving in tuple(self._open):
            saving.over.wait(max(0.0, deadline - time.monotonic()))
        return sorted(self.under_way)

    def close(self) -> None:
        """End the writer and release the memory. A save that is not over is not committed."""
        with self._closing:
            self._closed = True
        self._creating.join(WRITER_END_S)
        if self._creating.is_alive():
            return  # that thread releases what it took
        for saving in tuple(self._open):
            saving.pace.stop_pausing()
            saving.staged.wait(ABORT_S)
        if self._writer is not None:
            self._writer.close()
        for saving in tuple(self._open):
            saving.over.wait(WRITER_END_S)
        self._reading_back.acquire(timeout=WRITER_END_S)  # it ends with its writer
        self._release()

    @property
    def writer_pid(self) -> int | None:
        """The writer's process id, for tests that observe or kill it; None while there is none."""
        return None if self._writer is None else self._writer.pid

    def endpoint(self) -> tuple[str, int] | None:
        """Return host and port where this rank's writer accepts replicas of other ranks' parts.

        None where it accepts none. Called after `unavailable_reason`, which waits for the writer.
        """
        if self._memory is None or self._writer is None or self._writer.port is None:
            return None
        return self._memory.host, self._writer.port

    def run_in_save_thread(self, act: Callable[[], None]) -> None:
        """Call a function in a thread of the saves, once one of them is free; after `close` in another."""
        if self._closed:
            threading.Thread(target=act, name="after-saves", daemon=True).start()
            return
        self._writing.put(act)

    def remove_replicas(self) -> None:
        """Remove this rank's replicas from memory, once the run has ended well. Called after `close`."""
        if self._memory is not None:
            self._memory.replicas.remove(self._memory.rank)

    def _create(self) -> None:
        try:
            for number in range(BUFFERS):
                if not self._closed:
                    path = None if self._memory is None else self._slot_for(self._memory, number)
                    buffer = SharedBuffer.create(self.bytes, name=f"bloomery-buffer-{number}", path=path)
                    self._buffers.append(buffer)
                    if pin(buffer, self._device):
                        self._pinned.append(buffer)
            if not self._closed:
                self._writer = WriterProcess(self._buffers, replica_server=self._replica_server_settings())
                self._writer.start()
            for tasks in (self._copying, *(BUFFERS * [self._writing])):
                threading.Thread(target=_run_tasks, args=(tasks,), name="save", daemon=True).start()
        except BloomeryError as error:
            self._failure = error
        except WriterLost as lost:
            self._failure = CheckpointError(f"the process that writes checkpoints has ended: {lost}")
        except Exception as error:  # the thread's edge: `unavailable_reason` returns it to whoever saves
            log.exception("saving in the background could not be started")
            self._failure = CheckpointError(f"saving in the background could not be started: {error}")
        with self._closing:
            self._created = True
            if self._closed:
                self._release()

    def _release(self) -> None:
        for tasks in (self._copying, *(BUFFERS * [self._writing])):
            tasks.put(None)
        if self._writer is not None:
            self._writer.close()
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            if buffer in self._pinned:
                unpin(buffer)
            buffer.close()
        if self._memory is not None:
            self._memory.replicas.release()

    def _slot_for(self, memory: ReplicaSettings, number: int) -> Path:
        """Return a buffer's file in the memory file system. Raises StorageError.

        A replica that an earlier process left there is kept, unless its size differs.
        """
        slot = memory.slot(number)
        try:
            memory.replicas.create()
            if slot.exists() and slot.stat().st_size != mapped_bytes(self.bytes):
                remove_label(slot)
        except OSError as error:
            raise storage_error(error, path=slot, doing="Taking memory for checkpoints") from error
        held = read_replica(label_of(slot))
        if held is not None:
            self._newest_in[number] = (held.incarnation, held.step)
        return slot

    def _replica_server_settings(self) -> dict[str, Any] | None:
        memory = self._memory
        if memory is None:
            return None
        return {
            "root": str(memory.root),
            "run": str(memory.run.resolve()),
            "identity": memory.identity,
            "rank": memory.rank,
            "token": memory.token,
            "host": memory.host,
            "limits": memory.limits.to_json(),
        }

    def _age(self, number: int) -> tuple[int, int]:
        """Return (incarnation, step) of the replica in a buffer; the least is overwritten first."""
        return self._newest_in.get(number, (-1, -1))

    def _invalidate_slot(self, memory: ReplicaSettings, number: int) -> None:
        """Remove the label of a buffer's replica, before the buffer is overwritten."""
        slot = memory.slot(number)
        try:
            remove_label(slot)
        except OSError as error:
            log.warning("%s cannot be used for a copy in memory: %s", slot, error)
        self._newest_in.pop(number, None)

    def _stage(
        self, saving: PendingSave, entries: Sequence[StateEntry], ready: StateReadyEvent | None
    ) -> None:
        """Copy the state into the buffer. Runs in the copying thread."""
        buffer = self._buffers[saving.buffer]
        try:
            stage(saving.plan, entries, buffer, saving.pace, ready=ready)
        except Exception:  # the thread's edge: the writer then abandons this save and answers with an error
            log.exception("copying the state for %s failed", saving.name)
            buffer.filled = ABANDONED
        finally:
            saving.staged.set()

    def _write(self, saving: PendingSave) -> None:
        """Have the writer store the copy while it is being made. Runs in a thread for each buffer."""
        begun, is_written = time.monotonic(), False
        try:
            assert self._writer is not None
            answer = self._writer.write(
                saving.order,
                texts=saving.texts,
                deadline_s=saving.deadlines.answer_s,
                silence_s=saving.deadlines.silence_s + saving.window_s,
            )
            is_written = True
            saving.bytes, saving.seconds = answer["bytes"], time.monotonic() - begun
            if answer["copy_failure"]:
                log.warning("%s is not in a partner's memory: %s", saving.name, answer["copy_failure"])
            self._free(saving)
            self._committed(saving)
        except BloomeryError as error:
            saving.failure = error
        except Exception as error:  # the thread's edge: the error becomes the save's failure
            log.exception("saving %s failed", saving.name)
            saving.failure = CheckpointError(f"saving {saving.name} failed: {error}")
        finally:
            try:
                if saving.failure is not None and not is_written:
                    files, why = [file.name for file in saving.plan.files], error_to_json(saving.failure)
                    part_writer_for(saving.order).abandon(saving.order["rank"], files=files, why=why)
            finally:  # a save that never ends would keep its buffer, and let all that wait for it wait on
                self._free(saving)
                with self._ending:
                    self._open.remove(saving)
                saving.over.set()
        with self._reading_back:
            if saving.failure is None and self._writer is not None and not self._closed:
                buffer = self._buffers[saving.buffer]
                self.check.run(saving, writer=self._writer, buffer=buffer, is_free=lambda: not self._open)

    def _stop_reading_back(self) -> None:
        """Have the writer stop reading back what it wrote: a save, or the end of the run, waits for it."""
        for buffer in self._buffers:
            buffer.stops_reading = True

    def _free(self, saving: PendingSave) -> None:
        """Make the buffer available to another save, once nothing copies into it any more."""
        if saving.staged.wait(saving.deadlines.staging_s) and self._busy.get(saving.buffer) is saving:
            about = saving.order["checkpoint"]
            if saving.failure is None:
                self._newest_in[saving.buffer] = (about["incarnation"], about["step"])
            del self._busy[saving.buffer]


def _run_tasks(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (act := tasks.get()) is not None:
        try:
            act()
        except Exception:  # the thread's edge: without its threads no later save would come to an end
            log.exception("what follows a save failed")
