"""Bits that flip on one of four ranks are found within the interval, undone, and the right rank is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.parallel.small import build, mesh_for, micro_batches
from tests.train.bit_flips import SITES, Flip, Planted
from tests.train.real_ranks import DEADLINE_S, train_on_ranks
from tests.train.test_loop import events, go

from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data_loader.batches import MicroBatch
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.digests import BitFault
from bloomery.operate.wrong_bits import machine_faults
from bloomery.parallel.build import TrainingModel
from bloomery.plan.recomputation import Recomputation
from bloomery.train import corruption
from bloomery.train.corruption import CorruptionCheck, _packed, _unpacked
from bloomery.train.settings import RunSettings
from bloomery.train.state import Goal, TrainState

Start = Callable[..., tuple[LoadedRecipe, Path]]
EVERY = 4
SETTINGS = (
    "train.samples=0",
    "train.ramp_up=[]",
    "train.global_batch=8",
    "train.micro_batch=1",
    "evaluate.every_steps=0",
    f"guard.corruption_steps={EVERY}",
    f"checkpoint.every_steps={EVERY}",
    "guard.corruption_faults=1000",
    "parallel.data=4",
)


def as_set(recipe: Recipe) -> Recomputation:
    return Recomputation(mode=recipe.train.recompute, why="")


def trained(
    start: Start,
    name: str,
    *settings: str,
    flips: tuple[Flip, ...] = (),
    ranks: int = 4,
    deadline_s: float = DEADLINE_S,
) -> Path:
    """Train on real ranks with planted flips; return the run's path."""
    loaded, path = start(*SETTINGS, *settings, name=name)
    sources = f"data.sources={loaded.recipe.data.sources[0]}"
    plant = Planted(flips=flips) if flips else None
    ends = train_on_ranks(ranks, path, *SETTINGS, sources, *settings, plant=plant, deadline_s=deadline_s)
    assert set(ends) == {"the samples are done"}, ends
    return path


def assert_found(path: Path, flips: tuple[Flip, ...], *, every: int) -> None:
    """Each flip has its record: the right rank, for sure, at the check at or after it."""
    found = [
        ([machine["rank"] for machine in record["machines"]], record["is_certain"], record["step"])
        for record in events(path, "corruption")
    ]
    faults = machine_faults(RunDirectory(path))
    assert [(fault.rank, fault.step) for fault in faults] == [(ranks[0], step) for ranks, _, step in found]
    check = [-(-flip.after // every) * every for flip in flips]
    assert found == [([flip.rank], True, at + 1) for flip, at in zip(flips, check, strict=True)]


def test_flips_in_weights_gradients_and_activations_are_found_named_and_undone(start: Start) -> None:
    flips = tuple(
        Flip(after=4 + 8 * number - (site == "weights"), rank=(3 * number + 1) % 4, site=site, seed=number)
        for number, site in enumerate(SITES)
    )
    path = trained(start, "flipped", "train.steps=38", flips=flips)
    assert_found(path, flips, every=EVERY)
    refused = [record["step"] for record in events(path, "step") if not record["update_applied"]]
    assert refused == [record["step"] for record in events(path, "corruption")]


def test_a_run_that_corruption_stopped_goes_on_from_its_last_clean_step_and_not_from_later_ones(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = TrainingModel.digest_gradients, []

    def wrong_at_the_second_check(model, micro_batch, step, *, weight):
        calls.append(step)
        return real(model, micro_batch, step, weight=weight) + int(step == 8 and calls.count(8) == 1)

    monkeypatch.setattr(TrainingModel, "digest_gradients", wrong_at_the_second_check)
    settings = ("train.samples=0", "train.ramp_up=[]", "train.steps=10", "checkpoint.every_steps=3")
    loaded, path = start(*settings, "guard.corruption_steps=4", "guard.corruption_faults=1")
    assert go(loaded, path).failed
    (marked,) = events(path, "suspect_checkpoints")
    assert (marked["step"], marked["clean_step"]) == (9, 4)
    assert marked["names"] == ["step-000006.i001"]
    assert go(loaded, path).finished
    assert [record["position"]["consumed"] for record in events(path, "start")] == [0, 3 * 8]


def test_a_weight_that_no_sample_uses_and_that_is_not_finite_is_found_and_undone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, spoilt = TrainingModel.accumulate, []

    def spoiling(model, micro_batches, step, *, weight):
        if step == 3 and not spoilt:
            (entry,) = [e for e in model.weights.state_entries() if e.name == "model.embedding.weight"]
            spoilt.append(entry.tensor[-1].fill_(torch.nan))
        return real(model, micro_batches, step, weight=weight)

    monkeypatch.setattr(TrainingModel, "accumulate", spoiling)
    settings = ("train.samples=0", "train.ramp_up=[]", "train.steps=6", "checkpoint.every_steps=2")
    untied = ("model.tied=false", "model.vocabulary=300")
    loaded, path = start(*settings, *untied, "guard.corruption_steps=2")
    assert go(loaded, path).finished
    (record,) = events(path, "corruption")
    assert (record["step"], record["is_certain"]) == (5, False)
    assert "model.embedding.weight" in record["reason"]
    (marked,), (rewind,) = events(path, "suspect_checkpoints"), events(path, "rewind")
    assert (marked["names"], rewind["to_step"]) == (["step-000004.i001"], 2)


@pytest.mark.parametrize(("average", "is_checked"), [("weights", True), ("gradients", False)])
def test_a_step_that_peers_gave_up_is_not_computed_again_with_the_weights_that_came_instead(
    tmp_path: Path, average: str, is_checked: bool
) -> None:
    mesh = mesh_for(0)
    model = build("llama", mesh)
    options = ["elastic.inner_steps=1", f"elastic.average={average}", "guard.corruption_steps=1"]
    recipe = load_recipe("demo", ["elastic.peers=2", "elastic.minimum_peers=1", *options]).recipe
    with Journal(tmp_path / "journal.jsonl") as journal:
        parts = {"data_stream": None, "store": None, "held_out": None, "auto_recompute": as_set}
        settings = RunSettings(recipe, mesh=mesh, **parts, journal=journal, say=print)
        check = CorruptionCheck(model, mesh=mesh, settings=settings, journal=journal, incarnation=lambda: 1)
        check.accumulate(micro_batches(1, index=0, degree=1), 1, weight=1.0)
        model.weights.reduce()
        for gradient, master in zip(model.weights.gradient, model.weights.master, strict=True):
            gradient.fill_(torch.nan)  # what `GradientAverage.refuse` does
            master.mul_(1.5)  # another peer's state
        model.weights.copy_masters_to_working()
        check.admit(model.weights.examine(limit=1.0, unscale=1.0))
    state = TrainState(goal=Goal(steps=9))
    assert check.due(state) is is_checked
    assert bool(is_checked and check.run(state)["corruption"]) is is_checked


def test_a_step_at_which_nobody_had_a_majority_is_checked_when_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the interval was changed meanwhile: who held wrong bits shows only then."""
    undecided = BitFault(what="weights", ranks=(0, 1), is_certain=False, reason="they differ")
    faults, mesh, state = [[undecided], []], mesh_for(0), TrainState(goal=Goal(steps=9))
    monkeypatch.setattr(corruption, "held_faults", lambda ranks: faults.pop(0))
    model = build("llama", mesh)
    recipes = [load_recipe("demo", [f"guard.corruption_steps={interval}"]).recipe for interval in (4, 3)]
    with Journal(tmp_path / "journal.jsonl") as journal:
        parts = {"data_stream": None, "store": None, "held_out": None, "auto_recompute": as_set}
        settings = RunSettings(recipes[0], mesh=mesh, **parts, journal=journal, say=print)
        check = CorruptionCheck(model, mesh=mesh, settings=settings, journal=journal, incarnation=lambda: 1)
        checked = []
        for recipe in recipes:
            settings.recipe = recipe
            check.accumulate(micro_batches(1, index=0, degree=1), 4, weight=1.0)
            model.weights.reduce()
            check.admit(model.weights.examine(limit=1.0, unscale=1.0))
            checked.append(check.due(state) and check.run(state)["corruption"])
    assert checked == ["they differ", ""]


def test_a_peer_whose_bits_differ_offers_others_gradients_that_they_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_for(0)
    model = build("llama", mesh)
    real, results = model.digest_gradients, iter([1, 0, 0, 0, 0])
    monkeypatch.setattr(
        type(model), "digest_gradients", lambda self, *args, **kind: real(*args, **kind) + next(results)
    )
    options = ["elastic.inner_steps=1", "elastic.average=gradients", "guard.corruption_steps=1"]
    recipe = load_recipe("demo", ["elastic.peers=2", "elastic.minimum_peers=1", *options]).recipe
    state = TrainState(goal=Goal(steps=9))
    with Journal(tmp_path / "journal.jsonl") as journal:
        parts = {"data_stream": None, "store": None, "held_out": None, "auto_recompute": as_set}
        settings = RunSettings(recipe, mesh=mesh, **parts, journal=journal, say=print)
        check = CorruptionCheck(model, mesh=mesh, settings=settings, journal=journal, incarnation=lambda: 1)
        applies, corruptions = [], []
        for step in (1, 2):
            check.accumulate(micro_batches(1, index=0, degree=1), step, weight=1.0)
            model.weights.reduce()
            check.screen()  # which comes before the average
            facts = check.admit(model.weights.examine(limit=1.0, unscale=1.0))
            applies.append(bool(facts.applies))
            corruptions.append(check.run(state)["corruption"] if check.due(state) else None)
    assert any(layout.padding for layout in model.weights.layouts), "which no backward writes"
    assert applies == [False, True], "the gradients of the next step are finite again"
    assert corruptions[0] and corruptions[1] == ""


@pytest.mark.parametrize("has_documents", [False, True])
def test_a_micro_batch_that_another_rank_computes_again_arrives_as_it_was(*, has_documents: bool) -> None:
    tokens, targets, documents = torch.arange(24, dtype=torch.int32).view(3, 2, 4)
    batch = MicroBatch(
        tokens=tokens,
        targets=targets,
        documents=documents if has_documents else None,
        samples=torch.tensor([1 << 40, 7]),
    )
    like = MicroBatch(
        tokens=torch.zeros_like(tokens),
        targets=torch.zeros_like(targets),
        documents=torch.zeros_like(documents) if has_documents else None,
        samples=torch.zeros_like(batch.samples),
    )
    arrived = _unpacked(_packed(batch), like)
    for name in ("tokens", "targets", "documents", "samples"):
        sent, got = getattr(batch, name), getattr(arrived, name)
        assert (got is None) if sent is None else (torch.equal(sent, got) and sent.dtype == got.dtype), name
