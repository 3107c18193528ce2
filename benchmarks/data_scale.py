"""Memory of commands on a dataset of 500 million documents: a real index of 10 GB beside sparse tokens.

    python benchmarks/data_scale.py [--json] [--documents 500000000] [--directory PATH]

Each runs in a process of its own. What counts is memory of the process's own: pages of mapped files, which
the system takes back at will, are told apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contract import Measurement, measurement, report

from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.pair_files import CODES, HEADER, MAGIC, IndexColumns, bin_path, idx_path
from bloomery.data.pairs import merge_pairs, verify_pair

TOKENS_A_DOCUMENT, LENGTH = 20, 2048
BAR_BYTES = 2_000_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each command, print what it took, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--documents", type=int, default=500_000_000, help="default 500,000,000")
    parser.add_argument("--directory", type=Path, default=None, help="where 35 GB fit (default: a temporary)")
    parser.add_argument(
        "--only", choices=list(COMMANDS), nargs="+", default=list(COMMANDS), help="some of them"
    )
    parser.add_argument("--command", choices=list(COMMANDS), help=argparse.SUPPRESS)
    parser.add_argument("--prefix", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.command:
        print(json.dumps(_peak_of(lambda: COMMANDS[options.command](options.prefix))))
        return 0
    place = Path(tempfile.mkdtemp(prefix="bench-scale-", dir=options.directory))
    try:
        prefix = place / "many"
        measured = [_measured("write", prefix, _peak_of(lambda: write(prefix, options.documents)), options)]
        for command in options.only:
            call = [sys.executable, __file__, "--command", command, "--prefix", str(prefix)]
            done = subprocess.run(call, capture_output=True, text=True, check=True)
            measured.append(_measured(command, prefix, json.loads(done.stdout), options))
        return report(measured, as_json=options.json)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def write(prefix: Path, documents: int) -> None:
    """Write the index as a writer of token files does, and tokens that are a hole in a sparse file."""
    columns, at_once = IndexColumns(prefix.parent), 1 << 20
    for start in range(0, documents, at_once):
        count = min(at_once, documents - start)
        columns.add_lengths(np.full(count, TOKENS_A_DOCUMENT))
        columns.add_ends(np.arange(start + 1, start + count + 1))
    dtype = np.dtype("<u2")
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[dtype], documents, documents + 1))
        for content in columns.pieces(dtype.itemsize):
            file.write(content)
    columns.close()
    with bin_path(prefix).open("wb") as file:
        file.truncate(documents * TOKENS_A_DOCUMENT * dtype.itemsize)


def _verify(prefix: Path) -> None:
    found = verify_pair(prefix, vocabulary_size=100)
    assert found.findings == (), found.findings


def _merge(prefix: Path) -> None:
    merged = prefix.with_name("merged")
    merge_pairs([prefix], merged)
    for path in (bin_path(merged), idx_path(merged)):
        path.unlink()


def _held_out(prefix: Path) -> None:
    from bloomery.data_loader.batches import _held_out_windows

    taken, _ = _held_out_windows(IndexedDataset(prefix), LENGTH, limit=64)
    assert len(taken) == 64


def _order(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    dataset.refuse_stray_sequences()
    order = MegatronOrder(
        [dataset.sequence_lengths],
        None,
        samples=dataset.token_count // LENGTH // 2,
        sequence_length=LENGTH,
        seed=1,
        kept_in=[prefix.parent / "orders"],
    )
    order.locate([range(1000)])


def _packs(prefix: Path) -> None:
    from bloomery.data.sample_layout import Packs

    packs = Packs(IndexedDataset(prefix), length=LENGTH, kept_in=prefix.parent / "orders")
    packs.pieces(np.arange(0, packs.sample_count, packs.sample_count // 1000))


def _tokenize(prefix: Path) -> None:
    """What tokenising holds once all 4,096 pieces are done; here all are one pair."""
    from bloomery.data import tokenize_corpus
    from bloomery.data.readers import SourceFile
    from bloomery.data.tokenize_worker import Job, TextPiece
    from bloomery.data.tokenizer import train_tokenizer

    pieces_count, place = 4096, prefix.parent / "joining"
    documents = IndexedDataset(prefix).document_count // pieces_count
    parts = place / "out.parts"
    parts.mkdir(parents=True)
    train_tokenizer(["a text"], vocabulary=270, end_of_document="<|endoftext|>").save(
        place / "tokenizer.json"
    )
    source = SourceFile(key="a.jsonl", path=place / "a.jsonl")
    source.path.write_text('{"text": "a"}\n')
    job = Job(
        directory=str(parts),
        tokenizer=str(place / "tokenizer.json"),
        end_of_document="<|endoftext|>",
        fast=False,
    )
    write(place / "piece", documents)
    plain = {"text_bytes": 1, "held_out_bytes": 0, "lines": [0], "engine": "tokenizers", "sizes": {}}
    pieces = [TextPiece(number=number, files=(source,), size_bytes=1) for number in range(pieces_count)]
    plan = {
        "identity": tokenize_corpus._identity([source], job),
        "pieces": [piece.to_json() for piece in pieces],
    }
    (parts / "plan.json").write_text(json.dumps(plan))
    for number in range(pieces_count):
        for ending in (".bin", ".idx"):
            (parts / f"{number:06}{ending}").symlink_to(place / f"piece{ending}")
        (parts / f"{number:06}.json").write_text(json.dumps(plain))
        (parts / f"{number:06}-bad.jsonl").touch()
    done = tokenize_corpus.tokenize([source], place / "out", job, workers=1)
    assert done.pieces_kept == pieces_count and done.pairs[0].documents == documents * pieces_count
    shutil.rmtree(place)


def _dedup_sorts(prefix: Path) -> None:
    """What `data dedup` holds of one of its 512 files of keys: 17 keys a document, all different."""
    keys = IndexedDataset(prefix).document_count * 17 // 512
    _dedup_candidates(
        prefix, lambda start, stop: np.random.default_rng(start).integers(2**63, size=stop - start), keys
    )


def _dedup_of_one_key(prefix: Path) -> None:
    """What it holds of such a file where all documents of the corpus are equal."""
    _dedup_candidates(
        prefix, lambda start, stop: np.full(stop - start, 7), IndexedDataset(prefix).document_count
    )


def _dedup_candidates(
    prefix: Path, keys_of: Callable[[int, int], np.ndarray[Any, Any]], keys: int, *, at_once: int = 1 << 22
) -> None:
    from bloomery.data import duplicate_candidates

    path = prefix.with_name("keys")
    with path.open("wb") as file:
        for start in range(0, keys, at_once):
            stop = min(start + at_once, keys)
            records = np.empty(stop - start, dtype=duplicate_candidates._KEY)
            records["key"], records["document"] = keys_of(start, stop), np.arange(start, stop)
            file.write(records.tobytes())
    for pairs in duplicate_candidates._candidates_in(path, bits=0):
        assert (pairs["earlier"] < pairs["document"]).all()


def _dedup_lists(prefix: Path) -> None:
    """What it holds of one of its 512 files of candidates: two for each key of a document, all different."""
    from bloomery.data import duplicate_candidates

    documents = IndexedDataset(prefix).document_count // 512
    path = prefix.with_name("pairs")
    with path.open("wb") as file:
        for place in range(34):
            pairs = np.empty(documents, dtype=duplicate_candidates._CANDIDATE)
            pairs["document"] = np.arange(documents) + 1_000_000
            pairs["earlier"] = np.random.default_rng(place).integers(1_000_000, size=documents)
            file.write(pairs.tobytes())
    last = (0, 0)
    for pair in duplicate_candidates._candidates_by_document(path):
        assert pair > last
        last = pair


def _audit(prefix: Path) -> None:
    """What `data audit` holds while it looks for n-grams, by default in 10⁹ tokens of the corpus."""
    from bloomery.data.text_audit import Ngrams, audit_text

    dataset = IndexedDataset(prefix)
    other = Ngrams.of_texts(iter([np.arange(10_000_000) % 60_000]), 13)
    audit_text({"many": dataset}, {"other": other}, size=13, at_most_tokens=100_000_000)


COMMANDS: dict[str, Callable[[Path], None]] = {
    "verify": _verify,
    "merge": _merge,
    "held-out windows": _held_out,
    "megatron's order": _order,
    "megatron's order, again": _order,
    "packs of documents": _packs,
    "packs of documents, again": _packs,
    "tokenize, joining": _tokenize,
    "dedup, a file of keys": _dedup_sorts,
    "dedup, one key for all": _dedup_of_one_key,
    "dedup, a file of candidates": _dedup_lists,
    "audit, n-grams": _audit,
}


def _peak_of(work: Callable[[], None]) -> dict[str, float]:
    """Return the most memory of its own that this process had meanwhile, and with mapped pages, in bytes."""
    peak = {"own": 0.0, "mapped": 0.0}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("RssAnon", "RssFile"):
                    key = "own" if name == "RssAnon" else "mapped"
                    peak[key] = max(peak[key], 1024.0 * int(rest.split()[0]))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    begun = time.process_time()
    work()
    over.set()
    watching.join()
    return {**peak, "cpu_s": time.process_time() - begun}


def _measured(name: str, prefix: Path, peak: dict[str, float], options: argparse.Namespace) -> Measurement:
    return measurement(
        f"data_scale: memory of {name}",
        peak["own"] / 1e9,
        unit="GB",
        reference=f"{options.documents:,} documents, "
        f"index of {idx_path(prefix).stat().st_size / 1e9:.1f} GB; "
        f"{peak['mapped'] / 1e9:.2f} GB of mapped files; {peak['cpu_s']:.0f} s of processor time",
        bar=f"<= {BAR_BYTES / 1e9:.0f}",
    )


if __name__ == "__main__":
    sys.exit(main())
