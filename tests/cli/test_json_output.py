"""What `--json` prints, every reader of JSON takes: also where a loss or a setting is no finite number."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.cli.in_process import status_of

import bloomery.cli
from bloomery.chaos.scenario import ScenarioOutcome
from bloomery.cli import chaos
from bloomery.cli.json_output import json_text
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory

COMMANDS = Path(bloomery.cli.__file__).parent
OWN_RECORDS = {"fork.py": 2, "nodes.py": 1, "preflight.py": 1, "json_output.py": 1}
"""Modules that call `json.dumps` for what bloomery itself reads again, and how often."""


def strict(text: str) -> Any:  # Any: parsed JSON
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_texts_and_all_others_stay() -> None:
    facts = {"a": [math.nan, math.inf, (-math.inf, 0.1)], "é": None, "n": 3, "yes": True}
    told = strict(json_text(facts))
    assert told == {"a": ["NaN", "Infinity", ["-Infinity", 0.1]], "é": None, "n": 3, "yes": True}
    assert json_text({"é": 1}) == '{"\\u00e9": 1}' and json_text({"é": 1}, ensure_ascii=False) == '{"é": 1}'
    assert json_text([1], indent=1) == "[\n 1\n]"
    assert json_text([Path("x")], default=str) == '["x"]'
    with pytest.raises(TypeError, match="Path has no place"):
        json_text([Path("x")])


def test_an_exercise_whose_run_diverged_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = ScenarioOutcome(seconds=1.0, statuses={}, leftover=(), commits=(), injected=())
    monkeypatch.setattr("bloomery.chaos.scenario.run_scenario", lambda settings, watch: outcome)
    for name in chaos.peer_names(2):
        with Journal(RunDirectory(tmp_path / name).create().journal()) as journal:
            journal.write("step", incarnation=1, step=3, global_batch=4, loss=math.nan)
    chaos.simulate_internet(["--peers", "2", "--directory", str(tmp_path), "--json"])
    assert strict(capsys.readouterr().out)["loss"] == "NaN"


def test_a_setting_that_is_no_number_is_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("config", "check", "demo", "optim.learning_rate=nan", "--json") == 2
    (mistake,) = strict(capsys.readouterr().out)["mistakes"]
    assert mistake["value"] == "NaN"


def test_every_command_prints_its_facts_by_one_function() -> None:
    calls: dict[str, int] = {}
    for path in COMMANDS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "dumps":
                calls[path.name] = calls.get(path.name, 0) + 1
    assert calls == OWN_RECORDS
