"""Lets a long command go on when its terminal, its pipe or the disk behind its output takes no more."""

from __future__ import annotations

import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def let_output_end_nothing() -> None:
    """Leave out, from now on, what standard output or standard error of this process do not take."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is TextIOWrapper:  # that of a notebook or of a test is none of the process's own
            with suppress(OSError):
                stream.flush()
            setattr(sys, name, _lasting(stream))


def _lasting(stream: TextIOWrapper) -> TextIOWrapper:
    file = _LastingFile(stream.fileno(), "wb", closefd=False)
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _LastingFile(FileIO):
    """A file that counts what its device refuses as written."""

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            written = super().write(content)
        except OSError:  # a full disk, a pipe that nobody reads, a terminal that is gone
            written = None
        return memoryview(content).nbytes if written is None else written
