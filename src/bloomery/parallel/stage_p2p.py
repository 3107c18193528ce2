"""Point-to-point messages between pipeline stages: activations forward, their gradients backward."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.errors import RankLost
from bloomery.events.timeouts import COLLECTIVE_TIMEOUT_S
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline_schedule import Action, P2PChannel, PipelineOrder, end_times
from bloomery.parallel.rendezvous import is_lost_rank_error


@dataclass(frozen=True)
class StageMessage:
    """What a stage sends to a neighbouring stage for a micro-batch.

    sender, receiver: stages. If the receiver is the later stage it gets activations, otherwise gradients.
    """

    sender: int
    receiver: int
    micro_batch: int


class MessageOrder:
    """Which messages one pipeline rank sends and receives under a pipeline order, and when.

    order: the actions of every pipeline rank.
    ranks: the pipeline rank of each stage.
    own: this pipeline rank.
    incoming: the messages that this rank receives on each channel, in the order in which they are sent.
    produced_at: for each message, the index of the action that makes it, in its sender's actions.
    consumed_at: for each message, the index of the action that needs it, in its receiver's actions.
    posted_before: the messages whose receive this rank posts before an action, by the index of that action.
    """

    def __init__(self, order: PipelineOrder, ranks: Sequence[int], *, own: int) -> None:
        self.order, self.ranks, self.own = order, ranks, own
        self.incoming: dict[P2PChannel, list[StageMessage]] = {}
        self.produced_at: dict[StageMessage, int] = {}
        self.consumed_at: dict[StageMessage, int] = {}
        for rank, actions in enumerate(order):
            for place, action in enumerate(actions):
                self._add(rank, place, action)
        self.posted_before: dict[int, list[StageMessage]] = {}
        self._post_in_time(end_times(order))

    def _post_in_time(self, ends: Sequence[Sequence[int]]) -> None:
        """Choose the action before which each receive is posted: the one during which the message is sent.

        On a GPU a receive occupies multiprocessors from when it is posted until its message has come, and a
        send does until its receive is posted. Posted before the first action that ends after the message is
        sent, it comes beside that action, and neither end waits for longer. A message that is sent later than
        that is waited for anyway: its receive is posted by the action that needs it.

        ends: when each action of each rank ends by the schedule. Real times differ, and then one end waits
        longer; nothing else depends on them. Receives of a channel keep the order in which it sends.
        """
        for channel, expected in self.incoming.items():
            place = len(self.order[self.own])
            for message in reversed(expected):
                sent = ends[channel.sender][self.produced_at[message]]
                beside = bisect_right(ends[self.own], sent)
                place = min(place, beside, self.consumed_at[message])
                self.posted_before.setdefault(place, []).append(message)
        for messages in self.posted_before.values():
            messages.reverse()

    def channel_of(self, message: StageMessage) -> P2PChannel:
        """The channel that the message is sent on."""
        return P2PChannel(
            activations=message.sender < message.receiver,
            sender=self.ranks[message.sender],
            receiver=self.ranks[message.receiver],
        )

    def _add(self, rank: int, place: int, action: Action) -> None:
        if action.kind == "backward_weight":
            return
        onward = 1 if action.kind == "forward" else -1
        consumed = StageMessage(action.stage - onward, action.stage, action.micro_batch)
        produced = StageMessage(action.stage, action.stage + onward, action.micro_batch)
        if 0 <= consumed.sender < len(self.ranks):
            self.consumed_at[consumed] = place
        if 0 <= produced.receiver < len(self.ranks):
            self.produced_at[produced] = place
            channel = self.channel_of(produced)
            if channel.receiver == self.own != channel.sender:
                self.incoming.setdefault(channel, []).append(produced)


class StageMessenger:
    """Sends and receives this rank's messages during one pass over a pipeline order.

    Sending does not wait. Each channel has a process group of only its sender and its receiver, and its
    messages are received in the order in which they are sent, so a channel waits for nothing but its own two
    ranks. NCCL buffers nothing and runs the operations of one group one after the other: in a group of more
    ranks a send would wait behind a receive that was only posted ahead, and from four ranks on such waits can
    close to a circle. A message between two stages of one rank is handed over without being sent. When a
    receive is posted is said by `MessageOrder`.
    """

    def __init__(self, mesh: Mesh, messages: MessageOrder, *, shapes: Sequence[Tensor]) -> None:
        """shapes: for each micro-batch, a tensor on the device 'meta' like its messages."""
        self._mesh, self._messages, self._shapes = mesh, messages, shapes
        self._local: dict[StageMessage, Tensor] = {}
        self._sent: dict[int, deque[tuple[StageMessage, dist.Work, Tensor]]] = defaultdict(deque)
        self._posted: dict[StageMessage, tuple[dist.Work, Tensor]] = {}

    def post_receives(self, place: int) -> None:
        """Start the receives that are due before this rank's action of index `place`; call it before each."""
        for message in self._messages.posted_before.get(place, ()):
            self._post(message, self._messages.channel_of(message))

    def send(self, message: StageMessage, tensor: Tensor) -> None:
        """Start to send; the tensor must not change until `finish`."""
        channel = self._messages.channel_of(message)
        if channel.sender == channel.receiver:
            self._local[message] = tensor
            return
        axis, contiguous = self._mesh.channels[channel], tensor.contiguous()
        with self._raising_rank_lost(channel.receiver):
            work = dist.isend(contiguous, dst=axis.ranks[1], group=axis.group, tag=_tag(message))
        assert work is not None, "a rank is in the groups of its own channels"
        self._sent[channel.receiver].append((message, work, contiguous))

    def receive(self, message: StageMessage) -> Tensor:
        """Wait for a message, whose receive was posted, and return its tensor."""
        if message in self._local:
            return self._local.pop(message)
        channel = self._messages.channel_of(message)
        work, tensor = self._posted.pop(message)
        with self._raising_rank_lost(channel.sender):
            work.wait()
        self._release(channel.sender, before=self._messages.produced_at[message])
        return tensor

    def finish(self) -> None:
        """Wait until everything was received."""
        for receiver in list(self._sent):
            self._release(receiver, before=None)
        assert not self._local and not self._posted, "every message has a receiver"

    def _post(self, message: StageMessage, channel: P2PChannel) -> None:
        """Start to receive a message."""
        axis = self._mesh.channels[channel]
        # Not `empty_like`: of a tensor on 'meta' torch computes it in Python, and loads SymPy for it.
        like = self._shapes[message.micro_batch]
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self._mesh.device)
        with self._raising_rank_lost(channel.sender):
            work = dist.irecv(tensor, src=axis.ranks[0], group=axis.group, tag=_tag(message))
        assert work is not None, "a rank is in the groups of its own channels"
        self._posted[message] = (work, tensor)

    def _release(self, receiver: int, *, before: int | None) -> None:
        """Free the tensors that `receiver` consumed before its action of index `before`; all if it is None.

        A message that this rank received from it was made by that action, so it has received what its earlier
        actions needed.
        """
        sent = self._sent[receiver]
        while sent and (before is None or self._messages.consumed_at[sent[0][0]] <= before):
            _, work, _ = sent.popleft()
            with self._raising_rank_lost(receiver):
                work.wait()

    @contextmanager
    def _raising_rank_lost(self, pipeline_rank: int) -> Iterator[None]:
        """Raise RankLost naming the rank that this one waited for, if a message does not come or go."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_rank_error(error):
                raise
            raise RankLost(
                f"Rank {self._mesh.rank} waited for rank {self._mesh.pipeline.ranks[pipeline_rank]}, number "
                f"{pipeline_rank} of its pipeline, which is gone or took more than {COLLECTIVE_TIMEOUT_S} s.",
                remedy="Its message, if any, says why. The same command goes on from the newest checkpoint.",
            ) from error


def _tag(message: StageMessage) -> int:
    """A number that differs for each message of a channel, for backends that compare tags."""
    return message.micro_batch * 4096 + message.sender
