"""Finds the machine to blame for a stop by silent data corruption, from the run's journal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.diagnosis import Cause, Culprit, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence


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

    Those of steps that a rewind undid are among them, for the machine remains as it is. A record that lacks
    something, or holds something else, is passed over: it must not end who supervises the run.
    """
    found = list[MachineFault]()
    for event in read_journal(rundir.journal(peer=peer)):
        if event["event"] == "corruption":
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                found += [_fault(event, machine) for machine in event["machines"]]
    return found


def _fault(event: Mapping[str, Any], machine: Mapping[str, Any]) -> MachineFault:  # Any: parsed JSON
    return MachineFault(
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


_STOPPED = re.compile(
    r"silent\s+corruption\s+at\s+step\s+\d+:.*\bRank\s+(\d+)\s+was\s+named\s+\d+\s+times", re.S
)


def diagnose_wrong_bits(rundir: RunDirectory, evidence: FailureEvidence) -> Diagnosis | None:
    """Return the diagnosis of a run that stopped because one rank had been named often enough; else None.

    Reads the journal only where a rank says so, for it is long.
    """
    for end in evidence.ranks:
        stopped = _STOPPED.search(f"{end.error}\n{end.log}")
        if stopped is not None:
            return blamed_machine(machine_faults(rundir), rank=int(stopped[1]))
    return None


def blamed_machine(faults: Sequence[MachineFault], *, rank: int) -> Diagnosis | None:
    """Return the diagnosis that names the machine of a rank; None where no record is certain of it.

    The newest record tells the machine, for a rank may have moved since those before it. Records of the same
    rank on other machines are no evidence against this one.
    """
    own = [fault for fault in faults if fault.rank == rank and fault.is_certain]
    if not own:
        return None
    newest = own[-1]
    here = [fault for fault in own if fault.host == newest.host]
    gpu = newest.device.partition(":")[2] if newest.device.startswith("cuda") else ""
    return Diagnosis(
        cause=Cause.SILENT_CORRUPTION,
        culprit=Culprit(host=newest.host, rank=rank, gpu=gpu),
        summary=f"wrong {newest.what} at {len(here)} checks, the last at step {newest.step}",
        evidence=tuple(f"journal: step {fault.step}: {fault.reason}" for fault in reversed(here[-5:])),
        sure=True,
    )
