"""Checks that there are exchanges which `parallel.async_tensor` can overlap with matmuls."""

from __future__ import annotations

from collections.abc import Iterator

from bloomery.config.findings import Finding
from bloomery.config.parallel import SPLIT_BACKWARD
from bloomery.config.recipe import Recipe
from bloomery.config.validate_precision import uses_fp8


def async_tensor_mistakes(recipe: Recipe) -> Iterator[Finding]:
    """Yield one finding that names all settings which `parallel.async_tensor` cannot be used with."""
    if not recipe.parallel.async_tensor:
        return
    reasons = {
        "overlaps the exchanges of sequence parallelism, and there are none": not recipe.parallel.sequence,
        "overlaps matmuls of 16 or 32 bits, and 'fp8' has 8": uses_fp8(recipe.train),
        f"makes both gradients of a matmul at one time, and '{recipe.parallel.schedule}' splits them": (
            recipe.parallel.pipeline > 1 and recipe.parallel.schedule in SPLIT_BACKWARD
        ),
    }
    if wrong := [reason for reason, is_wrong in reasons.items() if is_wrong]:
        yield Finding(
            key="parallel.async_tensor",
            problem="; it ".join(wrong),
            remedy="Leave it out: the same model is trained, and exchanges follow matmuls.",
        )
