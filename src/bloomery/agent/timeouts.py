"""The table of all time-outs of training between peers, each computed from a setting or another time-out.

`bloomery peer explain` prints the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bloomery.config.elastic import ElasticSection
from bloomery.transport.connection_pool import DialTiming
from bloomery.transport.sockets import TcpTimeouts

_MEDIANS = 10.0
"""The multiple of the median duration after which a step or a ring counts as hung."""
_NAT_S, _AWAY_S = 30, 15.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One time-out of the table.

    name: its field in `Timeouts`.
    seconds: how long it is.
    origin: the setting that it is, or how it is computed from others.
    why: what waits, and for what.
    """

    name: str
    seconds: float
    origin: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """All time-outs of a peer, in seconds. `table` says what each is for."""

    heartbeat_s: float
    lease_s: float
    coordinator_s: float
    coordinator_start_s: float
    coordinator_silence_s: float
    grace_s: float
    patience_s: float
    stagger_s: float
    answer_s: float
    stall_s: float
    ring_s: float
    turn_s: float
    handshake_s: float
    redial_s: float
    connect_s: float
    keepalive_s: float
    unanswered_s: float
    start_s: float
    compile_s: float
    step_s: float
    save_s: float
    ending_s: float

    @property
    def dialing(self) -> DialTiming:
        """Return the time-outs of dialling a ring neighbour."""
        return DialTiming(turn_s=self.turn_s, answer_s=self.redial_s, retry_s=self.turn_s / 10)

    @property
    def tcp(self) -> TcpTimeouts:
        """Return the TCP time-outs that the kernel applies to connections."""
        idle_s = int(self.keepalive_s)
        return TcpTimeouts(
            idle_s=idle_s, probe_s=max(1, idle_s // 3), probes=3, unanswered_s=self.unanswered_s
        )


def timeouts_of(section: ElasticSection) -> Timeouts:
    """Return the time-outs that follow from the settings."""
    return Timeouts(**{entry.name: entry.seconds for entry in table(section)})


def step_deadline_s(timeouts: Timeouts, median_s: float) -> float:
    """Return how many seconds a step may take when the median of the last ones is `median_s`."""
    return max(timeouts.step_s, _MEDIANS * median_s)


def ring_deadline_s(timeouts: Timeouts, median_s: float) -> float:
    """Return how many seconds a ring may take when the median of the last ones is `median_s`; 0: none yet."""
    return max(12 * timeouts.stall_s, _MEDIANS * median_s) if median_s else timeouts.ring_s


def table(section: ElasticSection) -> tuple[Entry, ...]:
    """Return the table in reading order: each entry refers only to earlier ones."""
    lease_s = float(math.ceil(section.lease_s))
    turn_s = min(3.0, section.stall_s)
    handshake_s = 2 * section.stall_s
    keepalive_s = float(min(_NAT_S, max(3, math.ceil(1.5 * lease_s))))
    coordinator_s = min(_AWAY_S, lease_s / 2)
    return (
        Entry(
            name="heartbeat_s",
            seconds=section.heartbeat_s,
            origin="elastic.heartbeat_s",
            why="the time between two renewals of the lease; a lease survives at least two lost renewals",
        ),
        Entry(
            name="lease_s",
            seconds=lease_s,
            origin="elastic.lease_s, whole seconds",
            why="a peer whose machine is gone is unlisted after this; the end of a rank is reported at once",
        ),
        Entry(
            name="coordinator_s",
            seconds=coordinator_s,
            origin="lease_s / 2, at most 15 s",
            why="the limit of one request to the coordinator, so that two fit into a lease",
        ),
        Entry(
            name="coordinator_start_s",
            seconds=6 * coordinator_s,
            origin="6 × coordinator_s",
            why="how long a starting peer waits for the coordinator, which may be restarting",
        ),
        Entry(
            name="coordinator_silence_s",
            seconds=coordinator_s,
            origin="coordinator_s",
            why="a coordinator that is silent for so long is asked again, at its next endpoint",
        ),
        Entry(
            name="grace_s",
            seconds=section.grace_s,
            origin="elastic.grace_s",
            why="how long a round waits for slow peers before it leaves them out; failures are found sooner",
        ),
        Entry(
            name="patience_s",
            seconds=section.patience_s,
            origin="elastic.patience_s",
            why="after this, slow peers are asked to contribute the steps that they have made",
        ),
        Entry(
            name="stagger_s",
            seconds=0.2,
            origin="100 × the coordinator's 2 ms",
            why="peers propose in the order of their names, with this delay, so that mostly one does",
        ),
        Entry(
            name="answer_s",
            seconds=0.7,
            origin="0.7 s, and 4 × the slowest member's measured round trip",
            why="a thread of each rank answers an abort; a peer whose rank does not is left out",
        ),
        Entry(
            name="stall_s",
            seconds=section.stall_s,
            origin="elastic.stall_s",
            why="a hop of the ring that moves no byte for so long fails; with overlap_steps, 2 steps later",
        ),
        Entry(
            name="ring_s",
            seconds=720 * section.stall_s,
            origin="720 × stall_s; later 10 × the median ring, at least 12 × stall_s",
            why="the limit of one whole ring, even if its bytes keep moving slowly",
        ),
        Entry(
            name="turn_s",
            seconds=turn_s,
            origin="3 s, at most stall_s: two SYNs are sent in it",
            why="first the sender dials; after this the receiver too; after this again, both through a relay",
        ),
        Entry(
            name="handshake_s",
            seconds=handshake_s,
            origin="2 × stall_s",
            why="a connection that has not authenticated itself by then is closed",
        ),
        Entry(
            name="redial_s",
            seconds=turn_s,
            origin="turn_s",
            why="a kept connection that was silent for so long is dialled again",
        ),
        Entry(
            name="connect_s",
            seconds=3 * turn_s + handshake_s,
            origin="3 × turn_s + handshake_s",
            why="the limit for all connections of an attempt: every way is tried, with its handshake",
        ),
        Entry(
            name="keepalive_s",
            seconds=keepalive_s,
            origin="1.5 × lease_s, at most 30 s",
            why="idle connections are probed so often that even strict NATs keep them",
        ),
        Entry(
            name="unanswered_s",
            seconds=4 * section.stall_s,
            origin="4 × stall_s",
            why="the kernel closes a connection with unacknowledged data; the ring fails sooner",
        ),
        Entry(
            name="start_s",
            seconds=1800.0,
            origin="half an hour",
            why="ranks start: they import, prepare data and restore a checkpoint",
        ),
        Entry(
            name="compile_s",
            seconds=900.0,
            origin="7 × the 127 s that were measured",
            why="the first step of a phase, which may compile",
        ),
        Entry(
            name="step_s",
            seconds=max(section.still_s, 2 * lease_s),
            origin="elastic.still_s, at least 2 × lease_s, 10 × the median step, or copy for newcomers",
            why="a peer is unlisted when one of its ranks makes no step, or obeys no command, for so long",
        ),
        Entry(
            name="save_s",
            seconds=1800.0,
            origin="half an hour",
            why="a checkpoint is written or loaded, or the model evaluated",
        ),
        Entry(
            name="ending_s",
            seconds=1800.0 + max(60.0, 6 * lease_s),
            origin="save_s and 60 s, at least 6 × lease_s",
            why="how long ranks may take to save and end",
        ),
    )
