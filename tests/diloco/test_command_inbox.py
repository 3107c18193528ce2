"""What a rank hears of its agent while its ring runs, and while it waits."""

from __future__ import annotations

import pytest

from bloomery.diloco import agent_client
from bloomery.diloco.agent_client import CommandInbox
from bloomery.errors import PeerError
from bloomery.events.heartbeat import RankActivity
from bloomery.protocol.rank_messages import Abort, AgentMessage, StopTraining


class Agent:
    """Says what a test put into `said`; notes what it is told."""

    def __init__(self, *said: AgentMessage) -> None:
        self.said, self.left, self.silences = list(said), list[str](), 0

    def peek(self) -> list[AgentMessage]:
        return list(self.said)

    def receive(self, timeout_s: float) -> AgentMessage | None:
        self.silences += not self.said
        assert self.silences < 1000, "it waits for ever"
        return self.said.pop(0) if self.said else None

    def leave(self, why: str) -> None:
        self.left.append(why)
        self.said.append(StopTraining(why=why, failed=False))


def inbox_of(agent: Agent, **options: object) -> CommandInbox:
    return CommandInbox(agent, lambda value: [value], **options)


@pytest.mark.parametrize(
    ("command", "goes_on"),
    [
        (None, True),
        (StopTraining(why="enough", failed=False), False),
        (Abort(epoch=7, why="a test"), False),
        (Abort(epoch=6, why="a test"), True),
        (Abort(epoch=8, why="a test"), True),
    ],
)
def test_a_ring_is_cancelled_by_a_stop_and_by_the_end_of_its_own_attempt_alone(
    command: AgentMessage | None, goes_on: bool
) -> None:
    polls: list[float] = []

    def is_over(timeout_s: float) -> bool:
        polls.append(timeout_s)
        return len(polls) > 3

    agent = Agent(*([] if command is None else [command]))
    assert inbox_of(agent).while_reducing(7, is_over) == goes_on
    assert len(polls) == (4 if goes_on else 1)
    assert agent.said == ([] if command is None else [command]), "it is looked at, and left to the loop"


def test_who_is_asked_to_stop_while_it_waits_tells_the_agent_once_and_hears_of_it() -> None:
    agent = Agent()
    command = inbox_of(agent, asked_to_stop=lambda: "signal 15").wait("the next round")
    assert command == StopTraining(why="signal 15", failed=False) and agent.left == ["signal 15"]


def test_who_reduces_and_is_asked_to_stop_tells_the_agent_once_however_long_the_agent_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowAgent(Agent):
        def leave(self, why: str) -> None:
            self.left.append(why)

    monkeypatch.setattr(agent_client, "_POLL_S", 0.0)
    agent, polls = SlowAgent(), iter([False] * 5 + [True])
    inbox = inbox_of(agent, asked_to_stop=lambda: "signal 15")
    assert inbox.while_reducing(7, lambda timeout_s: next(polls)) and agent.left == ["signal 15"]


def test_between_steps_all_ranks_take_as_many_commands_as_the_first_has() -> None:
    agent = Agent(Abort(epoch=1, why="a test"), Abort(epoch=2, why="a test"), Abort(epoch=3, why="a test"))
    inbox = CommandInbox(agent, lambda count: [2, count])
    assert inbox.between_steps() == [Abort(epoch=1, why="a test"), Abort(epoch=2, why="a test")]
    assert agent.said == [Abort(epoch=3, why="a test")]


def test_waits_for_other_peers_are_told_to_the_heartbeat_and_end_however_they_end() -> None:
    entered: list[RankActivity] = []
    waits = [RankActivity.WAITING_FOR_PEERS, RankActivity.BETWEEN_STEPS]
    inbox = inbox_of(Agent(Abort(epoch=1, why="a test")), enter=entered.append)
    inbox.wait("the next round")
    assert entered == waits
    inbox.while_reducing(7, lambda timeout_s: True)
    assert entered == 2 * waits
    broken = Agent()
    broken.receive = lambda timeout_s: (_ for _ in ()).throw(PeerError("gone", remedy=""))  # type: ignore[method-assign]
    with pytest.raises(PeerError):
        inbox_of(broken, enter=entered.append).wait("the next round")
    assert entered == 3 * waits
