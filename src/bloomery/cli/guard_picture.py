"""A picture of a replayed log: its losses, and where guards had something to say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.guard.logs import Columns
    from bloomery.guard.replay import ReplayFinding

COLOURS = {"rewind": "#c1292e", "stop": "#000000", "watch": "#e87f3a"}
BINS = 4000
MOST_MARKS = 300


def draw_replay(columns: Columns, findings: Sequence[ReplayFinding], path: Path, *, title: str) -> None:
    """Draw the loss by step, its lowest and highest of each bin where there are many, and the findings."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 5), dpi=120)
    finite = np.flatnonzero(np.isfinite(columns.loss))
    width = max(1, -(-len(finite) // BINS))
    starts = np.arange(0, len(finite), width)
    steps, losses = columns.step[finite], columns.loss[finite]
    if width > 1:
        lowest, highest = np.minimum.reduceat(losses, starts), np.maximum.reduceat(losses, starts)
        axes.fill_between(steps[starts], lowest, highest, color="tab:blue", alpha=0.35, linewidth=0)
    axes.plot(steps[starts], losses[starts], color="tab:blue", linewidth=0.8, label="loss")
    named: set[str] = set()
    for finding in findings[:MOST_MARKS]:
        action = type(finding.verdict).__name__.lower()
        label = None if action in named else {"watch": "told"}.get(action, action)
        named.add(action)
        axes.axvline(finding.step, color=COLOURS[action], linewidth=1, linestyle=":", label=label)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
