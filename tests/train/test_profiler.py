"""The profile of some steps: its files name the operators of those steps and of no others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.config.load import load_recipe
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError
from bloomery.guard.verdict import CarryOn
from bloomery.train.observers import StepProfiler


def profiled(tmp_path: Path, *, completed: int, steps: range) -> tuple[Path, list[str]]:
    """Make steps of which each multiplies matrices of its own size, and profile the third and fourth."""
    run, said = WrittenRun(tmp_path / "run"), list[str]()
    profiler = StepProfiler(
        tmp_path / "of the run" / "profiles",
        first=3,
        last=4,
        completed=completed,
        device=torch.device("cpu"),
        say=said.append,
    )
    for step in steps:
        torch.ones(step, 8) @ torch.ones(8, step)
        run.step = step
        profiler.tell(run.report(2.0), CarryOn(judged_step=step))
    profiler.close()
    assert not torch.autograd._profiler_enabled()
    return tmp_path / "of the run" / "profiles", said


def test_a_trace_and_a_table_hold_the_operators_of_the_chosen_steps_alone(tmp_path: Path) -> None:
    place, said = profiled(tmp_path, completed=0, steps=range(1, 7))
    trace = json.loads(gzip.decompress((place / "steps-3-4.trace.json.gz").read_bytes()))
    sizes = [
        event["args"]["Input Dims"][0][0]
        for event in trace["traceEvents"]
        if event.get("name") == "aten::mm" and "Input Dims" in event.get("args", {})
    ]
    assert sizes == [3, 4]
    assert "aten::mm" in (place / "steps-3-4.txt").read_text()
    assert len(said) == 1 and "steps-3-4.trace.json.gz" in said[0]


def test_a_start_behind_the_chosen_steps_or_an_end_before_them_leaves_nothing(tmp_path: Path) -> None:
    for completed, steps in ((3, range(4, 7)), (0, range(1, 4))):
        place, said = profiled(tmp_path, completed=completed, steps=steps)
        assert not place.exists() and not said


@pytest.mark.parametrize("steps", ["[3]", "[4, 3]", "[0, 3]"])
def test_steps_that_are_no_range_are_refused(steps: str) -> None:
    with pytest.raises(ConfigError, match=r"log\.profile_steps"):
        loaded = load_recipe("demo", [f"log.profile_steps={steps}"])
        check_recipe(loaded.recipe, loaded.sources)
