"""The request for a plan, and the error that names everything impossible in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from bloomery.config.data import HUB_PREFIX, DataSection
from bloomery.config.load import LoadedRecipe
from bloomery.config.recipe import Recipe
from bloomery.config.validate import check_recipe
from bloomery.config.validate_layout import batch_pairs, ramp_up_mistakes
from bloomery.data.tokenizer_files import local_vocabulary_size
from bloomery.errors import ConfigError, Mistake
from bloomery.frozen import dataclass
from bloomery.plan.hardware import PRECISIONS, Hardware, SiteLink
from bloomery.plan.parameters import ffn_width

OF = "the plan"
COMMAND_LINE = "command line"
MOST_ACCELERATORS = 10**9


@dataclass(frozen=True, kw_only=True)
class Request:
    """A recipe, a machine, and what the user adds. None means that the user did not say.

    consumed: the samples that the run has used already, whose batches need not fit the accelerators.
    """

    loaded: LoadedRecipe
    hardware: Hardware
    accelerators: int | None = None
    link: SiteLink | None = None
    failures_per_week: float | None = None
    hours_per_day: float = 24.0
    data_tokens: float | None = None
    price_per_accelerator_hour: float | None = None
    consumed: int = 0

    @property
    def recipe(self) -> Recipe:
        """The recipe, without where its settings came from."""
        return self.loaded.recipe


def vocabulary_of(recipe: Recipe) -> int:
    """Return the vocabulary's size if the recipe knows it; 0 if only its tokenizer's file does."""
    if recipe.model.vocabulary != "auto":
        return recipe.model.vocabulary
    return recipe.data.tokenizer_vocabulary if recipe.data.tokenizer == "train" else 0


def with_vocabulary(loaded: LoadedRecipe, size: int | None) -> LoadedRecipe:
    """Return the recipe with the vocabulary of its tokenizer as a number, as training resolves 'auto'.

    size: `vocabulary_size` of the tokenizer; with None, and where the recipe says a number, nothing changes.
    """
    recipe = loaded.recipe
    if size is None or recipe.model.vocabulary != "auto":
        return loaded
    return replace(loaded, recipe=replace(recipe, model=replace(recipe.model, vocabulary=size)))


def with_local_vocabulary(loaded: LoadedRecipe) -> LoadedRecipe:
    """Return the recipe `with_vocabulary` of its tokenizer's file, read only where nothing else knows it."""
    is_known = bool(vocabulary_of(loaded.recipe))
    return (
        loaded if is_known else with_vocabulary(loaded, local_vocabulary_size(loaded.recipe.data.tokenizer))
    )


def why_unknown(data: DataSection) -> str:
    """Return why the size of the vocabulary is not known, as the end of a sentence about it."""
    if data.tokenizer.startswith(HUB_PREFIX):
        return f"is that of {data.tokenizer}, which is not fetched for this"
    return f"is the tokenizer's, and no tokenizer.json can be read at {data.tokenizer}"


def unknown_vocabulary(loaded: LoadedRecipe) -> Iterator[Mistake]:
    """Yield the mistake of a recipe whose vocabulary is not known, if it is not."""
    if not vocabulary_of(loaded.recipe):
        remedy = "Say how many tokens it has: model.vocabulary=50257."
        yield _of_recipe(loaded.sources, "model.vocabulary", "auto", why_unknown(loaded.recipe.data), remedy)


def refuse_impossible(request: Request) -> None:
    """Raise ConfigError that lists everything impossible in the request, and what would be possible."""
    mistakes = [*_option_mistakes(request), *_machine_mistakes(request)]
    replica = _replica(request.recipe)
    accelerators = request.accelerators
    possible = accelerators is not None and 1 <= accelerators <= MOST_ACCELERATORS
    whole = possible and accelerators is not None and accelerators % replica == 0
    try:
        check_recipe(
            request.recipe,
            request.loaded.sources,
            data_degree=accelerators // replica if whole and accelerators else None,
            consumed=request.consumed,
        )
    except ConfigError as refused:
        mistakes += refused.mistakes
    if mistakes:
        raise ConfigError(mistakes, of=OF)


def data_degrees(recipe: Recipe, *, consumed: int = 0) -> list[int]:
    """Return the data-parallel degrees that divide every batch of the run, ascending.

    consumed: samples; batches that lie before them do not count.
    """
    from math import gcd

    if any(True for _ in ramp_up_mistakes(recipe.train)):
        return [1]
    pairs = batch_pairs(recipe.train, consumed=consumed)
    if any(batch % micro for batch, micro in pairs):
        return []
    largest = gcd(*(batch // micro for batch, micro in pairs))
    small = [degree for degree in range(1, int(largest**0.5) + 1) if largest % degree == 0]
    return sorted({*small, *(largest // degree for degree in small)})


def _replica(recipe: Recipe) -> int:
    return recipe.parallel.tensor * recipe.parallel.pipeline


def _option_mistakes(request: Request) -> Iterator[Mistake]:
    accelerators, replica = request.accelerators, _replica(request.recipe)
    if accelerators is not None and accelerators < 1:
        remedy = f"Give at least {replica}, one replica (TP × PP)."
        yield _mistake("--gpus", accelerators, "a run needs at least one accelerator", remedy)
    elif accelerators is not None and accelerators > MOST_ACCELERATORS:
        yield _mistake("--gpus", accelerators, "is no machine", f"Give at most {MOST_ACCELERATORS:,}.")
    elif accelerators is not None and accelerators % replica:
        problem = (
            f"is no multiple of {replica}, the accelerators of one replica "
            f"(tensor {request.recipe.parallel.tensor} × pipeline {request.recipe.parallel.pipeline})"
        )
        below = accelerators // replica * replica
        would = [count for count in (below, below + replica) if count]
        remedy = f"{' or '.join(map(str, would))} would do; or change parallel.tensor, parallel.pipeline."
        yield _mistake("--gpus", accelerators, problem, remedy)
    if request.failures_per_week is not None and request.failures_per_week < 0:
        remedy = "Give 0 or more; BLOOM saw 1 to 2 a week on 384 GPUs."
        yield _mistake("--failures-per-week", request.failures_per_week, "is negative", remedy)
    if not 0 < request.hours_per_day <= 24:
        yield _mistake(
            "--hours-per-day", request.hours_per_day, "a day has 24 hours", "Give more than 0, at most 24."
        )
    if request.data_tokens is not None and request.data_tokens < 1:
        remedy = "Give the tokens of one epoch, for instance 341e9."
        yield _mistake("--data-tokens", request.data_tokens, "is less than one token", remedy)
    if request.price_per_accelerator_hour is not None and request.price_per_accelerator_hour < 0:
        yield _mistake(
            "--price", request.price_per_accelerator_hour, "is negative", "Give a price, or leave it out."
        )


def _machine_mistakes(request: Request) -> Iterator[Mistake]:
    recipe, hardware, sources = request.recipe, request.hardware, request.loaded.sources
    per_node, tensor = hardware.node.accelerators, recipe.parallel.tensor
    if tensor > per_node:
        remedy = f"Tensor parallelism stays inside a node: at most {per_node}."
        yield _of_recipe(
            sources, "parallel.tensor", tensor, f"exceeds the {per_node} of a {hardware.name} node", remedy
        )
    for key, width in (("model.hidden", recipe.model.hidden), ("model.ffn", ffn_width(recipe.model))):
        if width % tensor:
            below = width // tensor * tensor
            would = " or ".join(str(count) for count in (below, below + tensor) if count)
            yield _of_recipe(
                sources, key, width, f"does not divide by parallel.tensor = {tensor}", f"{would} would do."
            )
    yield from unknown_vocabulary(request.loaded)
    precisions = {recipe.train.precision, *(name for _, name in recipe.train.precision_changes)}
    for precision in sorted(precisions):
        if not hardware.peak_flops(precision):
            meant = "bf16 or fp32" if precision == "auto" else precision
            known = ", ".join(name for name in PRECISIONS if hardware.peak_flops(name))
            has = f"It has {known}" if known else f"Give its file accelerator.{meant[:4]}_teraflops"
            yield _of_recipe(
                sources,
                "train.precision",
                precision,
                f"{hardware.name} has no units for {meant}",
                f"{has}; or choose another --hardware.",
            )


def _of_recipe(sources: Mapping[str, str], key: str, value: object, problem: str, remedy: str) -> Mistake:
    return Mistake(key=key, value=value, source=sources.get(key, "default"), problem=problem, remedy=remedy)


def _mistake(key: str, value: object, problem: str, remedy: str) -> Mistake:
    return Mistake(key=key, value=value, source=COMMAND_LINE, problem=problem, remedy=remedy)
