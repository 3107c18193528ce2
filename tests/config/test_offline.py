"""One switch forbids the network: what a recipe plans with it is refused before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cli.in_process import status_of

from bloomery.config.checkpoint import BackupSection
from bloomery.config.environment import SWITCH, OfflineRefused, go_offline, is_offline
from bloomery.config.load import load_recipe
from bloomery.config.validate import backup_mistakes
from bloomery.evaluate.saved_files import _tokenizer_elsewhere
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects


def test_a_backup_beyond_the_network_and_the_switch_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for url, mistakes in (("s3://bucket/path", 1), ("file:///path", 0), ("", 0)):
        assert len(backup_mistakes(BackupSection(url=url), offline=True)) == mistakes
        assert not backup_mistakes(BackupSection(url=url))
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    with pytest.raises(OfflineRefused, match="needed to reach s3://bucket/path"):
        Objects("s3://bucket/path")
    Objects(f"file://{tmp_path}")


def test_the_network_is_forbidden_to_a_started_program_alone_or_to_this_process_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (SWITCH, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    of_the_program: dict[str, str] = {}
    go_offline(of_the_program)
    assert of_the_program[SWITCH] == "1" and not is_offline()
    go_offline()
    assert is_offline()


ELSEWHERE = 'data.datasets=[{name="a",path="https://127.0.0.1:1/corpus"}]'


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is allowed, and what a command forbids is forgotten after the test."""
    for name in (SWITCH, "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_command_that_only_reads_a_recipe_obeys_it_too(
    online: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    report = ("data", "report", "demo", ELSEWHERE, "data.sources=[]", f"data.tokenizer={tokenizer}")
    assert status_of(*report, "model.vocabulary=300", "run.offline=true") == 1
    assert "it is forbidden (run.offline or BLOOMERY_OFFLINE=1)" in capsys.readouterr().err
    assert is_offline() and os.environ["HF_DATASETS_OFFLINE"] == "1", "libraries and child processes too"
    monkeypatch.setenv(SWITCH, "0")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name)
    assert status_of("config", "check", "demo", "run.offline=true") == 0 and not is_offline()


def test_the_tokenizer_of_an_offline_run_is_not_fetched_and_the_process_stays_as_it_is(
    online: None, tmp_path: Path
) -> None:
    recipe = load_recipe("demo", ["data.tokenizer=hf:nobody-of-this-name/none", "run.offline=true"]).recipe
    with pytest.raises(OfflineRefused, match="fetch the tokenizer"):
        _tokenizer_elsewhere(recipe, RunDirectory(tmp_path))
    assert not is_offline()
