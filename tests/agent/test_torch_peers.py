"""Whole peers, as their users start them: real parents, ranks that train, etcd, rings and checkpoints."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.agent.crew import Peer
from tests.agent.torch_crew import TorchCrew

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.coordination.etcd_process import start_single
from bloomery.coordination.recovery import adopt
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory

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
    newest = checkpoints(RunDirectory(crew.base / name))[-1].directory
    return {tensor: one for prefix in prefixes for tensor, one in read_tensors(newest, prefix=prefix)}


def hold_the_same(crew: TorchCrew, *prefixes: str) -> bool:
    a, b = (held(crew, name, *prefixes) for name in "ab")
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def both_ended_well(crew: TorchCrew) -> None:
    for name in "ab":
        assert crew.peers[name].wait() == 0, crew.peers[name].said
    assert not crew.left_in_memory


def journal(run: Path, event: str) -> list[dict]:
    return [one for one in read_journal(RunDirectory(run).journal()) if one["event"] == event]


def test_a_peer_of_several_ranks_that_loses_one_is_dropped_at_once_and_comes_back_by_itself(torch_crew):
    crew = torch_crew("train.samples=1_000_000")
    crew.start("a", nproc=2)
    lossy = crew.start("b", "--supervise", nproc=2)
    crew.until_committed("a", "b")
    os.kill(lossy.ranks[1], signal.SIGKILL)
    crew.until_committed("a")
    crew.until_committed("a", "b")
    crew.stop()
    crew.check_accounts()
    assert not crew.left_in_memory
    rundir = RunDirectory(lossy.directory)
    told = [event for event in read_journal(rundir.operations) if event["event"] != "preflight"]
    assert [event["event"] for event in told] == [
        *("attempt", "attempt_end", "diagnosis", "attempt", "attempt_end")
    ]
    assert told[2]["culprit"]["rank"] == 1 and told[2]["gives_up"] == ""
    assert told[-1]["status"] in crew.asked_to_end
    assert rundir.log(host=os.uname().nodename, rank=1).exists()


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


def ended_when_asked(peer: Peer, by: str) -> bool:
    """Ask a peer that waits to stop: whether it ends as asked, has said so to the others, and has saved."""
    if by == "control/stop":
        RunDirectory(peer.directory).control("stop").touch()
    else:
        peer.process.send_signal(signal.Signals[by])
    assert peer.wait() == (0 if by == "control/stop" else 128 + signal.Signals[by]), peer.said
    (end,) = journal(peer.directory, "end")
    newest = checkpoints(RunDirectory(peer.directory))[-1].directory.name
    return not end["failed"] and bool(peer.events("leave")) and newest.startswith(f"step-{end['step']:06d}.")


@pytest.mark.parametrize("by", ["SIGINT", "control/stop"])
def test_a_peer_that_waits_for_others_to_come_ends_when_it_is_asked_to(torch_crew, by):
    crew = torch_crew("train.samples=1_000_000", "elastic.peers=2", "elastic.minimum_peers=2")
    lone = crew.start("a", nproc=2)
    crew.until(lambda: crew.etcd.get(crew.keys.member("a")), "it is listed, and waits for another")
    assert ended_when_asked(lone, by)
    assert not crew.rounds() or max(crew.rounds()) == 0
    assert not crew.left_in_memory


def test_a_peer_that_is_left_over_when_the_others_stop_ends_when_it_is_asked_to(torch_crew):
    crew = torch_crew("train.samples=1_000_000", "elastic.peers=2", "elastic.minimum_peers=2")
    for name in "ab":
        crew.start(name)
    crew.until_committed("a", "b")
    assert ended_when_asked(crew.peers["a"], "SIGTERM")
    ready = crew.keys.ready(max(crew.rounds()) + 1, "b")
    crew.until(lambda: crew.etcd.get(ready), "b has made its part of a round that nobody decides")
    assert ended_when_asked(crew.peers["b"], "SIGTERM")
    for name in "ab":
        crew.start(name)
    crew.until_committed("a", "b")
    crew.stop()
    crew.check_accounts()
    assert not crew.left_in_memory


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


def test_one_peer_backs_up_for_all_and_another_takes_over_when_it_is_gone(torch_crew, tmp_path):
    crew = torch_crew(
        "train.samples=1_000_000",
        "elastic.inner_steps=10",
        "checkpoint.every_steps=20",
        "checkpoint.keep_last=1",
        "checkpoint.keep_tenths=false",
        f"backup.url=file://{tmp_path}/elsewhere",
        "backup.finish_minutes=1",
    )
    crew.start("a")
    crew.until_committed("a")
    crew.start("b")
    crew.until_committed("a", "b")
    first, second = (tmp_path / "elsewhere" / "tiny" / name / "checkpoints" for name in "ab")
    noted = RunDirectory(crew.base / "b").backups / "duty.json"
    crew.until(lambda: json.loads(noted.read_text())["covered"] > 0, "b learns of a backup of a's")
    old = {found.name for found in checkpoints(RunDirectory(crew.base / "b"))}
    crew.until(
        lambda: not old & {found.name for found in checkpoints(RunDirectory(crew.base / "b"))},
        "b removes what a has backed up",
    )
    assert list(first.iterdir()) and not second.exists()
    crew.kill(crew.peers["a"], to="all")
    crew.until(lambda: second.exists() and list(second.glob("*/manifest.json")), "b backs up")
    crew.stop()


def test_checkpoints_alone_tell_an_empty_coordinator_where_the_run_stood(
    torch_crew, coordinator_of_one, tmp_path
):
    crew = torch_crew("train.samples=1_000_000", "checkpoint.every_steps=4", "elastic.grace_s=3")
    for name in "ab":
        crew.start(name)
    crew.until_committed("a", "b", more=3)
    crew.stop()  # each saves within a round
    before = crew.rounds()
    held = {name: round_of_checkpoint(crew.base / name) for name in "ab"}
    coordinator_of_one.kill()
    for name in "ab":
        (crew.base / name / "known.json").unlink()
    empty = start_single(tmp_path / "empty", port=coordinator_of_one.member.port)
    try:
        for name in "ab":
            crew.start(name)
        for name in "ab":
            peer = crew.peers[name]
            crew.until(
                lambda peer=peer: "bloomery coordinate --adopt" in peer.said, f"{name} says what to do"
            )
        crew.until(lambda: have_told(crew) == 2, "both have told")
        assert not crew.rounds()
        adopted = adopt(crew.etcd, crew.keys)
        assert adopted.round == max(held.values()) >= 3
        crew.until_committed("a", "b", more=1)
        restored, was = crew.rounds()[adopted.round], before[adopted.round]
        assert (restored.digest, restored.position) == (was.digest, was.position)
        crew.stop()
    finally:
        empty.stop()


def have_told(crew: TorchCrew) -> int:
    kinds = [crew.keys.parts(item.key)[0] for item in crew.etcd.list(crew.keys.peers).items]
    return kinds.count("testimony")


def round_of_checkpoint(run: Path) -> int:
    outer = read_manifest(checkpoints(RunDirectory(run))[-1].directory).values["outer"]
    return outer["round"]


ASKS_TO_GO_BACK = """
import os
from pathlib import Path

from bloomery.guard import judge as module
from bloomery.guard.verdict import Rewind

real, asked = module.judge, Path(os.environ["ASKED"])


def judge(guards, report):
    usual, step = real(guards, report), report.step
    if not asked.exists():
        return usual
    asked.unlink()
    skip = range(report.cursor - 4, report.cursor)
    return Rewind(judged_step=step, to_step=step - 2, latest_step=step - 1, skip=skip, reason="loss is high")


module.judge = judge
"""


def test_what_a_guard_of_one_peer_wants_back_is_taken_back_by_both(torch_crew, tmp_path):
    crew = torch_crew(
        "train.samples=400",
        "checkpoint.every_steps=3",
    )
    asked = tmp_path / "asked"
    (tmp_path / "sitecustomize.py").write_text(ASKS_TO_GO_BACK)
    crew.start("a")
    crew.start("b", environment={"PYTHONPATH": str(tmp_path), "ASKED": str(asked)})
    # After four rounds of both, a peer that joined late has checkpoints of its own to go back to.
    crew.until_committed("a", "b", more=4)
    asked.touch()
    crew.until(lambda: any(one.rewind_to is not None for one in crew.rounds().values()), "the run goes back")
    both_ended_well(crew)
    back = [one for one in crew.rounds().values() if one.rewind_to is not None]
    assert all(one.rewind_to < one.round and "b: loss" in one.why for one in back)
    assert crew.rounds()[max(crew.rounds())].position.skips
    for name in "ab":
        assert len(journal(crew.base / name, "rewind")) == len(back)
    assert hold_the_same(crew, "model.", "outer.")
