"""A saved model made ready to be used: from a run's newest checkpoint, or from a given one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bloomery.checkpoint.catalogue import checkpoints
from bloomery.checkpoint.huggingface import fill
from bloomery.checkpoint.load import read_model
from bloomery.checkpoint.manifest import MANIFEST
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.hub import find_tokenizer
from bloomery.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_in
from bloomery.errors import CheckpointError
from bloomery.events.rundir import RunDir
from bloomery.model.decoder import Decoder
from bloomery.model.resolve import ResolvedModel, resolve


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint and what belongs to it."""

    checkpoint: Path
    recipe: Recipe
    model: ResolvedModel
    tokenizer: Tokenizer
    tokenizer_path: Path

    def decoder(self, *, device: torch.device) -> Decoder:
        """The decoder with the checkpoint's weights, in fp32."""
        decoder = Decoder(self.model, device=device, dtype=torch.float32)
        fill(decoder, read_model(self.checkpoint))
        return decoder


def open_saved(path: Path) -> Saved:
    """What lies at `path`: a run directory (its newest checkpoint) or one of its checkpoints.

    Reads recipe and tokenizer, not the weights. Raises CheckpointError where there is none.
    """
    checkpoint = path if (path / MANIFEST).is_file() else _newest_of(path)
    rundir = RunDir(checkpoint.parent.parent)
    if not rundir.recipe.is_file():
        raise CheckpointError(
            f"{checkpoint} does not lie in a run directory: there is no {rundir.recipe}.",
            remedy="Give a checkpoint where its run left it, RUN/checkpoints/step-….",
        )
    recipe = load_recipe(str(rundir.recipe)).recipe
    tokenizer_path = tokenizer_in(rundir.data) or find_tokenizer(recipe.data.tokenizer)
    tokenizer = load_tokenizer(tokenizer_path, end_of_document=recipe.data.end_of_document_token)
    model = resolve(
        recipe.model, vocabulary=tokenizer.vocabulary_size, sequence_length=recipe.data.sequence_length
    )
    return Saved(
        checkpoint=checkpoint, recipe=recipe, model=model, tokenizer=tokenizer, tokenizer_path=tokenizer_path
    )


def _newest_of(path: Path) -> Path:
    rundir = RunDir(path)
    if not rundir.exists():
        raise CheckpointError(
            f"{path} is neither a run directory nor a checkpoint.",
            remedy="Give the directory of a run (runs/NAME), or one of its checkpoints/step-….",
        )
    found = checkpoints(rundir)
    if not found:
        raise CheckpointError(
            f"{path} has no checkpoints yet.",
            remedy="Let `bloomery train` run on: it saves as the recipe says.",
        )
    return found[-1].directory
