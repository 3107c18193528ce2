"""A Hub on loopback, and a run whose writers go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operate.sync.hub_server import TOKEN, Hub, hub_served

from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_served() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield served


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two ranks with a journal, logs, TensorBoard records and a recipe."""
    rundir = RunDirectory(tmp_path / "run").create()
    rundir.incarnation(1).write_text('{"base": null}')
    rundir.recipe.write_text("[run]\nname = 'tiny'\n")
    for rank in (0, 1):
        write_steps(rundir, 1, 6, rank=rank)
        rundir.log(host="vm", rank=rank).write_text(f"rank {rank}\n")
    (rundir.tensorboard / "events.out.tfevents.1.vm").write_bytes(b"".join(map(record, (b"a", b"bb"))))
    return rundir


@pytest.fixture
def bare(tmp_path: Path) -> RunDirectory:
    """A run of one log and a recipe."""
    run = RunDirectory(tmp_path / "bare").create()
    run.recipe.write_text("[run]\n")
    run.log(host="vm", rank=0).write_text("one\ntwo\n")
    return run


def write_steps(rundir: RunDirectory, first: int, end: int, *, rank: int = 0) -> None:
    with Journal(rundir.journal(rank=rank)) as journal:
        for step in range(first, end):
            journal.write("step", incarnation=1, step=step, loss=4.0 - step / 100, tokens_per_s=1000.0)


def record(content: bytes) -> bytes:
    """Return a record as TensorBoard's files have them; nobody here reads the checksums."""
    return len(content).to_bytes(8, "little") + b"sum1" + content + b"sum2"
