"""One switch forbids the network: what a recipe plans with it is refused before it starts."""

from __future__ import annotations

import pytest

from bloomery.config.checkpoint import BackupSection
from bloomery.config.environment import SWITCH, OfflineRefused, go_offline, is_offline
from bloomery.config.validate import backup_mistakes
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
