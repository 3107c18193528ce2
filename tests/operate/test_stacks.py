"""Which of a process's threads is the main one, in what py-spy and faulthandler write."""

from __future__ import annotations

from bloomery.operate.stacks import Frame, parse_faulthandler, parse_pyspy

INNER = Frame(function="recv", file="/x/socket.py", line=7)


def thread(**more: object) -> dict:
    return {"frames": [{"name": "recv", "filename": "/x/socket.py", "line": 7}], **more}


def test_the_main_thread_is_told_by_its_number_or_its_name() -> None:
    other = thread(os_thread_id=8, thread_name="data worker", frames=[])
    assert parse_pyspy([other, thread(os_thread_id=7)], 7) == (INNER,)
    assert parse_pyspy([other, thread(os_thread_id=None, thread_name="MainThread")], 7) == (INNER,)
    assert parse_pyspy([other], 7) == ()


def dump(*functions: str, file: str = "/x/run.py") -> str:
    lines = [f'  File "{file}", line {number} in {name}' for number, name in enumerate(functions, 1)]
    return "\n".join(["Thread 0x7f (most recent call first):", *lines, ""])


def functions(text: str) -> list[str]:
    return [frame.function for frame in parse_faulthandler(text)]


def test_the_main_thread_is_the_last_that_threading_did_not_begin() -> None:
    helper = dump("wait", "run", "_bootstrap_inner", "_bootstrap", file="/usr/lib/threading.py")
    assert functions(helper + dump("old", "<module>") + helper + dump("send", "<module>")) == [
        "send",
        "<module>",
    ]
    by_module = dump("recv", "main", "_run_code", "_run_module_as_main")  # python -m
    assert functions(helper + by_module) == ["recv", "main", "_run_code", "_run_module_as_main"]
    assert functions(dump("send", "loop") + helper) == ["send", "loop"], (
        "one of the threads of a library in C++"
    )
    assert functions(dump("own", "_bootstrap") + helper) == ["own", "_bootstrap"], "it is not threading's"
    assert functions(helper + "Thread 0x1 (most recent call first):\n") == [
        "wait", "run", "_bootstrap_inner", "_bootstrap"
    ], "of a dump that ended before the main thread"  # fmt: skip
    assert [frame.line for frame in parse_faulthandler(dump("b", "c"))] == [1, 2]
    unknown = 'Thread 0x7f (most recent call first):\n  File "/x", line ??? in f\n'
    assert parse_faulthandler(unknown) == (Frame(function="f", file="/x", line=0),)
    assert parse_faulthandler("no stack") == ()
