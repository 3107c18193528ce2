"""`bloomery data report`: what a run takes from each dataset and language group."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe
    from bloomery.data.report import Row

_NAME_WIDTH, _GROUP_WIDTH = 30, 12


def add_parser(commands: Any) -> None:  # Any: argparse keeps this type to itself
    """Add the command to those of `bloomery data`."""
    report = commands.add_parser(
        "report",
        help="per dataset and group: tokens, shares, epochs, and when first epochs end",
        description="What a run takes from each dataset and group: tokens held, share wanted and delivered, "
        "epochs, and the step at which each dataset ends its first epoch. Of a run, what it took so far "
        "counts as it was, with the weights, batches and lengths of then. Reads indices alone.",
    )
    report.add_argument("recipe", metavar="RECIPE|RUN", help="a recipe, or a run directory")
    report.add_argument("overrides", metavar="section.key=value", nargs="*", help="settings that replace it")
    report.add_argument("--png", type=Path, help="draw shares and epochs into this file")
    report.add_argument("--json", action="store_true", help="print one JSON object instead")
    report.set_defaults(command=_report)


def _report(options: Namespace) -> int:
    from bloomery.config.check import check_recipe
    from bloomery.config.load import load_recipe
    from bloomery.data.report import group_rows

    path = Path(options.recipe)
    run = path if (path / "recipe.toml").exists() else None
    loaded = load_recipe(str(path / "recipe.toml") if run else options.recipe, options.overrides)
    check_recipe(loaded.recipe, loaded.sources)
    rows, samples = _rows(loaded, run)
    groups = group_rows(rows)
    length = loaded.recipe.data.sequence_length
    if options.png:
        _draw(rows, groups, options.png)
    if options.json:
        facts = {"samples": samples, "tokens": samples * length, "order": loaded.recipe.data.order}
        facts |= {"datasets": [asdict(row) for row in rows], "groups": [asdict(row) for row in groups]}
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    print(f"{samples:,} samples of {length:,} tokens: {samples * length:,} tokens\n")
    print(_table(rows, first="dataset"))
    if groups:
        print(f"\n{_table(groups, first='group')}")
    if options.png:
        print(f"\nDrawn into {options.png}.")
    return 0


def _rows(loaded: LoadedRecipe, run: Path | None) -> tuple[list[Row], int]:
    from bloomery.data.report import dataset_rows
    from bloomery.train.corpora import stream_of_run, training_documents
    from bloomery.train.outlook import outlook

    recipe = loaded.recipe
    given = _prepared(loaded, run)
    datasets = training_documents(recipe.data, given)
    ahead = outlook(recipe, stream_of_run(recipe, given, datasets), run)
    groups = [dataset.group for dataset in recipe.data.datasets] or [""]
    rows = dataset_rows(
        ahead.stream,
        names=[dataset.name for dataset in given],
        groups=groups,
        tokens=[dataset.token_count for dataset in datasets],
        sequence_length=recipe.data.sequence_length,
        samples=ahead.samples,
        step_of=ahead.step_of,
    )
    return rows, ahead.samples


def _prepared(loaded: LoadedRecipe, run: Path | None) -> list[Any]:
    """The tokenised datasets: those that are given, or those that the run made."""
    from tempfile import gettempdir

    from bloomery.data.indexed import IndexedDataset
    from bloomery.data.prepare import TRAIN, PreparedDataset, dataset_prefixes
    from bloomery.errors import DataError
    from bloomery.events.rundir import RunDir

    data = loaded.recipe.data
    place = RunDir(run).data if run else Path(gettempdir()) / "bloomery-data"
    prefixes = dataset_prefixes(data, place)
    found = [(one.name, prefixes[one.path], one.weight) for one in data.datasets]
    if data.sources:
        if run is None:
            raise DataError(
                "The recipe's data.sources are not tokenised yet, so nothing is known of their tokens.",
                remedy="Give the directory of a run that was started, or a recipe with data.datasets.",
            )
        found = [(TRAIN, RunDir(run).data / TRAIN, 1.0)]
    prepared = []
    for name, prefix, weight in found:
        dataset = IndexedDataset(prefix)
        prepared.append(
            PreparedDataset(
                name=name,
                prefix=prefix,
                weight=weight,
                documents=dataset.document_count,
                tokens=dataset.token_count,
                text_bytes=0,
            )
        )
    return prepared


def _table(rows: Sequence[Row], *, first: str) -> str:
    """The rows for people, at most 100 columns wide."""
    named = any(row.group for row in rows)
    heads = [first, "tokens", "wanted", "delivered", "epochs", "first epoch ends"]
    lines = [[*heads[:1], *(["group"] if named else []), *heads[1:]]]
    for row in rows:
        ends = "-" if row.first_epoch_step is None else f"step {row.first_epoch_step:,}"
        figures = [f"{row.tokens:,}", f"{row.wanted:.4%}", f"{row.delivered:.4%}", f"{row.epochs:.3f}", ends]
        name = _short(row.name, _NAME_WIDTH)
        lines.append([name, *([_short(row.group, _GROUP_WIDTH)] if named else []), *figures])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = 2 if named else 1
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column < texts else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _draw(rows: Sequence[Row], groups: Sequence[Row], path: Path) -> None:
    """Shares delivered beside those wanted, and epochs, one line a dataset and group."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    shown = [*groups, *rows][::-1]
    places = list(range(len(shown)))
    figure, (shares, epochs) = pyplot.subplots(
        1, 2, figsize=(11, max(2.5, 0.26 * len(shown) + 1.2)), dpi=120, sharey=True
    )
    shares.barh(places, [row.delivered * 100 for row in shown], color="tab:blue", label="delivered")
    shares.plot([row.wanted * 100 for row in shown], places, "k|", markersize=9, label="wanted")
    shares.set(xlabel="share of the run's samples (%)", yticks=places)
    shares.set_yticklabels([_short(row.name, _NAME_WIDTH) for row in shown], fontsize=7)
    shares.legend(loc="lower right")
    epochs.barh(places, [row.epochs for row in shown], color="tab:orange")
    epochs.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    epochs.set(xlabel="epochs")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
