"""From a recipe and its prepared files to the documents of training and held-out loss, and the stream."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from bloomery.config.data import DataSection
from bloomery.config.recipe import Recipe
from bloomery.data.indexed import IndexedDataset
from bloomery.data.position import Position
from bloomery.data.prepare import Prepared, PreparedDataset
from bloomery.data.shares import Claim, Demand, Extent, claims
from bloomery.data.split import split_documents
from bloomery.data.stream import Stream, begin_stream
from bloomery.errors import DataError
from bloomery.plan.schedule import consumed_at_end


def training_documents(section: DataSection, prepared: Sequence[PreparedDataset]) -> list[IndexedDataset]:
    """The documents of each dataset that training may see."""
    return [_part(section, dataset.name, IndexedDataset(dataset.prefix), 0) for dataset in prepared]


def held_out_documents(section: DataSection, prepared: Prepared) -> list[IndexedDataset]:
    """Datasets for the held-out loss: those given as such, and the validation part of the others."""
    given = [IndexedDataset(dataset.prefix) for dataset in prepared.held_out]
    if not section.split:
        return given
    parts = [_part(section, one.name, IndexedDataset(one.prefix), 1) for one in prepared.train]
    return [*given, *(part for part in parts if part.token_count)]


def stream_of_run(
    recipe: Recipe, prepared: Sequence[PreparedDataset], datasets: Sequence[IndexedDataset]
) -> Stream:
    """The stream of `datasets` (as `training_documents` gives them) from the run's first sample on.

    Raises DataError where weights and budgets cannot be honoured.
    """
    section, length = recipe.data, recipe.data.sequence_length
    asked = tuple(Claim(name=one.name, samples=0, weight=Fraction(one.weight)) for one in prepared)
    if section.datasets:
        extents = [
            Extent(name=given.name, tokens=dataset.token_count, windows=dataset.window_count(length))
            for given, dataset in zip(prepared, datasets, strict=True)
        ]
        asked = claims(section, extents)
    samples = run_samples(recipe)
    return begin_stream(
        section,
        datasets,
        demand_of(recipe, asked),
        seed=recipe.run.seed if section.order_seed == "auto" else int(section.order_seed),
        samples=samples if section.order_samples == "auto" else int(section.order_samples),
    )


def demand_of(recipe: Recipe, asked: tuple[Claim, ...]) -> Demand:
    """What a recipe asks of the datasets that make these claims."""
    return Demand(
        claims=asked,
        samples=run_samples(recipe),
        slack=recipe.train.global_batch + len(asked),
        sequence_length=recipe.data.sequence_length,
    )


def run_samples(recipe: Recipe) -> int:
    """Samples that the whole run takes, its last batch included."""
    return consumed_at_end(recipe.train, sequence_length=recipe.data.sequence_length)


def indices_left(recipe: Recipe, *, step: int, position: Position) -> int:
    """Indices of the stream from the position's cursor to the run's end, those that are skipped included."""
    end = consumed_at_end(
        recipe.train,
        sequence_length=recipe.data.sequence_length,
        step=step,
        consumed=position.consumed,
    )
    ahead = position.next_samples(max(0, end - position.consumed))
    return max(0, ahead[-1].stop - position.cursor) if ahead else 0


def _part(section: DataSection, name: str, dataset: IndexedDataset, number: int) -> IndexedDataset:
    if not section.split:
        return dataset
    part = dataset.part(split_documents(dataset.document_count, section.split)[number])
    if number == 0 and not part.window_count(section.sequence_length):
        raise DataError(
            f"data.split leaves {part.token_count:,} tokens of the dataset {name!r} to train on, and one "
            f"sample takes {section.sequence_length + 1:,}.",
            remedy="Give training a larger part, or the dataset more text.",
        )
    return part
