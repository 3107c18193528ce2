"""By which words an exception is found in a log, and how much of the log explains it."""

from __future__ import annotations

import pytest

from bloomery.operate.failure_evidence import RankEnd
from bloomery.operate.last_exception import exception_of, log_of_exception, possible_causes

TRACE = "Traceback (most recent call last):\n"
FRAME = '  File "x.py", line 1, in step\n'
FROM = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def end(log: str, *, error: str = "", status: int = 1) -> RankEnd:
    return RankEnd(rank=0, host="n0", status=status, error=error, log=log)


@pytest.mark.parametrize(
    "line",
    [
        "KeyError: 'a'", "KeyError", "a.b.MyException: x", "ConnectionRefused: x", "a.Failed: y",
        "KeyboardInterrupt", "SystemExit: 3", "UserWarning: w", "bloomery train: stopped at step 5",
    ],
)  # fmt: skip
def test_the_last_line_that_names_an_exception_is_the_exception(line: str) -> None:
    log = f"ValueError: an earlier one\nstep 7\n[rank3]: {line}\nstep 8\n"
    if line.startswith("bloomery"):
        log = log.replace("[rank3]: ", "")
    assert exception_of(end(log)) == line
    assert exception_of(end(log, error="told by the heartbeat")) == "told by the heartbeat"


@pytest.mark.parametrize("line", ["x KeyError: a", "KeyError : a", "3Error: a", "Errors: a", "KeyError:a"])
def test_other_lines_name_none(line: str) -> None:
    assert exception_of(end(f"{line}\n")) == ""


@pytest.mark.parametrize(
    ("words", "is_of_others"),
    [
        ("ncclInvalidUsage", True), ("an RCCL thing", True), ("gloo", True), ("UCX", True), ("ofi", True),
        ("hdfs", True), ("TCPStore", True), ("socket", True), ("rendezvous", True), ("a worker", True),
        ("workers", True), ("exited", True), ("terminated", True), ("killed", True), ("died", True),
        ("CUDA had an error", True), ("HIP may fail", True), ("CheckpointException", True),
        ("inline_container", True), ("building extension", True), ("StatusOr", True),
        ("a tensor", False), ("CUDA and cpu", False), ("reworkerize", False),
    ],
)  # fmt: skip
def test_an_exception_that_speaks_of_others_needs_the_whole_log(words: str, is_of_others: bool) -> None:
    error = f"RuntimeError: {words}"
    last = f"{TRACE}{FRAME}{error}\n"
    whole = f"before\n{last}"
    assert log_of_exception(end(whole, error=error)) == (whole if is_of_others else last)


def test_of_exceptions_that_were_raised_one_from_another_the_log_begins_with_the_first() -> None:
    first, second = f"{TRACE}{FRAME}OSError: a\n", f"{TRACE}{FRAME}KeyError: b\n"
    for between in (FROM, DURING):
        chained = f"{first}{between}{second}"
        assert log_of_exception(end(f"{TRACE}{FRAME}ValueError: c\nbefore\n{chained}")) == chained
        of_three = f"{chained}{between}{TRACE}{FRAME}TypeError: d\n"
        assert log_of_exception(end(f"before\n{of_three}")) == of_three
    assert log_of_exception(end(f"{first}step 7\n{second}")) == second
    assert log_of_exception(end(f"before\n{second}", status=-9)) == f"before\n{second}"
    assert log_of_exception(end("before\nno exception\n")) == "before\nno exception\n"
    assert log_of_exception(end("before\nKeyError: b\n")) == "before\nKeyError: b\n"
    for always in ("Exception in thread Thread-3:", "GPU has fallen off the bus"):
        assert log_of_exception(end(f"{always}\n{second}")) == f"{always}\n{second}"


def causes(log: str, error: str = "", status: int = 1) -> list[str]:
    return list(possible_causes(end(log, error=error, status=status)))


def test_what_an_exception_was_raised_from_may_stand_behind_it() -> None:
    parts = [f"{TRACE}{FRAME}{name}: x\n" for name in ("OSError", "IOError", "KeyError")]
    assert causes(FROM.join(parts)) == ["IOError: x", "OSError: x"]
    assert causes(f"{FROM.join(parts)}{TRACE}{FRAME}ValueError: y\n") == [], "something else came after them"


@pytest.mark.parametrize(
    "words",
    ["CheckpointException", "building extension", "it exited", "exit 3 (read)", "non-zero exit status 1",
     "with code 5", "with exit code 5", "with status 7", "with exit status 7"],
)  # fmt: skip
def test_what_a_child_printed_before_it_failed_may_stand_behind_it(words: str) -> None:
    error = f"OSError: {words}"
    before = "".join(f"b{number}\n" for number in range(12)) + "a warning\nWandb: x\n"
    log = f"{before}{TRACE}{FRAME}{error}\n"
    told = ["b4", "b5", "b6", "b7", "b8", "b9", "b10", "b11"]
    last = [*[f"b{number}" for number in range(7, 12)], TRACE.strip(), FRAME.rstrip(), error]
    assert causes(log, error) == [*last, *told]
    assert causes(log, "OSError: a file exits") == []


def test_without_an_exception_the_last_three_lines_may_tell_why() -> None:
    log = "a\nb\n\nc\n \nWARNING d\ne\n"
    assert causes(log) == ["e", "c"]
    assert causes(log, status=-9) == [] == causes(log, status=0)


def test_what_python_ignored_is_no_exception_of_the_rank() -> None:
    ignored = f"Exception ignored in: <f>\n{TRACE}{FRAME}OSError: no\n"
    assert exception_of(end(f"KeyError: a\n{ignored}")) == "KeyError: a"
    assert exception_of(end(f"KeyError: a\n{ignored}IndexError: b\n")) == "IndexError: b"
    prefixed = "".join(f"[rank0]: {line}\n" for line in ignored.splitlines())
    assert exception_of(end(f"KeyError: a\n{prefixed}")) == "KeyError: a"
    assert exception_of(end(f"KeyError: a\n{ignored}\n{ignored}")) == "KeyError: a"
