"""When a saver takes memory to save beside the training, how much, and what happens where it is short."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.checkpoint.test_saver_terms import Background

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save import saver as saver_module
from bloomery.checkpoint.save.saver import Saver
from bloomery.checkpoint.save.write_plan import RankWritePlan, WritePlanner
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import StorageError


class Part:
    """A part of a run with two tensors."""

    def __init__(self, name: str = "model") -> None:
        self.name = name

    def state_entries(self) -> list[Any]:
        return [whole(f"{self.name}.{name}", torch.ones(500)) for name in "ab"]

    def state_values(self) -> dict[str, Any]:
        return {}

    def load_state_values(self, values: object) -> None:
        """Nothing is there."""


def prepared(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    threshold: int,
    refused: str = "",
    names: tuple[str, ...] = ("model",),
    **section: Any,
) -> tuple[Saver, list[dict[str, Any]]]:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(saver_module, "BackgroundSaver", lambda **how: made.append(how) or Background())
    monkeypatch.setattr(saver_module, "BACKGROUND_BYTES", threshold)
    monkeypatch.setattr(saver_module, "memory_shortage", lambda ranks, bytes, memory: refused)
    saver = Saver(
        directory, Ranks(), CheckpointSection(**section), committed=lambda *_: None, intact=lambda _: None
    )
    parts: Any = {name: Part(name) for name in names}
    saver.prepare(parts)
    saver.prepare(parts)
    return saver, made


def test_memory_is_taken_for_a_state_that_is_large_enough_or_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4096 + 4000
    for threshold, section, count in (
        (size, {}, 1),
        (size + 1, {}, 0),
        (size + 1, {"background": "on"}, 1),
        (size, {"background": "off"}, 0),
    ):
        saver, made = prepared(tmp_path, monkeypatch, threshold=threshold, throttle=False, **section)
        assert len(made) == count and (saver.background is not None) is bool(count)

    class Uneven(WritePlanner):
        def agree(self, entries: Any, digests: list[str]) -> RankWritePlan:
            plan = super().agree(entries, digests)
            self.file_bytes = [0, *self.file_bytes]
            return plan

    with monkeypatch.context() as patch:
        patch.setattr(saver_module, "WritePlanner", Uneven)
        for threshold, count in ((size, 1), (size + 1, 0)):
            (_, made) = prepared(tmp_path, monkeypatch, threshold=threshold)
            assert len(made) == count, "the largest part of a rank counts"
    (_, made) = prepared(tmp_path, monkeypatch, threshold=0, names=("model", "optim"))
    assert made[0]["bytes"] == 2 * 8192 + (1 << 20) + 2 * (64 << 10), "each file has a header that may grow"
    (_, made) = prepared(tmp_path, monkeypatch, threshold=0)
    (how,) = made
    assert how.pop("committed") is not None
    assert how == {
        "bytes": 8192 + (1 << 20) + (64 << 10),
        "throttled": CheckpointSection().throttle,
        "device": torch.device("cpu"),
        "memory": None,
    }


def test_settings_that_change_count_for_the_saver_beside_the_training_that_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for throttle in (True, False):
        _, made = prepared(tmp_path, monkeypatch, threshold=0, throttle=throttle)
        assert made[0]["throttled"] is throttle
    parts: Any = {"model": Part()}
    saver = Saver(tmp_path, Ranks(), CheckpointSection(), committed=lambda *_: None, intact=None)
    saver.follow(CheckpointSection(background="off"))
    saver.prepare(parts)
    assert saver.background is None


def test_where_memory_is_short_the_run_is_refused_only_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, made = prepared(tmp_path, monkeypatch, threshold=0, refused="rank 1: none")
    assert made == [] and saver.take_background_failures() == ["rank 1: none"]
    with pytest.raises(StorageError, match="rank 1: none") as refused:
        prepared(tmp_path, monkeypatch, threshold=0, refused="rank 1: none", background="on")
    assert "checkpoint.background=off" in refused.value.remedy


def test_partners_are_agreed_on_for_the_largest_size_that_a_part_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    memory: Any = SimpleNamespace()

    def agree(ranks: object, directory: Path, **how: object) -> tuple[Any, int]:
        asked.append((directory, how))
        return memory, 0

    monkeypatch.setattr(saver_module, "agree_on_partner", agree)
    run = tmp_path / "run"
    saver, made = prepared(
        run / "checkpoints", monkeypatch, threshold=1 << 40, partner_copies=True, memory_directory="/there"
    )
    size = 8192 + (1 << 20) + (64 << 10)
    assert asked == [(Path("/there"), {"run": run, "bytes": size, "boxes": 4})]
    assert made[0]["memory"] is memory and saver._partner == 0
