"""Memory that the trainer and its writer share: as large as the state, and touched before it is needed."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from bloomery.errors import StorageError
from bloomery.events.storage import storage_error

_PIECE_BYTES = 64 << 20
_POPULATE_WRITE = (
    23  # MADV_POPULATE_WRITE of Linux 5.14; older kernels refuse it, and pages come when touched
)
GIVEN_UP = (1 << 64) - 1
"""In place of how much is filled: nobody fills it any more."""
_SPARE_BYTES = 1 << 30
"""What is left to everybody else when an arena is taken."""


class Arena:
    """Shared memory under a file descriptor that a spawned process can inherit.

    Without a path it is gone when the last process that has it ends, however that happens. bytes: its room;
    one page more tells the reader how far the writer is, and whether somebody waits for the reader.
    """

    def __init__(self, file: int, *, bytes: int) -> None:
        self.file, self.bytes = file, bytes
        self._map = mmap.mmap(file, mapped_bytes(bytes))
        self.view = memoryview(self._map)
        about = mapped_bytes(bytes) - mmap.PAGESIZE
        self._filled = ctypes.c_uint64.from_buffer(self._map, about)
        self._hurried = ctypes.c_uint64.from_buffer(self._map, about + ctypes.sizeof(ctypes.c_uint64))

    @property
    def filled(self) -> int:
        """How many of the first bytes hold what they should; GIVEN_UP when they never will."""
        return self._filled.value

    @filled.setter
    def filled(self, bytes: int) -> None:
        self._filled.value = bytes

    @property
    def is_hurried(self) -> bool:
        """Whether what it holds is to be written as fast as can be."""
        return bool(self._hurried.value)

    @is_hurried.setter
    def is_hurried(self, hurried: bool) -> None:
        self._hurried.value = hurried

    @classmethod
    def create(cls, bytes: int, *, name: str, path: Path | None = None) -> Arena:
        """Take so much memory, every page of it. Slow: a new page costs more than copying into an old one.

        path: a file of a memory file system, left as it is where it has the size already; without one the
        memory has no name. Raises StorageError when the machine does not have it.
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
            arena = cls(file, bytes=bytes)
        except StorageError:
            os.close(file)
            raise
        except OSError as error:
            os.close(file)
            raise _no_memory(bytes, why=error.strerror or str(error)) from error
        arena._touch()
        return arena

    def close(self) -> None:
        """Let it go. Views of it that somebody still has keep the memory until they go."""
        del self._filled, self._hurried
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass
        os.close(self.file)

    def _touch(self) -> None:
        """Map every page, in pieces, so that no thread of this process waits long."""
        library = ctypes.CDLL(None, use_errno=True)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for offset in range(0, self.bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, self.bytes - offset)
            library.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(length), _POPULATE_WRITE)


def mapped_bytes(bytes: int) -> int:
    """Return the size of an arena with so much room, its last page included."""
    return bytes + -bytes % mmap.PAGESIZE + mmap.PAGESIZE


def machine() -> str:
    """Return what ranks that share this machine's memory have in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def refuse_without_memory(bytes: int) -> None:
    """Raise StorageError unless so much memory is free: on the machine, and in our control group."""
    available = available_memory_bytes()
    if available is not None and available - _SPARE_BYTES < bytes:
        raise _no_memory(bytes, why=f"{available / 1e9:,.1f} GB are free, of which 1 GB is left alone")


def available_memory_bytes() -> int | None:
    """Return what may still be taken, by /proc/meminfo and the control group; None where nobody says."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        directory = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = (directory / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((directory / "memory.current").read_text()))
    except (OSError, ValueError):  # not Linux, or an older kind of control group: what was found must do
        pass
    return min(found, default=None)


def _no_memory(bytes: int, *, why: str) -> StorageError:
    return StorageError(
        f"Saving in the background needs {bytes / 1e9:,.1f} GB of memory more: {why}.",
        remedy="Save with checkpoint.background=off, which stops the training while it writes, "
        "or use a smaller model, or a machine with more memory (twice the state is needed).",
    )
