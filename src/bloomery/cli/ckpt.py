"""`bloomery ckpt`: lists, shows, verifies, compares, copies, prunes, exports and imports checkpoints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.catalogue import Problem, verify
from bloomery.checkpoint.format.manifest import IndexedBox, Manifest, parse_name, read_index, read_manifest
from bloomery.checkpoint.format.source import Source, source_of
from bloomery.checkpoint.format.suspects import why_suspect
from bloomery.checkpoint.remote.remote_run import (
    is_remote,
    place_at,
    remote_checkpoints,
    remote_source,
)
from bloomery.cli.arguments import data_bar, parser, run_subcommand
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import all_checkpoints, is_checkpoint, local_checkpoint, one_checkpoint
from bloomery.cli.tables import size_words
from bloomery.errors import CheckpointError
from bloomery.events.journal import read_journal
from bloomery.events.records import ProgressCallback, counting
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import storage_failure

DAMAGED = 1
DIFFERENT = 1
_DIFFERENCES_SHOWN = 20
_PROBLEMS_SHOWN = 20

EXAMPLES = """\
bloomery ckpt list runs/demo                                list the checkpoints
bloomery ckpt verify runs/demo                              read and check every byte
bloomery ckpt show runs/demo/checkpoints/step-000500.i001   show what one checkpoint holds
bloomery ckpt prune runs/demo --dry-run                     show what the recipe would not keep
bloomery ckpt copy s3://bucket/demo runs/demo               restore a backup
bloomery ckpt export runs/demo exported                     write a directory that transformers loads"""


def run(arguments: list[str]) -> int:
    """Run one subcommand of `bloomery ckpt`, and return the exit status."""
    subcommands = {
        "list": (_imported("ckpt_list", "show_list"), "list a run's checkpoints, and why each is kept"),
        "show": (_show, "show what a checkpoint holds"),
        "verify": (
            _verify,
            "read and check every byte; exit status 1: something is damaged, or nothing is there",
        ),
        "diff": (_diff, "compare two checkpoints"),
        "prune": (_imported("ckpt_list", "prune"), "remove the checkpoints that the recipe does not keep"),
        "copy": (_imported("ckpt_copy", "copy"), "copy to a backup or from one, verified and resumable"),
        "backup": (
            _imported("ckpt_copy", "backup"),
            "back up the newest checkpoint now, to where the recipe says",
        ),
        "export": (_imported("ckpt_export", "export"), "write a directory that transformers loads"),
        "import": (
            _imported("ckpt_export", "import_"),
            "make a run of a model of transformers, DCP or Megatron-DeepSpeed",
        ),
        "slim": (
            _imported("ckpt_copy", "slim"),
            "write a smaller copy: without the optimizer, or without unused storage",
        ),
    }
    return run_subcommand(
        "ckpt", arguments, subcommands, about="Work on the checkpoints of a run.", examples=EXAMPLES
    )


def _imported(module: str, function: str) -> Callable[[list[str]], int]:
    """Return a subcommand whose module is imported when it runs."""

    def run_it(arguments: list[str]) -> int:
        status: int = getattr(import_module(f"bloomery.cli.{module}"), function)(arguments)
        return status

    return run_it


def _show(arguments: list[str]) -> int:
    options = parser("ckpt show", "Show what a checkpoint holds. Of a run, the newest one is shown.")
    options.add_argument("path", metavar="RUN|CHECKPOINT|URL", help="a run or a checkpoint, here or at a URL")
    options.add_argument("--tensors", action="store_true", help="list every tensor with its type and shape")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    source = one_checkpoint(args.path)
    directory, manifest = source.place(), read_manifest(source)
    index = read_index(source, manifest)
    parts: dict[str, dict[str, int]] = {}
    for box in index.boxes:
        sums = parts.setdefault(box.name.partition(".")[0], {"boxes": 0, "bytes": 0})
        sums["boxes"] += 1
        sums["bytes"] += box.end - box.begin
    receipts, suspect = receipts_of(source), why_suspect(source)
    tensors = {box.name: {"shape": list(box.global_shape), "dtype": box.dtype} for box in index.boxes}
    if args.json:
        beside = {"parts": parts, "tensors": tensors, "receipts": receipts, "suspect": suspect}
        shown = {"directory": directory, **beside, **asdict(manifest)}
        print(json_text(shown, ensure_ascii=False))
    else:
        print(_description(directory, manifest, parts))
        if suspect:
            print(f"  suspect: {suspect}")
        for receipt in receipts:
            print(f"  {receipt_words(receipt)}")
        for name, tensor in tensors.items() if args.tensors else ():
            print(f"  {name}  {tensor['dtype']} {tensor['shape']}")
    return 0


def _verify(arguments: list[str]) -> int:
    options = parser("ckpt verify", "Read and check every byte of one checkpoint, or of all those of a run.")
    options.add_argument("path", metavar="RUN|CHECKPOINT|URL", help="a run or a checkpoint, here or at a URL")
    options.add_argument("--json", action="store_true", help="print one JSON object for each checkpoint")
    args = options.parse_args(arguments)
    damaged_count = 0
    is_single = is_remote(args.path) or is_checkpoint(Path(args.path))
    sources = _sources_at(args.path)
    if not sources:  # a mistyped address, say: who asks whether a backup is intact must not be told yes
        raise CheckpointError(
            f"{args.path} has no checkpoints yet: nothing was verified",
            remedy="Give a run or an address under which `bloomery ckpt list` shows checkpoints.",
        )
    for source in sources:
        with data_bar(shown=not args.json) as progress:
            problems, directory = verify_watched(source, progress), source.place()
        if problems and not is_single and was_removed(Path(args.path), source.name):
            print(f"note: {directory} was removed meanwhile by its run", file=sys.stderr)
            continue
        damaged_count += bool(problems)
        if args.json:
            print(json_text({"checkpoint": directory, "problems": [asdict(item) for item in problems]}))
        else:
            _print_verdict(directory, problems)
    return DAMAGED if damaged_count else 0


def was_removed(run: Path, name: str) -> bool:
    """Whether a run has removed one of its checkpoints since they were listed, as one that trains does."""
    directory = RunDirectory(run).checkpoints
    return directory.is_dir() and not (directory / name).exists()


def verify_watched(where: Path | Source, progress: ProgressCallback) -> list[Problem]:
    """Return what is wrong with a checkpoint, and show how much of it is read."""
    source = source_of(where)
    try:
        total = read_manifest(source).bytes
    except CheckpointError:
        total = 0  # `verify` reports it
    return verify(source, progress=counting(progress, f"verifying {source.name}", total))


def _sources_at(text: str) -> list[Source]:
    """Return the checkpoint at `text`, a path or a URL, or all checkpoints of the run there."""
    if is_remote(text):
        if parse_name(text.rstrip("/").rsplit("/", 1)[-1]) is not None:
            return [remote_source(text)]
        try:
            return list(remote_checkpoints(place_at(text, create=False)))
        except OSError as error:
            raise storage_failure(error, doing="Listing the backups") from error
    path = Path(text)
    directories = [local_checkpoint(path)] if is_checkpoint(path) else all_checkpoints(path)
    return [source_of(directory) for directory in directories]


def _description(directory: str, manifest: Manifest, parts: dict[str, dict[str, int]]) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    lines = [
        directory,
        f"  step {manifest.step:,}, incarnation {manifest.incarnation}, saved {saved}",
        f"  {size_words(manifest.bytes)} in {len(manifest.files)} data files",
    ]
    lines += [f"  {key}: {about_words(value)}" for key, value in manifest.about.items()]
    lines += [
        f"  {name}.*: {sums['boxes']} boxes, {size_words(sums['bytes'])}" for name, sums in parts.items()
    ]
    return "\n".join(lines)


def _print_verdict(directory: str, problems: list[Problem]) -> None:
    print(f"{directory}: {'damaged' if problems else 'intact'}")
    for problem in problems[:_PROBLEMS_SHOWN]:
        print(f"  {problem}")
    if len(problems) > _PROBLEMS_SHOWN:
        print(f"  and {len(problems) - _PROBLEMS_SHOWN} more")


def _diff(arguments: list[str]) -> int:
    """Print how two checkpoints differ, and return the exit status: 0 if they are equal, 1 if they differ."""
    options = parser("ckpt diff", "Compare two checkpoints, here or at a URL. Exit status 1: they differ.")
    options.add_argument("one", metavar="RUN|CHECKPOINT|URL", help="a checkpoint, or a run's newest")
    options.add_argument("other", metavar="RUN|CHECKPOINT|URL", help="the one to compare it with")
    options.add_argument("--contents", action="store_true", help="read both and compare every element too")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    first, second = one_checkpoint(args.one), one_checkpoint(args.other)
    differences = _structure(first, second)
    if args.contents:
        total = read_manifest(first).bytes + read_manifest(second).bytes
        with data_bar(shown=not args.json) as progress:
            differences["elements"] = _elements(first, second, counting(progress, "comparing", total))
    different = any(differences.values())
    if args.json:
        print(
            json_text({"one": first.place(), "other": second.place(), "different": different, **differences})
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


def _elements(first: Source, second: Source, count: Callable[[int], None]) -> dict[str, float | None]:
    """Return the largest absolute difference of each tensor that both have in one shape, where they differ.

    It is None, which JSON can say, where an element of only one of both is no finite number. Two NaNs are no
    difference.
    """
    from bloomery.checkpoint.load.loader import read_tensors
    from bloomery.interchange.huggingface import watched

    differences: dict[str, float | None] = {}
    others = watched(read_tensors(second), count)
    theirs = next(others, None)
    for name, mine in watched(read_tensors(first), count):
        while theirs is not None and theirs[0] < name:
            theirs = next(others, None)
        if theirs is None or theirs[0] != name or theirs[1].shape != mine.shape or not mine.numel():
            continue
        one, other = mine.double(), theirs[1].double()
        differing = (one != other) & ~(one.isnan() & other.isnan())
        if differing.any():
            largest = float((one - other)[differing].abs().max())
            differences[name] = largest if math.isfinite(largest) else None
    return differences


def _print_differences(first: Source, second: Source, differences: dict[str, Any], *, contents: bool) -> None:
    print(f"one:   {first.place()}\nother: {second.place()}")
    for title, entries in differences.items():
        if not entries:
            continue
        print(f"{title}: {len(entries)}")
        items = entries.items() if isinstance(entries, dict) else ((name, "") for name in entries)
        for number, (name, value) in enumerate(items):
            if number == _DIFFERENCES_SHOWN:
                print(f"  and {len(entries) - _DIFFERENCES_SHOWN} more")
                break
            shown = f"{value[0]} → {value[1]}" if isinstance(value, list) else value
            shown = "not finite in one of both" if shown is None else shown
            print(f"  {name}  {shown}".rstrip())
    if not any(differences.values()):
        print("nothing differs" if contents else "same tensors; --contents compares their elements")


def receipts_of(source: Source) -> list[dict[str, Any]]:
    """Return the receipts of the resumes from a checkpoint; [] for one outside a run directory."""
    directory = Path(source.place())
    if directory.parent.name != "checkpoints":
        return []
    journal = RunDirectory(directory.parent.parent).journal()
    return [
        event
        for event in read_journal(journal)
        if event["event"] == "receipt" and event["checkpoint"] == directory.name
    ]


def receipt_words(receipt: Mapping[str, Any]) -> str:
    """Return a receipt as one line."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(receipt["time"]))
    begin = f"resumed {when} on {receipt['ranks']} rank{'s' if receipt['ranks'] != 1 else ''}: "
    if not receipt["kept"]:
        return f"{begin}REFUSED, {'; '.join(receipt['broken'])}"
    changed = [
        words
        for name, words in (("settings_changed", "other settings"), ("mixture_changed", "another mixture"))
        if receipt[name]
    ]
    samples = "another mixture" if receipt["mixture_changed"] else "same next samples"
    parts = [samples, "same optimizer state", f"learning rate {receipt['learning_rate']:.4g}"]
    if "other settings" in changed:
        parts.append("settings of the learning rate changed")
    loss = f"loss {receipt['loss']}"
    if receipt["same_bits"] is not None:
        loss += (
            " as when the step was made before"
            if receipt["same_bits"]
            else (f", {receipt['loss_made_before']} when the step was made before")
        )
    elif receipt["loss_saved"] is not None:
        loss += f" after {receipt['loss_saved']}"
    return f"{begin}{', '.join([*parts, loss])} ({receipt['promised_by']})"


def about_words(value: object) -> object:
    """Return a value of a manifest's `about` as text; of a promise, all its fields."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return value
