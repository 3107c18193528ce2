"""Duplicates are found, against comparing every document with every other one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bloomery.cli.data import run
from bloomery.data import duplicate_candidates, duplicates, ngrams, overlap
from bloomery.data.duplicates import Deduplicated, SimilarityThreshold, deduplicate
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.ngrams import HashSet, documents_in_turn, ngram_hashes
from bloomery.data.overlap import overlap_of
from bloomery.data.pair_files import bin_path
from bloomery.data.pairs import verify_pair
from bloomery.data.seal import SealFacts
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import DataError, UsageError

EOD = 0


def written(prefix: Path, texts: list[list[int]]) -> IndexedDataset:
    with IndexedWriter(prefix, dtype="<u2", seal=SealFacts(vocabulary_size=1000)) as writer:
        for text in texts:
            writer.add_document(text)
    return IndexedDataset(prefix)


def read(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(dataset.document_count)]


def text(draw: np.random.Generator, length: int) -> list[int]:
    return [*draw.integers(1, 1000, length).tolist(), EOD]


def altered(draw: np.random.Generator, tokens: list[int], count: int) -> list[int]:
    changed = list(tokens)
    for place in draw.choice(len(tokens) - 1, count, replace=False).tolist():
        changed[place] = int(draw.integers(1, 1000))
    return changed


def similarity(ours: list[int], theirs: list[int], size: int = 5) -> float:
    grams = [{tuple(t[i : i + size]) for i in range(max(len(t) - size + 1, 1))} for t in (ours, theirs)]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Sixty texts; twenty of them again, altered in no, few or most places; and very short ones."""
    draw = np.random.default_rng(1)
    originals = [text(draw, int(length)) for length in draw.integers(60, 400, 60)]
    again = [
        altered(draw, originals[n], count) for n, count in zip(range(20), [0, 1, 30, 2] * 5, strict=True)
    ]
    short = [[5, EOD], [EOD], [5, EOD], [7, 8, EOD]]
    return [*originals, *again, *short]


def test_of_documents_that_are_alike_the_first_is_kept(texts: list[list[int]], tmp_path: Path) -> None:
    written(tmp_path / "pair", texts)
    done = deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold())
    kept: list[list[int]] = []
    removed = []
    for number, tokens in enumerate(texts):
        if any(similarity(tokens, other) >= 0.8 for other in kept):
            removed.append(number)
        else:
            kept.append(tokens)
    listed = [json.loads(line) for line in (tmp_path / "new-duplicates.jsonl").read_text().splitlines()]
    assert read(tmp_path / "new") == kept
    assert [entry["document"] for entry in listed] == removed and len(removed) == 15
    for entry in listed:
        ours, theirs = texts[entry["document"]], texts[entry["like_document"]]
        expected = 1.0 if ours == theirs else similarity(ours, theirs)
        assert entry["alike"] == pytest.approx(expected, abs=1e-4)
    tokens = [sum(map(len, part)) for part in (kept, [texts[number] for number in removed])]
    assert done == Deduplicated(
        documents=len(kept), tokens=tokens[0], removed_equal=6, removed_near=9, removed_tokens=tokens[1]
    )
    assert verify_pair(tmp_path / "new").findings == ()
    assert not (tmp_path / "new.dedup").exists()


def test_a_document_that_is_like_a_removed_one_alone_is_kept(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    first = text(draw, 200)
    second = altered(draw, first, 3)
    third = altered(draw, second, 3)
    assert similarity(first, third) < 0.8 < min(similarity(first, second), similarity(second, third))
    written(tmp_path / "pair", [first, second, third])
    deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold())
    assert read(tmp_path / "new") == [first, third]


def test_equal_documents_alone_go_and_those_of_another_pair_too(
    texts: list[list[int]], tmp_path: Path
) -> None:
    pairs = [tmp_path / name for name in ("held", "a", "b")]
    for prefix, own in zip(pairs, (texts[10:14], texts[:40], texts[40:]), strict=True):
        written(prefix, own)
    deduplicate(pairs[1:], tmp_path / "new", likeness=SimilarityThreshold(threshold=1.0), against=pairs[:1])
    kept: list[list[int]] = []
    for tokens in texts:
        if tokens not in kept and tokens not in texts[10:14]:
            kept.append(tokens)
    assert read(tmp_path / "new") == kept


def test_a_hash_that_is_equal_by_chance_removes_nothing(
    texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "equal_keys", lambda some: np.zeros(some.lengths.size, dtype=np.uint64))
    written(tmp_path / "pair", texts[:20])
    done = deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold(threshold=1.0))
    assert done.removed_equal == 0 and read(tmp_path / "new") == texts[:20]


def test_the_candidates_of_many_equal_documents_are_no_square(tmp_path: Path) -> None:
    written(tmp_path / "pair", [[3, 4, EOD]] * 3000)
    calls, compare = 0, duplicates._similarity

    def counted(*arguments: object) -> float:
        nonlocal calls
        calls += 1
        return compare(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(duplicates, "_similarity", counted)
        done = deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold())
    assert (done.documents, done.removed_equal) == (1, 2999) and calls == 2999


def test_no_more_keys_are_sorted_at_once_than_memory_has_room_for(
    texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the documents are equal, as a text that a whole corpus repeats: 16 bytes each have one key."""
    draw = np.random.default_rng(2)
    several = [[9, 9, EOD], *texts, *[[9, 9, EOD]] * 100]
    shuffled = [several[number] for number in draw.permutation(len(several))]
    written(tmp_path / "pair", shuffled)
    deduplicate([tmp_path / "pair"], tmp_path / "expected", likeness=SimilarityThreshold())
    sorted_at_once, read_at_once = [0], [0]
    sort, from_file = np.lexsort, np.fromfile

    def sorting(keys: tuple[np.ndarray, ...]) -> np.ndarray:
        sorted_at_once.append(len(keys[0]))
        return sort(keys)

    def reading(*given, **named) -> np.ndarray:
        found = from_file(*given, **named)
        if found.dtype in (duplicate_candidates._KEY, duplicate_candidates._CANDIDATE):
            read_at_once.append(found.size)
        return found

    at_once = 40
    monkeypatch.setattr(duplicate_candidates, "_SORTED_AT_ONCE", at_once)
    monkeypatch.setattr(duplicate_candidates, "_FILES", 2)
    monkeypatch.setattr(duplicate_candidates, "_FILE_BITS", 1)
    monkeypatch.setattr(np, "lexsort", sorting)
    monkeypatch.setattr(np, "fromfile", reading)
    deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold())
    assert read(tmp_path / "new") == read(tmp_path / "expected")
    assert max(sorted_at_once) <= at_once and max(read_at_once) <= at_once


def test_damage_is_refused_and_the_older_output_stays(texts: list[list[int]], tmp_path: Path) -> None:
    written(tmp_path / "pair", texts)
    deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold())
    before = read(tmp_path / "new")
    content = bytearray(bin_path(tmp_path / "pair").read_bytes())
    content[5000] ^= 1
    bin_path(tmp_path / "pair").write_bytes(content)
    with pytest.raises(DataError, match="is not what was written"):
        deduplicate([tmp_path / "pair"], tmp_path / "new", likeness=SimilarityThreshold())
    assert read(tmp_path / "new") == before
    with pytest.raises(DataError, match="one of the pairs to read"):
        deduplicate([tmp_path / "pair"], tmp_path / "pair", likeness=SimilarityThreshold())


def test_ngrams_stay_within_their_documents() -> None:
    texts = [[1, 2, 3, 4], [2, 3, 4], [], [9], [0, 0, 0], [0, 0], [1, 2, 3]]
    lengths = np.array([len(tokens) for tokens in texts])
    hashes, counts = ngram_hashes(np.array([t for tokens in texts for t in tokens], dtype="<u2"), lengths, 3)
    assert counts.tolist() == [2, 1, 0, 1, 1, 1, 1]
    one, two, again, nine, zeros, fewer, same = hashes.tolist()
    assert two == again and one == same
    assert len({one, two, nine, zeros, fewer}) == 5
    some = HashSet(np.array([one, nine], dtype=np.uint64))
    assert some.holds(hashes).tolist() == [True, False, False, True, False, False, True]
    assert not HashSet(np.empty(0, np.uint64)).holds(hashes).any()


@pytest.mark.parametrize("at_once", [(1 << 13, 1 << 20), (7, 500), (3, 1)])
def test_documents_come_in_turn_whatever_their_sizes(
    texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: tuple[int, int]
) -> None:
    monkeypatch.setattr(ngrams, "_DOCUMENTS_AT_ONCE", at_once[0])
    monkeypatch.setattr(ngrams, "_TOKENS_AT_ONCE", at_once[1])
    monkeypatch.setattr(ngrams, "HASHED_TOKENS", 300)
    dataset = written(tmp_path / "pair", texts)
    found = []
    for some in documents_in_turn(dataset, begin=3):
        assert some.first == 3 + len(found)
        found += [
            some.tokens[start : start + length].tolist()
            for start, length in zip(some.starts.tolist(), some.lengths.tolist(), strict=True)
        ]
    assert all(t[: len(f)] == f and len(f) in (len(t), 300) for f, t in zip(found, texts[3:], strict=True))


def test_equal_documents_of_both_sides_are_told(texts: list[list[int]], tmp_path: Path) -> None:
    training = {"a": written(tmp_path / "a", texts[:50]), "b": written(tmp_path / "b", texts[30:])}
    held_out = {"h": written(tmp_path / "h", [texts[7], [1, 2, 3], texts[35], texts[35]])}
    found = overlap_of(training, held_out)
    assert found.documents == {"h": 4} and found.shared == {"h": 3}
    assert found.by_training == {"a": 3, "b": 2}
    pairs = {(each.held_out_document, each.training, each.training_document) for each in found.examples}
    assert pairs == {(0, "a", 7), (2, "a", 35), (3, "a", 35), (2, "b", 5), (3, "b", 5)}


def test_documents_that_both_sides_repeat_are_compared_once_and_not_each_with_each(tmp_path: Path) -> None:
    training = {"a": written(tmp_path / "a", [[3, 4, EOD]] * 50)}
    held_out = {"h": written(tmp_path / "h", [[3, 4, EOD]] * 40)}
    compared = documents_read = 0

    def counted(*arguments: np.ndarray) -> bool:
        nonlocal compared
        compared += 1
        return duplicates.are_equal(*arguments)

    def reading(*given) -> np.ndarray:
        nonlocal documents_read
        documents_read += 1
        return ngrams.tokens_of_document(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(overlap, "are_equal", counted)
        patched.setattr(overlap, "tokens_of_document", reading)
        found = overlap_of(training, held_out)
    assert found.shared == {"h": 40} and compared == 40
    assert documents_read == 80, "of the training text's 50 the first alone is looked at"


def test_the_command_says_what_it_left_out(
    texts: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "pair", texts)
    assert run(["dedup", str(tmp_path / "pair"), "--to", str(tmp_path / "new"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["removed_equal"], facts["removed_near"]) == (6, 9)
    with pytest.raises(UsageError, match="find no near duplicates"):
        run(["dedup", str(tmp_path / "pair"), "--to", str(tmp_path / "new"), "--threshold", "3"])


RECIPE = """
[run]
name = "shared"
[model]
layers = 1
hidden = 32
heads = 2
[data]
sequence_length = 8
tokenizer = "{place}/tokenizer.json"
split = [8, 2]
[[data.datasets]]
name = "own"
path = "{place}/own"
[train]
samples = 100
global_batch = 10
[optim]
name = "adamw"
learning_rate = 1e-3
[schedule]
warmup = 10
"""


@pytest.fixture
def recipe(texts: list[list[int]], tmp_path: Path) -> Path:
    """Of the 84 documents the last 17 are held out; some of them equal earlier ones."""
    train_tokenizer(["some text"], vocabulary=270, end_of_document="<|endoftext|>").save(
        tmp_path / "tokenizer.json"
    )
    written(tmp_path / "own", [[token % 270 for token in tokens] for tokens in texts])
    path = tmp_path / "shared.toml"
    path.write_text(RECIPE.format(place=tmp_path))
    return path


def test_the_report_tells_held_out_documents_that_are_trained_on(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(recipe), "--overlap", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    dataset = IndexedDataset(recipe.parent / "own")
    documents = [dataset.document(number).tolist() for number in range(dataset.document_count)]
    cut = round(len(documents) * 0.8)
    assert found["documents"] == {"own": len(documents) - cut}
    assert found["total"] == sum(document in documents[:cut] for document in documents[cut:]) > 0
    assert run(["report", str(recipe), "--overlap"]) == 1
    assert "are in the training text too" in capsys.readouterr().out


def test_prompts_with_answers_are_refused_for_they_would_be_joined(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "pairs", dtype="<u2", seal=SealFacts(vocabulary_size=1000)) as writer:
        writer.add_documents(np.array([5, 6, 7, EOD]), np.array([4]), prompts=np.array([2]))
    written(tmp_path / "texts", [[1, 2, EOD]])
    for prefixes in ([tmp_path / "pairs"], [tmp_path / "texts", tmp_path / "pairs"]):
        with pytest.raises(DataError, match="2 sequences in 1 documents"):
            deduplicate(prefixes, tmp_path / "out", likeness=SimilarityThreshold(threshold=1.0, ngram=5))
    assert not list(tmp_path.glob("out*"))
    deduplicate(
        [tmp_path / "texts"],
        tmp_path / "out",
        likeness=SimilarityThreshold(threshold=1.0, ngram=5),
        against=[tmp_path / "pairs"],
    )
    assert read(tmp_path / "out") == [[1, 2, EOD]]


def test_a_disk_without_space_is_told_and_nothing_is_left(texts: list[list[int]], tmp_path: Path) -> None:
    written(tmp_path / "all", [texts[0]] * 100)  # equal ones share files of keys, written when these close
    before = sorted(tmp_path.iterdir())
    words = f"{sys.executable} -m bloomery data dedup {tmp_path / 'all'} --to {tmp_path / 'new'}"
    ended = subprocess.run(["bash", "-c", f"ulimit -f 1; {words}"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "File too large" in ended.stderr and "Traceback" not in ended.stderr
    assert sorted(tmp_path.iterdir()) == before
