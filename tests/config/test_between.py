"""Which settings peers must have in common: every one of them is decided."""

from __future__ import annotations

from dataclasses import fields

import pytest

from bloomery.config.convert import settings_of
from bloomery.config.load import load_recipe, sections
from bloomery.config.peer_settings import EQUAL, FREE, equal_settings
from bloomery.config.resume import apply_free
from bloomery.config.setting import declaration_of, key_of
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


def of_kind(*kinds: str) -> set[str]:
    return {
        f"{name}.{key_of(field)}"
        for name, section in sections().items()
        for field in fields(section)
        if declaration_of(field).kind in kinds
    }


def test_peers_have_in_common_all_that_a_run_keeps_but_where_their_data_lie() -> None:
    kept = of_kind("fixed", "journalled")
    places = {"data.sources", "data.tokenizer", "data.datasets", "data.weights_file", "init.from"}
    assert kept & FREE == places
    parts = "data tensor pipeline schedule chunks partition blocks_per_stage zero shard_degree"
    rungs = "slow_rate clamp clamp_z_score clamp_qk restrain_steps"
    assert of_kind("free") & EQUAL == {
        *("train.samples", "train.tokens", "train.steps"),
        *("elastic.minimum_peers", "elastic.outlier_factor", "elastic.streams"),
        *(f"parallel.{name}" for name in parts.split()),
        *(f"guard.{name}" for name in rungs.split()),
    }


def test_a_runs_model_order_and_optimizer_are_fixed_and_what_shapes_its_training_is_journalled() -> None:
    fixed, journalled = of_kind("fixed"), of_kind("journalled")
    model = {f"model.{key_of(field)}" for field in fields(sections()["model"])}
    assert model - fixed == {"model.hidden_dropout", "model.attention_dropout"} <= journalled
    assert fixed - model == {
        *("run.seed", "init.from", "optim.name", "elastic.average", "elastic.fragments"),
        *("data.sources", "data.split", "data.text_field", "data.prompt_field", "data.separator"),
        *("data.held_out_every", "data.tokenizer", "data.tokenizer_vocabulary", "data.tokenizer_split"),
        *("data.sequence_length", "data.order", "data.packing", "data.order_seed", "data.order_samples"),
        *("data.mask_documents", "data.reset_positions", "data.end_of_document_token"),
    }
    for name in ("optim", "schedule", "loss"):
        of_section = {f"{name}.{key_of(field)}" for field in fields(sections()[name])}
        assert of_section - journalled <= {"optim.name"}
    assert journalled >= {"train.global_batch", "train.ramp_up", "train.precision", "data.datasets"}
    assert journalled >= {"elastic.inner_steps", "elastic.codec", "elastic.outer_learning_rate"}


def test_what_may_change_while_a_run_goes_on_is_what_each_step_reads() -> None:
    live = {
        f"{name}.{key_of(field)}"
        for name, section in sections().items()
        for field in fields(section)
        if declaration_of(field).kind == "free" and not declaration_of(field).at_start
    }
    every = "every_steps every_samples every_minutes keep_last keep_every_steps keep_tenths keep_best at_end"
    train = "samples tokens steps micro_batch micro_batch_changes recompute"
    guards = {f"guard.{key_of(field)}" for field in fields(sections()["guard"])}
    at_start = {
        f"guard.{name}" for name in ["slow_rate", "clamp", "clamp_z_score", "clamp_qk", "restrain_steps"]
    }
    assert live == {
        *(f"train.{name}" for name in train.split()),
        *(f"checkpoint.{name}" for name in (*every.split(), "throttle")),
        *("evaluate.every_steps", "evaluate.at_end"),
        *(guards - at_start),
    }
