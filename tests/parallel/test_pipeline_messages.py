"""The messages of a stage of a pipeline: what it sends, awaits and keeps, and who is told to be gone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parallel.test_pipeline_parts import CPU

from bloomery.errors import RankLost
from bloomery.events.timeouts import COLLECTIVE_TIMEOUT_S
from bloomery.parallel import stage_p2p
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline_schedule import (
    Action,
    P2PChannel,
    bubble_fraction,
    forwards_only,
    pipeline_order,
)
from bloomery.parallel.stage_p2p import MessageOrder, StageMessage, StageMessenger


class Works:
    """torch's messages: each work notes when it is waited for; `fails` is what waiting raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.fails: RuntimeError | None = None
        self.sent: list[torch.Tensor] = []
        for name, ends in (("isend", "dst"), ("irecv", "src")):
            monkeypatch.setattr(
                stage_p2p.dist,
                name,
                lambda tensor, name=name, ends=ends, **told: self._begin(tensor, name, told[ends], told),
            )

    def _begin(self, tensor: torch.Tensor, name: str, rank: int, told: dict[str, Any]) -> Any:
        if name == "isend":
            self.sent.append(tensor)
        number = len([call for call in self.calls if call[0] != "waited"])
        self.calls.append((name, rank, told["group"], told["tag"]))

        def wait() -> None:
            if self.fails is not None:
                raise self.fails
            self.calls.append(("waited", number))

        return SimpleNamespace(wait=wait)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Works:
    return Works(monkeypatch)


def messenger_of(count: int, messages: MessageOrder | None = None) -> StageMessenger:
    """That of the first of two stages, whose ranks are 4 and 6 of the run."""
    ahead = P2PChannel(activations=True, sender=0, receiver=1)
    back = P2PChannel(activations=False, sender=1, receiver=0)
    channels: Any = {
        ahead: Axis(index=0, ranks=(4, 6), group="ahead"),  # type: ignore[arg-type]
        back: Axis(index=1, ranks=(6, 4), group="back"),  # type: ignore[arg-type]
        replace(back, activations=True): Axis(index=1, ranks=(6, 4), group="on"),  # type: ignore[arg-type]
    }
    mesh = Mesh(device=CPU, rank=4, world=8, pipeline=Axis(index=0, ranks=(4, 6)), channels=channels)
    order = pipeline_order("1f1b", pipeline=2, chunks=1, micro_batches=count)
    shapes = [torch.empty(2 + number, device="meta") for number in range(count)]
    return StageMessenger(mesh, messages or MessageOrder(order, [0, 1], own=0), shapes=shapes)


def test_messages_go_over_their_channels_group_and_what_was_consumed_is_let_go(works: Works) -> None:
    messenger = messenger_of(3)
    for number in (0, 1):
        messenger.send(StageMessage(0, 1, number), torch.ones(2))
    assert works.calls == [("isend", 6, "ahead", 0), ("isend", 6, "ahead", 4096)]
    works.calls.clear()
    for place in (0, 1):
        messenger.post_receives(place)
    assert works.calls == [], "no gradient is sent during the first forwards"
    messenger.post_receives(2)
    messenger.receive(StageMessage(1, 0, 0))
    # That the gradient is there shows that the first forward was consumed.
    assert works.calls == [("irecv", 6, "back", 1), ("waited", 0), ("waited", 0)]
    assert len(messenger._sent[1]) == 1
    messenger.send(StageMessage(0, 1, 2), torch.ones(2))
    works.calls.clear()
    messenger.post_receives(3)
    assert works.calls == [], "the second gradient is sent when it is needed"
    messenger.post_receives(4)
    assert messenger.receive(StageMessage(1, 0, 1)).shape == (3,)
    assert works.calls[0] == ("irecv", 6, "back", 4097) and len(messenger._sent[1]) == 1
    messenger.post_receives(5)
    messenger.receive(StageMessage(1, 0, 2))
    messenger.finish()
    assert not messenger._sent[1]


def test_what_the_action_itself_consumed_that_made_a_message_is_let_go_with_it(works: Works) -> None:
    ranks = [0, 1, 0]  # of which the second stage's forward consumes what the first sends, and answers it
    messenger = messenger_of(1, MessageOrder(forwards_only(ranks, micro_batches=1), ranks, own=0))
    messenger.send(StageMessage(0, 1, 0), torch.ones(2))
    assert len(messenger._sent[1]) == 1
    messenger.post_receives(1)
    messenger.receive(StageMessage(1, 2, 0))
    assert not messenger._sent[1] and works.calls[-1] == ("waited", 0)


def test_what_is_sent_lies_in_one_piece(works: Works) -> None:
    numbers = torch.arange(6.0).view(2, 3).t()
    messenger_of(2).send(StageMessage(0, 1, 0), numbers)
    (sent,) = works.sent
    assert sent.is_contiguous() and torch.equal(sent, numbers)


@pytest.mark.parametrize("when", ["sending", "posting"])
def test_a_stage_that_is_gone_before_a_message_begins_is_named_too(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*told: Any, **more: Any) -> Any:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(stage_p2p.dist, "isend", fails)
    monkeypatch.setattr(stage_p2p.dist, "irecv", fails)
    messenger = messenger_of(2)
    with pytest.raises(RankLost, match=r"^Rank 4 waited for rank 6, number 1 of its pipeline"):
        if when == "sending":
            messenger.send(StageMessage(0, 1, 0), torch.ones(2))
        else:
            for place in range(3):
                messenger.post_receives(place)


@pytest.mark.parametrize("when", ["receiving", "finishing"])
def test_a_stage_that_is_gone_is_named_by_its_rank_and_its_place(works: Works, when: str) -> None:
    messenger = messenger_of(2)
    messenger.send(StageMessage(0, 1, 0), torch.ones(2))
    messenger.post_receives(2)
    works.fails = RuntimeError("Connection closed by peer")
    with pytest.raises(RankLost) as lost:
        messenger.finish() if when == "finishing" else messenger.receive(StageMessage(1, 0, 0))
    assert lost.value.message == (
        f"Rank 4 waited for rank 6, number 1 of its pipeline, which is gone or took more than "
        f"{COLLECTIVE_TIMEOUT_S} s."
    )
    assert lost.value.remedy == (
        "Its message, if any, says why. The same command goes on from the newest checkpoint."
    )
    works.fails = None
    messenger = messenger_of(2)
    messenger.send(StageMessage(0, 1, 0), torch.ones(2))
    works.fails = RuntimeError("a shape is wrong")
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        messenger.finish()


def test_orders_that_wait_for_each_other_are_told_and_a_lone_stage_never_waits() -> None:
    assert bubble_fraction(pipeline_order("1f1b", pipeline=1, chunks=1, micro_batches=3)) == 0.0
    circle = ((Action("backward", 0, 0),), (Action("forward", 1, 0),))
    with pytest.raises(AssertionError, match="wait for each other"):
        bubble_fraction(circle)
