"""The texts of tasks, to look for them in training text."""

from __future__ import annotations

import json
from pathlib import Path

from bloomery.errors import DataError
from bloomery.evaluate.local_tasks import LOCAL_TASKS

_DIRECTORY = Path(__file__).parent / "tasks"


def task_texts(name: str) -> list[str]:
    """Return the texts of one of LOCAL_TASKS: of several choices, each text with its right one."""
    if name not in LOCAL_TASKS:
        raise DataError(
            f"The texts of the task {name!r} are not part of bloomery; its own are {', '.join(LOCAL_TASKS)}.",
            remedy="Write its documents as lines of JSON, and give the file to --against.",
        )
    texts = []
    for line in (_DIRECTORY / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        right = f" {document['choices'][document['right']]}" if "choices" in document else ""
        texts.append(document["text"] + right)
    return texts
