"""Documents one by one: what is counted, how lines and pieces are cut, and what is said of bad ones."""

from __future__ import annotations

import hashlib
import io
import json
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from bloomery.data import documents
from bloomery.data.documents import (
    BadDocument,
    BadDocuments,
    BadText,
    Document,
    RecordText,
    checked_text,
    count_lines,
    decoded_text,
    document_batches,
    json_text,
    lines_until,
    read_ahead,
    record_text,
    size_in_utf8,
    skip_line,
)
from bloomery.data.text_pieces import split_stream
from bloomery.errors import DataError

NAMED = "Name the one that holds the text: data.text_field, or --text-field ('a.b' for b inside a). "


def bad(line: int = 3, kind: str = "empty", why: str = "the document is empty") -> BadDocument:
    return BadDocument(file="/x/a.jsonl", line=line, kind=kind, why=why)


def test_a_document_is_known_by_its_name_or_else_by_its_text() -> None:
    unnamed = Document(text="é", place="here", size_bytes=2)
    assert unnamed.key == hashlib.sha256("é".encode()).hexdigest() and unnamed.prompt == 0
    assert Document(text="é", place="here", size_bytes=2, name="a/b.txt").key == "a/b.txt"
    assert Document(text="é", place="here", size_bytes=2, name="").key == ""
    assert (size_in_utf8("abc"), size_in_utf8("é語x"), size_in_utf8("")) == (3, 6, 0)


def test_bad_documents_are_counted_by_kind_kept_up_to_a_number_and_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents, "KEPT", 2)
    kept: list[BadDocument] = []
    found = BadDocuments(keep=kept.append)
    assert (found.summary(), found.remedy.startswith("Give more text, mend the bad documents, or")) == (
        "",
        True,
    )
    entries = [bad(0), bad(4, "not UTF-8", "not UTF-8 at byte 3"), bad(9, "not UTF-8", "not UTF-8 at byte 1")]
    found.add(entries[0])
    assert found.summary() == ("1 document skipped: 1 empty. The first: /x/a.jsonl: the document is empty")
    for entry in entries[1:]:
        found.add(entry)
    assert (found.count, dict(found.kinds), found.entries) == (3, {"empty": 1, "not UTF-8": 2}, entries[:2])
    assert kept == entries
    assert found.summary() == (
        "3 documents skipped: 2 not UTF-8, 1 empty. The first: /x/a.jsonl: the document is empty"
    )
    assert found.remedy.endswith("or hold out fewer (data.held_out_every, --held-out-every).")


def test_a_bad_document_is_a_line_of_json_whatever_its_file_is_called() -> None:
    entry = BadDocument(file="/x/\udcff é.jsonl", line=7, kind="empty", why="w")
    line = entry.to_json_line()
    assert line.endswith(b"\n") and "é".encode() in line and b"?" in line
    assert json.loads(line) == {"file": "/x/? é.jsonl", "line": 7, "kind": "empty", "why": "w"}


SKIP = 'set data.bad_documents = "skip" (--bad-documents skip) to count and skip it.'


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("without the field", f"{NAMED}Or {SKIP}"),
        ("not text", f"{NAMED}Or {SKIP}"),
        ("empty", f"Mend or remove it, or {SKIP}"),
    ],
)
def test_a_bad_document_that_is_fatal_is_told_with_what_mends_it(kind: str, remedy: str) -> None:
    found = BadDocuments(fail=True)
    with pytest.raises(DataError) as refused:
        found.add(bad(kind=kind, why="w"))
    assert (refused.value.message, refused.value.remedy) == ("/x/a.jsonl:3: w.", remedy)
    assert (found.count, found.entries) == (0, [])


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("without the field", NAMED + "Or remove the files that hold no such text."),
        ("not text", NAMED + "Or remove the files that hold no such text."),
        ("empty", "Remove the files that hold no such text."),
    ],
)
def test_a_corpus_of_bad_documents_alone_is_told_with_its_last_one(kind: str, remedy: str) -> None:
    found = BadDocuments(stop_after=3)
    for line in (1, 2):
        found.add(bad(line, kind=kind))
    with pytest.raises(DataError) as refused:
        found.add(bad(5, kind=kind, why="w"))
    said = "The first 3 documents are all bad; /x/a.jsonl:5, for one: w."
    assert (refused.value.message, refused.value.remedy) == (said, remedy)
    found.add(bad(6))  # it is said once
    never = BadDocuments(stop_after=0)
    one_good = BadDocuments(stop_after=3, good=1)
    for line in range(9):
        never.add(bad(line))
        one_good.add(bad(line))
    assert never.count == one_good.count == 9


@pytest.mark.parametrize("kind", ["without the field", "not text"])
def test_where_no_text_was_found_the_field_is_what_to_name(kind: str) -> None:
    found = BadDocuments()
    found.add(bad(kind=kind))
    assert found.remedy == NAMED + "Or give text."


def test_two_threads_that_add_bad_documents_wait_for_each_other() -> None:
    alone: list[bool] = []
    found = BadDocuments(keep=lambda entry: alone.append(found._adding.locked()))
    found.add(bad())
    assert alone == [True] and not found._adding.locked()


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"t": "x"}, RecordText("x")),
        ({"t": "x", "p": "q "}, RecordText("q x", 2)),
        ({"t": "", "p": "q"}, BadText(kind="empty", why="the document is empty")),
        ({"t": "x", "p": ""}, BadText(kind="empty", why="the document is empty")),
        (
            {"p": {"a": 1, "b": {}}, "x": 2},
            BadText(
                kind="without the field",
                why="no field 't' (data.text_field); its fields are 'p.a', 'p.b', 'x'",
            ),
        ),
        (
            {"t": "x", "p": None},
            BadText(kind="not text", why="field 'p' holds NoneType, not text; its fields are 'p', 't'"),
        ),
        (
            {},
            BadText(kind="without the field", why="no field 't' (data.text_field); its fields are none"),
        ),
        (["x"], BadText(kind="not an object", why="a JSON list, not an object with a field 't'")),
    ],
)
def test_the_text_of_a_record_is_its_prompt_and_its_field(
    record: object, found: RecordText | BadText
) -> None:
    prompt_field = "p" if isinstance(record, dict) and "p" in record else ""
    assert record_text(record, text_field="t", prompt_field=prompt_field) == found


def test_a_prompt_that_is_missing_is_told_by_its_own_setting() -> None:
    told = record_text({"t": "x"}, text_field="t", prompt_field="p")
    assert isinstance(told, BadText)
    assert told.why == "no field 'p' (data.prompt_field); its fields are 't'"


@pytest.mark.parametrize(("count", "more"), [(20, ""), (21, " and 1 more"), (25, " and 5 more")])
def test_of_many_fields_twenty_are_named(count: int, more: str) -> None:
    told = record_text({f"f{number:02}": 1 for number in range(count)}, text_field="t")
    assert isinstance(told, BadText)
    assert told.why.endswith(", ".join(f"'f{number:02}'" for number in range(20)) + more)


@pytest.mark.parametrize(
    ("line", "kind", "why"),
    [
        (b'{"t": "\xff"}', "not UTF-8", "not UTF-8 at byte 7 of the line (invalid start byte)"),
        (b" \t\n", "malformed JSON", "a blank line"),
        (b"{\n", "malformed JSON", "malformed JSON (Expecting property name"),
        (b"[" * 100_000, "malformed JSON", "malformed JSON (maximum recursion"),
        (b'{"t": "\\ud800"}', "not UTF-8", "half of a surrogate pair at character 0, which UTF-8"),
    ],
)
def test_a_line_that_is_no_record_is_told_with_its_place(line: bytes, kind: str, why: str) -> None:
    told = json_text(line, text_field="t")
    assert isinstance(told, BadText) and told.kind == kind and told.why.startswith(why)
    assert told.at("/x", 4) == BadDocument(file="/x", line=4, kind=kind, why=told.why)


def test_text_is_unchanged_or_told_as_bad() -> None:
    assert json_text(b'{"t": "ab", "p": "c"}', text_field="t", prompt_field="p") == RecordText("cab", 1)
    assert [checked_text(text) for text in ("a", "é語")] == ["a", "é語"] and decoded_text(b"\xc3\xa9") == "é"
    for told in (checked_text(""), decoded_text(b"")):
        assert told == BadText(kind="empty", why="the document is empty")
    half = "half of a surrogate pair at character 2, which UTF-8 cannot hold"
    assert checked_text("ab\ud800") == BadText(kind="not UTF-8", why=half)
    told = BadText(kind="not UTF-8", why="not UTF-8 at byte 2 (invalid start byte)")
    assert decoded_text(b"ab\xff") == told


def test_batches_hold_documents_until_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_BATCH_BYTES", 10)
    sizes = [4, 5, 1, 10, 11, 3, 6]
    given = [Document(text=str(size), place="", size_bytes=size) for size in sizes]
    found = [[document.size_bytes for document in batch] for batch in document_batches(given)]
    assert found == [[4, 5, 1], [10], [11], [3, 6]]
    assert list(document_batches([])) == []


@pytest.mark.parametrize(
    ("content", "stop", "found"),
    [
        (b"ab\nc\n\nd", None, [b"ab\n", b"c\n", b"\n", b"d"]),
        (b"ab\nc\nd\n", 3, [b"ab\n"]),
        (b"ab\nc\nd\n", 4, [b"ab\n", b"c\n"]),
        (b"abcd\nabcde\nx\n", None, [b"abcd\n", b"abcde\n", b"x\n"]),  # the line's end is not counted
        (b"abcdef\nx\n", None, ["7", b"x\n"]),
        (b"abcdefghijklmnop\nx\n", 8, ["17"]),
        (b"abcdefg", None, ["7"]),
        (b"", None, []),
        (b"ab\n", 0, []),
    ],
)
def test_lines_are_read_that_begin_before_an_end_and_are_not_too_long(
    monkeypatch: pytest.MonkeyPatch, content: bytes, stop: int | None, found: list[bytes | str]
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 4)
    why = "a line of {} bytes; at most 5 are read (data.longest_line_mib)"
    expected = [
        BadText(kind="too long", why=why.format(one)) if isinstance(one, str) else one for one in found
    ]
    assert list(lines_until(io.BytesIO(content), stop, longest_bytes=5)) == expected


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("content", "stop", "count"),
    [(b"a\nb\nc", 5, 3), (b"a\nb\nc", 4, 2), (b"a\nb\nc", 3, 2), (b"a\nb\nc", 1, 1), (b"\n\n\n", 2, 2)],
)
def test_lines_are_counted_that_begin_before_a_byte(
    monkeypatch: pytest.MonkeyPatch, content: bytes, stop: int, count: int, chunk: int
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", chunk)
    assert count_lines(io.BytesIO(content), stop) == count


def test_the_rest_of_a_line_is_read_on_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 4)
    stream = io.BytesIO(b"abcdefg\nxyz")
    assert (skip_line(stream), stream.tell()) == (8, 8)
    assert (skip_line(stream), skip_line(stream)) == (3, 0)


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        (b"", [(b"", True)]),
        (b"ab", [(b"ab", True)]),
        (b"ab%%", [(b"ab", True), (b"", True)]),
        (b"%%a%%%%b%%", [(b"", True), (b"a", False), (b"", False), (b"b", False), (b"", True)]),
        (b"\xef\xbb\xbfa%%\xef\xbb\xbfb", [(b"a", True), (b"\xef\xbb\xbfb", True)]),
    ],
)
def test_pieces_at_the_edges_are_told_as_such(content: bytes, pieces: list[tuple[bytes, bool]]) -> None:
    found = split_stream(io.BytesIO(content), b"%%", longest_bytes=9)
    assert [(piece.content, piece.is_edge) for piece in found] == pieces


def test_no_more_is_read_ahead_than_was_asked_for() -> None:
    made: list[int] = []
    taken = threading.Event()

    def items() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            if number == 4:
                taken.set()
            yield number

    ahead = read_ahead(items(), count=3, what=str)
    assert next(ahead) == 0
    assert taken.wait(60), "three wait, and a fourth is made"
    assert list(ahead) == list(range(1, 50)) and made == list(range(50))


def test_as_many_items_wait_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []

    class Queue(queue.Queue[object]):
        def __init__(self, maxsize: int = 0) -> None:
            places.append(maxsize)
            super().__init__(maxsize)

    fake = SimpleNamespace(Queue=Queue, Full=queue.Full, Empty=queue.Empty)
    monkeypatch.setattr(documents, "queue", fake)
    assert list(read_ahead(iter(range(9)), count=3, what=str)) == list(range(9)) and places == [3]


def test_a_source_that_is_silent_keeps_nobody_waiting_for_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[float] = []

    class Thread:
        def __init__(self, **settings: object) -> None:
            assert settings["daemon"] is True and settings["name"] == "read-ahead"
            self.target = settings["target"]

        def start(self) -> None:
            self.target()  # type: ignore[operator]

        def join(self, timeout: float) -> None:
            joined.append(timeout)

    fake = SimpleNamespace(Thread=Thread, Event=threading.Event)
    monkeypatch.setattr(documents, "threading", fake)
    assert list(read_ahead(iter([1, 2]), count=9, what=str)) == [1, 2]
    monkeypatch.setattr(Thread, "start", lambda self: None)
    with pytest.raises(DataError) as refused:
        list(read_ahead(iter([1]), count=9, what=lambda: "text of a", silence_s=0.0))
    assert refused.value.message == "Waited 0 s for text of a." and joined == [10.0, 0]
