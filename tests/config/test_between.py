"""Which settings peers must have in common: every one of them is decided."""

from __future__ import annotations

import pytest

from bloomery.config.convert import settings_of
from bloomery.config.load import load_recipe
from bloomery.config.peer_settings import EQUAL, FREE, equal_settings
from bloomery.config.resume import apply_free
from bloomery.errors import ConfigError


def recipe(*overrides: str):
    return load_recipe("tr11-176b-tiny", ["data.sources=['python:stdlib']", *overrides]).recipe


def test_every_setting_is_either_equal_between_peers_or_each_peers_own() -> None:
    every = set(settings_of(recipe()))
    assert not EQUAL & FREE
    assert every - EQUAL - FREE == set(), (
        "say in config/peer_settings.py whether peers must have it in common"
    )
    assert (EQUAL | FREE) - every == set()


@pytest.mark.parametrize(
    "change", ["run.seed=7", "train.samples=9", "schedule.floor=1e-9", "loss.z_loss=0.1"]
)
def test_what_decides_on_the_training_is_compared(change: str) -> None:
    key = change.partition("=")[0]
    one, other = (
        equal_settings(recipe("train.steps=0", "train.samples=8000", "train.tokens=0")),
        equal_settings(recipe("train.steps=0", "train.samples=8000", "train.tokens=0", change)),
    )
    assert {name for name in one if one[name] != other[name]} == {key}


def test_between_peers_no_peer_changes_by_itself_what_must_be_equal() -> None:
    alone = recipe("train.steps=0", "train.samples=8000", "train.tokens=0")
    assert apply_free(alone, "train.samples", "16000").train.samples == 16000
    peers = recipe("train.steps=0", "train.samples=8000", "train.tokens=0", "elastic.inner_steps=2")
    with pytest.raises(ConfigError, match="must be equal on all peers"):
        apply_free(peers, "train.samples", "16000")
