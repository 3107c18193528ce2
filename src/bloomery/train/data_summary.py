"""Summarises at each start the sizes of model and data, and how many epochs the run reads."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.checkpoint.format.state import Json
from bloomery.config.recipe import Recipe
from bloomery.data.prepare import Prepared
from bloomery.plan.parameters import count_parameters
from bloomery.plan.schedule import phases
from bloomery.train.data_stream import DataStream, held_out_documents, run_samples

_USEFUL_EPOCHS = 4.0
"""Reading a text up to four times is about as good as new text (Muennighoff et al. 2023, §5)."""


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """A dataset. epochs: how often the whole run reads it, by the mixture that is in force."""

    name: str
    documents: int
    tokens: int
    epochs: float


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """The sizes of a run's model and data.

    tokens: in the documents that are trained on. planned_tokens: those that the whole run takes; empty places
    of packed documents are none.
    batch_tokens: tokens of a step, in the first phase and in the last.
    warmup_tokens: those of the warm-up, than which no run may be shorter.
    warnings: sentences that a person should see.
    """

    parameters: int
    vocabulary: int
    sequence_length: int
    batch_tokens: tuple[int, int]
    warmup_tokens: int
    documents: int
    tokens: int
    planned_tokens: int
    held_out_documents: int
    held_out_tokens: int
    datasets: tuple[DatasetSummary, ...]
    notes: tuple[str, ...]

    @property
    def epochs(self) -> float:
        """Return how often the run reads its text, over all datasets."""
        return self.planned_tokens / max(1, self.tokens)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what a person should see: left-out files, missing held-out text, text that is read too
        often.
        """
        alone = len(self.datasets) == 1
        repeated = [
            _repeated(
                dataset,
                alone=alone,
                epoch_tokens=dataset.tokens if alone else self.planned_tokens / dataset.epochs,
                least_tokens=self.warmup_tokens,
            )
            for dataset in self.datasets
            if dataset.epochs > _USEFUL_EPOCHS
        ]
        missing = "There is no held-out text, so only the loss of the training text is measured."
        is_in_notes = any("held-out loss" in note for note in self.notes)
        return (*self.notes, *([] if self.held_out_documents or is_in_notes else [missing]), *repeated)

    def lines(self) -> list[str]:
        """Return what people read at the start."""
        first, last = self.batch_tokens
        batch = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        held_out = f"{self.held_out_documents:,} documents, {self.held_out_tokens:,} tokens held out"
        return [
            f"model: {self.parameters:,} parameters, vocabulary {self.vocabulary:,}, context "
            f"{self.sequence_length:,} tokens, {batch} tokens per step",
            f"data: {self.documents:,} documents, {self.tokens:,} tokens to train on; {held_out}",
            f"plan: {self.planned_tokens:,} tokens, {_times(self.epochs)} through the text",
            *(f"warning: {warning}" for warning in self.warnings),
        ]

    def to_json(self) -> dict[str, Json]:
        """Return the same as the journal's `data` event holds it."""
        datasets: list[Json] = [
            {"name": each.name, "documents": each.documents, "tokens": each.tokens, "epochs": each.epochs}
            for each in self.datasets
        ]
        return {
            "parameters": self.parameters,
            "vocabulary": self.vocabulary,
            "sequence_length": self.sequence_length,
            "batch_tokens": list(self.batch_tokens),
            "documents": self.documents,
            "tokens": self.tokens,
            "planned_tokens": self.planned_tokens,
            "epochs": self.epochs,
            "held_out_documents": self.held_out_documents,
            "held_out_tokens": self.held_out_tokens,
            "datasets": datasets,
            "warnings": list(self.warnings),
        }


def summarise_data(recipe: Recipe, prepared: Prepared, data_stream: DataStream) -> DataSummary:
    """Return the sizes of a run's model and data."""
    length, schedule = recipe.data.sequence_length, recipe.schedule
    samples = run_samples(recipe)
    batches = [phase.global_batch * length for _, phase in phases(recipe.train)]
    stream, files = data_stream.stream, data_stream.batches.datasets
    shares = stream.mixtures[-1].shares
    taken = [
        samples * stream.sample_tokens(number, dataset.token_count) * share / sum(shares)
        for number, (dataset, share) in enumerate(zip(files, shares, strict=True))
    ]
    datasets = tuple(
        DatasetSummary(
            name=name,
            documents=dataset.document_count,
            tokens=dataset.token_count,
            epochs=tokens / max(1, dataset.token_count),
        )
        for name, dataset, tokens in zip(data_stream.names, files, taken, strict=True)
    )
    held_out = [part.documents for part in held_out_documents(recipe.data, prepared)]
    parameters = count_parameters(recipe.model, vocabulary=prepared.vocabulary_size, sequence_length=length)
    return DataSummary(
        parameters=parameters.total,
        vocabulary=prepared.vocabulary_size,
        sequence_length=length,
        batch_tokens=(batches[0], batches[-1]),
        warmup_tokens=schedule.warmup * {"samples": length, "tokens": 1, "steps": batches[-1]}[schedule.unit],
        documents=sum(dataset.documents for dataset in datasets),
        tokens=sum(dataset.tokens for dataset in datasets),
        planned_tokens=round(sum(taken)),
        held_out_documents=sum(documents.document_count for documents in held_out),
        held_out_tokens=sum(documents.token_count for documents in held_out),
        datasets=datasets,
        notes=prepared.notes,
    )


def _repeated(dataset: DatasetSummary, *, alone: bool, epoch_tokens: float, least_tokens: int) -> str:
    """Return the warning.

    epoch_tokens: what the run takes of all datasets for one epoch of this one. least_tokens: a shorter run is
    not advised.
    """
    subject = "The text" if alone else f"The dataset {dataset.name!r}"
    useful = int(_USEFUL_EPOCHS * epoch_tokens)
    shorter = f", or train.tokens={useful:_}" if useful >= least_tokens else ""
    return (
        f"{subject} is read {_times(dataset.epochs)}; beyond 4 times, more reading hardly helps. Give more "
        f"text{shorter}."
    )


def _times(epochs: float) -> str:
    return f"{epochs:,.0f} times" if epochs >= 10 else f"{epochs:,.1f} times"
