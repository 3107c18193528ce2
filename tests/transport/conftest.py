"""Rings of threads in one process, over pairs of sockets."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from bloomery.transport.ring_all_reduce import Ring


class Members:
    """Rings joined into one, and the sockets between them: hops[i] are those from member i to i + 1."""

    def __init__(self, size, codec, *, streams=2, pair=socket.socketpair, **options):
        self.size = size
        self.hops = [[pair() for _ in range(streams)] for _ in range(size)]
        self.keys = [[os.urandom(32) for _ in range(streams)] for _ in range(size)]
        self.rings = [self._ring(index, codec, options) for index in range(size)]

    def _ring(self, index, codec, options):
        return Ring(
            index=index,
            size=self.size,
            next_fds=[left.fileno() for left, _ in self.hops[index]],
            previous_fds=[right.fileno() for _, right in self.hops[index - 1]],
            send_keys=self.keys[index],
            receive_keys=self.keys[index - 1],
            codec=codec,
            **options,
        )

    def all_reduce(self, arrays, *, of=None, each=None, **call):
        """What each member returned or raised. of: who takes part; each(i): more arguments for member i."""
        ended = [None] * self.size
        usual = {"round": 0, "epoch": 0, "stall_s": 120, "deadline_s": 240} | call

        def member(index):
            try:
                more = each(index) if each else {}
                ended[index] = self.rings[index].all_reduce(arrays[index], **usual | more)
            except Exception as error:  # noqa: BLE001  - the test looks at it
                ended[index] = error

        threads = [
            threading.Thread(target=member, args=(index,))
            for index in (range(self.size) if of is None else of)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ended

    def close(self):
        for ring in self.rings:
            ring.close()
        for hop in self.hops:
            for pair in hop:
                for end in pair:
                    end.close()


@pytest.fixture
def members():
    """A maker of rings, closed at the end of the test."""
    made = []

    def make(size, codec, **options):
        made.append(Members(size, codec, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
