"""Loads the model of a run or checkpoint for the commands that compute with it, and their options."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.evaluate.open_checkpoint import OpenedModel
    from bloomery.model.decoder import Decoder

DTYPES = ("auto", "fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint, and its weights in a decoder."""

    saved: OpenedModel
    decoder: Decoder


def add_loading(options: ArgumentParser) -> None:
    """Add `--dtype` and `--by-layer`, which `load_saved` takes."""
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of the weights (default: auto, bf16 on a GPU that multiplies it and fp32 elsewhere)",
    )
    options.add_argument(
        "--by-layer",
        action="store_true",
        help="read each layer from the file whenever it computes (also done where memory does not suffice)",
    )


def load_saved(path: Path, *, dtype: str, by_layer: bool, fallback: bool = False) -> LoadedModel:
    """Open a run or checkpoint and load its weights, on the GPU where there is one.

    dtype: one of DTYPES.
    fallback: take the newest intact checkpoint where the newest is damaged.
    by_layer: read blocks when they compute; it is done too, and told, where memory is too small.
    """
    import torch

    from bloomery.evaluate.open_checkpoint import open_saved, wants_layers
    from bloomery.parallel.precision import DTYPES as PRECISIONS
    from bloomery.parallel.precision import resolve_precision

    saved = open_saved(path, fallback=fallback)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto":
        dtype = resolve_precision("auto", device) if device.type == "cuda" else "fp32"
    kind = PRECISIONS[dtype]
    if not by_layer and wants_layers(saved.model, device=device, dtype=kind):
        by_layer = True
        print("the model does not fit into memory: layers are read from the file each time", file=sys.stderr)
    return LoadedModel(saved=saved, decoder=saved.decoder(device=device, dtype=kind, by_layer=by_layer))
