"""Where a replay would have gone back to, in a log that holds another run before."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from bloomery.config.checkpoint import GuardSection
from bloomery.guard.ladder import Ladder
from bloomery.guard.logs import Columns
from bloomery.guard.replay import _finding
from bloomery.guard.verdict import Anomaly, Rewind


def columns(count: int) -> Columns:
    """Steps of ten samples; the first line is of another run, which was far beyond."""
    values = {field.name: np.zeros(count) for field in fields(Columns)}
    steps = np.arange(count, dtype=np.float64)
    steps[0] = 1e6
    values |= {"step": steps, "cursor": 10 * steps, "global_batch": np.full(count, 10.0)}
    return Columns(**values)


@pytest.mark.parametrize("line", [10_001, 10_250])
@pytest.mark.parametrize("back", [20, 9000])
def test_a_rewind_goes_to_the_samples_of_its_own_run(line: int, back: int) -> None:
    section = GuardSection(spike_rewind_steps=back)
    anomaly = Anomaly(judged_step=line, first_bad=line - 1, reason="high")
    found = _finding("spike", line, anomaly, columns(line + 1), Ladder(section=section))
    step = line - 1 - 1 - back
    assert isinstance(found.verdict, Rewind) and found.verdict.to_step == step
    assert found.verdict.skip == range(10 * step, 10 * step), "a first rewind leaves nothing out"
    assert isinstance(found.again, Rewind) and found.again.skip.start == 10 * step
    assert found.again.skip.stop == 10 * line + section.spike_skip_steps * 10
    assert "It came again after the same steps were made again. " in found.again.reason
