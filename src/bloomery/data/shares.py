"""From weights, budgets and a weights file to the share of each dataset: exact fractions of the run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from bloomery.config.data import DataSection, DatasetSection
from bloomery.errors import DataError

_NAMED = 5  # names in one message
_NAME_KEYS, _RATIO_KEYS = ("dataset_path", "name", "dataset"), ("ratio", "weight")


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much one dataset holds to train on, in tokens."""

    name: str
    tokens: int


def shares(
    section: DataSection, extents: Sequence[Extent], *, run_tokens: int, slack_tokens: int
) -> tuple[Fraction, ...]:
    """The share of each of `section.datasets` in the run; they sum to one.

    Budgets come first, and weights divide what they leave. Without a weight the budgets must be the run's
    length, give or take `slack_tokens` (a batch). Raises DataError for budgets that cannot be kept.
    """
    datasets = section.datasets
    weights = _weights(section)
    budgets = [_budget(one, extent) for one, extent in zip(datasets, extents, strict=True)]
    budgeted = sum(budgets, Fraction(0))
    weighed = [
        Fraction(0) if budget else weights[one.name] for budget, one in zip(budgets, datasets, strict=True)
    ]
    total = sum(weighed, Fraction(0))
    if not total and not budgeted:
        raise DataError(
            f"The weights of {_listed([one.name for one in datasets])} sum to nothing.",
            remedy="Give at least one dataset a weight above 0, or a budget of tokens or epochs.",
        )
    if not total:
        if abs(budgeted - run_tokens) > slack_tokens:
            raise DataError(
                f"The budgets of data.datasets give {round(budgeted):,} tokens, and the run takes "
                f"{run_tokens:,}.",
                remedy=f"Set train.tokens = {round(budgeted)}, or give a dataset a weight, not a budget.",
            )
        return tuple(budget / budgeted for budget in budgets)
    if budgeted >= run_tokens:
        raise DataError(
            f"The budgets of data.datasets take {round(budgeted):,} tokens, and the run has {run_tokens:,}: "
            "nothing is left for the datasets with weights.",
            remedy="Train longer, lower the budgets, or give the others weight 0.",
        )
    rest = run_tokens - budgeted
    return tuple(
        (budget or rest * weight / total) / run_tokens
        for budget, weight in zip(budgets, weighed, strict=True)
    )


def read_weights(path: Path) -> dict[str, Fraction]:
    """Weights by dataset from a file: TOML, or JSON; raises DataError naming the file and the place.

    A table of name → weight, or a list of {dataset_path or name, ratio or weight}; either may stand under
    'train' or 'weights'.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as missing:
        raise DataError(
            f"Cannot read data.weights_file {path}: {missing.strerror}.", remedy="Give the path of the file."
        ) from missing
    except ValueError as broken:
        raise DataError(
            f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {broken}.",
            remedy="Write name = weight on each line of a .toml file, or {name: weight} in a .json file.",
        ) from broken
    for key in ("train", "weights"):
        if isinstance(content, Mapping) and isinstance(content.get(key), dict | list):
            content = content[key]
    entries = content.items() if isinstance(content, Mapping) else map(_entry, content)
    found: dict[str, Fraction] = {}
    for number, (name, weight) in enumerate(entries):
        if not isinstance(name, str) or isinstance(weight, bool) or not isinstance(weight, int | float):
            raise _wrong(path, f"entry {number + 1} is not a name with a number")
        if not 0 <= weight < float("inf"):
            raise _wrong(path, f"{name!r} has the weight {weight}")
        if name in found:
            raise _wrong(path, f"{name!r} stands in it twice")
        found[name] = Fraction(weight)
    return found


def _weights(section: DataSection) -> dict[str, Fraction]:
    """The weight of each dataset, from the file where there is one."""
    if not section.weights_file:
        return {one.name: Fraction(one.weight) for one in section.datasets}
    path = Path(section.weights_file).expanduser()
    found = read_weights(path)
    wanted = {one.name for one in section.datasets if not (one.tokens or one.epochs)}
    known = {one.name for one in section.datasets}
    for names, problem in (
        (sorted(wanted - set(found)), "gives no weight to"),
        (sorted(set(found) - known), "names what data.datasets lacks:"),
    ):
        if names:
            raise DataError(
                f"data.weights_file {path} {problem} {_listed(names)}.",
                remedy="Use the names of data.datasets in it, each once; weight 0 leaves a dataset out.",
            )
    return {**{name: Fraction(0) for name in known}, **found}


def _budget(dataset: DatasetSection, extent: Extent) -> Fraction:
    """Tokens that a dataset is to give over the run; 0 where its weight decides."""
    if dataset.tokens > extent.tokens:
        raise DataError(
            f"The dataset {dataset.name!r} has a budget of {dataset.tokens:,} tokens and holds "
            f"{extent.tokens:,}: it is too small for it.",
            remedy="Lower its budget, or repeat it knowingly: "
            f"epochs = {dataset.tokens / max(extent.tokens, 1):.3g}.",
        )
    return Fraction(dataset.tokens) or Fraction(dataset.epochs) * extent.tokens


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
