"""Proportions of a model's shape beside those that published models have, and what stands out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bloomery.config.model import ModelSection
from bloomery.plan.parameters import head_size

LEAST_HIDDEN = 1024
"""Smaller models are made for tests and first steps, in other proportions."""


@dataclass(frozen=True, kw_only=True)
class Proportion:
    """A ratio of two sizes, and the range in which published models of 1B parameters and more have it."""

    name: str
    ratio: float
    lowest_ratio: float
    highest_ratio: float

    @property
    def is_usual(self) -> bool:
        """Whether it lies in the range."""
        return self.lowest_ratio <= self.ratio <= self.highest_ratio


def proportions(model: ModelSection) -> tuple[Proportion, ...]:
    """Return hidden ÷ layers and hidden ÷ heads of a model.

    The ranges are those of GPT-3 (128; 128), OPT-175B (128; 128), BLOOM (205; 128), Gopher (205; 128),
    PaLM (156; 256 by its own head size), MT-NLG (195; 160), Llama (65 to 130; 128) and Qwen3 (57 to 80; 128):
    width against depth matters little within them (Kaplan et al., 2020, figure 5), and a head of fewer than
    64 or more than 256 channels leaves kernels of attention slow.
    """
    return (
        Proportion(
            name="hidden/layers", ratio=model.hidden / model.layers, lowest_ratio=55.0, highest_ratio=210.0
        ),
        Proportion(
            name="hidden/heads", ratio=float(head_size(model)), lowest_ratio=64.0, highest_ratio=256.0
        ),
    )


def unusual_shape(model: ModelSection) -> Iterator[str]:
    """Yield a warning for each proportion of a larger model that published models do not have."""
    if model.hidden < LEAST_HIDDEN:
        return
    for shape in proportions(model):
        if not shape.is_usual:
            yield (
                f"{shape.name} is {shape.ratio:.0f}; published models of 1B parameters and more have "
                f"{shape.lowest_ratio:.0f} to {shape.highest_ratio:.0f}."
            )
