"""What a rehearsal changes of a recipe, setting by setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.operate.rehearsal import rehearsal_of

LARGE = load_recipe("tr11-176b").recipe
"""70 layers over 12 stages of 4 ranks, on nodes of 8 ranks; the two nodes hold 4 stages of 4 ranks."""


def changed(section: str, **fields: Any) -> Recipe:
    return replace(LARGE, **{section: replace(getattr(LARGE, section), **fields)})


def rehearsed(recipe: Recipe, *, nproc: int | None) -> dict[str, str]:
    return dict(line.split("=", 1) for line in rehearsal_of(recipe, nproc=nproc))


def settings(recipe: Recipe) -> dict[str, str]:
    return rehearsed(recipe, nproc=None)


def test_a_large_run_becomes_this_one_on_two_nodes() -> None:
    assert rehearsal_of(LARGE) == [
        'run.name="tr11-176b-rehearsal"',
        "model.layers=6",  # two for each of four stages, of which the embedding and the head are two
        "model.heads=8",
        "model.hidden=256",
        "model.ffn=1024",
        "parallel.pipeline=4",
        "parallel.blocks_per_stage=[]",
        "parallel.recompute_per_stage=[]",
        "parallel.data=1",
        "data.sequence_length=128",
        "train.samples=160",
        "train.tokens=0",
        "train.steps=0",
        "train.global_batch=8",
        "train.micro_batch=1",
        "train.micro_batch_changes=[]",
        "train.ramp_up=[4, 4, 32]",
        "train.precision_changes=[]",
        "schedule.warmup=1",
        "schedule.decay=145",
        "submit.nodes=2",
        "submit.spares=0",
        "submit.tasks=2",
        "submit.keep_queued=0",
        "submit.minutes=20.0",
        "checkpoint.every_steps=8",
        "checkpoint.every_samples=0",
        "checkpoint.every_minutes=0.0",
        "checkpoint.keep_last=2",
        "checkpoint.keep_every_steps=0",
        "evaluate.samples=8",
        "log.every_steps=1",
        "log.trackers=[]",
        'sync.place=""',
        "sync.checkpoints=false",
        "guard.stop_after_minutes=0.0",
        "guard.stop_at_step=0",
        "evaluate.every_steps=8",
    ]


@pytest.mark.parametrize(
    ("section", "fields", "expected"),
    [
        ("parallel", {"ranks_per_node": "auto", "pipeline": 3, "chunks": 2, "data": 8, "partition": "blocks"},
         {"parallel.pipeline": "3", "parallel.data": '"auto"', "model.layers": "12",
          "train.global_batch": "12", "parallel.schedule": None}),
        ("parallel", {"ranks_per_node": "auto", "data": "auto"}, {"parallel.data": None}),
        ("parallel", {"pipeline": 1},
         {"parallel.pipeline": "1", "parallel.schedule": '"1f1b"', "parallel.chunks": "1",
          "parallel.data": "4", "model.layers": "2", "train.global_batch": "8"}),
        ("parallel", {"pipeline": 3}, {"parallel.pipeline": "2", "parallel.data": "2",
                                       "parallel.shard_degree": None}),
        ("parallel", {"pipeline": 1, "tensor": 1, "shard_degree": 11}, {"parallel.shard_degree": "8"}),
        ("parallel", {"pipeline": 1, "tensor": 1, "shard_degree": 8}, {"parallel.shard_degree": "8"}),
        ("parallel", {"tensor": 3}, {"parallel.pipeline": "1", "parallel.data": "5"}),
        ("parallel", {"tensor": 32}, {"parallel.pipeline": "1", "parallel.data": "1"}),
        ("model", {"kv_heads": 8}, {"model.kv_heads": "4", "model.heads": "8", "model.hidden": "256"}),
        ("model", {"kv_heads": 112}, {"model.kv_heads": "4", "model.heads": "4", "model.hidden": "128"}),
        ("model", {"ffn": "auto"}, {"model.ffn": None}),
        ("model", {"ffn": 3}, {"model.ffn": "32"}),
        ("model", {"ffn": 14336 * 21 // 8}, {"model.ffn": "672"}),
        ("model", {"max_positions": 4096}, {"model.max_positions": "2048"}),
        ("model", {"max_positions": 1024}, {"model.max_positions": "1024"}),
        ("model", {"max_positions": 64}, {"model.max_positions": "128"}),
        ("model", {"max_positions": 0}, {"model.max_positions": None}),
        ("train", {"ramp_up": ()}, {"train.ramp_up": "[]"}),
        ("train", {"precision_changes": ((100, "fp16"), (200, "bf16"))},
         {"train.precision_changes": '[[32, "fp16"], [64, "bf16"]]'}),
        ("schedule", {"unit": "steps", "warmup": 4, "decay": 100_000}, {"schedule.warmup": "1",
                                                                      "schedule.decay": "18"}),
        ("schedule", {"unit": "tokens", "decay": 440_000_000_000, "warmup": 0},
         {"schedule.decay": "20000", "schedule.warmup": None}),
        ("schedule", {"decay": "auto"}, {"schedule.decay": None}),
        ("evaluate", {"every_steps": 0}, {"evaluate.every_steps": None}),
        ("submit", {"minutes": 19.5}, {"submit.minutes": "19.5"}),
    ],
)  # fmt: skip
def test_what_differs_in_a_recipe_differs_in_its_rehearsal(
    section: str, fields: dict[str, Any], expected: dict[str, str | None]
) -> None:
    found = settings(changed(section, **fields))
    assert {name: found.get(name) for name in expected} == expected


def test_a_rehearsal_fits_the_accelerators_of_its_nodes_where_no_recipe_says_how_many_ranks() -> None:
    auto = changed("parallel", ranks_per_node="auto", tensor=1, pipeline=1, data="auto")
    by_gpus = replace(auto, submit=replace(auto.submit, gpus_per_node=8))
    for found in (settings(by_gpus), rehearsed(auto, nproc=8)):
        assert (found["parallel.data"], found["train.global_batch"]) == ("16", "32")
    held = replace(by_gpus, parallel=replace(LARGE.parallel, ranks_per_node="auto"))
    assert rehearsal_of(held) == rehearsal_of(LARGE), "two nodes hold four of the twelve stages"
    assert rehearsed(by_gpus, nproc=4)["parallel.data"] == "8", "--nproc counts before the accelerators"
