"""A signal that comes at any moment ends a command that waits again and again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

PROGRAM = """
import os, random, signal
from bloomery.cli.end_signal import EndSignal
chance = random.Random(int(os.environ["SEED"]))
for turn in range(200):
    ended = EndSignal()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-3 * chance.random())
    while not ended.wait(1e-6):
        pass
    assert ended.wait(1e9)
print("ended each time")
"""


def test_no_moment_of_the_signal_makes_the_command_wait_forever() -> None:
    program = [sys.executable, "-c", PROGRAM]
    seed = {"SEED": str(random.randrange(10**6)), "PATH": ""}
    ended = subprocess.run(program, env=seed, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "ended each time\n", (seed, ended.stderr)


def test_without_a_signal_it_waits_so_long_as_it_is_told() -> None:
    program = (
        "from bloomery.cli.end_signal import EndSignal\n"
        "ended = EndSignal()\n"
        "assert not ended.wait(0.05) and not ended.wait(0.0) and not ended.wait(-1.0)\n"
        "print('waiting', flush=True)\n"
        "assert ended.wait(60.0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
