"""Documents of text, and the record of documents that cannot be used, which are skipped or stop the run."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bloomery.errors import DataError

_BATCH_BYTES = 1 << 20
_SHOWN = 20
"""How many fields of a record a message names."""
_NO_FIELD, _NO_TEXT = "without the field", "not text"
_NAME_THE_FIELD = (
    "Name the one that holds the text: data.text_field, or --text-field ('a.b' for b inside a). Or "
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text.

    place: file and line, for messages.
    name: its file's path below the source if the file is one document; else None.
    """

    text: str
    place: str
    size_bytes: int
    name: str | None = None

    @property
    def key(self) -> str:
        """The key by whose hash a document is held out: its name, or the hash of its text."""
        return self.name if self.name is not None else hashlib.sha256(self.text.encode()).hexdigest()


STOP_AFTER = 1_000
"""Where so many documents are bad and none good, the rest is not read."""


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that cannot be used: where it is, and why.

    line: counted from 1; 0 means the whole file.
    """

    file: str
    line: int
    kind: str
    why: str

    @property
    def place(self) -> str:
        """File and line, as `file:line`."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(kw_only=True)
class BadDocuments:
    """All documents that were skipped.

    fail: raise an error at the first one instead.
    stop_after: raise an error where so many have been bad and none good: the corpus is not what the settings
        say. 0 never.
    good: number of good documents so far.
    lines: number of lines that were read of each file. A part of a file counts its lines from its own
    beginning, so code that reads a file in parts adds these numbers up.
    """

    fail: bool = False
    stop_after: int = STOP_AFTER
    good: int = 0
    entries: list[BadDocument] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)

    def add(self, bad: BadDocument) -> None:
        """Record a bad document. Raises DataError instead if bad documents are fatal, or all are bad."""
        names_no_text = bad.kind in (_NO_FIELD, _NO_TEXT)
        if self.fail:
            skip = 'set data.bad_documents = "skip" to count and skip it.'
            first = _NAME_THE_FIELD if names_no_text else "Mend or remove it, or "
            raise DataError(f"{bad.place}: {bad.why}.", remedy=first + skip)
        self.entries.append(bad)
        if not self.good and len(self.entries) == self.stop_after:
            first = _NAME_THE_FIELD if names_no_text else ""
            raise DataError(
                f"The first {self.stop_after:,} documents are all bad; {bad.place}, for one: {bad.why}.",
                remedy=f"{first}remove the files that hold no such text.".capitalize(),
            )

    def summary(self) -> str:
        """Return one sentence with the number of bad documents; empty when there are none."""
        if not self.entries:
            return ""
        first = self.entries[0]
        kinds = Counter(entry.kind for entry in self.entries)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        plural = "s" if len(self.entries) > 1 else ""
        return (
            f"{len(self.entries)} document{plural} skipped: {listed}. The first: {first.place}: {first.why}"
        )

    @property
    def remedy(self) -> str:
        """What to do about the bad documents where no good one is left."""
        if self.entries and self.entries[0].kind in (_NO_FIELD, _NO_TEXT):
            return _NAME_THE_FIELD + "give text."
        fewer = "hold out fewer (data.held_out_every, --held-out-every)"
        return f"Give more text, mend the bad documents, or {fewer}."

    def report(self) -> bytes:
        """Return every bad document as a JSON line."""
        lines = [json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in self.entries]
        return "".join(lines).encode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class BadText:
    """Why a record has no usable text."""

    kind: str
    why: str

    def at(self, file: object, line: int) -> BadDocument:
        """Return the bad document with its place."""
        return BadDocument(file=str(file), line=line, kind=self.kind, why=self.why)


def json_text(line: bytes, *, text_field: str) -> str | BadText:
    """Return the text in a JSON line, or why it holds none; see `record_text`."""
    try:
        record: Any = json.loads(line.decode())
    except UnicodeDecodeError as wrong:
        return BadText(kind="not UTF-8", why=f"not UTF-8 at byte {wrong.start} of the line ({wrong.reason})")
    except (ValueError, RecursionError) as wrong:
        why = f"malformed JSON ({wrong})" if line.strip() else "a blank line"
        return BadText(kind="malformed JSON", why=why)
    return record_text(record, text_field=text_field)


def record_text(record: object, *, text_field: str) -> str | BadText:
    """Return the text in a field of a record, or why it holds none.

    text_field: a field's name; else 'a.b', the field b of the object in field a.
    """
    if not isinstance(record, dict):
        why = f"a JSON {type(record).__name__}, not an object with a field {text_field!r}"
        return BadText(kind="not an object", why=why)
    text: object = record
    for name in [text_field] if text_field in record else text_field.split("."):
        if not isinstance(text, dict) or name not in text:
            why = f"no field {text_field!r} (data.text_field); its fields are {_listed(_paths(record))}"
            return BadText(kind=_NO_FIELD, why=why)
        text = text[name]
    if not isinstance(text, str):
        why = f"field {text_field!r} is a {type(text).__name__}, not text; its fields are "
        return BadText(kind=_NO_TEXT, why=why + _listed(_paths(record)))
    return checked_text(text)


def _paths(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a record's fields; those inside another field's object as `outer.inner`."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def checked_text(text: str) -> str | BadText:
    """Return the text unchanged, or BadText where it is empty or cannot be encoded in UTF-8."""
    if not text:
        return BadText(kind="empty", why="the document is empty")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        why = f"half of a surrogate pair at character {wrong.start}, which UTF-8 cannot hold"
        return BadText(kind="not UTF-8", why=why)
    return text


def decoded_text(content: bytes) -> str | BadText:
    """Return the text of UTF-8 bytes, or BadText where they are not UTF-8."""
    if not content:
        return BadText(kind="empty", why="the document is empty")
    try:
        return content.decode()
    except UnicodeDecodeError as wrong:
        return BadText(kind="not UTF-8", why=f"not UTF-8 at byte {wrong.start} ({wrong.reason})")


def size_in_utf8(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def _listed(names: Iterable[str]) -> str:
    known = sorted(map(repr, names))
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return (", ".join(known[:_SHOWN]) or "none") + more


def document_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in batches of a mebibyte of text, which is what engines take at once."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
