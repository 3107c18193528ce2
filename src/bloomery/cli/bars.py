"""Progress bars of commands that prepare data."""

from __future__ import annotations

from typing import Any

from bloomery.data.tokenize import Progress, silent


def data_bar(*, shown: bool) -> Progress:
    """Something that draws the progress of preparing data, one bar a stage; silence where not `shown`."""
    if not shown:
        return silent
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    bars: list[Bars] = []
    tasks: dict[str, Any] = {}  # Any: rich's task ids

    def draw(stage: str, done: int, total: int, unit: str) -> None:
        if not bars:
            bars.append(
                Bars(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            )
            bars[0].start()
        if stage not in tasks:
            tasks[stage] = bars[0].add_task(stage, total=total or None)
        bars[0].update(tasks[stage], completed=done, total=total or None)
        if total and done >= total:
            bars[0].stop()
            bars.clear()
            tasks.clear()

    return draw
