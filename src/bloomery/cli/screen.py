"""What `bloomery train` prints: lines for people that fit the screen, or an object a line for programs."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bloomery.events.run_directory import RunDirectory

_COLUMNS = 100
_CLOCK = len("23:59:59 ")


class Screen:
    """Prints what a training says.

    form: 'bar', 'short', 'full' or 'json'. Lines with every figure are never broken.
    columns: the length of a short line, without the time of day before it.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self.columns = min(terminal or _COLUMNS, _COLUMNS) - _CLOCK
        self._terminal_columns = terminal

    def say(self, line: str) -> None:
        """Print a line for people, broken between words on a terminal; in a file commands stay whole."""
        if self._form == "json":
            self.emit({"event": "message", "text": line})
            return
        stamped = f"{time.strftime('%H:%M:%S')} {line}"
        if self._form != "full" and self._terminal_columns is not None:
            stamped = _broken(stamped, columns=self._terminal_columns)
        print(stamped, flush=True)

    def emit(self, event: Mapping[str, Any]) -> None:  # Any: JSON
        """Print an event for programs, with the time in seconds since 1970."""
        print(json.dumps({**event, "time": round(time.time(), 3)}, ensure_ascii=False), flush=True)

    def conclude(self, rundir: RunDirectory, *, hints: bool) -> None:
        """Say the last losses of a run that is finished, and what to do with it next."""
        from bloomery.operate.overview import last_losses

        losses = last_losses(rundir)
        if self._form == "json":
            self.emit({"event": "finished", **losses})
            return
        named = {"loss": "loss", "held_out_loss": "held-out"}
        shown = [f"{named[key]} {_shown(value)}" for key, value in losses.items() if value is not None]
        if shown:
            self.say(f"at the end: {', '.join(shown)}")
        if hints:
            print(
                f"Next:\n  bloomery generate {rundir.path} --prompt 'Once'\n"
                f"  bloomery evaluate {rundir.path} YOUR.txt\n"
                f"  bloomery ckpt export {rundir.path} exported",
                flush=True,
            )


def _shown(loss: float | str) -> str:
    return loss if isinstance(loss, str) else f"{loss:.4f}"


def _broken(line: str, *, columns: int) -> str:
    if len(line) <= columns:
        return line
    return textwrap.fill(
        line, columns, subsequent_indent=" " * _CLOCK, break_long_words=False, break_on_hyphens=False
    )
