"""Fills a new run's parameters from a transformers directory, a run, or a checkpoint (`init.from`).

`described_weights.py` says what they are; `load_initial_weights` copies the boxes that a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from bloomery.checkpoint.format.state import StateEntry
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.find import from_home
from bloomery.interchange.described_weights import is_run_or_checkpoint, newest_checkpoint_in
from bloomery.interchange.huggingface import MatchedModel, open_model
from bloomery.interchange.tensor_matching import Match, read_match, read_rows
from bloomery.interchange.weight_files import check_checksums
from bloomery.model.shape import ResolvedModel

_PREFIX = "model."


def load_initial_weights(
    place: str, entries: Iterable[StateEntry], *, model: ResolvedModel, ranks: Ranks
) -> str:
    """Copy the weights at `place` into the boxes of `entries`, and return what they were, in words.

    Each rank reads the tensors that it holds boxes of, one at a time; plain matrices by their rows. From a
    checkpoint of ours, bytes that several ranks want are read once.

    entries: fp32 masters, named model.… as in checkpoints. model: the recipe's. Collective over `ranks`.
    Raises CheckpointError on every rank for weights that are damaged, or not of this model.
    """
    directory = from_home(place)
    wanted = tuple(entries)
    if is_run_or_checkpoint(directory):
        checkpoint = Path(ranks.run_on_first(lambda: str(newest_checkpoint_in(directory))))
        load_checkpoint(checkpoint, wanted, parts={"model"}, ranks=ranks)
        return str(checkpoint)
    ranks.poll_on_first(lambda: check_checksums(directory))
    ranks.poll_on_all(lambda: _fill_from_transformers(directory, wanted, model=model))
    return str(directory)


def _fill_from_transformers(directory: Path, wanted: Sequence[StateEntry], *, model: ResolvedModel) -> None:
    """Fill the boxes of this rank. Raises CheckpointError."""
    opened = open_model(directory, section=model.section)
    boxes: dict[str, list[StateEntry]] = {}
    for entry in wanted:
        boxes.setdefault(entry.name.removeprefix(_PREFIX), []).append(entry)
    for match in opened.matched:
        own_boxes = {part: boxes[part] for part in match.entry.parts if part in boxes}
        if own_boxes:
            _fill_match(match, own_boxes, opened)


@torch.no_grad()
def _fill_match(match: Match, held: Mapping[str, Sequence[StateEntry]], opened: MatchedModel) -> None:
    """Copy one stored tensor into the boxes of its logical tensors.

    held: this rank's boxes of each logical tensor.
    """
    if match.entry.layout == "plain" and not opened.files.is_coded(match.stored):
        for entry in held[match.entry.parts[0]]:
            first = entry.box.offset[0]
            rows = read_rows(match, files=opened.files, start=first, stop=first + entry.box.shape[0])
            entry.tensor.copy_(rows[(slice(None), *entry.box.window[1:])])
        return
    parts = dict(read_match(match, model=opened.resolved, files=opened.files))
    for part, entries in held.items():
        for entry in entries:
            entry.tensor.copy_(parts[part][entry.box.window])
