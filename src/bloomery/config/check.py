"""What one setting alone cannot show: checks across sections, all mistakes at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from bloomery.config.batches import batch_mistakes, ramp_up_mistakes
from bloomery.config.data import DataSection
from bloomery.config.divisors import divisors, some
from bloomery.config.finding import Finding, refuse
from bloomery.config.layout import layout_mistakes
from bloomery.config.mixing import mixing_mistakes
from bloomery.config.model import ModelSection
from bloomery.config.optim import OptimSection, ScheduleSection
from bloomery.config.peers import peer_mistakes
from bloomery.config.pipelines import pipeline_mistakes
from bloomery.config.places import backup_mistakes
from bloomery.config.recipe import Recipe
from bloomery.config.sharding import sharding_mistakes
from bloomery.config.train import TrainSection


def check_recipe(recipe: Recipe, sources: Mapping[str, str], *, data_degree: int | None = None) -> None:
    """Raise ConfigError with everything in the recipe that does not fit together.

    `data_degree` is the number of data-parallel ranks where it is known: `parallel.data = "auto"` counts
    as 1 before.
    """
    degree = data_degree or (recipe.parallel.data if recipe.parallel.data != "auto" else 1)
    refuse(
        recipe,
        sources,
        [
            *_run_mistakes(recipe.run.name),
            *_model_mistakes(recipe.model, recipe.data),
            *_data_mistakes(recipe.data),
            *mixing_mistakes(recipe.data),
            *backup_mistakes(recipe.backup, offline=recipe.run.offline),
            *_length_mistakes(recipe.train),
            *ramp_up_mistakes(recipe.train),
            *_change_mistakes(recipe.train),
            *batch_mistakes(recipe.train, recipe.parallel, data_degree=degree),
            *_schedule_mistakes(recipe.schedule, recipe.optim, recipe.train, recipe.data.sequence_length),
            *peer_mistakes(recipe),
            *layout_mistakes(recipe),
            *sharding_mistakes(recipe, data_degree=degree),
            *pipeline_mistakes(recipe.parallel, recipe.model, recipe.train, data_degree=degree),
        ],
    )


def _run_mistakes(name: str) -> Iterator[Finding]:
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        yield Finding(
            key="run.name",
            problem="cannot name a directory",
            remedy="Use letters, digits, '.', '_', '+' and '-', and begin with a letter or a digit.",
        )


def _model_mistakes(model: ModelSection, data: DataSection) -> Iterator[Finding]:
    if model.hidden % model.heads:
        yield Finding(
            key="model.heads",
            problem=f"does not divide model.hidden = {model.hidden}",
            remedy=f"Heads that do: {some(divisors(model.hidden), near=model.heads)}.",
        )
    elif model.position == "rotary" and (model.hidden // model.heads) % 2:
        yield Finding(
            key="model.heads",
            problem=f"rotary positions turn pairs of channels, and a head has {model.hidden // model.heads}",
            remedy="Choose heads so that hidden / heads is even, or another model.position.",
        )
    if model.kv_heads != "auto" and model.heads % model.kv_heads:
        yield Finding(
            key="model.kv_heads",
            problem=f"does not divide model.heads = {model.heads}",
            remedy=f"Key/value heads that do: {some(divisors(model.heads), near=model.kv_heads)}.",
        )
    if model.embedding_init == "bigram" and model.tied:
        yield Finding(
            key="model.embedding_init",
            problem="'bigram' factors fill an embedding and a head of its own, and model.tied is true",
            remedy="Set model.tied = false, or another model.embedding_init.",
        )
    if model.max_positions == "auto":
        return
    if model.position != "learned":
        yield Finding(
            key="model.max_positions",
            problem=f"says nothing for {model.position} positions, which have no table",
            remedy="Leave it out, or set model.position = 'learned'.",
        )
    elif data.sequence_length > model.max_positions:
        yield Finding(
            key="data.sequence_length",
            problem=f"exceeds model.max_positions = {model.max_positions}, the table of learned positions",
            remedy=f"Set model.max_positions to {data.sequence_length} or 'auto', or shorten the samples.",
        )


def _data_mistakes(data: DataSection) -> Iterator[Finding]:
    if data.sources and data.datasets:
        yield Finding(
            key="data.sources",
            problem="is given beside data.datasets",
            remedy="Give raw text (sources) or tokenised data (datasets), not both.",
        )
    elif not data.sources and not data.datasets:
        yield Finding(
            key="data.sources",
            problem="there is nothing to train on",
            remedy='Name your text, sources = ["my-notes.txt"], or use sources = ["python:stdlib"].',
        )
    elif any(not source.strip() for source in data.sources):
        yield Finding(
            key="data.sources",
            problem="one of them is empty",
            remedy="Name a file, a directory ('.' for the current one) or a pattern.",
        )
    if data.datasets and not data.sources and data.tokenizer == "train":
        yield Finding(
            key="data.tokenizer",
            problem="cannot be trained on data that is tokenised already",
            remedy="Give the path of the tokenizer.json that data.datasets were tokenised with.",
        )
    for key, datasets in (("datasets", data.datasets), ("held_out_datasets", data.held_out_datasets)):
        names = [dataset.name for dataset in datasets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Finding(
                key=f"data.{key}",
                problem=f"two of them are called '{name}'",
                remedy="Give each its own name.",
            )


def _length_mistakes(train: TrainSection) -> Iterator[Finding]:
    given = [name for name in ("samples", "tokens", "steps") if getattr(train, name)]
    if len(given) == 1:
        return
    if not given:
        yield Finding(
            key="train.samples",
            problem="the run has no length",
            remedy="Set one of train.samples, train.tokens and train.steps.",
        )
        return
    others = " ".join(f"train.{name}=0" for name in given[:-1])
    yield Finding(
        key=f"train.{given[-1]}",
        problem=f"the run has {len(given)} lengths: {', '.join(f'train.{name}' for name in given)}",
        remedy=f"Keep one and set the others to 0, for instance with {others} on the command line.",
    )


def _change_mistakes(train: TrainSection) -> Iterator[Finding]:
    for key in ("micro_batch_changes", "precision_changes"):
        places = [place for place, _ in getattr(train, key)]
        if any(place < 1 for place in places) or sorted(set(places)) != places:
            yield Finding(
                key=f"train.{key}",
                problem="its samples must rise, from 1 on",
                remedy="Order the changes by the sample they begin with, and give each sample once.",
            )
    if any(micro_batch < 1 for _, micro_batch in train.micro_batch_changes):
        yield Finding(
            key="train.micro_batch_changes",
            problem="a micro-batch is below 1",
            remedy="Use at least 1 sample.",
        )


def _schedule_mistakes(
    schedule: ScheduleSection, optim: OptimSection, train: TrainSection, sequence_length: int
) -> Iterator[Finding]:
    if schedule.floor > optim.learning_rate:
        yield Finding(
            key="schedule.floor",
            problem=f"is above the peak, optim.learning_rate = {optim.learning_rate:g}",
            remedy="Lower the floor or raise the peak.",
        )
    length = _length_in(schedule.unit, train, sequence_length)
    if schedule.decay != "auto" and schedule.warmup > schedule.decay:
        yield Finding(
            key="schedule.warmup",
            problem=f"ends after schedule.decay = {schedule.decay}",
            remedy=f"Both count {schedule.unit} from the start of the run: shorten the warm-up.",
        )
    elif length is not None and schedule.warmup > length:
        yield Finding(
            key="schedule.warmup",
            problem=f"is longer than the run, which has {length} {schedule.unit}",
            remedy=f"It counts {schedule.unit} (schedule.unit): shorten it, or train longer.",
        )


def _length_in(unit: str, train: TrainSection, sequence_length: int) -> int | None:
    """The run's length in a unit, or None where a ramp-up makes steps of many sizes."""
    samples = train.samples or -(-train.tokens // sequence_length) or train.steps * train.global_batch
    if not samples:
        return None
    if unit == "steps":
        return None if train.ramp_up else -(-samples // train.global_batch)
    return samples * (sequence_length if unit == "tokens" else 1)
