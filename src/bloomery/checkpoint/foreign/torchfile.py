"""Files of torch.save, read as tensors, numbers, texts, lists and dictionaries alone."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch

from bloomery.errors import CheckpointError


def load_plain(path: Path, *, begin: int = 0, length: int | None = None) -> object:
    """What torch.save wrote to `path`, or to bytes [begin, begin + length) of it.

    Raises CheckpointError for anything whose loading would run code of the file, and for damage.
    """
    try:
        if length is None:
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(length)
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as bad:
        place = f" at byte {begin:,}" if length is not None else ""
        raise CheckpointError(
            f"{path} cannot be read{place} without running what it holds, or is damaged: "
            f"{str(bad).splitlines()[0]}",
            remedy="Take another copy; or save its tensors alone: torch.save({name: tensor}, file).",
        ) from bad
