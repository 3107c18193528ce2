"""Preparing: made once, found again, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.config.data import DataSection, DatasetSection
from bloomery.data import sources
from bloomery.data.documents import Document
from bloomery.data.indexed import IndexedDataset
from bloomery.data.prepare import prepare, prepare_after_first, prepared_of_run
from bloomery.data.prepare_build import watched_texts
from bloomery.data.sources import find_files, is_held_out
from bloomery.data.tokenizer import load_tokenizer, train_tokenizer
from bloomery.errors import DataError, OriginGone, StorageError

EOD = "<|endoftext|>"
TEXTS = [f"document {number}: the quick brown fox jumps {number * 7} times\n" * 4 for number in range(40)]


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number:02}.txt").write_text(text)
    return DataSection(
        sources=(str(tmp_path / "text"),), sequence_length=16, tokenizer_vocabulary=280, held_out_every=4
    )


def contents(directory: Path) -> dict[str, bytes]:
    """The files, but for the record of hashes, which holds times."""
    files = [path for path in directory.iterdir() if path.is_file() and path.name != "source-hashes.json"]
    return {path.name: path.read_bytes() for path in files}


def test_every_document_is_in_exactly_one_dataset_whole_and_in_order(
    data: DataSection, tmp_path: Path
) -> None:
    prepared = prepare(data, tmp_path / "out")
    tokenizer = load_tokenizer(prepared.tokenizer_path, end_of_document=EOD)
    for dataset, wanted in ((prepared.train[0], False), (prepared.held_out[0], True)):
        indexed = IndexedDataset(dataset.prefix)
        texts = [t for n, t in enumerate(TEXTS) if is_held_out(f"{n:02}.txt", one_in=4) == wanted]
        documents = [indexed.document(number).tolist() for number in range(indexed.document_count)]
        assert [tokenizer.decode(document) for document in documents] == [text + EOD for text in texts]
        assert dataset.text_bytes == sum(len(text.encode()) for text in texts)
        assert (dataset.documents, dataset.tokens) == (len(texts), indexed.token_count)
    assert prepared.vocabulary_size == 280 and prepared.end_of_document_id == tokenizer.eod


def test_the_tokenizer_has_never_seen_a_held_out_document(data: DataSection, tmp_path: Path) -> None:
    before = contents(tmp_path / "text")
    prepare(data, tmp_path / "one")
    for name in before:
        if is_held_out(name, one_in=4):
            (tmp_path / "text" / name).write_text("zyxw vuts " * 200)
    prepare(data, tmp_path / "two")
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one["tokenizer.json"] == two["tokenizer.json"] and one["train.bin"] == two["train.bin"]
    assert one["held-out.bin"] != two["held-out.bin"]


def test_equal_text_and_settings_are_found_again_and_others_are_not(
    data: DataSection, tmp_path: Path
) -> None:
    first = prepare(data, tmp_path / "out")
    assert not first.reused
    again = prepare(replace(data, sequence_length=8, bad_documents="fail"), tmp_path / "out")
    assert again == replace(first, reused=True)
    for changed in (replace(data, held_out_every=3), replace(data, tokenizer_vocabulary=270)):
        other = prepare(changed, tmp_path / "out")
        assert not other.reused and other.fingerprint != first.fingerprint
    (tmp_path / "text" / "00.txt").write_text(TEXTS[0].upper())  # same name, same size
    assert not prepare(replace(data, tokenizer_vocabulary=270), tmp_path / "out").reused


def test_each_content_is_read_once_whatever_the_number_of_ranks_and_starts(
    data: DataSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [file.path for file in find_files(data.sources).files]
    for path in files:
        os.utime(path, (1e9, 1e9))  # changed long ago
    read: list[Path] = []
    hashed = sources._hashed

    def watched(path: Path) -> tuple[str, int]:
        read.append(path)
        return hashed(path)

    monkeypatch.setattr(sources, "_hashed", watched)
    first = prepare(data, tmp_path / "data")
    assert sorted(read) == sorted(files)
    read.clear()
    assert prepare(data, tmp_path / "data") == replace(first, reused=True) and read == []
    content = files[0].read_bytes()
    files[0].write_bytes(content[::-1])
    os.utime(files[0], (1e9, 1e9))  # as a copy that keeps times: the size is the same too
    assert prepare(data, tmp_path / "data").fingerprint != first.fingerprint and read == files[:1]
    read.clear()
    files[0].write_bytes(content)  # changed just now: it may be changed again within the same tick
    for _ in range(2):
        assert prepare(data, tmp_path / "data").fingerprint == first.fingerprint
    assert read == 2 * files[:1]


@pytest.mark.parametrize("record", ["", "[]", "{", '{"a": 1}'])
def test_a_record_of_hashes_that_is_damaged_is_made_again(
    data: DataSection, tmp_path: Path, record: str
) -> None:
    first = prepare(data, tmp_path / "data")
    (tmp_path / "data" / "source-hashes.json").write_text(record)
    assert prepare(data, tmp_path / "data").fingerprint == first.fingerprint


@pytest.mark.parametrize("harm", ["no manifest", "torn manifest", "short file", "lost file"])
def test_half_a_result_is_never_taken_for_a_whole_one(data: DataSection, tmp_path: Path, harm: str) -> None:
    prepare(data, tmp_path / "out")
    whole = contents(tmp_path / "out")
    manifest, train = tmp_path / "out" / "prepared.json", tmp_path / "out" / "train.bin"
    if harm == "no manifest":
        manifest.unlink()
    elif harm == "torn manifest":
        os.truncate(manifest, 100)
    elif harm == "short file":
        os.truncate(train, 10)
    else:
        train.unlink()
    (tmp_path / "out" / "building").mkdir()  # what a killed process leaves
    (tmp_path / "out" / "building" / "train.bin.partial").write_bytes(b"half")
    assert not prepare(data, tmp_path / "out").reused
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("change", ["lost file", "bad documents"])
def test_what_a_start_made_that_was_killed_at_its_end_is_made_anew_where_it_does_not_do_any_more(
    data: DataSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    (tmp_path / "text" / "empty.txt").write_text("")
    train_tokenizer(["a"], vocabulary=257, end_of_document=EOD).save(tmp_path / "small.json")
    data = replace(data, tokenizer=str(tmp_path / "small.json"))
    with monkeypatch.context() as killed:
        killed.setattr("bloomery.data.prepare.shutil.rmtree", lambda path, **_: None)
        prepare(data, tmp_path / "out")
    assert (tmp_path / "out" / "building" / "prepared.json").exists()
    if change == "bad documents":
        with pytest.raises(DataError, match=r"empty\.txt: the document is empty"):
            prepare(replace(data, bad_documents="fail"), tmp_path / "out")
    else:
        whole = contents(tmp_path / "out")
        (tmp_path / "out" / "train.bin").unlink()
        assert not prepare(data, tmp_path / "out").reused
        assert contents(tmp_path / "out") == whole


KILLED = """
import os, signal, sys
from pathlib import Path
from bloomery.config.data import DataSection
from bloomery.data import tokenize_corpus, prepare, prepare_build

source, out, moment = sys.argv[1:]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class Watch(tokenize_corpus._Watch):
    pieces = 0
    def see(self, event):
        self.pieces += isinstance(event, tokenize_corpus.PieceDone)
        if self.pieces == 4:
            die()

whole = tokenize_corpus.tokenize
def in_pieces(*arguments, **settings):
    return whole(*arguments, **settings | {"piece_bytes": 400, "workers": 1})

prepare_build.tokenize = in_pieces
if moment == "tokenising":
    tokenize_corpus._Watch = Watch
if moment == "moving":
    move, left = Path.rename, 2
    def rename(self, target):
        global left
        if Path(target).parent == Path(out) and Path(target).suffix in (".bin", ".idx"):
            left -= 1
            if not left:
                die()
        return move(self, target)
    Path.rename = rename
data = DataSection(sources=(source,), sequence_length=16, tokenizer_vocabulary=280, held_out_every=4)
prepare.prepare(data, Path(out))
"""


@pytest.mark.parametrize("moment", ["tokenising", "moving"])
def test_after_a_kill_the_next_start_goes_on_with_what_was_made(
    data: DataSection, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.data import tokenize_corpus

    prepare(data, tmp_path / "unbroken")
    out, kept = tmp_path / "out", []
    command = [sys.executable, "-c", KILLED, str(tmp_path / "text"), str(out), moment]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=paths, check=False).returncode == -signal.SIGKILL
    assert not (out / "prepared.json").exists()

    def counted(*arguments: Any, **settings: Any) -> tokenize_corpus.TokenizeSummary:
        done = tokenize_corpus.tokenize(*arguments, **settings | {"piece_bytes": 400, "workers": 1})
        kept.append((done.pieces_kept, done.pieces))
        return done

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the tokenizer was there")

    monkeypatch.setattr("bloomery.data.prepare_build.tokenize", counted)
    monkeypatch.setattr("bloomery.data.prepare_build.train_tokenizer", never)
    assert not prepare(data, out).reused
    assert contents(out) == contents(tmp_path / "unbroken")
    assert [count for count, whole in kept if count < whole] == ([4] if moment == "tokenising" else [])
    assert not (out / "building").exists()


def test_a_second_process_waits_and_finds_the_result(data: DataSection, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from bloomery.config.data import DataSection\nfrom bloomery.data.prepare import prepare\n"
        "data = DataSection(sources=(sys.argv[1],), sequence_length=16, tokenizer_vocabulary=280)\n"
        "print(prepare(data, Path(sys.argv[2])).reused); assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "text"), str(tmp_path / "out")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0].strip() for process in running)
    assert [process.returncode for process in running] == [0, 0] and said in (["False", "True"],)


def test_bad_documents_are_reported_beside_the_data_and_in_a_note(data: DataSection, tmp_path: Path) -> None:
    (tmp_path / "text" / "bad.txt").write_bytes(b"\xff")
    prepared = prepare(data, tmp_path / "out")
    (note,) = prepared.notes
    assert "1 document skipped: 1 not UTF-8" in note and "bad-documents.jsonl" in note
    (entry,) = (tmp_path / "out" / "bad-documents.jsonl").read_text().splitlines()
    assert json.loads(entry)["file"].endswith("bad.txt") and json.loads(entry)["line"] == 1
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match=r"bad\.txt:1: not UTF-8"):
        prepare(replace(data, bad_documents="fail"), tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_too_few_documents_to_hold_one_out_is_said_not_failed(data: DataSection, tmp_path: Path) -> None:
    one = replace(data, sources=(str(tmp_path / "text" / "00.txt"),), held_out_every=10**9)
    prepared = prepare(one, tmp_path / "out")
    assert prepared.held_out == () and "No document is held out" in prepared.notes[0]
    assert prepare(replace(one, held_out_every=0), tmp_path / "out").notes == ()


def test_a_corpus_that_cannot_train_is_refused(data: DataSection, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No document is left to train on \(40 held out, 0 bad\)"):
        prepare(replace(data, held_out_every=1), tmp_path / "out")
    with pytest.raises(DataError, match=r"holds [\d,]+ tokens, and one sample takes 100,001"):
        prepare(replace(data, sequence_length=100_000), tmp_path / "out")
    with pytest.raises(DataError, match="No data is given"):
        prepare(replace(data, sources=()), tmp_path / "out")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"No document is left to train on \(0 held out, 1 bad\)"):
        prepare(replace(data, sources=(str(tmp_path / "empty.txt"),)), tmp_path / "new")


def test_a_place_that_cannot_be_written_is_named(data: DataSection, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file" / "out", Path("/proc/bloomery")):
        with pytest.raises(StorageError, match=f"Writing data failed at {place}") as refused:
            prepare(data, place)
        assert refused.value.remedy


def test_tokenised_datasets_are_taken_as_they_are(data: DataSection, tmp_path: Path) -> None:
    made = prepare(data, tmp_path / "out")
    given = replace(
        data,
        sources=(),
        tokenizer=str(made.tokenizer_path),
        datasets=(DatasetSection(name="own", path=str(tmp_path / "out" / "train"), weight=2.0),),
        held_out_datasets=(DatasetSection(name="kept", path=str(tmp_path / "out" / "held-out")),),
    )
    prepared = prepare(given, tmp_path / "unused")
    assert not (tmp_path / "unused").exists()
    (own,), (kept,) = prepared.train, prepared.held_out
    assert (own.name, own.weight, own.tokens) == ("own", 2.0, made.train[0].tokens)
    assert (kept.name, kept.documents) == ("kept", made.held_out[0].documents)
    assert not prepare(given, tmp_path).notes
    assert prepare(replace(given, held_out_datasets=()), tmp_path).notes
    assert not prepare(replace(given, held_out_datasets=(), split=(9, 1)), tmp_path).notes
    with pytest.raises(DataError, match=r"does not say whose"):
        prepare(replace(given, tokenizer="train"), tmp_path)


def test_progress_tells_every_stage_to_its_end(data: DataSection, tmp_path: Path) -> None:
    told: dict[str, tuple[int, int, str]] = {}

    def watch(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        assert done >= told.get(stage, (0, 0, ""))[0]
        told[stage] = (done, total, unit)

    prepare(data, tmp_path / "out", progress=watch)
    size = sum(len(text) for text in TEXTS)
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.bin"))
    assert told == {
        "reading": (40, 40, "files"),
        "training the tokenizer": (size, size, "bytes"),
        "tokenising": (size, size, "bytes"),
        "joining and sealing": (written, written, "bytes"),
    }


def test_training_a_tokenizer_tells_the_bytes_of_text_it_has_taken() -> None:
    documents = [Document(text=text, place="here", size_bytes=len(text)) for text in ("one", "three")]
    told: list[int] = []
    texts = watched_texts(
        documents, total_bytes=7, progress=lambda what, done, total, unit: told.append(done)
    )
    assert list(texts) == ["one", "three"]
    assert told == [3, 7, 7]  # bad documents may make the total smaller than it was thought to be


def test_what_a_model_was_trained_on_stays_when_the_sources_give_other_text(
    data: DataSection, tmp_path: Path
) -> None:
    first = prepare(data, tmp_path / "out")
    before = contents(tmp_path / "out")
    assert prepare(data, tmp_path / "out", is_trained_on=True) == replace(first, reused=True)
    (tmp_path / "text" / "00.txt").write_text("zyxw vuts " * 200)
    with pytest.raises(DataError, match="was trained on other text") as refused:
        prepare(data, tmp_path / "out", is_trained_on=True)
    assert "Bring the old files back" in refused.value.remedy
    assert prepared_of_run(data, tmp_path / "out") == replace(first, reused=True)
    assert contents(tmp_path / "out") == before
    other = prepare(data, tmp_path / "out")
    assert other.fingerprint != first.fingerprint, "before there is a model, text may change"


@pytest.mark.parametrize("gone", ["text", "files", "tokenizer"])
def test_a_run_goes_on_with_the_data_that_it_was_trained_on_where_their_origin_is_gone(
    data: DataSection, tmp_path: Path, gone: str
) -> None:
    if gone == "tokenizer":
        prepare(data, tmp_path / "first")
        (tmp_path / "first" / "tokenizer.json").rename(tmp_path / "mine.json")
        data = replace(data, tokenizer=str(tmp_path / "mine.json"))
    first = prepare(data, tmp_path / "out")
    if gone == "tokenizer":
        (tmp_path / "mine.json").unlink()
    else:
        shutil.rmtree(tmp_path / "text")
    if gone == "files":
        (tmp_path / "text").mkdir()
    with pytest.raises(OriginGone):  # without a model, what was asked for may be another text
        prepare(data, tmp_path / "out")
    kept = prepare(data, tmp_path / "out", is_trained_on=True)
    assert kept == replace(first, reused=True, notes=kept.notes)
    *notes, told = kept.notes
    assert notes == list(first.notes) and f"goes on with the data in {tmp_path / 'out'}" in told
    assert prepare_after_first(data, tmp_path / "out") == replace(first, reused=True), "on the other ranks"
    (tmp_path / "out" / "train.bin").unlink()
    with pytest.raises(OriginGone):
        prepare(data, tmp_path / "out", is_trained_on=True)


def test_the_text_of_a_run_that_was_restored_is_tokenised_again_where_it_is_the_same(
    data: DataSection, tmp_path: Path
) -> None:
    first = prepare(data, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "train.bin").unlink()  # a backup may have the tokenizer and the record alone
    assert prepared_of_run(data, tmp_path / "out") == replace(first, reused=False)
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "train.bin").unlink()
    (tmp_path / "text" / "00.txt").write_text("zyxw vuts " * 200)
    with pytest.raises(DataError, match="was trained on other text"):
        prepared_of_run(data, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before["tokenizer.json"]
