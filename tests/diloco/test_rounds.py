"""Several peers, in threads: rounds, schedules, failures, newcomers and rewinds, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from tests.diloco.meeting import Meeting, Peer, meeting_of, outcomes, train_peers
from tests.diloco.trained_peers import ELASTIC, Start, newest, steps, tensors

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.protocol.rank_messages import AgentMessage, Committed, CopyState, ReplaceState, StartRound
from bloomery.protocol.records import Attempt, Ready
from bloomery.train.loop import train
from bloomery.train.peering import round_of_checkpoint
from bloomery.train.settings import StartOptions


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


@pytest.mark.parametrize(
    "chosen",
    [
        (),
        ("elastic.fragments=2", "elastic.overlap_steps=1"),
        ("elastic.average=gradients", "elastic.inner_steps=1", "optim.name=adamw"),
    ],
    ids=["weights", "streamed", "gradients"],
)
def test_a_state_is_copied_when_that_is_asked_for_alone_and_copying_within_a_round_changes_nothing(
    peers, start: Start, tmp_path: Path, chosen: tuple[str, ...]
) -> None:
    starts = peers(*chosen)
    train_peers(meeting_of(starts["a"][0], starts), starts)
    assert not list(tmp_path.glob("bloomery-offered-*")), "nobody asked for a copy"
    in_memory = f"checkpoint.memory_directory={tmp_path / 'memory'}"
    again = {name: start(*ELASTIC, in_memory, *chosen, name=f"again-{name}") for name in starts}
    meeting, copies = meeting_of(again["a"][0], again), dict[str, list[dict[str, torch.Tensor]]]()

    def ask(meeting: Meeting, attempt: Attempt) -> None:
        """The parts are offered, so the weights have moved."""
        for name in attempt.members:
            meeting.tell(name, CopyState(keep=(), makes=meeting.commits[-1].digest))

    meeting.before_reduce = ask
    meeting.when_copied = lambda digest, directory: copies.setdefault(digest, []).append(
        dict(read_tensors(directory, prefix="model."))
    )
    train_peers(meeting, again)
    for name in starts:
        undisturbed, disturbed = (tensors(path[name][1], "") for path in (starts, again))
        assert all(torch.equal(undisturbed[entry], disturbed[entry]) for entry in undisturbed)
    both = [pair for pair in copies.values() if len(pair) == 2]
    assert len(both) >= 2, "each peer has copied the state with which each round began"
    for mine, other in both:
        assert mine and all(torch.equal(mine[entry], other[entry]) for entry in mine)
    assert len(list((tmp_path / "memory").glob("bloomery-offered-*/*"))) == 0, "all went with their peers"


def test_averaged_gradients_are_one_process_with_the_summed_batch(peers, start: Start) -> None:
    gradients = ("elastic.average=gradients", "elastic.inner_steps=1", "optim.name=adamw")
    starts = peers(*gradients)
    train_peers(meeting_of(starts["a"][0], starts), starts)
    one = start(*ELASTIC[2:], "train.global_batch=8", "optim.name=adamw", name="one")
    train(one[0], RunDirectory(one[1]), StartOptions(say=lambda line: None))
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


def test_a_peer_that_offered_nothing_trains_the_share_that_it_is_given_afterwards(peers, start) -> None:
    starts = peers(names="a")
    train_peers(meeting_of(starts["a"][0], starts), starts)
    again = {"a": start(*ELASTIC, name="again")}
    meeting = meeting_of(again["a"][0], again)
    offered: list[int] = []
    accept = meeting.offer

    def offer(name: str, ready: Ready) -> None:
        offered.append(ready.tokens)
        if ready.tokens:
            accept(name, ready)

    meeting.offer = offer
    meeting.before_go = lambda meeting, name: meeting.tell(
        name,
        StartRound(
            round=meeting.shares.round,
            position=meeting.shares.position,
            live=meeting.shares.live,
            samples=(),
            number=0,
        ),
    )
    meeting.deadline_s = 60.0
    train_peers(meeting, again)
    assert [tokens > 0 for tokens in offered] == [False, True] * (len(offered) // 2) and offered
    assert sorted(x for piece in meeting.spent for x in piece) == list(range(48))
    as_usual, given_later = tensors(starts["a"][1], ""), tensors(again["a"][1], "")
    assert all(torch.equal(as_usual[name], given_later[name]) for name in as_usual)


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


@pytest.mark.parametrize("average", ["weights", "gradients"])
def test_a_peer_that_stops_after_the_last_step_of_a_round_goes_on_with_the_next_one(
    peers, average: str
) -> None:
    chosen = ("elastic.inner_steps=1", f"elastic.average={average}", "optim.name=adamw")
    starts = peers(*chosen, names="a")
    meeting = meeting_of(starts["a"][0], "a")
    assert not train_peers(meeting, peers(*chosen, "guard.stop_at_step=2", names="a"))["a"].finished
    assert train_peers(meeting, starts)["a"].finished
    assert sorted(x for piece in meeting.spent for x in piece) == list(range(48))


def waits(meeting: Meeting, name: str, phase: str) -> bool:
    parent = meeting.parents.get(name)
    return parent is not None and parent.phases[-1:] == [phase]


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def test_a_peer_that_waits_for_others_to_come_stops_when_it_is_asked_to(start: Start, tmp_path: Path) -> None:
    lone = start(*ELASTIC, f"checkpoint.memory_directory={tmp_path}", name="a")
    meeting = meeting_of(lone[0], "ab")  # b never comes
    thread = Peer(meeting, "a", *lone)
    thread.start()
    until(lambda: waits(meeting, "a", "wait"))
    RunDirectory(lone[1]).control("stop").touch()
    outcome = outcomes(meeting, [thread])["a"]
    assert (outcome.reason, outcome.failed, outcome.step) == ("control/stop", False, 0)
    assert newest(lone[1]).name == "step-000000.i001"
    assert RunDirectory(lone[1]).control("stop").exists()


@pytest.mark.parametrize("average", ["weights", "gradients"])
def test_a_peer_that_stops_while_its_round_is_decided_loses_nothing_and_repeats_nothing(
    peers, start: Start, average: str
) -> None:
    chosen = ("elastic.inner_steps=1", f"elastic.average={average}", "optim.name=adamw")
    starts = peers(*chosen)
    train_peers(meeting_of(starts["a"][0], starts), starts)
    undisturbed = tensors(starts["a"][1], "model.")
    again = {name: start(*ELASTIC, *chosen, name=f"again-{name}") for name in starts}
    meeting = meeting_of(again["a"][0], again)
    meeting.awaited = {2: "c"}  # c never comes, so the round is not decided
    threads = {name: Peer(meeting, name, *each) for name, each in again.items()}
    for thread in threads.values():
        thread.start()
    until(lambda: len(meeting.commits) == 2 and meeting.ready.keys() == again.keys())
    RunDirectory(again["b"][1]).control("stop").touch()
    assert outcomes(meeting, [threads["b"]])["b"].reason == "control/stop"
    meeting.awaited = {}
    RunDirectory(again["b"][1]).control("stop").unlink()
    threads["b"] = Peer(meeting, "b", *again["b"])
    threads["b"].start()
    assert all(outcome.finished for outcome in outcomes(meeting, list(threads.values())).values())
    assert sorted(x for piece in meeting.spent for x in piece) == list(range(48))
    for name in again:
        stopped = tensors(again[name][1], "model.")
        assert all(torch.equal(undisturbed[one], stopped[one]) for one in undisturbed)


def test_a_peer_tells_where_each_round_ended_and_on_which_its_checkpoints_rest(peers) -> None:
    starts = peers("checkpoint.every_steps=3", names="a")
    meeting = meeting_of(starts["a"][0], "a")
    train_peers(meeting, starts)
    tells = meeting.parents["a"].tells
    assert [(round, position) for round, position, _ in tells] == [
        (commit.round, commit.position) for commit in meeting.commits
    ]
    saved = {round_of_checkpoint(found.directory) for found in checkpoints(RunDirectory(starts["a"][1]))}
    assert set(tells[-1][2]) <= saved and len(tells[-1][2]) >= 2
    stopped, path = peers("guard.stop_at_step=5", names="b")["b"]
    meeting = meeting_of(stopped, "b")
    train_peers(meeting, {"b": (stopped, path)})  # its checkpoint is of within round 2
    resumed, _ = peers(names="b")["b"]
    train_peers(meeting, {"b": (resumed, path)})
    assert meeting.parents["b"].tells[0] == (1, meeting.commits[1].position, (1,))


def test_a_commit_of_a_round_that_is_over_ends_the_peer_and_does_not_drop_what_it_holds(peers) -> None:
    starts = peers(names="a")
    meeting = meeting_of(starts["a"][0], "a")

    def forget(meeting: Meeting, attempt: Attempt) -> None:
        if attempt.round == 2:
            again = msgspec.structs.replace(meeting.commits[1], digest="of another round 1")
            meeting.tell("a", Committed(commit=meeting.commits[1], included=True))  # said twice: nothing new
            meeting.tell("a", Committed(commit=again, included=False))

    meeting.before_reduce = forget
    outcome = train_peers(meeting, starts)["a"]
    assert not outcome.finished and "holds round 1 already: the coordinator has lost rounds" in outcome.reason
    assert read_manifest(newest(starts["a"][1])).values["outer"]["round"] == 1


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


def test_what_was_prepared_is_not_adopted_where_the_agent_says_that_the_commit_is_of_others(
    peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[PseudoGradient] = []
    refuse = PseudoGradient.drop_offer
    monkeypatch.setattr(PseudoGradient, "drop_offer", lambda update: (refused.append(update), refuse(update)))
    starts = peers()
    meeting = meeting_of(starts["a"][0], starts)
    told: list[AgentMessage] = []

    def listen(meeting: Meeting, name: str) -> None:
        parent = meeting.parents["b"]
        if name == "b" and not told:
            really = parent.say
            parent.say = lambda message: really(noted(message))

    def noted(message: AgentMessage) -> AgentMessage:
        if isinstance(message, Committed) and message.commit.round == 1:
            meeting.held["b"] = replace(meeting.held["b"], digest="", directory=None)
            meeting.waiting.add("b")
            message = msgspec.structs.replace(message, included=False)
        told.append(message)
        return message

    meeting.before_go = listen
    assert all(outcome.finished for outcome in train_peers(meeting, starts).values())
    assert [message.round for message in told if isinstance(message, ReplaceState)] == [1]
    assert len(refused) == 1
    a, b = (tensors(path, "model.") for _, path in starts.values())
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_rewind_is_a_decision_of_the_whole_run(peers, monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.guard.verdict import Rewind
    from bloomery.train import loop

    real_step, real_judge = loop.train_step, loop.judge

    def spiking(parts, micro_batches, state):
        result = real_step(parts, micro_batches, state)
        used = {int(sample) for batch in micro_batches for sample in batch.samples}
        if used & set(range(60, 72)):  # the second peer's, in the third round
            result.cross_entropy.mul_(3)
        return result

    def judge(guards, report):
        usual, step = real_judge(guards, report), report.step
        if report.loss < 10:
            return usual
        return Rewind(judged_step=step, to_step=step - 2, skip=range(60, 72), reason="a spike")

    monkeypatch.setattr(loop, "train_step", spiking)
    monkeypatch.setattr(loop, "judge", judge)
    starts = peers("train.samples=144", "checkpoint.every_steps=3")
    meeting = meeting_of(starts["a"][0], starts)
    train_peers(meeting, starts)
    (rewind,) = (commit for commit in meeting.commits if commit.rewind_to is not None)
    assert rewind.rewind_to is not None and rewind.rewind_to < rewind.round
    assert meeting.commits[-1].position.skips
    a, b = (tensors(path, "model.") for _, path in starts.values())
    assert all(torch.equal(a[name], b[name]) for name in a)
    for _, path in starts.values():
        assert [r["event"] for r in read_journal(RunDirectory(path).journal())].count("rewind") == 1


def test_a_peer_that_has_no_checkpoint_early_enough_stops_instead_of_going_back_to_the_start(
    peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.guard.verdict import Rewind
    from bloomery.train import loop

    real = loop.judge

    def judge(guards, report):
        if report.step != 5:
            return real(guards, report)
        return Rewind(judged_step=5, to_step=1, latest_step=4, skip=range(0, 4), reason="planned")

    monkeypatch.setattr(loop, "judge", judge)
    starts = peers("checkpoint.every_steps=0", "checkpoint.every_minutes=0.0")
    meeting = meeting_of(starts["a"][0], starts)
    outcomes = train_peers(meeting, starts)
    assert all(outcome.failed and outcome.step == 5 for outcome in outcomes.values())
    assert all("no checkpoint of a round is early enough" in outcome.reason for outcome in outcomes.values())
    assert not [commit for commit in meeting.commits if commit.rewind_to is not None]
