"""What torch.compile compiles: each block by itself, or forward and loss as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from bloomery.config.parallel import ParallelSection
from bloomery.model.decoder import Decoder
from bloomery.parallel.mesh import Mesh
from bloomery.torch_private import allow_compilations

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def compile_by_block(decoder: Decoder, *, mesh: Mesh, parallel: ParallelSection) -> bool:
    """Return whether each block is compiled by itself, with its collectives; allow for so many compilations.

    A block's backward then gives its gradients before that of the block before it begins, so that their sum
    over data-parallel ranks overlaps the backward, and its weights can be gathered and freed around it.
    Blocks of equal shapes share their code. On GPUs every layout compiles by block: a product fills the
    device for itself, and the gradients of a block are added to the fp32 ones and freed before those of the
    next exist. On CPUs one data-parallel rank with working weights and no tensor parallelism compiles forward
    and loss as a whole.
    """
    is_one_part = mesh.tensor.degree == mesh.data.degree == 1 and parallel.working == "kept"
    if is_one_part and mesh.device.type == "cpu":
        return False
    allow_compilations(4 * len(decoder.blocks))
    return True


def compiled_function(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return the function as one compiled graph, for arguments of one shape at a time."""
    return torch.compile(function, dynamic=False, fullgraph=True)
