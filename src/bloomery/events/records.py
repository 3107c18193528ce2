"""The report of a step (plain numbers, equal on every rank of a peer), and callbacks for progress.

`as_json` writes NaN and infinities, which JSON does not have, as texts, and `as_float` reads them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias, Union

_FLOATS = ("float", "float | None")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What signals, control files and clocks say, after the ranks have agreed on it.

    save_requested, stop_requested: whether somebody asked for a checkpoint, or for the end of the run.
    stop_reason: why the run is to stop; "" where nobody asked.
    minutes_since_save: since the last checkpoint.
    minutes_running: since this process began to train.
    """

    save_requested: bool = False
    stop_requested: bool = False
    stop_reason: str = ""
    skip_requested: tuple[tuple[int, int], ...] = ()
    """Ranges [start, stop) of the sample stream that somebody asked to leave out."""
    rewind_requested: tuple[int, ...] = ()
    """(step, start, stop) where somebody asked to go back to at most this step and to leave out [start, stop)
    of the sample stream; () where nobody asked."""
    settings_requested: tuple[tuple[str, str], ...] = ()
    """(dotted key, value as written) of free settings to change."""
    minutes_since_save: float = 0.0
    minutes_running: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step: progress, loss, health and speed. Totals count over the life of the run."""

    step: int
    consumed_samples: int
    consumed_tokens: int
    cursor: int
    """Smallest index of the sample stream that was never given out, after this step."""
    seconds: float
    learning_rate: float
    global_batch: int
    loss: float
    z_loss: float
    loss_scale: float | None
    gradient_norm: float
    zero_gradients: int
    update_applied: bool
    refused_updates: int
    refused_in_a_row: int
    nan_losses: int
    samples_per_s: float
    tokens_per_s: float
    hardware_tflops: float
    model_tflops: float
    mfu: float | None
    data_queue: float = 0.0
    """Batches that had been read ahead when this step asked for its own; the mean over the ranks."""
    data_wait_s: float = 0.0
    """How long the step then waited for its samples, which `seconds` leaves out; the mean over the ranks."""
    held_out_loss: float | None = None
    held_out_by_dataset: dict[str, float] | None = None
    """The same for each dataset, by its name; None where there is one."""
    peers: int = 1
    """Peers that take samples at once; `consumed_samples` assumes that each takes as many as this one."""
    precision: str = ""
    """The number format that the step computed in; empty where a journal of an earlier version lacks it."""
    mixture: int = 0
    """How many mixtures of datasets the run has had; 0 where a journal of an earlier version lacks it."""
    shared_seconds: float | None = None
    """Seconds of the step before this one: the mean over the ranks, which all ranks know. `seconds`, and what
    is computed from it, comes from each rank's own clock. None in the first step of a process."""
    corruption_checked: bool = False
    """Whether bits were compared before this step's update (`guard.corruption_steps`)."""
    corruption: str = ""
    """What that comparison found, in a sentence; empty where all bits agreed. The update was then refused."""
    corrupt_ranks: tuple[int, ...] = ()
    """The ranks that it names for sure."""
    memory_bytes: float | None = None
    """Memory of a rank, of its device or else of its process: the mean over the ranks. None where unknown."""
    inner_sizes: dict[str, list[float]] | None = None
    """Sizes of inner tensors by block, by kind ("logit", "hidden", "weight"); 0 where one was not measured.
    None in a step that measured none (`guard.growth_steps`)."""
    facts: Facts = Facts()

    def values(self) -> dict[str, object]:
        """Return the report's values by name, not copied, for a journal, which brings them into JSON itself.

        It is asked for between two steps, when a GPU waits.
        """
        return vars(self) | {"facts": vars(self.facts)}

    def to_json(self) -> dict[str, Json]:
        """Return the report as the journal's `step` event holds it."""
        record = as_json(self.values())
        assert isinstance(record, dict)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StepReport:  # Any: a parsed line of the journal
        """Return the report of a journal's `step` event; fields of other versions are ignored."""
        values = known_values(cls, record)
        for item in fields(cls):
            if item.type in _FLOATS and values.get(item.name) is not None:
                values[item.name] = as_float(values[item.name])
        if values.get("held_out_by_dataset"):
            by_dataset = values["held_out_by_dataset"]
            values["held_out_by_dataset"] = {name: as_float(loss) for name, loss in by_dataset.items()}
        if values.get("inner_sizes"):
            sizes = values["inner_sizes"]
            values["inner_sizes"] = {kind: [as_float(size) for size in sizes[kind]] for kind in sizes}
        values["corrupt_ranks"] = tuple(values.get("corrupt_ranks", ()))
        values["facts"] = _facts(record.get("facts") or {})
        return cls(**values)


def log_line(report: StepReport, *, total_steps: int | None = None) -> str:
    """Return the report as the one line of the text log, the same fields in the same order each time."""
    of_total = "" if total_steps is None else f"/{total_steps}"
    parts = [
        f"step {report.step}{of_total}",
        f"samples {report.consumed_samples:,}",
        f"tokens {report.consumed_tokens:,}",
        f"{report.seconds:.3f} s/step",
        f"lr {report.learning_rate:.4e}",
        f"batch {report.global_batch}",
        f"loss {report.loss:.4f}",
        f"z-loss {report.z_loss:.2e}",
        f"loss scale {_or_dash(report.loss_scale, '.1f')}",
        f"grad norm {report.gradient_norm:.3f}",
        f"zeros {report.zero_gradients:,}",
        f"skipped {report.refused_updates}",
        f"nan {report.nan_losses}",
        f"{report.samples_per_s:,.1f} samples/s",
        f"{report.tokens_per_s:,.0f} tokens/s",
        f"TFLOPs {report.model_tflops:.3f} model {report.hardware_tflops:.3f} hardware",
        f"MFU {_or_dash(report.mfu, '.1%')}",
    ]
    if report.held_out_loss is not None:
        parts.append(f"held-out {report.held_out_loss:.4f}")
    if not report.update_applied:
        parts.append("UPDATE REFUSED")
    return " | ".join(parts)


def _facts(record: Mapping[str, Any]) -> Facts:
    values = known_values(Facts, record)
    for name in ("skip_requested", "settings_requested"):
        if name in values:
            values[name] = tuple(tuple(pair) for pair in values[name])
    values["rewind_requested"] = tuple(values.get("rewind_requested", ()))
    return Facts(**values)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class ProgressCallback(Protocol):
    """Is called with the progress of some work, so that a bar can be drawn."""

    def __call__(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        """Report that `done` of `total` units are done.

        total: 0 if not known.
        note: more to show, such as tokens per second.
        """


def ignore_progress(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
    """Do nothing with the progress, for callers that show none."""


def counting(progress: ProgressCallback, stage: str, total: int) -> Callable[[int], None]:
    """Return a function that adds a number of bytes to a stage of `progress`. total: 0 where not known."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(stage, done, total, "bytes")

    return add


Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", None]

_TEXTS = {"NaN", "Infinity", "-Infinity"}


def as_json(value: object, *, default: Callable[[object], str] | None = None) -> Json:
    """Return `value` in a form that every JSON reader accepts: tuples as lists, non-finite floats as texts.

    The texts are "NaN", "Infinity" and "-Infinity", which `float()` of most languages reads back.
    Finite floats stay floats, and Python writes them so that they read back to the same bits.

    default: returns a text for a value that has no place in JSON; None raises TypeError for it.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else _text(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(item, default=default) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, default=default) for item in value]
    if default is not None:
        return default(value)
    raise TypeError(f"{type(value).__name__} has no place in a JSON record: {value!r}")


def as_float(value: object) -> float:
    """Return the number that `as_json` wrote, its texts included."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value in _TEXTS:
        return float(value)
    raise ValueError(f"not a number: {value!r}")


def _text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def known_values(kind: type, record: Mapping[str, Any]) -> dict[str, Any]:  # Any: parsed JSON
    """Return a record's values of the fields that a dataclass has; another version may have written more."""
    return {field.name: record[field.name] for field in fields(kind) if field.name in record}
