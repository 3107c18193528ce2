"""What a refusal of data tells: what is wrong, and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.data.refusals import (
    Act,
    index,
    megatron,
    mixture,
    pair,
    read,
    record,
    refused,
    writer_to,
    written_parts,
)

from bloomery.data.corpus_parts import join_parts
from bloomery.data.indexed import IndexedDataset
from bloomery.data.mixture import RULE, Mixture
from bloomery.data.pair_files import HEADER, MAGIC, idx_path
from bloomery.data.position import Position, SampleShare, next_samples
from bloomery.data.remote_files import Remote


def not_adjoining(path: Path) -> None:
    prefix = pair(path / "other", documents=2, tokens=3, sealed=False)
    content = bytearray(idx_path(prefix).read_bytes())
    content[HEADER.size] = 2  # tokens of the first sequence
    idx_path(prefix).write_bytes(content)
    with writer_to(path) as writer:
        writer.add_pair(IndexedDataset(prefix))


TOLD: list[tuple[str, Act, str]] = [
    (
        "later version",
        lambda path: index(path, HEADER.pack(MAGIC, 2, 8, 0, 1) + bytes(8)),
        "{path}/pair.idx has version 2 (byte 9); only version 1 is known.",
    ),
    (
        "floats",
        lambda path: index(path, HEADER.pack(MAGIC, 1, 7, 0, 1) + bytes(8)),
        "{path}/pair.idx has token type 7 (byte 17): floats, or other types in an older fork, not token ids.",
    ),
    (
        "unknown type",
        lambda path: index(path, HEADER.pack(MAGIC, 1, 9, 0, 1) + bytes(8)),
        "{path}/pair.idx has token type 9 (byte 17): unknown, not token ids.",
    ),
    (
        "short index",
        lambda path: index(path, HEADER.pack(MAGIC, 1, 8, 5, 3)),
        "{path}/pair.idx is damaged: its header (bytes 18 to 33) tells of 5 sequences and 2 documents, which "
        "take 118 bytes, and it has 34.",
    ),
    (
        "an index without an entry",
        lambda path: index(path, HEADER.pack(MAGIC, 1, 8, 0, 0)),
        "{path}/pair.idx is damaged: its header (bytes 18 to 33) tells of 0 sequences and -1 documents, "
        "which take 34 bytes, and it has 34.",
    ),
    (
        "documents elsewhere",
        lambda path: index(path, HEADER.pack(MAGIC, 1, 8, 0, 1) + (7).to_bytes(8, "little")),
        "{path}/pair.idx is damaged: its document indices (from byte 34) run from 7 to 7, not from 0 to 0.",
    ),
    (
        "sequences apart",
        not_adjoining,
        "{path}/other.idx has sequences of 5 tokens in all, and its pointers end at token 6: its sequences "
        "do not adjoin.",
    ),
    (
        "a later rule",
        lambda path: Mixture.from_json(mixture(rule=RULE + 1), windows=(5, 6)),
        "The checkpoint's mixture follows rule 4, and this version knows rules up to 3.",
    ),
    (
        "a login",
        lambda path: Remote("https://me:word@host/data"),
        "The address of host holds credentials, and it would be printed and kept.",
    ),
    (
        "a signed address",
        lambda path: Remote("https://host/data?signature=word"),
        "The address of host holds credentials, and it would be printed and kept.",
    ),
    ("brackets", lambda path: Remote("s3://[host"), "Cannot open s3://[host: Invalid IPv6 URL."),
    (
        "one object",
        lambda path: read(path / "a.json", "{}"),
        "{path}/a.json holds a JSON dict, not a list of records.",
    ),
    (
        "other text",
        lambda path: join_parts(written_parts(path / "out", record(), record("b"))),
        "{path}/out-part-2-of-2 was made of other text, settings or pieces, or with another "
        "tokenizer, than out-part-1-of-2.",
    ),
    (
        "past its end",
        lambda path: megatron().next_span(Position(consumed=9), 10),
        "The megatron order was made for 10 samples and ends at sample 11; the next batch would take those "
        "up to 19.",
    ),
    (
        "a lease that ends",
        lambda path: next_samples(Position(), 4, SampleShare(lease=())),
        "The lease of this peer has 0 samples left, and the batch takes 4.",
    ),
]


@pytest.mark.parametrize(("act", "message"), [pytest.param(*told, id=case) for case, *told in TOLD])
def test_a_refusal_tells_what_is_wrong_and_where(act: Act, message: str, tmp_path: Path) -> None:
    assert refused(lambda: act(tmp_path)).message == message.format(path=tmp_path)


def test_a_document_may_have_as_many_tokens_as_the_layout_allows(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writer_to(tmp_path) as writer:
        writer.add_documents(np.array([1]), np.array([(1 << 31) - 1]))
        raise KeyboardInterrupt  # the tokens are not there, so no pair can be completed
    assert writer.document_count == 1
