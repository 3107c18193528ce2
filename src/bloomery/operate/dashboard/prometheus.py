"""Writes the metrics of runs in Prometheus's text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable

from bloomery.operate.dashboard.run_summary import RunSummary
from bloomery.operate.dashboard.viewed_run import ViewedRun
from bloomery.operate.run_state import RunStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OF_SUMMARY = {
    "step": "the last step of the run",
    "steps": "the last step that the run will have",
    "done": "the share of the samples that are used",
    "left_s": "seconds of training that are left",
    "step_s": "the median seconds of the newest steps",
    "tokens": "tokens that were used",
    "loss": "the newest training loss",
    "held_out": "the newest held-out loss",
    "saved": "when the newest checkpoint was committed, in seconds since 1970",
    "written": "when the newest step was written, in seconds since 1970",
}
_OF_COLUMNS = {
    "gradient_norm": "the newest gradient norm",
    "learning_rate": "the newest learning rate",
    "global_batch": "the samples of the newest step",
    "tokens_per_s": "tokens per second of the newest step",
    "model_tflops": "TFLOPs of a rank in the newest step",
    "mfu": "the share of the peak in the newest step",
    "memory_bytes": "memory of a rank",
    "data_queue": "batches that were read ahead",
    "data_wait_s": "seconds that the newest step waited for its samples",
    "refused_updates": "updates that were refused so far",
}


def metrics_text(runs: Iterable[ViewedRun]) -> str:
    """Return one gauge for each figure of each run, with the run's name and directory as labels."""
    summaries = [(run, run.summary()) for run in runs]
    lines: list[str] = []
    _add(
        lines,
        "up",
        "whether the run is as it should be",
        [(summary, summary.health != "bad") for _, summary in summaries],
    )
    for name, text in _OF_SUMMARY.items():
        _add(lines, name, text, [(summary, getattr(summary, name)) for _, summary in summaries])
    for name, text in _OF_COLUMNS.items():
        values = []
        for run, summary in summaries:
            with run.reader.lock:
                values.append((summary, run.reader.columns.last(name)))
        _add(lines, name, text, values)
    lines += ["# HELP bloomery_state 1 for the state that the run is in", "# TYPE bloomery_state gauge"]
    for _, summary in summaries:
        lines += [
            f'bloomery_state{{{_labels(summary)},state="{state}"}} {int(summary.state == state)}'
            for state in RunStatus
        ]
    return "\n".join(lines) + "\n"


def _add(
    lines: list[str], name: str, text: str, values: list[tuple[RunSummary, float | bool | None]]
) -> None:
    given = [(summary, value) for summary, value in values if value is not None]
    if not given:
        return
    lines += [f"# HELP bloomery_{name} {text}", f"# TYPE bloomery_{name} gauge"]
    lines += [f"bloomery_{name}{{{_labels(summary)}}} {_number(value)}" for summary, value in given]


def _labels(summary: RunSummary) -> str:
    return f'run="{_escaped(summary.name)}",path="{_escaped(summary.path)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    number = float(value)
    return "NaN" if number != number else f"{number:.17g}"
