"""`bloomery ckpt`: list, show and verify the checkpoints of a run, export and import models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from bloomery.checkpoint.manifest import Manifest, parse_name, read_index, read_manifest
from bloomery.checkpoint.remote import is_remote, place_at, remote_checkpoints, remote_source
from bloomery.checkpoint.source import Source, source_of
from bloomery.checkpoint.verify import Problem, verify
from bloomery.cli.arguments import parser, run_part
from bloomery.cli.ckpt_words import all_checkpoints, is_checkpoint, one_checkpoint, size_words
from bloomery.events.numbers import as_json
from bloomery.objects import storage_failure

DAMAGED = 1
_PROBLEMS_SHOWN = 20

EXAMPLES = """\
bloomery ckpt list runs/demo                                what there is
bloomery ckpt verify runs/demo                              read and check every byte
bloomery ckpt show runs/demo/checkpoints/step-000500.i001   what one holds
bloomery ckpt prune runs/demo --dry-run                     what the recipe would not keep
bloomery ckpt copy s3://bucket/demo runs/demo               bring a backup back
bloomery ckpt export runs/demo exported                     a directory that transformers loads"""


def run(arguments: list[str]) -> int:
    """Run one part of the command; returns the exit status."""
    parts = {
        "list": (_elsewhere("ckpt_list", "show_list"), "the checkpoints of a run, and why they are kept"),
        "show": (_show, "what a checkpoint holds"),
        "verify": (_verify, "read and check every byte; status 1 when something is damaged"),
        "diff": (_elsewhere("ckpt_diff", "diff"), "what two checkpoints have differently"),
        "prune": (_elsewhere("ckpt_list", "prune"), "remove what the recipe does not keep"),
        "copy": (_elsewhere("ckpt_copy", "copy"), "to a backup, or from one; verified, resumable"),
        "export": (_elsewhere("ckpt_export", "export"), "to a directory that transformers loads"),
        "import": (
            _elsewhere("ckpt_export", "import_"),
            "from a directory of transformers, DCP or Megatron-DeepSpeed",
        ),
        "slim": (
            _elsewhere("ckpt_slim", "run"),
            "a model without its optimizer; or a file without what views drag along",
        ),
    }
    return run_part("ckpt", arguments, parts, about="Checkpoints of a run.", examples=EXAMPLES)


def _elsewhere(module: str, function: str) -> Callable[[list[str]], int]:
    """Return a part of the command that lives in a module of its own, which is imported when it runs."""

    def run_it(arguments: list[str]) -> int:
        status: int = getattr(import_module(f"bloomery.cli.{module}"), function)(arguments)
        return status

    return run_it


def _show(arguments: list[str]) -> int:
    options = parser("ckpt show", "Show what a checkpoint holds: a run's newest, or the one given.")
    options.add_argument("path", metavar="RUN|CHECKPOINT|URL", help="run or checkpoint, here or elsewhere")
    options.add_argument("--tensors", action="store_true", help="name every tensor")
    options.add_argument("--json", action="store_true", help="one JSON object")
    given = options.parse_args(arguments)
    source = one_checkpoint(given.path)
    directory, manifest = source.place(), read_manifest(source)
    index = read_index(source, manifest)
    parts: dict[str, dict[str, int]] = {}
    for box in index.boxes:
        sums = parts.setdefault(box.name.partition(".")[0], {"boxes": 0, "bytes": 0})
        sums["boxes"] += 1
        sums["bytes"] += box.end - box.begin
    tensors = {box.name: {"shape": list(box.global_shape), "dtype": box.dtype} for box in index.boxes}
    if given.json:
        shown = {"directory": directory, "parts": parts, "tensors": tensors, **asdict(manifest)}
        print(json.dumps(as_json(shown), ensure_ascii=False))
    else:
        print(_description(directory, manifest, parts))
        for name, tensor in tensors.items() if given.tensors else ():
            print(f"  {name}  {tensor['dtype']} {tensor['shape']}")
    return 0


def _verify(arguments: list[str]) -> int:
    options = parser("ckpt verify", "Read and check every byte of one checkpoint, or of all of a run.")
    options.add_argument("path", metavar="RUN|CHECKPOINT|URL", help="run or checkpoint, here or elsewhere")
    options.add_argument("--json", action="store_true", help="one JSON object a checkpoint")
    given = options.parse_args(arguments)
    damaged = 0
    sources = _meant(given.path)
    for source in sources:
        problems, directory = verify(source), source.place()
        damaged += bool(problems)
        if given.json:
            print(json.dumps({"checkpoint": directory, "problems": [asdict(item) for item in problems]}))
        else:
            _tell(directory, problems)
    if not sources and not given.json:
        print(f"{given.path} has no checkpoints yet.")
    return DAMAGED if damaged else 0


def _meant(text: str) -> list[Source]:
    """Return one checkpoint, or all of a run, here or at a URL."""
    if is_remote(text):
        if parse_name(text.rstrip("/").rsplit("/", 1)[-1]) is not None:
            return [remote_source(text)]
        try:
            return list(remote_checkpoints(place_at(text)))
        except OSError as error:
            raise storage_failure(error, doing="Listing the backups") from error
    path = Path(text)
    return [source_of(one) for one in ([path] if is_checkpoint(path) else all_checkpoints(path))]


def _description(directory: str, manifest: Manifest, parts: dict[str, dict[str, int]]) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    lines = [
        directory,
        f"  step {manifest.step:,}, incarnation {manifest.incarnation}, saved {saved}",
        f"  {size_words(manifest.bytes)} in {len(manifest.files)} data files",
    ]
    lines += [f"  {key}: {value}" for key, value in manifest.about.items()]
    lines += [
        f"  {name}.*: {sums['boxes']} boxes, {size_words(sums['bytes'])}" for name, sums in parts.items()
    ]
    return "\n".join(lines)


def _tell(directory: str, problems: list[Problem]) -> None:
    print(f"{directory}: {'damaged' if problems else 'intact'}")
    for problem in problems[:_PROBLEMS_SHOWN]:
        print(f"  {problem}")
    if len(problems) > _PROBLEMS_SHOWN:
        print(f"  and {len(problems) - _PROBLEMS_SHOWN} more")
