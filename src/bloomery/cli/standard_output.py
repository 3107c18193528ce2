"""The standard streams of a command: all three open, and no character or full disk that ends a training."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def open_streams() -> None:
    """Open those of descriptors 0 to 2 that are closed, and let output survive any locale.

    A file that is opened later would else get the number of a closed stream, and what libraries and child
    processes print would be written into it. A character that the locale lacks is shown as `?`.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        # Else a child process, and this one after exec, would lack it again.
        os.set_inheritable(descriptor, True)  # noqa: FBT003 — positional-only
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 — a descriptor, for good
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 — the same
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def is_refused() -> bool:
    """Say, after an error, whether standard output takes no byte, for instance on a full disk."""
    try:  # a long text that was refused is in no buffer any more, so a flush alone would tell nothing
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def discard_output() -> None:
    """Send to /dev/null what is buffered for standard output, and what is still printed."""
    with suppress(OSError, ValueError):  # a stream that is closed, or has no descriptor, as in a test
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


class LastingOutput:
    """Writes to standard output until that is closed or refuses a write; what comes then is lost.

    on_lost: called once, with the reason in the system's words.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._is_lost = False

    def write(self, text: str) -> None:
        """Write text that ends with its line's end, at once."""
        with self._lock:  # so that lines of two threads do not mix
            if self._is_lost:
                return
            try:
                sys.stdout.write(text)
                sys.stdout.flush()
            except (OSError, ValueError) as refused:  # ValueError: it is closed
                self._is_lost = True
                self._on_lost(getattr(refused, "strerror", None) or str(refused))
                discard_output()  # what is buffered would be tried again at the end, and fail there


def tell(line: str) -> None:
    """Print a line to standard error; a terminal that is closed, or a full disk behind it, stops no run."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


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
