"""Pictures of a simulation: the days of one life as bars of what they went to, and a sweep as a curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bloomery.plan.simulation.life import TRAINING, Life
from bloomery.plan.simulation.lives import Forecast

COLOURS = ("#4c9f70", "#f2c14e", "#c1292e", "#e87f3a", "#7b5ea7", "#8d99ae", "#3d5a80", "#235789", "#b56576")
MOST_BARS = 120


def draw_life(found: Forecast, path: Path) -> None:
    """One bar a day (or several days, in a long run), split by cause."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    days = max(1, round(found.scenario.run.days / MOST_BARS))
    bars = daily_hours(found.first, hours_a_bar=24.0 * days)
    figure, axes = pyplot.subplots(figsize=(11, 4.5), dpi=120)
    causes = [cause for cause in found.hours if any(bar.get(cause, 0.0) > 0.0 for bar in bars)]
    places, below = [index * days for index in range(len(bars))], [0.0] * len(bars)
    for cause in causes:
        shares = [100.0 * bar.get(cause, 0.0) / sum(bar.values()) for bar in bars]
        colour = COLOURS[list(found.hours).index(cause) % len(COLOURS)]
        axes.bar(
            places, shares, bottom=below, width=days * 0.92, align="edge", color=colour, label=f"{cause} "
        )
        below = [low + share for low, share in zip(below, shares, strict=True)]
    lost = found.first.hours.get("lost work", 0.0)
    title = f"{found.scenario.run.name}, first of {found.lives} lives: goodput {found.first.goodput:.1%}"
    if lost > 0.0:
        title += f" ({lost:.0f} h of the training shown were lost again)"
    lowest = min(bar.get(TRAINING, 0.0) / sum(bar.values()) for bar in bars)
    axes.set(xlabel="day", ylabel="% of the time", ylim=(max(0.0, 100.0 * lowest - 15.0), 100.0), title=title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(causes)))
    figure.tight_layout(rect=(0, 0.06 + 0.045 * ((len(causes) - 1) // 4), 1, 1))
    figure.savefig(path)
    pyplot.close(figure)


def draw_sweep(key: str, found: Sequence[tuple[str, Forecast]], path: Path) -> None:
    """Goodput against the setting's values, with the 95% interval."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    places = list(range(len(found)))
    shares = [100.0 * one.goodput for _, one in found]
    below = [100.0 * (one.goodput - one.low) if one.lives > 1 else 0.0 for _, one in found]
    above = [100.0 * (one.high - one.goodput) if one.lives > 1 else 0.0 for _, one in found]
    axes.errorbar(places, shares, yerr=[below, above], marker="o", capsize=4, color=COLOURS[0])
    axes.set_xticks(places, [value for value, _ in found])
    axes.set(xlabel=key, ylabel="goodput (%)", title=f"{found[0][1].scenario.run.name}: 95% intervals")
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def daily_hours(life: Life, *, hours_a_bar: float) -> list[dict[str, float]]:
    """Hours by cause in each stretch of `hours_a_bar`; the last may be shorter."""
    bars: list[dict[str, float]] = []
    for begin, end, cause in life.spans:
        while begin < end:
            index = int(begin / hours_a_bar + 1e-9)
            while len(bars) <= index:
                bars.append({})
            stop = min(end, (index + 1) * hours_a_bar)
            bars[index][cause] = bars[index].get(cause, 0.0) + stop - begin
            begin = stop
    return bars
