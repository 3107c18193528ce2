"""`bloomery ckpt diff`: compares the tensors, and on request the elements, of two checkpoints."""

from __future__ import annotations

import json
from typing import Any

from bloomery.checkpoint.format.manifest import IndexedBox, read_index, read_manifest
from bloomery.checkpoint.format.source import Source
from bloomery.cli.arguments import parser
from bloomery.cli.run_inputs import one_checkpoint

_SHOWN = 20
DIFFERENT = 1


def diff(arguments: list[str]) -> int:
    """Compare two checkpoints; returns 0 when they are equal and 1 when they differ."""
    options = parser("ckpt diff", "Compare two checkpoints, here or at a URL. Exit status 1: they differ.")
    for name in ("one", "other"):
        options.add_argument(name, metavar="RUN|CHECKPOINT|URL", help="a checkpoint, or a run's newest")
    options.add_argument("--contents", action="store_true", help="read both and compare every element too")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    first, second = one_checkpoint(args.one), one_checkpoint(args.other)
    differences = _structure(first, second)
    if args.contents:
        differences["elements"] = _elements(first, second)
    different = any(differences.values())
    if args.json:
        print(
            json.dumps({"one": first.place(), "other": second.place(), "different": different, **differences})
        )
    else:
        _print_differences(first, second, differences, contents=args.contents)
    return DIFFERENT if different else 0


def _structure(first: Source, second: Source) -> dict[str, Any]:
    manifests = [read_manifest(source) for source in (first, second)]
    sides = [_tensors(source) for source in (first, second)]
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


def _elements(first: Source, second: Source) -> dict[str, float]:
    """Return the largest absolute difference of each tensor that both have in one shape, where not zero."""
    from bloomery.checkpoint.load.loader import read_tensors

    differences: dict[str, float] = {}
    others = read_tensors(second)
    theirs = next(others, None)
    for name, mine in read_tensors(first):
        while theirs is not None and theirs[0] < name:
            theirs = next(others, None)
        if theirs is None or theirs[0] != name or theirs[1].shape != mine.shape or not mine.numel():
            continue
        difference = float((mine.double() - theirs[1].double()).abs().max())
        if difference != 0.0:
            differences[name] = difference
    return differences


def _print_differences(first: Source, second: Source, differences: dict[str, Any], *, contents: bool) -> None:
    print(f"one:   {first.place()}\nother: {second.place()}")
    for title, entries in differences.items():
        if not entries:
            continue
        print(f"{title}: {len(entries)}")
        items = entries.items() if isinstance(entries, dict) else ((name, "") for name in entries)
        for number, (name, value) in enumerate(items):
            if number == _SHOWN:
                print(f"  and {len(entries) - _SHOWN} more")
                break
            shown = f"{value[0]} → {value[1]}" if isinstance(value, list) else value
            print(f"  {name}  {shown}".rstrip())
    if not any(differences.values()):
        print("nothing differs" if contents else "same tensors; --contents compares their elements")
