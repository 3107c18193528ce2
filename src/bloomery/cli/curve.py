"""Draws the loss curve of a run, as a PNG and as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bloomery.events.journal import loss_curve, read_journal
from bloomery.events.run_directory import RunDirectory

Points = list[tuple[int, float]]


def draw_png(rundir: RunDirectory, path: Path) -> None:
    """Write a PNG of training and held-out loss by step, with a line at each step where the run resumed."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    steps, losses = zip(*loss_curve(rundir), strict=True)
    axes.plot(steps, losses, linewidth=0.6, alpha=0.45, color="tab:blue", label="training, each step")
    axes.plot(steps, smoothed(losses), linewidth=1.6, color="tab:blue", label="training, smoothed")
    held_out = held_out_curve(rundir)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", markersize=4, label="held out")
    for step in restarts(rundir):
        axes.axvline(step, color="tab:red", linestyle=":", linewidth=1, label=f"resumed at step {step}")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=rundir.path.name)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def draw_terminal(rundir: RunDirectory, *, width: int = 90, height: int = 16) -> str:
    """Return the smoothed training loss and the held-out loss as text, without colours.

    width, height: in characters.
    """
    import plotext

    steps, losses = zip(*loss_curve(rundir), strict=True)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    plotext.plot(list(steps), smoothed(losses), marker="braille", label="training loss, smoothed")
    held_out = held_out_curve(rundir)
    if held_out:
        plotext.scatter(
            *(list(values) for values in zip(*held_out, strict=True)), marker="o", label="held out"
        )
    plotext.xlabel("step")
    text: str = plotext.uncolorize(plotext.build())
    return text


def smoothed(losses: tuple[float, ...], *, window: int = 25) -> list[float]:
    """Return, for each value, the mean of the last `window` values up to it."""
    result, total = [], 0.0
    for index, loss in enumerate(losses):
        total += loss - (losses[index - window] if index >= window else 0.0)
        result.append(total / min(index + 1, window))
    return result


def held_out_curve(rundir: RunDirectory) -> Points:
    """Return (step, held-out loss) by step, each from the last incarnation that made the step."""
    losses: dict[int, float] = {}
    for record in read_journal(rundir.journal()):
        if record.get("event") == "step" and record.get("held_out_loss") is not None:
            losses[record["step"]] = float(record["held_out_loss"])
    return sorted(losses.items())


def restarts(rundir: RunDirectory) -> Iterator[int]:
    """Yield the steps from which a later start of the run continued."""
    for record in read_journal(rundir.journal()):
        if record.get("event") == "start" and record["step"] > 0:
            yield record["step"]
