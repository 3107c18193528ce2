"""`bloomery ckpt diff`: what two checkpoints have differently."""

from __future__ import annotations

import json
from typing import Any

from bloomery.checkpoint.manifest import IndexedBox, read_index, read_manifest
from bloomery.checkpoint.source import Source
from bloomery.cli.arguments import parser
from bloomery.cli.ckpt_words import one_checkpoint

_SHOWN = 20
DIFFERENT = 1


def diff(arguments: list[str]) -> int:
    """Compare two checkpoints; returns 0 where nothing differs, 1 where something does."""
    options = parser("ckpt diff", "Compare two checkpoints, here or at a URL; status 1 when they differ.")
    for name in ("one", "other"):
        options.add_argument(name, metavar="RUN|CHECKPOINT|URL", help="a checkpoint, or a run's newest")
    options.add_argument("--contents", action="store_true", help="read both, and compare every element")
    options.add_argument("--json", action="store_true", help="one JSON object")
    given = options.parse_args(arguments)
    one, other = one_checkpoint(given.one), one_checkpoint(given.other)
    found = _structure(one, other)
    if given.contents:
        found["elements"] = _elements(one, other)
    different = any(found.values())
    if given.json:
        print(json.dumps({"one": one.place(), "other": other.place(), "different": different, **found}))
    else:
        _tell(one, other, found, contents=given.contents)
    return DIFFERENT if different else 0


def _structure(one: Source, other: Source) -> dict[str, Any]:
    manifests = [read_manifest(source) for source in (one, other)]
    sides = [_tensors(source) for source in (one, other)]
    both = sorted(set(sides[0]) & set(sides[1]))
    about = [{"step": manifest.step, **manifest.about} for manifest in manifests]
    return {
        "about": {
            key: [side.get(key) for side in about]
            for key in sorted(about[0].keys() | about[1].keys())
            if about[0].get(key) != about[1].get(key)
        },
        "only in one": sorted(set(sides[0]) - set(sides[1])),
        "only in other": sorted(set(sides[1]) - set(sides[0])),
        "shape or type": {
            name: [sides[0][name], sides[1][name]] for name in both if sides[0][name] != sides[1][name]
        },
    }


def _tensors(source: Source) -> dict[str, str]:
    def words(box: IndexedBox) -> str:
        return f"{box.dtype} {'×'.join(map(str, box.global_shape)) or 'scalar'}"

    return {box.name: words(box) for box in read_index(source, read_manifest(source)).boxes}


def _elements(one: Source, other: Source) -> dict[str, float]:
    """Return the largest difference of each tensor that both have in one shape, where there is one."""
    from bloomery.checkpoint.load import read_tensors

    found: dict[str, float] = {}
    others = read_tensors(other)
    theirs = next(others, None)
    for name, mine in read_tensors(one):
        while theirs is not None and theirs[0] < name:
            theirs = next(others, None)
        if theirs is None or theirs[0] != name or theirs[1].shape != mine.shape or not mine.numel():
            continue
        difference = float((mine.double() - theirs[1].double()).abs().max())
        if difference != 0.0:
            found[name] = difference
    return found


def _tell(one: Source, other: Source, found: dict[str, Any], *, contents: bool) -> None:
    print(f"one:   {one.place()}\nother: {other.place()}")
    for title, differences in found.items():
        if not differences:
            continue
        print(f"{title}: {len(differences)}")
        items = differences.items() if isinstance(differences, dict) else ((name, "") for name in differences)
        for number, (name, value) in enumerate(items):
            if number == _SHOWN:
                print(f"  and {len(differences) - _SHOWN} more")
                break
            told = f"{value[0]} → {value[1]}" if isinstance(value, list) else value
            print(f"  {name}  {told}".rstrip())
    if not any(found.values()):
        print("nothing differs" if contents else "same tensors; --contents compares their elements")
