"""Compares the logits of an exported model, loaded by transformers from its files, with ours.

Large models are compared in a separate process, whose memory is freed at its end. If both models fit in
memory, they run whole. Otherwise both run block by block, with one block of each in memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bloomery.checkpoint.load.loader import read_model
from bloomery.config.model import ModelSection
from bloomery.errors import ExportRefused
from bloomery.interchange.directories import read_object
from bloomery.interchange.families import hf_tensors
from bloomery.interchange.families.family import HfTensor
from bloomery.interchange.weight_files import open_weights
from bloomery.model.decoder import Decoder
from bloomery.model.logical_parameters import logical_parameters
from bloomery.model.shape import ResolvedModel, logical_shapes, resolve

CompareMethod = Literal["auto", "whole", "blocks"]
TIMEOUT_S = 24 * 3600.0
_RELATIVE_TOLERANCE = 1e-5
_PROBE = (2, 64)
_MEMORY_SHARE = 0.6
"""The part of the free memory that both whole models may take."""
SMALL_BYTES = 128 << 20
"""The bytes of fp32 weights up to which a comparison in this process is quicker than in a new one."""


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """The result of a comparison of logits.

    largest: the largest difference of two logits.
    tolerance: the difference that rounding explains.
    where: where they differ most, and what that usually means.
    way: how they were compared.
    """

    largest: float
    tolerance: float
    where: str
    way: str


def check_logits(
    model: ResolvedModel,
    checkpoint: Path,
    directory: Path,
    *,
    dtype: torch.dtype,
    way: CompareMethod = "auto",
    small_bytes: int = SMALL_BYTES,
) -> LogitsCheck:
    """Compare the model saved at `checkpoint`, rounded to `dtype`, with the files in `directory`.

    way: how to compare; 'auto' chooses by size.
    small_bytes: the size up to which models are compared in this process.
    Raises ExportRefused if transformers cannot load the files or computes something else.
    """
    if _weight_bytes(model) <= small_bytes:
        check = _compare(model, checkpoint, directory, dtype=dtype, way=way)
    else:
        check = _compared_elsewhere(model, checkpoint, directory, dtype=dtype, way=way)
    if not check.largest <= check.tolerance:
        raise ExportRefused(
            f"The exported model's logits differ from ours by up to {check.largest:.3g} "
            f"(tolerated: {check.tolerance:.1g}), {check.where}",
            remedy="Nothing was kept. Please report this with the run's recipe.toml.",
        )
    return check


def _compared_elsewhere(
    model: ResolvedModel, checkpoint: Path, directory: Path, *, dtype: torch.dtype, way: CompareMethod
) -> LogitsCheck:
    asked = {
        "section": asdict(
            replace(model.section, vocabulary=model.vocabulary, max_positions=model.max_positions)
        ),
        "checkpoint": str(checkpoint.absolute()),
        "directory": str(directory.absolute()),
        "dtype": str(dtype).removeprefix("torch."),
        "way": way,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bloomery.interchange.logits_check"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise ExportRefused(
            f"Comparing the logits took longer than {TIMEOUT_S / 3600:.0f} hours.", remedy="Nothing was kept."
        ) from late
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with status {done.returncode}"]
        raise ExportRefused(
            f"The exported model could not be compared with ours: {last[0]}",
            remedy="Nothing was kept. Where memory was short, close other programs; else please report it.",
        )
    return LogitsCheck(**json.loads(done.stdout.splitlines()[-1]))


def load_with_transformers(directory: Path) -> Any:  # Any: a transformers model
    """Return the fp32 model that transformers makes of only the files in `directory`."""
    with _offline():
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # its bar would appear in the middle of our output
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    return model.float().eval()


@contextmanager
def _offline() -> Iterator[None]:
    """Forbid the hub during the block, because transformers asks it for other forms of a file that it has."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


@torch.no_grad()
def _compare(
    model: ResolvedModel, checkpoint: Path, directory: Path, *, dtype: torch.dtype, way: CompareMethod
) -> LogitsCheck:
    chosen = way if way != "auto" else _way_that_fits(model)
    compare = _whole if chosen == "whole" else _by_blocks
    own, their, note = compare(model, checkpoint, directory, dtype)
    if own.shape != their.shape:
        raise ExportRefused(
            f"The exported model's logits are {tuple(their.shape)}, ours {tuple(own.shape)}.",
            remedy="Nothing was kept. Check vocab_size in the exported configuration.",
        )
    difference = (own - their).abs().nan_to_num(nan=float("inf"))
    tolerance = _RELATIVE_TOLERANCE * max(1.0, float(own.abs().max()))
    largest = float(difference.max())
    where = "" if largest <= tolerance else note or _where(difference, tolerance)
    return LogitsCheck(largest=largest, tolerance=tolerance, where=where, way=chosen)


def _way_that_fits(model: ResolvedModel) -> str:
    return "whole" if 2 * _weight_bytes(model) < _MEMORY_SHARE * _free_memory_bytes() else "blocks"


def _weight_bytes(model: ResolvedModel) -> int:
    return 4 * sum(torch.Size(shape).numel() for shape in logical_shapes(model).values())


def _free_memory_bytes() -> float:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return float("inf")
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(lines["MemAvailable"].split()[0]) * 1024


def _whole(
    model: ResolvedModel, checkpoint: Path, directory: Path, dtype: torch.dtype
) -> tuple[Tensor, Tensor, str]:
    tokens = _probe_tokens(model)
    ours = Decoder(model, device=torch.device("cpu"), dtype=torch.float32)
    _fill(ours, checkpoint, dtype, names=list(logical_shapes(model)))
    own = ours.logits(ours(tokens))
    del ours
    return own, load_with_transformers(directory)(tokens).logits, ""


def _by_blocks(
    model: ResolvedModel, checkpoint: Path, directory: Path, dtype: torch.dtype
) -> tuple[Tensor, Tensor, str]:
    """Compute both logits with one block of each model in memory, into which block after block is loaded."""
    tokens, own_model, their_model = _probe_tokens(model), _one_block(model), _one_hf_block(directory)
    shared = [name for name in logical_shapes(model) if not name.startswith("blocks.")]
    _fill(own_model, checkpoint, dtype, names=shared)
    entries = tuple(hf_tensors(model, _family(directory)))
    _fill_theirs(
        their_model, directory, [e for e in entries if not e.parts[0].startswith("blocks.")], block=0
    )
    own_block, their_block = own_model.blocks[0], _block_list(their_model)[0]
    own_hidden: Tensor | None = None
    their_hidden: Tensor | None = None
    note, own_logits, their_logits = "", torch.empty(0), torch.empty(0)
    for block in range(model.section.layers):
        prefix = f"blocks.{block}."
        names = [name for name in logical_shapes(model) if name.startswith(prefix)]
        _fill(own_model, checkpoint, dtype, names=names, prefix=prefix)
        _fill_theirs(
            their_model, directory, [e for e in entries if e.parts[0].startswith(prefix)], block=block
        )
        own_logits, own_hidden = _through(own_block, own_hidden, lambda: own_model.logits(own_model(tokens)))
        their_logits, their_hidden = _through(their_block, their_hidden, lambda: their_model(tokens).logits)
        apart = float((own_hidden - their_hidden).abs().max())
        if not note and not apart <= _RELATIVE_TOLERANCE * max(1.0, float(own_hidden.abs().max())) * 10:
            note = f"and block {block} is the first whose output does ({apart:.3g})."
    return own_logits, their_logits, note


def _through(block: nn.Module, hidden: Tensor | None, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Run a model of one block with `hidden` entering it, and return its logits and what left the block."""
    left: list[Tensor] = []

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs if hidden is None else (hidden, *inputs[1:])

    def leave(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        left.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        logits = run()
    finally:
        for hook in hooks:
            hook.remove()
    return logits, left[0]


def _one_block(model: ResolvedModel) -> Decoder:
    section = replace(model.section, layers=1)
    return Decoder(replace(model, section=section), device=torch.device("cpu"), dtype=torch.float32)


def _one_hf_block(directory: Path) -> Any:  # Any: a transformers model
    with _offline():
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    config.num_hidden_layers = 1
    return AutoModelForCausalLM.from_config(config).float().eval()


def _block_list(model: Any) -> nn.ModuleList:
    """Return the only list of blocks of a transformers model."""
    (blocks,) = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return blocks


def _family(directory: Path) -> str:
    return str(read_object(directory / "config.json")["model_type"])


def _fill(
    decoder: Decoder, checkpoint: Path, dtype: torch.dtype, *, names: Sequence[str], prefix: str = "blocks.0."
) -> None:
    """Load logical tensors; those whose names begin with `prefix` go into the first block."""
    places = {logical.name: logical.tensor for logical in logical_parameters(decoder)}
    for name, tensor in read_model(checkpoint, names=names):
        place = f"blocks.0.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
        places[place].copy_(tensor.to(dtype))


def _fill_theirs(model: Any, directory: Path, entries: Sequence[HfTensor], *, block: int) -> None:
    """Load the files' tensors into a transformers model of one block, with block number `block` as that
    block.
    """
    files = open_weights(directory)
    places = dict(model.named_parameters(remove_duplicate=False))
    for entry in entries:
        places[entry.name.replace(f".{block}.", ".0.", 1)].data.copy_(files.read(entry.name))


def _probe_tokens(model: ResolvedModel) -> Tensor:
    """Return tokens from the whole vocabulary, the same each time."""
    rows, length = _PROBE
    if model.section.position == "learned":
        length = min(length, model.max_positions)
    spread = torch.arange(rows * length) * 2654435761 % 2**32
    return (spread % model.vocabulary).view(rows, length)


def _where(difference: Tensor, tolerance: float) -> str:
    """Return where the logits differ, and what that usually means."""
    worst = difference.amax(dim=(0, 2))  # over the batch and the vocabulary: [s]
    first = int((~(worst <= tolerance)).nonzero()[0])
    place = f"most at position {int(worst.argmax())} of the probe, first at position {first}. "
    if first == 0:
        return (
            place + "A first token attends only to itself, so the likely cause is the activation, "
            "a norm's epsilon, or a wrongly mapped weight."
        )
    return place + "The first tokens agree, so the likely cause is how positions enter attention."


def main() -> None:
    """Read one comparison as JSON from standard input, and write its result as JSON to standard output."""
    asked = json.load(sys.stdin)
    section = ModelSection(**asked["section"])
    check = _compare(
        resolve(section, vocabulary=int(section.vocabulary), sequence_length=1),
        Path(asked["checkpoint"]),
        Path(asked["directory"]),
        dtype=getattr(torch, asked["dtype"]),
        way=asked["way"],
    )
    sys.stdout.write(json.dumps(asdict(check)) + "\n")


if __name__ == "__main__":
    main()
