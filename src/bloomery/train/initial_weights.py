"""Gives a run that begins with weights of a directory (`init.from`) its initial values."""

from __future__ import annotations

from collections.abc import Callable

from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.recipe import InitSection
from bloomery.interchange.initial_weights import fill_from
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh


def begins_with(
    init: InitSection, model: TrainingModel, mesh: Mesh, *, say: Callable[[str], None]
) -> Callable[[], None] | None:
    """Return what fills the masters and the working weights from `init.from`; None if that is empty.

    It is collective over the peer, and may be called again, where a run goes back to its beginning.
    say: prints a line for people.
    """
    if not init.from_:
        return None
    ranks = Ranks(rank=mesh.rank, world=mesh.world, gather=mesh.all_gather_object, exchange=mesh.exchange)

    def begin() -> None:
        entries = model.weights.state_entries()
        origin = fill_from(init.from_, entries, model=model.decoder.model, ranks=ranks)
        model.weights.copy_masters_to_working()
        say(f"the weights are those of {origin}; optimizer, schedule and data begin anew")

    return begin
