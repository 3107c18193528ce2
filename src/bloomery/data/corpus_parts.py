"""Splits a corpus into parts for several machines to tokenise, and joins their outputs into one pair.

The pieces of a corpus are cut alike on every machine. A part is a run of neighbouring pieces, so that the
pairs of all parts, one after another, are what one machine would have written.

Bad documents are joined into one JSONL list; its line numbers count from 1 at the start of each source file.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bloomery import durable
from bloomery.data.documents import BadDocument, BadDocuments, count_lines
from bloomery.data.indexed import IndexedDataset
from bloomery.data.pair_files import PARTS, bin_path, idx_path
from bloomery.data.pairs import merge_together
from bloomery.data.readers import LINES, SourceFile
from bloomery.data.storage import as_storage_error, open_new, write_whole
from bloomery.data.tokenize_worker import HELD_OUT, TextPiece, bad_path
from bloomery.errors import DataError
from bloomery.events.records import ProgressCallback, ignore_progress

_WRITTEN = re.compile(r"(\d+)/(\d+)")
_MOST_PARTS = 100_000
_READ_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 1024, 4096
BAD_LIST = "-bad-documents.jsonl"
"""The ending of the list of a pair's bad documents, after the pair's name."""


@dataclass(frozen=True, kw_only=True)
class CorpusPart:
    """One part of a corpus. number: from 1 to `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> CorpusPart:
        """Return the part that is written as `3/16`. Raises ValueError for anything else."""
        match = _WRITTEN.fullmatch(text)
        number, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= count <= _MOST_PARTS:
            raise ValueError(f"{text!r} is no part such as 3/16, from 1/16 to 16/16")
        return cls(number=number, count=count)

    def prefix(self, out: Path) -> Path:
        """Return where the part of the pair `out` is written."""
        width = len(str(self.count))
        return out.with_name(f"{out.name}-part-{self.number:0{width}}-of-{self.count}")

    def of_pieces(self, pieces: Sequence[TextPiece]) -> list[TextPiece]:
        """Return the pieces of this part: those whose middle byte lies in it. Every piece is in one part."""
        total = sum(piece.size_bytes for piece in pieces)
        own, before = [], 0
        for piece in pieces:
            middle = 2 * before + piece.size_bytes
            before += piece.size_bytes
            place = min(middle * self.count // max(2 * total, 1), self.count - 1)
            if place == self.number - 1:
                own.append(piece)
        return own


def is_of_output(path: Path, out: Path) -> bool:
    """Whether a file is a piece or a list of bad documents of `out` or of its parts, and so no text of it."""
    own = re.escape(out.name) + r"(-part-\d+-of-\d+)?"
    if re.fullmatch(own + re.escape(BAD_LIST), path.name):
        return path.parent.resolve() == out.parent.resolve()
    is_piece = re.fullmatch(own + r"\.parts", path.parent.name) is not None
    return is_piece and path.parent.parent.resolve() == out.parent.resolve()


def record_path(prefix: Path) -> Path:
    """Return the path of the record of a part, which is written last."""
    return prefix.with_name(prefix.name + ".part.json")


def remove_record(prefix: Path, *, held_out: bool) -> None:
    """Remove the record of a part that is about to be replaced.

    held_out: the new one has a held-out pair; else an older one's is removed too.
    """
    older = prefix.with_name(prefix.name + HELD_OUT)
    with as_storage_error(record_path(prefix)):
        record_path(prefix).unlink(missing_ok=True)
        for path in () if held_out else reversed(PARTS.values()):  # without its index it is no pair
            path(older).unlink(missing_ok=True)
        durable.sync_directory(prefix.parent)


def refuse_older_held_out(out: Path) -> None:
    """Raise DataError where a held-out pair lies beside `out`, which is made anew without one.

    An earlier command held those documents out of the `out` of then; the new one may hold them, and a loss
    that is measured on them would be of text that was learnt.
    """
    held_out = out.with_name(out.name + HELD_OUT)
    if bin_path(held_out).exists() or idx_path(held_out).exists():
        raise DataError(
            f"{held_out} lies beside {out}, out of which nothing is held now: documents of an earlier "
            "--held-out-every may be in both.",
            remedy=f"Remove {held_out}.*, rename it if it is of other text, or give another --to.",
        )


def write_record(prefix: Path, *, corpus: str, sample: str, engine: str, held_out: bool) -> None:
    """Record that a part is complete.

    corpus: digest of the corpus's files by name and size, of how they are cut, the settings and the
        tokenizer. sample: what `contents_sample` returns of all files of the corpus.
    """
    record = {"corpus": corpus, "sample": sample, "engine": engine, "held_out": held_out}
    write_whole(record_path(prefix), json.dumps(record).encode())


def contents_sample(files: Iterable[SourceFile]) -> str:
    """Return a digest of contents at places that are spread evenly over the bytes of all files.

    Each machine has its own copy of a corpus, which none could read whole only to compare it. Copies of
    another version differ nearly everywhere behind the first change, in this sample too; a change of a few
    bytes in place is only seen in a corpus of at most 4 MiB, which is read whole.
    """
    paths = list(dict.fromkeys(file.path for file in files))
    sizes = [path.stat().st_size for path in paths]
    step = max(-(-sum(sizes) // _SAMPLES), _SAMPLE_BYTES)
    digest, place = xxhash.xxh3_128(), 0  # place: of the next sample, counted from the begin of a file
    for path, size in zip(paths, sizes, strict=True):
        if place < size:
            with path.open("rb") as stream:
                while place < size:
                    stream.seek(place)
                    digest.update(stream.read(_SAMPLE_BYTES))
                    place += step
        place = 0 if step == _SAMPLE_BYTES else place - size
    return digest.hexdigest()


def join_parts(out: Path, *, progress: ProgressCallback = ignore_progress) -> list[IndexedDataset]:
    """Join the parts of `out` that were tokenised beside it: its pair, what is held out of it, and the list
    of bad documents. The parts stay.

    Raises DataError, and changes nothing, where a part is missing, was made of another corpus or by another
    engine, or where no part has a document to train on.
    """
    prefixes = _parts_of(out)
    records = [_read_record(prefix) for prefix in prefixes]
    for prefix, record in zip(prefixes, records, strict=True):
        for key, what in (
            ("corpus", "other text, settings or pieces, or with another tokenizer,"),
            ("engine", "another engine"),
        ):
            if record[key] != records[0][key]:
                raise DataError(
                    f"{prefix} was made of {what} than {prefixes[0].name}."
                    if key == "corpus"
                    else f"{prefix} was made by {what} than {prefixes[0].name}: {record[key]}.",
                    remedy="Tokenise both parts again, with one command, one version and one set of files.",
                )
    _refuse_other_contents(prefixes, records)
    if not records[0]["held_out"]:
        refuse_older_held_out(out)
    groups = {
        out.with_name(out.name + ending): [prefix.with_name(prefix.name + ending) for prefix in prefixes]
        for ending in (("", HELD_OUT) if records[0]["held_out"] else ("",))
    }
    if not any(IndexedDataset(prefix).document_count for prefix in groups[out]):
        raise DataError(
            f"The parts of {out} hold no document to train on.",
            remedy=f"The lists beside them, *{BAD_LIST}, say what was left out and why.",
        )
    joined = merge_together(groups, progress=progress)
    _join_lists(prefixes, out)
    return joined


def _refuse_other_contents(prefixes: Sequence[Path], records: Sequence[dict[str, Any]]) -> None:
    """Raise DataError where two parts were made of files with other contents. Older parts hold no sample."""
    sampled = [each for each in zip(prefixes, records, strict=True) if each[1]["sample"]]
    for prefix, record in sampled:
        first, other = sampled[0]
        if record["sample"] != other["sample"]:
            raise DataError(
                f"{prefix} was made of files with other contents than {first.name}, though their names and "
                "sizes are the same.",
                remedy="Compare the machines' copies of the corpus, copy it anew, and tokenise both again.",
            )


def _parts_of(out: Path) -> list[Path]:
    """Return the prefixes of all parts of `out`. Raises DataError where there are none, or one is missing."""
    named = re.compile(re.escape(out.name) + r"-part-(\d+)-of-(\d+)\.(?:part\.json|idx)")
    with as_storage_error(out.parent):
        matches = [named.fullmatch(path.name) for path in out.parent.iterdir()]
    counts = sorted({int(match[2]) for match in matches if match})
    if len(counts) != 1:
        of_each = " and ".join(f"of {count}" for count in counts)
        raise DataError(
            f"{out.parent} holds {'parts ' + of_each if counts else 'no parts'} of {out.name}.",
            remedy="Keep the parts of one N, and remove those of the others."
            if counts
            else "Make them with `bloomery data tokenize … --to PREFIX --part 1/N`, and give that PREFIX.",
        )
    if counts[0] > _MOST_PARTS:
        raise DataError(f"{out.parent} holds files of {counts[0]} parts.", remedy="Remove them.")
    parts = [CorpusPart(number=number, count=counts[0]) for number in range(1, counts[0] + 1)]
    prefixes = [part.prefix(out) for part in parts]
    missing = [
        f"{part.number}/{part.count}"
        for part, prefix in zip(parts, prefixes, strict=True)
        if not (record_path(prefix).exists() and idx_path(prefix).exists())
    ]
    if missing:
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        raise DataError(
            f"These parts of {out} are not finished: {', '.join(missing[:20])}{more}.",
            remedy="Run `bloomery data tokenize … --part` for each of them; finished pieces are kept.",
        )
    return prefixes


def _read_record(prefix: Path) -> dict[str, Any]:
    try:
        record = json.loads(record_path(prefix).read_bytes())
        known = {key: record[key] for key in ("corpus", "engine", "held_out")}
        return {**known, "sample": str(record.get("sample", ""))}
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise DataError(
            f"{record_path(prefix)} is no record of a part ({wrong}).", remedy="Tokenise that part again."
        ) from wrong


def _join_lists(prefixes: Sequence[Path], out: Path) -> None:
    """Write the lists of bad documents as one; none where all are missing."""
    lists = [prefix.with_name(prefix.name + BAD_LIST) for prefix in prefixes]
    there = [path for path in lists if path.exists()]
    target = out.with_name(out.name + BAD_LIST)
    with as_storage_error(target):
        target.unlink(missing_ok=True)
        if not there:
            return
        draft = target.with_name(f".{target.name}.draft")
        draft.unlink(missing_ok=True)
        with durable.open_new(draft) as joined:
            for path in there:
                with path.open("rb") as listed:
                    while chunk := listed.read(_READ_BYTES):
                        joined.write(chunk)
        durable.replace(draft, target)


def bad_documents(
    parts: Path, pieces: Sequence[TextPiece], results: Sequence[dict[str, Any]], report: Path | None
) -> BadDocuments:
    """Return the documents that were skipped while tokenising, and write them to `report`, piece by piece.

    Lines are counted from the beginning of the file, not of its part.
    """
    bad = BadDocuments(stop_after=0)
    draft = parts / "bad-documents"
    with as_storage_error(draft):
        draft.unlink(missing_ok=True)
    with open_new(draft) as listed:
        for entry in _bad_of_pieces(parts, pieces, results):
            bad.add(entry)
            listed.write(entry.to_json_line())
    if report is not None:
        with as_storage_error(report):
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
