"""Fragments of a model, what a peer did since each was averaged, and its part of a round."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.diloco.test_pseudo_gradient import OneTensor, part_of, reduced
from tests.protocol import example

from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Position
from bloomery.diloco import all_reduce
from bloomery.diloco.all_reduce import WireRings
from bloomery.diloco.outer import SinglePeer
from bloomery.diloco.outer_loop_state import PartMade, RoundState, TrainingRound
from bloomery.diloco.outer_update import peer_digest
from bloomery.diloco.part_offer import measured
from bloomery.diloco.peer_vector import (
    PAST_PARTS,
    FragmentHistory,
    PeerVector,
    fragment_of_round,
    fragments_of,
    put,
    take,
)
from bloomery.diloco.pseudo_gradient import PseudoGradient, nesterov_step
from bloomery.guard.verdict import Rewind, Rung, Save
from bloomery.protocol.rank_messages import Reduce, StartRound
from bloomery.train.state import Goal, TrainState


def test_blocks_are_dealt_to_fragments_the_embedding_to_the_first_and_the_head_to_the_last() -> None:
    names = [
        "embedding.weight",
        "positions.weight",
        "embedding_norm.weight",
        "blocks.0.mlp.up.weight",
        "blocks.1.mlp.up.weight",
        "blocks.12.mlp.up.weight",
        "final_norm.weight",
        "head.weight",
    ]
    places = [(name, range(10 * number, 10 * number + 10)) for number, name in enumerate(names)]
    first, second, third = fragments_of(places, numel=80, count=3)
    assert first == (range(0, 20), range(30, 40), range(50, 60))
    assert second == (range(40, 50),)
    assert third == (range(20, 30), range(60, 80))
    assert fragments_of(places, numel=80, count=1) == ((range(80),),)
    assert [fragment_of_round(round, count=3) for round in (1, 2, 3, 4)] == [0, 1, 2, 0]


def test_elements_are_put_back_where_they_were_taken() -> None:
    flat = torch.arange(10.0)
    spans = (range(1, 3), range(6, 9))
    taken = take(flat, spans)
    assert taken.tolist() == [1.0, 2.0, 6.0, 7.0, 8.0]
    put(flat, spans, taken * -1)
    assert flat.tolist() == [0.0, -1.0, -2.0, 3.0, 4.0, 5.0, -6.0, -7.0, -8.0, 9.0]
    assert take(flat, (range(2, 4),)).tolist() == [-2.0, 3.0] and take(flat, ()).numel() == 0


def test_a_history_adds_up_what_other_fragments_took_and_keeps_the_last_parts_of_its_own() -> None:
    ready = example.ready(steps=3, tokens=24, spent=(range(6), range(10, 14)), norm=2.0)
    between = FragmentHistory(steps=1, samples=2, parts=((1, 0.5),)).after(ready, is_averaged=False)
    assert (between.steps, between.samples, between.parts) == (4, 12, ((1, 0.5),))
    spanning = example.ready(steps=3, tokens=24, drift_steps=7, drift_tokens=56, norm=2.0)
    averaged = between.after(spanning, is_averaged=True)
    assert (averaged.steps, averaged.samples, averaged.parts) == (0, 0, ((1, 0.5), (7, 2.0)))
    assert between.after(example.ready(tokens=0), is_averaged=True).parts == ((1, 0.5),)
    many = FragmentHistory(parts=tuple((number, float(number)) for number in range(PAST_PARTS)))
    last = many.after(spanning, is_averaged=True).parts
    assert len(last) == PAST_PARTS == 5 and last[0] == (1, 1.0) and last[-1] == (7, 2.0)
    stored = [2, 9, [[number, number / 2] for number in range(PAST_PARTS + 3)]]
    read = FragmentHistory.from_json(stored)
    assert (read.steps, read.samples) == (2, 9) and len(read.parts) == PAST_PARTS
    assert read.parts[-1] == (PAST_PARTS + 2, (PAST_PARTS + 2) / 2)
    assert FragmentHistory.from_json(read.to_json()) == read


def test_the_outer_step_is_nesterovs_by_hand() -> None:
    base, momentum = torch.tensor([10.0, 20.0]), torch.tensor([1.0, -2.0])
    after, moved = nesterov_step(base, momentum, torch.tensor([0.5, 4.0]), learning_rate=0.25, decay=0.5)
    assert moved.tolist() == [1.0, 3.0]
    assert after.tolist() == [10.0 - 0.25 * (0.5 * 1.0 + 0.5), 20.0 - 0.25 * (0.5 * 3.0 + 4.0)]
    assert base.tolist() == [10.0, 20.0] and momentum.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("mixing", [1.0, 0.25])
def test_weights_are_mixed_with_the_new_base_by_the_share_of_the_recipe(mixing: float) -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=5, overlap_steps=1, mixing=mixing))
    update.begin()
    vector.weights += 0.5
    update.offer(1)
    ahead = vector.weights.clone()
    values, residual = part_of(update, 1.0)
    update.prepare(reduced(values, residual))
    update.adopt()
    torch.testing.assert_close(vector.weights, (1.0 - mixing) * ahead + mixing * update.base)


def test_the_digest_of_a_peer_is_of_its_ranks_in_their_order_and_of_the_salt() -> None:
    digests = {
        peer_digest(["a", "b"], salt="s"),
        peer_digest(["b", "a"], salt="s"),
        peer_digest(["ab"], salt="s"),
        peer_digest(["a", "b"], salt="t"),
        peer_digest(["a"], salt="s"),
    }
    assert len(digests) == 5 and {len(digest) for digest in digests} == {32}
    assert peer_digest(["a", "b"], salt="s") in digests


TRAINING = TrainingRound(
    start=StartRound(round=2, position=Position(consumed=4), live=3, samples=(range(4, 40),), number=0),
    steps=3,
    spent=(range(4, 16),),
)


def part_of_round(state: RoundState, training: TrainingRound = TRAINING, **fields: Any):
    usual = dict(peer="a", tokens_per_sample=5, kept=(range(16, 18),), rewind_to=None)
    return state.part(training, PartMade(**usual | fields))


def test_a_part_tells_its_tokens_and_what_its_guards_ask() -> None:
    state = RoundState(averages_gradients=False, skips=(range(90, 95),))
    ready = part_of_round(state)
    assert (ready.peer, ready.round, ready.steps, ready.tokens) == ("a", 2, 3, 60)
    assert (ready.norm, ready.feedback, ready.finite) == (None, 0.0, False), "it is not measured"
    ready = measured(ready, squares=16.0, feedback=9.0)
    assert (ready.norm, ready.feedback, ready.finite) == (4.0, 3.0, True)
    assert (ready.spent, ready.kept, ready.skip) == ((range(4, 16),), (range(16, 18),), (range(90, 95),))
    assert (ready.wants_save, ready.rewind_to, ready.why, ready.rung) == (False, None, "", 0)
    assert part_of_round(replace(state, wants=Save(judged_step=1, reason="due"))).wants_save
    wants = Rewind(judged_step=1, to_step=0, skip=range(60, 70), rung=Rung.SLOW, reason="spike")
    asking = part_of_round(replace(state, wants=wants), rewind_to=1)
    assert (asking.rewind_to, asking.rung, asking.why) == (1, 3, "spike") and not asking.wants_save
    assert asking.skip == (range(60, 70), range(90, 95))


@pytest.mark.parametrize("fields", [{"squares": math.inf}, {"squares": math.nan}, {"feedback": math.inf}])
def test_a_part_that_is_not_finite_says_so_and_has_no_norm(fields: dict[str, float]) -> None:
    ready = part_of_round(RoundState(averages_gradients=False))
    ready = measured(ready, **{"squares": 16.0, "feedback": 9.0} | fields)
    assert (ready.finite, ready.norm, ready.feedback) == (False, None, 0.0)


def test_a_part_of_a_fragment_spans_what_was_done_since_it_was_averaged() -> None:
    pasts = (FragmentHistory(steps=9, samples=1), FragmentHistory(steps=2, samples=8, parts=((1, 1.5),)))
    state = RoundState(averages_gradients=False, fragments=pasts)  # round 2 averages the second fragment
    ready = part_of_round(state)
    assert (ready.drift_steps, ready.drift_tokens, ready.past) == (5, 100, ((1, 1.5),))
    assert (ready.spanned_steps, ready.weight_tokens) == (5, 100)
    unmoved = replace(state, fragments=(pasts[0], FragmentHistory(steps=2)))
    assert (part_of_round(unmoved).drift_steps, part_of_round(unmoved).drift_tokens) == (0, 0)
    idle = part_of_round(state, replace(TRAINING, steps=0, spent=()))
    assert (idle.tokens, idle.drift_steps, idle.drift_tokens) == (0, 0, 0), "it has no part in the round"


def test_a_limit_is_learnt_for_each_neighbour_to_which_a_peer_sends(monkeypatch) -> None:
    monkeypatch.setattr(all_reduce, "WireRing", lambda reduce, section, *, rate_limit: rate_limit)
    rings = WireRings(ElasticSection(bandwidth_limit_mbit_s=8.0))

    def limit(index: int, *members: str) -> Any:
        attempt = SimpleNamespace(members=members)
        reduce: Reduce = SimpleNamespace(attempt=attempt, index=index)  # type: ignore[assignment]
        return rings(reduce)

    assert limit(0, "a", "b", "c") is limit(1, "c", "a", "b") is limit(0, "a", "b")  # to b
    assert limit(2, "b", "c", "a") is not limit(0, "a", "c", "b")  # to b, and to c
    assert limit(0, "a", "b").limit_bytes_s == 1e6
    rings = WireRings(ElasticSection(bandwidth_limit_mbit_s=8.0), ranks=4)
    assert limit(0, "a", "b").limit_bytes_s == 0.25e6, "it is of the whole peer"
    assert limit(1, "c", "a", "b") is limit(0, "a", "b")
    assert limit(0, "a", "c") is not limit(0, "a", "b")
    assert sorted(rings._rate_limits) == ["b", "c"]


def test_a_run_of_one_peer_uses_everything_and_waits_for_nobody() -> None:
    outer = SinglePeer()
    state = TrainState(goal=Goal(), position=Position(consumed=3))
    assert outer.share.lease is None
    assert outer.admit(state) is state and outer.average(state, "verdict") == (state, "verdict")  # type: ignore[arg-type]
    assert outer.skipping(state, range(10, 12)).position.skips == (range(10, 12),)
    assert list(outer.state_entries()) == [] and dict(outer.state_values()) == {}


class Group:
    """A group of two ranks in which the other one brings these values to a sum."""

    degree, index = 1, 0

    def __init__(self, *others: float) -> None:
        self.others = torch.tensor(others)

    def all_gather(self, whole: torch.Tensor) -> None: ...

    def all_reduce(self, whole: torch.Tensor) -> None:
        whole += self.others


@pytest.mark.parametrize(
    ("share", "values"),
    [("whole", [1, 2]), ("partial", [1, 2]), ("echo", [30, 40]), ("echoed", [30, 40]), ("split", [0, 0])],
)
def test_a_rank_gets_what_it_holds_too_from_the_rank_in_whose_part_it_is(
    share: str, values: list[float]
) -> None:
    mesh = SimpleNamespace(
        world=2, device="cpu", replica=Group(), tensor=Group(1, 2), embedding=Group(30, 40)
    )
    own, buffer = SimpleNamespace(numel=0, layout=SimpleNamespace(share=share)), torch.tensor([7.0, 8.0])
    PeerVector._broadcast(None, own, buffer, mesh)  # type: ignore[arg-type]
    assert buffer.tolist() == values


def test_a_replica_gives_the_others_its_own_elements_and_takes_theirs() -> None:
    class Replicas:
        degree, index = 3, 1

        def all_gather(self, whole: torch.Tensor) -> None:
            assert whole.tolist() == [0.0, 0.0, 3.0, 4.0, 0.0, 0.0]
            whole[:2], whole[4:] = torch.tensor([10.0, 20.0]), torch.tensor([50.0, 0.0])

    mesh = SimpleNamespace(world=3, device="cpu", replica=Replicas())
    own = SimpleNamespace(numel=2, start=2, stop=4, layout=SimpleNamespace(share="split"))
    buffer = torch.tensor([1.0, 2, 3, 4, 5])
    PeerVector._broadcast(None, own, buffer, mesh)  # type: ignore[arg-type]
    assert buffer.tolist() == [10.0, 20.0, 3.0, 4.0, 50.0]
