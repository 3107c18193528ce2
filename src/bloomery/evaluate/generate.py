"""Opens a checkpoint of a run with its recipe and tokenizer, and generates texts from its model.

`open_saved` finds a run's newest checkpoint or opens a given one; `OpenedModel.decoder` loads its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bloomery.checkpoint.format.catalogue import checkpoints, newest_intact
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.checkpoint.load.loader import read_model
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import JSON_FILE, Tokenizer, find_tokenizer, load_tokenizer, tokenizer_in
from bloomery.errors import BloomeryError, CheckpointError, DataError
from bloomery.evaluate.layer_by_layer import blocks_from_file
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.generation_files import TextBounds, companions_of, text_bounds
from bloomery.interchange.huggingface import fill
from bloomery.model.decoder import Decoder
from bloomery.model.shape import ResolvedModel, resolve


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    temperature: 0 takes the likeliest token.
    top_k, top_p: 0 and 1 leave no token out.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def generate(
    decoder: Decoder,
    opening: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> Iterator[int]:
    """Yield new token ids after `opening`; the last one is in `ends`, or it is the `max_new_tokens`-th.

    opening: token ids, at least one, with those that open a text (`TextBounds.opening`).
    Raises BloomeryError if the model has no positions for so many tokens.
    """
    drawn = generate_together(decoder, [opening], max_new_tokens=max_new_tokens, sampling=sampling, ends=ends)
    return (token for (token,) in drawn if token is not None)


def generate_together(
    decoder: Decoder,
    openings: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> Iterator[tuple[int | None, ...]]:
    """Yield the next token id of each text until all have ended; None for one that ended before.

    openings: as in `generate`, of any lengths. The n-th text, counted from 0, draws with seed + n, so each
    is what it would be alone with that seed.
    Raises BloomeryError if the model has no positions for so many tokens.
    """
    longest = max(len(opening) for opening in openings)
    _refuse_too_long(decoder, longest + max_new_tokens - 1)
    return _drawn(decoder, openings, max_new_tokens=max_new_tokens, sampling=sampling, ends=ends)


def _refuse_too_long(decoder: Decoder, tokens: int) -> None:
    if decoder.positions is None:
        return
    longest = decoder.model.max_positions
    if tokens > longest:
        raise BloomeryError(
            f"Prompt and new tokens are {tokens}, but the model has {longest} learned positions.",
            remedy="Give a shorter prompt, or ask for fewer new tokens (--max-tokens).",
        )


@torch.inference_mode()
def _drawn(
    decoder: Decoder,
    openings: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> Iterator[tuple[int | None, ...]]:
    device = decoder.head_weight.device
    # Drawn on the CPU, so that a seed means the same on every device.
    generators = [torch.Generator().manual_seed(sampling.seed + place) for place in range(len(openings))]
    longest = max(len(opening) for opening in openings)
    lacking = [longest - len(opening) for opening in openings]
    cache = decoder.cache(
        batch=len(openings),
        capacity=longest + max_new_tokens,
        padding=torch.tensor(lacking, device=device) if any(lacking) else None,
    )
    fresh = [[0] * lack + list(opening) for lack, opening in zip(lacking, openings, strict=True)]
    writing = [True] * len(openings)
    for _ in range(max_new_tokens):
        hidden = decoder(torch.tensor(fresh, device=device), cache=cache)
        logits = decoder.logits(hidden[:, -1]).float().cpu()
        tokens = tuple(
            _draw(row, sampling, generator) if goes_on else None
            for row, generator, goes_on in zip(logits, generators, writing, strict=True)
        )
        yield tokens
        writing = [token is not None and token not in ends for token in tokens]
        if not any(writing):
            return
        fresh = [[0 if token is None else token] for token in tokens]


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return one token id drawn from fp32 logits [v]."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    logits, order = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k > 0:
        logits[sampling.top_k :] = float("-inf")
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1.0:
        # A token stays if those before it do not reach the share, so the likeliest always stays.
        probabilities[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = 0.0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A checkpoint and what belongs to it."""

    checkpoint: Path
    recipe: Recipe
    model: ResolvedModel
    tokenizer: Tokenizer
    tokenizer_path: Path
    bounds: TextBounds

    def decoder(
        self, *, device: torch.device, dtype: torch.dtype = torch.float32, by_layer: bool = False
    ) -> Decoder:
        """Return the decoder with the checkpoint's weights, rounded to `dtype`.

        by_layer: read each block from the file whenever it computes, and keep none (`blocks_from_file`).
        """
        if by_layer:
            return blocks_from_file(self.model, self.checkpoint, device=device, dtype=dtype)
        decoder = Decoder(self.model, device=device, dtype=dtype)
        fill(decoder, read_model(self.checkpoint))
        return decoder


def open_saved(path: Path, *, fallback: bool = False) -> OpenedModel:
    """Open what lies at `path`: a run directory (its newest checkpoint) or one of its checkpoints.

    fallback: of a run, take the newest checkpoint that is intact, which all bytes of the newest ones are read
    for.
    It reads recipe and tokenizer, not the weights. Raises CheckpointError if there is no checkpoint.
    """
    checkpoint = path if (path / MANIFEST).is_file() else _newest_of(path, fallback=fallback)
    rundir = RunDirectory(checkpoint.parent.parent)
    if not rundir.recipe.is_file():
        raise CheckpointError(
            f"{checkpoint} does not lie in a run directory: there is no {rundir.recipe}.",
            remedy="Give a checkpoint where its run left it, RUN/checkpoints/step-….",
        )
    recipe = load_recipe(str(rundir.recipe)).recipe
    tokenizer_path = tokenizer_in(rundir.data) or _tokenizer_elsewhere(recipe, rundir)
    tokenizer = load_tokenizer(tokenizer_path, end_of_document=recipe.data.end_of_document_token)
    model = resolve(
        recipe.model, vocabulary=tokenizer.vocabulary_size, sequence_length=recipe.data.sequence_length
    )
    return OpenedModel(
        checkpoint=checkpoint,
        recipe=recipe,
        model=model,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        bounds=text_bounds(companions_of(rundir), end_of_document=tokenizer.eod),
    )


def _tokenizer_elsewhere(recipe: Recipe, rundir: RunDirectory) -> Path:
    """Return the tokenizer that the recipe names, for a run that has none of its own."""
    if recipe.data.tokenizer == "train":
        raise DataError(
            f"{rundir.data} no longer holds the tokenizer that this run trained ({JSON_FILE}).",
            remedy=f"Bring {rundir.data / JSON_FILE} back from a backup, or start `bloomery train` with the "
            "run's recipe: it trains the same one again from the same text.",
        )
    return find_tokenizer(recipe.data.tokenizer)


def _newest_of(path: Path, *, fallback: bool) -> Path:
    rundir = RunDirectory(path)
    if not rundir.exists():
        raise CheckpointError(
            f"{path} is neither a run directory nor a checkpoint.",
            remedy="Give the directory of a run (runs/NAME), or one of its checkpoints/step-….",
        )
    saved = checkpoints(rundir)
    if not saved:
        raise CheckpointError(
            f"{path} has no checkpoints yet.",
            remedy="Let `bloomery train` run on: it saves as the recipe says.",
        )
    if not fallback:
        return saved[-1].directory
    intact = newest_intact(saved)
    if intact is None:
        raise CheckpointError(
            f"No checkpoint of {path} is intact.",
            remedy="See what is damaged with `bloomery ckpt verify`, and restore one from a backup.",
        )
    return intact.directory
