"""Finds in the log of a rank the exception that ended it, what stands behind it, and what came before it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bloomery.operate.failure_evidence import RankEnd
from bloomery.operate.known_texts import OF_A_STORES_CLIENT

_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: )?"  # torch's prefix
    r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Refused|Failed|Interrupt|Exit|Warning))(?:: .*)?$"
    r"|^bloomery train: .+$",
    re.M,
)
_RAISED_FROM = "The above exception was the direct cause of the following exception:"
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = re.compile(
    rf"(?:{_RAISED_FROM}|During handling of the above exception, another exception occurred:)"
    r"\s*(?:\[rank\d+\]:\s*)*\Z"
)
_SPEAKS_OF_OTHERS = re.compile(
    r"(?i:nccl|rccl|gloo|ucx|ofi|hdfs|store\b|socket|rendezvous|worker|\bexit|terminated|killed|died)"
    r"|(?:CUDA|HIP)\b.*(?:error|fail)|CheckpointException|inline_container|building extension|StatusOr"
)
"""An exception whose reason another library or process may have printed before it."""
_CHILD_FAILED = re.compile(
    r"CheckpointException|building extension"
    r"|\bexit(?:ed)?(?: with)?(?: code| status)? \d|non-zero exit status|\breturn ?code\b"
)
_LAST_LINES = 10


def exception_of(end: RankEnd) -> str:
    """Return the type and message of the exception that ended a rank; "" where there is none."""
    return end.error or _last_exception(end.log)


def log_of_exception(end: RankEnd) -> str:
    """Return the log from the traceback that ended the rank on, where that exception speaks for itself.

    What was printed before it, such as a want of memory that the program dealt with, is not to blame then. Of
    other exceptions the whole log is returned.
    """
    exception = exception_of(end)
    if not exception or (end.status or 0) <= 0 or _SPEAKS_OF_OTHERS.search(exception):
        return end.log
    place = end.log.rfind(_TRACEBACK)
    while place > 0 and _CHAINED.search(end.log[:place]):
        place = end.log.rfind(_TRACEBACK, 0, place)
    return end.log[place:] if place > 0 else end.log


def reasons_of(end: RankEnd) -> Iterator[str]:
    """Yield what may stand behind the last exception of a rank.

    Such are the exceptions that it was raised from, and the last lines of the log where a program that the
    rank had started failed, or where there is no exception at all.
    """
    *before, last = end.log.split(_RAISED_FROM)
    if last.count(_TRACEBACK) <= 1:  # else something else was raised after them
        yield from (_last_exception(part) for part in reversed(before))
    exception = exception_of(end)
    has_no_exception = not exception and (end.status or 0) > 0
    if has_no_exception or _CHILD_FAILED.search(exception):
        yield from end.log.splitlines()[: -_LAST_LINES - 1 : -1]


def is_of_a_store(end: RankEnd) -> bool:
    """Return whether the exception that ended the rank is one of an object store's client."""
    last = end.log[end.log.rfind(_TRACEBACK) :] if _TRACEBACK in end.log else ""
    return bool(OF_A_STORES_CLIENT.search(end.error) or OF_A_STORES_CLIENT.search(last))


def _last_exception(log: str) -> str:
    matches = list(_EXCEPTION.finditer(log))
    return matches[-1].group(0) if matches else ""
