"""What a run has taken from its stream and is going to take: for those who only look at it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.checkpoint.catalogue import checkpoints
from bloomery.checkpoint.manifest import read_manifest
from bloomery.config.recipe import Recipe
from bloomery.data.position import Position
from bloomery.data.stream import Stream
from bloomery.events.history import read_history
from bloomery.events.rundir import RunDir
from bloomery.plan.schedule import stretches
from bloomery.train.corpora import indices_left


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The stream from its first index to the run's end, `samples` of them, skipped ones included.

    past: (cursor after it, step) of each step so far; what comes after is today's recipe's.
    """

    stream: Stream
    samples: int
    step: int
    position: Position
    past: tuple[tuple[int, int], ...]
    recipe: Recipe

    def step_of(self, index: int) -> int:
        """The step that passes the stream's index `index - 1`: it was made, or is to be made."""
        place = bisect_left(self.past, (index, 0))
        if place < len(self.past):
            return self.past[place][1]
        skips = self.position.skips
        ahead = (range(max(one.start, self.position.cursor), min(one.stop, index)) for one in skips)
        skipped = sum(map(len, ahead))
        consumed = self.position.consumed + index - self.position.cursor - skipped
        yet = stretches(self.recipe.train, consumed, start=self.position.consumed)
        return self.step + sum(steps for steps, _ in yet)


def outlook(recipe: Recipe, stream: Stream, run: Path | None) -> Outlook:
    """How a run goes on from its newest checkpoint under a recipe; without one, from its beginning.

    stream: the recipe's from the beginning. Raises DataError where the run cannot go on so.
    """
    found = checkpoints(RunDir(run)) if run else ()
    step, position, past = 0, Position(), list[tuple[int, int]]()
    if run and found:
        values: Any = read_manifest(found[-1].directory).values  # Any: JSON
        step, position = int(values["train"]["step"]), Position.from_json(values["train"]["position"])
        steps = read_history(RunDir(run)).steps
        past = [(one.report.cursor, one.report.step) for one in steps if one.report.step <= step]
        left = indices_left(recipe, step=step, position=position)
        stream = stream.following(values["data"], at=position.cursor, left=left)
    left = indices_left(recipe, step=step, position=position)
    return Outlook(
        stream=stream,
        samples=position.cursor + left,
        step=step,
        position=position,
        past=tuple(past),
        recipe=recipe,
    )
