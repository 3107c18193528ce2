"""Builds the data of a run: its documents, its stream of samples, and the batches of this rank.

`data_forecast` computes what a run has taken from its stream, and what it is going to take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.state import Json
from bloomery.config.data import DataSection
from bloomery.config.recipe import Recipe
from bloomery.data.dataset_shares import Claim, Demand, Extent, claims, held_out_weights, split_documents
from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order
from bloomery.data.position import Position, Ranges, SampleShare
from bloomery.data.prepare import Prepared, PreparedDataset
from bloomery.data.sample_layout import sample_tokens
from bloomery.data.stream import (
    EpochEnds,
    SampleStream,
    begin_stream,
    ends_passed,
    epoch_ends,
    first_repeat,
    layouts_of,
    stream_identity,
)
from bloomery.data_loader.batches import Batches
from bloomery.data_loader.reading import count_bigrams
from bloomery.errors import DataError
from bloomery.events.history import EvenSteps, even_steps, step_reaching
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.mesh import Mesh
from bloomery.plan.hardware import GIB
from bloomery.plan.main_memory import main_memory_gib
from bloomery.plan.memory import BIGRAM_BYTES
from bloomery.plan.schedule import Phase, consumed_at_end, stretches
from bloomery.train.state import TrainState


def training_documents(section: DataSection, prepared: Sequence[PreparedDataset]) -> list[IndexedDataset]:
    """Return the documents of each dataset that training may see."""
    return [_part(section, dataset.name, IndexedDataset(dataset.prefix), 0) for dataset in prepared]


_VALIDATION = " (validation)"


@dataclass(frozen=True, kw_only=True)
class HeldOutPart:
    """Held-out documents of one dataset. weight: its share of an evaluation, relative to the others."""

    name: str
    weight: float
    documents: IndexedDataset


def held_out_documents(section: DataSection, prepared: Prepared) -> list[HeldOutPart]:
    """Return the text for the held-out loss: datasets configured for it, and the validation part of the
    others. Where the weights file has ratios for validation, those that it gives a ratio above 0, with it.
    """
    parts = [
        HeldOutPart(name=dataset.name, weight=dataset.weight, documents=IndexedDataset(dataset.prefix))
        for dataset in prepared.held_out
    ]
    taken = {part.name for part in parts}
    for dataset in prepared.train if section.split else ():
        documents = _part(section, dataset.name, IndexedDataset(dataset.prefix), 1)
        name = f"{dataset.name}{_VALIDATION}" if dataset.name in taken else dataset.name
        if documents.token_count:
            parts.append(HeldOutPart(name=name, weight=dataset.weight, documents=documents))
    ratios = held_out_weights(section)
    if ratios is None:
        return parts
    of_part = [part.name.removesuffix(_VALIDATION) for part in parts]  # two parts of a name share its ratio
    each = {name: float(ratios.get(name, 0)) / of_part.count(name) for name in {*of_part}}
    weights = {part.name: each[name] for part, name in zip(parts, of_part, strict=True)}
    if without := [name for name, ratio in ratios.items() if ratio and not weights.get(name)]:
        raise DataError(
            f"data.weights_file validates on {without[0]!r}, which has no held-out documents.",
            remedy="Give data.split a part for validation, or name it in data.held_out_datasets.",
        )
    return [replace(part, weight=weights[part.name]) for part in parts if weights[part.name]]


def stream_of_run(
    recipe: Recipe, prepared: Sequence[PreparedDataset], datasets: Sequence[IndexedDataset]
) -> SampleStream:
    """Return the stream of `datasets` (as `training_documents` returns them) from the run's first sample on.

    Raises DataError if weights and budgets cannot be kept.
    """
    section = recipe.data
    seed = recipe.run.seed if section.order_seed == "auto" else int(section.order_seed)
    layouts = layouts_of(section, datasets, seed=seed)
    asked = tuple(Claim(name=source.name, samples=0, weight=Fraction(source.weight)) for source in prepared)
    if section.datasets:
        extents = [
            Extent(
                name=source.name,
                tokens=dataset.token_count,
                windows=layout.sample_count,
                sample_tokens=sample_tokens(layout, dataset.token_count),
            )
            for source, dataset, layout in zip(prepared, datasets, layouts, strict=True)
        ]
        asked = claims(section, extents)
    samples = run_samples(recipe)
    return begin_stream(
        section,
        datasets,
        demand_of(recipe, asked),
        seed=seed,
        layouts=layouts,
        samples=samples if section.order_samples == "auto" else int(section.order_samples),
    )


def demand_of(recipe: Recipe, asked: tuple[Claim, ...]) -> Demand:
    """Return what a recipe asks of the datasets that make these claims."""
    return Demand(
        claims=asked,
        samples=run_samples(recipe),
        slack=recipe.train.global_batch + len(asked),
        sequence_length=recipe.data.sequence_length,
    )


def run_samples(recipe: Recipe) -> int:
    """Return the number of samples that the whole run takes, including its last batch."""
    return consumed_at_end(recipe.train, sequence_length=recipe.data.sequence_length)


def indices_left(recipe: Recipe, *, step: int, position: Position) -> int:
    """Return the number of stream indices from the position's cursor to the run's end, including skipped
    ones.
    """
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
    part = dataset.part(_documents_of(section, name, dataset, number))
    if number == 0 and not part.window_count(section.sequence_length):
        raise DataError(
            f"data.split leaves {part.token_count:,} tokens of the dataset {name!r} to train on, and one "
            f"sample takes {section.sequence_length + 1:,}.",
            remedy="Give training a larger part, or the dataset more text.",
        )
    return part


def _documents_of(section: DataSection, name: str, dataset: IndexedDataset, number: int) -> range:
    """Return the documents of one part of `data.split`. Megatron counts sequences, and rounds in float64."""
    if section.order != "megatron":
        return split_documents(dataset.document_count, section.split, exact=True)[number]
    wanted = split_documents(dataset.sequence_count, section.split)[number]
    if dataset.sequence_count == dataset.document_count:
        return wanted
    edges = np.array([wanted.start, wanted.stop])
    documents = np.searchsorted(dataset.document_indices, edges)
    if (dataset.document_indices[documents] != edges).any():
        raise DataError(
            f"Megatron's data.split cuts the dataset {name!r} within a document: it has "
            f"{dataset.sequence_count:,} sequences in {dataset.document_count:,} documents.",
            remedy="Tokenise it again with one sequence a document, or set data.order = 'bloomery'.",
        )
    return range(*documents.tolist())


@dataclass(frozen=True, kw_only=True)
class DataForecast:
    """The stream from its first index to the run's end.

    samples: number of its indices, including skipped ones.
    past: how the steps that were made moved the cursor; later steps follow today's recipe.
    """

    stream: SampleStream
    samples: int
    step: int
    position: Position
    past: tuple[EvenSteps, ...]
    recipe: Recipe

    def step_of(self, index: int) -> int:
        """Return the step, made or to be made, that passes the stream's index `index - 1`."""
        made = step_reaching(index, self.past)
        if made is not None:
            return made
        skips = self.position.skips
        ahead = (range(max(skip.start, self.position.cursor), min(skip.stop, index)) for skip in skips)
        skipped = sum(map(len, ahead))
        consumed = self.position.consumed + index - self.position.cursor - skipped
        yet = stretches(self.recipe.train, consumed, start=self.position.consumed)
        return self.step + sum(steps for steps, _ in yet)


def data_forecast(recipe: Recipe, stream: SampleStream, run: Path | None) -> DataForecast:
    """Return how a run goes on from its newest checkpoint under a recipe; without one, from its beginning.

    stream: the recipe's stream from its beginning.
    Raises DataError if the run cannot go on under the recipe.
    """
    saved = checkpoints(RunDirectory(run)) if run else ()
    step, position, past = 0, Position(), tuple[EvenSteps, ...]()
    if run and saved:
        values: Any = read_manifest(saved[-1].directory).values  # Any: JSON
        step, position = int(values["train"]["step"]), Position.from_json(values["train"]["position"])
        past = even_steps(RunDirectory(run), until=step)
        left = indices_left(recipe, step=step, position=position)
        stream = stream.following(values["data"], at=position.cursor, left=left)
    left = indices_left(recipe, step=step, position=position)
    return DataForecast(
        stream=stream,
        samples=position.cursor + left,
        step=step,
        position=position,
        past=past,
        recipe=recipe,
    )


@dataclass(kw_only=True)
class DataStream:
    """The stream and the batches of a run.

    names: names of the datasets.
    fingerprint: fingerprint of the text and its tokenizer.
    is_tokenised_here: whether the run tokenised the text itself; then the text must not change, while other
    datasets may be added to ones that were given as tokens.
    """

    stream: SampleStream
    batches: Batches
    names: tuple[str, ...]
    fingerprint: str
    is_tokenised_here: bool
    _cursor: int = 0
    _ends: tuple[SampleStream, int, EpochEnds] | None = None

    @property
    def order(self) -> Order | MegatronOrder:
        """The order in which the run uses the samples of its datasets."""
        return self.stream.order

    def identity(self) -> dict[str, str]:
        """Return what another machine must read alike to mean the same samples by the same numbers."""
        datasets = dict(zip(self.names, self.batches.datasets, strict=True))
        return stream_identity(self.stream, datasets, text=self.fingerprint)

    def prefetch(
        self, state: TrainState, *, phase_of: Callable[[TrainState], Phase], share: SampleShare
    ) -> None:
        """Request the batches of the next steps from the readers, as far as they are known."""
        for _ in range(self.batches.prefetch):
            if state.done:
                return
            phase = phase_of(state)
            try:
                span = self.order.next_span(state.position, phase.global_batch, share)
            except DataError:  # the lease or the order ends here, and the step that needs more reports it
                return
            self.batches.expect(span, phase.micro_batch)
            state = state.after(span)

    def to_json(self) -> dict[str, Json]:
        """Return what a checkpoint keeps."""
        return {"fingerprint": self.fingerprint, **self.stream.to_json()}

    def about(self, cursor: int, *, below: int, skips: Ranges = ()) -> dict[str, Json]:
        """Return what lists of checkpoints show of the data: the cursor, the next end of a dataset's first
        epoch, the earliest one of the run, and the first index at which a dataset is read again.
        """
        ends = [sample for _, sample in self._epoch_ends(below)]
        ahead = [sample for sample in ends if sample > cursor]
        return {
            "cursor": cursor,
            "epoch_end_ahead": ahead[0] if ahead else None,
            "first_epoch_end": ends[0] if ends else None,
            "first_repeat": first_repeat(self.order, below=max(below, cursor), skips=skips),
        }

    def follow(
        self, stored: Mapping[str, Any], checkpoint: str, *, at: int, left: int
    ) -> dict[str, Json] | None:
        """Continue in the order of a checkpoint, and return the mixture if another one holds from index `at`
        on.

        left: number of indices from there to the run's end, over which budgets are spread.
        Raises DataError for another text, or an order that cannot continue with today's datasets.
        """
        if self.is_tokenised_here and stored["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{checkpoint} was trained on other text, or with another tokenizer, than "
                "data.sources gives now.",
                remedy="Bring the old files back, or start a run of another name.",
            )
        self._cursor = at
        stream = self.stream.following(stored, at=at, left=left)
        return self._take(stream, known=len(stored["mixtures"]))

    def demand(self, demand: Demand, *, at: int, left: int) -> dict[str, Json] | None:
        """Meet `demand` from stream index `at` on, and return the mixture if it changes.

        left: number of indices from there to the run's end.
        Raises DataError, and changes nothing, if budgets cannot be kept.
        """
        stream = self.stream.demanding(demand, at=at, left=left)
        return self._take(stream, known=len(self.stream.mixtures))

    def _take(self, stream: SampleStream, *, known: int) -> dict[str, Json] | None:
        if stream.order is not self.stream.order:
            self.batches.follow(stream.order)
        self.stream = stream
        mixture = stream.mixtures[-1]
        if len(stream.mixtures) == known:
            return None
        whole = sum(mixture.shares)
        shares: dict[str, Json] = {
            name: share / whole for name, share in zip(self.names, mixture.shares, strict=True)
        }
        return {"at": mixture.at, "shares": shares}

    def epochs_ended(self, cursor: int, *, below: int) -> list[dict[str, Json]]:
        """Return the first epochs that ended since the last call, as the journal holds them."""
        passed = ends_passed(self._epoch_ends(below), after=self._cursor, up_to=cursor)
        self._cursor = cursor
        return [{"dataset": self.names[dataset], "sample": sample} for dataset, sample in passed]

    def _epoch_ends(self, below: int) -> EpochEnds:
        """Return the ends of first epochs of a run that takes the stream up to `below`."""
        if self._ends is None or self._ends[:2] != (self.stream, below):
            self._ends = (self.stream, below, epoch_ends(self.order, below=below))
        return self._ends[2]


def build_data_stream(recipe: Recipe, prepared: Prepared, mesh: Mesh) -> DataStream:
    """Open the tokenised datasets of a run, and return its stream with the batches of this rank."""
    datasets = training_documents(recipe.data, prepared.train)
    stream = stream_of_run(recipe, prepared.train, datasets)
    batches = Batches(
        stream.order,
        datasets,
        sequence_length=recipe.data.sequence_length,
        mask_documents=recipe.data.mask_documents,
        answers_alone=bool(recipe.data.prompt_field),
        rank=mesh.data.index,
        degree=mesh.data.degree,
        eod=prepared.end_of_document_id,
        prefetch=recipe.data.prefetch,
        threads=recipe.data.read_threads,
        vocabulary_size=prepared.vocabulary_size,
        layouts=stream.layouts,
        device=mesh.device,
    )
    return DataStream(
        stream=stream,
        batches=batches,
        names=tuple(dataset.name for dataset in prepared.train),
        fingerprint=prepared.fingerprint,
        is_tokenised_here=bool(recipe.data.sources),
    )


def training_bigrams(recipe: Recipe, prepared: Prepared) -> torch.Tensor:
    """Return counts[a, b], how often b follows a in the beginning of each training dataset; [v, v].

    Raises DataError where this machine has too little memory for all pairs: the kernel would kill it.
    """
    vocabulary, there = prepared.vocabulary_size, main_memory_gib()
    needed = BIGRAM_BYTES * vocabulary**2 / GIB
    if needed > there:
        raise DataError(
            f"An embedding from bigrams takes {needed:,.0f} GiB with a vocabulary of {vocabulary:,}, "
            f"and this machine has {there:,.0f}.",
            remedy="Set model.embedding_init = 'normal' or 'xavier_uniform', or train a smaller tokenizer.",
        )
    datasets = training_documents(recipe.data, prepared.train)
    return torch.from_numpy(count_bigrams(datasets, prepared.vocabulary_size))
