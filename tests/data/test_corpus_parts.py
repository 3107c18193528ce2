"""A corpus tokenised in parts, as on several machines, and joined: the bytes of one machine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.data import corpus_parts
from bloomery.data.corpus_parts import CorpusPart, contents_sample, join_parts, record_path
from bloomery.data.pair_files import PARTS, bin_path
from bloomery.data.readers import SourceFile
from bloomery.data.sources import find_files
from bloomery.data.tokenize_corpus import piece_size, tokenize
from bloomery.data.tokenize_worker import Job, TextPiece
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import DataError

EOD = "<|endoftext|>"
TEXTS = [f"document {n}: {'to be or not to be, ' * (n % 7)}{n**3} é\n" for n in range(90)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines in one file, some of them bad, and files of one document."""
    directory = tmp_path_factory.mktemp("source")
    lines = [json.dumps({"text": text}) for text in TEXTS[:80]]
    for place in (5, 30, 60, 75):
        lines.insert(place, '{"text": ""}')
    (directory / "a.jsonl").write_text("\n".join(lines) + "\n")
    for number, text in enumerate(TEXTS[80:]):
        (directory / f"b{number}.txt").write_text(text)
    return directory


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, vocabulary=290, end_of_document=EOD).save(path)
    return Job(directory="", tokenizer=str(path), end_of_document=EOD, held_out_every=5)


def work(source: Path, out: Path, job: Job, part: CorpusPart | None = None) -> None:
    prefix = part.prefix(out) if part else out
    report = prefix.with_name(prefix.name + "-bad-documents.jsonl")
    files = find_files([str(source)]).files
    tokenize(files, out, job, workers=1, piece_bytes=1200, report=report, part=part)


def contents(prefix: Path) -> dict[str, bytes]:
    files = {ending: path(prefix).read_bytes() for ending, path in PARTS.items()}
    return {**files, "bad": prefix.with_name(prefix.name + "-bad-documents.jsonl").read_bytes()}


@pytest.mark.parametrize("count", [3, 14])
def test_all_parts_joined_are_what_one_machine_writes(
    source: Path, job: Job, tmp_path: Path, count: int
) -> None:
    """14 parts are more than there are pieces: some are empty pairs."""
    work(source, tmp_path / "whole", job)
    for number in range(count, 0, -1):  # whichever comes first
        work(source, tmp_path / "out", job, CorpusPart(number=number, count=count))
    joined = join_parts(tmp_path / "out")
    assert [pair.prefix.name for pair in joined] == ["out", "out-held-out"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    for path in PARTS.values():
        assert path(tmp_path / "out-held-out").read_bytes() == path(tmp_path / "whole-held-out").read_bytes()


def test_parts_of_copies_with_other_contents_of_the_same_size_are_refused(
    source: Path, job: Job, tmp_path: Path
) -> None:
    other = shutil.copytree(source, tmp_path / "other" / source.name)
    text = (other / "b3.txt").read_bytes()
    (other / "b3.txt").write_bytes(text[:-3] + b"XYZ")
    parts = [CorpusPart(number=number, count=2) for number in (1, 2)]
    for part, copy in zip(parts, (source, other), strict=True):
        work(copy, tmp_path / "out", job, part)
    with pytest.raises(DataError, match="out-part-2-of-2 was made of files with other contents than"):
        join_parts(tmp_path / "out")
    record = record_path(parts[0].prefix(tmp_path / "out"))
    older = json.loads(record.read_bytes())
    del older["sample"]
    record.write_text(json.dumps(older))
    assert len(join_parts(tmp_path / "out")) == 2, (
        "a part of an earlier version tells nothing of its contents"
    )


def test_a_sample_of_contents_reads_small_corpora_whole_and_a_bounded_amount_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, files = bytes(range(256)) * 80, list[SourceFile]()
    for number in range(3):
        files.append(SourceFile(key=f"{number}", path=tmp_path / f"{number}"))
        files[-1].path.write_bytes(content)

    def differs(place: int) -> bool:
        before = contents_sample(files)
        files[1].path.write_bytes(content[:place] + b"?" + content[place + 1 :])
        after = contents_sample(files)
        files[1].path.write_bytes(content)
        return after != before

    assert all(map(differs, (0, 10_000, len(content) - 1))), "it is read whole"
    monkeypatch.setattr(corpus_parts, "_SAMPLES", 6)
    monkeypatch.setattr(corpus_parts, "_SAMPLE_BYTES", 100)
    # Samples begin at multiples of 61,440 / 6 = 10,240 bytes of all files: in the second one at 0 and 10,240.
    assert list(map(differs, (0, 99, 100, 10_239, 10_240, 10_340))) == [True, True, False, False, True, False]


def test_damage_in_a_part_is_named_and_not_sealed_anew(source: Path, job: Job, tmp_path: Path) -> None:
    parts = [CorpusPart(number=number, count=2) for number in (1, 2)]
    for part in parts:
        work(source, tmp_path / "out", job, part)
    damaged = bin_path(parts[1].prefix(tmp_path / "out"))
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"out-part-2-of-2.bin is not what was written"):
        join_parts(tmp_path / "out")
    assert not bin_path(tmp_path / "out").exists()


def test_parts_that_are_missing_or_of_something_else_are_refused(
    source: Path, job: Job, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="holds no parts of out"):
        join_parts(out)
    work(source, out, job, CorpusPart(number=2, count=3))
    with pytest.raises(DataError, match=r"not finished: 1/3, 3/3"):
        join_parts(out)
    copy = shutil.copytree(source, tmp_path / "copy")
    work(copy, out, job, CorpusPart(number=1, count=3))  # other paths and times, equal files
    work(copy, out, job, CorpusPart(number=3, count=3))
    join_parts(out)
    (copy / "b0.txt").write_text("another")
    work(copy, out, job, CorpusPart(number=3, count=3))
    with pytest.raises(DataError, match=r"out-part-3-of-3 was made of other text"):
        join_parts(out)
    work(source, out, replace(job, fast=False), CorpusPart(number=3, count=3))
    with pytest.raises(DataError, match=r"another engine than out-part-1-of-3: tokenizers"):
        join_parts(out)
    work(source, out, job, CorpusPart(number=1, count=2))
    with pytest.raises(DataError, match=r"parts of 2 and of 3"):
        join_parts(out)


def test_a_part_that_is_made_anew_has_no_record_until_it_is_whole(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = CorpusPart(number=1, count=2)
    work(source, tmp_path / "out", job, part)

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bloomery.data.tokenize_corpus._put_in_place", broken)
    with pytest.raises(KeyboardInterrupt):
        work(source, tmp_path / "out", job, part)
    assert not record_path(part.prefix(tmp_path / "out")).exists()


@pytest.mark.parametrize("count", [1, 2, 7, 16, 300])
def test_every_piece_is_in_one_part_and_parts_are_alike_in_size(count: int) -> None:
    pieces = [TextPiece(number=n, files=(), size_bytes=100 + n % 3) for n in range(200)]
    parts = [CorpusPart(number=number, count=count).of_pieces(pieces) for number in range(1, count + 1)]
    assert [piece for part in parts for piece in part] == pieces
    sizes = [sum(piece.size_bytes for piece in part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * 102


@pytest.mark.parametrize("wrong", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2", "1/999999999"])
def test_what_is_no_part_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="no part such as 3/16"):
        CorpusPart.parse(wrong)


def test_pieces_grow_with_the_corpus() -> None:
    assert piece_size(10**9) == 32 << 20
    for total in (10**12, 4 * 10**12, 10**14):
        assert total / piece_size(total) <= 4096


def test_a_list_of_bad_documents_does_not_outlive_those_of_its_parts(
    source: Path, job: Job, tmp_path: Path
) -> None:
    part = CorpusPart(number=1, count=1)
    work(source, tmp_path / "out", job, part)
    join_parts(tmp_path / "out")
    joined = tmp_path / "out-bad-documents.jsonl"
    assert joined.read_text()
    part.prefix(joined.with_name("out")).with_name("out-part-1-of-1-bad-documents.jsonl").unlink()
    join_parts(tmp_path / "out")
    assert not joined.exists()
