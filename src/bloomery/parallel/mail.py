"""What pipeline stages send each other: activations forward, their gradients back."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.errors import RankLost
from bloomery.parallel.failures import tells_of_a_lost_rank
from bloomery.parallel.lanes import Lane
from bloomery.parallel.mesh import COLLECTIVE_TIMEOUT_S, Mesh
from bloomery.parallel.timetable import Action, Timetable


@dataclass(frozen=True)
class Message:
    """What a stage sends to a neighbour for a micro-batch: activations to the next, gradients back."""

    sender: int
    receiver: int
    micro_batch: int


class Routes:
    """Who sends what to whom and when, in one timetable, as far as one pipeline rank is concerned."""

    def __init__(self, table: Timetable, ranks: Sequence[int], *, own: int) -> None:
        """ranks: of each stage on the pipeline axis; own: this one."""
        self.table, self.ranks, self.own = table, ranks, own
        self.coming: dict[Lane, list[Message]] = {}
        self.produced_at: dict[Message, int] = {}
        self.consumed_at: dict[Message, int] = {}
        for rank, actions in enumerate(table):
            for place, action in enumerate(actions):
                self._note(rank, place, action)

    def way(self, message: Message) -> Lane:
        """Its lane: from which pipeline rank to which."""
        return Lane(
            activations=message.sender < message.receiver,
            sender=self.ranks[message.sender],
            receiver=self.ranks[message.receiver],
        )

    def _note(self, rank: int, place: int, action: Action) -> None:
        if action.kind == "backward_weight":
            return
        onward = 1 if action.kind == "forward" else -1
        taken = Message(action.stage - onward, action.stage, action.micro_batch)
        sent = Message(action.stage, action.stage + onward, action.micro_batch)
        if 0 <= taken.sender < len(self.ranks):
            self.consumed_at[taken] = place
        if 0 <= sent.receiver < len(self.ranks):
            self.produced_at[sent] = place
            lane = self.way(sent)
            if lane.receiver == self.own != lane.sender:
                self.coming.setdefault(lane, []).append(sent)


class Mail:
    """The messages of one run of a timetable, as this rank sends and receives them.

    Sending does not wait. A lane goes one way between two ranks and has a group of its own, and what comes on
    it is received in the order in which the timetable sends it. So a lane waits for nothing but its own two
    ranks, though NCCL buffers nothing and runs what is asked of one group one after the other. In a group of
    more ranks, sending on would wait behind a message that was only asked for ahead, and from four ranks on
    such waits close to a circle. Between two stages of one rank a message changes hands.
    """

    def __init__(self, mesh: Mesh, routes: Routes, *, shapes: Sequence[Tensor]) -> None:
        """shapes: of each micro-batch's messages, tensors on 'meta'."""
        self._mesh, self._routes, self._shapes = mesh, routes, shapes
        self._local: dict[Message, Tensor] = {}
        self._sent: dict[int, deque[tuple[Message, dist.Work, Tensor]]] = defaultdict(deque)
        self._posted: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._coming = {key: iter(messages) for key, messages in routes.coming.items()}

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send; the tensor must not change until `finish`."""
        lane = self._routes.way(message)
        if lane.sender == lane.receiver:
            self._local[message] = tensor
            return
        axis, held = self._mesh.lanes[lane], tensor.contiguous()
        with self._awaited(lane.receiver):
            work = dist.isend(held, dst=axis.ranks[1], group=axis.group, tag=_tag(message))
        assert work is not None, "a rank is in its own lanes"
        self._sent[lane.receiver].append((message, work, held))

    def receive(self, message: Message) -> Tensor:
        """The tensor of a message, waited for."""
        if message in self._local:
            return self._local.pop(message)
        lane = self._routes.way(message)
        coming = self._coming[lane]
        while message not in self._posted:
            self._post(next(coming), lane)
        work, tensor = self._posted.pop(message)
        following = next(coming, None)
        if following is not None:
            self._post(following, lane)  # it may arrive while this one is computed with
        with self._awaited(lane.sender):
            work.wait()
        self._release(lane.sender, before=self._routes.produced_at[message])
        return tensor

    def finish(self) -> None:
        """Wait until everything was received."""
        for receiver in list(self._sent):
            self._release(receiver, before=None)
        assert not self._local and not self._posted, "every message has a receiver"

    def _post(self, message: Message, lane: Lane) -> None:
        axis = self._mesh.lanes[lane]
        tensor = torch.empty_like(self._shapes[message.micro_batch], device=self._mesh.device)
        with self._awaited(lane.sender):
            work = dist.irecv(tensor, src=axis.ranks[0], group=axis.group, tag=_tag(message))
        assert work is not None, "a rank is in its own lanes"
        self._posted[message] = (work, tensor)

    def _release(self, receiver: int, *, before: int | None) -> None:
        """Let go of what a rank received before its action of that number: it has sent what came after."""
        sent = self._sent[receiver]
        while sent and (before is None or self._routes.consumed_at[sent[0][0]] <= before):
            _, work, _ = sent.popleft()
            with self._awaited(receiver):
                work.wait()

    @contextmanager
    def _awaited(self, pipeline_rank: int) -> Iterator[None]:
        """Say whom this rank waited for, where a message does not come or does not go."""
        try:
            yield
        except RuntimeError as error:
            if not tells_of_a_lost_rank(error):
                raise
            raise RankLost(
                f"Rank {self._mesh.rank} waited for rank {self._mesh.pipeline.ranks[pipeline_rank]}, number "
                f"{pipeline_rank} of its pipeline, which is gone or took more than {COLLECTIVE_TIMEOUT_S} s.",
                remedy="Its message, if any, says why. The same command goes on from the newest checkpoint.",
            ) from error


def _tag(message: Message) -> int:
    """Tell messages of one lane apart, on backends that look."""
    return message.micro_batch * 4096 + message.sender
