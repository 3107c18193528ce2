"""A small set of tasks for `lm-eval` that needs no network: for tests, and to see whether anything is learnt.

They are too small to compare good models with.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

LOCAL_TASKS = ("local_pairs", "local_last_word", "local_texts")
"""Which of two continuations is likelier; whether the last word is likeliest; perplexity of short texts."""

_DIRECTORY = Path(__file__).parent / "tasks"


def local_task(name: str) -> dict[str, Any]:  # Any: lm-eval's configuration of a task
    """Return the configuration of one of LOCAL_TASKS."""
    usual: dict[str, Any] = {
        "task": name,
        "custom_dataset": partial(_documents, name),
        "test_split": "test",
        "metadata": {"version": 1.0},
    }
    if name == "local_pairs":
        return usual | {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{right}}",
            "target_delimiter": " ",
            "metric_list": [_metric("acc"), _metric("acc_norm")],
        }
    if name == "local_last_word":
        return usual | {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.rsplit(' ', 1)[0]}}",
            "doc_to_target": "{{' ' + text.rsplit(' ', 1)[1]}}",
            "target_delimiter": "",
            "metric_list": [_metric("acc"), _metric("perplexity", aggregation="perplexity", better=False)],
        }
    return usual | {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            _metric("word_perplexity", better=False, aggregation="weighted_perplexity"),
            _metric("bits_per_byte", better=False, aggregation="bits_per_byte"),
        ],
    }


def _metric(name: str, *, aggregation: str = "mean", better: bool = True) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": better}


def _documents(name: str, **unused: object) -> dict[str, Any]:
    """Return the documents of a task as the `datasets` package has them."""
    from datasets import Dataset

    with (_DIRECTORY / f"{name}.jsonl").open(encoding="utf-8") as lines:
        return {"test": Dataset.from_list([json.loads(line) for line in lines])}
