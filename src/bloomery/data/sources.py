"""Finds the files that `data.sources` names, reads their documents in order, and hashes their contents.

`python:stdlib` names a corpus that every machine has: the source code of Python's standard library.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from bloomery import durable
from bloomery.config.data import LONGEST_LINE_MIB, DataSection
from bloomery.config.find import from_home
from bloomery.data.documents import BadDocuments, Document
from bloomery.data.readers import ARROW, BY_NAME, ENDINGS, KNOWN, Reading, SourceFile, read_file
from bloomery.errors import DataError, OriginGone

STANDARD_LIBRARY = "python:stdlib"

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def standard_library() -> list[tuple[str, Path]]:
    """Return (path below the standard library with slashes, file) for each of its `*.py`, sorted by that
    path.

    Tests and packages that were installed into it are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths = [Path(directory, name) for name in names if name.endswith(".py")]
        files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(files)


_TOKENISED = (".bin", ".idx")
_NAMED = 5  # files that a note names
_OF_A_RUN = ("incarnations", "checkpoints", "journal")  # made before the data of a run are
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # `datasets` writes these beside its .arrow files


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """The files that `data.sources` names.

    files: the files of text, in reading order.
    ignored: other files beside them, which are left out.
    """

    files: tuple[SourceFile, ...]
    ignored: tuple[Path, ...]

    def note(self) -> str:
        """Return one sentence about the files that were left out, by name and why; '' if there are none."""
        if not self.ignored:
            return ""
        tokenised = [path for path in self.ignored if path.name.endswith(_TOKENISED)]
        others = (path for path in self.ignored if not path.name.endswith(_TOKENISED))
        hint = " (.bin/.idx pairs are tokens already: name them in data.datasets)" if tokenised else ""
        first = [*tokenised[:_NAMED], *islice(others, _NAMED)][:_NAMED]
        names = ", ".join(map(str, first))
        more = f" and {len(self.ignored) - len(first):,} more" if len(self.ignored) > len(first) else ""
        noun, verb = ("file is", "was") if len(self.ignored) == 1 else ("files are", "were")
        return (
            f"{len(self.ignored):,} {noun} no text known here and {verb} left out: {names}{more}{hint}. "
            "Files of other endings are read where data.sources names them, or a glob with their ending."
        )


def documents_of(data: DataSection) -> Iterator[Document]:
    """Yield the good documents of `data.sources`, in reading order; bad ones are skipped or refused as the
    section says.
    """
    files = find_files(data.sources).files
    bad = BadDocuments(fail=data.bad_documents == "fail")
    return read_documents(
        files,
        text_field=data.text_field,
        prompt_field=data.prompt_field,
        separator=data.separator,
        longest_line_mib=data.longest_line_mib,
        bad=bad,
    )


def is_held_out(key: str, *, one_in: int) -> bool:
    """Whether a document is kept from training.

    one_in: it is kept if sha256(key) mod `one_in` = 0; 0 keeps nothing from training.
    """
    return one_in > 0 and int(hashlib.sha256(key.encode()).hexdigest(), 16) % one_in == 0


def find_files(sources: Sequence[str]) -> FoundFiles:
    """Return the files of each source in turn, sorted by their path below it. A source without files is
    refused.
    """
    files: list[SourceFile] = []
    ignored: list[Path] = []
    files_of_state = cache(_state_files)  # thousands of files may have one state
    for source in sources:
        if source == STANDARD_LIBRARY:
            of_source = [SourceFile(key=key, path=path) for key, path in standard_library()]
        else:
            named = _files_below(source)
            by_name = tuple(ending for ending in BY_NAME if source.endswith(ending))
            of_source = []
            for file in named:
                if _is_text(file.path, by_name, files_of_state):
                    of_source.append(file)
                else:
                    ignored.append(file.path)
        if not of_source:
            raise OriginGone(
                f"The source {source!r} holds no text file.", remedy=_what_would_do(source, ignored)
            )
        files += sorted(of_source, key=lambda file: file.key)
    if not files:
        raise DataError(
            "No text is given.",
            remedy=f"Set data.sources to {STANDARD_LIBRARY!r}, or files, directories or globs of {KNOWN}.",
        )
    for file in files:
        _refuse_other_names(file)
    return FoundFiles(files=tuple(files), ignored=tuple(ignored))


def _refuse_other_names(file: SourceFile) -> None:
    """Raise DataError for a file whose name is not UTF-8, which no record of the data could hold."""
    shown = file.key.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if shown != file.key:
        raise DataError(f"The name of the file '{shown}' is not UTF-8.", remedy="Rename it.")


def read_documents(
    files: Iterable[SourceFile],
    *,
    text_field: str,
    bad: BadDocuments,
    prompt_field: str = "",
    separator: str = "",
    longest_line_mib: int = LONGEST_LINE_MIB,
) -> Iterator[Document]:
    """Yield the good documents of the files, in their order, and add every other one to `bad`.

    text_field, prompt_field, separator, longest_line_mib: see `Reading`.
    """
    reading = Reading(
        text_field=text_field,
        prompt_field=prompt_field,
        separator=separator,
        longest_line_mib=longest_line_mib,
    )
    for file in files:
        yield from read_file(file, reading=reading, bad=bad)


def _is_text(path: Path, by_name: tuple[str, ...], files_of_state: Callable[[Path], set[str] | None]) -> bool:
    """Whether a file holds documents. In a dataset that was saved to disk, only files that its state names
    do.

    by_name: endings that count besides, because the source ends so. files_of_state: see `_state_files`.
    """
    if path.name.endswith(ARROW) and (listed := files_of_state(path.parent)) is not None:
        return path.name in listed
    return path.name.endswith((*ENDINGS, *by_name))


def _state_files(directory: Path) -> set[str] | None:
    """Return the files that the state of a dataset saved to disk names; None where there is no state."""
    if not (directory / _STATE).is_file():
        return None
    try:
        state = json.loads((directory / _STATE).read_bytes())
        return {file["filename"] for file in state["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise DataError(
            f"{directory / _STATE} does not list the files of a dataset saved to disk ({wrong}).",
            remedy="Save the dataset again with save_to_disk, or name its .arrow files themselves.",
        ) from wrong


def _what_would_do(source: str, ignored: Sequence[Path]) -> str:
    if source.startswith("["):
        return 'Several sources are a list with commas: data.sources=\'["a.txt", "b.txt"]\'.'
    if any(path.name.endswith(_TOKENISED) for path in ignored):
        return (
            "A .bin/.idx pair is tokens already: name it in data.datasets, or join pairs with `data merge`."
        )
    return f"bloomery reads {KNOWN}."


def _files_below(source: str) -> list[SourceFile]:
    path, is_deep = from_home(source), True
    if path.is_file():
        return [SourceFile(key=path.name, path=path)]
    if path.is_dir():
        _refuse_several_splits(path)
        root, paths = path, [entry for entry in path.rglob("*") if not _is_hidden(entry.relative_to(path))]
    elif glob.has_magic(source):
        parts = path.parts
        fixed = next(count for count, part in enumerate(parts) if glob.has_magic(part))
        root = Path(*parts[:fixed])
        paths = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207  — absolute patterns
        is_deep = "**" in parts
    else:
        if "://" in source:
            raise DataError(
                f"The source {source!r} is an address, and data.sources are read from a disk.",
                remedy="Bring it here first: `bloomery data fetch`.",
            )
        if os.path.lexists(path):
            raise DataError(
                f"The source {source!r} is neither a file nor a directory: a pipe, a device, or a link to "
                "nothing or to itself.",
                remedy="Give a file, for instance a copy of what it holds.",
            )
        raise OriginGone(
            f"The source {source!r} does not exist (looked for {path.absolute()}).",
            remedy='Several sources are a list: data.sources=\'["a.txt", "b.txt"]\'.'
            if "," in source
            else "Check data.sources; relative paths start where the command is run.",
        )
    return [
        SourceFile(key=path.relative_to(root).as_posix(), path=path)
        for path in (_outside_of_runs(root, paths) if is_deep else paths)
        if path.is_file()
    ]


def _outside_of_runs(root: Path, paths: Sequence[Path]) -> list[Path]:
    """Return the paths that lie in no run's directory below `root`.

    What a run writes there, its logs and its list of bad documents, is no text of its own: at the next start
    it would be other text than the run was trained on.
    """
    folders = {path.parent for path in paths}  # of a million files there are few
    below = {parent for folder in folders for parent in (folder, *folder.parents) if root in parent.parents}
    runs = {folder for folder in below if all((folder / name).is_dir() for name in _OF_A_RUN)}
    inside = {folder for folder in folders if runs & {folder, *folder.parents}}
    return [path for path in paths if path.parent not in inside]


def _refuse_several_splits(directory: Path) -> None:
    """Refuse a saved DatasetDict as a whole, so that training text cannot include its test split by
    accident.
    """
    try:
        splits = json.loads((directory / _SPLITS).read_bytes())["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if len(splits) > 1:
        raise DataError(
            f"The source {directory} is a dataset with the splits {', '.join(map(str, splits))}.",
            remedy=f"Name the one to read, for instance {directory / str(splits[0])}.",
        )


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


log = logging.getLogger(__name__)

_HASHES = "source-hashes.json"
_PIECE_BYTES = 4 << 20
_KEEP_EVERY_S = 60.0
_SETTLED_NS = 2_000_000_000
"""The least age of a hashed file for its record: a younger one may change again within its time stamp."""


class SourceHashes:
    """The hashes of files, from the record in `directory` or from their contents."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _HASHES
        self._known = _read_record(self._path)
        self._is_new, self._kept_s = False, time.monotonic()

    def of(self, path: Path) -> tuple[str, int]:
        """Return the xxh3-128 of a file's content and its bytes. Raises DataError where it cannot be read.

        Terabytes take hours, so what is hashed is kept meanwhile too: a start that is killed goes on there.
        """
        key = str(path.absolute())
        try:
            record = self._known.get(key)
            if record is not None and record[:3] == _mark(path.stat()):
                return str(record[3]), int(record[0])
            begun_ns = time.time_ns()
            before = path.stat()
            digest, total = _hashed(path)
            if before.st_mtime_ns < begun_ns - _SETTLED_NS and total == before.st_size:
                self._known[key] = [*_mark(before), digest]
                self._is_new = True
        except OSError as unreadable:
            raise DataError(
                f"Cannot read {path}: {unreadable.strerror}.", remedy="Check that it is yours to read."
            ) from unreadable
        if time.monotonic() - self._kept_s > _KEEP_EVERY_S:
            self.keep()
        return digest, total

    def keep(self) -> None:
        """Write the record, if something was hashed that it lacks. Without it the files are read again."""
        if not self._is_new:
            return
        self._is_new, self._kept_s = False, time.monotonic()
        try:
            durable.write_whole(self._path, json.dumps(self._known))
        except OSError as error:
            log.warning("%s could not be written, so the text is read at each start: %s", self._path, error)


def _mark(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _hashed(path: Path) -> tuple[str, int]:
    content, total = xxhash.xxh3_128(), 0
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            content.update(piece)
            total += len(piece)
    return content.hexdigest(), total


def _read_record(path: Path) -> dict[str, list[Any]]:  # Any: JSON numbers and a text
    """Return the record; an empty one where there is none, or it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: record for key, record in content.items() if isinstance(record, list) and len(record) == 4}
