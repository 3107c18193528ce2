"""Finds the rank that the others waited for when a collective timed out."""

from __future__ import annotations

import re
from collections import defaultdict

from bloomery.operate.diagnosis import Cause, Culprit, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.flight_recorder import FlightFinding, find_absent
from bloomery.operate.known_texts import CAUGHT_TIMEOUT, MAYBE_TIMEOUT

REPORTS_TIMEOUT = re.compile(
    rf"(?i:Watchdog caught|(?<!failed or )timed out|watchdog got stuck|timeout at NCCL work)|{CAUGHT_TIMEOUT}"
    r"|failed to (?:pass|reach) monitoredBarrier"
)
_LAST_ENQUEUED = re.compile(
    r"(?:\[PG (?:ID \d+ PG GUID )?([^\s(\]]+)[^\]\n]{0,80}\] [^\n]{0,200})?last enqueued NCCL work: (\d+)"
)
"""The process group, where it is told, and a number that counts the collectives of that group alone."""
_NAMES_RANK = re.compile(r"\b[Rr]anks? (\d+) failed to (?:pass|reach) monitoredBarrier")
_IS_STUCK = re.compile(r"watchdog got stuck for \d+ seconds|due to \w+ watchdog hang|GIL[- ]induced hang")
"""What a rank prints whose own program hangs, so that not even torch's watchdog goes on."""


def diagnose_timeout(evidence: FailureEvidence, end: RankEnd, line: str) -> Diagnosis:
    """Return the cause of a collective's time-out: by torch's flight recorder, else by who reported it.

    end, line: a rank that reports the time-out, and its words.
    """
    shown: tuple[str, ...] = (f"log of rank {end.rank}: {line}",)
    flight = find_absent({other.rank: other.flight for other in evidence.ranks if other.flight})
    if flight is None:
        culprit, summary = _culprit_of_texts(evidence), line.strip()
    else:
        culprit, summary = _culprit_in_flight(evidence, flight), flight.words
        shown = (f"flight recorder: {flight.words}", *shown)
    return Diagnosis(cause=Cause.NCCL_TIMEOUT, culprit=culprit, summary=summary, evidence=shown, sure=True)


def _culprit_in_flight(evidence: FailureEvidence, flight: FlightFinding) -> Culprit:
    """Return the only rank of a finding, or the only host of its ranks."""
    ends = [end for end in evidence.ranks if end.rank in flight.culprits]
    hosts = {end.host for end in ends}
    if len(ends) == 1:
        return ends[0].culprit
    return Culprit(host=hosts.pop()) if len(hosts) == 1 else Culprit()


def _culprit_of_texts(evidence: FailureEvidence) -> Culprit:
    """Return the rank that did not come to the collective.

    That is the one that a barrier names, the one whose own watchdog stood still, the one that does not report
    the time-out, or the one that had enqueued less in a process group than all others of it, and waits in no
    group.
    """
    texts = {end.rank: f"{end.error}\n{end.log}" for end in evidence.ranks}
    named = {int(number) for text in texts.values() for number in _NAMES_RANK.findall(text)}
    stuck = {rank for rank, text in texts.items() if _IS_STUCK.search(text)}
    reporters = {rank for rank, text in texts.items() if REPORTS_TIMEOUT.search(text)}
    # the rank that is waited for prints these, too, once the others have sent their signal through the store
    reporters = reporters or {rank for rank, text in texts.items() if MAYBE_TIMEOUT.search(text)}
    absent = set(texts) - reporters
    enqueued: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, text in texts.items():
        for group, number in _LAST_ENQUEUED.findall(text):
            enqueued[group][rank] = int(number)
    behind = {
        rank
        for numbers in enqueued.values()
        for rank, number in numbers.items()
        if number == min(numbers.values()) < max(numbers.values())
    }
    # Who waits in one group comes late to its others.
    behind -= {
        rank
        for numbers in enqueued.values()
        for rank, number in numbers.items()
        if number == max(numbers.values()) > min(numbers.values())
    }
    for ranks in (named, stuck, absent, set() if absent else behind):
        if len(ranks) == 1:
            return next((end.culprit for end in evidence.ranks if end.rank in ranks), Culprit())
    return Culprit()
