"""Reads from a journal which machines a check for silent corruption named, and what they computed wrongly."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class MachineFault:
    """One rank that a check for silent corruption named.

    time: seconds since 1970. step: the step whose update was refused.
    what: 'weights', 'gradients' or 'computation'.
    is_certain: False where several ranks were named, of which any may be the one.
    """

    time: float
    step: int
    incarnation: int
    rank: int
    host: str
    device: str
    what: str
    is_certain: bool
    reason: str


def machine_faults(rundir: RunDirectory, *, peer: str = "0") -> list[MachineFault]:
    """Return the faults in a peer's journal in the order in which they were found.

    Those of steps that a rewind undid are among them, for the machine remains as it is.
    """
    return [
        MachineFault(
            time=float(event["time"]),
            step=int(event["step"]),
            incarnation=int(event["incarnation"]),
            rank=int(machine["rank"]),
            host=str(machine["host"]),
            device=str(machine["device"]),
            what=str(event["what"]),
            is_certain=bool(event["is_certain"]),
            reason=str(event["reason"]),
        )
        for event in read_journal(rundir.journal(peer=peer))
        if event["event"] == "corruption"
        for machine in event["machines"]
    ]
