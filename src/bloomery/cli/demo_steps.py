"""The parts of `bloomery demo`: fitting the recipe, evaluating, exporting, sampling, drawing the curve.

This module loads torch, so it is imported when the demo runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from bloomery.cli.arguments import data_bar
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.indexed import IndexedDataset
from bloomery.data.prepare import Prepared, prepare
from bloomery.data.sources import documents_of, is_held_out
from bloomery.data_loader.batches import held_out_batches
from bloomery.errors import DataError, TrainingFailed
from bloomery.evaluate.generate import Sampling, generate
from bloomery.evaluate.open_checkpoint import open_saved
from bloomery.evaluate.scoring import compress, xz_bits_per_byte
from bloomery.events.journal import loss_curve, read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.huggingface import export
from bloomery.parallel.precision import measure_peak_flops
from bloomery.plan.parameters import token_cost
from bloomery.train.step import lacking_toolchain

EVALUATION_ROWS = 16  # sequences per batch
LARGER_FROM_FLOPS = 0.5e12
PEAK_PROBES = 3
TOKEN_UNIT = 16384  # the length of the training is a multiple of these tokens
FEW_STEPS = 5
"""The fewest steps from which a machine's speed can be judged."""
FITS_SHARE = 0.9  # of the planned tokens, from which on the recipe is left as it is
EFFICIENCY = {"demo": 0.3, "demo-small": 0.5}
"""Share of the measured matmul peak that training reached on the machine where each recipe was tuned."""
EAGER_SHARE = 0.9
"""Speed without compilation relative to the speed with it; used where no compiler is installed."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Bits per byte of the model and of xz on the held-out files."""

    bits_per_byte: float
    xz_bits_per_byte: float

    @property
    def summary(self) -> str:
        """The comparison as text for the terminal."""
        ratio = self.bits_per_byte / self.xz_bits_per_byte
        return (
            f"   held-out files: {self.bits_per_byte:.3f} bits a byte. xz -9e, which did not see the\n"
            f"   training files, makes {self.xz_bits_per_byte:.3f}: the model needs {ratio:.3f} of xz's size"
        )


def prepare_text(recipe: Recipe, rundir: RunDirectory, *, shown: bool) -> Prepared:
    """Write the tokenizer and the datasets where the training will look for them.

    shown: whether progress bars are drawn. Raises DataError where no file is held out.
    """
    rundir.create()
    with data_bar(shown=shown) as progress:
        prepared = prepare(recipe.data, rundir.data, progress=progress)
    if not prepared.held_out:
        raise DataError(
            "No file of this Python's standard library is held out, so nothing can be compared.",
            remedy="Use a Python whose standard library is on disk as .py files.",
        )
    return prepared


def compare_with_xz(recipe: Recipe, prepared: Prepared, rundir: RunDirectory) -> Compression:
    """Measure bits per byte on the held-out files, of the model and of xz on all their text joined."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = open_saved(rundir.path).decoder(device=device)
    (held_out,) = prepared.held_out
    batches = held_out_batches(
        IndexedDataset(held_out.prefix),
        sequence_length=recipe.data.sequence_length,
        rows=EVALUATION_ROWS,
        eod=prepared.end_of_document_id,
    )
    ours = compress(decoder, batches, text_bytes=held_out.text_bytes)
    texts = [
        document.text.encode()
        for document in documents_of(recipe.data)
        if is_held_out(document.key, one_in=recipe.data.held_out_every)
    ]
    assert sum(len(text) for text in texts) == held_out.text_bytes, "both compress the same bytes"
    return Compression(bits_per_byte=ours.bits_per_byte, xz_bits_per_byte=xz_bits_per_byte(texts))


def sample(rundir: RunDirectory, *, prompt: str, max_new_tokens: int = 160) -> str:
    """Return `prompt` and the text with which the model continues it."""
    saved = open_saved(rundir.path)
    decoder = saved.decoder(device=torch.device("cpu"))
    opening = saved.bounds.opening(saved.tokenizer.encode(prompt))
    drawn = generate(
        decoder,
        opening,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=0.6, top_p=0.95),
        ends=saved.bounds.ends,
    )
    ids = [token for token in drawn if token != saved.tokenizer.eod]
    return prompt + saved.tokenizer.decode_after(ids, before=opening)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The demo's recipe, fitted to this machine.

    loaded: the recipe with the overrides applied.
    name, overrides: the arguments of `bloomery train` that give this recipe.
    summary: the choice as text for the terminal.
    """

    loaded: LoadedRecipe
    name: str
    overrides: list[str]
    summary: str

    @property
    def tokens(self) -> int:
        """Length of the training, in tokens."""
        return self.loaded.recipe.train.tokens


def fitted_recipe(rundir: RunDirectory, *, minutes: float) -> Fitted:
    """Choose the larger or the smaller demo recipe, with as many tokens as this machine trains in `minutes`.

    A run that has begun keeps its recipe.
    """
    if rundir.recipe.exists():
        return _begun(rundir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = max(measure_peak_flops(device, "auto") for _ in range(PEAK_PROBES))
    name = "demo" if peak >= LARGER_FROM_FLOPS else "demo-small"
    recipe = load_recipe(name).recipe
    cost = token_cost(
        recipe.model,
        vocabulary=recipe.data.tokenizer_vocabulary,
        sequence_length=recipe.data.sequence_length,
    )
    reached = peak * EFFICIENCY[name] * (EAGER_SHARE if lacking_toolchain() else 1.0)
    affordable = int(minutes * 60 * reached / cost.model)
    tokens = min(recipe.train.tokens, affordable // TOKEN_UNIT * TOKEN_UNIT)
    if tokens < TOKEN_UNIT:
        raise TrainingFailed(
            f"{minutes:g} minutes are not enough to train on anything here.",
            remedy="Give --minutes 1 or more.",
        )
    overrides = [f"train.tokens={tokens}"]
    summary = (
        f"   this machine multiplies {peak / 1e12:.2f} TFLOP/s: recipe {name}, {tokens:,} tokens, "
        f"about {tokens * cost.model / reached / 60:.1f} minutes of training"
    )
    return Fitted(loaded=load_recipe(name, overrides), name=name, overrides=overrides, summary=summary)


def refitted(fitted: Fitted, rundir: RunDirectory, *, left_s: float) -> Fitted:
    """Return the recipe with as many tokens as the steps of the run show to fit into the time that is left.

    left_s: seconds for the rest. The recipe as it is where all of it fits, or nearly; it is never longer.
    """
    steps = [record for record in read_journal(rundir.journal()) if record.get("event") == "step"]
    if len(steps) < FEW_STEPS:
        return fitted
    done = int(steps[-1]["consumed_tokens"])
    fits = done + int(median(record["tokens_per_s"] for record in steps[1:]) * left_s)
    if fits >= FITS_SHARE * fitted.tokens:
        return fitted
    tokens = max(fits // TOKEN_UNIT, done // TOKEN_UNIT + 1) * TOKEN_UNIT
    overrides = [f"train.tokens={tokens}"]
    return replace(fitted, loaded=load_recipe(fitted.name, overrides), overrides=overrides)


def _begun(rundir: RunDirectory) -> Fitted:
    before = load_recipe(str(rundir.recipe)).recipe
    overrides = [f"train.tokens={before.train.tokens}"]
    for name in EFFICIENCY:
        loaded = load_recipe(name, overrides)
        if loaded.recipe.model == before.model:
            summary = f"   {rundir.path} was begun: recipe {name}, {before.train.tokens:,} tokens"
            return Fitted(loaded=loaded, name=name, overrides=overrides, summary=summary)
    raise TrainingFailed(
        f"{rundir.path} holds another run than the demo.", remedy="Give another directory with --run."
    )


@dataclass(frozen=True, kw_only=True)
class ExportedDemo:
    """The exported model. summary: the result as text for the terminal."""

    directory: Path
    parameters: int
    summary: str


def export_verified(rundir: RunDirectory) -> ExportedDemo:
    """Export the run's model into the run directory and verify its logits; replaces an earlier export."""
    saved = open_saved(rundir.path)
    shutil.rmtree(rundir.export, ignore_errors=True)
    done = export(
        saved.model,
        saved.checkpoint,
        rundir.export,
        tokenizer=saved.tokenizer_path,
        end_of_document=saved.tokenizer.end_of_document,
    )
    summary = (
        f"   {done.directory}: {done.parameters:,} parameters; transformers gives our logits to within "
        f"{done.largest_difference:.1g}"
    )
    return ExportedDemo(directory=done.directory, parameters=done.parameters, summary=summary)


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
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=rundir.name)
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
