"""Opens a checkpoint of a run with its recipe and tokenizer, and loads its weights, at once or by block.

`open_saved` finds a run's newest checkpoint or opens a given one; `OpenedModel.decoder` loads its weights.
`blocks_from_file` is for a model that is larger than memory: each block is read when it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from bloomery.checkpoint.load.loader import read_model
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import Tokenizer, load_tokenizer
from bloomery.errors import BloomeryError
from bloomery.evaluate.saved_files import SavedFiles, find_saved
from bloomery.interchange.generation_files import TextBounds, generation_files_of, text_bounds
from bloomery.interchange.huggingface import fill
from bloomery.model.decoder import Decoder
from bloomery.model.logical_parameters import LogicalParameter, logical_parameters
from bloomery.model.shape import ResolvedModel, logical_shapes, resolve
from bloomery.plan.main_memory import available_memory_bytes

_ROOM = 0.8
"""The share of the free memory that weights may take."""


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
    return open_model(find_saved(path, fallback=fallback))


def open_model(files: SavedFiles) -> OpenedModel:
    """Return the model that files of a run describe."""
    recipe, rundir = files.recipe, files.rundir
    tokenizer = load_tokenizer(files.tokenizer, end_of_document=recipe.data.end_of_document_token)
    model = resolve(
        recipe.model, vocabulary=tokenizer.vocabulary_size, sequence_length=recipe.data.sequence_length
    )
    return OpenedModel(
        checkpoint=files.checkpoint,
        recipe=recipe,
        model=model,
        tokenizer=tokenizer,
        tokenizer_path=files.tokenizer,
        bounds=text_bounds(generation_files_of(rundir), end_of_document=tokenizer.eod),
    )


def trained_window(saved: OpenedModel) -> int:
    """Return how many tokens the model saw at once in its training."""
    return min(saved.recipe.data.sequence_length, saved.model.max_positions)


def window_of(saved: OpenedModel, wanted: int | None) -> int:
    """Return how many tokens the model shall see at once: `wanted`, or as many as in its training.

    Rotary positions and ALiBi have no end. Raises BloomeryError where learned positions are too few.
    """
    positions = saved.model.max_positions
    if wanted and wanted > positions and saved.model.section.position == "learned":
        raise BloomeryError(
            f"A window of {wanted:,} tokens does not fit the model's {positions:,} learned positions.",
            remedy=f"Give at most {positions:,} (--window).",
        )
    return wanted or trained_window(saved)


def blocks_from_file(
    model: ResolvedModel, checkpoint: Path, *, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """Return a decoder that holds embedding, norms and head, and one block at a time.

    Each block's weights are read and verified before its forward, and freed after it. So memory holds what
    is outside of the blocks, one block, and one tensor of the file in fp32; a token takes as long as the file
    takes to read.
    """
    decoder = Decoder(model, device=torch.device("meta"), dtype=dtype)
    parameters = list(logical_parameters(decoder))
    outside = [logical for logical in parameters if not logical.name.startswith("blocks.")]
    for name, part in decoder.named_children():
        if name != "blocks":
            part.to_empty(device=device)
    _fill_some(decoder, outside, checkpoint)
    for block in decoder.blocks:
        own = [item for item in parameters if item.name.startswith(f"blocks.{block.index}.")]
        block.register_forward_pre_hook(_reading(decoder, own, checkpoint, device))
        block.register_forward_hook(_freeing)
    return decoder


def must_load_by_block(model: ResolvedModel, *, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the weights of a model leave too little of the device's free memory to hold all of them."""
    parameters = sum(torch.Size(shape).numel() for shape in logical_shapes(model).values())
    return parameters * dtype.itemsize > _ROOM * free_memory_bytes(device)


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of a device; of the CPU what its machine has and the control group allows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    of_machine: int = psutil.virtual_memory().available
    allowed = available_memory_bytes()
    return of_machine if allowed is None else min(of_machine, allowed)


def _reading(
    decoder: Decoder, own: list[LogicalParameter], checkpoint: Path, device: torch.device
) -> Callable[[nn.Module, object], None]:
    def read(block: nn.Module, inputs: object) -> None:
        block.to_empty(device=device)
        _fill_some(decoder, own, checkpoint)

    return read


def _freeing(block: nn.Module, inputs: object, output: Tensor) -> None:
    block.to("meta")


@torch.no_grad()
def _fill_some(decoder: Decoder, some: list[LogicalParameter], checkpoint: Path) -> None:
    """Fill some of the decoder's tensors from the checkpoint. to_empty may have replaced the parameters."""
    now = {logical.name: logical for logical in logical_parameters(decoder)}
    names = [logical.name for logical in some]
    for name, tensor in read_model(checkpoint, names=names):
        now[name].tensor.copy_(tensor)
