"""Shows the steps of a training: a progress bar, short lines, lines with every figure, or JSON lines."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bloomery.checkpoint.format.state import Json
from bloomery.events.records import StepReport, log_line
from bloomery.guard.verdict import CarryOn, Verdict

if TYPE_CHECKING:
    from rich.console import Console

Say = Callable[[str], None]
Emit = Callable[[Mapping[str, Json]], None]
LastStep = Callable[[StepReport], int]
"""Returns the number of the run's last step by a report, for peers come and go, and batches change."""

_TIMED_STEPS = 50
_LEAST_BAR, _MOST_BAR = 8, 40


class TimeLeft:
    """Estimates how long the rest of the run takes, from the clock at the newest steps.

    total: the number of the last step; None where there is none.
    last_step: tells it anew after each step; None where it never changes. clock: seconds, from any moment.
    """

    def __init__(
        self,
        total: int | None,
        last_step: LastStep | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self._last_step, self._clock = total, last_step, clock
        self._ends: deque[float] = deque(maxlen=_TIMED_STEPS)

    def after(self, report: StepReport) -> float | None:
        """Count a step that ended now, and return the seconds left; None while they are unknown."""
        self._ends.append(self._clock())
        if self._last_step is not None:
            self.total = self._last_step(report)
        if self.total is None or len(self._ends) < 2:
            return None
        step_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(0, self.total - report.step) * step_s

    def restart(self) -> None:
        """Forget the steps so far, because others follow."""
        self._ends.clear()


def short_line(report: StepReport, *, total_steps: int | None, left_s: float | None, columns: int) -> str:
    """Return a step as one line of at most `columns` characters.

    What matters least is left out first; only the step and its loss are always there.
    """
    of_total = "" if total_steps is None else f"/{total_steps}"
    needed = [f"step {report.step}{of_total}", f"loss {report.loss:.4f}"]
    if not report.update_applied:
        needed.append("UPDATE REFUSED")
    if report.held_out_loss is not None:
        needed.append(f"held-out {report.held_out_loss:.4f}")
    if left_s is not None:
        needed.append(f"{duration(left_s)} left")
    needed += [
        f"{report.tokens_per_s:,.0f} tokens/s",
        f"norm {report.gradient_norm:.2f}",
        f"lr {report.learning_rate:.1e}",
        f"batch {report.global_batch}",
    ]
    return _fitted(needed, columns=columns)


def _fitted(parts: Sequence[str], *, columns: int) -> str:
    line = " | ".join(parts[:2])
    for part in parts[2:]:
        if len(line) + len(part) + 3 <= columns:
            line += f" | {part}"
    return line


def duration(seconds: float) -> str:
    """Return a duration in at most seven characters, such as '45 s', '12 min', '3.5 h' or '12 days'."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


class LogLines:
    """Prints a line every `every_steps` steps, and one for each verdict of the guards and each rewind.

    started: `time.perf_counter()` at the start of the command; 0 leaves out the time until the first step.
    full: whether lines hold every figure, however long they get.
    columns: the length of lines that are not full.
    """

    def __init__(
        self,
        *,
        every_steps: int,
        total_steps: int | None,
        last_step: LastStep | None = None,
        say: Say,
        started: float = 0.0,
        full: bool = True,
        columns: int = 100,
    ) -> None:
        self._every, self._say, self._started = every_steps, say, started
        self._full, self._columns = full, columns
        self._left = TimeLeft(total_steps, last_step)
        self._is_first = True

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Write the line if it is due, or if something happened."""
        if self._started and self._full:
            seconds = time.perf_counter() - self._started
            self._say(f"first step done {seconds:.1f} s after the start")
            self._started = 0.0
        left_s = self._left.after(report)
        noteworthy = report.held_out_loss is not None or not report.update_applied
        if report.step % self._every == 0 or noteworthy or (self._is_first and not self._full):
            self._say(self._line(report, left_s))
        self._is_first = False
        if not isinstance(verdict, CarryOn):
            self._say(f"step {report.step} | {described(verdict)}")

    def _line(self, report: StepReport, left_s: float | None) -> str:
        if self._full:
            return log_line(report, total_steps=self._left.total)
        return short_line(report, total_steps=self._left.total, left_s=left_s, columns=self._columns)

    def rewound(self, step: int) -> None:
        """Write at which step the run goes on."""
        self._left.restart()
        self._say(f"rewound to step {step}")

    def close(self) -> None:
        """Do nothing, since nothing is open."""


class JsonLines:
    """Emits a JSON object every `every_steps` steps, and one for each verdict and rewind, for programs.

    A step has the fields of the journal's `step` event, and `left_s`; a verdict has `kind` and `reason`.
    """

    def __init__(
        self, *, every_steps: int, total_steps: int | None, emit: Emit, last_step: LastStep | None = None
    ) -> None:
        self._every, self._emit = every_steps, emit
        self._left = TimeLeft(total_steps, last_step)

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Emit the step if it is due, or if something happened."""
        left_s = self._left.after(report)
        noteworthy = report.held_out_loss is not None or not report.update_applied
        if report.step % self._every == 0 or noteworthy:
            figures = report.to_json()
            self._emit({"event": "step", **figures, "total_steps": self._left.total, "left_s": left_s})
        if not isinstance(verdict, CarryOn):
            kind, reason = type(verdict).__name__.lower(), getattr(verdict, "reason", "")
            self._emit({"event": "verdict", "step": report.step, "kind": kind, "reason": reason})

    def rewound(self, step: int) -> None:
        """Emit at which step the run goes on."""
        self._left.restart()
        self._emit({"event": "rewound", "step": step})

    def close(self) -> None:
        """Do nothing, since nothing is open."""


class ProgressBar:
    """Shows a progress bar in a terminal: step, loss, time left and speed, in the width that there is.

    console: where it is drawn; None is standard output. clock: seconds, from any moment.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        first_step: int,
        last_step: LastStep | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._console = console or Console()
        self._columns = self._console.width
        bar = min(_MOST_BAR, max(_LEAST_BAR, self._columns // 5))
        self._text_columns = self._columns - bar - 2
        self._progress = Progress(
            BarColumn(bar_width=bar),
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True), markup=False),
            refresh_per_second=4,
            console=self._console,
        )
        self._progress.start()
        self._left = TimeLeft(total_steps, last_step, clock=clock)
        self._task = self._progress.add_task("", total=total_steps, completed=first_step, text="")
        self._held_out: float | None = None

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Move the bar, and print above it what should stay readable."""
        if report.held_out_loss is not None:
            self._held_out = report.held_out_loss
        left_s = self._left.after(report)
        total = self._left.total
        text = bar_text(
            report, held_out=self._held_out, total_steps=total, left_s=left_s, columns=self._text_columns
        )
        self._progress.update(self._task, completed=report.step, total=total, text=text)
        if not isinstance(verdict, CarryOn):
            self._console.print(f"step {report.step}: {described(verdict)}", highlight=False, markup=False)

    def rewound(self, step: int) -> None:
        """Move the bar back."""
        self._left.restart()
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


def bar_text(
    report: StepReport,
    *,
    held_out: float | None,
    total_steps: int | None,
    left_s: float | None,
    columns: int,
) -> str:
    """Return what stands beside the bar, in at most `columns` characters."""
    of_total = "" if total_steps is None else f"/{total_steps}"
    parts = [f"{report.step}{of_total}", f"loss {report.loss:.3f}"]
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    if held_out is not None:
        parts.append(f"held-out {held_out:.3f}")
    parts += [f"{report.tokens_per_s:,.0f} tokens/s", f"lr {report.learning_rate:.1e}"]
    return _fitted(parts, columns=columns)


class NotebookBar:
    """Shows the progress in one output of a notebook's cell, which is replaced as the training goes on, and
    below it each verdict of the guards and each rewind.

    display: `IPython.display.display`.
    """

    EVERY_S = 0.5

    def __init__(
        self, *, total_steps: int | None, display: Callable[..., Any], last_step: LastStep | None = None
    ) -> None:
        # Any: IPython's handle of an output
        self._left = TimeLeft(total_steps, last_step)
        self._display = display
        self._handle = display(_shown("the first step is under way"), raw=True, display_id=True)
        self._held_out: float | None = None
        self._text, self._drawn = "", 0.0

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Replace the output, at most twice per second, and add one for a verdict."""
        if report.held_out_loss is not None:
            self._held_out = report.held_out_loss
        left_s = self._left.after(report)
        total = self._left.total
        filled = round(20 * report.step / total) if total else 0
        text = bar_text(report, held_out=self._held_out, total_steps=total, left_s=left_s, columns=75)
        self._text = f"{'█' * filled}{'░' * (20 - filled)} {text}"
        if not isinstance(verdict, CarryOn):
            self._display(_shown(f"step {report.step}: {described(verdict)}"), raw=True)
        if time.monotonic() - self._drawn >= self.EVERY_S:
            self._draw()

    def rewound(self, step: int) -> None:
        """Show at which step the run goes on."""
        self._left.restart()
        self._display(_shown(f"rewound to step {step}"), raw=True)

    def close(self) -> None:
        """Draw the last step."""
        if self._text:
            self._draw()

    def _draw(self) -> None:
        self._handle.update(_shown(self._text), raw=True)
        self._drawn = time.monotonic()


def _shown(text: str) -> dict[str, str]:
    return {"text/plain": text}


def notebook_display() -> Callable[..., Any] | None:
    """Return `IPython.display.display` in the kernel of a notebook; None elsewhere."""
    # IPython is no dependency: where it runs this process, it is loaded.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    display: Callable[..., Any] = sys.modules["IPython.display"].display
    return display


def described(verdict: Verdict) -> str:
    """Return a verdict and its reason for people."""
    reason = getattr(verdict, "reason", "")
    return f"{type(verdict).__name__.lower()}: {reason}"
