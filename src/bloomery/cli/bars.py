"""Progress bars of commands that prepare data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bloomery.data.tokenize import Progress, silent


@contextmanager
def data_bar(*, shown: bool) -> Iterator[Progress]:
    """Something that draws the progress of preparing data, one bar a stage; silence where not `shown`.

    It draws to standard error, so that output stays clean, and only on a terminal.
    """
    if not (shown and sys.stderr.isatty()):
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}  # Any: rich's task ids

        def draw(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None, note="")
            bars.update(tasks[stage], completed=done, note=note)

        yield draw
