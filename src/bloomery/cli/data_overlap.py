"""`bloomery data report --overlap`: held-out documents that are in the training text too."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import data_bar

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe
    from bloomery.data.indexed import IndexedDataset
    from bloomery.data.prepare import Prepared


def report_overlap(loaded: LoadedRecipe, run: Path | None, *, as_json: bool) -> int:
    """Print which held-out documents of a recipe or run are in its training text too; returns 1 if any is."""
    from bloomery.cli.data_pairs import print_result
    from bloomery.data.overlap import overlap_of

    training, held_out, _ = texts_of(loaded, run)
    with data_bar(shown=not as_json) as progress:
        found = overlap_of(training, held_out, progress=progress)
    total = sum(found.shared.values())
    lines = [
        f"{name}: {found.shared[name]:,} of {count:,} held-out documents are in the training text too"
        for name, count in found.documents.items()
    ]
    lines += [f"  of them in {name}: {count:,}" for name, count in found.by_training.items() if count]
    lines += [
        f"  document {each.held_out_document:,} of {each.held_out} is document {each.training_document:,} of "
        f"{each.training} ({each.tokens:,} tokens)"
        for each in found.examples
    ]
    if total:
        lines.append(
            "  `bloomery data dedup PREFIX --against HELD-OUT --to NEW` writes training text without them."
        )
    print_result(asdict(found) | {"total": total}, lines, as_json=as_json)
    return int(total > 0)


def texts_of(
    loaded: LoadedRecipe, run: Path | None, *, needs_held_out: bool = True
) -> tuple[dict[str, IndexedDataset], dict[str, IndexedDataset], Prepared]:
    """Return the training documents and the held-out ones of a recipe or run, by dataset.

    needs_held_out: refuse a recipe that holds out nothing.
    """
    from tempfile import gettempdir

    from bloomery.data.prepare import prepare
    from bloomery.errors import DataError
    from bloomery.events.run_directory import RunDirectory
    from bloomery.train.data_stream import held_out_documents, training_documents

    data = loaded.recipe.data
    if data.sources and run is None:
        raise DataError(
            "The recipe's data.sources are not tokenised yet.",
            remedy="Give the directory of a run that was started, or a recipe with data.datasets.",
        )
    place = RunDirectory(run).data if run else Path(gettempdir()) / "bloomery-data"
    prepared = prepare(data, place)
    training = training_documents(data, prepared.train)
    held_out = {part.name: part.documents for part in held_out_documents(data, prepared)}
    if needs_held_out and not held_out:
        raise DataError(
            "There is no held-out text to compare with.",
            remedy="Set data.split, data.held_out_datasets or data.held_out_every.",
        )
    names = [dataset.name for dataset in prepared.train]
    return dict(zip(names, training, strict=True)), held_out, prepared
