"""Mixtures, splits and orders in a run: end to end, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.range_server import serving

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.retention import last_single_pass
from bloomery.cli import main
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.validate import check_recipe
from bloomery.data.dataset_shares import Extent, claims
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.mixture import Mixture
from bloomery.data.order import order_through
from bloomery.data.position import Position
from bloomery.data.sealing import seal
from bloomery.errors import ConfigError, DataError
from bloomery.events.journal import loss_curve, read_journal
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import CarryOn
from bloomery.train.data_stream import demand_of
from bloomery.train.loop import train
from bloomery.train.observers import SlowDataWarning
from bloomery.train.settings import StartOptions
from bloomery.train.state import TrainingOutcome

Start = Callable[..., tuple[LoadedRecipe, Path]]


def go(loaded: LoadedRecipe, path: Path) -> TrainingOutcome:
    return train(loaded, RunDirectory(path), StartOptions(say=lambda line: None))


def events(path: Path, name: str) -> list[dict]:
    return [record for record in read_journal(RunDirectory(path).journal()) if record["event"] == name]


SMALL = 40
"""Samples of the small dataset."""


@pytest.fixture
def mixed(start: Start, prepared: Path, tmp_path: Path) -> Start:
    """A run on two tokenised datasets: the tiny corpus, and a few of its held-out tokens."""
    tokens = IndexedDataset(prepared / "held-out").window(0, SMALL * 32 + 1)
    with IndexedWriter(tmp_path / "small", dtype="<u2") as writer:
        for piece in np.array_split(tokens, 20):
            writer.add_document(piece)

    def begin(*overrides: str, second: str = "", name: str = "mixed") -> tuple[LoadedRecipe, Path]:
        datasets = (
            f'[{{name = "large", path = "{prepared}/train"}}, '
            f'{{name = "small", path = "{tmp_path}/small"{second}}}]'
        )
        return start(
            "data.sources=[]",
            f"data.datasets={datasets}",
            f"data.tokenizer={prepared}/tokenizer.json",
            *overrides,
            name=name,
        )

    return begin


@pytest.mark.parametrize("order", ["bloomery", "megatron"])
def test_a_mixture_goes_on_bit_for_bit_in_either_order(mixed: Start, order: str) -> None:
    settings = (f"data.order={order}", "data.split=[8, 2]", "train.ramp_up=[]", "data.prefetch=3")
    unbroken = mixed(*settings, name="unbroken")
    assert go(*unbroken).finished
    assert any(record["held_out_loss"] is not None for record in events(unbroken[1], "step"))
    loaded, path = mixed(*settings, "guard.stop_at_step=4", name="broken")
    go(loaded, path)
    go(*mixed(*settings, "train.micro_batch=4", name="broken"))
    curves = [dict(loss_curve(RunDirectory(one))) for one in (unbroken[1], path)]
    assert curves[0].keys() == curves[1].keys()
    assert all(curves[1][step] == pytest.approx(loss, abs=2e-5) for step, loss in curves[0].items())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("data.packing=documents",), "a token would attend to all of them"),
        (("data.packing=shifted", "data.order=megatron"), "Megatron's order has its own samples"),
    ],
)
def test_a_packing_that_does_not_fit_is_refused(
    mixed: Start, settings: tuple[str, ...], problem: str
) -> None:
    loaded, _ = mixed(*settings)
    with pytest.raises(ConfigError, match=problem):
        check_recipe(loaded.recipe, loaded.sources)


@pytest.mark.parametrize("packing", ["shifted", "documents"])
def test_a_packed_run_that_is_broken_off_goes_on_as_if_it_had_not_been(mixed: Start, packing: str) -> None:
    settings = (f"data.packing={packing}", "data.mask_documents=true")
    unbroken = mixed(*settings, name="unbroken")
    assert go(*unbroken).finished
    go(*mixed(*settings, "guard.stop_at_step=4"))
    loaded, path = mixed(*settings)
    assert go(loaded, path).finished
    curves = [dict(loss_curve(RunDirectory(one))) for one in (unbroken[1], path)]
    assert curves[0] == curves[1]


def test_a_run_of_megatrons_order_refuses_to_become_another(mixed: Start) -> None:
    go(*mixed("data.order=megatron", "guard.stop_at_step=2"))
    with pytest.raises(DataError, match="made for other datasets, weights or a run of another length") as no:
        go(*mixed("data.order=megatron", "train.samples=160"))
    assert "made for, 96" in no.value.remedy
    loaded, path = mixed("data.order=megatron", "train.samples=160", "train.steps=0", name="mixed")
    assert loaded.recipe.data.order_samples == "auto" and path.exists()


def test_the_end_of_an_epoch_is_journalled_and_known_to_checkpoints(
    mixed: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, path = mixed("checkpoint.keep_last=99", "checkpoint.every_steps=1")
    go(loaded, path)
    (ended,) = events(path, "epoch_end")
    assert ended["dataset"] == "small"
    at = ended["sample"]
    assert SMALL < at <= 96  # half of all samples are its own
    steps = {record["step"]: record["cursor"] for record in events(path, "step")}
    assert steps[ended["step"]] >= at > steps[ended["step"] - 1]
    for record in events(path, "checkpoint"):
        about = json.loads((path / "checkpoints" / record["path"] / "manifest.json").read_text())["about"]
        assert about["epoch_end_ahead"] == (at if about["cursor"] < at else None)
        assert about["first_epoch_end"] == at
    last = last_single_pass(checkpoints(RunDirectory(path)))
    assert last is not None and steps[last.step] <= at < steps[last.step + 1]
    assert main(["ckpt", "list", str(path), "--single-pass", "--json"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["step"] == last.step


def test_an_epoch_that_ended_before_a_stop_is_not_journalled_again_by_the_next_start(mixed: Start) -> None:
    settings = ("train.samples=160", "train.ramp_up=[]", "evaluate.every_steps=0")
    for stop in (15, 0):
        loaded, path = mixed(*settings, f"guard.stop_at_step={stop}")
        go(loaded, path)
    (ended,) = [record for record in events(path, "epoch_end") if record["dataset"] == "small"]
    assert ended["incarnation"] == 1
    assert {record["incarnation"] for record in events(path, "step")} == {1, 2}


def test_the_held_out_loss_follows_the_catalogues_ratios_for_validation(mixed: Start, tmp_path: Path) -> None:
    catalogue = tmp_path / "catalogue.json"
    train = [{"dataset_path": "large", "ratio": 0.5}, {"dataset_path": "small", "ratio": 0.5}]
    settings = ("data.split=[8, 2]", f"data.weights_file={catalogue}", "guard.stop_at_step=2")
    found = {}
    for ratios in ((1.8, 0.2), (0.0, 1.0)):
        valid = [
            {"dataset_path": name, "ratio": r} for name, r in zip(("large", "small"), ratios, strict=True)
        ]
        catalogue.write_text(json.dumps({"train": train, "valid": valid}))
        loaded, path = mixed(*settings, "evaluate.every_steps=2", name=f"run{ratios[0]}")
        go(loaded, path)
        (found[ratios],) = [event for event in events(path, "step") if event["held_out_loss"] is not None]
    both = found[1.8, 0.2]["held_out_by_dataset"]
    assert found[1.8, 0.2]["held_out_loss"] == pytest.approx(0.9 * both["large"] + 0.1 * both["small"])
    alone = found[0.0, 1.0]
    assert alone["held_out_by_dataset"] is None and alone["held_out_loss"] != found[1.8, 0.2]["held_out_loss"]
    catalogue.write_text(json.dumps({"train": train, "valid": {"medium": 1.0}}))
    with pytest.raises(DataError, match="validates on what the recipe lacks: 'medium'"):
        go(*mixed(*settings))


def test_a_changed_mixture_is_journalled_with_its_shares(mixed: Start) -> None:
    go(*mixed("guard.stop_at_step=3"))
    loaded, path = mixed("guard.stop_at_step=6", second=", weight = 3.0")
    go(loaded, path)
    (changed,) = events(path, "mixture")
    assert changed["shares"] == {"large": 0.25, "small": 0.75}
    assert changed["at"] == events(path, "start")[-1]["position"]["consumed"]
    go(*mixed("guard.stop_at_step=7", second=", weight = 3.0"))
    assert len(events(path, "mixture")) == 1


def given(path: Path, prepared: Path, small: Path) -> dict[str, list[int]]:
    """How often each window of the run's two datasets was read, from its newest checkpoint."""
    directory = checkpoints(RunDirectory(path))[-1].directory
    values: Any = read_manifest(directory).values
    windows = [IndexedDataset(prefix).window_count(32) for prefix in (prepared / "train", small)]
    known = [Mixture.from_json(one, windows=windows) for one in values["data"]["mixtures"]]
    cursor = Position.from_json(values["train"]["position"]).cursor
    chosen, numbers = order_through(known, 1234).locate_samples(np.arange(cursor))
    return {
        name: np.bincount(numbers[chosen == number], minlength=windows[number]).tolist()
        for number, name in enumerate(("large", "small"))
    }


def test_a_run_learns_the_same_from_a_corpus_that_is_read_over_the_network(
    mixed: Start, start: Start, prepared: Path, tmp_path: Path
) -> None:
    local = mixed(name="local")
    go(*local)
    seal(tmp_path / "small", vocabulary_size=None, end_of_document_id=None, block_bytes=512)
    (tmp_path / "bucket").mkdir()
    for one in (*prepared.glob("train.*"), *tmp_path.glob("small.*")):
        (tmp_path / "bucket" / one.name).symlink_to(one)
    with serving(tmp_path / "bucket") as served:
        names = (("large", "train"), ("small", "small"))
        pairs = ", ".join(f'{{name = "{name}", path = "{served.url}/{file}"}}' for name, file in names)
        given = ("data.sources=[]", f"data.datasets=[{pairs}]", f"data.tokenizer={prepared}/tokenizer.json")
        loaded, path = start(*given, "guard.stop_at_step=5", f"data.cache={tmp_path}/cache", name="far")
        go(loaded, path)
        assert any(request.endswith("small.bin") for request in served.requests)
        go(*start(*given, f"data.cache={tmp_path}/cache", name="far"))
    assert loss_curve(RunDirectory(path)) == loss_curve(RunDirectory(local[1]))
    assert list((tmp_path / "cache").rglob("small.bin"))


def test_a_budget_is_read_once_though_batch_and_length_change_in_mid_run(
    mixed: Start, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = f", tokens = {SMALL * 32}"
    settings = ("run.seed=1234", "train.ramp_up=[]")
    go(*mixed(*settings, "guard.stop_at_step=5", second=second))
    longer = (*settings, "train.global_batch=6", "train.samples=100")
    loaded, path = mixed(*longer, "guard.stop_at_step=9", "checkpoint.every_steps=2", second=second)
    (path / "control" / "set").write_text("train.samples=132\n")  # while it runs
    go(loaded, path)
    go(*mixed(*settings, "train.global_batch=4", "train.samples=130", second=second))
    counts = given(path, prepared, tmp_path / "small")
    assert counts["small"] == [1] * SMALL
    changes = events(path, "mixture")
    assert [record["at"] for record in changes] == sorted(record["at"] for record in changes)
    assert main(["data", "report", str(path), "--json"]) == 0
    large, small = json.loads(capsys.readouterr().out)["datasets"]
    whole = sum(map(sum, counts.values()))
    assert small["delivered"] == pytest.approx(SMALL / whole)
    assert large["delivered"] == pytest.approx(sum(counts["large"]) / whole)
    cursors = {record["step"]: record["cursor"] for record in events(path, "step")}
    (ended,) = [record for record in events(path, "epoch_end") if record["dataset"] == "small"]
    assert cursors[small["first_epoch_step"]] >= ended["sample"] > cursors[small["first_epoch_step"] - 1]


def test_the_report_of_a_run_counts_what_was_given_under_earlier_weights(
    mixed: Start, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("run.seed=1234", "train.ramp_up=[]")
    go(*mixed(*settings, "guard.stop_at_step=6"))
    _, path = mixed(*settings, second=", weight = 0.0")
    go(*mixed(*settings, second=", weight = 0.0"))
    counts = given(path, prepared, tmp_path / "small")
    assert main(["data", "report", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 96
    assert [row["wanted"] for row in told["datasets"]] == [1.0, 0.0]
    for row in told["datasets"]:
        assert row["delivered"] == pytest.approx(sum(counts[row["name"]]) / 96)
    assert 0.1 < told["datasets"][1]["delivered"] < 0.4
    assert main(["data", "audit", str(path), "--to", str(tmp_path / "audit"), "--json"]) in (0, 1)
    audited = json.loads(capsys.readouterr().out)
    assert audited["mixtures"] == 2 and not [about for about in audited["look_at"] if "delivered" in about]
    for row in audited["datasets"]:
        assert row["wanted"] == pytest.approx(row["delivered"], abs=2 / 96)


@pytest.mark.parametrize("datasets", [1, 4])
def test_a_run_of_all_its_budgets_tokens_is_met_though_each_is_rounded_to_samples(datasets: int) -> None:
    tokens = 10 * 64 + 63  # of each dataset: its last sample lacks one token
    budgets = ", ".join(f'{{name = "d{n}", path = "p{n}", tokens = {tokens}}}' for n in range(datasets))
    settings = ("train.global_batch=1", "train.micro_batch=1", "train.ramp_up=[]", "train.samples=0")
    recipe = load_recipe(
        "demo",
        [
            *settings,
            f"data.datasets=[{budgets}]",
            "data.sources=[]",
            "data.sequence_length=64",
            f"train.tokens={datasets * tokens}",
        ],
    ).recipe
    extents = [Extent(name=f"d{n}", tokens=tokens, windows=10) for n in range(datasets)]
    shares = demand_of(recipe, claims(recipe.data, extents)).shares()
    assert shares == (Fraction(1, datasets),) * datasets


def test_a_budget_that_cannot_be_kept_stops_the_run_before_it_starts(mixed: Start) -> None:
    with pytest.raises(DataError, match=r"'small' has a budget of .* too small for it"):
        go(*mixed(second=", tokens = 100_000_000"))
    with pytest.raises(ConfigError, match="'small' has tokens and weight"):
        from bloomery.config.validate import check_recipe

        loaded, _ = mixed(second=", tokens = 10, weight = 2.0")
        check_recipe(loaded.recipe, loaded.sources)


def test_steps_that_wait_for_samples_name_the_data_pipeline() -> None:
    said: list[str] = []
    watch = SlowDataWarning(said.append)
    usual = {field: 0 for field in StepReport.__dataclass_fields__ if field not in ("facts", "held_out_loss")}
    for step in range(1, 61):
        slow = 20 < step <= 40
        told = {**usual, "step": step, "seconds": 1.0, "data_wait_s": 0.5 if slow else 0.01}
        watch.tell(StepReport(**told), CarryOn(judged_step=step))
        assert not said or step > 20
    assert said and len(said) < 4  # once for each stretch, not at every step
    assert all("the data pipeline is the bottleneck" in line and "data.prefetch" in line for line in said)
