"""Prints the memory that the outer optimizer of a peer takes: `python peer_memory.py ELEMENTS CODEC`.

kept: bytes between rounds. peak: the most during a round, with an int8 ring of two over sockets.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(1, str(Path(__file__).parents[2]))

import torch
from tests.diloco.memory_rings import connected
from tests.diloco.test_pseudo_gradient import OneTensor
from tests.protocol import example

from bloomery.config.elastic import ElasticSection
from bloomery.diloco import outer_update, pseudo_gradient
from bloomery.diloco.all_reduce import RingConnections, WireRings, _Attempt
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.protocol.rank_messages import Reduce

PIECE = 1 << 19


def take_part(ring: RingConnections, pieces: Sequence[range]) -> None:
    """Be another peer, which did not move and keeps nothing."""
    for piece in pieces:
        ring.all_reduce(torch.zeros(len(piece)), weight=0.5, residual=None)


def resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main(elements: int, codec: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # so that hashing holds one block and no batch
    outer_update.BLOCK = pseudo_gradient.BLOCK = 1 << 18  # so that buffers are full in a small model too
    section = ElasticSection(inner_steps=4, codec=codec)
    vector = OneTensor(elements)
    before = resident("VmRSS")
    update = PseudoGradient(cast("Any", vector), section, piece=PIECE)
    update.begin()
    kept = resident("VmRSS") - before
    vector.weights += 0.01
    attempt = example.attempt(members=("a", "b"), weights=(0.5, 0.5))
    hops = connected(2)
    asked = [
        Reduce(attempt=attempt, index=index, hops=hop, stall_s=60.0, deadline_s=60.0, norm_limit=None)
        for index, hop in enumerate(hops)
    ]
    rings = [WireRings(section)(reduce) for reduce in asked]
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    update.offer(1)
    other = threading.Thread(target=take_part, args=(rings[1], update.pieces()))
    other.start()
    prepared = _Attempt(rings[0], asked[0], update).result().digest
    other.join()
    average = update.average()
    assert average is not None
    kept_of_average = average.nbytes
    del average
    update.adopt()
    peak = resident("VmHWM") - before
    assert update.digest() == prepared and torch.equal(vector.weights, update.base)
    print(json.dumps({"kept": kept, "peak": peak, "average": kept_of_average}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
