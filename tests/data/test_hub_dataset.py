"""Datasets of the Hub by name, from a mirror with its API on loopback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.data import hub_mirror
from tests.data.hub_mirror import TOKEN, Mirror, mirror

from bloomery.cli.data import run
from bloomery.data import fetch as fetching
from bloomery.data.hub_dataset import HubDataset
from bloomery.errors import BloomeryError, DataError

FILES = {
    "README.md": b"# texts",
    "en/a.jsonl": b'{"text": "one"}\n',
    "en/b.jsonl": random.Random(1).randbytes(50_000),
    "fr/c.jsonl": b'{"text": "trois"}\n',
    "fr/d.jsonl": b"",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mirror]:
    with mirror(FILES) as serving:
        monkeypatch.setenv("HF_ENDPOINT", serving.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield serving


def fetched(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith("fetched")
    }


def test_a_dataset_is_fetched_by_its_name_by_pieces_and_checked(
    hub: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetching, "_CHUNK_BYTES", 16_384)
    assert run(["fetch", "hf:owner/texts", "--to", str(tmp_path / "raw"), "--json"]) == 0
    assert fetched(tmp_path / "raw") == {f"texts/{name}": content for name, content in FILES.items()}
    assert json.loads(capsys.readouterr().out)["fetched_files"] == 5
    pieces = [asked for path, asked in hub.asked if path.endswith("b.jsonl")]
    assert pieces == [f"bytes={at}-{min(at + 16_384, 50_000) - 1}" for at in range(0, 50_000, 16_384)]


def test_a_server_that_gives_whole_files_serves_those_of_one_piece(
    hub: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.is_plain = True
    assert run(["fetch", "hf:owner/texts", "--to", str(tmp_path / "raw")]) == 0
    assert fetched(tmp_path / "raw") == {f"texts/{name}": content for name, content in FILES.items()}
    monkeypatch.setattr(fetching, "_CHUNK_BYTES", 16_384)
    with pytest.raises(DataError, match="only whole files"):
        run(["fetch", "hf:owner/texts", "--to", str(tmp_path / "again")])


def test_a_server_that_gives_whole_files_gives_no_piece_of_one(hub: Mirror) -> None:
    hub.is_plain = True
    dataset = HubDataset("owner/texts")
    dataset.files()
    whole = FILES["en/a.jsonl"]
    assert dataset.read("en/a.jsonl", start=0, length=100) == whole
    for start, length in ((3, 100), (0, len(whole) - 1)):
        with pytest.raises(DataError, match="only whole files"):
            dataset.read("en/a.jsonl", start=start, length=length)
    hub.is_plain = False
    assert dataset.read("en/a.jsonl", start=3, length=5) == whole[3:8]


def test_an_answer_that_names_no_commit_is_refused(hub: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("main", "0123abc", "../" + "a" * 37):
        monkeypatch.setattr(hub_mirror, "COMMIT", commit)
        with pytest.raises(DataError, match="names no commit"):
            HubDataset("owner/texts").files()


def test_a_fetch_that_was_cut_goes_on_and_what_is_there_is_not_asked_for_again(
    hub: Mirror, tmp_path: Path
) -> None:
    command = ["fetch", "web=hf:owner/texts@main:en", "--to", str(tmp_path / "raw"), "--include", "en/*"]
    hub.faults = [404]
    with pytest.raises(DataError, match="HF_TOKEN"):
        run([*command, "--threads", "1"])
    assert run(command) == 0
    hub.asked.clear()
    assert run(command) == 0
    assert not [path for path, _ in hub.asked if "/resolve/" in path]
    assert sorted(fetched(tmp_path / "raw")) == ["web/en/a.jsonl", "web/en/b.jsonl"]


def test_a_file_that_came_with_other_bytes_is_refused(hub: Mirror, tmp_path: Path) -> None:
    command = ["fetch", "hf:owner/texts", "--to", str(tmp_path / "raw")]
    hub.cuts = True
    with pytest.raises(DataError, match="ended at byte"):
        run(command)
    hub.cuts = False
    assert run(command) == 0


@pytest.mark.parametrize("name", ["../x.jsonl", "/etc/x.jsonl", "a/../../x.jsonl"])
def test_a_hostile_list_writes_nothing_outside_of_the_directory(
    hub: Mirror, tmp_path: Path, name: str
) -> None:
    hub.files = {name: b"x"}
    with pytest.raises(DataError, match="outside of the directory"):
        run(["fetch", "hf:owner/texts", "--to", str(tmp_path / "raw" / "deep")])
    assert not list(tmp_path.rglob("x.jsonl"))


def test_a_token_is_sent_and_never_shown(
    hub: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["fetch", "hf:owner/texts", "--to", str(tmp_path / "raw")]
    hub.token = TOKEN
    with pytest.raises(DataError, match="HF_TOKEN"):
        run(command)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.gated = True
    with pytest.raises(DataError, match="is gated") as refused:
        run(command)
    assert TOKEN not in str(refused.value)
    assert refused.value.remedy.startswith("Ask for access on its page, then set HF_TOKEN")
    hub.gated = False
    assert run(command) == 0
    assert TOKEN not in (tmp_path / "raw" / "fetched.json").read_text()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hf:nothing", "is no dataset of the Hub"),
        ("hf:owner/../x", "is no dataset of the Hub"),
        ("hf:owner/absent", "HF_TOKEN"),
        ("hf:owner/texts@absent", "Revision Not Found"),
    ],
)
def test_what_is_not_there_is_told_in_one_message(
    hub: Mirror, tmp_path: Path, address: str, said: str
) -> None:
    with pytest.raises(BloomeryError) as refused:
        run(["fetch", address, "--to", str(tmp_path / "raw")])
    assert said in str(refused.value)
