"""Peers of small rounds, ready to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.diloco.trained_peers import ELASTIC, Start

from bloomery.config.load import LoadedRecipe


@pytest.fixture
def peers(start: Start, tmp_path: Path) -> Callable[..., dict[str, tuple[LoadedRecipe, Path]]]:
    def begin(*overrides: str, names: str = "ab") -> dict[str, tuple[LoadedRecipe, Path]]:
        over = (*ELASTIC, f"checkpoint.memory_directory={tmp_path}", *overrides)
        return {name: start(*over, name=name) for name in names}

    return begin
