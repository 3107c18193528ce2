"""`bloomery data report`: the share and the epochs of each dataset and group in a run."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.tables import table_text

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe
    from bloomery.data.stream import DatasetRow

_NAME_WIDTH, _GROUP_WIDTH = 30, 12


def add_parser(commands: Any) -> None:  # Any: argparse keeps this type to itself
    """Add the command to those of `bloomery data`."""
    report = commands.add_parser(
        "report",
        help="show the tokens, shares and epochs of each dataset and group in a run",
        description="Show what a run takes from each dataset and group: the tokens it holds, its share as "
        "wanted and as delivered, its epochs, and the step at which its first epoch ends. For a run that "
        "has begun, the samples it has used count with the weights, batches and lengths of that time. "
        "Only the indices of the datasets are read.",
    )
    report.add_argument("recipe", metavar="RECIPE|RUN", help="a recipe, or a run directory")
    report.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        help="settings that replace the recipe's",
    )
    report.add_argument("--png", metavar="FILE", type=Path, help="draw shares and epochs into this file")
    report.add_argument("--json", action="store_true", help="print one JSON object instead")
    report.set_defaults(command=_report)


def _report(options: Namespace) -> int:
    from bloomery.config.load import load_recipe
    from bloomery.config.validate import check_recipe
    from bloomery.data.stream import group_rows

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


def _rows(loaded: LoadedRecipe, run: Path | None) -> tuple[list[DatasetRow], int]:
    from bloomery.data.stream import dataset_rows
    from bloomery.train.datasets import data_forecast, stream_of_run, training_documents

    recipe = loaded.recipe
    prepared = _prepared(loaded, run)
    datasets = training_documents(recipe.data, prepared)
    ahead = data_forecast(recipe, stream_of_run(recipe, prepared, datasets), run)
    groups = [dataset.group for dataset in recipe.data.datasets] or [""]
    rows = dataset_rows(
        ahead.stream,
        names=[dataset.name for dataset in prepared],
        groups=groups,
        tokens=[dataset.token_count for dataset in datasets],
        sequence_length=recipe.data.sequence_length,
        samples=ahead.samples,
        step_of=ahead.step_of,
    )
    return rows, ahead.samples


def _prepared(loaded: LoadedRecipe, run: Path | None) -> list[Any]:
    """Return the tokenised datasets: those of data.datasets, or the one that the run made of its sources."""
    from tempfile import gettempdir

    from bloomery.data.indexed import IndexedDataset
    from bloomery.data.prepare import TRAIN, PreparedDataset, dataset_prefixes
    from bloomery.errors import DataError
    from bloomery.events.run_directory import RunDirectory

    data = loaded.recipe.data
    place = RunDirectory(run).data if run else Path(gettempdir()) / "bloomery-data"
    prefixes = dataset_prefixes(data, place)
    pairs = [(dataset.name, prefixes[dataset.path], dataset.resolved_weight) for dataset in data.datasets]
    if data.sources:
        if run is None:
            raise DataError(
                "The recipe's data.sources are not tokenised yet, so their tokens cannot be counted.",
                remedy="Give the directory of a run that was started, or a recipe with data.datasets.",
            )
        pairs = [(TRAIN, RunDirectory(run).data / TRAIN, 1.0)]
    prepared = []
    for name, prefix, weight in pairs:
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


def _table(rows: Sequence[DatasetRow], *, first: str) -> str:
    """Return the rows as a table at most 100 columns wide; `first` is the heading of the names."""
    named = any(row.group for row in rows)
    heads = [first, "tokens", "wanted", "delivered", "epochs", "first epoch ends"]
    lines = [[*heads[:1], *(["group"] if named else []), *heads[1:]]]
    for row in rows:
        ends = "-" if row.first_epoch_step is None else f"step {row.first_epoch_step:,}"
        figures = [f"{row.tokens:,}", f"{row.wanted:.4%}", f"{row.delivered:.4%}", f"{row.epochs:.3f}", ends]
        name = _short(row.name, _NAME_WIDTH)
        lines.append([name, *([_short(row.group, _GROUP_WIDTH)] if named else []), *figures])
    return table_text(lines, left=(0, 1) if named else (0,))


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _draw(rows: Sequence[DatasetRow], groups: Sequence[DatasetRow], path: Path) -> None:
    """Draw the shares delivered and wanted, and the epochs, with one bar for each dataset and group."""
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
