"""Text documents: decoding from records, batching, read-ahead, and the list of those that cannot be used."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, NamedTuple, TypeVar

from bloomery.errors import DataError

_BATCH_BYTES = 1 << 20
_SHOWN = 20
"""The most fields of a record that a message names."""
STRAY_END, NO_PROMPT = "with an end of document inside", "with a prompt that has no token"
_NO_FIELD, _NO_TEXT = "without the field", "not text"
NAME_THE_FIELD = (
    "Name the one that holds the text: data.text_field, or --text-field ('a.b' for b inside a). Or "
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text.

    place: file and line, for messages.
    name: its file's path below the source if the file is one document; else None.
    prompt: how many of its first characters are a prompt; 0 for a text without one.
    """

    text: str
    place: str
    size_bytes: int
    name: str | None = None
    prompt: int = 0

    @property
    def key(self) -> str:
        """The key by whose hash a document is held out: its name, or the hash of its text."""
        return self.name if self.name is not None else hashlib.sha256(self.text.encode()).hexdigest()


STOP_AFTER = 1_000
"""The bad documents, without a good one, after which the rest is not read."""
KEPT = 10_000


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that cannot be used: where it is, and why.

    line: the number of its line in the file, from 1 on; 0 where the whole file is the document.
    """

    file: str
    line: int
    kind: str
    why: str

    @property
    def place(self) -> str:
        """File and line, as `file:line`."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def to_json_line(self) -> bytes:
        """Return it as a line of JSON."""
        return (json.dumps(asdict(self), ensure_ascii=False) + "\n").encode(errors="replace")


def _nowhere(bad: BadDocument) -> None:
    """Take a bad document and do nothing with it."""


@dataclass(kw_only=True)
class BadDocuments:
    """The documents that were skipped. Two threads may add some.

    fail: raise an error at the first one instead.
    stop_after: the bad documents without a good one after which an error is raised: the corpus is not what
        the settings say. 0 never.
    good: number of good documents so far. count: number of bad ones. kinds: how many there are of each kind.
    entries: the first of them, at most KEPT: there may be half a billion.
    keep: is called with each, to write it down.
    lines: number of lines that were read of each file. A part of a file counts its lines from its own
    beginning, so code that reads a file in parts adds these numbers up.
    lines_before: counts the lines of a file before the part of it that is read, for the message of an error:
        of a large file that takes minutes.
    """

    fail: bool = False
    stop_after: int = STOP_AFTER
    good: int = 0
    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    entries: list[BadDocument] = field(default_factory=list)
    keep: Callable[[BadDocument], None] = _nowhere
    lines: dict[str, int] = field(default_factory=dict)
    lines_before: dict[str, Callable[[], int]] = field(default_factory=dict)
    _adding: threading.Lock = field(default_factory=threading.Lock)

    def add(self, bad: BadDocument) -> None:
        """Record a bad document. Raises DataError instead if bad documents are fatal, or all are bad."""
        names_no_text = bad.kind in (_NO_FIELD, _NO_TEXT)
        if self.fail:
            skip = 'set data.bad_documents = "skip" (--bad-documents skip) to count and skip it.'
            first = NAME_THE_FIELD if names_no_text else "Mend or remove it, or "
            raise DataError(f"{self._in_whole_file(bad).place}: {bad.why}.", remedy=first + skip)
        with self._adding:
            self.count += 1
            self.kinds[bad.kind] += 1
            if len(self.entries) < KEPT:
                self.entries.append(bad)
            self.keep(bad)
        if not self.good and self.count == self.stop_after:
            first = f"{NAME_THE_FIELD}remove" if names_no_text else "Remove"
            raise DataError(
                f"The first {self.stop_after:,} documents are all bad; {self._in_whole_file(bad).place}, for "
                f"one: {bad.why}.",
                remedy=f"{first} the files that hold no such text.",
            )

    def _in_whole_file(self, bad: BadDocument) -> BadDocument:
        """Return a bad document by its line in the file, and not in the part of it that is read."""
        before = self.lines_before.get(bad.file)
        return replace(bad, line=bad.line + before()) if before else bad

    def summary(self) -> str:
        """Return one sentence with the number of bad documents; empty when there are none."""
        if not self.count:
            return ""
        first = self.entries[0]
        listed = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        plural = "s" if self.count > 1 else ""
        return f"{self.count} document{plural} skipped: {listed}. The first: {first.place}: {first.why}"

    @property
    def remedy(self) -> str:
        """What to do about the bad documents where no good one is left."""
        if self.entries and self.entries[0].kind in (_NO_FIELD, _NO_TEXT):
            return NAME_THE_FIELD + "give text."
        fewer = "hold out fewer (data.held_out_every, --held-out-every)"
        return f"Give more text, mend the bad documents, or {fewer}."


@dataclass(frozen=True, kw_only=True)
class BadText:
    """Why a record has no usable text."""

    kind: str
    why: str

    def at(self, file: object, line: int) -> BadDocument:
        """Return this mistake as a BadDocument at a line of a file; line: from 1, 0 where it is not known."""
        return BadDocument(file=str(file), line=line, kind=self.kind, why=self.why)


class RecordText(NamedTuple):
    """The text of a record. prompt: how many of its first characters are a prompt."""

    text: str
    prompt: int = 0


def json_text(line: bytes, *, text_field: str, prompt_field: str = "") -> RecordText | BadText:
    """Return the text in a JSON line, or why it holds none; see `record_text`."""
    try:
        record: Any = json.loads(line.decode())
    except UnicodeDecodeError as wrong:
        return BadText(kind="not UTF-8", why=f"not UTF-8 at byte {wrong.start} of the line ({wrong.reason})")
    except (ValueError, RecursionError) as wrong:
        why = f"malformed JSON ({wrong})" if line.strip() else "a blank line"
        return BadText(kind="malformed JSON", why=why)
    return record_text(record, text_field=text_field, prompt_field=prompt_field)


def record_text(record: object, *, text_field: str, prompt_field: str = "") -> RecordText | BadText:
    """Return the text in a field of a record, or why it holds none.

    text_field: a field's name; else 'a.b', the field b of the object in field a.
    prompt_field: the field whose text goes before it; '' for none.
    """
    text = _field_text(record, text_field, setting="data.text_field")
    if isinstance(text, BadText) or not prompt_field:
        return text if isinstance(text, BadText) else RecordText(text)
    prompt = _field_text(record, prompt_field, setting="data.prompt_field")
    return prompt if isinstance(prompt, BadText) else RecordText(prompt + text, len(prompt))


def document_of(found: RecordText, place: str) -> Document:
    """Return the document of a record's text."""
    return Document(text=found.text, prompt=found.prompt, place=place, size_bytes=size_in_utf8(found.text))


def _field_text(record: object, text_field: str, *, setting: str) -> str | BadText:
    if not isinstance(record, dict):
        why = f"a JSON {type(record).__name__}, not an object with a field {text_field!r}"
        return BadText(kind="not an object", why=why)
    text: object = record
    for name in [text_field] if text_field in record else text_field.split("."):
        if not isinstance(text, dict) or name not in text:
            why = f"no field {text_field!r} ({setting}); its fields are {_listed(_paths(record))}"
            return BadText(kind=_NO_FIELD, why=why)
        text = text[name]
    if not isinstance(text, str):
        why = f"field {text_field!r} holds {type(text).__name__}, not text; its fields are "
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
    quoted = sorted(map(repr, names))
    more = f" and {len(quoted) - _SHOWN} more" if len(quoted) > _SHOWN else ""
    return (", ".join(quoted[:_SHOWN]) or "none") + more


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


CHUNK_BYTES = 1 << 22


def lines_until(stream: IO[bytes], stop: int | None, *, longest_bytes: int) -> Iterator[bytes | BadText]:
    """Yield the lines that begin before the byte `stop`, line ends included; None: all that are left.

    For a line of more than `longest_bytes` a BadText is yielded, and no more than a chunk of it is held.
    """
    place = stream.tell() if stop is not None else 0
    while stop is None or place < stop:
        line = stream.readline(longest_bytes + 1)
        if not line:
            return
        is_whole = line.endswith(b"\n")  # a member of a .zip file may give more than it was asked for
        if len(line) <= longest_bytes + is_whole:
            place += len(line)
            yield line
            continue
        size = len(line) + (0 if is_whole else skip_line(stream))
        place += size
        why = f"a line of {size:,} bytes; at most {longest_bytes:,} are read (data.longest_line_mib)"
        yield BadText(kind="too long", why=why)


def skip_line(stream: IO[bytes], *, at_most: int | None = None) -> int:
    """Read on to the end of the line, without holding it, and return the number of bytes; None: of any
    length.
    """
    skipped = 0
    while chunk := stream.readline(CHUNK_BYTES if at_most is None else min(CHUNK_BYTES, at_most - skipped)):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def count_lines(stream: IO[bytes], stop: int) -> int:
    """Return the number of lines that begin before `stop`."""
    count, left, last = 0, stop, b""
    while left > 0 and (chunk := stream.read(min(left, CHUNK_BYTES))):
        count, left, last = count + chunk.count(b"\n"), left - len(chunk), chunk[-1:]
    return count + (last != b"\n")


Item = TypeVar("Item")

_POLL_S = 0.2
_SILENCE_S = 600.0
_ENDING_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """Marks the end of the iterator.

    error: what the iterator raised; None if it is exhausted.
    """

    error: BaseException | None


def read_ahead(
    items: Iterator[Item], *, count: int, what: Callable[[], str], silence_s: float = _SILENCE_S
) -> Iterator[Item]:
    """Yield the same items in the same order, and make up to `count` of them before they are asked for.

    what: names what is waited for, in the DataError that follows `silence_s` seconds without an item.
    An error of the iterator is raised here, after the items before it. The thread ends with this generator,
    or as soon as the system releases it.
    """
    made: queue.Queue[Item | _Ended] = queue.Queue(count)
    unwanted = threading.Event()

    def put(item: Item | _Ended) -> bool:
        while not unwanted.is_set():
            try:
                made.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def make() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not put(item):
                    return
        except BaseException as raised:  # noqa: BLE001  — handed to the consumer, who raises it
            error = raised
        put(_Ended(error=error))

    thread = threading.Thread(target=make, name="read-ahead", daemon=True)
    thread.start()
    answers = True
    try:
        while True:
            try:
                item = made.get(timeout=silence_s)
            except queue.Empty:
                answers = False
                raise DataError(
                    f"Waited {silence_s:.0f} s for {what()}.",
                    remedy="Check the disk or network mount that it is on; what was finished is kept.",
                ) from None
            if isinstance(item, _Ended):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        unwanted.set()
        thread.join(_ENDING_S if answers else 0)  # a thread that hangs in a read is a daemon
