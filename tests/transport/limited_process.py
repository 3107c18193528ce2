"""A peer that listens and serves under a low limit of open files: `python limited_process.py LIMIT STATE`.

It prints where it listens. Then each line that it reads is an order: `exhaust` opens files until no more can
be opened, `free` closes them, `count` does neither; it answers how many threads accept connections, and ends
with its input.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
from contextlib import closing
from pathlib import Path

from tests.diloco.elastic_peers import TOKEN, connection_manager

from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer

ACCEPTING = ("listener", "serving")
"""The threads that accept connections at the link address, and at the state address."""


def main(limit: int, state: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    with (
        closing(connection_manager("b")) as target,
        StateServer("127.0.0.1:0", TOKEN, ServedStates()) as server,
    ):
        server.offer(state, round=5, digest="ab12")
        print(target.addresses[0], server.address, flush=True)
        held: list[int] = []
        for order in sys.stdin:
            if order.strip() == "exhaust":
                try:
                    while True:
                        held.append(os.open(os.devnull, os.O_RDONLY))
                except OSError:
                    pass
            elif order.strip() == "free":
                while held:
                    os.close(held.pop())
            print(sum(thread.name in ACCEPTING for thread in threading.enumerate()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
