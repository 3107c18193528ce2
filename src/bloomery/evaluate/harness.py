"""Scores a saved model on tasks with EleutherAI's `lm-eval`, where that is installed (the extra `eval`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.errors import BloomeryError
from bloomery.evaluate.local_tasks import LOCAL_TASKS, local_task
from bloomery.events.records import Json

if TYPE_CHECKING:
    from bloomery.evaluate.open_checkpoint import OpenedModel
    from bloomery.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """The scores of one task. metrics: by lm-eval's name, such as 'acc' or 'acc_stderr'."""

    task: str
    samples: int
    metrics: Mapping[str, float]

    def to_json(self) -> dict[str, Json]:
        """Return the score as records and `--json` have it."""
        return {"task": self.task, "samples": self.samples, **self.metrics}


def refuse_without_lm_eval() -> None:
    """Raise BloomeryError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise BloomeryError(
            "Tasks are scored by lm-eval, which is not installed.",
            remedy="pip install 'bloomery[eval]'",
        )


def known_tasks(names: Sequence[str], include: Path | None) -> Any:  # Any: lm-eval's TaskManager
    """Return lm-eval's task manager; without names, it knows only those of `include`, which is quicker.

    Raises BloomeryError where one of the names is not known.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(include) if include else None, include_defaults=bool(names))
    all_tasks = set(manager.all_tasks) if names else set()
    unknown = [name for name in names if name not in all_tasks]
    if unknown:
        raise BloomeryError(
            f"There is no task {', '.join(unknown)}.",
            remedy=f"Ours are {', '.join(LOCAL_TASKS)}; `lm-eval ls tasks` lists theirs.",
        )
    return manager


def score_tasks(
    saved: OpenedModel,
    decoder: Decoder,
    tasks: Sequence[str],
    *,
    batch: int = 8,
    window: int | None = None,
    limit: int | None = None,
    shots: int | None = None,
    include: Path | None = None,
) -> list[TaskScore]:
    """Return the scores of each task, of ours (LOCAL_TASKS) or of those that lm-eval knows.

    batch: requests computed together. window: tokens seen at once; None for the model's positions.
    limit: samples of each task; None for all.
    shots: examples before each question; None for the task's own number. include: directory of further tasks.
    Raises BloomeryError where lm-eval is not installed, or knows no such task.
    """
    refuse_without_lm_eval()
    from bloomery.evaluate.lm_eval_model import SavedModel

    return score_with(
        SavedModel(saved, decoder, batch=batch, window=window),
        tasks,
        limit=limit,
        shots=shots,
        include=include,
    )


def score_with(
    model: Any,  # Any: a model of lm-eval, or the name of one
    tasks: Sequence[str],
    *,
    arguments: Mapping[str, object] | None = None,
    limit: int | None = None,
    shots: int | None = None,
    include: Path | None = None,
) -> list[TaskScore]:
    """Return the scores of a model of lm-eval. arguments: of a model that is named."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lm_eval

    wanted = [local_task(name) if name in LOCAL_TASKS else name for name in tasks]
    manager = known_tasks([task for task in wanted if isinstance(task, str)], include)
    outcome = lm_eval.simple_evaluate(
        model=model,
        model_args=dict(arguments) if arguments else None,
        tasks=wanted,
        num_fewshot=shots,
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
        task_manager=manager,
    )
    assert outcome is not None, "lm-eval returns nothing on further ranks alone"
    counts = outcome.get("n-samples", {})
    return [
        TaskScore(
            task=task,
            samples=int(counts.get(task, {}).get("effective", 0)),
            metrics={
                name.partition(",")[0]: float(value)
                for name, value in metrics.items()
                if isinstance(value, int | float) and name.partition(",")[0] != "sample_len"
            },
        )
        for task, metrics in outcome["results"].items()
    ]
