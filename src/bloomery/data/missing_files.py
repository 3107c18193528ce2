"""Refuses a recipe whose files are missing, before anything is read, trained or loaded."""

from __future__ import annotations

from pathlib import Path

from bloomery.config.data import HUB_PREFIX, DataSection
from bloomery.data.pair_files import bin_path, idx_path
from bloomery.data.sources import find_files
from bloomery.errors import DataError


def refuse_missing(data: DataSection) -> None:
    """Raise DataError where a source, the tokenizer or a dataset on this machine does not exist.

    Nothing is opened, so it takes milliseconds. What lies elsewhere is looked for when it is fetched.
    """
    if data.sources:
        find_files(data.sources)
    if data.tokenizer != "train" and not data.tokenizer.startswith(HUB_PREFIX):
        from bloomery.data.tokenizer import find_tokenizer  # 0.1 s that most recipes need not pay

        _refuse_missing_file(
            find_tokenizer(data.tokenizer),
            subject="Cannot read the tokenizer",
            remedy="Give the path of a tokenizer.json, or set data.tokenizer = 'train'.",
        )
    for dataset in (*data.datasets, *data.held_out_datasets):
        if "://" not in dataset.path:
            prefix = Path(dataset.path).expanduser()
            for path in (idx_path(prefix), bin_path(prefix)):
                _refuse_missing_file(
                    path,
                    subject="Cannot read",
                    remedy="Give the path of a .bin/.idx pair without the ending; `bloomery data tokenize` "
                    "makes it.",
                )


def _refuse_missing_file(path: Path, *, subject: str, remedy: str) -> None:
    if not path.exists():
        raise DataError(f"{subject} {path}: No such file or directory.", remedy=remedy)
