"""Messages between stages on a backend that buffers nothing, as NCCL is: no schedule may wait in a circle."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from unittest.mock import patch

import pytest
import torch
from fabric import Fabric, Stuck

from bloomery.config.pipelines import rounds_fit
from bloomery.parallel import mail, mesh
from bloomery.parallel.lanes import Lane, lanes_of
from bloomery.parallel.mail import Mail, Message, Routes
from bloomery.parallel.mesh import Axis, Mesh
from bloomery.parallel.timetable import Action, Timetable, forwards_only, timetable
from bloomery.plan.partition import rank_of_stage

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]
SCHEDULES += [("zero-bubble", 2), ("zbv", 2)]
CPU = torch.device("cpu")
Groups = Callable[[Lane], Hashable]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 4, 8])
def test_every_message_arrives_though_nothing_is_buffered(schedule: str, chunks: int, pipeline: int) -> None:
    for count in (1, pipeline, 2 * pipeline + 1):
        if schedule in ("interleaved", "zero-bubble") and not rounds_fit(count, pipeline=pipeline):
            continue
        table = timetable(schedule, pipeline=pipeline, chunks=chunks, micro_batches=count)
        passed(table, pipeline, chunks, schedule, micro_batches=count, group_of=lambda lane: lane)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_every_message_of_an_evaluation_arrives_too(schedule: str, chunks: int) -> None:
    ranks = [rank_of_stage(stage, pipeline=4, schedule=schedule) for stage in range(4 * chunks)]
    table = forwards_only(ranks, micro_batches=9)
    passed(table, 4, chunks, schedule, micro_batches=9, group_of=lambda lane: lane)


def test_one_group_for_a_direction_waits_in_a_circle_from_four_ranks_on() -> None:
    """Why each lane has a group of its own; and that this backend would notice."""

    def of_direction(lane: Lane) -> Hashable:
        return lane.activations, lane.sender < lane.receiver

    table = timetable("1f1b", pipeline=4, chunks=1, micro_batches=8)
    with pytest.raises(Stuck):
        passed(table, 4, 1, "1f1b", micro_batches=8, group_of=of_direction)


def test_a_lane_goes_one_way_between_two_ranks_and_neighbouring_stages_have_one_each_way() -> None:
    assert lanes_of(pipeline=2, chunks=1, schedule="1f1b") == (
        Lane(activations=True, sender=0, receiver=1),
        Lane(activations=False, sender=1, receiver=0),
    )
    ends = {(one.sender, one.receiver) for one in lanes_of(pipeline=4, chunks=3, schedule="interleaved")}
    assert ends == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (3, 0), (0, 3)}
    there_and_back = lanes_of(pipeline=3, chunks=2, schedule="zbv")
    assert {(one.sender, one.receiver) for one in there_and_back if one.activations} == {
        (0, 1),
        (1, 2),
        (2, 1),
        (1, 0),
    }


def passed(
    table: Timetable, pipeline: int, chunks: int, schedule: str, *, micro_batches: int, group_of: Groups
) -> None:
    """Run the messages of a timetable, opening the lanes first; each number must be the message's own."""
    fabric = Fabric()
    stages = pipeline * chunks
    ranks = [rank_of_stage(stage, pipeline=pipeline, schedule=schedule) for stage in range(stages)]
    lanes = lanes_of(pipeline=pipeline, chunks=chunks, schedule=schedule)

    def life(rank: int) -> None:
        own = {
            lane: Axis(
                index=int(lane.receiver == rank), ranks=(lane.sender, lane.receiver), group=group_of(lane)
            )  # type: ignore[arg-type]
            for lane in lanes
            if rank in (lane.sender, lane.receiver)
        }
        mesh._open(own, CPU)
        axis = Axis(index=rank, ranks=tuple(range(pipeline)))
        here = Mesh(rank=rank, world=pipeline, device=CPU, pipeline=axis, lanes=own)
        shapes = [torch.empty(1, device="meta")] * micro_batches
        post = Mail(here, Routes(table, ranks, own=rank), shapes=shapes)
        for action in table[rank]:
            _act(post, action, last=stages - 1)
        post.finish()

    with patch.object(mail, "dist", fabric), patch.object(mesh, "dist", fabric):
        fabric.run(pipeline, life)


def _act(post: Mail, action: Action, *, last: int) -> None:
    if action.kind == "backward_weight":
        return
    onward = 1 if action.kind == "forward" else -1
    before, after = action.stage - onward, action.stage + onward
    if 0 <= before <= last:
        message = Message(before, action.stage, action.micro_batch)
        assert float(post.receive(message)) == _number(message)
    if 0 <= after <= last:
        message = Message(action.stage, after, action.micro_batch)
        post.send(message, torch.tensor([_number(message)]))


def _number(message: Message) -> float:
    return float(message.micro_batch * 10_000 + message.sender * 100 + message.receiver)
