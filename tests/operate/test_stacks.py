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


def test_the_newest_dump_of_the_main_thread_counts_and_else_the_longest() -> None:
    main, helper = dump("recv", "<module>"), dump("run", "<module>", file="/usr/lib/threading.py")
    newest = dump("send", "loop", "<module>")
    names = [frame.function for frame in parse_faulthandler(main + helper + newest + helper)]
    assert names == ["send", "loop", "<module>"]
    assert [frame.line for frame in parse_faulthandler(dump("a") + dump("b", "c") + dump("d"))] == [1, 2]
    unknown = 'Thread 0x7f (most recent call first):\n  File "/x", line ??? in f\n'
    assert parse_faulthandler(unknown) == (Frame(function="f", file="/x", line=0),)
    assert parse_faulthandler("no stack") == ()
