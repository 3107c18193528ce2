"""Raw text as a stream of documents, from .txt, .jsonl and .jsonl.gz files and from the standard library."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bloomery.config.data import DataSection
from bloomery.data.corpus import STANDARD_LIBRARY, standard_library
from bloomery.errors import DataError

_LINES = (".jsonl", ".jsonl.gz")
_ENDINGS = (".txt", *_LINES)
_KNOWN = ".txt (one document), .jsonl or .jsonl.gz (one document a line)"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. `key` decides whether it is held out: its file's path below the source, or its hash."""

    key: str
    text: str
    place: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that could not be used: where it is, and why. `line` counts from 1; 0 is the whole file."""

    file: str
    line: int
    kind: str
    why: str

    @property
    def place(self) -> str:
        """File and line, as an editor takes them."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(kw_only=True)
class BadDocuments:
    """Every document that was skipped. With `fail`, the first one raises instead."""

    fail: bool = False
    entries: list[BadDocument] = field(default_factory=list)

    def add(self, bad: BadDocument) -> None:
        """Count a document as bad, or refuse it with a DataError."""
        if self.fail:
            raise DataError(
                f"{bad.place}: {bad.why}.",
                remedy='Mend or remove it, or set data.bad_documents = "skip" to count and skip it.',
            )
        self.entries.append(bad)

    def summary(self) -> str:
        """One sentence, or nothing when every document was good."""
        if not self.entries:
            return ""
        kinds = Counter(entry.kind for entry in self.entries)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        plural = "s" if len(self.entries) > 1 else ""
        return f"{len(self.entries)} document{plural} skipped: {listed}. The first: {self.entries[0].place}"

    def report(self) -> bytes:
        """Every entry as a JSON line."""
        lines = [json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in self.entries]
        return "".join(lines).encode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of text, and its path below the source that named it."""

    key: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """The files that `data.sources` name, in reading order, and others beside them, left out."""

    files: tuple[SourceFile, ...]
    ignored: tuple[Path, ...]


def documents_of(data: DataSection) -> Iterator[Document]:
    """The good documents of `data.sources`, in reading order; bad ones are skipped or refused as it says."""
    files = find_files(data.sources).files
    bad = BadDocuments(fail=data.bad_documents == "fail")
    return read_documents(files, text_field=data.text_field, bad=bad)


def is_held_out(key: str, *, every: int) -> bool:
    """Whether a document is kept from training: sha256(key) mod `every` = 0; 0 holds out nothing."""
    return every > 0 and int(hashlib.sha256(key.encode()).hexdigest(), 16) % every == 0


def find_files(sources: Sequence[str]) -> FoundFiles:
    """The files of each source in turn, sorted by their path below it. A source without files is refused."""
    files: list[SourceFile] = []
    ignored: list[Path] = []
    for source in sources:
        if source == STANDARD_LIBRARY:
            found = [SourceFile(key=key, path=path) for key, path in standard_library()]
        else:
            named = _files_below(source)
            found = [file for file in named if file.path.name.endswith(_ENDINGS)]
            ignored += [file.path for file in named if not file.path.name.endswith(_ENDINGS)]
        if not found:
            raise DataError(f"The source {source!r} holds no text file.", remedy=f"bloomery reads {_KNOWN}.")
        files += sorted(found, key=lambda file: file.key)
    if not files:
        raise DataError(
            "No text is given.",
            remedy=f"Set data.sources to {STANDARD_LIBRARY!r}, or files, directories or globs of {_KNOWN}.",
        )
    return FoundFiles(files=tuple(files), ignored=tuple(ignored))


def read_documents(files: Iterable[SourceFile], *, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    """The good documents of the files, in their order. `bad` is told of every other one."""
    for file in files:
        try:
            if file.path.name.endswith(_LINES):
                yield from _json_lines(file, text_field=text_field, bad=bad)
            else:
                yield from _whole_text(file, bad=bad)
        except OSError as unreadable:
            raise DataError(
                f"Cannot read {file.path}: {unreadable.strerror or unreadable}.",
                remedy="Check that the file is there, whole, and yours to read.",
            ) from unreadable


def _files_below(source: str) -> list[SourceFile]:
    path = Path(source).expanduser()
    if path.is_file():
        return [SourceFile(key=path.name, path=path)]
    if path.is_dir():
        root, found = path, [one for one in path.rglob("*") if not _is_hidden(one.relative_to(path))]
    elif glob.has_magic(source):
        parts = path.parts
        fixed = next(count for count, part in enumerate(parts) if glob.has_magic(part))
        root = Path(*parts[:fixed])
        found = [Path(one) for one in glob.glob(str(path), recursive=True)]  # noqa: PTH207  — absolute patterns
    else:
        raise DataError(
            f"The source {source!r} does not exist (looked for {path.absolute()}).",
            remedy="Check data.sources; relative paths start where the command is run.",
        )
    return [SourceFile(key=one.relative_to(root).as_posix(), path=one) for one in found if one.is_file()]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _whole_text(file: SourceFile, *, bad: BadDocuments) -> Iterator[Document]:
    content = file.path.read_bytes()
    if not content:
        bad.add(BadDocument(file=str(file.path), line=0, kind="empty", why="the document is empty"))
        return
    try:
        text = content.decode()
    except UnicodeDecodeError as wrong:
        line = content.count(b"\n", 0, wrong.start) + 1
        why = f"not UTF-8 at byte {wrong.start} ({wrong.reason})"
        bad.add(BadDocument(file=str(file.path), line=line, kind="not UTF-8", why=why))
        return
    yield Document(key=file.key, text=text, place=str(file.path), size_bytes=len(content))


def _json_lines(file: SourceFile, *, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    packed = file.path.name.endswith(".gz")
    number = 0
    with gzip.open(file.path) if packed else file.path.open("rb") as lines:
        try:
            for number, line in enumerate(lines, 1):
                parsed = _text_of(line, text_field=text_field)
                if isinstance(parsed, str):
                    content = parsed.encode()
                    yield Document(
                        key=hashlib.sha256(content).hexdigest(),
                        text=parsed,
                        place=f"{file.path}:{number}",
                        size_bytes=len(content),
                    )
                else:
                    kind, why = parsed
                    bad.add(BadDocument(file=str(file.path), line=number, kind=kind, why=why))
        except (EOFError, gzip.BadGzipFile, zlib.error) as damaged:
            raise DataError(
                f"{file.path} is damaged after line {number}: {damaged}.",
                remedy="Copy it again from where it is whole, or take it out of data.sources.",
            ) from damaged


def _text_of(line: bytes, *, text_field: str) -> str | tuple[str, str]:
    """The text of a JSON line, or (kind, why) when it has none."""
    try:
        record: Any = json.loads(line.decode())
    except UnicodeDecodeError as wrong:
        return "not UTF-8", f"not UTF-8 at byte {wrong.start} of the line ({wrong.reason})"
    except (ValueError, RecursionError) as wrong:
        return "malformed JSON", f"malformed JSON ({wrong})" if line.strip() else "a blank line"
    if not isinstance(record, dict):
        return "not an object", f"a JSON {type(record).__name__}, not an object with a field {text_field!r}"
    if text_field not in record:
        fields = ", ".join(sorted(map(repr, record))) or "none"
        return "without the field", f"no field {text_field!r} (data.text_field); its fields are {fields}"
    text = record[text_field]
    if not isinstance(text, str):
        return "not text", f"field {text_field!r} is a {type(text).__name__}, not text"
    if not text:
        return "empty", "the document is empty"
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        return "not UTF-8", f"half of a surrogate pair at character {wrong.start}, which UTF-8 cannot hold"
    return text
