"""A rank's connection to its peer's agent: reports what the rank does, and receives the agent's commands.

`connect_agent` opens the connection. `CommandInbox` gives every rank of a peer the same commands in the same
order.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bloomery.agent.rank_server import PARENT, close_all, receive_message
from bloomery.checkpoint.writer.ranks import Gather
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.events.heartbeat import RankActivity, ignore_activity
from bloomery.protocol.rank_messages import (
    Abort,
    AbortAck,
    AgentMessage,
    DataIdentity,
    Hello,
    Moving,
    RankLeaves,
    RankMessage,
    RankReady,
    RankRingDone,
    RankRingFailed,
    RoundActivity,
    StateCopied,
    StateHeld,
    StateRefused,
    StopTraining,
    decode_agent_message,
    encode_local,
)
from bloomery.protocol.records import Ready

log = logging.getLogger(__name__)

_SEND_S = 60
"""The seconds that a send may block; after that the agent counts as gone."""
_REPORT_S = 60.0
"""The seconds between two log lines of what a waiting rank waits for."""
_WAIT_S = 24 * 3600.0
"""The longest wait for a command, in seconds. Usually the agent gives up before and ends its ranks."""
_POLL_S = 0.5
"""The seconds between two checks of a waiting rank whether it is asked to stop."""
_RING_POLL_S = 0.02
"""The seconds between two checks of a reducing rank whether the agent aborts that."""
_SAME_S = 120.0
"""The most seconds by which another rank may get a command later than the first rank."""

_REMEDY = "See the agent's last lines; the same command starts the peer again, and it joins the others."


def connect_agent(*, rank: int, world: int, path: Path | None = None) -> AgentClient:
    """Connect to the agent that started this rank.

    Raises PeerError if no agent listens there, or another user's process does.

    rank, world: the index of this rank and the number of ranks within this peer.
    path: the path of the agent's socket; None: the value of BLOOMERY_PARENT.
    """
    place = path or Path(os.environ.get(PARENT, ""))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(place))
    except OSError as error:
        connection.close()
        raise PeerError(f"No agent listens at {PARENT}={place}: {error.strerror}.", remedy=_REMEDY) from error
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user not in (os.getuid(), 0):
        connection.close()
        raise PeerError(f"The process at {PARENT}={place} belongs to another user.", remedy=_REMEDY)
    client = AgentClient(connection)
    client.send(Hello(rank=rank, world=world, process=os.getpid()))
    return client


class AgentClient:
    """A rank's connection to its peer's agent. Any thread may send and receive.

    Sending does not wait for an answer, but may block up to 60 s while the agent's socket is full. When the
    agent has died, every method raises PeerError. A thread of this object
    receives the agent's messages and answers an abort at once, because a rank whose main thread computes for
    seconds (a step of a large model, its outer step) must not be left out as if it hung.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._unread: deque[AgentMessage] = deque()
        self._failure: PeerError | None = None
        self._sending = threading.Lock()
        self._arrived = threading.Condition()
        threading.Thread(target=self._listen, name="agent", daemon=True).start()

    def report_activity(self, activity: RoundActivity, *, step: int) -> None:
        """Tell the agent what this rank does now. step: the inner step that it makes, or made last."""
        self.send(Moving(activity=activity, step=step))

    def report_data_identity(self, identity: Mapping[str, str]) -> None:
        """Tell the agent what identifies the stream of samples. Only the first rank calls it, once."""
        self.send(DataIdentity(identity=dict(identity)))

    def report_state(
        self,
        *,
        round: int,
        digest: str,
        step: int,
        samples: int,
        position: Position | None,
        saves: Sequence[int],
    ) -> None:
        """Tell the agent which state this rank holds now; `StateHeld` explains each parameter."""
        self.send(
            StateHeld(
                round=round,
                digest=digest,
                step=step,
                samples=samples,
                position=position,
                saves=tuple(saves),
            )
        )

    def report_copy(self, *, round: int, digest: str, directory: Path | None) -> None:
        """Tell the agent of a copy of a state; `StateCopied` explains each parameter."""
        self.send(StateCopied(round=round, digest=digest, directory=directory))

    def refuse_state(self, why: str) -> None:
        """Refuse the state of a `ReplaceState`, whose digest is wrong. Call `report_state` afterwards."""
        self.send(StateRefused(why=why))

    def offer_part(self, ready: Ready, *, number: int) -> None:
        """Offer this peer's part of a round, as the answer to the `StartRound` of this number.

        The part stays unchanged until the round is committed.
        """
        self.send(RankReady(ready=ready, number=number))

    def report_ring_done(self, *, epoch: int, digest: str) -> None:
        """Tell the agent that this epoch's all_reduce is complete. digest: that of the state it leads to."""
        self.send(RankRingDone(epoch=epoch, digest=digest))

    def report_ring_failed(self, *, epoch: int, kind: str, culprit: str | None, why: str) -> None:
        """Tell the agent that this epoch's all_reduce failed; `RankRingFailed` explains each parameter."""
        self.send(RankRingFailed(epoch=epoch, kind=kind, culprit=culprit, why=why))

    def leave(self, why: str) -> None:
        """Tell the agent that this rank ends on purpose. It then sends all ranks `StopTraining`."""
        self.send(RankLeaves(why=why))

    def receive(self, timeout_s: float) -> AgentMessage | None:
        """Return the agent's next message, in order; None if none came within `timeout_s`."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._unread or self._failure, max(0.0, timeout_s))
            if self._unread:
                return self._unread.popleft()
            self._raise_failure()
            return None

    def peek(self) -> Sequence[AgentMessage]:
        """Return the messages that `receive` will return next, without waiting, and leave them for it."""
        with self._arrived:
            if not self._unread:
                self._raise_failure()
            return tuple(self._unread)

    def send(self, message: RankMessage) -> None:
        """Send one message. Raises PeerError if the agent is gone."""
        try:
            with self._sending:
                self._socket.send(encode_local(message))
        except OSError as error:
            raise PeerError(f"The agent of this rank is gone ({error.strerror}).", remedy=_REMEDY) from error

    def close(self) -> None:
        """Close the connection, which tells the agent that this rank is gone."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PeerError(self._failure.message, remedy=_REMEDY) from self._failure

    def _listen(self) -> None:
        try:
            while True:
                self._receive()
        except PeerError as failure:
            with self._arrived:
                self._failure = failure
                self._arrived.notify_all()

    def _receive(self) -> None:
        """Receive one message into `_unread`. Raises PeerError if the agent is gone or sends what is none."""
        try:
            content, descriptors = receive_message(self._socket, wait=True)
        except ConnectionResetError:
            return  # a reset is reported once, if the agent left messages unread; its own come next
        except OSError as error:
            raise PeerError(f"The agent of this rank is gone ({error.strerror}).", remedy=_REMEDY) from error
        if not content:
            raise PeerError("The agent of this rank is gone.", remedy=_REMEDY)
        try:
            command = decode_agent_message(content, descriptors)
        except PeerError:
            close_all(descriptors)
            raise
        if isinstance(command, Abort):  # which tells a rank that computes from one that hangs
            self.send(AbortAck(epoch=command.epoch))
        with self._arrived:
            self._unread.append(command)
            self._arrived.notify_all()


class CommandInbox:
    """Reads the agent's commands so that every rank of a peer gets the same ones in the same order.

    agent: the connection to the agent.
    gather: all_gather_object over the ranks of this peer.
    asked_to_stop: returns why this rank is asked to stop, for instance by a signal; "" while it is not.
        Between steps the ranks agree on that among themselves; a rank that waits tells the agent, which tells
        all of them to stop.
    enter: records in the heartbeat the activity that this rank begins. A wait for other peers has no limit
        there, because the agent watches it.
    """

    def __init__(
        self,
        agent: AgentClient,
        gather: Gather,
        *,
        asked_to_stop: Callable[[], str] = str,
        enter: Callable[[RankActivity], None] = ignore_activity,
    ) -> None:
        self._agent, self._gather = agent, gather
        self._asked_to_stop, self._enter = asked_to_stop, enter
        self._has_asked = False
        self._polled_s = float("-inf")

    def between_steps(self) -> list[AgentMessage]:
        """Return, on every rank, the commands that the first rank has received since the last call.

        Collective over the peer.
        """
        count = self._gather(len(self._agent.peek()))[0]
        return [self._next() for _ in range(count)]

    def wait(self, for_what: str) -> AgentMessage:
        """Wait for the next command and return it. Raises PeerError when none comes in a day.

        for_what: what this rank waits for, in words for the log.
        """
        with self._waiting():
            return self._next_command(for_what)

    def _next_command(self, for_what: str) -> AgentMessage:
        begun_s = time.monotonic()
        report_s = _REPORT_S
        self._pass_on_stop()
        while (command := self._agent.receive(_POLL_S)) is None:
            self._pass_on_stop()
            waited_s = time.monotonic() - begun_s
            if waited_s > _WAIT_S:
                raise PeerError(
                    f"The agent sent nothing for {waited_s / 3600:.0f} hours: waited for {for_what}.",
                    remedy="Is the coordinator up? The same command starts the peer again.",
                )
            if waited_s > report_s:
                log.warning("waiting for %s since %.0f s", for_what, waited_s)
                report_s += _REPORT_S
        return command

    def while_reducing(self, epoch: int, is_over: Callable[[float], bool]) -> bool:
        """Wait until `is_over(timeout_s)` is True. Return False as soon as the ring must be cancelled."""
        with self._waiting():
            while not is_over(_RING_POLL_S):
                if any(_ends(command, epoch) for command in self._agent.peek()):
                    return False
                self._pass_on_stop()
        return True

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Record in the heartbeat that this rank waits for other peers."""
        self._enter(RankActivity.WAITING_FOR_PEERS)
        try:
            yield
        finally:
            self._enter(RankActivity.BETWEEN_STEPS)

    def _pass_on_stop(self) -> None:
        """If this rank is asked to stop, tell the agent, which answers every rank with StopTraining."""
        now_s = time.monotonic()
        if self._has_asked or now_s < self._polled_s + _POLL_S:
            return
        self._polled_s = now_s
        why = self._asked_to_stop()
        if why:
            self._has_asked = True
            self._agent.leave(why)

    def _next(self) -> AgentMessage:
        command = self._agent.receive(_SAME_S)
        if command is None:
            raise PeerError(
                "The ranks of this peer received different commands.",
                remedy="The same command starts the peer again. Please report it with the agent's log.",
            )
        return command


def _ends(command: AgentMessage, epoch: int) -> bool:
    return isinstance(command, StopTraining) or (isinstance(command, Abort) and command.epoch == epoch)
