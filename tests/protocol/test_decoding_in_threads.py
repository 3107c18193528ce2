"""Threads that decode messages of one kind for the first time at the same moment."""

import subprocess
import sys

SCRIPT = """
from __future__ import annotations

import threading
import time

from bloomery.protocol.encoding import Message, decode


def slowly():  # so that other threads come while msgspec learns of the inner message
    time.sleep(0.2)
    return int


class Inner(Message, frozen=True, kw_only=True):
    number: slowly()


class Outer(Message, frozen=True, kw_only=True):
    inner: Inner
    value: int


def read():
    assert decode(b'{"inner": {"number": 1}, "value": 2}', Outer).value == 2


threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
    time.sleep(0.03)
for thread in threads:
    thread.join()
print("read by all")
"""


def test_the_first_messages_of_a_kind_may_come_on_several_threads_at_once():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "read by all\n"), ended.stderr
