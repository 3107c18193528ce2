"""`bloomery ckpt export` and `bloomery ckpt import`: to and from Hugging Face directories."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import parser
from bloomery.cli.ckpt_words import parsed_with_target
from bloomery.errors import CheckpointError

if TYPE_CHECKING:
    from bloomery.checkpoint.huggingface import Imported
    from bloomery.config.recipe import Recipe

_STEP, _SEQUENCE_AT_MOST = 0, 2048

IMPORTS = """\
bloomery ckpt import llama-7b runs/llama-7b                                  from transformers
bloomery ckpt import global_step95000 --recipe tr11-176b --tokenizer bloom/tokenizer.json runs/bloom"""


def export(arguments: list[str]) -> int:
    """Write a checkpoint as a directory that transformers loads; returns the exit status."""
    options = parser("ckpt export", "Write a model for transformers, and verify that it computes the same.")
    options.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="run or checkpoint directory")
    options.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of the stored weights; default: fp32",
    )
    options.add_argument("--json", action="store_true", help="one JSON object")
    about = "new directory; by default RUN/export"
    given = parsed_with_target(options, arguments, metavar="TARGET", about=about, required=False)

    from bloomery.checkpoint import huggingface
    from bloomery.evaluate.saved import open_saved
    from bloomery.events.rundir import RunDir

    saved = open_saved(given.path)
    target = given.to or RunDir(saved.checkpoint.parent.parent).export
    done = huggingface.export(
        saved.model,
        saved.checkpoint,
        target,
        tokenizer=saved.tokenizer_path,
        end_of_document=saved.tokenizer.end_of_document,
        dtype=given.dtype,
    )
    if given.json:
        told = {
            "checkpoint": str(saved.checkpoint),
            "directory": str(target),
            "family": done.family,
            "parameters": done.parameters,
            "largest_difference": done.largest_difference,
            "tolerance": done.tolerance,
        }
        print(json.dumps(told))
        return 0
    print(
        f"{target}: {done.family}, {done.parameters:,} parameters in {given.dtype}, from {saved.checkpoint}\n"
        f"  transformers gives the same logits: largest difference {done.largest_difference:.2g} "
        f"(tolerated: {done.tolerance:.2g})"
    )
    return 0


def import_(arguments: list[str]) -> int:
    """Make a run directory of a Hugging Face model; returns the exit status."""
    options = parser(
        "ckpt import",
        "Make a run directory of a model: weights, tokenizer, and a recipe, without optimizer state; "
        "`generate` and `ckpt export` take it. From a Hugging Face directory; or, with --recipe and "
        "--tokenizer, from a checkpoint of torch.distributed.checkpoint or Megatron-DeepSpeed. Nothing in "
        "the files is run.",
        examples=IMPORTS,
    )
    options.add_argument(
        "path", type=Path, metavar="DIR", help="written by save_pretrained, DCP or Megatron-DeepSpeed"
    )
    options.add_argument(
        "--recipe", metavar="RECIPE", help="whose [model] a DCP or Megatron checkpoint holds"
    )
    options.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, where DIR has none")
    options.add_argument(
        "--end-of-document", metavar="TOKEN", help="by default the eos_token of tokenizer_config.json"
    )
    given = parsed_with_target(options, arguments, metavar="RUN", about="new run directory", required=True)
    if given.to.exists():
        raise CheckpointError(f"{given.to} exists already.", remedy="Choose another directory.")

    found = _found(given)
    if found.tokenizer is None:
        raise CheckpointError(
            f"{given.path} has no tokenizer.json.",
            remedy="Name one with --tokenizer, or save it there: tokenizer.save_pretrained(directory).",
        )
    partial = given.to.with_name(given.to.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an import that was killed
    try:
        _write_run(partial, found, given)
        partial.rename(given.to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already if it was renamed
    print(
        f"{given.to}: {found.family}, from {given.path}\n"
        f'  try: bloomery generate {given.to} "Once upon a time"'
    )
    return 0


def _found(given: Namespace) -> Imported:
    """The model to import, whatever wrote it; its tensors are read later."""
    from bloomery.checkpoint import huggingface
    from bloomery.checkpoint.foreign.model import is_foreign, read_foreign

    if not given.path.is_dir():
        raise CheckpointError(f"{given.path} is not a directory.", remedy="Give the checkpoint's directory.")
    beside = given.path / "tokenizer.json"
    tokenizer = given.tokenizer or (beside if beside.is_file() else None)
    if not is_foreign(given.path):
        return replace(huggingface.import_(given.path), tokenizer=tokenizer)
    if given.recipe is None or tokenizer is None:
        raise CheckpointError(
            f"{given.path} says neither what its model is like nor how it tokenises.",
            remedy="Name both: --recipe RECIPE (its [model] counts) and --tokenizer tokenizer.json.",
        )
    from bloomery.config.load import load_recipe
    from bloomery.data.tokenizer import load_tokenizer

    recipe = load_recipe(given.recipe).recipe
    end = given.end_of_document = given.end_of_document or recipe.data.end_of_document_token
    words = load_tokenizer(tokenizer, end_of_document=end).vocabulary_size
    model, tensors = read_foreign(
        given.path, recipe.model, vocabulary=words, sequence_length=recipe.data.sequence_length
    )
    return huggingface.Imported(
        model=recipe.model, resolved=model, family="a model", tensors=tensors, tokenizer=tokenizer
    )


def _write_run(path: Path, found: Imported, given: Namespace) -> None:
    """Tokenizer, recipe, incarnation and checkpoint, in a directory that is renamed when all are there."""
    from bloomery.checkpoint.save import save_checkpoint
    from bloomery.checkpoint.state import whole
    from bloomery.config.dump import dump_recipe
    from bloomery.data.storage import write_whole
    from bloomery.data.tokenizer import load_tokenizer
    from bloomery.events.incarnation import begin
    from bloomery.events.rundir import RunDir

    assert found.tokenizer is not None, "the caller has looked"
    rundir = RunDir(path).create()
    end_of_document = given.end_of_document or _eos_of(given.path)
    tokenizer = load_tokenizer(found.tokenizer, end_of_document=end_of_document)
    tokenizer.save(rundir.data / tokenizer.file_name)
    recipe = _recipe(found, name=given.to.name, origin=given.path, end_of_document=end_of_document)
    write_whole(rundir.recipe, dump_recipe(recipe).encode())
    entries = [whole(f"model.{name}", tensor.contiguous()) for name, tensor in found.tensors]
    incarnation = begin(rundir, base=None, reason=f"imported from {given.path}")
    save_checkpoint(rundir.checkpoints, entries, step=_STEP, incarnation=incarnation)


def _eos_of(directory: Path) -> str:
    settings = directory / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    eos = content.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        raise CheckpointError(
            f"{settings} names no eos_token.",
            remedy="Name the token that ends a document: --end-of-document.",
        )
    return text


def _recipe(found: Imported, *, name: str, origin: Path, end_of_document: str) -> Recipe:
    """A recipe whose model is the imported one; the rest is a start for the person who goes on."""
    from bloomery.config.data import DataSection
    from bloomery.config.optim import OptimSection
    from bloomery.config.recipe import Recipe
    from bloomery.config.run import RunSection
    from bloomery.config.train import TrainSection

    positions = found.model.max_positions
    length = _SEQUENCE_AT_MOST if positions == "auto" else min(positions, _SEQUENCE_AT_MOST)
    return Recipe(
        run=RunSection(name=name, notes=f"imported from {origin}"),
        model=found.model,
        data=DataSection(sequence_length=length, end_of_document_token=end_of_document),
        train=TrainSection(steps=1, global_batch=1),
        optim=OptimSection(learning_rate=1e-4),
    )
