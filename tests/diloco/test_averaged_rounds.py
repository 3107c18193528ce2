"""Rounds whose parts are streamed, coded, carried by native rings, late, or not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.diloco.meeting import Meeting, Peer, meeting_of, outcomes, train_peers
from tests.diloco.served_states import forged
from tests.diloco.trained_peers import newest, tensors

from bloomery.checkpoint.load.loader import read_tensors


@pytest.mark.parametrize("how", ["state", "average", "streamed average"])
def test_a_peer_whose_part_is_not_finite_is_left_out_and_gets_to_the_others_state(
    peers, tmp_path: Path, how: str
) -> None:
    starts = peers(*["elastic.inner_steps=4", "elastic.fragments=2"] * (how == "streamed average"))
    meeting = meeting_of(starts["a"][0], starts)
    meeting.awaited = {2: "b"}  # else the first may end the run before the second has its state
    if how != "state":
        meeting.averages = tmp_path
        meeting.before_replace = lambda directory: directory / "a whole state is not wanted"
    threads = [Peer(meeting, name, *start) for name, start in starts.items()]
    spoilt: list[int] = []

    def spoil(meeting: Meeting, name: str) -> None:
        if name == "b" and not spoilt:
            spoilt.append(1)
            meeting.parents["b"].spoils = True

    meeting.before_go = spoil
    for thread in threads:
        thread.start()
    outcomes(meeting, threads)
    assert meeting.commits[1].members == ("a",)
    assert meeting.commits[1].left_out == {"b": "not finite"}
    assert not meeting.known["b"].refusals
    if how == "streamed average":
        a, b = (tensors(path, "outer.base.") for _, path in starts.values())
        assert all(torch.equal(a[name], b[name]) for name in a)
        return
    a, b = (tensors(path, "model.") for _, path in starts.values())
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("prefix", ["outer.base.", "outer.momentum.", "model."])
def test_a_state_whose_tensors_are_not_the_runs_is_refused_whatever_its_source_says_of_them(
    peers, tmp_path: Path, prefix: str
) -> None:
    """Every hash of the forged checkpoint is right, and the digest that it says of itself."""
    starts = peers()
    meeting = meeting_of(starts["a"][0], starts)
    threads = [Peer(meeting, name, *start) for name, start in starts.items()]
    given, spoilt = list[Path](), list[str]()

    def spoil(meeting: Meeting, name: str) -> None:
        if name == "b" and not spoilt:
            spoilt.append(name)
            meeting.parents["b"].spoils = True

    def forge(directory: Path) -> Path:
        given.append(directory if given else forged(directory, tmp_path / "forged", prefix=prefix))
        return given[-1]

    meeting.before_go, meeting.before_replace = spoil, forge
    meeting.awaited = {2: "b"}  # else the first may end the run before the second has its state
    for thread in threads:
        thread.start()
    assert all(outcome.finished for outcome in outcomes(meeting, threads).values())
    told = meeting.known["b"]
    refused = any("was asked for" in why for why in told.refusals)
    assert refused == (prefix != "model.")  # of which nothing is used: the weights begin at the base
    for name in ("model.", "outer."):
        a, b = (tensors(path, name) for _, path in starts.values())
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert not [item for item in (starts["b"][1] / "incarnations").iterdir() if "forged" in item.read_text()]


@pytest.mark.parametrize(
    "how",
    [
        ("elastic.inner_steps=4", "elastic.fragments=2"),
        ("elastic.inner_steps=4", "elastic.fragments=2", "elastic.overlap_steps=1", "elastic.mixing=0.5"),
        ("elastic.inner_steps=3", "elastic.overlap_steps=2", "elastic.mixing=0.5"),
    ],
    ids=["fragments", "overlapped fragments", "overlap"],
)
def test_streaming_keeps_the_shared_state_equal_and_uses_every_sample_once(
    peers, how: tuple[str, ...]
) -> None:
    starts = peers(*how, "train.samples=96", "checkpoint.every_steps=2")
    meeting = meeting_of(starts["a"][0], starts)
    assert all(outcome.finished for outcome in train_peers(meeting, starts).values())
    a, b = (tensors(path, "outer.") for _, path in starts.values())
    assert a and all(torch.equal(a[name], b[name]) for name in a)
    local = [tensors(path, "model.") for _, path in starts.values()]
    assert any(not torch.equal(local[0][name], local[1][name]) for name in local[0])
    used = sorted(x for piece in meeting.spent for x in piece)
    assert used == sorted(set(used)) and len(used) == meeting.commits[-1].position.consumed >= 96


@pytest.mark.parametrize("codecs", [("int8", "int4"), ("int4", "int8")])
def test_a_run_goes_on_with_another_codec(peers, codecs: tuple[str, str]) -> None:
    before, after = (peers(f"elastic.codec={codec}") for codec in codecs)
    until = peers(f"elastic.codec={codecs[0]}", "guard.stop_at_step=3")  # the last of a round
    meeting = meeting_of(before["a"][0], before)
    meeting.wired = True
    assert not any(outcome.finished for outcome in train_peers(meeting, until).values())
    meeting.section = after["a"][0].recipe.elastic
    meeting.awaited = {1: "ab"}  # else the first to come may decide the round alone, and end the run
    assert all(outcome.finished for outcome in train_peers(meeting, after).values())
    a, b = (tensors(path, "model.") | tensors(path, "outer.base") for _, path in after.values())
    assert all(torch.equal(a[name], b[name]) for name in a)
    feedback = [name for name, _ in read_tensors(newest(after["a"][1])) if name.startswith("outer.residual.")]
    assert bool(feedback) == (codecs[1] == "int4")


@pytest.mark.parametrize("codec", ["int8", "int4", "sparse"])
def test_native_rings_leave_all_peers_with_the_same_bits(peers, codec: str) -> None:
    starts = peers(f"elastic.codec={codec}", "elastic.outer_momentum=0", names="abc")
    meeting = meeting_of(starts["a"][0], starts)
    meeting.wired = True
    train_peers(meeting, starts)
    every = [tensors(path, "model.") | tensors(path, "outer.base") for _, path in starts.values()]
    assert all(torch.equal(every[0][name], one[name]) for one in every[1:] for name in one)
    assert meeting.commits[-1].position.consumed == 72


def test_peers_that_no_round_waits_for_bring_all_their_steps_in_later_ones(peers, tmp_path: Path) -> None:
    asynchronous = ("elastic.quorum=2", "elastic.overlap_steps=1", "elastic.mixing=0.5", "elastic.peers=3")
    starts = peers(*asynchronous, "train.samples=96", names="abc")
    meeting = meeting_of(starts["a"][0], starts)
    meeting.averages = tmp_path / "averages"
    meeting.averages.mkdir()
    assert all(outcome.finished for outcome in train_peers(meeting, starts).values())
    used = sorted(x for piece in meeting.spent for x in piece)
    assert used == sorted(set(used)) and len(used) == meeting.commits[-1].position.consumed >= 96
    averaged = [commit.members for commit in meeting.commits if commit.members]
    assert {name for members in averaged for name in members} == {"a", "b", "c"}
    assert any(len(members) == 2 for members in averaged)
