"""Duplicates, overlaps and repeats to the number: what is listed, compared in pieces, and counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bloomery.data import duplicate_candidates, duplicates, ngrams, order_audit, overlap, storage, text_audit
from bloomery.data.duplicates import (
    Deduplicated,
    SimilarityThreshold,
    _runs,
    _similarity,
    are_equal,
    deduplicate,
    equal_keys,
)
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.ngrams import HashSet, documents_in_turn, ngram_hashes, tokens_of_document
from bloomery.data.order import Order
from bloomery.data.order_audit import SampleCounts, neighbours_of, sample_counts_of
from bloomery.data.overlap import Overlap, SharedDocument, overlap_of
from bloomery.data.text_audit import (
    Ngrams,
    RepeatedNgrams,
    SharedNgrams,
    TextAudit,
    audit_text,
    whole_ngrams,
)
from bloomery.errors import DataError, StorageError

EXACT = SimilarityThreshold(threshold=1.0)


def written(prefix: Path, *texts: list[int], dtype: str = "<u2") -> IndexedDataset:
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for text in texts:
            writer.add_document(text)
    return IndexedDataset(prefix)


def read(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(dataset.document_count)]


A, B, C, D = [1, 2, 3], [4, 5], [6], [7, 8, 9, 9]


def test_what_is_left_out_is_listed_with_what_it_equals_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_COPIED_AT_ONCE", 2)
    monkeypatch.setattr(duplicates, "_TOKENS_AT_ONCE", 2)
    monkeypatch.setattr(ngrams, "_DOCUMENTS_AT_ONCE", 3)
    held = written(tmp_path / "held", C, D).prefix
    one, two = (
        written(tmp_path / "one", A, B, A, D).prefix,
        written(tmp_path / "two", [], B, C, [2], []).prefix,
    )
    told: list[tuple[str, int, int, str]] = []
    done = deduplicate(
        [one, two],
        tmp_path / "deep" / "new",
        likeness=EXACT,
        against=[held],
        progress=lambda what, done, total, unit, note="": told.append((what, done, total, unit)),
    )
    assert read(tmp_path / "deep" / "new") == [A, B, [], [2]]
    assert done == Deduplicated(
        documents=4, tokens=6, removed_equal=5, removed_near=0, removed_tokens=3 + 4 + 2 + 1 + 0
    )
    lines = (tmp_path / "deep" / "new-duplicates.jsonl").read_text().splitlines()
    expected = [
        (one, 2, one, 0),
        (one, 3, held, 1),
        (two, 1, one, 1),
        (two, 2, held, 0),
        (two, 4, two, 0),
    ]
    assert [json.loads(line) for line in lines] == [
        {
            "pair": str(pair),
            "document": number,
            "like_pair": str(like),
            "like_document": like_number,
            "alike": 1.0,
        }
        for pair, number, like, like_number in expected
    ]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == [
        *("new-duplicates.jsonl", "new.bin", "new.idx", "new.seal.json", "new.seal.sums")
    ]
    last = {what: (done, total, unit) for what, done, total, unit in told}
    assert last == {
        "comparing": (11, 11, "documents"),
        "sorting": (512, 512, "files"),
        "removing": (512, 512, "files"),
        "writing": (9, 9, "documents"),
    }
    assert [done for what, done, *_ in told if what == "sorting"] == list(range(1, 513))


def test_pairs_of_other_tokens_and_pairs_that_are_written_to_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, wide = written(tmp_path / "narrow", A), written(tmp_path / "wide", A, dtype="<i4")
    with pytest.raises(DataError) as refused:
        deduplicate([narrow.prefix, wide.prefix], tmp_path / "new", likeness=EXACT)
    said = f"{tmp_path / 'wide'} holds int32 tokens, and {tmp_path / 'narrow'} uint16."
    assert refused.value.message == said
    with pytest.raises(DataError, match="is one of the pairs to read"):
        deduplicate([narrow.prefix], tmp_path / "held", likeness=EXACT, against=[tmp_path / "held"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path)
    for read_from, out in (
        (narrow.prefix, Path("narrow")),
        (Path("narrow"), narrow.prefix),
        (narrow.prefix, Path("below", "..", "narrow")),
        (tmp_path / "linked" / "narrow", narrow.prefix),
    ):
        with pytest.raises(DataError, match="is one of the pairs to read"):
            deduplicate([read_from], out, likeness=EXACT)


@pytest.mark.parametrize(("ours", "theirs", "equal"), [
    ([], [], True), ([1], [], False), ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], True),
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], False), ([1, 2, 3, 4, 5], [1, 2, 3, 4], False),
    ([0, 2, 3, 4, 5], [1, 2, 3, 4, 5], False),
])  # fmt: skip
def test_documents_are_compared_to_their_last_token_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch, ours: list[int], theirs: list[int], equal: bool
) -> None:
    monkeypatch.setattr(duplicates, "_TOKENS_AT_ONCE", 2)
    assert are_equal(np.array(ours), np.array(theirs)) is equal


@pytest.mark.parametrize("last", [63, 64, 65, 127, 128])
def test_candidates_of_the_first_and_of_the_last_document_are_in_files_of_their_own(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicate_candidates, "_SORTED_AT_ONCE", 4)
    candidates = np.zeros(last + 1, dtype=duplicate_candidates._CANDIDATE)
    candidates["document"], candidates["earlier"] = np.arange(10, last + 11), 3
    candidates.tofile(tmp_path / "candidates")
    found = list(duplicate_candidates._candidates_by_document(tmp_path / "candidates"))
    assert found == [(document, 3) for document in range(10, last + 11)]


@pytest.mark.parametrize(
    ("ours", "theirs", "alike"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [1, 2, 3, 5], 0.5),  # 12 23 34 and 12 23 35
        ([1, 2, 1, 2], [1, 2, 1], 0.9999),  # the same n-grams, of another number
        ([1, 2], [3, 4], 0.0),
        ([], [3, 4], 0.0),
        ([9, 9, 9, 1], [9, 9, 9, 9], 0.5),
    ],
)
def test_how_alike_documents_are_is_the_share_of_their_common_ngrams(
    ours: list[int], theirs: list[int], alike: float
) -> None:
    likeness = SimilarityThreshold(threshold=0.3, ngram=2)
    assert _similarity(np.array(ours), np.array(theirs), likeness) == pytest.approx(alike)
    exact = _similarity(np.array(ours), np.array(theirs), EXACT)
    assert exact == (1.0 if alike == 1.0 else 0.0)
    assert not likeness.is_exact and EXACT.is_exact and not SimilarityThreshold(threshold=0.99).is_exact


def test_runs_of_kept_documents_are_told_by_their_ends() -> None:
    kept = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=bool)
    assert _runs(kept) == [(0, 2), (4, 5), (6, 9)]
    assert _runs(~kept) == [(2, 4), (5, 6)] and _runs(np.zeros(0, dtype=bool)) == []


def test_keys_are_of_the_tokens_of_each_document_alone(tmp_path: Path) -> None:
    dataset = written(tmp_path / "pair", A, [], A, [1, 2], [3, 1, 2])
    (some,) = documents_in_turn(dataset)
    keys = equal_keys(some).tolist()
    assert keys[0] == keys[2] and len({*keys}) == 4 and some.starts.tolist() == [0, 3, 3, 6, 8]
    assert tokens_of_document(dataset, 3).tolist() == [1, 2] and tokens_of_document(dataset, 1).size == 0


@pytest.mark.parametrize(("documents", "tokens"), [(100, 1 << 20), (2, 1 << 20), (100, 5), (3, 1), (100, 4)])
def test_documents_of_a_range_come_with_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: int, tokens: int
) -> None:
    monkeypatch.setattr(ngrams, "_DOCUMENTS_AT_ONCE", documents)
    monkeypatch.setattr(ngrams, "_TOKENS_AT_ONCE", tokens)
    monkeypatch.setattr(ngrams, "HASHED_TOKENS", 4)
    texts = [A, B, [], [*range(10, 17)], C, D, B]
    dataset = written(tmp_path / "pair", *texts)
    for begin, stop in ((0, None), (1, 5), (3, 4), (5, 5)):
        found = {}
        for some in documents_in_turn(dataset, begin=begin, stop=stop):
            assert some.tokens.size == some.lengths.sum() <= max(tokens, 4)
            for number, (start, length) in enumerate(
                zip(some.starts.tolist(), some.lengths.tolist(), strict=True)
            ):
                found[some.first + number] = some.tokens[start : start + length].tolist()
        own = range(begin, len(texts) if stop is None else stop)
        alone = tokens < 7 or documents == 1
        assert found == {n: texts[n][:4] if n == 3 and (alone or len(own) == 1) else texts[n] for n in own}


def test_a_set_of_hashes_holds_what_is_in_it_and_nothing_of_its_slot() -> None:
    held = np.array([5, 7 << 40, (7 << 40) + 1, (1 << 64) - 1], dtype=np.uint64)
    some = HashSet(np.concatenate([held, held]))
    asked = np.array([5, 6, 7 << 40, (7 << 40) + 2, (1 << 64) - 1, (1 << 64) - 2], dtype=np.uint64)
    assert len(some) == 4 and some.holds(asked).tolist() == [True, False, True, False, True, False]


def test_a_document_shorter_than_an_ngram_has_one_and_no_whole_one() -> None:
    tokens, lengths = np.array([1, 2, 3, 1, 2, 7]), np.array([3, 2, 0, 1])
    hashes, counts = ngram_hashes(tokens, lengths, 2)
    assert counts.tolist() == [2, 1, 0, 1] and hashes[0] == hashes[2] and len(set(hashes.tolist())) == 3
    whole, document = whole_ngrams(tokens, lengths, 2)
    assert whole.tolist() == hashes[:3].tolist() and document.tolist() == [0, 0, 1]


def test_an_overlap_is_told_document_by_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_SHOWN", 3)
    training = {"t": written(tmp_path / "t", [], B, A, A), "u": written(tmp_path / "u", D, A)}
    held = {"h": written(tmp_path / "h", A, [], C), "i": written(tmp_path / "i", D, A)}
    told: list[tuple[object, ...]] = []
    found = overlap_of(training, held, progress=lambda *about: told.append(about))
    shared = [("h", 0, "t", 2, 3), ("i", 1, "t", 2, 3), ("i", 0, "u", 0, 4)]
    assert found == Overlap(
        documents={"h": 3, "i": 2},
        shared={"h": 1, "i": 2},
        by_training={"t": 2, "u": 3},
        examples=tuple(
            SharedDocument(
                held_out=name, held_out_document=number, training=of, training_document=at, tokens=tokens
            )
            for name, number, of, at, tokens in shared
        ),
    )
    assert told == [("reading t", 4, 4, "documents"), ("reading u", 2, 2, "documents")]


@pytest.mark.parametrize("at_once", [1, 2])
def test_documents_of_an_overlap_are_numbered_through_all_that_are_read_at_once(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngrams, "_DOCUMENTS_AT_ONCE", at_once)
    found = overlap_of(
        {"t": written(tmp_path / "t", C, B, [9], A)}, {"h": written(tmp_path / "h", D, D, A, A, B)}
    )
    assert found.shared == {"h": 3}
    pairs = {(one.held_out_document, one.training_document) for one in found.examples}
    assert pairs == {(2, 3), (3, 3), (4, 1)}


@pytest.mark.parametrize("cuts", [[], [1], [2], [3], [1, 3]])
def test_of_documents_of_one_key_each_is_paired_with_the_first_and_with_the_one_before_it(
    cuts: list[int],
) -> None:
    records = np.zeros(5, dtype=duplicate_candidates._KEY)
    records["key"], records["document"] = 7, [2, 5, 5, 7, 9]
    in_order = duplicate_candidates._candidates_of_one_key(iter(np.split(records, cuts)))
    at_once = duplicate_candidates._candidates_among(records)
    expected = {(5, 2), (7, 2), (7, 5), (9, 2), (9, 7)}
    for parts in (in_order, at_once):
        assert {pair for part in parts for pair in part.tolist()} == expected


def test_documents_of_one_key_are_told_apart_by_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "equal_keys", lambda some: np.full(some.lengths.size, 3, dtype=np.uint64))
    training, held = written(tmp_path / "t", C, A, B), written(tmp_path / "h", A, D, B, A)
    found = overlap_of({"t": training}, {"h": held})
    assert found.shared == {"h": 3} and found.by_training == {"t": 3}
    pairs = [(one.held_out_document, one.training_document) for one in found.examples]
    assert pairs == [(0, 1), (3, 1), (2, 2)]


def test_an_audit_of_text_is_counted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_audit, "_SHOWN", 2)
    one = written(tmp_path / "one", [1, 2, 1, 2, 1], [5, 6, 7], [8])  # 12 21 12 21, 56 67
    two = written(tmp_path / "two", [1, 2, 9])
    other = Ngrams.of_texts(iter([np.array([1, 2, 3]), np.array([6, 7])]), 2)  # 12 23 67
    of_pair = Ngrams.of_dataset(two, 2)
    told: list[tuple[object, ...]] = []
    found = audit_text(
        {"one": one, "two": two},
        {"other": other, "pair": of_pair},
        size=2,
        at_most_tokens=12,
        progress=lambda *about: told.append(about),
    )
    bins = [0] * 20
    assert found == TextAudit(
        is_exact=True,
        tokens_read=12,
        left_out=0,
        shared={
            "other": SharedNgrams(
                ngrams=3, is_whole=True, found=2, documents=3, examples=(("one", 0, 2), ("one", 1, 1))
            ),
            "pair": SharedNgrams(
                ngrams=2, is_whole=True, found=2, documents=2, examples=(("one", 0, 2), ("two", 0, 2))
            ),
        },
        repeated={
            "one": RepeatedNgrams(
                documents=3,
                tokens=9,
                histogram=(2, *bins[1:10], 1, *bins[11:]),
                share=2 / 6,
                most=((0, 0.5, 5),),
            ),
            "two": RepeatedNgrams(documents=1, tokens=3, histogram=(1, *bins[1:]), share=0.0, most=()),
        },
    )
    assert told == [("reading documents", 9, 12, "tokens"), ("reading documents", 12, 12, "tokens")]


def test_of_more_text_than_is_wanted_stretches_at_even_distances_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_audit, "_STRETCHES", 4)
    dataset = written(tmp_path / "pair", *([number] * 5 for number in range(40)))
    read = [
        document for some in text_audit._stretches(dataset, 0.25) for document in some.tokens[::5].tolist()
    ]
    assert read == [0, 1, 10, 11, 20, 21, 30, 31]  # the second of two and a half, to the even one
    told: list[tuple[object, ...]] = []
    found = audit_text(
        {"one": dataset}, {}, size=2, at_most_tokens=50, progress=lambda *about: told.append(about)
    )
    assert (found.is_exact, found.tokens_read) == (False, 40)
    assert told == [("reading documents", read, 50, "tokens") for read in (10, 20, 30, 40)]
    assert audit_text({"one": dataset}, {}, size=2, at_most_tokens=200).is_exact
    assert [some.first for some in text_audit._stretches(dataset, 0.01)] == [0]


def test_how_often_samples_are_taken_is_told_epoch_by_epoch() -> None:
    (found,) = sample_counts_of(Order([4], [1.0], 7), [4], samples=9)
    assert found == SampleCounts(samples=4, taken=9, epochs=(4, 4, 1), least=2, most=3)
    (whole,) = sample_counts_of(Order([4], [1.0], 7), [4], samples=8)
    assert whole == SampleCounts(samples=4, taken=8, epochs=(4, 4), least=2, most=2)
    assert order_audit._epochs(2005, 2) == (2,) * 1000 and order_audit._epochs(1999, 2) == (*(2,) * 999, 1)


def test_neighbours_are_read_in_stretches_from_the_first_to_the_last_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_audit, "COUNTED", 30)
    monkeypatch.setattr(order_audit, "STRETCH", 10)
    order, asked = Order([50], [1.0], 7), list[list[int]]()
    locate = order.locate_samples

    def watched(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked.append(samples.tolist())
        return locate(samples)

    monkeypatch.setattr(order, "locate_samples", watched)
    told: list[tuple[object, ...]] = []
    (some,) = neighbours_of(order, [50], samples=100, progress=lambda *about: told.append(about))
    assert asked == [[*range(10)], [*range(45, 55)], [*range(90, 100)]]
    assert (some.is_exact, some.looked_at) == (False, 27)
    assert told == [("checking the order", done, 30, "samples") for done in (10, 20, 30)]
    asked.clear()
    (exact,) = neighbours_of(order, [50], samples=30)
    assert asked == [[*range(30)]] and (exact.is_exact, exact.looked_at) == (True, 29)
    assert exact.near_by_chance == 0.0, "none of 50 lies within 1% of another"
    assert len(exact.correlations) == 32
    assert exact.correlations[29:] == (0.0, 0.0, 0.0), "no samples are that far apart"


def test_two_that_remove_duplicates_into_one_pair_never_write_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, refused = written(tmp_path / "one", A, B, A).prefix, list[str]()
    monkeypatch.setattr(storage, "_LOCK_TIMEOUT_S", 0.0)

    def again(*told: object) -> None:
        if not refused:
            with pytest.raises(StorageError) as busy:
                deduplicate([one], tmp_path / "new", likeness=EXACT)
            refused.append(busy.value.message)

    deduplicate([one], tmp_path / "new", likeness=EXACT, progress=again)
    assert f"which works in {tmp_path / 'new.dedup'}" in refused[0] and read(tmp_path / "new") == [A, B]
