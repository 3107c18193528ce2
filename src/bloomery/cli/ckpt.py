"""`bloomery ckpt`: list, show and verify the checkpoints of a run, export and import models."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from bloomery.checkpoint.catalogue import Found, abandoned_checkpoints, checkpoints
from bloomery.checkpoint.manifest import MANIFEST, Manifest, read_index, read_manifest
from bloomery.checkpoint.verify import Problem, verify
from bloomery.cli.arguments import parser, run_part
from bloomery.errors import CheckpointError
from bloomery.events.numbers import as_json
from bloomery.events.rundir import RunDir

DAMAGED = 1
_COLUMNS = ("step", "incarnation", "saved", "size", "tokens", "state")
_STATE_WIDTH = 40
_PROBLEMS_SHOWN = 20

EXAMPLES = """\
bloomery ckpt list runs/demo                                what there is
bloomery ckpt verify runs/demo                              read and check every byte
bloomery ckpt show runs/demo/checkpoints/step-000500.i001   what one holds
bloomery ckpt export runs/demo exported                     a directory that transformers loads"""


def run(arguments: list[str]) -> int:
    """Run one part of the command; returns the exit status."""
    parts = {
        "list": (_list, "the checkpoints of a run"),
        "show": (_show, "what a checkpoint holds"),
        "verify": (_verify, "read and check every byte; status 1 when something is damaged"),
        "export": (_export, "to a directory that transformers loads"),
        "import": (_import, "from a directory of transformers, DCP or Megatron-DeepSpeed"),
        "slim": (
            _slim,
            "a model without its optimizer; or a file without what views drag along",
        ),
    }
    return run_part("ckpt", arguments, parts, about="Checkpoints of a run.", examples=EXAMPLES)


def _list(arguments: list[str]) -> int:
    options = parser("ckpt list", "List the checkpoints of a run, oldest first.")
    options.add_argument("run", type=Path, metavar="RUN", help="run directory")
    options.add_argument("--all", action="store_true", help="also those that a rewind left behind")
    options.add_argument("--verify", action="store_true", help="read and check every byte of each")
    options.add_argument("--json", action="store_true", help="one JSON object a line")
    given = options.parse_args(arguments)
    rundir = _run_directory(given.run)
    rows = [_row(found, given.verify, hidden=False) for found in checkpoints(rundir)]
    if given.all:
        rows += [_row(found, given.verify, hidden=True) for found in abandoned_checkpoints(rundir)]
        rows.sort(key=lambda row: (row["step"], row["incarnation"]))
    if given.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    elif rows:
        print(_table(rows))
    else:
        print(f"{rundir.path} has no checkpoints yet.")
    return 0


def _show(arguments: list[str]) -> int:
    options = parser("ckpt show", "Show what a checkpoint holds: a run's newest, or the one given.")
    options.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="run or checkpoint directory")
    options.add_argument("--tensors", action="store_true", help="name every tensor")
    options.add_argument("--json", action="store_true", help="one JSON object")
    given = options.parse_args(arguments)
    directory = _one(given.path)
    manifest = read_manifest(directory)
    index = read_index(directory, manifest)
    parts: dict[str, dict[str, int]] = {}
    for box in index.boxes:
        sums = parts.setdefault(box.name.partition(".")[0], {"boxes": 0, "bytes": 0})
        sums["boxes"] += 1
        sums["bytes"] += box.end - box.begin
    tensors = {box.name: {"shape": list(box.global_shape), "dtype": box.dtype} for box in index.boxes}
    if given.json:
        shown = {"directory": str(directory), "parts": parts, "tensors": tensors, **asdict(manifest)}
        print(json.dumps(as_json(shown), ensure_ascii=False))
    else:
        print(_description(directory, manifest, parts))
        for name, tensor in tensors.items() if given.tensors else ():
            print(f"  {name}  {tensor['dtype']} {tensor['shape']}")
    return 0


def _verify(arguments: list[str]) -> int:
    options = parser("ckpt verify", "Read and check every byte of one checkpoint, or of all of a run.")
    options.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="run or checkpoint directory")
    options.add_argument("--json", action="store_true", help="one JSON object a checkpoint")
    given = options.parse_args(arguments)
    directories = [given.path] if _is_checkpoint(given.path) else _all(given.path)
    damaged = 0
    for directory in directories:
        problems = verify(directory)
        damaged += bool(problems)
        if given.json:
            print(json.dumps({"checkpoint": str(directory), "problems": [asdict(item) for item in problems]}))
        else:
            _tell(directory, problems)
    if not directories and not given.json:
        print(f"{given.path} has no checkpoints yet.")
    return DAMAGED if damaged else 0


def _export(arguments: list[str]) -> int:
    status: int = import_module("bloomery.cli.ckpt_export").export(arguments)  # loads torch
    return status


def _slim(arguments: list[str]) -> int:
    status: int = import_module("bloomery.cli.ckpt_slim").run(arguments)  # loads torch
    return status


def _import(arguments: list[str]) -> int:
    status: int = import_module("bloomery.cli.ckpt_export").import_(arguments)  # loads torch
    return status


def _row(found: Found, check: bool, *, hidden: bool) -> dict[str, Any]:  # noqa: FBT001  — a parsed option
    """Return one checkpoint as JSON. A damaged one is a row too: the list must not fail on it."""
    problems = verify(found.directory, contents=check)
    row: dict[str, Any] = {"step": found.step, "incarnation": found.incarnation}
    try:
        manifest = read_manifest(found.directory)
        about, size, saved = manifest.about, manifest.bytes, manifest.time
    except CheckpointError:
        about, size, saved = {}, None, None
    state = f"damaged: {problems[0]}" if problems else "verified" if check else "complete"
    return {
        **row,
        "time": saved,
        "bytes": size,
        "tokens": about.get("consumed_tokens"),
        "state": state,
        "abandoned": hidden,
        "directory": str(found.directory),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for people, at most 100 columns wide."""
    lines = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    shown = []
    for line in lines:
        numbers = [f"{cell:>{width}}" for cell, width in zip(line[:-1], widths, strict=False)]
        shown.append("  ".join([*numbers, line[-1]]).rstrip())
    return "\n".join(shown)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    state = "abandoned, " + row["state"] if row["abandoned"] else row["state"]
    if len(state) > _STATE_WIDTH:
        state = state[: _STATE_WIDTH - 1] + "…"
    return (
        f"{row['step']:,}",
        str(row["incarnation"]),
        "-" if row["time"] is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row["time"])),
        "-" if row["bytes"] is None else _size(row["bytes"]),
        "-" if row["tokens"] is None else f"{row['tokens']:,}",
        state,
    )


def _description(directory: Path, manifest: Manifest, parts: dict[str, dict[str, int]]) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    lines = [
        str(directory),
        f"  step {manifest.step:,}, incarnation {manifest.incarnation}, saved {saved}",
        f"  {_size(manifest.bytes)} in {len(manifest.files)} data files",
    ]
    lines += [f"  {key}: {value}" for key, value in manifest.about.items()]
    lines += [f"  {name}.*: {sums['boxes']} boxes, {_size(sums['bytes'])}" for name, sums in parts.items()]
    return "\n".join(lines)


def _tell(directory: Path, problems: list[Problem]) -> None:
    print(f"{directory}: {'damaged' if problems else 'intact'}")
    for problem in problems[:_PROBLEMS_SHOWN]:
        print(f"  {problem}")
    if len(problems) > _PROBLEMS_SHOWN:
        print(f"  and {len(problems) - _PROBLEMS_SHOWN} more")


def _one(path: Path) -> Path:
    if _is_checkpoint(path):
        return path
    directories = _all(path)
    if not directories:
        raise CheckpointError(
            f"{path} has no checkpoints yet", remedy="The first is saved as the recipe says."
        )
    return directories[-1]


def _all(path: Path) -> list[Path]:
    return [found.directory for found in checkpoints(_run_directory(path))]


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).exists() or path.name.startswith("step-")


def _run_directory(path: Path) -> RunDir:
    rundir = RunDir(path)
    if not rundir.exists() and not rundir.checkpoints.is_dir():
        raise CheckpointError(
            f"{path} is neither a run directory nor a checkpoint",
            remedy="Give the directory of a run (runs/NAME), or one of its checkpoints/step-*.",
        )
    return rundir


def _size(count: float) -> str:
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
