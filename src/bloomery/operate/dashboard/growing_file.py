"""Reads a journal that grows: each call returns the lines that were added since the one before."""

from __future__ import annotations

import os
from pathlib import Path

SLICE_BYTES = 4 << 20
"""The most bytes that one call reads, so that memory stays bounded however long a journal is."""


class GrowingFile:
    """Follows one file. It keeps no line, only the place up to which it has read.

    A last line without a newline waits until it is whole. A file that was replaced or became shorter is read
    from its beginning again.

    generation: grows by one each time that reading began anew; what was read before is void then.
    read_bytes, size: how far it has read, and the length of the file at the last call.
    torn: bytes of the last line that has no newline yet.
    is_missing: whether there was no file at the last call.
    error: why the file could not be read at the last call; "" where it could.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.read_bytes = self.size = self.torn = 0
        self.is_missing, self.error = False, ""
        self._inode = -1

    @property
    def is_behind(self) -> bool:
        """Whether another call would read more at once."""
        return self.read_bytes + self.torn < self.size

    def lines(self, *, most_bytes: int = SLICE_BYTES) -> list[bytes]:
        """Return the whole lines in the next `most_bytes`; [] where there are none, or no file.

        While the file is missing or cannot be read, nothing more of it is to be read at once.
        """
        self.is_missing, self.error = False, ""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self.read_bytes:
                    self._begin(facts.st_ino)
                self.size = facts.st_size
                file.seek(self.read_bytes)
                data = file.read(min(most_bytes, max(0, self.size - self.read_bytes)))
        except FileNotFoundError:
            self.is_missing, self.size = True, self.read_bytes + self.torn
            return []
        except OSError as refused:
            self.error, self.size = refused.strerror or str(refused), self.read_bytes + self.torn
            return []
        return self._whole_lines(data, most_bytes)

    def _begin(self, inode: int) -> None:
        if self._inode != -1:
            self.generation += 1
        self._inode, self.read_bytes, self.torn = inode, 0, 0

    def _whole_lines(self, data: bytes, most_bytes: int) -> list[bytes]:
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= most_bytes:
            end = len(data)  # no line of a journal is as long: this is damage, and is passed over
        self.read_bytes += end
        self.torn = len(data) - end
        return data[:end].split(b"\n")[:-1] if data[:end].endswith(b"\n") else [data[:end]] if end else []
