"""Messages between stages on a backend that buffers nothing, as NCCL is: no schedule may wait in a circle."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.parallel.fabric import Fabric, Stuck

from bloomery.config.validate_layout import rounds_fit
from bloomery.parallel import mesh, stage_p2p
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline_schedule import (
    Action,
    P2PChannel,
    PipelineOrder,
    end_times,
    forwards_only,
    p2p_channels,
    pipeline_order,
)
from bloomery.parallel.stage_p2p import MessageOrder, StageMessage, StageMessenger
from bloomery.plan.pipeline_stages import rank_of_stage

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]
SCHEDULES += [("zero-bubble", 2), ("zbv", 2)]
CPU = torch.device("cpu")
Groups = Callable[[P2PChannel], Hashable]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 4, 8])
def test_every_message_arrives_though_nothing_is_buffered(schedule: str, chunks: int, pipeline: int) -> None:
    for count in (1, pipeline, 2 * pipeline + 1):
        if schedule in ("interleaved", "zero-bubble") and not rounds_fit(count, pipeline=pipeline):
            continue
        table = pipeline_order(schedule, pipeline=pipeline, chunks=chunks, micro_batches=count)
        passed(table, pipeline, chunks, schedule, micro_batches=count, group_of=lambda channel: channel)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_every_message_of_an_evaluation_arrives_too(schedule: str, chunks: int) -> None:
    ranks = [rank_of_stage(stage, pipeline=4, schedule=schedule) for stage in range(4 * chunks)]
    table = forwards_only(ranks, micro_batches=9)
    passed(table, 4, chunks, schedule, micro_batches=9, group_of=lambda channel: channel)


def test_one_group_for_a_direction_waits_in_a_circle_from_four_ranks_on() -> None:
    """Why each channel has a group of its own where receives are posted ahead; this backend notices."""

    def of_direction(channel: P2PChannel) -> Hashable:
        return channel.activations, channel.sender < channel.receiver

    table = pipeline_order("1f1b", pipeline=4, chunks=1, micro_batches=8)

    def all_at_first(order: MessageOrder, ends: object) -> None:
        order.posted_before[0] = [message for expected in order.incoming.values() for message in expected]

    with patch.object(MessageOrder, "_post_in_time", all_at_first), pytest.raises(Stuck):
        passed(table, 4, 1, "1f1b", micro_batches=8, group_of=of_direction)


def test_a_lane_goes_one_way_between_two_ranks_and_neighbouring_stages_have_one_each_way() -> None:
    assert p2p_channels(pipeline=2, chunks=1, schedule="1f1b") == (
        P2PChannel(activations=True, sender=0, receiver=1),
        P2PChannel(activations=False, sender=1, receiver=0),
    )
    ends = {(one.sender, one.receiver) for one in p2p_channels(pipeline=4, chunks=3, schedule="interleaved")}
    assert ends == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (3, 0), (0, 3)}
    there_and_back = p2p_channels(pipeline=3, chunks=2, schedule="zbv")
    assert {(one.sender, one.receiver) for one in there_and_back if one.activations} == {
        (0, 1),
        (1, 2),
        (2, 1),
        (1, 0),
    }


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_no_receive_is_posted_before_an_action_that_ends_before_its_message_is_sent(
    schedule: str, chunks: int, pipeline: int
) -> None:
    """On a GPU it would occupy multiprocessors beside that action, for nothing."""
    for order, ends in orders_of(schedule, chunks, pipeline, micro_batches=2 * pipeline):
        posted = posted_at(order)
        for channel, expected in order.incoming.items():
            places = [posted[message] for message in expected]
            assert places == sorted(places), "receives of a channel keep the order of its sends"
            for number, message in enumerate(expected):
                assert places[number] <= order.consumed_at[message]
                for place in range(places[number], order.consumed_at[message]):
                    # it is sent during that action, or one that its channel sends later is due
                    assert any(
                        ends[channel.sender][order.produced_at[later]] < ends[order.own][place]
                        or order.consumed_at[later] == place
                        for later in expected[number:]
                    )


@pytest.mark.parametrize(
    ("schedule", "chunks", "one_ahead", "now", "beside"),
    [
        ("1f1b", 1, 297, 24, 3),
        ("gpipe", 1, 183, 24, 0),
        ("interleaved", 2, 435, 29, 110),
        ("zero-bubble", 1, 234, 12, 39),
        ("zbv", 2, 633, 6, 144),
    ],
)
def test_receives_wait_a_tenth_of_the_time_that_they_would_wait_if_one_was_always_posted_ahead(
    schedule: str, chunks: int, one_ahead: int, now: int, beside: int
) -> None:
    """In forwards of four ranks together, 16 micro-batches; beside: messages that come beside an action."""
    waited, waited_ahead, early = 0, 0, 0
    for order, ends in orders_of(schedule, chunks, 4, micro_batches=16):
        posted = posted_at(order)
        waited += waiting(order, ends, posted)
        waited_ahead += waiting(order, ends, posted_one_ahead(order))
        early += sum(place < order.consumed_at[message] for message, place in posted.items())
    assert (waited_ahead, waited, early) == (one_ahead, now, beside)


def orders_of(
    schedule: str, chunks: int, pipeline: int, *, micro_batches: int
) -> Iterator[tuple[MessageOrder, tuple[tuple[int, ...], ...]]]:
    """The messages of each rank, and when each action ends."""
    table = pipeline_order(schedule, pipeline=pipeline, chunks=chunks, micro_batches=micro_batches)
    stages = range(pipeline * chunks)
    ranks = [rank_of_stage(stage, pipeline=pipeline, schedule=schedule) for stage in stages]
    for rank in range(pipeline):
        yield MessageOrder(table, ranks, own=rank), end_times(table)


def posted_at(order: MessageOrder) -> dict[StageMessage, int]:
    return {message: place for place, those in order.posted_before.items() for message in those}


def posted_one_ahead(order: MessageOrder) -> dict[StageMessage, int]:
    """Each receive of a channel is posted when the message before it is needed."""
    posted = dict[StageMessage, int]()
    for expected in order.incoming.values():
        incoming = iter(expected)
        for message in sorted(expected, key=order.consumed_at.__getitem__):
            while message not in posted:
                posted[next(incoming)] = order.consumed_at[message]
            posted.update(dict.fromkeys(islice(incoming, 1), order.consumed_at[message]))
    return posted


def waiting(order: MessageOrder, ends: tuple[tuple[int, ...], ...], posted: dict[StageMessage, int]) -> int:
    """How long receives are posted before their messages are sent."""
    waited = 0
    for channel, expected in order.incoming.items():
        for message in expected:
            place = posted[message]
            begun = ends[order.own][place - 1] if place else 0
            waited += max(0, ends[channel.sender][order.produced_at[message]] - begun)
    return waited


def test_the_steady_part_of_1f1b_posts_each_gradient_when_it_is_needed() -> None:
    table = pipeline_order("1f1b", pipeline=4, chunks=1, micro_batches=16)
    for rank in range(3):
        order = MessageOrder(table, [0, 1, 2, 3], own=rank)
        gradients = [
            (place, message)
            for place, those in order.posted_before.items()
            for message in those
            if message.sender > message.receiver
        ]
        assert len(gradients) == 16
        assert all(place == order.consumed_at[message] for place, message in gradients)


def passed(
    table: PipelineOrder, pipeline: int, chunks: int, schedule: str, *, micro_batches: int, group_of: Groups
) -> None:
    """Run the messages of a timetable, opening the channels first; each number must be the message's own."""
    fabric = Fabric()
    stages = pipeline * chunks
    ranks = [rank_of_stage(stage, pipeline=pipeline, schedule=schedule) for stage in range(stages)]
    channels = p2p_channels(pipeline=pipeline, chunks=chunks, schedule=schedule)

    def life(rank: int) -> None:
        own = {
            channel: Axis(
                index=int(channel.receiver == rank),
                ranks=(channel.sender, channel.receiver),
                group=group_of(channel),
            )  # type: ignore[arg-type]
            for channel in channels
            if rank in (channel.sender, channel.receiver)
        }
        mesh._connect(own, CPU)
        axis = Axis(index=rank, ranks=tuple(range(pipeline)))
        here = Mesh(rank=rank, world=pipeline, device=CPU, pipeline=axis, channels=own)
        shapes = [torch.empty(1, device="meta")] * micro_batches
        post = StageMessenger(here, MessageOrder(table, ranks, own=rank), shapes=shapes)
        for place, action in enumerate(table[rank]):
            post.post_receives(place)
            _act(post, action, last=stages - 1)
        post.finish()

    with patch.object(stage_p2p, "dist", fabric), patch.object(mesh, "dist", fabric):
        fabric.run(pipeline, life)


def _act(post: StageMessenger, action: Action, *, last: int) -> None:
    if action.kind == "backward_weight":
        return
    onward = 1 if action.kind == "forward" else -1
    before, after = action.stage - onward, action.stage + onward
    if 0 <= before <= last:
        message = StageMessage(before, action.stage, action.micro_batch)
        assert float(post.receive(message)) == _number(message)
    if 0 <= after <= last:
        message = StageMessage(action.stage, after, action.micro_batch)
        post.send(message, torch.tensor([_number(message)]))


def _number(message: StageMessage) -> float:
    return float(message.micro_batch * 10_000 + message.sender * 100 + message.receiver)


def test_what_was_sent_to_both_neighbours_has_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, object]] = []

    def isend(tensor: torch.Tensor, *, dst: int, group: object, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: sent.append((dst, group)))

    monkeypatch.setattr(stage_p2p.dist, "isend", isend)
    channels: Any = {
        P2PChannel(activations=True, sender=1, receiver=2): Axis(ranks=(5, 6), group="on"),  # type: ignore[arg-type]
        P2PChannel(activations=False, sender=1, receiver=0): Axis(ranks=(5, 4), group="back"),  # type: ignore[arg-type]
    }
    here = Mesh(rank=5, world=8, device=CPU, pipeline=Axis(index=1, ranks=(4, 5, 6)), channels=channels)
    order = pipeline_order("1f1b", pipeline=3, chunks=1, micro_batches=1)
    messenger = StageMessenger(here, MessageOrder(order, [0, 1, 2], own=1), shapes=[torch.empty(1)])
    messenger.send(StageMessage(1, 2, 0), torch.ones(1))
    messenger.send(StageMessage(1, 0, 0), torch.ones(1))
    messenger.finish()
    assert sorted(sent) == [(4, "back"), (6, "on")]
