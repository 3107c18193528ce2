"""What does not fit together in a mixture of datasets, as far as the recipe shows it."""

from __future__ import annotations

from collections.abc import Iterator

from bloomery.config.data import DataSection
from bloomery.config.finding import Finding

_PARTS = 3


def mixing_mistakes(data: DataSection) -> Iterator[Finding]:
    """Findings about weights, budgets, splits and orders."""
    for dataset in data.datasets:
        given = [name for name in ("tokens", "epochs") if getattr(dataset, name)]
        if dataset.weight not in (0.0, 1.0):
            given.append("weight")
        if len(given) > 1:
            yield Finding(
                key="data.datasets",
                problem=f"'{dataset.name}' has {' and '.join(given)}",
                remedy="Give it one of weight, tokens and epochs.",
            )
    if data.datasets and not data.weights_file and not any(map(_gives, data.datasets)):
        yield Finding(
            key="data.datasets",
            problem="their weights sum to nothing",
            remedy="Give at least one dataset a weight above 0, or a budget of tokens or epochs.",
        )
    if data.weights_file and not data.datasets:
        yield Finding(
            key="data.weights_file",
            problem="names weights of data.datasets, and there are none",
            remedy="Leave it out, or tokenise the sources one by one and name them in data.datasets.",
        )
    if data.split and (len(data.split) > _PARTS or not data.split[0]):
        yield Finding(
            key="data.split",
            problem="is not [train, validation, test] with something to train on",
            remedy="Write for instance [969, 30, 1].",
        )
    if data.split and data.sources:
        yield Finding(
            key="data.split",
            problem="splits data.datasets; documents of data.sources are held out by data.held_out_every",
            remedy="Leave it out.",
        )
    if data.reset_positions and not data.mask_documents:
        yield Finding(
            key="data.reset_positions",
            problem="would have a token see several others at one position",
            remedy="Set data.mask_documents = true with it.",
        )
    if data.order != "megatron" and data.order_samples != "auto":
        yield Finding(
            key="data.order_samples",
            problem=f"says nothing for the {data.order} order, which has no end",
            remedy="Leave it out, or set data.order = 'megatron'.",
        )


def _gives(dataset: object) -> bool:
    return any(getattr(dataset, name) for name in ("weight", "tokens", "epochs"))
