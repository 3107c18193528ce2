"""The bad documents of a corpus that was tokenised in pieces: one list, with lines counted as people do."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.data.documents import BadDocument, BadDocuments, count_lines
from bloomery.data.readers import LINES, SourceFile
from bloomery.data.tokenize_worker import TextPiece, bad_path


def bad_documents(
    parts: Path, pieces: Sequence[TextPiece], results: Sequence[dict[str, Any]], report: Path | None
) -> BadDocuments:
    """Return what was skipped, and write it to `report`, piece by piece.

    Lines are counted from the beginning of the file, not of its part.
    """
    bad = BadDocuments(stop_after=0)
    draft = parts / "bad-documents"
    draft.unlink(missing_ok=True)
    with durable.open_new(draft) as listed:
        for entry in _bad_of_pieces(parts, pieces, results):
            bad.add(entry)
            listed.write(entry.to_json_line())
    if report is not None:
        durable.replace(draft, report)
    return bad


def _bad_of_pieces(
    parts: Path, pieces: Sequence[TextPiece], results: Sequence[dict[str, Any]]
) -> Iterator[BadDocument]:
    before: dict[str, int] = {}
    lines_of_other_parts = functools.cache(_lines_before)
    for piece, result in zip(pieces, results, strict=True):
        offsets = []
        for file, lines in zip(piece.files, result["lines"], strict=True):
            path = str(file.path)
            offset = before.get(path, 0) if file.start else 0
            offsets.append(offset)
            before[path] = offset + lines
        with bad_path(parts, piece.number).open("rb") as listed:
            for row in listed:
                number, entry = json.loads(row)
                line = entry["line"]
                if line:
                    line += offsets[number]
                    if piece.files[number].path == pieces[0].files[0].path:
                        line += lines_of_other_parts(pieces[0].files[0])
                yield BadDocument(**{**entry, "line": line})


def _lines_before(file: SourceFile) -> int:
    """Return the number of lines that begin before a part of a file; 0 for what is not cut at lines."""
    if not file.start or not file.path.name.endswith(LINES):
        return 0
    with file.path.open("rb") as stream:
        return count_lines(stream, file.start)
