"""Runs modules as programs, each in a fork of this process, which has loaded what all of them need.

A line of standard input names a module. The answer to it is one line, a JSON object: the status of the
program, and what it wrote to standard output and to standard error. A program finds nothing of what another
one did.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback

PRELOADED = ("torch", "triton", "torch._dynamo", "torch.distributed", "bloomery.parallel.build")


def main() -> None:
    """Answer until standard input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_ended(line.strip())) + "\n")
        sys.stdout.flush()


def _ended(module: str) -> dict[str, int | str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), sys.stdout.fileno())
            os.dup2(error.fileno(), sys.stderr.fileno())
            os._exit(_status(module))
        _, ended = os.waitpid(child, 0)
        out.seek(0)
        error.seek(0)
        return {"status": os.waitstatus_to_exitcode(ended), "out": out.read(), "error": error.read()}


def _status(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__")
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  — the edge of a process: who asked reads the traceback
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
