"""Plans a run on several numbers of accelerators, to compare them."""

from __future__ import annotations

from collections.abc import Sequence

from bloomery.errors import ConfigError, Mistake
from bloomery.frozen import dataclass
from bloomery.plan.overview import Plan, make_plan
from bloomery.plan.request import OF, Request


@dataclass(frozen=True, kw_only=True)
class PlannedCount:
    """The plan for one number of accelerators, or why there is none.

    plan: None where `mistakes` say what is impossible with that number.
    """

    accelerators: int
    plan: Plan | None
    mistakes: tuple[Mistake, ...] = ()


def plan_counts(requests: Sequence[Request]) -> tuple[PlannedCount, ...]:
    """Return the plan of each request, in their order; the requests differ in the number of accelerators.

    Raises ConfigError with all mistakes, each once, where not one of them can be planned.
    """
    counts = tuple(_planned(request, request.accelerators or 0) for request in requests)
    if all(count.plan is None for count in counts):
        mistakes: list[Mistake] = []
        for count in counts:  # a mistake of the recipe is one of each number
            mistakes += [mistake for mistake in count.mistakes if mistake not in mistakes]
        raise ConfigError(mistakes, of=OF)
    return counts


def _planned(request: Request, accelerators: int) -> PlannedCount:
    try:
        return PlannedCount(accelerators=accelerators, plan=make_plan(request))
    except ConfigError as refused:
        return PlannedCount(accelerators=accelerators, plan=None, mistakes=tuple(refused.mistakes))
