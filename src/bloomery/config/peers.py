"""What of `[elastic]` does not fit the rest of a recipe; and recipes between peers started as if alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bloomery.config.finding import Finding, refuse
from bloomery.config.recipe import Recipe


def peer_mistakes(recipe: Recipe) -> Iterator[Finding]:
    """What is wrong with rounds between peers, where the recipe has any."""
    elastic = recipe.elastic
    if not elastic.inner_steps:
        return
    yield from _length_mistakes(recipe)
    if elastic.average == "gradients":
        yield from _gradient_mistakes(recipe)
    if elastic.inner_steps % elastic.fragments:
        yield Finding(
            key="elastic.fragments",
            problem=f"does not divide elastic.inner_steps = {elastic.inner_steps}",
            remedy="One fragment is averaged each inner_steps / fragments steps: choose a divisor.",
        )
    elif elastic.fragments > recipe.model.layers:
        yield Finding(
            key="elastic.fragments",
            problem=f"exceeds model.layers = {recipe.model.layers}",
            remedy="A fragment is made of whole blocks: use at most as many.",
        )
    if elastic.overlap_steps >= elastic.round_steps and elastic.average == "weights":
        yield Finding(
            key="elastic.overlap_steps",
            problem=f"is not below the {elastic.round_steps} steps of a round",
            remedy="A round must be over before the next one is offered.",
        )
    if elastic.mixing != 1.0 and not elastic.overlap_steps:
        yield Finding(
            key="elastic.mixing",
            problem="says nothing without elastic.overlap_steps: no step is made before the result arrives",
            remedy="Leave it out, or set elastic.overlap_steps.",
        )
    if elastic.minimum_peers > elastic.peers:
        yield Finding(
            key="elastic.minimum_peers",
            problem=f"exceeds elastic.peers = {elastic.peers}",
            remedy="Plan for at least as many peers as a round needs.",
        )


def refuse_alone(recipe: Recipe, sources: Mapping[str, str]) -> None:
    """Raise ConfigError for a recipe between peers that is started as a run of its own."""
    if recipe.elastic.inner_steps:
        finding = Finding(
            key="elastic.inner_steps",
            problem="the run is one between peers, each of which a parent process looks after",
            remedy="Start each with `bloomery peer` instead, or set elastic.inner_steps=0 to train alone.",
        )
        refuse(recipe, sources, [finding])


def _length_mistakes(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.steps:
        yield Finding(
            key="train.steps",
            problem="peers come and go, and make steps of their own",
            remedy="Count the run in samples or tokens: train.samples=… train.steps=0.",
        )
    schedule = recipe.schedule
    if schedule.unit == "steps" and schedule.decay == "auto" and schedule.shape != "constant":
        yield Finding(
            key="schedule.unit",
            problem="'steps' are one peer's own, and the run's length in them depends on who comes",
            remedy="Use 'samples' or 'tokens', which count what all peers use; or set schedule.decay.",
        )


def _gradient_mistakes(recipe: Recipe) -> Iterator[Finding]:
    elastic = recipe.elastic
    for key, value, wanted in (
        ("inner_steps", elastic.inner_steps, 1),
        ("fragments", elastic.fragments, 1),
        ("overlap_steps", elastic.overlap_steps, 0),
    ):
        if value != wanted:
            yield Finding(
                key=f"elastic.{key}",
                problem="gradients are averaged at each step, whole, before the update",
                remedy=f"Set elastic.{key} = {wanted}, or elastic.average = 'weights'.",
            )
    if "fp16" in {recipe.train.precision, *(precision for _, precision in recipe.train.precision_changes)}:
        yield Finding(
            key="train.precision",
            problem="fp16 scales each peer's gradients by a factor of its own",
            remedy="Use bf16 or fp32 where elastic.average = 'gradients'.",
        )
