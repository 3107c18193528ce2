"""Finds in a rank's log the exception that ended it, its chained causes, and the lines before it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bloomery.operate.diagnosis import Cause
from bloomery.operate.failure_evidence import RankEnd
from bloomery.operate.known_texts import KNOWN_TEXTS, STORE_CLIENT

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
    r"(?i:\b(?:nccl\w*|rccl\w*|gloo|ucx|ofi|hdfs|\w*store|socket|rendezvous|workers?|exit\w*|terminated|killed|died)\b)"
    r"|(?:CUDA|HIP)\b.*(?:error|fail)|CheckpointException|inline_container|building extension|StatusOr"
)
"""An exception whose reason another library or process may have printed before it."""
_CHILD_FAILED = re.compile(
    r"CheckpointException|building extension"
    r"|\bexited\b|\bexit \d+ \(|non-zero exit status|\bwith (?:exit )?(?:code|status) \d"
)
_LAST_LINES, _FINAL_LINES = 10, 3
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's
_IGNORED = "Exception ignored in"
_IS_WARNING = re.compile(r"(?i:warning|wandb)")
_COUNTS_ALWAYS = re.compile(rf"Exception in thread|{dict(KNOWN_TEXTS)[Cause.BAD_GPU]}")
"""What is never dropped with what was printed before an exception."""


def exception_of(end: RankEnd) -> str:
    """Return the type and message of the exception that ended a rank; "" where there is none."""
    return end.error or _last_exception(end.log)


def log_of_exception(end: RankEnd) -> str:
    """Return the log from the last traceback on, where the exception that ended the rank explains itself.

    What was printed before it, such as a want of memory that the program dealt with, is not to blame then. Of
    other exceptions the whole log is returned.
    """
    exception = exception_of(end)
    if not exception or (end.status or 0) <= 0 or _SPEAKS_OF_OTHERS.search(exception):
        return end.log
    log = _without_ignored(end.log)
    place = log.rfind(_TRACEBACK)
    while place > 0 and _CHAINED.search(log[:place]):
        place = log.rfind(_TRACEBACK, 0, place)
    if place < 0 or _COUNTS_ALWAYS.search(log[:place]):
        return end.log
    return log[place:]


def possible_causes(end: RankEnd) -> Iterator[str]:
    """Yield what may stand behind the last exception of a rank.

    Such are the exceptions that it was raised from; what was printed last, and before the traceback, where a
    program that the rank had started failed; the last lines where there is no exception at all.
    """
    log = _without_ignored(end.log)
    *before, last = log.split(_RAISED_FROM)
    if last.count(_TRACEBACK) <= 1:  # else something else was raised after them
        yield from (_last_exception(part) for part in reversed(before))
    exception = exception_of(end)
    if exception and _CHILD_FAILED.search(exception):
        before_it = log.rpartition(_TRACEBACK)[0]
        told = [*log.splitlines()[-_LAST_LINES:], *before_it.splitlines()[-_LAST_LINES:]]
        yield from (line for line in told if not _IS_WARNING.search(line))
    elif not exception and (end.status or 0) > 0:
        told = [line for line in log.splitlines() if line.strip()][-_FINAL_LINES:]
        yield from (line for line in reversed(told) if not _IS_WARNING.search(line))


def is_store_client_error(end: RankEnd) -> bool:
    """Return whether the exception that ended the rank is one of an object store's client."""
    log = _without_ignored(end.log)
    last = log[log.rfind(_TRACEBACK) :] if _TRACEBACK in log else ""
    return bool(STORE_CLIENT.search(end.error) or STORE_CLIENT.search(last))


def _last_exception(log: str) -> str:
    matches = list(_EXCEPTION.finditer(_without_ignored(log)))
    return _PREFIX.sub("", matches[-1].group(0)) if matches else ""


def _without_ignored(log: str) -> str:
    """Return a log without the exceptions that Python ignored, in __del__ for instance."""
    if _IGNORED not in log:
        return log
    kept, is_ignored = [], False
    for line in log.splitlines(keepends=True):
        bare = _PREFIX.sub("", line)
        if _IGNORED in line:
            is_ignored = True
        elif not is_ignored:
            kept.append(line)
        elif bare.strip() and not bare.startswith((" ", _TRACEBACK)):
            is_ignored = False  # after its type and message
    return "".join(kept)
