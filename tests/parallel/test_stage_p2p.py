"""Messages between stages on a backend that buffers nothing, as NCCL is: no schedule may wait in a circle."""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
    """Why each channel has a group of its own; and that this backend would notice."""

    def of_direction(channel: P2PChannel) -> Hashable:
        return channel.activations, channel.sender < channel.receiver

    table = pipeline_order("1f1b", pipeline=4, chunks=1, micro_batches=8)
    with pytest.raises(Stuck):
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
        for action in table[rank]:
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
