"""The steps of the demo that compute something. Imported when the demo runs: they load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bloomery.cli.bars import data_bar
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.batches import held_out_batches
from bloomery.data.indexed import IndexedDataset
from bloomery.data.prepare import Prepared, prepare
from bloomery.data.sources import documents_of, is_held_out
from bloomery.errors import DataError
from bloomery.evaluate.compression import compress, xz_bits_per_byte
from bloomery.evaluate.generate import Sampling, generate
from bloomery.evaluate.saved import open_saved
from bloomery.events.rundir import RunDir

EVALUATION_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The model and xz on the held-out files."""

    bits_per_byte: float
    xz_bits_per_byte: float

    @property
    def told(self) -> str:
        """The comparison as a person would say it."""
        ratio = self.bits_per_byte / self.xz_bits_per_byte
        return (
            f"   held-out files: {self.bits_per_byte:.3f} bits a byte; xz -9e makes {self.xz_bits_per_byte:.3f}. "
            f"That is {ratio:.3f} of xz's size."
        )


def prepare_text(recipe: Recipe, rundir: RunDir, *, shown: bool) -> Prepared:
    """The tokenizer and the datasets, where the training will look for them."""
    rundir.create()
    with data_bar(shown=shown) as progress:
        prepared = prepare(recipe.data, rundir.data, progress=progress)
    if not prepared.held_out:
        raise DataError(
            "No file of this Python's standard library is held out, so nothing can be compared.",
            remedy="Use a Python whose standard library is on disk as .py files.",
        )
    return prepared


def compare_with_xz(recipe: Recipe, prepared: Prepared, rundir: RunDir) -> Compression:
    """Bits per byte of the held-out files: ours over every token, xz over one concatenation in path order."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = open_saved(rundir.path).decoder(device=device)
    (held_out,) = prepared.held_out
    batches = held_out_batches(
        IndexedDataset(held_out.prefix),
        sequence_length=recipe.data.sequence_length,
        rows=EVALUATION_ROWS,
        eod=prepared.end_of_document_id,
    )
    ours = compress(decoder, batches, text_bytes=held_out.text_bytes)
    texts = [
        document.text.encode()
        for document in documents_of(recipe.data)
        if is_held_out(document.key, every=recipe.data.held_out_every)
    ]
    assert sum(len(text) for text in texts) == held_out.text_bytes, "xz sees the bytes that we count"
    return Compression(bits_per_byte=ours.bits_per_byte, xz_bits_per_byte=xz_bits_per_byte(texts))


def sample(rundir: RunDir, *, prompt: str, max_new_tokens: int = 160) -> str:
    """A text that the model wrote after `prompt`, the prompt included."""
    saved = open_saved(rundir.path)
    decoder = saved.decoder(device=torch.device("cpu"))
    drawn = generate(
        decoder,
        saved.tokenizer.encode(prompt),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=0.6, top_p=0.95),
        eod=saved.tokenizer.eod,
    )
    ids = [token for token in drawn if token != saved.tokenizer.eod]
    return prompt + saved.tokenizer.decode(ids)
