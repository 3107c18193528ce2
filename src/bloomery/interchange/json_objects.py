"""Reads the JSON files of directories that other programs wrote, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from bloomery.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:  # Any: values of JSON
    """Return the JSON object in a file. Raises CheckpointError for anything else."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        refuse_damaged(path, f"cannot be read: {error.strerror}", error)
    except (ValueError, RecursionError) as error:
        refuse_damaged(path, f"is not JSON in UTF-8: {error}", error)
    if not isinstance(content, dict):
        refuse_damaged(path, f"holds a {type(content).__name__}, not an object")
    return content


def refuse_damaged(path: Path, problem: str, error: Exception | None = None) -> NoReturn:
    """Raise CheckpointError for a file that is not what its directory needs. problem: a phrase after its
    path.
    """
    raise CheckpointError(f"{path} {problem}.", remedy="Fetch or copy the directory again.") from error
