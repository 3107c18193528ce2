"""Tokenises a whole corpus into one pair of indexed files with several processes, and resumes after a kill.

Each process writes pieces to `OUT.parts/`; a piece is complete once its result file exists. At the end the
pieces are joined in reading order, so the output does not depend on the number of workers or interruptions.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from bloomery.data.corpus_parts import (
    CorpusPart,
    bad_documents,
    contents_sample,
    refuse_older_held_out,
    remove_record,
    write_record,
)
from bloomery.data.documents import BadDocuments
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import PARTS, bin_path, token_dtype
from bloomery.data.pairs import replace_pair, withdraw_pair
from bloomery.data.readers import SourceFile
from bloomery.data.seal import SealFacts
from bloomery.data.storage import as_storage_error, locked_directory, write_whole
from bloomery.data.tokenize_pool import BatchDone, PieceDone, tokenize_pieces
from bloomery.data.tokenize_worker import (
    HELD_OUT,
    Job,
    TextPiece,
    cut_corpus,
    prepared_tokenizer,
    refuse_all_bad,
    result_path,
    sampled_texts,
    tokenize_piece,
    total_bytes,
)
from bloomery.data.tokenizer import Tokenizer
from bloomery.errors import DataError
from bloomery.events.records import ProgressCallback, counting, ignore_progress

log = logging.getLogger(__name__)

_PIECE_BYTES, _MOST_PIECES = 32 << 20, 4096
_THREADS = 2  # threads of an engine in each process; while they work, Python reads what comes next
_PLAN, _ENGINE, _JOINED, _STAGED = "plan.json", "engine.json", "joined.json", "joined"
_FORMAT = 4


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One pair that was written.

    text_bytes: size of its documents in UTF-8.
    """

    prefix: Path
    documents: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class TokenizeSummary:
    """The result of tokenising a corpus.

    pieces_kept: number of pieces that an earlier, interrupted start had finished.
    """

    pairs: tuple[Pair, ...]
    dtype: str
    text_bytes: int
    bad: BadDocuments
    engines: dict[str, int]
    notes: tuple[str, ...]
    pieces: int
    pieces_kept: int


def tokenize(
    files: Sequence[SourceFile],
    out: Path,
    job: Job,
    *,
    workers: int,
    report: Path | None = None,
    progress: ProgressCallback = ignore_progress,
    piece_bytes: int | None = None,
    part: CorpusPart | None = None,
) -> TokenizeSummary:
    """Tokenise files into `out.bin` and `out.idx`; held-out documents go to a pair of their own.

    part: the part of the corpus that is done here, into `part.prefix(out)`; None for all of it.
    piece_bytes: about how large pieces are; None: 32 MiB, and more where that gave more than 4,096 pieces.

    workers: number of cores to use. Each process gets two. If that makes one process, it is this one, whose
    engine takes the number of threads that its environment says.
    job: `job.directory` is set by this function. report: the file that gets every bad document as a line of
    JSON, empty where there is none; None for none.

    One process at a time may work on one `out`. Pieces that an earlier start finished are kept if files,
    settings and tokenizer are the same and, if the job asks for the reference engine, that engine made them;
    else they are made again. An older `out` stays whole until everything new is joined and sealed.
    """
    if not part and not job.held_out_every:
        refuse_older_held_out(out)
    out = part.prefix(out) if part else out
    parts = out.with_name(out.name + ".parts")
    job = replace(job, directory=str(parts))
    tokenizer = prepared_tokenizer(job)
    with locked_directory(parts, name="lock") as lock:
        corpus = _planned(parts, files, job, piece_bytes=piece_bytes or piece_size(total_bytes(files)))
        if not job.fail:  # else the first bad one is refused where it is met
            refuse_all_bad(corpus, job)
        _decide_engine(parts, corpus, job, tokenizer)
        job = replace(job, engine=tokenizer.engine)
        pieces = part.of_pieces(corpus) if part else corpus
        finished = {piece.number for piece in pieces if _is_finished(parts, piece.number, tokenizer)}
        left = [piece for piece in pieces if piece.number not in finished]
        processes = min(-(-workers // _THREADS), len(left))
        whole = sum(piece.size_bytes for piece in pieces)
        watch = _Watch(progress, done=whole - sum(piece.size_bytes for piece in left), total=whole)
        if processes > 1:
            events = tokenize_pieces(left, job, processes=processes, threads=_THREADS, held_open=[lock])
        else:
            events = _alone(left, job, tokenizer, watch=watch)
        for event in events:
            watch.see(event)
        results = [json.loads(result_path(parts, piece.number).read_bytes()) for piece in pieces]
        if left:
            (parts / _JOINED).unlink(missing_ok=True)
        bad = bad_documents(parts, pieces, results, report)
        outcome = _joined(
            parts,
            pieces,
            results,
            out,
            tokenizer,
            job,
            bad,
            may_be_empty=part is not None,
            progress=progress,
        )
        if part:
            remove_record(out, held_out=bool(job.held_out_every))
        _put_in_place(parts, out, _endings(job))
        if part:
            digests = {"corpus": _corpus_digest(corpus, job), "sample": contents_sample(files)}
            write_record(out, **digests, engine=job.engine, held_out=bool(job.held_out_every))
        watch.end()
        # The pair needs them no more. NFS keeps the lock's file, and so the directory, until it is closed.
        shutil.rmtree(parts, ignore_errors=True)
        if parts.exists():
            log.warning("%s could not be removed as a whole. It is needed no more.", parts)
    return replace(outcome, pieces_kept=len(finished))


def piece_size(corpus_bytes: int) -> int:
    """Return about how large the pieces of a corpus are, so that one directory holds some thousand of
    them.
    """
    return max(_PIECE_BYTES, -(-corpus_bytes // _MOST_PIECES))


class _Watch:
    """Reports the progress of all workers as one."""

    def __init__(self, progress: ProgressCallback, *, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        self._tokens, self._started = 0, time.monotonic()

    def see(self, event: BatchDone | PieceDone) -> None:
        if isinstance(event, BatchDone):
            self._done += event.text_bytes
            self._tokens += event.tokens
            rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
            done = min(self._done, self._total)
            self._progress("tokenising", done, self._total, "bytes", f"{rate / 1e6:,.2f}M tokens/s")

    def end(self) -> None:
        self._progress("tokenising", self._total, self._total, "bytes")


def _alone(
    pieces: Sequence[TextPiece], job: Job, tokenizer: Tokenizer, *, watch: _Watch
) -> Iterator[BatchDone | PieceDone]:
    """Do the same work in this process, with the engine's own threads."""

    def tell(size: int, tokens: int) -> None:
        watch.see(BatchDone(text_bytes=size, tokens=tokens))

    for piece in pieces:
        tokenize_piece(piece, job, tokenizer, tell=tell)
        yield PieceDone(number=piece.number)


def _planned(parts: Path, files: Sequence[SourceFile], job: Job, *, piece_bytes: int) -> list[TextPiece]:
    """Return the pieces of an earlier start on the same text with the same settings; else cut new ones."""
    identity = _identity(files, job)
    try:
        plan = json.loads((parts / _PLAN).read_bytes())
        if plan["identity"] == identity:
            return [TextPiece.from_json(piece) for piece in plan["pieces"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there was no plan, or it has another form
    with as_storage_error(parts):
        for stale in parts.iterdir():
            if stale.name != "lock":
                stale.unlink()
    pieces = cut_corpus(files, piece_bytes=piece_bytes)
    plan = {"identity": identity, "pieces": [piece.to_json() for piece in pieces]}
    write_whole(parts / _PLAN, json.dumps(plan).encode())
    return pieces


def _identity(files: Sequence[SourceFile], job: Job) -> str:
    """Return a digest of what the pieces depend on: the files as they are now, the settings, the
    tokenizer.
    """
    digest = xxhash.xxh3_128(f"format {_FORMAT}".encode())
    for file in files:
        status = file.path.stat()
        digest.update(f"{file.key}\n{file.path}\n{status.st_size} {status.st_mtime_ns}\n".encode())
    digest.update(_settings(job))
    digest.update(Path(job.tokenizer).read_bytes())
    return digest.hexdigest()


def _corpus_digest(pieces: Sequence[TextPiece], job: Job) -> str:
    """Return what all parts of a corpus must have alike: its files by name and size, how they are cut, the
    settings and the tokenizer. Paths and times may differ between machines.
    """
    digest = xxhash.xxh3_128(f"format {_FORMAT}".encode())
    for piece in pieces:
        cuts = [[file.key, file.start, file.stop] for file in piece.files]
        digest.update(json.dumps([piece.number, piece.size_bytes, cuts]).encode())
    digest.update(_settings(job))
    digest.update(Path(job.tokenizer).read_bytes())
    return digest.hexdigest()


def _settings(job: Job) -> bytes:
    settings = asdict(replace(job, directory="", tokenizer="", fast=True, engine=""))
    return json.dumps(settings, sort_keys=True).encode()


def _decide_engine(parts: Path, pieces: Sequence[TextPiece], job: Job, tokenizer: Tokenizer) -> None:
    """Choose one engine for the whole corpus, or keep the one that an earlier start chose, and record it.

    If an earlier start chose a fast engine that may not or cannot be used now, the reference replaces it. A
    reference stays, because what it made is right.
    """
    try:
        engine_record = json.loads((parts / _ENGINE).read_bytes())
        engine, note = str(engine_record["engine"]), str(engine_record["note"])
    except (OSError, ValueError, KeyError, TypeError):
        tokenizer.prove(list(sampled_texts(pieces, job)) if pieces and job.fast else [])
    else:
        if engine != tokenizer.engine:
            tokenizer.use_reference(note or tokenizer.engine_note)
    decision = {"engine": tokenizer.engine, "note": tokenizer.engine_note}
    write_whole(parts / _ENGINE, json.dumps(decision).encode())


def _is_finished(parts: Path, number: int, tokenizer: Tokenizer) -> bool:
    try:
        result = json.loads(result_path(parts, number).read_bytes())
        sizes = result["sizes"]
        return bool(result["engine"] == tokenizer.engine) and all(
            (parts / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _joined(
    parts: Path,
    pieces: Sequence[TextPiece],
    results: Sequence[dict[str, Any]],
    out: Path,
    tokenizer: Tokenizer,
    job: Job,
    bad: BadDocuments,
    *,
    may_be_empty: bool,
    progress: ProgressCallback,
) -> TokenizeSummary:
    """Join and seal all pieces within `parts` if that is not done yet, and return what they contain.

    may_be_empty: a pair without documents is written too; else it is refused.
    """
    dtype = token_dtype(tokenizer.vocabulary_size)
    endings = _endings(job)
    if not may_be_empty and not _documents_in(parts, pieces, ""):
        held_out = _documents_in(parts, pieces, HELD_OUT) if job.held_out_every else 0
        raise DataError(
            f"No document is left to train on ({held_out} held out, {bad.count} bad), and nothing to "
            f"write to {out}. {bad.summary()}".rstrip(),
            remedy=bad.remedy,
        )
    if not _is_joined(parts, out):
        facts = SealFacts(
            vocabulary_size=tokenizer.vocabulary_size,
            end_of_document_id=tokenizer.eod,
            engine=tokenizer.engine,
        )
        prefixes = {ending: [parts / f"{piece.number:06}{ending}" for piece in pieces] for ending in endings}
        size = sum(bin_path(prefix).stat().st_size for some in prefixes.values() for prefix in some)
        copied = counting(progress, "joining and sealing", size)
        for ending, some in prefixes.items():
            with IndexedWriter(parts / f"{_STAGED}{ending}", dtype=dtype, seal=facts) as writer:
                for prefix in some:
                    writer.add_pair(IndexedDataset(prefix), copied)
        sizes = {
            f"{ending}{suffix}": path(parts / f"{_STAGED}{ending}").stat().st_size
            for ending in endings
            for suffix, path in PARTS.items()
        }
        write_whole(parts / _JOINED, json.dumps(sizes).encode())
    held_out_bytes = sum(result["held_out_bytes"] for result in results)
    text_bytes = sum(result["text_bytes"] for result in results)
    of_ending = {"": text_bytes - held_out_bytes, HELD_OUT: held_out_bytes}
    engines: dict[str, int] = {}
    for result in results:
        engines[result["engine"]] = engines.get(result["engine"], 0) + 1
    return TokenizeSummary(
        pairs=tuple(
            Pair(
                prefix=out.with_name(out.name + ending),
                documents=_documents_in(parts, pieces, ending),
                tokens=sum(
                    IndexedDataset(parts / f"{piece.number:06}{ending}").token_count for piece in pieces
                ),
                text_bytes=of_ending[ending],
            )
            for ending in endings
        ),
        dtype=dtype.name,
        text_bytes=text_bytes,
        bad=bad,
        engines=engines,
        notes=_notes(tokenizer),
        pieces=len(pieces),
        pieces_kept=0,
    )


def _notes(tokenizer: Tokenizer) -> tuple[str, ...]:
    endings = ", ".join(map(repr, tokenizer.texts_that_end_documents()))
    stray = (
        f"Documents whose text holds {endings} count as bad: the tokenizer reads the end of a document there."
    )
    return tuple(filter(None, (tokenizer.engine_note, stray if endings else "")))


def _endings(job: Job) -> tuple[str, ...]:
    return ("", HELD_OUT) if job.held_out_every else ("",)


def _is_joined(parts: Path, out: Path) -> bool:
    """Whether all pieces were joined and sealed before, and the result still is here or is in place
    already.
    """

    def size(path: Path) -> int:
        return path.stat().st_size if path.is_file() else -1

    try:
        sizes = json.loads((parts / _JOINED).read_bytes())
        return all(
            wanted in (size(parts / f"{_STAGED}{name}"), size(out.with_name(out.name + name)))
            for name, wanted in sizes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def _put_in_place(parts: Path, out: Path, endings: Sequence[str]) -> None:
    """Move what was joined to its place; after a kill in the middle, what is missing there.

    At no moment an older held-out pair lies beside new training documents, which may hold its own.
    """
    if HELD_OUT in endings and bin_path(parts / _STAGED).exists():
        withdraw_pair(out.with_name(out.name + HELD_OUT))
    for ending in endings:
        replace_pair(parts / f"{_STAGED}{ending}", out.with_name(out.name + ending))


def _documents_in(parts: Path, pieces: Sequence[TextPiece], ending: str) -> int:
    return sum(IndexedDataset(parts / f"{piece.number:06}{ending}").document_count for piece in pieces)
