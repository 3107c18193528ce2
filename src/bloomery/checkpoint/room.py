"""The memory that saving in the background takes: where it lies, who keeps whose, whether it is there."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bloomery.checkpoint.arena import machine, refuse_without_memory
from bloomery.checkpoint.deadlines import SAVES_ON_THEIR_WAY as ARENAS
from bloomery.checkpoint.partner import Limits
from bloomery.checkpoint.ramcopy import Holdings, partners_of
from bloomery.checkpoint.ranks import Ranks
from bloomery.errors import StorageError
from bloomery.events.incarnation import identity
from bloomery.events.rundir import RunDir
from bloomery.events.storage import free_bytes, no_space

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MemoryCopies:
    """That what was staged stays in memory under a name, and that parts of others are kept beside it."""

    root: Path
    run: Path
    identity: str
    rank: int
    token: str
    host: str
    limits: Limits

    @cached_property
    def holdings(self) -> Holdings:
        """Where it all lies."""
        return Holdings(self.root, self.run, self.identity)

    def slot(self, number: int) -> Path:
        """The file of one of this rank's arenas."""
        return self.holdings.slot(self.rank, number)


def find_partner(
    ranks: Ranks, directory: Path, *, run: Path, bytes: int, boxes: int
) -> tuple[MemoryCopies, int]:
    """Agree on who keeps whose part in memory: how, and the rank that keeps this one's. Collective.

    bytes, boxes: of this rank's part, at most.
    """
    host = os.uname().nodename
    told = ranks.gather([f"{host} {directory.resolve()}", bytes, boxes])
    nodes = [node for node, _, _ in told]
    partners = partners_of(nodes)
    is_one_machine = len({node.partition(" ")[0] for node in nodes}) == 1
    memory = MemoryCopies(
        root=directory,
        run=run,
        identity=ranks.first(lambda: identity(RunDir(run))),
        rank=ranks.rank,
        token=ranks.first(lambda: secrets.token_hex(16)),
        host="127.0.0.1" if is_one_machine else host,
        limits=Limits(
            owners=tuple(owner for owner, keeper in enumerate(partners) if keeper == ranks.rank != owner),
            world=ranks.world,
            bytes=max(size for _, size, _ in told),
            boxes=max(count for _, _, count in told),
        ),
    )
    for path in memory.holdings.sweep():
        log.info("memory of a run that is gone was freed: %s", path)
    return memory, partners[ranks.rank]


def refusal(ranks: Ranks, bytes: int, memory: MemoryCopies | None) -> str:
    """Return why some rank cannot have arenas of so many bytes, each its own, and which; "" where all can.

    What the ranks of one machine want is added up. Collective, with the same answer on every rank.
    """
    here, mine = machine(), _bytes_needed(bytes, memory)
    wanted = sum(one for place, one in ranks.gather([here, mine]) if place == here)
    failure = None
    try:
        refuse_without_memory(wanted)
        if memory is not None and free_bytes(memory.root) < wanted:
            raise no_space(memory.root, doing="Keeping copies in memory", bytes_needed=wanted)
    except StorageError as error:
        failure = error.message
    found = ranks.gather(failure)
    return next((f"rank {rank}: {why}" for rank, why in enumerate(found) if why), "")


def _bytes_needed(bytes: int, memory: MemoryCopies | None) -> int:
    """Return the memory that is still to be taken for arenas, and as much again for a partner's parts.

    What an earlier life of the run has left is used.
    """
    if memory is None:
        return ARENAS * bytes
    there = sum(memory.slot(number).exists() for number in range(ARENAS))
    return 2 * bytes * (ARENAS - there)
