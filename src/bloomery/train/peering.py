"""The outer of a run, from its recipe: alone, or one peer of several."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.checkpoint.manifest import read_manifest
from bloomery.config.recipe import Recipe
from bloomery.elastic.contribution import Contribution
from bloomery.elastic.drift import Drift
from bloomery.elastic.exchange import RingMaker
from bloomery.elastic.gradients import Gradients
from bloomery.elastic.household import Household
from bloomery.elastic.outer import Alone, Outer
from bloomery.elastic.peer.handoff import PARENT
from bloomery.elastic.peer.parentlink import connect_parent
from bloomery.elastic.rounds import Rounds
from bloomery.elastic.seam import Parent
from bloomery.elastic.wirering import WireRings
from bloomery.errors import CheckpointError, TrainingFailed
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.vector import PeerVector
from bloomery.train.feed import Feed
from bloomery.train.metrics import Interlude
from bloomery.train.state import TrainState
from bloomery.train.step import follow_update

if TYPE_CHECKING:
    from bloomery.train.parts import Parts

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Peering:
    """What a rank of a peer was given. name: of the peer. rings: what makes the ring of an attempt."""

    parent: Parent
    rings: RingMaker
    name: str


def build_outer(
    recipe: Recipe, *, model: TrainingModel, mesh: Mesh, feed: Feed, peering: Peering | None
) -> Outer:
    """The outer that the recipe asks for; `serve_outer` is called once the parts are built.

    Raises TrainingFailed for a run between peers without a parent.
    """
    section = recipe.elastic
    if not section.inner_steps:
        return Alone()
    if peering is None:
        raise TrainingFailed(
            "The recipe trains between peers (elastic.inner_steps > 0), and this process is not one of them.",
            remedy="Start each peer with `bloomery peer RECIPE`, or train alone with elastic.inner_steps=0.",
        )
    vector = PeerVector(model.weights, mesh)
    contribution: Contribution
    contribution = Gradients(vector) if section.average == "gradients" else Drift(vector, section)
    if section.fragments > 1 or section.overlap_steps:
        model.weights.scope = "peer"  # equal on all peers is what they were, not what they are
    return Rounds(
        section,
        contribution,
        parent=peering.parent,
        rings=peering.rings,
        gather=mesh.gather,
        peer=peering.name,
        salt=feed.fingerprint if feed.is_tokenised_here else "",
        tokens_per_sample=recipe.data.sequence_length,
    )


def peering_of_environment(recipe: Recipe, mesh: Mesh, stack: ExitStack) -> Peering | None:
    """Connect to the parent that started this rank; None where none did. Raises PeerError."""
    if PARENT not in os.environ:
        return None
    parent = connect_parent(rank=mesh.rank, world=mesh.world)
    stack.callback(parent.close)
    name = recipe.elastic.peer or os.environ.get("BLOOMERY_PEER", "") or os.uname().nodename
    return Peering(parent=parent, rings=WireRings(recipe.elastic), name=name)


def announced(interludes: Sequence[Interlude], peering: Peering | None) -> list[Interlude]:
    """Interludes of which the parent is told, so that a long one is not taken for a step that hangs."""
    if peering is None:
        return list(interludes)
    return [_Announced(interlude=one, parent=peering.parent) for one in interludes]


@dataclass(frozen=True, kw_only=True)
class _Announced:
    interlude: Interlude
    parent: Parent

    def due(self, state: TrainState) -> bool:
        return self.interlude.due(state)

    def run(self, state: TrainState) -> dict[str, float]:
        self.parent.moving("evaluate", step=state.step)
        return self.interlude.run(state)


def serve_outer(parts: Parts) -> None:
    """Make a run's parts known to its outer."""
    if isinstance(parts.outer, Rounds):
        checkpoints = _Rounds(parts)
        parts.outer.serve(
            Household(
                batch=lambda state: parts.phase(state).global_batch,
                load=parts.adopt,
                offer=parts.offer,
                settle=parts.store.settle,
                round_before=checkpoints.before,
                step_of=checkpoints.step_of,
                follow=lambda state: follow_update(parts.for_phase(parts.phase(state)), state),
            )
        )


class _Rounds:
    """Which committed rounds the checkpoints of a run hold. Collective over the peer."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def before(self, step: int) -> int | None:
        """The newest round at or before a step."""
        return max((round for round, at in self._held().items() if at <= step), default=None)

    def step_of(self, round: int) -> int | None:
        """The step of the newest checkpoint of a round."""
        return self._held().get(round)

    def _held(self) -> dict[int, int]:
        mesh = self._parts.mesh
        mine = [[round, step] for round, step in self._listed()] if mesh.is_first else []
        return {round: step for round, step in mesh.gather(mine)[0]}

    def _listed(self) -> list[tuple[int, int]]:
        found = []
        for item in self._parts.store.checkpoints():
            round = round_of(item.directory)
            if round is not None:
                found.append((round, item.step))
        return found


def round_of(directory: Path) -> int | None:
    """The committed round whose state a checkpoint holds; None for one within a round, or that is damaged."""
    try:
        values = read_manifest(directory).values.get("outer", {})
    except CheckpointError as error:
        log.warning("%s was passed over: %s", directory, error.message)
        return None
    if values.get("inside") is not False:
        return None
    round = values["round"]
    return round if isinstance(round, int) else None
