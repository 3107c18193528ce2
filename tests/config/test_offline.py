"""One switch forbids the network: what a recipe plans with it is refused before it starts."""

from __future__ import annotations

import pytest

from bloomery.config.checkpoint import BackupSection
from bloomery.config.environment import OfflineRefused
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
