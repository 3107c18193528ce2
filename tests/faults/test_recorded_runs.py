"""Run directories that an earlier version wrote: this one goes on with them, and loses nothing.

`tests/recorded/runs-of-6af57c4.tar.xz` holds four runs that commit 6af57c4 stopped half way, their recipe and
corpus, and `losses.json`: the losses of the same runs, unbroken, by that commit. On the machine that recorded
them the losses are equal to the bit; elsewhere products are summed in another order, hence the tolerance. The
recipe drops nothing: the masks of dropout have changed since (CHANGELOG).
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from tests.faults.commands import bloomery

from bloomery.events.journal import loss_curve, read_journal
from bloomery.events.run_directory import RunDirectory

RECORDED = Path(__file__).parents[1] / "recorded" / "runs-of-6af57c4.tar.xz"
HALF, WHOLE = 9, 15  # steps


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.mark.parametrize(
    ("run", "options", "tolerance"),
    [
        ("alone", (), 1e-4),
        ("muon", ("train.precision=bf16", "optim.name=muon"), 2e-2),
        ("zero", ("--nproc", "2", "parallel.zero=1"), 1e-4),
        ("tp2pp2", ("--nproc", "4", "parallel.tensor=2", "parallel.pipeline=2"), 1e-4),
    ],
)
def test_a_recorded_run_resumes_with_nothing_lost(
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: str,
    options: tuple[str, ...],
    tolerance: float,
) -> None:
    monkeypatch.chdir(recorded)
    directory = RunDirectory(recorded / "runs" / run)
    before = dict(loss_curve(directory))
    assert max(before) == HALF
    ended = bloomery("train", "tiny.toml", "--run", directory.path, "--plain", *options, "schedule.decay=96")
    assert ended.status == 0, ended
    after = dict(loss_curve(directory))
    expected = {
        int(step): loss for step, loss in json.loads((recorded / "losses.json").read_text())[run].items()
    }
    assert list(after) == list(expected) == list(range(1, WHOLE + 1))
    assert {step: after[step] for step in before} == before
    for step, loss in expected.items():
        assert after[step] == pytest.approx(loss, abs=tolerance), step
    steps = [event for event in read_journal(directory.journal()) if event["event"] == "step"]
    assert steps[-1]["consumed_samples"] == 96
