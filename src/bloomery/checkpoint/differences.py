"""What keeps a checkpoint from being loaded into a state: names, shapes and types that differ, as a list."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bloomery.checkpoint.manifest import IndexedBox
from bloomery.checkpoint.state import PASSING, StateEntry
from bloomery.errors import CheckpointError

_SHOWN = 10


def refuse_another_model(
    place: str,
    wanted: Sequence[StateEntry],
    saved: Mapping[str, Sequence[IndexedBox]],
    *,
    strict: bool,
    names: Collection[str] | None,
) -> None:
    """Raise CheckpointError with all differences, unless `wanted` can be filled from `saved`.

    strict: the names must be the same on both sides (`names` are further ones of this side), and the types;
    but for what a run may begin or cease to have.
    """
    differences = []
    for entry in wanted:
        if entry.name not in saved:
            continue
        there = saved[entry.name][0]
        if there.global_shape != entry.global_shape:
            shapes = f"saved {_shape(there.global_shape)}, here {_shape(entry.global_shape)}"
            differences.append(f"{entry.name}: {shapes}")
        elif strict and there.dtype != entry.dtype:
            differences.append(f"{entry.name}: saved as {there.dtype}, here {entry.dtype}")
    found = []
    if strict:
        here = _lasting({entry.name for entry in wanted} | set(names or ()))
        found += _listed("missing in the checkpoint", sorted(here - set(saved)))
        found += _listed("only in the checkpoint", sorted(_lasting(saved) - here))
    found += _listed("different", sorted(set(differences)))
    if found:
        raise CheckpointError(
            f"{place} is a checkpoint of another model:\n" + "\n".join(found),
            remedy="Train with the recipe of its run (recipe.toml beside checkpoints/), or another --run.",
        )


def refuse_incomplete(
    place: str, wanted: Sequence[StateEntry], saved: Mapping[str, Sequence[IndexedBox]]
) -> None:
    """Raise CheckpointError unless the saved boxes fill every box that is wanted of a tensor they have."""
    for entry in wanted:
        if entry.name not in saved:
            continue
        parts = [item.box.intersection(entry.box) for item in saved[entry.name]]
        if sum(part.size for part in parts if part is not None) != entry.box.size:
            raise CheckpointError(
                f"{place} does not hold all of {entry.name}: its boxes leave a part of {entry.box} unfilled",
                remedy="It was not saved by this program, or not whole: take another checkpoint.",
            )


def _lasting(names: Collection[str]) -> set[str]:
    """Names without those of state that a run may have or not."""
    return {name for name in names if not name.startswith(PASSING)}


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    shown = [f"    {item}" for item in items[:_SHOWN]]
    more = len(items) - _SHOWN
    return [f"  {len(items)} {title}:", *shown, *([f"    and {more} more"] if more > 0 else [])]


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
