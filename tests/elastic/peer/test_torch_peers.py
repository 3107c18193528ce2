"""Whole peers, as their users start them: real parents, ranks that train, etcd, rings and checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch_crew import TorchCrew

from bloomery.checkpoint.catalogue import checkpoints
from bloomery.checkpoint.load import read_tensors
from bloomery.events.journal import read_journal
from bloomery.events.rundir import RunDir

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def torch_crew(tmp_path, coordinator_of_one, corpus, prepared):
    crews = []

    def make(*overrides: str) -> TorchCrew:
        crews.append(TorchCrew(tmp_path, coordinator_of_one.endpoint, corpus, prepared, *overrides))
        return crews[-1]

    yield make
    for crew in crews:
        crew.__exit__()


def held(crew: TorchCrew, name: str, *prefixes: str) -> dict[str, torch.Tensor]:
    newest = checkpoints(RunDir(crew.base / name))[-1].directory
    return {tensor: one for prefix in prefixes for tensor, one in read_tensors(newest, prefix=prefix)}


def hold_the_same(crew: TorchCrew, *prefixes: str) -> bool:
    a, b = (held(crew, name, *prefixes) for name in "ab")
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def both_ended_well(crew: TorchCrew) -> None:
    for name in "ab":
        assert crew.peers[name].wait() == 0, crew.peers[name].said
    assert not crew.left_in_memory


def journal(run: Path, event: str) -> list[dict]:
    return [one for one in read_journal(RunDir(run).journal()) if one["event"] == event]


def test_a_peer_of_several_ranks_that_loses_one_is_dropped_at_once_and_comes_back(torch_crew):
    crew = torch_crew("train.samples=1_000_000")
    for name in "ab":
        crew.start(name, nproc=2)
    crew.until_committed("a", "b")
    dead = crew.peers["b"]
    crew.dead.append(dead)
    os.kill(dead.ranks[1], signal.SIGKILL)
    crew.until_committed("a")
    assert dead.wait() != 0
    crew.start("b", nproc=2)
    crew.until_committed("a", "b")
    crew.stop()
    crew.check_accounts()
    assert not crew.left_in_memory


def test_a_rank_that_stands_still_between_rings_is_unlisted_and_comes_back(torch_crew):
    crew = torch_crew("train.samples=1_000_000", "elastic.inner_steps=40", "elastic.still_s=6")
    for name in "ab":
        crew.start(name)
    crew.until_committed("a", "b")
    still = crew.peers["b"]
    told = len(still.events("go"))
    crew.until(lambda: len(still.events("go")) > told, "b begins a round")
    made = len(journal(crew.base / "b", "step"))
    crew.until(lambda: len(journal(crew.base / "b", "step")) > made, "b makes steps of it")
    still.signal(signal.SIGSTOP)
    crew.until(lambda: still.events("evicted"), "b is unlisted")
    crew.until_committed("a", more=2)
    still.signal(signal.SIGCONT)
    crew.until(lambda: still.events("back"), "b moves again")
    crew.until_committed("a", "b")
    crew.stop()
    crew.check_accounts()


def test_streamed_fragments_leave_both_with_the_same_shared_state(torch_crew):
    crew = torch_crew(
        "train.samples=160",
        "elastic.inner_steps=4",
        "elastic.fragments=2",
        "elastic.overlap_steps=1",
        "elastic.mixing=0.5",
        "elastic.codec=int4",
    )
    for name in "ab":
        crew.start(name, nproc=2)
    both_ended_well(crew)
    crew.check_accounts()
    assert hold_the_same(crew, "outer.base", "outer.momentum")
    assert not hold_the_same(crew, "model.")  # what the last steps did is each peer's own
    late = crew.start("a", nproc=2)
    assert late.wait() == 0, late.said  # nothing is left to be done


def test_what_a_guard_of_one_peer_wants_back_is_taken_back_by_both(torch_crew):
    crew = torch_crew(
        "train.samples=400",
        "optim.learning_rate=1e-6",  # losses that go up and down
        "guard.spike_patience=1",
        "guard.spike_window=2",
        "guard.spike_rewind_steps=1",
        "guard.spike_skip_steps=1",
        "guard.spike_rewinds=1000",
        "checkpoint.every_steps=3",
    )
    for name in "ab":
        crew.start(name)
    crew.until_committed("a", "b", more=2)
    setting = RunDir(crew.base / "b").control("set")
    setting.write_text("guard.spike_threshold=0.0001\n")
    crew.until(lambda: any(one.rewind_to is not None for one in crew.rounds().values()), "the run goes back")
    setting.write_text("guard.spike_threshold=0.0\n")
    both_ended_well(crew)
    back = [one for one in crew.rounds().values() if one.rewind_to is not None]
    assert all(one.rewind_to < one.round and "b: loss" in one.why for one in back)
    assert crew.rounds()[max(crew.rounds())].position.skips
    for name in "ab":
        assert len(journal(crew.base / name, "rewind")) == len(back)
    assert hold_the_same(crew, "model.", "outer.")
