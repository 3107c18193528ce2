"""Runs that heal themselves, end to end: real text, real training, faults planted in the middle.

Each fault is first shown to harm a run without guards. With guards the run has to go back, leave out the
planned samples where it says so, and end where runs end that never had the fault. On two busy cores it takes
half an hour; the figures are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import pytest
from tests.diloco.meeting import meeting_of, train_peers
from tests.train.planted import Faults, faulty, plant, samples_of
from tests.train.real_ranks import train_on_ranks

from bloomery.config.load import LoadedRecipe, parse_recipe
from bloomery.events.journal import loss_curve, read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.train import loop
from bloomery.train.settings import StartOptions

pytestmark = pytest.mark.slow
BATCH, STEPS, FIRST_BAD = 16, 360, 241
POISONED_STEPS = {"shuffled": 25, "repeats": 40}
"""A model soon learns repeats: its loss falls by itself, and guards wait up to thirty steps for that."""
RECIPE = f"""
[run]
name = "heal"
[model]
layers = 2
hidden = 64
heads = 4
tied = true
[data]
sequence_length = 64
tokenizer_vocabulary = 300
held_out_every = 10
[train]
steps = {STEPS}
global_batch = {BATCH}
micro_batch = {BATCH}
precision = "fp32"
compile = "off"
[optim]
learning_rate = 3e-3
[schedule]
shape = "cosine"
warmup = 320
[guard]
spike_rewind_steps = 20
spike_skip_steps = 20
[checkpoint]
every_steps = 10
[evaluate]
every_steps = 0
samples = 64
[log]
tensorboard = false
"""
UNGUARDED = ("guard.spike=false", "guard.not_finite_losses=0", "guard.refused_updates=0")
SEEDS = 5

Go = Callable[..., Path]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    modules = sorted(Path(argparse.__file__).parent.glob("*.py"), key=lambda path: -path.stat().st_size)
    for module in modules[:60]:
        shutil.copy(module, directory / f"{module.stem}.txt")
    return directory


@pytest.fixture(scope="module")
def go(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Go:
    """Train a run with faults in this process, in one or several goes, and return its directory."""
    base = tmp_path_factory.mktemp("runs")
    real = loop.train_step

    def train(
        name: str,
        faults: Faults,
        *overrides: str,
        stops: tuple[int, ...] = (0,),
        skip: tuple[int, int] | None = None,
    ) -> Path:
        """skip: the first sample that the run leaves out from its beginning, and the one after the last."""
        path = base / name
        made_before = base / "data"
        if made_before.exists() and not path.exists():
            shutil.copytree(made_before, path / "data")
        if skip is not None:
            RunDirectory(path).control_dir.mkdir(parents=True)
            RunDirectory(path).control("skip").write_text(f"{skip[0]}:{skip[1]}\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "train_step", faulty(real, faults))
            for stop in stops:
                loaded = _loaded(corpus, *overrides, f"guard.stop_at_step={stop}")
                loop.train(loaded, RunDirectory(path), StartOptions(say=lambda line: None))
        if not made_before.exists():
            shutil.copytree(path / "data", made_before)
        return path

    return train


@pytest.fixture(scope="module")
def clean(go: Go) -> list[float]:
    """The held-out losses at the end of runs with other seeds, whose data never had the fault."""
    ends = [held_out(go(f"seed-{seed}", Faults(), f"run.seed={seed}")) for seed in range(SEEDS)]
    _tell(case="undisturbed", held_out=ends)
    return ends


def events(path: Path, name: str) -> list[dict]:
    return [record for record in read_journal(RunDirectory(path).journal()) if record["event"] == name]


def held_out(path: Path) -> float:
    """The held-out loss at the end: of the last step, or between peers of an evaluation after it."""
    records = [*events(path, "step"), *events(path, "evaluation")]
    return float([r["held_out_loss"] for r in records if r["held_out_loss"] is not None][-1])


def highest(path: Path) -> float:
    """The highest loss after the start, of all steps that were made."""
    return max(float(record["loss"]) for record in events(path, "step") if record["step"] > 200)


def is_within_seeds(value: float, clean: list[float]) -> bool:
    return abs(value - mean(clean)) <= 3.0 * stdev(clean)


@pytest.mark.parametrize("poison", ["shuffled", "repeats"])
def test_a_poisoned_span_is_left_out_and_stays_left_out_after_a_restart(
    go: Go, clean: list[float], tmp_path: Path, poison: str
) -> None:
    poisoned = range((FIRST_BAD - 1) * BATCH, (FIRST_BAD - 1 + POISONED_STEPS[poison]) * BATCH)
    harmed = go(f"{poison}-unguarded", Faults(poison=poison, span=poisoned), *UNGUARDED)
    faults = Faults(poison=poison, span=poisoned, record=tmp_path)
    healed = go(poison, faults, stops=(300, 330, 0))
    rewinds = events(healed, "rewind")
    never = go(f"{poison}-never", Faults(), skip=rewinds[-1]["skip"])
    _tell(
        case=f"{poison} tokens",
        highest_unguarded=highest(harmed),
        highest_undisturbed=highest(harmed.with_name("seed-0")),
        held_out_unguarded=held_out(harmed),
        held_out_healed=held_out(healed),
        held_out_without_these_samples=held_out(never),
        rewinds=[[r["step"], r["to_step"], r["rung"], r["skip"]] for r in rewinds],
    )
    assert highest(harmed) > highest(harmed.with_name("seed-0")) + 1.0
    assert [record["rung"] for record in rewinds] == ["repeat", "skip"]
    (first, last), back = rewinds[-1]["skip"], rewinds[-1]["to_step"]
    assert first == back * BATCH and first <= poisoned.start and last >= poisoned.stop
    # From the step rewound to up to where the spike was judged, and the steps beyond that.
    assert last == (rewinds[-1]["step"] + 20) * BATCH
    used = samples_of(tmp_path)
    assert used == [*range(first), *range(last, last + STEPS * BATCH - first)]
    assert loss_curve(RunDirectory(healed)) == loss_curve(RunDirectory(never)), "bit for bit"
    assert is_within_seeds(held_out(healed), clean)


def test_a_learning_rate_that_was_wrong_once_leaves_no_trace(go: Go, clean: list[float]) -> None:
    faults = Faults(rate=60.0, steps=range(FIRST_BAD, FIRST_BAD + 12))
    harmed = go("rate-unguarded", faults, *UNGUARDED, "run.seed=0")
    healed = go("rate", faults, "run.seed=0")
    skipped = go("rate-skipped", faults, "run.seed=0", "guard.repeat=false")
    kinds = [record.get("kind") for record in events(healed, "guard")]
    _tell(
        case="learning rate × 60 for 12 steps",
        highest_unguarded=highest(harmed),
        held_out_unguarded=held_out(harmed),
        held_out_healed=held_out(healed),
        held_out_skipped=held_out(skipped),
        rewinds=[[r["step"], r["to_step"], r["rung"]] for r in events(healed, "rewind")],
    )
    assert highest(harmed) > highest(harmed.with_name("seed-0")) + 1.0
    assert [record["rung"] for record in events(healed, "rewind")] == ["repeat"]
    assert "other bits" in kinds, "the same step on the same data came to another loss"
    undisturbed = harmed.with_name("seed-0")
    assert loss_curve(RunDirectory(healed)) == loss_curve(RunDirectory(undisturbed)), "bit for bit"
    assert [record["rung"] for record in events(skipped, "rewind")] == ["skip"]
    assert is_within_seeds(held_out(skipped), clean)


def test_a_learning_rate_that_is_wrong_again_and_again_ends_with_a_call_for_a_person(go: Go) -> None:
    path = go("rate-always", Faults(rate=400.0, steps=range(FIRST_BAD, STEPS), times=math.inf))
    rungs = [record["rung"] for record in events(path, "rewind")]
    end = events(path, "end")[-1]
    _tell(case="learning rate × 400 each time", rungs=rungs, end=end["reason"])
    assert rungs == ["repeat", "skip", "slow", "clamp"]
    assert "a person has to look" in end["reason"]


def test_remedies_are_tried_on_forks_adopted_where_they_help_and_discarded_where_not(go: Go) -> None:
    poisoned = range((FIRST_BAD - 1) * BATCH, (FIRST_BAD - 1 + 25) * BATCH)
    helped = go("tried", Faults(poison="shuffled", span=poisoned), "guard.trial_steps=30")
    adopted = [record for record in events(helped, "guard") if record.get("kind") == "remedy adopted"]
    rewinds = events(helped, "rewind")
    faults = Faults(rate=400.0, steps=range(FIRST_BAD, STEPS), times=math.inf)
    path = go("tried-in-vain", faults, "guard.trial_steps=30")
    again, end = events(path, "rewind"), events(path, "end")[-1]
    starts = [record["step"] for record in events(path, "start")[1:]]
    _tell(
        case="remedies on trial",
        rewinds=[[r["step"], r["to_step"], r["rung"], r["reason"]] for r in rewinds],
        adopted=[[r["step"], r["reason"], r["numbers"]] for r in adopted],
        in_vain=[[r["step"], r["to_step"], r["rung"]] for r in again],
        end=end["reason"],
    )
    assert [record["rung"] for record in rewinds] == ["repeat", "skip"]
    assert [record["step"] for record in adopted] == [rewinds[-1]["step"] + 30]
    assert set(starts) == {starts[0]} and len(starts) == 4, "each from the same checkpoint"
    assert [record["rung"] for record in again] == ["repeat", "skip", "slow", "clamp"]
    assert "Tried on forks: Making the same steps again: the problem came again." in end["reason"]


def test_a_nan_on_one_rank_of_a_split_model_is_undone_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    layout = ("parallel.tensor=2", "parallel.pipeline=2", "train.steps=90", "train.micro_batch=4")
    layout += ("optim.name=adamw", f"data.sources={corpus}", "guard.spike_rewind_steps=10")
    curves = []
    for name, faults in (("clean", Faults()), ("nan", Faults(nan_rank=2, steps=range(61, 65)))):
        path = tmp_path / name
        ends = train_on_ranks(4, path, *layout, plant=partial(plant, faults), recipe=RECIPE, deadline_s=1200)
        assert set(ends) == {"the samples are done"}
        curves.append(loss_curve(RunDirectory(path)))
    rewinds = events(path, "rewind")
    _tell(
        case="NaN in a weight of rank 2 of TP 2 × PP 2",
        rewinds=[[r["step"], r["to_step"], r["rung"], r["reason"]] for r in rewinds],
    )
    assert [record["rung"] for record in rewinds] == ["repeat"] and "not finite" in rewinds[0]["reason"]
    assert curves[0] == curves[1], "made again without the fault, each step has the loss it would have had"
    told = [_rewinds_of(path, rank) for rank in range(4)]
    assert told[0] == told[1] == told[2] == told[3]


def test_two_peers_heal_together_when_one_of_them_is_poisoned(corpus: Path, tmp_path: Path) -> None:
    clean, _ = _two_peers(corpus, tmp_path / "clean", Faults())
    poisoned, rewinds = _two_peers(corpus, tmp_path / "poisoned", _poison_of_a_peer())
    _tell(case="one of two peers poisoned", held_out=[clean, poisoned], rewinds=rewinds)
    assert rewinds["a"] and [r[1:] for r in rewinds["a"]] == [r[1:] for r in rewinds["b"]]
    assert poisoned["a"] == poisoned["b"] and abs(poisoned["a"] - clean["a"]) < 0.1


def test_two_peers_take_every_rung_together_when_the_learning_rate_of_one_is_wrong(
    corpus: Path, tmp_path: Path
) -> None:
    faults = Faults(rate=400.0, steps=range(FIRST_BAD, STEPS), times=4, peer="b")
    held_out_losses, rewinds = _two_peers(corpus, tmp_path, faults)
    _tell(
        case="learning rate of one of two peers wrong four times", held_out=held_out_losses, rewinds=rewinds
    )
    assert [rung for *_, rung in rewinds["b"]] == ["repeat", "skip", "slow", "clamp"]
    assert [r[1:] for r in rewinds["a"]] == [r[1:] for r in rewinds["b"]]
    assert held_out_losses["a"] == held_out_losses["b"]


def _two_peers(
    corpus: Path, base: Path, faults: Faults
) -> tuple[dict[str, float], dict[str, list[list[object]]]]:
    """Train two peers to their end; return the held-out loss and the rewinds of each."""
    memory = f"checkpoint.memory_directory={base}"
    starts = {peer: (_loaded(corpus, *_PEERS, memory), base / peer) for peer in "ab"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", faulty(loop.train_step, faults))
        meeting = meeting_of(starts["a"][0], starts)
        meeting.deadline_s = 1200.0
        outcomes = train_peers(meeting, starts)
    assert all(outcome.finished for outcome in outcomes.values())
    losses = {peer: held_out(path) for peer, (_, path) in starts.items()}
    rewinds = {peer: _rewinds_of(path) for peer, (_, path) in starts.items()}
    assert len([commit for commit in meeting.commits if commit.rewind_to is not None]) == len(rewinds["a"])
    return losses, rewinds


_PEERS = (
    "elastic.inner_steps=10",
    "elastic.codec=fp32",
    "train.steps=0",
    f"train.samples={2 * STEPS * BATCH}",
    "checkpoint.every_steps=10",
    "guard.spike_patience=6",
)


def _poison_of_a_peer() -> Faults:
    """25 steps of peer b, as many after the start-up as in a run of one peer."""
    first = 2 * (FIRST_BAD - 1) * BATCH
    return Faults(poison="shuffled", span=range(first, first + 2 * 25 * BATCH), peer="b")


def _rewinds_of(path: Path, rank: int = 0) -> list[list[object]]:
    records = read_journal(RunDirectory(path).journal(rank=rank))
    return [[r["step"], r["to_step"], r["skip"], r["rung"]] for r in records if r["event"] == "rewind"]


def _loaded(corpus: Path, *overrides: str) -> LoadedRecipe:
    return parse_recipe(RECIPE, [f"data.sources={corpus}", *overrides], label="heal")


def _tell(**figures: object) -> None:
    print(json.dumps(figures), flush=True)
