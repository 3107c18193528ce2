from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bloomery.cli import main
from bloomery.cli.simulate import daily_hours
from bloomery.plan.simulate.cluster import simulate_cluster
from bloomery.plan.simulate.scenario import load_scenario

SHORT = ("run.days=20", "--lives", "3")


def test_a_forecast_is_a_table_of_hours_that_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "bloom-176b", *SHORT]) == 0
    told = capsys.readouterr().out
    assert "goodput" in told and "lost work" in told
    assert max(len(line) for line in told.splitlines()) <= 100


def test_json_holds_hours_that_sum_to_the_simulated_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "intellect1-usa", "--json", *SHORT]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["hours"].values()) == pytest.approx(480.0)
    assert told["goodput"] == pytest.approx(told["hours"]["training"] / 480.0)


def test_a_sweep_tells_the_best_value_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sweep.png"
    sweep = "checkpoint.every_minutes=1,120,6000"
    assert main(["simulate", "bloom-176b", *SHORT, "--sweep", sweep, "--png", str(picture)]) == 0
    told = capsys.readouterr().out
    assert told.rstrip().endswith("best: checkpoint.every_minutes=120")
    assert max(len(line) for line in told.splitlines()) <= 100
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_days_of_a_life_are_drawn_whole(tmp_path: Path) -> None:
    picture = tmp_path / "life.png"
    assert main(["simulate", "llama3-405b", *SHORT, "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    bars = daily_hours(
        simulate_cluster(load_scenario("bloom-176b", ["run.days=9.5"]), seed=0), hours_a_bar=24
    )
    assert [sum(bar.values()) for bar in bars] == pytest.approx([24.0] * 9 + [12.0])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "there is no such scenario"),
        (["bloom-176"], "Did you mean 'bloom-176b'?"),
        (["bloom-176b", "cluster.gpus=7"], "no whole number of nodes"),
    ],
)
def test_bad_input_gets_one_message(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said


def test_without_a_scenario_the_shipped_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 0
    assert "llama3-405b" in capsys.readouterr().out


class Bars:
    """Stands for the bars of rich, and keeps what was asked of them."""

    asked: ClassVar[list[Any]] = []

    def __init__(self, *, console: Any, transient: bool) -> None:
        self.asked.append((console.stderr, transient))

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *error: object) -> None:
        self.asked.append("gone")

    def add_task(self, title: str, *, total: int) -> int:
        self.asked.append((title, total))
        return 7

    def advance(self, task: int) -> None:
        self.asked.append(task)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_each_simulation_has_a_bar_of_its_lives_on_a_terminal_and_none_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Bars.asked.clear()
    monkeypatch.setattr("rich.progress.Progress", Bars)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    sweep = ["--sweep", "checkpoint.every_minutes=30,60"]
    assert main(["simulate", "bloom-176b", "run.days=1", "--lives", "2", *sweep]) == 0
    begun = [(True, True), ("bloom-176b checkpoint.every_minutes=30", 2), 7, 7, "gone"]
    then = [(True, True), ("bloom-176b checkpoint.every_minutes=60", 2), 7, 7, "gone"]
    assert Bars.asked == ([*begun, *then] if is_terminal else [])
    assert "best: " in capsys.readouterr().out
