"""The ranks' first words to each other, before any group exists: who is where, with which recipe.

Each leaves an introduction in a store. The first rank reads them all and leaves a verdict, so that whatever
is wrong ends every rank at once, with one message.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

from bloomery.errors import ToldElsewhere, TrainingFailed

JOIN_TIMEOUT_S = 300.0
"""How long a rank may take to introduce itself: on a cold disk torch loads slowly."""
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a rank says of itself. recipe: settings by key, as text; refusal: why it cannot take part."""

    host: str
    recipe: Mapping[str, str]
    refusal: str = ""
    remedy: str = ""


def own_host() -> str:
    """The name of this node, as its launcher gave it or as the system has it."""
    return os.environ.get("BLOOMERY_HOST", "") or os.uname().nodename


def meet(
    store: Store,
    mine: Introduction,
    *,
    rank: int,
    world: int,
    judge: Callable[[Sequence[Introduction]], None],
    timeout_s: float = JOIN_TIMEOUT_S,
) -> None:
    """Introduce this rank and wait for the verdict. Collective over the peer.

    judge: called on the first rank with everyone's introduction; raises TrainingFailed for what cannot be.
    Then the first rank raises it, the others ToldElsewhere. Raises TrainingFailed naming who did not come.
    """
    store.set(f"introduction/{rank}", json.dumps(asdict(mine)))
    if rank == 0:
        _judge(store, world=world, judge=judge, timeout_s=timeout_s)
        return
    # Twice as long: the first rank gives up first, and says who is missing.
    store.wait(["verdict"], datetime.timedelta(seconds=2 * timeout_s))
    if store.get("verdict") != b"welcome":
        raise ToldElsewhere


def _judge(
    store: Store,
    *,
    world: int,
    judge: Callable[[Sequence[Introduction]], None],
    timeout_s: float,
) -> None:
    try:
        found = [
            Introduction(**json.loads(store.get(f"introduction/{rank}")))
            for rank in _arrived(store, world, timeout_s=timeout_s)
        ]
        refuse_unequal(found)
        judge(found)
    except TrainingFailed:
        store.set("verdict", "refused")
        raise
    store.set("verdict", "welcome")


def _arrived(store: Store, world: int, *, timeout_s: float) -> range:
    """All ranks, once all have introduced themselves."""
    deadline, missing = time.monotonic() + timeout_s, list(range(world))
    while missing := [rank for rank in missing if not store.check([f"introduction/{rank}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise TrainingFailed(
                f"Of {world} ranks, {len(missing)} did not join within {timeout_s:.0f} s: {names}.",
                remedy="Look at their logs and nodes; start all of them, with the same --nnodes and recipe.",
            )
        time.sleep(_POLL_S)
    return range(world)


def refuse_unequal(ranks: Sequence[Introduction]) -> None:
    """Raise TrainingFailed naming the first rank that refused, or that has another recipe than the first."""
    for rank, one in enumerate(ranks):
        if one.refusal:
            raise TrainingFailed(f"rank {rank} on {one.host}: {one.refusal}", remedy=one.remedy)
    for rank, one in enumerate(ranks):
        if one.recipe != ranks[0].recipe:
            raise TrainingFailed(
                f"Rank {rank} on {one.host} has another recipe than rank 0 on {ranks[0].host}: "
                f"{difference(one.recipe, ranks[0].recipe)}.",
                remedy="Give every node the same recipe file and the same overrides.",
            )


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The first setting in which two recipes differ, with both values."""
    key = next(key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key))
    return f"{key} is {theirs.get(key, 'missing')} there and {ours.get(key, 'missing')} here"
