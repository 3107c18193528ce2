"""What each pipeline stage holds, as `bloomery mesh --stages` shows it."""

from __future__ import annotations

from bloomery.config.recipe import Recipe
from bloomery.plan.contents import contents_of
from bloomery.plan.ranks import Degrees


def print_stages(recipe: Recipe, degrees: Degrees) -> None:
    """A line a stage: its blocks, its parameters, and elements on each of its ranks."""
    vocabulary = recipe.model.vocabulary
    if vocabulary == "auto":
        vocabulary = recipe.data.tokenizer_vocabulary
    found = contents_of(
        recipe.model,
        recipe.parallel,
        vocabulary=vocabulary,
        sequence_length=recipe.data.sequence_length,
        data=degrees.data,
    )
    print(f"\n{sum(one.parameters for one in found):,} parameters in {len(found)} stages")
    rows = [("stage", "pipeline", "blocks", "parameters", "weights a rank", "masters a rank")]
    rows += [
        (
            str(one.stage.index),
            str(one.stage.rank),
            str(one.stage),
            f"{one.parameters:,}",
            f"{one.weights:,}",
            f"{one.masters:,}",
        )
        for one in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
