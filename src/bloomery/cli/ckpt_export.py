"""`bloomery ckpt export` writes a model for transformers; `import` makes a run of a foreign one."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery import durable
from bloomery.cli.arguments import add_fallback, data_bar, parsed_with_target, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import refuse_existing
from bloomery.config.environment import follow_recipe
from bloomery.errors import CheckpointError
from bloomery.events.records import ProgressCallback, counting
from bloomery.interchange.directories import partial_directory

if TYPE_CHECKING:
    from bloomery.checkpoint.format.state import StateEntry
    from bloomery.config.recipe import Recipe
    from bloomery.interchange.huggingface import Imported

_STEP, _SEQUENCE_AT_MOST = 0, 2048
CONTINUE = "continue.toml"
"""Name of the recipe in an imported run that trains on with its weights."""

IMPORTS = """\
bloomery ckpt import llama-7b runs/llama-7b                                  a directory of transformers
bloomery ckpt import global_step95000 --recipe tr11-176b --tokenizer bloom/tokenizer.json runs/bloom"""


def export(arguments: list[str]) -> int:
    """Write a checkpoint as a directory that transformers loads, and return the exit status."""
    options = parser(
        "ckpt export",
        "Write a model as a directory that transformers loads, and verify that both give the same logits.",
    )
    options.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="a run or checkpoint directory")
    options.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="type of the stored weights (default: fp32)",
    )
    add_fallback(options)
    options.add_argument("--json", action="store_true", help="print one JSON object")
    about = "the directory to make (default: RUN/export)"
    args = parsed_with_target(options, arguments, metavar="TARGET", about=about, required=False)

    from bloomery.evaluate.saved_files import find_saved

    files = find_saved(args.path, fallback=args.fallback)
    follow_recipe(offline=files.recipe.run.offline)
    target = args.to or files.rundir.export
    refuse_existing(target)
    from bloomery.evaluate.open_checkpoint import open_model  # loads torch
    from bloomery.interchange import huggingface
    from bloomery.interchange.generation_files import generation_files_of

    saved = open_model(files)
    with data_bar(shown=not args.json) as progress:
        done = huggingface.export(
            saved.model,
            saved.checkpoint,
            target,
            tokenizer=saved.tokenizer_path,
            end_of_document=saved.tokenizer.end_of_document,
            dtype=args.dtype,
            companions=generation_files_of(files.rundir),
            progress=progress,
        )
    if args.json:
        facts = {
            "checkpoint": str(saved.checkpoint),
            "directory": str(target),
            "family": done.family,
            "parameters": done.parameters,
            "largest_difference": done.largest_difference,
            "tolerance": done.tolerance,
        }
        print(json_text(facts))
        return 0
    print(
        f"{target}: {done.family}, {done.parameters:,} parameters in {args.dtype}, from {saved.checkpoint}\n"
        f"  transformers gives the same logits: largest difference {done.largest_difference:.2g} "
        f"(tolerated: {done.tolerance:.2g})"
    )
    return 0


def import_(arguments: list[str]) -> int:
    """Make a run directory of another program's model, and return the exit status."""
    options = parser(
        "ckpt import",
        "Make a run directory of a model: its weights, tokenizer and a recipe, without optimizer state. The\n"
        "model comes from a Hugging Face directory or, with --recipe and --tokenizer, from a checkpoint of\n"
        "torch.distributed.checkpoint (DCP) or Megatron-DeepSpeed. No code in the files is executed.\n"
        "`bloomery generate` and `bloomery ckpt export` read the result; RUN/continue.toml trains\n"
        "on with it.",
        examples=IMPORTS,
    )
    options.add_argument(
        "path",
        type=Path,
        metavar="DIR",
        help="directory that save_pretrained, DCP or Megatron-DeepSpeed wrote",
    )
    options.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="recipe whose [model] describes a DCP or Megatron-DeepSpeed checkpoint",
    )
    options.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json or .model, when DIR holds none",
    )
    options.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="token that ends a document (default: the eos_token of tokenizer_config.json)",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = parsed_with_target(
        options, arguments, metavar="RUN", about="the run directory to make", required=True
    )
    refuse_existing(args.to)
    _refuse_no_model(args.path)
    imported = _read_model(args)
    if imported.tokenizer is None:
        raise CheckpointError(
            f"{args.path} has no tokenizer.json and no tokenizer.model.",
            remedy="Name one with --tokenizer, or save it there: tokenizer.save_pretrained(directory).",
        )
    with partial_directory(args.to) as partial:
        with data_bar(shown=not args.json) as progress:
            _write_run(partial, imported, args, progress)
        durable.publish(partial, args.to)
    if args.json:
        print(json_text({"run": str(args.to), "family": imported.family, "from": str(args.path)}))
        return 0
    print(
        f"{args.to}: {imported.family}, from {args.path}\n"
        f'  try: bloomery generate {shlex.quote(str(args.to))} "Once upon a time"\n'
        f"  train on: bloomery train {shlex.quote(str(args.to / CONTINUE))} data.sources=YOUR_TEXT"
    )
    return 0


def _refuse_no_model(directory: Path) -> None:
    """Raise CheckpointError, before torch is loaded, for a directory that holds no model that we know."""
    from bloomery.interchange.directories import read_object
    from bloomery.interchange.families import section_from

    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory.", remedy="Give the checkpoint's directory.")
    if (directory / ".metadata").is_file() or any(directory.glob("layer_*.pt")):
        return
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} has no config.json.",
            remedy="Give a directory written by save_pretrained, DCP (.metadata) or Megatron-DeepSpeed "
            "(layer_*.pt).",
        )
    section_from(read_object(directory / "config.json"))


def _read_model(args: Namespace) -> Imported:
    """Return the model to import, whatever program wrote it. Its tensors are read later, one by one."""
    from bloomery.data.tokenizer_files import tokenizer_in
    from bloomery.interchange import huggingface
    from bloomery.interchange.tensor_matching import is_foreign, read_foreign

    tokenizer = args.tokenizer or tokenizer_in(args.path)
    if not is_foreign(args.path):
        return replace(huggingface.import_(args.path), tokenizer=tokenizer)
    if args.recipe is None or tokenizer is None:
        raise CheckpointError(
            f"{args.path} describes neither its model nor its tokenizer.",
            remedy="Give both: --recipe RECIPE (of which [model] is used) and --tokenizer tokenizer.json.",
        )
    from bloomery.config.load import load_recipe
    from bloomery.data.tokenizer import load_tokenizer

    recipe = load_recipe(args.recipe).recipe
    end = args.end_of_document = args.end_of_document or recipe.data.end_of_document_token
    words = load_tokenizer(tokenizer, end_of_document=end).vocabulary_size
    model, tensors = read_foreign(
        args.path, recipe.model, vocabulary=words, sequence_length=recipe.data.sequence_length
    )
    return huggingface.Imported(
        model=recipe.model, resolved=model, family="a model", tensors=tensors, tokenizer=tokenizer
    )


def _write_run(path: Path, imported: Imported, args: Namespace, progress: ProgressCallback) -> None:
    """Write tokenizer, recipe, incarnation and checkpoint; the caller renames the directory afterwards."""
    from bloomery.checkpoint.format.state import whole
    from bloomery.checkpoint.save.direct import save_streamed
    from bloomery.config.convert import dump_recipe
    from bloomery.config.find import name_of
    from bloomery.data.tokenizer import load_tokenizer
    from bloomery.events.incarnation import begin
    from bloomery.events.run_directory import RunDirectory
    from bloomery.interchange.generation_files import CONFIG, keep_generation_files
    from bloomery.model.shape import logical_shapes, resolve

    assert imported.tokenizer is not None, "the caller checked it"
    rundir = RunDirectory(path).create()
    end_of_document = args.end_of_document or _eos_of(args.path)
    tokenizer = load_tokenizer(imported.tokenizer, end_of_document=end_of_document)
    resolve(
        imported.model, vocabulary=tokenizer.vocabulary_size, sequence_length=1
    )  # refuses too many tokens
    tokenizer.save(rundir.data / tokenizer.file_name)
    if (args.path / CONFIG).is_file():  # a Hugging Face directory
        keep_generation_files(
            args.path,
            rundir,
            tokenizer=imported.tokenizer,
            end_of_document=tokenizer.eod,
            vocabulary=imported.resolved.vocabulary,
        )
    recipe = _recipe(imported, name=name_of(args.to), origin=args.path, end_of_document=end_of_document)
    durable.write_whole(rundir.recipe, dump_recipe(recipe))
    continuing = _continuing_recipe(args.to, sequence_length=recipe.data.sequence_length)
    durable.write_whole(path / CONTINUE, continuing)
    total = 4 * sum(prod(shape) for shape in logical_shapes(imported.resolved).values())
    count = counting(progress, "importing", total)

    def entries() -> Iterator[StateEntry]:
        for name, tensor in imported.tensors:
            yield whole(f"model.{name}", tensor.contiguous())
            count(tensor.nbytes)

    incarnation = begin(rundir, base=None, reason=f"imported from {args.path}")
    save_streamed(rundir.checkpoints, entries(), step=_STEP, incarnation=incarnation)


def _eos_of(directory: Path) -> str:
    from bloomery.interchange.described_weights import end_of_document_of

    text = end_of_document_of(directory)
    if text is None:
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'} names no eos_token.",
            remedy="Name the token that ends a document: --end-of-document.",
        )
    return text


def _continuing_recipe(run: Path, *, sequence_length: int) -> str:
    """Return a recipe that trains on with the imported weights; its text, length and batch are to be set."""
    from bloomery.config.convert import toml_value
    from bloomery.config.find import name_of

    name, origin = toml_value(f"{name_of(run)}-continued"), toml_value(str(run.absolute()))
    recipe = shlex.quote(str(run / CONTINUE))
    return f"""\
# Trains on with these weights: bloomery train {recipe} data.sources=YOUR_TEXT
# `bloomery config show {recipe} --why` shows every setting, those of the imported model among them.
[run]
name = {name}
[init]
from = {origin}
[data]
sequence_length = {sequence_length}
[train]
steps = 200
global_batch = 8
[optim]
learning_rate = 2e-5
[schedule]
shape = "cosine"
unit = "steps"
warmup = 20
"""


def _recipe(imported: Imported, *, name: str, origin: Path, end_of_document: str) -> Recipe:
    """Return a recipe with the imported model; its other settings are placeholders for whoever trains on."""
    from bloomery.config.data import DataSection
    from bloomery.config.optim import OptimSection
    from bloomery.config.recipe import Recipe, RunSection, TrainSection

    positions = imported.model.max_positions
    length = _SEQUENCE_AT_MOST if positions == "auto" else min(positions, _SEQUENCE_AT_MOST)
    return Recipe(
        run=RunSection(name=name, notes=f"imported from {origin}"),
        model=imported.model,
        data=DataSection(sequence_length=length, end_of_document_token=end_of_document),
        train=TrainSection(steps=1, global_batch=1),
        optim=OptimSection(learning_rate=1e-4),
    )
