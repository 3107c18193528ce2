"""No output that refuses what is printed ends a training, a peer or a sync."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from bloomery.cli import peer, sync

PRINT = """\
import os, sys
from bloomery.cli.standard_output import let_output_end_nothing
let_output_end_nothing()
for stream in (sys.stdout, sys.stderr):
    print("a line \\u00e9 \\u2713", file=stream, flush=True)
    assert stream.isatty() is False
os.write(int(sys.argv[1]), b"went on")
"""


def printed(output: int) -> tuple[int, bytes]:
    read, write = os.pipe()
    command = [sys.executable, "-c", PRINT, str(write)]
    environment = os.environ | {"PYTHONIOENCODING": "latin1:replace"}
    with subprocess.Popen(
        command, stdout=output, stderr=output, env=environment, pass_fds=(write,)
    ) as process:
        os.close(write)
        with os.fdopen(read, "rb") as told:
            content = told.read()
    return process.returncode, content


def test_a_full_disk_and_a_pipe_that_nobody_reads_end_nothing() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    read, unread = os.pipe()
    os.close(read)
    for output in (full, unread):
        assert printed(output) == (0, b"went on")
        os.close(output)


def test_what_an_output_takes_is_written_as_before() -> None:
    read, output = os.pipe()
    assert printed(output) == (0, b"went on")
    os.close(output)
    with os.fdopen(read, "rb") as file:
        assert file.read() == b"a line \xe9 ?\na line \xe9 \\u2713\n"


@pytest.mark.parametrize(
    ("module", "part", "arguments"),
    ((peer, peer._train, 1), (sync, sync._repeat, 4)),
)
def test_what_takes_long_prints_so(
    module: ModuleType, part: Callable[..., Any], arguments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        """Raised first of all."""

    def ask() -> None:
        raise Asked

    monkeypatch.setattr(module, "let_output_end_nothing", ask)
    with pytest.raises(Asked):
        part(*[None] * arguments)
