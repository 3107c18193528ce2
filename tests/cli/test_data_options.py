"""What the options of `bloomery data` and `bloomery plan` become, and the status with which they end."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bloomery.cli import data_fetch, plan
from bloomery.cli.data import run
from bloomery.cli.data_pairs import _histogram, print_result
from bloomery.config.load import load_recipe
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.errors import ConfigError, UsageError


def pair(prefix: Path, *documents: list[int]) -> Path:
    with IndexedWriter(prefix, dtype="<u2") as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def told(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*map(str, words), "--json"]) == status
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_ids_beyond_the_vocabulary_make_a_pair_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = pair(tmp_path / "a", [3, 9, 7], [1, 2])
    facts = told(capsys, "verify", prefix, "--vocabulary", 10)
    assert facts["ok"] and (facts["documents"], facts["tokens"], facts["vocabulary"]) == (2, 5, 10)
    facts = told(capsys, "verify", prefix, "--vocabulary", 9, status=1)
    assert not facts["ok"] and facts["findings"]
    assert run(["verify", str(prefix), "--vocabulary", "9"]) == 1
    said = capsys.readouterr().out
    assert f"{prefix}: damaged; 2 documents, 5 tokens" in said and "tokenise its source again" in said
    facts = told(capsys, "verify", prefix)
    assert facts["vocabulary"] is None and facts["not_looked_at"], "no tokenizer lies beside it"


def test_pairs_are_merged_in_the_order_given_and_parts_are_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = pair(tmp_path / "one", [1, 2, 3]), pair(tmp_path / "other", [4], [5, 6])
    facts = told(capsys, "merge", other, one, "--to", tmp_path / "both")
    assert (facts["documents"], facts["tokens"], facts["merged"]) == (3, 6, [str(other), str(one)])
    merged = IndexedDataset(tmp_path / "both")
    assert [merged.document(number).tolist() for number in range(3)] == [[4], [5, 6], [1, 2, 3]]
    for words, why in ((["merge"], "No pair to merge"), (["merge", "--parts", str(one)], "finds the parts")):
        with pytest.raises(UsageError, match=why):
            run([*words, "--to", str(tmp_path / "new")])


def test_a_result_is_one_object_or_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_result({"é": 1}, ["a", "b", "", ""], as_json=True) == 0
    assert capsys.readouterr().out == '{"é": 1}\n'
    assert print_result({"é": 1}, ["a", "b", "", ""], as_json=False) == 0
    assert capsys.readouterr().out == "a\nb\n"


def test_documents_are_counted_by_powers_of_two() -> None:
    assert _histogram(np.array([], dtype=np.int64)) == []
    assert _histogram(np.array([4, 7, 8, 15, 16, 5])) == [(4, 8, 3), (8, 16, 2), (16, 32, 1)]
    assert _histogram(np.array([0, 1, 5])) == [(0, 1, 1), (1, 2, 1), (2, 4, 0), (4, 8, 1)]


def test_near_duplicates_are_those_of_the_threshold_and_the_ngrams_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[Any] = []

    def deduplicate(prefixes: list[Path], out: Path, *, likeness: Any, against: Any, progress: Any) -> Any:
        got.append((prefixes, out, likeness.threshold, likeness.ngram, against))
        return SimpleNamespace(documents=8, tokens=80, removed_equal=2, removed_near=3, removed_tokens=40)

    monkeypatch.setattr("bloomery.data.duplicates.deduplicate", deduplicate)
    one, other, held, out = (tmp_path / name for name in ("one", "other", "held", "out"))
    facts = told(
        capsys, "dedup", one, other, "--against", held, "--to", out, "--threshold", 0.6, "--ngram", 9
    )
    assert got.pop() == ([one, other], out, 0.6, 9, [held])
    assert {name: facts[name] for name in facts if name.startswith("removed") and "list" not in name} == {
        "removed_equal": 2,
        "removed_near": 3,
        "removed_tokens": 40,
    }
    told(capsys, "dedup", one, "--to", out, "--exact")
    assert got.pop() == ([one], out, 1.0, 5, [])
    told(capsys, "dedup", one, "--to", out)
    assert got.pop()[2:4] == (0.8, 5)
    for words in (("--threshold", "0.49"), ("--threshold", "1.01"), ("--ngram", "0"), ("--ngram", "65")):
        with pytest.raises(UsageError, match="find no near duplicates"):
            run(["dedup", str(one), "--to", str(out), *words])
    for words in (("--threshold", "0.5"), ("--threshold", "1"), ("--ngram", "1"), ("--ngram", "64")):
        assert run(["dedup", str(one), "--to", str(out), *words]) == 0


def test_sources_of_a_fetch_have_the_names_given_or_those_of_their_addresses() -> None:
    named = data_fetch._named(
        ["en=https://h/x/SHA256SUMS", "https://h/a/de/SHA256SUMS", "s3://b/fr/", "hf:people/es@main:data"]
    )
    assert named == {
        "en": "https://h/x/SHA256SUMS",
        "de": "https://h/a/de/SHA256SUMS",
        "fr": "s3://b/fr/",
        "es": "hf:people/es@main:data",
    }
    assert data_fetch._named(["https://h/a?b=c/x"]) == {"x": "https://h/a?b=c/x"}
    for sources in (["s3://b/x", "s3://c/x"], ["=s3://b/x"], ["..=s3://b/x"]):
        with pytest.raises(UsageError, match="has no name of its own"):
            data_fetch._named(sources)
    assert data_fetch._ratios(["en=0.75", "de=0.25"]) == {"en": 0.75, "de": 0.25}
    with pytest.raises(UsageError, match="is not NAME=PART"):
        data_fetch._ratios(["en"])


def test_options_of_a_fetch_reach_its_plan_and_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}
    files = [
        SimpleNamespace(path="a.jsonl", size_bytes=1_500_000),
        SimpleNamespace(path="b.jsonl", size_bytes=500_000),
    ]
    shard = SimpleNamespace(dataset="en", files=files, size_bytes=2_000_000)
    monkeypatch.setattr(data_fetch, "_opened", lambda address: SimpleNamespace(files=lambda: address))

    def planned(remotes: dict[str, Any], request: Any) -> list[Any]:
        seen["request"] = request
        return [shard, shard]

    def fetched(shards: list[Any], remotes: Any, to: Path, request: Any, **more: Any) -> Any:
        seen["fetch"] = (len(shards), to, more["threads"], more["anew"])
        return SimpleNamespace(files=1_003, size_bytes=1_234_567_000, kept_files=1_001, removed_files=1_002)

    monkeypatch.setattr("bloomery.data.remote_files.plan_share", planned)
    monkeypatch.setattr("bloomery.data.fetch.fetch", fetched)
    monkeypatch.setattr(
        "bloomery.data.fetch.refuse_other_share", lambda to, remotes, request: seen.update(refused=to)
    )
    words = [
        "--shares",
        "5",
        "--share",
        "3",
        "--seed",
        "11",
        "--ratio",
        "en=0.5",
        "--include",
        "*.jsonl",
        "--exclude",
        "old*",
        "--limit",
        "7",
    ]
    facts = told(capsys, "fetch", "s3://b/en", "--to", tmp_path / "here", *words, "--threads", 4)
    request = seen["request"]
    assert (request.shares, request.share, request.seed, request.limit) == (5, 3, 11, 7)
    assert (request.ratios, request.include, request.exclude) == ({"en": 0.5}, ("*.jsonl",), ("old*",))
    assert seen["fetch"] == (2, tmp_path / "here", 4, False) and seen["refused"] == tmp_path / "here"
    assert facts["datasets"] == {"en": {"shards": 2, "files": 4, "bytes": 4_000_000}}
    assert (facts["bytes"], facts["fetched_bytes"]) == (4_000_000, 1_234_567_000)
    assert (facts["fetched_files"], facts["kept_files"], facts["removed_files"]) == (1_003, 1_001, 1_002)
    assert (facts["to"], facts["shares"], facts["share"]) == (str(tmp_path / "here"), 5, 3)
    seen.clear()
    told(capsys, "fetch", "s3://b/en", "--to", tmp_path, "--anew")
    assert "refused" not in seen and seen["fetch"] == (2, tmp_path, 8, True)
    assert seen["request"].limit is None
    seen.clear()
    facts = told(capsys, "fetch", "s3://b/en", "--to", tmp_path, "--dry-run")
    assert "fetch" not in seen and facts["files"][0] == {"path": "en/a.jsonl", "bytes": 1_500_000}
    given = ["fetch", "s3://b/en", "--to", str(tmp_path), "--shares", "5", "--share", "3"]
    assert run(given) == 0
    sizes = "en: 2 shards, 4 files, 4.0 MB"
    assert capsys.readouterr().out.splitlines() == [
        sizes,
        f"{tmp_path}: share 3 of 5; 1,003 files fetched (1,234.6 MB), 1,001 there before, 1,002 removed",
    ]
    assert run([*given, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *["       1,500,000  en/a.jsonl", "         500,000  en/b.jsonl"] * 2,
        sizes,
        "Nothing was fetched (--dry-run).",
    ]


def asked(*words: str) -> Any:
    options = plan._parser().parse_intermixed_args(["demo", *words])
    (request,) = plan._requests(options, "demo")
    return request


def test_numbers_of_a_plan_reach_its_request() -> None:
    words = "--gpus 16 --failures-per-week 1.5 --hours-per-day 20 --data-tokens 3_000_000 --price 2.5"
    request = asked("train.samples=64000", "train.tokens=0", "--hardware", "h200", *words.split())
    assert (request.accelerators, request.failures_per_week, request.hours_per_day) == (16, 1.5, 20.0)
    assert (request.data_tokens, request.price_per_accelerator_hour) == (3e6, 2.5)
    assert request.hardware.name == "h200" and request.link is None
    assert request.loaded.recipe.train.samples == 64_000
    assert asked("--hardware", "h200", "--link", "internet-1g").link is not None
    request = asked("--hardware", "h200")
    assert (request.accelerators, request.failures_per_week, request.hours_per_day) == (None, None, 24.0)
    assert asked("run.hardware=h200").hardware.name == "h200"
    with pytest.raises(ConfigError) as refused:
        asked("--hardware", "h200", "--gpus", "1.5", "--price", "nan", "--hours-per-day", "x")
    assert [mistake.key for mistake in refused.value.mistakes] == ["--gpus", "--hours-per-day", "--price"]
    assert "a whole number" in refused.value.mistakes[0].remedy


def test_the_machine_of_a_plan_is_the_named_the_measured_or_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    here = SimpleNamespace(name="this laptop", notes="It was not measured.")
    monkeypatch.setattr(plan, "this_machine", lambda: here)
    monkeypatch.setattr(plan, "load_hardware", lambda name: f"machine {name}")
    assert plan.load_machine("h200") == "machine h200" and capsys.readouterr().err == ""
    assert plan.load_machine("") is here
    assert "this plan is for this laptop. It was not measured." in capsys.readouterr().err
    assert plan.load_machine("", accelerators="8") == f"machine {plan.DEFAULT_HARDWARE}"
    assert "--hardware names another" in capsys.readouterr().err
    (tmp_path / plan.OWN_MACHINE).touch()
    assert plan.load_machine("") == f"machine {plan.OWN_MACHINE}" == plan.load_machine("", accelerators="8")
    assert plan.load_machine("h200") == "machine h200"


def test_a_plan_that_fits_ends_well_and_a_search_that_finds_none_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = Namespace(html=None, json=True, start=None)
    request: Any = SimpleNamespace(loaded=load_recipe("demo"))
    monkeypatch.setattr(plan, "as_figures", lambda made: {"fits": made.fits})
    monkeypatch.setattr("bloomery.plan.search.as_rows", lambda found: found.ranked)
    for fits, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(
            "bloomery.plan.overview.make_plan", lambda asked, it=fits: SimpleNamespace(fits=it)
        )
        assert plan._plan(request, options) == status
        ranked = ["a layout"] if fits else []
        monkeypatch.setattr(
            "bloomery.plan.search.search_layouts", lambda asked, found=ranked: SimpleNamespace(ranked=found)
        )
        assert plan._search(request, options) == status
