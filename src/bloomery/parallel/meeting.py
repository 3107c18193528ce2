"""The ranks' first words to each other, before any group exists: who is where, with which recipe.

Each leaves an introduction in a store. The first rank reads them all and leaves a verdict, so that whatever
is wrong ends every rank at once, with one message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torch._C._distributed_c10d import Store

from bloomery.errors import RankLost, ToldElsewhere, TrainingFailed
from bloomery.parallel.answers import ANSWER_S, answered

JOIN_TIMEOUT_S = 300.0
"""How long a rank may take to introduce itself: on a cold disk torch loads slowly."""
_STORE = "the store where the ranks meet"
_POLL_S, _SLOWEST_POLL_S = 0.02, 0.5


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a rank says of itself. recipe: settings by key, as text; chosen: what this machine makes of those
    that say 'auto'; refusal: why it cannot take part.
    """

    host: str
    recipe: Mapping[str, str]
    chosen: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    remedy: str = ""


def meet(
    store: Store,
    mine: Introduction,
    *,
    rank: int,
    world: int,
    judge: Callable[[Sequence[Introduction]], None],
    timeout_s: float = JOIN_TIMEOUT_S,
    answer_s: float = ANSWER_S,
) -> None:
    """Introduce this rank and wait for the verdict. Collective over the peer.

    judge: called on the first rank with everyone's introduction; raises TrainingFailed for what cannot be.
    Then the first rank raises it, the others ToldElsewhere. Raises TrainingFailed naming who did not come,
    and RankLost where the first rank says nothing, or the store does not answer within `answer_s`.
    """
    introduction = json.dumps(asdict(mine))
    answered(lambda: store.set(f"introduction/{rank}", introduction), by=_STORE, within_s=answer_s)
    if rank == 0:
        _judge(store, world=world, judge=judge, timeout_s=timeout_s, answer_s=answer_s)
        return
    # Twice as long: the first rank gives up first, and says who is missing.
    if _missing(store, ["verdict"], timeout_s=2 * timeout_s, answer_s=answer_s):
        raise RankLost(
            f"Rank 0, which looks at all recipes and layouts first, said nothing for {2 * timeout_s:.0f} s.",
            remedy="Look at its log and its node, and start all ranks again.",
        )
    verdict = answered(lambda: store.get("verdict"), by=_STORE, within_s=answer_s)
    if verdict != b"welcome":
        raise ToldElsewhere


def _judge(
    store: Store,
    *,
    world: int,
    judge: Callable[[Sequence[Introduction]], None],
    timeout_s: float,
    answer_s: float,
) -> None:
    def say(verdict: str) -> None:
        answered(lambda: store.set("verdict", verdict), by=_STORE, within_s=answer_s)

    try:
        found = _introductions(store, world, timeout_s=timeout_s, answer_s=answer_s)
        refuse_unequal(found)
        judge(found)
    except RankLost:
        raise  # the store is gone: nobody would hear it
    except TrainingFailed:
        say("refused")
        raise
    say("welcome")


def _introductions(store: Store, world: int, *, timeout_s: float, answer_s: float) -> list[Introduction]:
    """Those of all ranks, once all have introduced themselves."""
    keys = [f"introduction/{rank}" for rank in range(world)]
    missing = _missing(store, keys, timeout_s=timeout_s, answer_s=answer_s)
    if missing:
        ranks = [str(rank) for rank, key in enumerate(keys) if key in missing]
        names = ", ".join(ranks[:8]) + (", …" if len(ranks) > 8 else "")
        raise TrainingFailed(
            f"Of {world} ranks, {len(ranks)} did not join within {timeout_s:.0f} s: {names}.",
            remedy="Look at their logs and nodes; start all of them, with the same --nnodes and recipe.",
        )
    texts = answered(lambda: [store.get(key) for key in keys], by=_STORE, within_s=answer_s)
    return [Introduction(**json.loads(text)) for text in texts]


def _missing(store: Store, keys: Sequence[str], *, timeout_s: float, answer_s: float) -> list[str]:
    """Which keys are not there by the deadline; none as soon as all are."""
    deadline, missing, pause_s = time.monotonic() + timeout_s, list(keys), _POLL_S

    def still_missing() -> list[str]:
        return [key for key in missing if not store.check([key])]

    while missing := answered(still_missing, by=_STORE, within_s=answer_s):
        if time.monotonic() > deadline:
            return missing
        time.sleep(pause_s)
        pause_s = min(_SLOWEST_POLL_S, pause_s * 1.1)
    return []


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
    for rank, one in enumerate(ranks):
        if one.chosen != ranks[0].chosen:
            raise TrainingFailed(
                f"Rank {rank} on {one.host} makes something else of 'auto' than rank 0 on {ranks[0].host}: "
                f"{difference(one.chosen, ranks[0].chosen)}.",
                remedy="Write what all machines can do in place of 'auto'.",
            )


def difference(
    theirs: Mapping[str, str], ours: Mapping[str, str], *, there: str = "there", here: str = "here"
) -> str:
    """The first setting in which two recipes differ, with both values. there, here: where each has it."""
    key = next(key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key))
    return f"{key} is {theirs.get(key, 'missing')} {there} and {ours.get(key, 'missing')} {here}"
