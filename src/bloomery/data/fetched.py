"""What `bloomery data fetch` says of a directory, read by those who use the files in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bloomery.errors import DataError

RECORD, FILES = "fetched.json", "fetched-files.jsonl"
_LEVELS = 8  # of directories above a file in which its record is looked for


def refuse_incomplete(paths: Iterable[Path]) -> None:
    """Raise DataError where some of these files lie in a directory whose fetch was broken off, or lost files.

    A directory that was not fetched, or by a version that did not write down how much there is, passes.
    """
    parents = {parent for path in paths for parent in path.absolute().parents[:_LEVELS]}
    for directory in sorted(parents):
        if (directory / RECORD).is_file():
            _refuse(directory)


def recorded(directory: Path) -> dict[str, dict[str, Any]]:
    """The files that are whole, by name, the last line of each; a line that a kill tore is left out."""
    found = {}
    try:
        lines = (directory / FILES).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            entry = json.loads(line)
            found[entry["name"]] = entry
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _refuse(directory: Path) -> None:
    try:
        record = json.loads((directory / RECORD).read_bytes())
        wanted, wanted_bytes = record.get("files_wanted"), record.get("bytes_wanted", 0)
    except (OSError, ValueError, AttributeError) as damaged:
        raise DataError(
            f"{directory / RECORD} cannot be read ({damaged}), so whether all files are here is not known.",
            remedy="Run the same `bloomery data fetch` again with --anew.",
        ) from damaged
    if wanted is None:
        return
    files = recorded(directory)
    here = {
        name: entry["bytes"] for name, entry in files.items() if _size(directory / name) == entry["bytes"]
    }
    if len(here) < wanted:
        lost = sorted(set(files) - set(here))
        first = f"; {lost[0]} is gone or has another size" if lost else ""
        raise DataError(
            f"{directory} holds {len(here):,} of the {wanted:,} files of share {record.get('share')} of "
            f"{record.get('shares')}, {sum(here.values()) / 1e6:,.1f} of {wanted_bytes / 1e6:,.1f} MB: its "
            f"fetch did not end{first}.",
            remedy="Run the same `bloomery data fetch` again: it goes on where it was.",
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
