"""Several peers, in threads: rounds, schedules, failures, newcomers and rewinds, without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from meeting import Meeting, Peer, meeting_of, outcomes, train_peers

from bloomery.checkpoint.catalogue import checkpoints
from bloomery.checkpoint.load import read_tensors
from bloomery.config.load import LoadedRecipe
from bloomery.elastic.records import Attempt
from bloomery.events.journal import read_journal
from bloomery.events.rundir import RunDir
from bloomery.train.loop import train
from bloomery.train.options import StartOptions

Start = Callable[..., tuple[LoadedRecipe, Path]]

ELASTIC = (
    "elastic.inner_steps=3",
    "elastic.codec=fp32",
    "train.ramp_up=[]",
    "train.global_batch=4",
    "train.samples=48",
    "model.hidden_dropout=0.0",
)


def newest(path: Path) -> Path:
    return checkpoints(RunDir(path))[-1].directory


def tensors(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    return dict(read_tensors(newest(path), prefix=prefix))


def steps(path: Path) -> list[dict]:
    return [record for record in read_journal(RunDir(path).journal()) if record["event"] == "step"]


@pytest.fixture
def peers(start: Start, tmp_path: Path) -> Callable[..., dict[str, tuple[LoadedRecipe, Path]]]:
    def begin(*overrides: str, names: str = "ab") -> dict[str, tuple[LoadedRecipe, Path]]:
        over = (*ELASTIC, f"checkpoint.memory_directory={tmp_path}", *overrides)
        return {name: start(*over, name=name) for name in names}

    return begin


def test_peers_end_with_the_same_weights_and_use_every_sample_once(peers) -> None:
    starts = peers()
    meeting = meeting_of(starts["a"][0], starts)
    outcomes = train_peers(meeting, starts)
    assert all(outcome.finished for outcome in outcomes.values())
    assert [commit.round for commit in meeting.commits] == [0, 1, 2]
    assert sorted(x for piece in meeting.spent for x in piece) == list(range(48))
    for prefix in ("model.", "outer."):
        a, b = (tensors(path, prefix) for _, path in starts.values())
        assert a.keys() == b.keys() and a
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_averaged_gradients_are_one_process_with_the_summed_batch(peers, start: Start) -> None:
    gradients = ("elastic.average=gradients", "elastic.inner_steps=1", "optim.name=adamw")
    starts = peers(*gradients)
    train_peers(meeting_of(starts["a"][0], starts), starts)
    one = start(*ELASTIC[2:], "train.global_batch=8", "optim.name=adamw", name="one")
    train(one[0], RunDir(one[1]), StartOptions(say=lambda line: None))
    a, b, together = (tensors(path, "model.") for path in (starts["a"][1], starts["b"][1], one[1]))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert max(float((a[name] - together[name]).abs().max()) for name in a) <= 1e-6
    rates = [[step["learning_rate"] for step in steps(path)] for path in (starts["a"][1], one[1])]
    assert rates[0] == rates[1]


def test_a_ring_that_breaks_is_tried_again_and_changes_nothing(peers, start: Start) -> None:
    starts = peers()
    train_peers(meeting_of(starts["a"][0], starts), starts)
    undisturbed = tensors(starts["a"][1], "")
    again = {name: start(*ELASTIC, name=f"again-{name}") for name in starts}
    meeting = meeting_of(again["a"][0], again)
    meeting.disturb = lambda name, attempt: name == "b" and attempt.epoch in (1, 3)
    train_peers(meeting, again)
    assert [commit.epoch for commit in meeting.commits] == [0, 2, 4]
    disturbed = tensors(again["a"][1], "")
    assert all(torch.equal(undisturbed[name], disturbed[name]) for name in undisturbed)


def test_a_peer_that_is_lost_in_the_ring_costs_nobody_a_step(peers) -> None:
    starts = peers(names="abc")
    meeting = meeting_of(starts["a"][0], starts)

    def lose(name: str, attempt: Attempt) -> bool:
        if name == "c" and attempt.round == 1:
            raise SystemExit
        return False

    meeting.disturb = lose
    threads = [Peer(meeting, name, *start) for name, start in starts.items()]
    for thread in threads:
        thread.start()
    outcomes(meeting, threads[:2])
    assert [commit.members for commit in meeting.commits[1:]] == [("a", "b")] * (len(meeting.commits) - 1)
    assert sorted(x for piece in meeting.spent for x in piece) == list(range(48))
    assert [step["step"] for step in steps(starts["a"][1])] == [1, 2, 3, 4, 5, 6]


def test_a_newcomer_takes_over_the_state_and_goes_on_with_the_others(peers) -> None:
    starts = peers("train.samples=96", names="abc")
    meeting = meeting_of(starts["a"][0], "ab")
    threads = {name: Peer(meeting, name, *starts[name]) for name in "abc"}

    def come(meeting: Meeting, attempt: Attempt) -> None:
        if attempt.round == 2:
            threads["c"].start()

    meeting.before_reduce, meeting.awaited = come, {3: "c"}
    for name in "ab":
        threads[name].start()
    outcomes(meeting, list(threads.values()))
    shared = [tensors(path, prefix) for _, path in starts.values() for prefix in ("model.", "outer.")]
    assert all(torch.equal(one[name], shared[i % 2][name]) for i, one in enumerate(shared) for name in one)
    assert [commit.members for commit in meeting.commits[2:4]] == [("a", "b"), ("a", "b", "c")]
    used = sorted(x for piece in meeting.spent for x in piece)
    assert used == list(range(meeting.commits[-1].position.consumed))


def test_a_peer_that_is_stopped_within_a_round_goes_on_there_bit_for_bit(peers, start: Start) -> None:
    starts = peers(names="a")
    train_peers(meeting_of(starts["a"][0], starts), starts)
    unbroken = tensors(starts["a"][1], "")
    broken = start(*ELASTIC, name="broken")
    meeting = meeting_of(broken[0], "a")
    stopped, _ = start(*ELASTIC, "guard.stop_at_step=5", name="broken")
    assert not train_peers(meeting, {"a": (stopped, broken[1])})["a"].finished
    assert train_peers(meeting, {"a": broken})["a"].finished
    resumed = tensors(broken[1], "")
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_who_goes_on_within_a_round_gives_newcomers_what_it_began_with(start: Start, codec: str) -> None:
    settings = (*ELASTIC, f"elastic.codec={codec}")
    first, newcomer = start(*settings, name="a"), start(*settings, name="c")
    meeting = meeting_of(first[0], "a")
    stopped, _ = start(*settings, "guard.stop_at_step=5", name="a")
    assert not train_peers(meeting, {"a": (stopped, first[1])})["a"].finished
    begun = len(meeting.commits)

    meeting.awaited = {begun: "c"}  # it cannot come but with a's state, and the round cannot end without it
    ended = train_peers(meeting, {"a": first, "c": newcomer})

    assert all(outcome.finished for outcome in ended.values())
    assert meeting.commits[begun].members == ("a", "c")
    for prefix in ("model.", "outer.base", "outer.momentum"):
        ours, theirs = tensors(first[1], prefix), tensors(newcomer[1], prefix)
        assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    used = sorted(x for piece in meeting.spent for x in piece)
    assert used == list(range(meeting.commits[-1].position.consumed))


def test_schedules_follow_what_all_peers_use(peers) -> None:
    starts = peers("train.samples=48", "schedule.unit=samples", "schedule.warmup=24")
    train_peers(meeting_of(starts["a"][0], starts), starts)
    told = steps(starts["a"][1])
    assert [step["consumed_samples"] for step in told] == [8, 16, 24, 32, 40, 48]
    assert [step["learning_rate"] for step in told][:3] == pytest.approx([0.01 * n / 24 for n in (8, 16, 24)])
    assert told[-1]["learning_rate"] == pytest.approx(0.0, abs=1e-9)


def test_checkpoints_are_taken_at_committed_rounds(peers) -> None:
    starts = peers("checkpoint.every_steps=2", "checkpoint.keep_last=9")
    train_peers(meeting_of(starts["a"][0], starts), starts)
    for _, path in starts.values():
        assert [found.name[:11] for found in sorted((path / "checkpoints").iterdir())] == [
            "step-000003",
            "step-000006",
        ]


def test_a_peer_whose_part_is_not_finite_is_left_out_and_gets_the_others_state(peers) -> None:
    starts = peers()
    meeting = meeting_of(starts["a"][0], starts)
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
    a, b = (tensors(path, "model.") for _, path in starts.values())
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_rewind_is_a_decision_of_the_whole_run(peers, monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.train import loop

    real = loop.train_step

    def spiking(parts, micro_batches, state):
        result = real(parts, micro_batches, state)
        used = {int(sample) for batch in micro_batches for sample in batch.samples}
        if used & set(range(60, 72)):  # the second peer's, in the third round
            result.cross_entropy.mul_(3)
        return result

    monkeypatch.setattr(loop, "train_step", spiking)
    starts = peers(
        "train.samples=144",
        "guard.spike_threshold=2.0",
        "guard.spike_patience=2",
        "guard.spike_window=4",
        "guard.spike_rewind_steps=1",
        "guard.spike_skip_steps=2",
        "guard.spike_rewinds=1",
        "checkpoint.every_steps=3",
    )
    meeting = meeting_of(starts["a"][0], starts)
    train_peers(meeting, starts)
    (rewind,) = (commit for commit in meeting.commits if commit.rewind_to is not None)
    assert rewind.rewind_to is not None and rewind.rewind_to < rewind.round
    assert meeting.commits[-1].position.skips
    a, b = (tensors(path, "model.") for _, path in starts.values())
    assert all(torch.equal(a[name], b[name]) for name in a)
    for _, path in starts.values():
        assert [r["event"] for r in read_journal(RunDir(path).journal())].count("rewind") == 1


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
    assert all(outcome.finished for outcome in train_peers(meeting, after).values())
    a, b = (tensors(path, "model.") | tensors(path, "outer.base") for _, path in after.values())
    assert all(torch.equal(a[name], b[name]) for name in a)
    feedback = [name for name, _ in read_tensors(newest(after["a"][1])) if name.startswith("outer.residual.")]
    assert bool(feedback) == (codecs[1] == "int4")


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_native_rings_leave_all_peers_with_the_same_bits(peers, codec: str) -> None:
    starts = peers(f"elastic.codec={codec}", names="abc")
    meeting = meeting_of(starts["a"][0], starts)
    meeting.wired = True
    train_peers(meeting, starts)
    every = [tensors(path, "model.") | tensors(path, "outer.base") for _, path in starts.values()]
    assert all(torch.equal(every[0][name], one[name]) for one in every[1:] for name in one)
    assert meeting.commits[-1].position.consumed == 72
