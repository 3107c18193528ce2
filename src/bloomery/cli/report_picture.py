"""A picture of where the time of a run went, by class and over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.operate.ledger.books import RunLedger


def draw_ledger(ledger: RunLedger, path: Path, *, title: str) -> None:
    """Draw the share of each class in each part of the run's time. Raises OSError.

    ledger: one that was read with bins.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    hours = (ledger.end - ledger.begin) / 3600
    width = hours / max(1, len(ledger.bins))
    kinds = list(ledger.seconds)
    colours = [pyplot.get_cmap("tab20")(place) for place in range(20)]
    figure, axes = pyplot.subplots(figsize=(11, 5), dpi=120)
    places = [index * width for index in range(len(ledger.bins))]
    below = [0.0] * len(places)
    sums = [sum(part.values()) or 1.0 for part in ledger.bins]
    for index, kind in enumerate(kinds):
        shares = [100.0 * part.get(kind, 0.0) / whole for part, whole in zip(ledger.bins, sums, strict=True)]
        colour = colours[index % len(colours)]
        axes.bar(places, shares, bottom=below, width=width, align="edge", color=colour, label=str(kind))
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set(
        xlabel="hours since the first start",
        ylabel="% of all ranks' time",
        ylim=(0, 100),
        title=f"{title}: effective time {ledger.effective_time:.1%}, ETTR {ledger.ettr:.1%}",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
