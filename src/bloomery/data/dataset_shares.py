"""Computes the share of each dataset from weights and budgets, and splits documents into train and held out.

Shares are exact fractions of the run's samples. Train, validation and test are disjoint ranges of documents.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bloomery.config.data import DataSection, DatasetSection
from bloomery.config.find import from_home
from bloomery.errors import DataError

_VALID_KEYS = ("valid", "validation")
_NAMED = 5  # datasets named in one message
_NAME_KEYS, _RATIO_KEYS = ("dataset_path", "name", "dataset"), ("ratio", "weight")


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The size of one dataset of the training mixture, in tokens and in whole samples.

    sample_tokens: tokens of a sample, on average; None where all its places are filled.
    """

    name: str
    tokens: int
    windows: int
    sample_tokens: Fraction | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a dataset shall give to the run.

    samples: number of samples over the run; 0 if `weight` decides.
    weight: its part of the samples that budgets leave, relative to the other weights.
    """

    name: str
    samples: int
    weight: Fraction


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a recipe asks of its mixture.

    samples: number of samples from the run's first to its last.
    slack: samples by which budgets may miss the run's length where every dataset has one.
    sequence_length: number of tokens in a sample.
    """

    claims: tuple[Claim, ...]
    samples: int
    slack: int
    sequence_length: int

    @property
    def budgeted(self) -> tuple[int, ...]:
        """The indices of the datasets with a budget."""
        return tuple(number for number, claim in enumerate(self.claims) if claim.samples)

    @property
    def digest(self) -> str:
        """Return a hash of the datasets' claims without the run's length; '' where none has a budget."""
        if not self.budgeted:
            return ""
        facts = [(claim.samples, str(claim.weight)) for claim in self.claims]
        return xxhash.xxh3_64_hexdigest(repr(facts).encode())

    def shares(
        self, *, given_before: Sequence[int] = (), samples: int | None = None, is_new: bool = True
    ) -> tuple[Fraction, ...]:
        """Return the share of each dataset in the next `samples` samples; the shares sum to one.

        given_before: number of samples that each dataset gave before, which its budget has paid for.
        samples: number of samples ahead; None for the whole run.
        is_new: refuse a budget that is below what its dataset gave already.

        Budgets come first, and weights divide what budgets leave. If no dataset has a weight, the budgets
        must sum to the samples, within the slack. Raises DataError for budgets that cannot be kept.
        """
        samples = self.samples if samples is None else samples
        before = [*given_before, *([0] * (len(self.claims) - len(given_before)))]
        budgets = [
            self._left(claim, had, is_new=is_new) if claim.samples else 0
            for claim, had in zip(self.claims, before, strict=True)
        ]
        budgeted = sum(budgets)
        weighed = [Fraction(0) if claim.samples else claim.weight for claim in self.claims]
        total = sum(weighed, Fraction(0))
        if not total and not self.budgeted:
            raise DataError(
                f"The weights of {_listed([claim.name for claim in self.claims])} sum to 0.",
                remedy="Give at least one dataset a weight above 0, or a budget of tokens or epochs.",
            )
        yet = "yet " if any(before) else ""
        tokens, run_tokens = (f"{count * self.sequence_length:,}" for count in (budgeted, samples))
        if not total:
            whole = sum(claim.samples for claim in self.claims)
            if abs(whole - self.samples) > self.slack and abs(budgeted - samples) > self.slack:
                raise DataError(
                    f"The budgets of data.datasets {yet}give {tokens} tokens, and the run {yet}takes "
                    f"{run_tokens}.",
                    remedy=f"Set train.tokens = {whole * self.sequence_length}, or give a dataset a weight, "
                    "not a budget.",
                )
            # Other samples replace those that were skipped: first what is left, then all datasets a second
            # time.
            parts = budgets if budgeted else [claim.samples for claim in self.claims]
            return tuple(Fraction(part, sum(parts)) for part in parts)
        if budgeted >= samples:
            raise DataError(
                f"The budgets of data.datasets {yet}take {tokens} tokens, and the run {yet}has {run_tokens}: "
                "nothing is left for the datasets with weights.",
                remedy="Train longer, lower the budgets, or give the others weight 0.",
            )
        rest = samples - budgeted
        return tuple(
            (Fraction(budget) or rest * weight / total) / samples
            for budget, weight in zip(budgets, weighed, strict=True)
        )

    def _left(self, claim: Claim, given_before: int, *, is_new: bool) -> int:
        if given_before > claim.samples and is_new:
            length = self.sequence_length
            raise DataError(
                f"The dataset {claim.name!r} has given {given_before * length:,} tokens, and its budget is "
                f"{claim.samples * length:,} now.",
                remedy=f"Give it at least {given_before * length:,}, or weight = 0 to have no more of it.",
            )
        return max(0, claim.samples - given_before)


def claims(section: DataSection, extents: Sequence[Extent]) -> tuple[Claim, ...]:
    """Return what each of `section.datasets` shall give. Raises DataError if a dataset is too small for its
    budget.
    """
    weights = _weights(section)
    return tuple(
        Claim(
            name=dataset.name,
            samples=_budget(dataset, extent, sequence_length=section.sequence_length),
            weight=weights[dataset.name],
        )
        for dataset, extent in zip(section.datasets, extents, strict=True)
    )


def read_weights(path: Path) -> dict[str, Fraction]:
    """Return weights by dataset from a TOML or JSON file. Raises DataError that names the file and the place.

    The file holds a table of name → weight, or a list of {dataset_path or name, ratio or weight}; either may
    stand under 'train' or 'weights'.
    """
    content = _content_of(path)
    for key in ("train", "weights"):
        if isinstance(content, Mapping) and isinstance(content.get(key), dict | list):
            content = content[key]
    return _ratios(path, content)


def held_out_weights(section: DataSection) -> dict[str, Fraction] | None:
    """Return the ratios in which datasets take part in the held-out loss: those that the weights file has
    for its split 'valid' (or 'validation'), by name. None where there is no such file, or no such split.

    Raises DataError for a name that neither data.datasets nor data.held_out_datasets has.
    """
    if not section.weights_file:
        return None
    path = from_home(section.weights_file)
    content = _content_of(path)
    splits = [
        content[key]
        for key in _VALID_KEYS
        if isinstance(content, Mapping) and isinstance(content.get(key), dict | list)
    ]
    if not splits:
        return None
    ratios = _ratios(path, splits[0])
    known = {dataset.name for dataset in (*section.datasets, *section.held_out_datasets)}
    if strangers := sorted(set(ratios) - known):
        raise DataError(
            f"data.weights_file {path} validates on what the recipe lacks: {_listed(strangers)}.",
            remedy="Name datasets of data.datasets or data.held_out_datasets.",
        )
    if not any(ratios.values()):
        raise DataError(f"The ratios for validation in {path} sum to 0.", remedy="Give one of them more.")
    return ratios


def _content_of(path: Path) -> Any:  # Any: parsed JSON or TOML
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as missing:
        raise DataError(
            f"Cannot read data.weights_file {path}: {missing.strerror}.", remedy="Give the path of the file."
        ) from missing
    except (ValueError, RecursionError) as broken:
        raise DataError(
            f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {broken}.",
            remedy="Write name = weight on each line of a .toml file, or {name: weight} in a .json file.",
        ) from broken


def _ratios(path: Path, content: Any) -> dict[str, Fraction]:  # Any: as above
    if not isinstance(content, Mapping | list):
        raise _wrong(path, f"it holds {content!r:.40}, and no names")
    entries = content.items() if isinstance(content, Mapping) else map(_entry, content)
    weights: dict[str, Fraction] = {}
    for number, (name, weight) in enumerate(entries):
        if not isinstance(name, str) or isinstance(weight, bool) or not isinstance(weight, int | float):
            raise _wrong(path, f"entry {number + 1} is not a name with a number")
        if not 0 <= weight <= sys.float_info.max:
            raise _wrong(path, f"{name!r} has the weight {weight!r:.40}")
        if name in weights:
            raise _wrong(path, f"{name!r} stands in it twice")
        weights[name] = Fraction(weight)
    return weights


def _weights(section: DataSection) -> dict[str, Fraction]:
    """Return the weight of each dataset, from the weights file if there is one."""
    if not section.weights_file:
        return {dataset.name: Fraction(dataset.resolved_weight) for dataset in section.datasets}
    path = from_home(section.weights_file)
    weights = read_weights(path)
    wanted = {dataset.name for dataset in section.datasets if not (dataset.tokens or dataset.epochs)}
    known = {dataset.name for dataset in section.datasets}
    for names, problem in (
        (sorted(wanted - set(weights)), "gives no weight to"),
        (sorted(set(weights) - known), "names what data.datasets lacks:"),
    ):
        if names:
            raise DataError(
                f"data.weights_file {path} {problem} {_listed(names)}.",
                remedy="Use the names of data.datasets in it, each once; weight 0 leaves a dataset out.",
            )
    return {**{name: Fraction(0) for name in known}, **weights}


def _budget(dataset: DatasetSection, extent: Extent, *, sequence_length: int) -> int:
    """Return the number of samples that a dataset shall give over the run; 0 if its weight decides."""
    if dataset.tokens > extent.tokens:
        raise DataError(
            f"The dataset {dataset.name!r} has a budget of {dataset.tokens:,} tokens and holds "
            f"{extent.tokens:,}: it is too small for it.",
            remedy="Lower its budget, or repeat it knowingly: "
            f"epochs = {dataset.tokens / max(extent.tokens, 1):.3g}.",
        )
    if dataset.tokens:
        samples = int(dataset.tokens // (extent.sample_tokens or sequence_length))
        return max(1, min(samples, extent.windows))
    return max(1, round(Fraction(dataset.epochs) * extent.windows)) if dataset.epochs else 0


def _entry(entry: Any) -> tuple[Any, Any]:  # Any: parsed JSON
    if not isinstance(entry, Mapping):
        return None, None
    name = next((entry[key] for key in _NAME_KEYS if key in entry), None)
    return name, next((entry[key] for key in _RATIO_KEYS if key in entry), None)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(repr(name) for name in names[:_NAMED]) + more


def _wrong(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path} cannot be read as weights: {problem}.",
        remedy="Give each dataset's name once, with a number of 0 or more.",
    )


def split_documents(count: int, parts: Sequence[int], *, exact: bool = False) -> tuple[range, range, range]:
    """Return the documents of train, validation and test: neighbouring ranges, in this order, that cover all
    documents.

    parts: up to three numbers in any unit; without any, all documents train. Ends are rounded to even.
    exact: round the parts as exact fractions. Otherwise the parts' running sums are added up and multiplied
    in float64, as Megatron's --split does, which may round a tie to the other side.
    """
    wanted = [*parts, *[0] * (3 - len(parts))] if parts else [1, 0, 0]
    if exact:
        ends = [0, *(round(Fraction(sum(wanted[: number + 1]) * count, sum(wanted))) for number in range(3))]
    else:
        weights = np.array(wanted, dtype=np.float64)
        sums = [0.0]
        for share in (weights / np.sum(weights)).tolist():
            sums.append(sums[-1] + share)
        ends = [round(end * float(count)) for end in sums]
    train, validation, test = (range(begin, end) for begin, end in pairwise(ends))
    return train, validation, test
