"""Makes the data and the acts on them that the tests of refusals need, and takes the error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bloomery.data.corpus_parts import CorpusPart, record_path
from bloomery.data.documents import BadDocuments
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.mixture import Mixture
from bloomery.data.pair_files import idx_path
from bloomery.data.readers import Reading, SourceFile, read_file
from bloomery.data.seal import SealFacts
from bloomery.errors import BloomeryError

EOD = "<|endoftext|>"
COPIED = ("Copy the pair and its seal again", "tokenise again")
Act = Callable[[Path], object]


def refused(act: Callable[[], object]) -> BloomeryError:
    with pytest.raises(BloomeryError) as raised:
        act()
    return raised.value


def pair(
    prefix: Path, *, dtype: str = "<u2", documents: int = 1, tokens: int = 100, sealed: bool = True
) -> Path:
    facts = SealFacts(vocabulary_size=300) if sealed else None
    with IndexedWriter(prefix, dtype=dtype, seal=facts) as writer:
        for _ in range(documents):
            writer.add_document(np.arange(tokens) % 250)
    return prefix


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def written_parts(out: Path, *records: dict[str, object], count: int | None = None) -> Path:
    for number, record in enumerate(records, 1):
        prefix = CorpusPart(number=number, count=count or len(records)).prefix(out)
        written(idx_path(prefix), b"")
        written(record_path(prefix), json.dumps(record))
    return out


def record(corpus: str = "a", engine: str = "e") -> dict[str, object]:
    return {"corpus": corpus, "engine": engine, "held_out": False}


def writer_to(path: Path) -> IndexedWriter:
    return IndexedWriter(path / "pair", dtype="<u2")


def index(path: Path, content: bytes) -> IndexedDataset:
    written(path / "pair.bin", b"")
    written(path / "pair.idx", content)
    return IndexedDataset(path / "pair")


def megatron(*, seed: int = 0, samples: int = 10) -> MegatronOrder:
    lengths = [np.array([9, 8, 30], dtype=np.int32)]
    return MegatronOrder(lengths, None, samples=samples, sequence_length=4, seed=seed)


def mixture(**changed: object) -> dict[str, object]:
    return {**Mixture.of((5, 6), (1, 1)).to_json(), **changed}


def read(path: Path, content: str | bytes, **settings: str) -> None:
    written(path, content)
    file = SourceFile(key=path.name, path=path)
    list(read_file(file, reading=Reading(**settings), bad=BadDocuments()))  # type: ignore[arg-type]
