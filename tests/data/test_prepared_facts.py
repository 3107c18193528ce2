"""What prepared data depends on, what its manifest says, and what is passed on to tokenising."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from bloomery.config.data import DataSection, DatasetSection
from bloomery.data import prepare as preparing
from bloomery.data import prepare_build
from bloomery.data.documents import BadDocuments
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import bin_path
from bloomery.data.prepare import Prepared, PreparedDataset, prepare, prepare_run
from bloomery.data.prepare_build import build_in
from bloomery.data.sources import documents_of, find_files
from bloomery.data.streaming import CacheLocation
from bloomery.data.tokenize_corpus import Pair, TokenizeSummary
from bloomery.data.tokenize_worker import Job
from bloomery.data.tokenizer import train_tokenizer
from bloomery.data.tokenizer_files import tokenizer_in
from bloomery.errors import DataError, OriginGone
from bloomery.events.records import ignore_progress

EOD = "<|endoftext|>"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "given" / "tokenizer.json"
    train_tokenizer(["a"], vocabulary=257, end_of_document=EOD).save(path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"a {n} é", "q": "p"}) + "\n" for n in range(30))
    )
    (tmp_path / "text" / "b.jsonl").write_text('{"text": "last", "q": "p"}\n{"text": ""}\n')
    return tmp_path / "text"


def wanted_of(data: DataSection, directory: Path) -> dict[str, Any]:
    return preparing._wanted(data, find_files(data.sources), directory, progress=lambda *_: None)


def test_prepared_data_depends_on_the_text_and_on_each_setting_that_changes_it(
    text: Path, tokenizer: Path, tmp_path: Path
) -> None:
    plain = DataSection(sources=(str(text),), sequence_length=8, held_out_every=7)
    contents = [(name, (text / name).read_bytes()) for name in ("a.jsonl", "b.jsonl")]
    lines = "".join(f"{name}\n{xxhash.xxh3_128_hexdigest(content)}\n" for name, content in contents)
    usual = {
        "sources": xxhash.xxh3_128_hexdigest(lines.encode()),
        "source_bytes": sum(len(content) for _, content in contents),
        "text_field": "text",
        "separator": "",
        "held_out_every": 7,
        "end_of_document_token": EOD,
        "tokenizer": "train",
        "tokenizer_vocabulary": 8192,
        "tokenizer_split": "text",
    }
    assert wanted_of(plain, tmp_path) == usual
    for more in (
        {"text_field": "q"},
        {"separator": "%%"},
        {"held_out_every": 5},
        {"longest_line_mib": 9},
        {"prompt_field": "q"},
        {"end_of_document_token": "<end>"},
        {"tokenizer_vocabulary": 300},
        {"tokenizer_split": "code"},
    ):
        assert wanted_of(replace(plain, **more), tmp_path) == usual | more  # type: ignore[arg-type]
    for more in ({"sequence_length": 9}, {"bad_documents": "fail"}, {"packing": "documents"}):
        assert wanted_of(replace(plain, **more), tmp_path) == usual, more  # type: ignore[arg-type]
    given = wanted_of(replace(plain, tokenizer=str(tokenizer)), tmp_path)
    content = xxhash.xxh3_128_hexdigest(tokenizer.read_bytes())
    kept = ("sources", "source_bytes", "text_field", "separator", "held_out_every", "end_of_document_token")
    assert given == {name: usual[name] for name in kept} | {"tokenizer": content}
    with pytest.raises(DataError, match="has no token '<none>'"):
        wanted_of(replace(plain, tokenizer=str(tokenizer), end_of_document_token="<none>"), tmp_path)


def test_the_manifest_tells_each_file_and_dataset_and_comes_back_as_it_was(
    text: Path, tokenizer: Path, tmp_path: Path
) -> None:
    data = DataSection(sources=(str(text),), sequence_length=8, held_out_every=4, tokenizer=str(tokenizer))
    made = prepare(data, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "prepared.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    own = [name for name in files if name not in ("prepared.json", "prepared.lock", "source-hashes.json")]
    pairs = [f"{name}{end}" for name in ("held-out", "train") for end in (".bin", ".idx", ".seal.json")]
    sums = ["held-out.seal.sums", "train.seal.sums"]
    assert own == sorted([*pairs, *sums, "bad-documents.jsonl", "tokenizer.json"])
    train, held = (IndexedDataset(tmp_path / "out" / name) for name in ("train", "held-out"))
    assert train.document_count + held.document_count == 31
    counts = {
        name: {
            "documents": pair.document_count,
            "tokens": pair.token_count,
            "text_bytes": pair.token_count - pair.document_count,  # a token for each byte of text
        }
        for name, pair in (("train", train), ("held-out", held))
    }
    note = "1 document skipped: 1 empty. The first: "
    assert manifest == {
        "format": 1,
        "wanted": wanted_of(data, tmp_path / "out"),
        "files": {name: (tmp_path / "out" / name).stat().st_size for name in own},
        "datasets": counts,
        "tokenizer_file": "tokenizer.json",
        "vocabulary_size": 257,
        "end_of_document_id": 0,
        "bad_documents": 1,
        "engine": "fastokens",
        "notes": [f"{note}{text}/b.jsonl:2: the document is empty; all are listed in bad-documents.jsonl."],
    }
    (own_train, own_held) = (
        PreparedDataset(name=name, prefix=pair.prefix, weight=1.0, **counts[name])
        for name, pair in (("train", train), ("held-out", held))
    )
    assert made == Prepared(
        tokenizer_path=tmp_path / "out" / "tokenizer.json",
        vocabulary_size=257,
        end_of_document_id=0,
        train=(own_train,),
        held_out=(own_held,),
        notes=tuple(manifest["notes"]),
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(manifest["wanted"], sort_keys=True).encode()),
        reused=False,
    )
    assert prepare(data, tmp_path / "out") == replace(made, reused=True)
    of_model = manifest | {"tokenizer_file": "tokenizer.model"}
    (tmp_path / "out" / "prepared.json").write_text(json.dumps(of_model))
    assert prepare(data, tmp_path / "out").tokenizer_path == tmp_path / "out" / "tokenizer.model"
    del of_model["tokenizer_file"]  # an earlier version named none
    (tmp_path / "out" / "prepared.json").write_text(json.dumps(of_model))
    assert prepare(data, tmp_path / "out") == replace(made, reused=True)
    for key, value in (
        ("format", 2),
        ("files", {"gone": 1}),
        ("datasets", None),
        ("datasets", {"held-out": {}}),
        ("notes", None),
    ):
        (tmp_path / "out" / "prepared.json").write_text(json.dumps(manifest | {key: value}))
        found = prepare(data, tmp_path / "out")
        assert (found.reused, found.train) == (False, made.train), key


def test_what_is_passed_on_to_tokenising_is_what_the_settings_say(
    text: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataSection(
        sources=(str(text), str(text / "b.jsonl")), sequence_length=8, held_out_every=0,
        tokenizer=str(tokenizer), text_field="q", prompt_field="text", separator="%%", longest_line_mib=5,
        bad_documents="fail",
    )  # fmt: skip
    asked: list[dict[str, Any]] = []

    def tokenize(files: Any, out: Path, job: Job, **settings: Any) -> TokenizeSummary:
        asked.append({"files": files, "out": out, "job": job, **settings})
        settings["report"].write_text("")
        for ending in (".bin", ".idx", ".seal.json", ".seal.sums"):
            out.with_name(out.name + ending).write_bytes(b"x")
        bad = BadDocuments()
        pair = Pair(prefix=out, documents=2, tokens=30, text_bytes=20)
        return TokenizeSummary(
            pairs=(pair,), dtype="uint16", text_bytes=20, bad=bad, engines={"one": 3}, notes=("a note",),
            pieces=1, pieces_kept=0,
        )  # fmt: skip

    monkeypatch.setattr(prepare_build, "tokenize", tokenize)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 6})
    building, files = tmp_path / "building", find_files(data.sources)
    building.mkdir()
    progress = lambda *_: None  # noqa: E731
    manifest = build_in(building, data, files, {"source_bytes": 9}, progress=progress)
    (call,) = asked
    assert call == {
        "files": files.files,
        "out": building / "train",
        "job": Job(
            directory="", tokenizer=str(building / "tokenizer.json"), end_of_document=EOD, text_field="q",
            prompt_field="text", separator="%%", longest_line_mib=5, fail=True, held_out_every=0,
        ),
        "workers": 3,
        "report": building / "bad-documents.jsonl",
        "progress": progress,
    }  # fmt: skip
    assert manifest == {
        "format": 1,
        "wanted": {"source_bytes": 9},
        "files": {
            "tokenizer.json": tokenizer.stat().st_size,
            "bad-documents.jsonl": 0,
            **{f"train{ending}": 1 for ending in (".bin", ".idx", ".seal.sums", ".seal.json")},
        },
        "datasets": {"train": {"documents": 2, "tokens": 30, "text_bytes": 20}},
        "tokenizer_file": "tokenizer.json",
        "vocabulary_size": 257,
        "end_of_document_id": 0,
        "bad_documents": 0,
        "engine": "one",
        "notes": ["a note"],
    }


def test_a_tokenizer_is_trained_as_the_settings_say(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(prepare_build, "train_tokenizer", lambda texts, **given: asked.append(given))
    given = {"tokenizer_vocabulary": 300, "end_of_document_token": "<end>", "tokenizer_split": "code"}
    data = DataSection(sources=(str(text),), sequence_length=8, **given)  # type: ignore[arg-type]
    prepare_build._tokenizer(data, total_bytes=9, progress=lambda *_: None)
    assert asked == [{"vocabulary": 300, "end_of_document": "<end>", "split": "code"}]


def test_documents_of_the_recipe_are_read_as_it_says(text: Path, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("one%%two")
    data = DataSection(sources=(str(tmp_path / "c.txt"),), sequence_length=8, separator="%%")
    assert [one.text for one in documents_of(data)] == ["one", "two"]
    answers = replace(data, sources=(str(text / "b.jsonl"),), text_field="text", prompt_field="q")
    assert [(one.text, one.prompt) for one in documents_of(answers)] == [("plast", 1)]
    with pytest.raises(DataError, match=r"b\.jsonl:2: the document is empty"):
        list(documents_of(replace(answers, bad_documents="fail")))
    line = json.dumps({"text": "x" * (1 << 20)}) + "\n"
    (tmp_path / "long.jsonl").write_text(line)
    long = replace(data, sources=(str(tmp_path / "long.jsonl"),))
    assert len(list(documents_of(long))) == 1
    assert list(documents_of(replace(long, longest_line_mib=1))) == []


def pair(prefix: Path, tokens: int) -> Path:
    with IndexedWriter(prefix, dtype="<u2") as writer:
        writer.add_document([1] * tokens)
        writer.add_document([])
    return prefix


def test_datasets_that_are_tokens_already_are_told_as_the_recipe_names_them(
    tokenizer: Path, tmp_path: Path
) -> None:
    one, two, kept = (pair(tmp_path / name, size) for name, size in (("a", 9), ("b", 20), ("c", 3)))
    data = DataSection(
        sequence_length=8,
        tokenizer=str(tokenizer.parent),
        datasets=(
            DatasetSection(name="first", path=str(one), weight=3.0),
            DatasetSection(name="second", path=str(two)),
        ),
        held_out_datasets=(DatasetSection(name="kept", path=str(kept)),),
    )
    lines = tokenizer.read_bytes() + b"first 2 9\nsecond 2 20\n"

    def row(name: str, prefix: Path, weight: float, tokens: int) -> PreparedDataset:
        return PreparedDataset(
            name=name, prefix=prefix, weight=weight, documents=2, tokens=tokens, text_bytes=0
        )

    assert prepare(data, tmp_path / "run") == Prepared(
        tokenizer_path=tokenizer,
        vocabulary_size=257,
        end_of_document_id=0,
        train=(row("first", one, 3.0, 9), row("second", two, 1.0, 20)),
        held_out=(row("kept", kept, 1.0, 3),),
        notes=(),
        fingerprint=xxhash.xxh3_128_hexdigest(lines),
        reused=True,
    )
    with pytest.raises(DataError) as refused:
        prepare(replace(data, sequence_length=9), tmp_path / "run")
    said = f"The dataset 'first' ({one}) holds 9 tokens, and one sample takes 10."
    assert refused.value.message == said
    bin_path(two).write_bytes(bin_path(two).read_bytes() + b"more")
    with pytest.raises(DataError, match="longer than its index says"):
        prepare(data, tmp_path / "run")


def test_a_run_on_datasets_keeps_its_tokenizer_and_goes_on_without_the_file_of_before(
    tokenizer: Path, tmp_path: Path
) -> None:
    datasets = (DatasetSection(name="first", path=str(pair(tmp_path / "a", 9))),)
    elsewhere = tmp_path / "mine.json"
    elsewhere.write_bytes(tokenizer.read_bytes())
    data = DataSection(sequence_length=8, tokenizer=str(elsewhere), datasets=datasets)
    run, own = tmp_path / "run", tmp_path / "run" / "tokenizer.json"
    first = prepare_run(data, run, progress=ignore_progress, is_trained_on=False)
    assert first.tokenizer_path == elsewhere and own.read_bytes() == elsewhere.read_bytes()
    elsewhere.write_bytes(elsewhere.read_bytes() + b"\n")
    prepare_run(data, run, progress=ignore_progress, is_trained_on=True)
    assert own.read_bytes() == tokenizer.read_bytes(), "a model was trained with this one"
    prepare_run(data, run, progress=ignore_progress, is_trained_on=False)
    assert own.read_bytes() == elsewhere.read_bytes(), "nothing was trained with the one of before"
    own.write_bytes(tokenizer.read_bytes())
    elsewhere.unlink()
    assert prepare(data, run) == replace(first, tokenizer_path=own)
    with pytest.raises(OriginGone, match=r"mine\.json: No such file"):
        prepare(data, tmp_path / "new")


def test_a_run_has_one_tokenizer_also_where_the_recipe_names_one_of_another_kind_by_now(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = (DatasetSection(name="first", path=str(pair(tmp_path / "a", 9))),)
    data = DataSection(sequence_length=8, tokenizer=str(tokenizer), datasets=datasets)
    model = tmp_path / "pieces.model"
    model.write_bytes(b"\n\x0epieces")
    plain = prepare(data, tmp_path / "run")
    for path in (tokenizer, model, tokenizer):
        prepared = replace(plain, tokenizer_path=path)
        monkeypatch.setattr(preparing, "prepare", lambda *_, prepared=prepared, **__: prepared)
        prepare_run(data, tmp_path / "run", progress=ignore_progress, is_trained_on=False)
        own = tokenizer_in(tmp_path / "run")
        assert own is not None and own.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("cache", ["", "~/fast"])
def test_addresses_are_mounted_once_where_the_recipe_says_and_within_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    asked: list[tuple[list[str], CacheLocation]] = []

    def mount(addresses: list[str], location: CacheLocation) -> dict[str, Path]:
        asked.append((addresses, location))
        return {address: Path("/mounted") / address[-1] for address in addresses}

    monkeypatch.setattr(preparing, "mount", mount)
    data = DataSection(
        sequence_length=8,
        datasets=tuple(
            DatasetSection(name=str(number), path=path)
            for number, path in enumerate(("s3://b/a", "~/here", "s3://b/c", "s3://b/a"))
        ),
        held_out_datasets=(DatasetSection(name="kept", path="s3://b/d"),),
        cache=cache,
        cache_gb=1.5,
    )
    assert preparing.dataset_prefixes(data, tmp_path / "run") == {
        "s3://b/a": Path("/mounted/a"),
        "~/here": tmp_path / "home" / "here",
        "s3://b/c": Path("/mounted/c"),
        "s3://b/d": Path("/mounted/d"),
    }
    place = tmp_path / "home" / "fast" if cache else tmp_path / "run" / "cache"
    location = CacheLocation(directory=place, limit_bytes=1_500_000_000)
    assert asked == [(["s3://b/a", "s3://b/c", "s3://b/d"], location)]


def test_held_out_datasets_of_the_recipe_follow_what_is_held_out_of_its_text(
    text: Path, tokenizer: Path, tmp_path: Path
) -> None:
    kept = (DatasetSection(name="kept", path=str(pair(tmp_path / "kept", 9))),)
    data = DataSection(sources=(str(text),), sequence_length=8, held_out_every=4, tokenizer=str(tokenizer))
    made = prepare(replace(data, held_out_datasets=kept), tmp_path / "out")
    assert [dataset.name for dataset in made.held_out] == ["held-out", "kept"]
    assert made.held_out[1].tokens == 9


def test_bad_documents_that_became_fatal_do_not_concern_what_a_run_was_trained_on(
    text: Path, tokenizer: Path, tmp_path: Path
) -> None:
    data = DataSection(sources=(str(text),), sequence_length=8, held_out_every=4, tokenizer=str(tokenizer))
    made = prepare(data, tmp_path / "out")
    strict = replace(data, bad_documents="fail")
    assert preparing.prepared_of_run(strict, tmp_path / "out") == replace(made, reused=True)
    with pytest.raises(DataError, match=r"b\.jsonl:2: the document is empty"):
        prepare(strict, tmp_path / "out")
    assert prepare(data, tmp_path / "out") == replace(made, reused=True)


def test_a_model_of_sentencepiece_is_kept_beside_the_data_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given.bin"
    given.write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    monkeypatch.setattr(preparing, "prepare", lambda *_, **__: SimpleNamespace(tokenizer_path=given))
    run = tmp_path / "run"
    prepare_run(DataSection(sequence_length=8), run, progress=ignore_progress, is_trained_on=False)
    assert [path.name for path in run.iterdir()] == ["tokenizer.model"]
    assert (run / "tokenizer.model").read_bytes() == given.read_bytes()


def test_what_a_start_that_was_killed_made_for_other_settings_is_not_used(
    text: Path, tokenizer: Path, tmp_path: Path
) -> None:
    data = DataSection(sources=(str(text),), sequence_length=8, held_out_every=0, tokenizer=str(tokenizer))
    building = tmp_path / "out" / "building"
    building.mkdir(parents=True)
    (building / "wanted.json").write_text(json.dumps(wanted_of(data, tmp_path) | {"text_field": "q"}))
    (building / "tokenizer.json").write_text("that of another text")
    assert prepare(data, tmp_path / "out").vocabulary_size == 257
    assert not building.exists()
