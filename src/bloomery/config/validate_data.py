"""Checks the settings of `[data]` against each other: mixtures, splits, and how tokens become samples."""

from __future__ import annotations

from collections.abc import Iterator

from bloomery.config.data import DataSection
from bloomery.config.findings import Finding

_PARTS = 3


def mixing_mistakes(data: DataSection) -> Iterator[Finding]:
    """Yield what does not fit together in the datasets' weights, budgets, splits and order."""
    for dataset in data.datasets:
        set_keys = [name for name in ("tokens", "epochs") if getattr(dataset, name)]
        if dataset.weight not in ("auto", 0.0, 1.0):
            set_keys.append("weight")
        if len(set_keys) > 1:
            yield Finding(
                key="data.datasets",
                problem=f"'{dataset.name}' has {' and '.join(set_keys)}",
                remedy="Give it one of weight, tokens and epochs.",
            )
    if data.datasets and not data.weights_file and not any(map(_gives, data.datasets)):
        yield Finding(
            key="data.datasets",
            problem="their weights sum to 0",
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
    if data.order != "megatron" and data.order_samples != "auto":
        yield Finding(
            key="data.order_samples",
            problem=f"has no effect on the {data.order} order, which has no end",
            remedy="Leave it out, or set data.order = 'megatron'.",
        )


def sample_mistakes(data: DataSection) -> Iterator[Finding]:
    """Yield what does not fit together in how tokens become samples, and which of them count."""
    if data.reset_positions and not data.mask_documents:
        yield Finding(
            key="data.reset_positions",
            problem="gives several tokens that attend to each other the same position",
            remedy="Set data.mask_documents = true with it.",
        )
    if data.packing != "windows" and data.order == "megatron":
        yield Finding(
            key="data.packing",
            problem=f"is '{data.packing}', and Megatron's order has its own samples",
            remedy="Set data.packing = 'windows', or data.order = 'bloomery'.",
        )
    if data.packing == "documents" and not data.mask_documents:
        yield Finding(
            key="data.packing",
            problem="packs unrelated documents into one sample, and a token would attend to all of them",
            remedy="Set data.mask_documents = true with it; with learned positions data.reset_positions too.",
        )
    if data.prompt_field and (data.datasets or data.order == "megatron"):
        yield Finding(
            key="data.prompt_field",
            problem="needs data.sources and data.order = 'bloomery', which know where answers begin",
            remedy="Give the prompts and answers as .jsonl files in data.sources.",
        )


def _gives(dataset: object) -> bool:
    return any(getattr(dataset, name) for name in ("weight", "tokens", "epochs"))
