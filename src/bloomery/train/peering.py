"""Builds the outer loop of a run from its recipe, and connects it to the trainer and to the peer's agent.

A run of one peer gets `SinglePeer`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.agent.rank_server import PARENT
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.config.recipe import Recipe
from bloomery.diloco.agent_client import AgentClient, connect_agent
from bloomery.diloco.all_reduce import RingMaker, WireRings
from bloomery.diloco.gradient_average import GradientAverage
from bloomery.diloco.outer import Outer, SinglePeer, TrainerHooks
from bloomery.diloco.outer_loop import OuterLoop
from bloomery.diloco.outer_update import OuterUpdate
from bloomery.diloco.peer_vector import PeerVector
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.errors import CheckpointError, TrainingFailed
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.protocol.encoding import SAVES_AT_MOST
from bloomery.train.data_stream import DataStream
from bloomery.train.metrics import Interlude
from bloomery.train.state import TrainState

if TYPE_CHECKING:
    from bloomery.train.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Peering:
    """What a rank needs to train with other peers.

    agent: connection to the process that speaks for this peer.
    rings: makes the connections of an attempt into a ring.
    name: the name of this peer.
    """

    agent: AgentClient
    rings: RingMaker
    name: str


def build_outer(
    recipe: Recipe,
    *,
    trainer: Trainer,
    model: TrainingModel,
    mesh: Mesh,
    data_stream: DataStream,
    peering: Peering | None,
) -> Outer:
    """Return the Outer that the recipe asks for. Raises TrainingFailed for a run between peers without an
    agent.

    trainer: the trainer, which the outer loop calls from its first `admit` on.
    peering: None for a process that no agent started.
    """
    section = recipe.elastic
    if not section.inner_steps:
        return SinglePeer()
    if peering is None:
        raise TrainingFailed(
            "The recipe trains between peers (elastic.inner_steps > 0), and this process is not one of them.",
            remedy="Start each peer with `bloomery peer RECIPE`, or train alone with elastic.inner_steps=0.",
        )
    vector = PeerVector(model.weights, mesh)
    update: OuterUpdate
    update = GradientAverage(vector) if section.average == "gradients" else PseudoGradient(vector, section)
    if section.fragments > 1 or section.overlap_steps:
        # With fragments or overlap the peers' weights differ at a commit; only the base is equal on all.
        model.weights.scope = "peer"
    return OuterLoop(
        section,
        update,
        agent=peering.agent,
        rings=peering.rings,
        gather=mesh.all_gather_object,
        peer=peering.name,
        salt=data_stream.fingerprint if data_stream.is_tokenised_here else "",
        tokens_per_sample=recipe.data.sequence_length,
        identity=data_stream.identity() if mesh.is_first else {},
        trainer=_hooks(trainer),
    )


def peering_of_environment(recipe: Recipe, mesh: Mesh, stack: ExitStack) -> Peering | None:
    """Connect to the agent that started this rank; None if there is none. Raises PeerError."""
    if PARENT not in os.environ:
        return None
    agent = connect_agent(rank=mesh.rank, world=mesh.world)
    stack.callback(agent.close)
    name = recipe.elastic.peer or os.environ.get("BLOOMERY_PEER", "") or os.uname().nodename
    return Peering(agent=agent, rings=WireRings(recipe.elastic, ranks=mesh.world), name=name)


def announce_interludes(interludes: Sequence[Interlude], peering: Peering | None) -> list[Interlude]:
    """Return the interludes so that each reports to the agent that it runs, or it would be taken for a step
    that hangs.
    """
    if peering is None:
        return list(interludes)
    return [_Announced(interlude=interlude, agent=peering.agent) for interlude in interludes]


@dataclass(frozen=True, kw_only=True)
class _Announced:
    interlude: Interlude
    agent: AgentClient

    def due(self, state: TrainState) -> bool:
        return self.interlude.due(state)

    def run(self, state: TrainState) -> dict[str, Any]:  # Any: of the report's fields
        self.agent.report_activity("evaluate", step=state.step)
        return self.interlude.run(state)


def _hooks(trainer: Trainer) -> TrainerHooks:
    """Return what the outer loop needs of a trainer. Its saver is made later, because it saves the outer
    loop too.
    """
    checkpoints = _CheckpointedRounds(trainer)
    return TrainerHooks(
        batch=lambda state: trainer.phase(state).global_batch,
        load=lambda directory, why, check: trainer.saver.adopt(directory, why, check),
        reload=lambda why: trainer.saver.reload(why),
        copy=lambda state: trainer.saver.copy_for_peers(state),
        remove_copy=trainer.store.remove_copy,
        wait_staged=trainer.store.wait_staged,
        follow=trainer.follow,
        round_before=checkpoints.round_before,
        step_of=checkpoints.step_of,
        saves=checkpoints.saves,
        asked_to_stop=trainer.control.asked_to_stop,
        enter=trainer.enter,
    )


class _CheckpointedRounds:
    """Knows which committed rounds a run's checkpoints hold. All methods except `saves` are collective
    over the peer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._mesh, self._store = trainer.mesh, trainer.store
        self._saves: tuple[int, ...] = ()
        self._listing_changed: tuple[int, ...] = ()
        """When the listing that `_saves` was made of had changed last."""

    def saves(self) -> tuple[int, ...]:
        """Return the rounds on whose state checkpoints rest: the oldest one, and the newest of the others."""
        if not self._mesh.is_first:
            return ()
        changed = self._store.listing_changed()
        if changed != self._listing_changed:
            bases = (_base_round(checkpoint.directory) for checkpoint in self._store.checkpoints())
            rounds = sorted({round for round, _ in filter(None, bases)})
            self._saves = (*rounds[:1], *rounds[1:][-SAVES_AT_MOST + 1 :])
            self._listing_changed = changed
        return self._saves

    def round_before(self, step: int) -> int | None:
        """Return the newest round with a checkpoint at or before a step; None without one."""
        steps = self._steps_by_round().items()
        return max((round for round, checkpoint_step in steps if checkpoint_step <= step), default=None)

    def step_of(self, round: int) -> int | None:
        """Return the step of the newest checkpoint of a round; None without one."""
        return self._steps_by_round().get(round)

    def _steps_by_round(self) -> dict[int, int]:
        """Return the first rank's list of steps by round, on all ranks."""
        pairs = []
        for checkpoint in self._store.checkpoints() if self._mesh.is_first else ():
            round = round_of_checkpoint(checkpoint.directory)
            if round is not None:
                pairs.append([round, checkpoint.step])
        return {round: step for round, step in self._mesh.all_gather_object(pairs)[0]}


def round_of_checkpoint(directory: Path) -> int | None:
    """Return the committed round whose state a checkpoint holds; None for one within a round or a damaged
    one.
    """
    base = _base_round(directory)
    return base[0] if base is not None and not base[1] else None


def _base_round(directory: Path) -> tuple[int, bool] | None:
    """Return (the committed round that a checkpoint is at or begins with, whether it is within the next
    round).

    The result is None for a damaged checkpoint, and for one of a run without rounds.
    """
    try:
        values = read_manifest(directory).values.get("outer", {})
    except CheckpointError as error:
        log.warning("%s was passed over: %s", directory, error.message)
        return None
    round, inside = values.get("round"), values.get("inside")
    return (round, inside) if isinstance(round, int) and isinstance(inside, bool) else None
