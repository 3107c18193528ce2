"""What a refusal of data advises: the setting, the command or the act that mends it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from tests.data.refusals import (
    COPIED,
    EOD,
    Act,
    index,
    megatron,
    mixture,
    pair,
    read,
    record,
    refused,
    writer_to,
    written,
    written_parts,
)

from bloomery.config.data import DataSection, DatasetSection
from bloomery.config.environment import SWITCH
from bloomery.data import tokenize_pool
from bloomery.data.corpus_parts import join_parts
from bloomery.data.dataset_shares import Claim, Demand, Extent, claims, held_out_weights, read_weights
from bloomery.data.duplicates import SimilarityThreshold, deduplicate
from bloomery.data.hub_dataset import HubDataset
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import Blend
from bloomery.data.mixture import RULE, Mixture, whole_shares
from bloomery.data.order import Order
from bloomery.data.pair_files import HEADER, MAGIC, bin_path, idx_path, seal_path, sums_path
from bloomery.data.pairs import merge_pairs
from bloomery.data.position import Position, SampleShare, next_samples
from bloomery.data.prepare import prepare
from bloomery.data.readers import SourceFile
from bloomery.data.remote_files import FetchRequest, Remote, RemoteFile, plan_share
from bloomery.data.sample_layout import layout_of
from bloomery.data.seal import read_seal, verified_pieces
from bloomery.data.sealing import seal
from bloomery.data.sources import SourceHashes, find_files
from bloomery.data.streaming import CacheLocation, mount
from bloomery.data.tokenize_worker import Job, prepared_tokenizer, total_bytes
from bloomery.data.tokenizer import find_tokenizer, load_tokenizer, train_tokenizer


def answers(prefix: Path) -> Path:
    with IndexedWriter(prefix, dtype="<u2") as writer:
        writer.add_documents(np.arange(6), np.array([6]), prompts=np.array([2]))
    return prefix


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])


def parts_of_two_counts(out: Path) -> Path:
    written_parts(out, record(), count=3)
    return written_parts(out, record(), count=2)


PARTS: list[tuple[str, Act, tuple[str, ...]]] = [
    ("none", lambda path: join_parts(path / "out"), ("--to PREFIX --part 1/N", "give that PREFIX")),
    ("two counts", lambda path: join_parts(parts_of_two_counts(path / "out")), ("parts of one N", "remove")),
    (
        "one is missing",
        lambda path: join_parts(written_parts(path / "out", record(), count=2)),
        ("`bloomery data tokenize … --part`", "finished pieces are kept"),
    ),
    (
        "no record",
        lambda path: join_parts(written_parts(path / "out", {})),
        ("Tokenise that part again",),
    ),
    (
        "other text",
        lambda path: join_parts(written_parts(path / "out", record(), record("b"))),
        ("Tokenise both parts again", "one command"),
    ),
    (
        "other engine",
        lambda path: join_parts(written_parts(path / "out", record(), record(engine="f"))),
        ("Tokenise both parts again", "one version"),
    ),
]


def demand(*budgets_and_weights: tuple[int, int], samples: int = 100) -> Demand:
    made = [
        Claim(name=f"d{number}", samples=budget, weight=Fraction(weight))
        for number, (budget, weight) in enumerate(budgets_and_weights)
    ]
    return Demand(claims=tuple(made), samples=samples, slack=1, sequence_length=4)


def weighed_by(path: Path, content: str, **settings: object) -> DataSection:
    datasets = (DatasetSection(name="a", path="p"),)
    file = str(written(path / "w.json", content))
    return DataSection(sequence_length=1, datasets=datasets, weights_file=file, **settings)  # type: ignore[arg-type]


SHARES: list[tuple[str, Act, tuple[str, ...]]] = [
    ("no weight", lambda path: demand((0, 0)).shares(), ("weight above 0", "a budget of tokens or epochs")),
    ("nothing left", lambda path: demand((100, 0), (0, 1)).shares(), ("Train longer", "lower the budgets")),
    (
        "given more",
        lambda path: demand((9, 0), (0, 1)).shares(given_before=(12, 0)),
        ("at least 48", "weight = 0"),
    ),
    ("no file", lambda path: read_weights(path / "w.toml"), ("Give the path of the file",)),
    (
        "no TOML",
        lambda path: read_weights(written(path / "w.toml", "a b")),
        ("name = weight on each line of a .toml file", "{name: weight} in a .json file"),
    ),
    (
        "below 0",
        lambda path: read_weights(written(path / "w.json", '{"a": -1}')),
        ("name once", "number of 0 or more"),
    ),
    (
        "strange name to validate on",
        lambda path: held_out_weights(weighed_by(path, '{"valid": {"b": 1}}')),
        ("data.datasets", "data.held_out_datasets"),
    ),
    (
        "nothing to validate on",
        lambda path: held_out_weights(weighed_by(path, '{"valid": {"a": 0}}')),
        ("Give one of them more",),
    ),
    (
        "strange name",
        lambda path: claims(weighed_by(path, '{"a": 1, "b": 1}'), [Extent(name="a", tokens=9, windows=9)]),
        ("names of data.datasets", "each once", "weight 0 leaves a dataset out"),
    ),
]


def add_other_type(path: Path) -> None:
    with writer_to(path) as writer:
        writer.add_pair(IndexedDataset(pair(path / "other", dtype="<i4")))


def add_documents(path: Path, tokens: list[int], lengths: list[int]) -> None:
    with writer_to(path) as writer:
        writer.add_documents(np.array(tokens), np.array(lengths))


def deduplicated(path: Path, *prefixes: Path, against: tuple[Path, ...] = ()) -> None:
    deduplicate(prefixes, path / "out", likeness=SimilarityThreshold(), against=against)


def verified(path: Path, how: Callable[[Path], object]) -> None:
    prefix = pair(path / "pair")
    sealed = read_seal(prefix)
    how(prefix)
    for _ in verified_pieces(bin_path(prefix), sealed):
        pass


def seal_read(path: Path, how: Callable[[Path], object]) -> None:
    prefix = pair(path / "pair")
    how(prefix)
    read_seal(prefix)


def without(path: Path) -> None:
    path.unlink()


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


PAIRS: list[tuple[str, Act, tuple[str, ...]]] = [
    ("two types", add_other_type, ("tokenise one side again with the other's tokenizer",)),
    ("large ids", lambda path: add_documents(path, [1, 70_000], [2]), ("vocabulary size of the tokenizer",)),
    ("long document", lambda path: add_documents(path, [1], [1 << 31]), ("Cut the document into several",)),
    ("merged into itself", lambda path: merge_pairs([path / "a"], path / "a"), ("Write to another path",)),
    ("deduplicated into itself", lambda path: deduplicated(path, path / "out"), ("another path",)),
    (
        "deduplicated into what it is compared with",
        lambda path: deduplicated(path, pair(path / "a"), against=(path / "out",)),
        ("another path",),
    ),
    (
        "deduplicated answers",
        lambda path: deduplicated(path, answers(path / "a")),
        ("Remove duplicates from the text", "tokenise it again"),
    ),
    (
        "deduplicated of two types",
        lambda path: deduplicated(path, pair(path / "a"), pair(path / "b", dtype="<i4")),
        ("pairs of one tokenizer",),
    ),
    ("no pair", lambda path: IndexedDataset(path / "none"), (".bin/.idx pair without the ending",)),
    ("no index", lambda path: index(path, b"?" * 99), ("Megatron .bin/.idx pair", "without the ending")),
    (
        "later version",
        lambda path: index(path, HEADER.pack(MAGIC, 2, 8, 0, 1) + bytes(8)),
        ("Convert it with the program that wrote it",),
    ),
    (
        "floats",
        lambda path: index(path, HEADER.pack(MAGIC, 1, 6, 0, 1) + bytes(8)),
        ("Tokenise again", "codes 1 to 5 and 8"),
    ),
    ("short index", lambda path: index(path, HEADER.pack(MAGIC, 1, 8, 5, 1)), ("Tokenise the source again",)),
    (
        "documents elsewhere",
        lambda path: index(path, HEADER.pack(MAGIC, 1, 8, 0, 1) + bytes([7] * 8)),
        ("Tokenise the source again",),
    ),
    ("no seal of ours", lambda path: seal_read(path, lambda prefix: damage(seal_path(prefix))), COPIED),
    ("no sums", lambda path: seal_read(path, lambda prefix: without(sums_path(prefix))), COPIED),
    (
        "more sums than were written",
        lambda path: seal_read(path, lambda prefix: sums_path(prefix).open("ab").write(b"x")),
        COPIED,
    ),
    (
        "a seal that is a directory",
        lambda path: seal_read(path, lambda prefix: as_directory(seal_path(prefix))),
        ("yours to read",),
    ),
    ("a damaged block", lambda path: verified(path, lambda prefix: damage(bin_path(prefix))), COPIED),
    (
        "fewer bytes",
        lambda path: verified(path, lambda prefix: written(bin_path(prefix), b"")),
        COPIED,
    ),
    (
        "unreadable tokens",
        lambda path: verified(path, lambda prefix: as_directory(bin_path(prefix))),
        ("disk",),
    ),
    (
        "no documents to pack",
        lambda path: layout_of(
            IndexedDataset(pair(path / "pair", documents=0)), "documents", length=4, seed=0, number=0
        ),
        ("Give it text", "leave it out"),
    ),
]


ORDERS: list[tuple[str, Act, tuple[str, ...]]] = [
    ("no such seed", lambda path: megatron(seed=-1), ("data.order_seed", "--seed")),
    (
        "past its end",
        lambda path: megatron().next_span(Position(consumed=9), 10),
        ("Shorten the run", "data.order_samples before the first start"),
    ),
    (
        "more than a dataset has",
        lambda path: megatron().rows[0].shuffled(np.array([99])),
        ("give it more", "leave it out"),
    ),
    ("a blend of nothing", lambda path: Blend([0, 0], 4), ("0 or more", "at least one of them more than 0")),
    ("weights of nothing", lambda path: whole_shares([0, 0]), ("0 or more", "at least one of them")),
    (
        "a later rule",
        lambda path: Mixture.from_json(mixture(rule=RULE + 1), windows=(5, 6)),
        ("version of bloomery that wrote the checkpoint", "a later one"),
    ),
    (
        "other sizes",
        lambda path: Mixture.from_json(mixture(), windows=(5, 7)),
        ("Keep the datasets and their order", "weight 0", "new ones last"),
    ),
    (
        "a changed order",
        lambda path: Order((5, 6), (1, 1), 0).changed((6, 5), (1, 1), at=3),
        ("Keep the datasets in their order", "weight 0", "new ones last"),
    ),
    ("no sample", lambda path: Order((5, 0), (1, 1), 0), ("data.sequence_length", "more text")),
    (
        "a lease that ends",
        lambda path: next_samples(Position(), 4, SampleShare(lease=())),
        ("whole number of global batches",),
    ),
]


def given(path: Path, prefix: Path) -> DataSection:
    tokenizer = path / "tokenizer.json"
    train_tokenizer(["a"], vocabulary=257, end_of_document=EOD).save(tokenizer)
    datasets = (DatasetSection(name="a", path=str(prefix)),)
    return DataSection(sequence_length=8, tokenizer=str(tokenizer), datasets=datasets)


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))
    find_files([str(path)])


def saved_without_state(path: Path) -> None:
    written(path / "data.arrow", b"")
    written(path / "state.json", "{}")
    find_files([str(path)])


TEXT: list[tuple[str, Act, tuple[str, ...]]] = [
    (
        "no prompts",
        lambda path: read(path / "a.txt", "a", prompt_field="p"),
        (".jsonl files", "leave data.prompt_field out"),
    ),
    ("one object", lambda path: read(path / "a.json", "{}"), ("a list of objects", ".jsonl file of one")),
    ("no JSON", lambda path: read(path / "a.json", "{}\n{}"), ("is named .jsonl", "mend it")),
    (
        "too small",
        lambda path: prepare(given(path, pair(path / "pair", tokens=3)), path),
        ("more text", "data.sequence_length smaller"),
    ),
    ("a link to nothing", lambda path: dangling(path / "a.txt"), ("Give a file",)),
    ("no list of files", saved_without_state, ("save_to_disk", ".arrow files")),
    ("no file to hash", lambda path: SourceHashes(path).of(path / "a"), ("yours to read",)),
    (
        "no file to cut",
        lambda path: total_bytes([SourceFile(key="a", path=path / "a")]),
        ("it is there", "yours to read"),
    ),
    (
        "no data",
        lambda path: prepare(DataSection(sequence_length=8), path),
        ("data.sources", "data.datasets"),
    ),
]


def shares_of(*names: str, **wanted: object) -> None:
    files = [RemoteFile(path="a.parquet", size_bytes=1, sha256="", version="")]
    request = FetchRequest(**{"ratios": {}, **wanted})  # type: ignore[arg-type]
    plan_share({name: files for name in names}, request)


def mounted(path: Path, how: Callable[[Path], object]) -> None:
    prefix = pair(path / "there" / "pair", sealed=False)
    seal(prefix, vocabulary_size=300, end_of_document_id=0, block_bytes=512)
    how(prefix)
    mount([prefix.as_uri()], CacheLocation(directory=path / "cache", limit_bytes=9999))


ELSEWHERE: list[tuple[str, Act, tuple[str, ...]]] = [
    ("no such share", lambda path: shares_of("a", shares=3, share=3), ("from 0 to 2",)),
    ("an empty share", lambda path: shares_of("a", shares=3, share=2), ("fewer shares", "more names")),
    ("a ratio too many", lambda path: shares_of("a", ratios={"a": 1, "b": 1}), ("each dataset a ratio",)),
    ("a ratio of 0", lambda path: shares_of("a", ratios={"a": 0}), ("Leave out what is not wanted",)),
    (
        "a login",
        lambda path: Remote("https://me:word@host/data"),
        ("environment (AWS_ACCESS_KEY_ID", "only the address"),
    ),
    ("no kind of address", lambda path: Remote("ftp://host/data"), ("s3://", "https://", "a directory")),
    (
        "no checksums",
        lambda path: Remote(written(path / "SHA256SUMS", "ab c\n").parent.as_uri()).files(),
        ("`sha256sum`", "in the directory that it lists"),
    ),
    (
        "no file",
        lambda path: Remote(path.as_uri()).read("none", start=0, length=1),
        ("address", "credentials", "ranges", "the same command goes on"),
    ),
    (
        "a path above",
        lambda path: HubDataset("somebody/texts")._checked("../a"),
        ("Do not fetch from there",),
    ),
    (
        "another index",
        lambda path: mounted(path, lambda prefix: damage(idx_path(prefix))),
        ("seal what is there now", "bring the old back"),
    ),
    (
        "no seal",
        lambda path: mounted(path, lambda prefix: damage(seal_path(prefix))),
        ("`data merge` of the one pair",),
    ),
    (
        "other sums",
        lambda path: mounted(path, lambda prefix: damage(sums_path(prefix))),
        ("Bring back there what was sealed", "`data merge`"),
    ),
]


def other_engine(path: Path) -> None:
    file = path / "tokenizer.json"
    train_tokenizer(["a"], vocabulary=257, end_of_document=EOD).save(file)
    prepared_tokenizer(
        Job(directory="", tokenizer=str(file), end_of_document=EOD, fast=False, engine="fastokens")
    )


TOKENIZERS: list[tuple[str, Act, tuple[str, ...]]] = [
    ("another engine", other_engine, ("reference engine", "--engine reference")),
    (
        "no file",
        lambda path: load_tokenizer(path / "none", end_of_document=EOD),
        ("path of a tokenizer.json", "data.tokenizer = 'train'"),
    ),
    (
        "no tokenizer",
        lambda path: load_tokenizer(written(path / "a.json", "{}"), end_of_document=EOD),
        ("tokenizer.json of Hugging Face", "SentencePiece .model"),
    ),
    ("an empty directory", lambda path: find_tokenizer(str(path)), ("path of the file itself",)),
    ("no name", lambda path: find_tokenizer("hf:a b"), ("hf:SOMEBODY/SOMETHING", "without 'hf:'")),
    (
        "silent workers",
        lambda path: tokenize_pool._next(queue.SimpleQueue(), {}, silence_s=0),
        ("disk", "kept"),
    ),
]


GROUPS = {
    "parts": PARTS, "shares": SHARES, "pairs": PAIRS, "orders": ORDERS,
    "text": TEXT, "elsewhere": ELSEWHERE, "tokenizers": TOKENIZERS,
}  # fmt: skip
CASES = [
    pytest.param(act, named, id=f"{group}: {case}")
    for group, cases in GROUPS.items()
    for case, act, named in cases
]


@pytest.mark.parametrize(("act", "named"), CASES)
def test_a_refusal_names_what_mends_it(act: Act, named: tuple[str, ...], tmp_path: Path) -> None:
    remedy = refused(lambda: act(tmp_path)).remedy
    assert [part for part in named if part not in remedy] == [], remedy


def test_without_a_network_a_fetch_elsewhere_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    for act in (lambda: HubDataset("a/b"), lambda: Remote("s3://bucket/data")):
        assert "where there is a network" in refused(act).remedy
    remedy = refused(lambda: find_tokenizer("hf:nobody-at-all/nothing")).remedy
    assert "Copy its tokenizer.json here" in remedy and "fetch it once" in remedy
