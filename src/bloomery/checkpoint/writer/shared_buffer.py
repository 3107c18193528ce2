"""Shared memory between a trainer and its writer process, allocated in full before it is needed."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from bloomery.errors import StorageError, storage_error
from bloomery.plan.main_memory import available_memory_bytes

_PIECE_BYTES = 64 << 20
_POPULATE_WRITE = (
    23  # MADV_POPULATE_WRITE of Linux 5.14; older kernels refuse it, and pages come when touched
)
ABANDONED = (1 << 64) - 1
"""The value of `filled` when the copying failed: the buffer will never be complete."""
_SPARE_BYTES = 1 << 30
"""Free memory that is left to other processes when buffers are allocated."""


class SharedBuffer:
    """Shared memory behind a file descriptor, which a spawned process can inherit.

    A further page at its end holds `filled`, `is_urgent` and `stops_reading`, by which the two processes
    synchronise.
    file: the descriptor. bytes: how much the buffer holds, that page not included.
    """

    def __init__(self, file: int, *, bytes: int) -> None:
        self.file, self.bytes = file, bytes
        self._map = mmap.mmap(file, mapped_bytes(bytes))
        self.view = memoryview(self._map)
        about = mapped_bytes(bytes) - mmap.PAGESIZE
        self._filled = ctypes.c_uint64.from_buffer(self._map, about)
        self._urgent = ctypes.c_uint64.from_buffer(self._map, about + ctypes.sizeof(ctypes.c_uint64))
        self._stops = ctypes.c_uint64.from_buffer(self._map, about + 2 * ctypes.sizeof(ctypes.c_uint64))

    @property
    def filled(self) -> int:
        """How many of the first bytes are copied; ABANDONED where the copying failed."""
        return self._filled.value

    @filled.setter
    def filled(self, bytes: int) -> None:
        self._filled.value = bytes

    @property
    def is_urgent(self) -> bool:
        """Whether the writer should write the buffer at full speed, without pauses."""
        return bool(self._urgent.value)

    @is_urgent.setter
    def is_urgent(self, urgent: bool) -> None:
        self._urgent.value = urgent

    @property
    def stops_reading(self) -> bool:
        """Whether the writer should stop reading back what it wrote from the buffer: a save waits for it."""
        return bool(self._stops.value)

    @stops_reading.setter
    def stops_reading(self, stops: bool) -> None:
        self._stops.value = stops

    @classmethod
    def create(cls, bytes: int, *, name: str, path: Path | None = None) -> SharedBuffer:
        """Allocate a buffer and touch every page of it, which takes longer than a copy of so many bytes.

        path: a file of a memory file system, whose content stays where it has the right size already. None
            for anonymous memory, which is freed when the last process that has it open ends.
        Raises StorageError where the machine does not have the memory.
        """
        whole = mapped_bytes(bytes)
        if path is None:
            file = os.memfd_create(name)
        else:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise storage_error(error, path=path, doing="Taking memory for checkpoints") from error
        try:
            if os.fstat(file).st_size != whole:
                os.ftruncate(file, 0)
                refuse_without_memory(bytes)
                os.ftruncate(file, whole)
            for start in range(0, whole, _PIECE_BYTES):
                os.posix_fallocate(file, start, min(_PIECE_BYTES, whole - start))
            buffer = cls(file, bytes=bytes)
        except StorageError:
            os.close(file)
            raise
        except OSError as error:
            os.close(file)
            raise _no_memory(bytes, why=error.strerror or str(error)) from error
        buffer._touch()
        return buffer

    def close(self) -> None:
        """Unmap and close the buffer. Existing views keep the memory until they are released."""
        del self._filled, self._urgent, self._stops
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass
        os.close(self.file)

    def _touch(self) -> None:
        """Map every page, piece by piece, so that no thread of this process waits long."""
        library = ctypes.CDLL(None, use_errno=True)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for offset in range(0, self.bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, self.bytes - offset)
            library.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(length), _POPULATE_WRITE)


def mapped_bytes(bytes: int) -> int:
    """Return the size of the file behind a buffer of so many bytes, its last page included."""
    return bytes + -bytes % mmap.PAGESIZE + mmap.PAGESIZE


def refuse_without_memory(bytes: int) -> None:
    """Raise StorageError unless so much memory is free, on the machine and in the control group."""
    available = available_memory_bytes()
    if available is not None and available - _SPARE_BYTES < bytes:
        raise _no_memory(bytes, why=f"{available / 1e9:,.1f} GB are free, of which 1 GB is left alone")


def _no_memory(bytes: int, *, why: str) -> StorageError:
    return StorageError(
        f"Saving in the background needs {bytes / 1e9:,.1f} GB of memory: {why}.",
        remedy="Save with checkpoint.background=off, which stops the training while it writes, "
        "or use a smaller model, or a machine with more memory (twice the state is needed).",
    )
