"""Returns the texts of evaluation tasks, to search training text for contamination."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bloomery.errors import BloomeryError
from bloomery.evaluate.harness import known_tasks, refuse_without_lm_eval
from bloomery.evaluate.local_tasks import LOCAL_TASKS

_DIRECTORY = Path(__file__).parent / "tasks"


def task_texts(names: Sequence[str], *, include: Path | None = None) -> dict[str, list[str]]:
    """Return the texts of tasks: each question with its right answer, as a model is shown them.

    names: of LOCAL_TASKS, or of lm-eval's tasks, groups and tags. include: directory of further tasks.
    Returns texts by the name of the task; a group gives each of its tasks. Of lm-eval's, these are the
    documents that are scored: the test split, and the validation split where there is none.
    Raises BloomeryError where lm-eval is not installed, knows no such task or cannot get its documents.
    """
    theirs = [name for name in names if name not in LOCAL_TASKS]
    texts = {name: _local_texts(name) for name in names if name in LOCAL_TASKS}
    return texts | (_texts_of_lm_eval(theirs, include) if theirs else {})


def _local_texts(name: str) -> list[str]:
    texts = []
    for line in (_DIRECTORY / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        right = f" {document['choices'][document['right']]}" if "choices" in document else ""
        texts.append(document["text"] + right)
    return texts


def _texts_of_lm_eval(names: Sequence[str], include: Path | None) -> dict[str, list[str]]:
    refuse_without_lm_eval()
    manager = known_tasks(names, include)
    found: dict[str, list[str]] = {}
    for name in names:
        try:
            for part, task in manager.load([name])["tasks"].items():
                found[part] = [text for document in task.eval_docs for text in _shown(task, document)]
        except OSError as error:  # what the `datasets` package raises without a network or such a dataset
            raise BloomeryError(
                f"The documents of the task {name} could not be had: {error}.",
                remedy="Run it once where the Hub can be reached (HF_HOME keeps what was fetched), or write "
                "them as JSON lines and name the file in --against.",
            ) from error
    return found


def _shown(task: Any, document: Any) -> Iterator[str]:  # Any: lm-eval's task, and a document of its dataset
    """Yield a document's question followed by each of its right answers."""
    question, answer = task.doc_to_text(document), task.doc_to_target(document)
    choices = task.doc_to_choice(document) if task.config.doc_to_choice is not None else ()
    if isinstance(question, int):  # the choices are what stands before the answer, as in Winogrande
        question = choices[question]
    for right in answer if isinstance(answer, list) else [answer]:
        told = choices[right] if isinstance(right, int) and choices else right
        yield f"{question}{task.config.target_delimiter}{told}"
