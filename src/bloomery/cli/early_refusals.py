"""Checks for missing files and packages before torch is loaded, so that a bad start is refused at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.checkpoint.format.catalogue import samples_consumed
from bloomery.config.data import HUB_PREFIX, DataSection
from bloomery.config.find import from_home
from bloomery.config.resume import compare, refuse_fixed
from bloomery.config.validate import check_recipe
from bloomery.data.documents import NAME_THE_FIELD, BadDocuments
from bloomery.data.pair_files import bin_path, idx_path
from bloomery.data.readers import LINES, SourceFile
from bloomery.data.sources import find_files, read_documents
from bloomery.data.tokenizer_files import tokenizer_in
from bloomery.errors import ConfigError, DataError, OriginGone, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.train.trackers import refuse_missing_packages

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe


_QUICKLY_READ = 4 << 20
"""A larger tokenizer is checked when it is used: reading it takes most of a second."""


def refuse_missing(data: DataSection) -> None:
    """Raise DataError where a source, the tokenizer or a dataset on this machine does not exist.

    Records of JSON are read up to the first good one, and nothing else is opened, so it takes milliseconds.
    What lies elsewhere is looked for when it is fetched.
    """
    if data.sources:
        _refuse_without_text(find_files(data.sources).files, data)
    if data.tokenizer != "train" and not data.tokenizer.startswith(HUB_PREFIX):
        # 0.1 s that most recipes need not pay
        from bloomery.data.tokenizer import find_tokenizer, load_tokenizer, refuse_missing_tokenizer

        tokenizer = find_tokenizer(data.tokenizer)
        refuse_missing_tokenizer(tokenizer)
        if tokenizer.stat().st_size <= _QUICKLY_READ:
            load_tokenizer(tokenizer, end_of_document=data.end_of_document_token)
    for dataset in (*data.datasets, *data.held_out_datasets):
        if "://" not in dataset.path:
            prefix = from_home(dataset.path)
            missing = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.exists()]
            if missing:
                raise DataError(
                    f"Cannot read {missing[0]}: No such file or directory.",
                    remedy="Give the path of a .bin/.idx pair without the ending; `bloomery data tokenize` "
                    "makes it.",
                )


def _refuse_without_text(files: Sequence[SourceFile], data: DataSection) -> None:
    """Raise DataError where the sources are JSON Lines and no record has the field that is read."""
    lines = list(takewhile(lambda file: file.path.name.endswith(LINES), files))
    bad = BadDocuments(fail=data.bad_documents == "fail")
    documents = read_documents(
        lines,
        text_field=data.text_field,
        prompt_field=data.prompt_field,
        longest_line_mib=data.longest_line_mib,
        bad=bad,
    )
    first = next(documents, None)
    if first is None and len(lines) == len(files):
        why = f" The first: {bad.entries[0].place}: {bad.entries[0].why}." if bad.entries else ""
        raise DataError(
            f"The sources hold no document that can be used, and {bad.count:,} that cannot.{why}",
            remedy=NAME_THE_FIELD + "give other files.",
        )


def check_start(loaded: LoadedRecipe, run: Path, *, data_degree: int | None) -> None:
    """Raise ConfigError with every setting of the recipe that does not fit the others or the ranks.

    Batches that the run in the directory `run` is past need not fit. The directory is read only where batches
    change, for hundreds of ranks may call this at one time.

    data_degree: data-parallel ranks; None where they do not make whole replicas.
    """
    train = loaded.recipe.train
    changes = bool(train.ramp_up or train.micro_batch_changes)
    consumed = samples_consumed(RunDirectory(run)) if changes else 0
    check_recipe(loaded.recipe, loaded.sources, data_degree=data_degree, consumed=consumed)


def refuse_early(loaded: LoadedRecipe, run: Path) -> None:
    """Raise BloomeryError for missing files and packages, and for a directory that the run cannot have.

    run: the run's directory, which need not be there. The start itself checks all of this again, under the
    run's lock.
    """
    refuse_missing_packages(loaded.recipe.log.trackers)
    _refuse_unusable(run)
    _refuse_changes(loaded, run)
    try:
        refuse_missing(loaded.recipe.data)
    except OriginGone:
        if tokenizer_in(RunDirectory(run).data) is None:  # else the start decides if the run has its data
            raise


def _refuse_unusable(run: Path) -> None:
    there = next(path for path in (run, *run.absolute().parents) if path.exists())
    if not there.is_dir():
        raise StorageError(
            f"The run directory {run} cannot be made: {there} is a file.",
            remedy="Move it away, or choose another directory.",
        )
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise StorageError(
            f"The run directory {run} cannot be written: the file system of {there} is mounted read-only.",
            remedy="Mount it writable (`dmesg` names an error of its disk), or choose another directory.",
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(
            f"The run directory {run} cannot be written: {there} is not yours to write to.",
            remedy="Change its permissions, or choose another directory.",
        )


def _refuse_changes(loaded: LoadedRecipe, run: Path) -> None:
    """Refuse fixed settings that differ from the run's. Only the holder of a run mends a damaged recipe."""
    from bloomery.config.load import load_recipe

    kept = RunDirectory(run).recipe
    if not kept.exists():
        return
    try:
        before = load_recipe(str(kept)).recipe
    except ConfigError:
        return
    refuse_fixed(compare(before, loaded.recipe), dict(loaded.sources))
