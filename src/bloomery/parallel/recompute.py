"""Activation recomputation (activation checkpointing) of blocks, and what torch.compile compiles of them.

'full' keeps only each block's input (Chen et al. 2016); 'selective' computes only scores and weights of
attention again (Korthikanti et al. 2022, section 5); 'elementwise' keeps what matmuls, fused attention and
collectives return, and computes norms, activations, rotations and dropout again, which cost a pass over
memory; 'mlp' keeps the same of attention, and of the MLP only its input. Fused attention keeps no scores, so
the MLP's wide tensors are most of what a block keeps, and cost the fewest operations for each byte. No random
state is saved: dropout masks are a function of their address (`model/dropout.py`).

torch.compile compiles each block by itself, or forward and loss as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bloomery.config.parallel import ParallelSection
from bloomery.model.decoder import Block, Decoder
from bloomery.model.layers import Linear
from bloomery.parallel.mesh import Mesh
from bloomery.torch_private import allow_compilations

MOST_PHASES = 64
"""The micro-batches, precisions and recomputations that one process may compile for: beyond torch's own limit
of 8 a graph that must be whole ends the run.
"""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def compile_by_block(decoder: Decoder, *, mesh: Mesh, parallel: ParallelSection) -> bool:
    """Return whether each block is compiled by itself, with its collectives.

    torch's limit on compilations is raised to the number that blocks and phases need.

    A block's backward then gives its gradients before that of the block before it begins, so that their sum
    over data-parallel ranks overlaps the backward, and its weights can be gathered and freed around it.
    Blocks of equal shapes share their code. On GPUs every layout compiles by block: a matmul fills the
    device for itself, and the gradients of a block are added to the fp32 ones and freed before those of the
    next exist. On CPUs one data-parallel rank with working weights and no tensor parallelism compiles forward
    and loss as a whole.
    """
    allow_compilations(max(4 * len(decoder.blocks), MOST_PHASES))
    is_one_part = mesh.tensor.degree == mesh.data.degree == 1 and parallel.working == "kept"
    return not is_one_part or mesh.device.type != "cpu"


def compiled_function(
    function: Callable[_Arguments, _Result], *, device: torch.device
) -> Callable[_Arguments, _Result]:
    """Return the function as one compiled graph, for arguments of one shape at a time.

    device: where it computes. On CPUs every operation's result is rounded to its own dtype, as in eager code.
    The compiler's own choice is to keep in fp32 what it fuses. Which values these are depends on what is
    compiled together: in 16 and 8 bits a model compiled as a whole then differs from one compiled by block.
    """
    options: dict[str, Any] | None = {"emulate_precision_casts": True} if device.type == "cpu" else None
    return torch.compile(function, dynamic=False, fullgraph=True, options=options)


def set_recompute(
    decoder: Decoder, modes: Mapping[int, str], *, splits_backward: bool, compiles: bool = False
) -> None:
    """Set what each block computes again in its backward.

    modes: 'none', 'elementwise', 'selective', 'mlp' or 'full', by the block's index.
    splits_backward: whether the pipeline schedule runs the backward by inputs and by weights apart; the
        configuration refuses 'elementwise' and 'mlp' then.
    compiles: whether each block is compiled by itself, with what it computes again.
    """
    wrap = _checkpointed_once if splits_backward else _checkpointed
    for module in decoder.blocks:
        block = cast(Block, module)
        for method in ("forward", "mix", "expand"):
            _unwrap(block, method)
        _unwrap(block.attention, "attend")
        _round_apart(block, wanted=False)
        # `forward` is replaced, not hooked: hooks on a block, such as those that gather its weights, stay
        # outside of what is computed again, and outside of what is compiled.
        if modes[block.index] == "full":
            block.__dict__["forward"] = wrap(block.forward)
        elif modes[block.index] == "elementwise":
            block.__dict__["forward"] = _keeping_products(block.forward)
            _round_apart(block, wanted=compiles)
        elif modes[block.index] == "mlp":
            block.__dict__["mix"] = _keeping_products(block.mix)
            block.__dict__["expand"] = wrap(block.expand)
            _round_apart(block.attention, wanted=compiles)
        elif modes[block.index] == "selective":
            block.attention.__dict__["attend"] = wrap(block.attention.attend)
        if compiles:
            block.__dict__["forward"] = compiled_function(block.forward, device=decoder.device)


def _round_apart(module: nn.Module, *, wanted: bool) -> None:
    """Have linear layers round inputs to 8 bits by an operator for each direction, or by one for both.

    Where compiled code keeps a product and rounds its input again, the forward needs the one direction, and
    the backward the other. Eager code would make both in each, by two passes over the input.
    """
    for part in module.modules():
        if isinstance(part, Linear):
            part.rounds_apart = wanted


def _unwrap(module: nn.Module, method: str) -> None:
    module.__dict__.pop(method, None)


def _checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    return call


_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def _keeping_products(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return checkpoint(
            function,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, _kept_or_recomputed),
        )

    return call


def _kept_or_recomputed(_context: Any, operator: Any, *_arguments: Any, **_keywords: Any) -> CheckpointPolicy:
    """Return what torch asks for each operator of a block: whether its result is kept for the backward."""
    namespace, name = operator.name().split("::")
    is_product = namespace == "aten" and name.split(".")[0] in _PRODUCTS
    # What a collective returns is kept, and waiting for it again costs nothing. Rounding to 8 bits is a pass
    # over memory.
    is_ours = namespace == "bloomery" and not name.startswith("fp8_")
    is_ours |= namespace == "symm_mem"  # a product and its exchange in one
    is_ours |= namespace == "_c10d_functional" and name != "wait_tensor"
    return CheckpointPolicy.MUST_SAVE if is_product or is_ours else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `_checkpointed`, but computed again once, however often backward runs over the graph.

    torch's checkpoint computes again in each pass in which gradients by weights are made, and torch makes one
    such pass for each matrix of a block.
    """

    def call(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments)
        saved = _SavedTensors(function, arguments)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return function(*arguments)

    return call


class _SavedTensors:
    """What the backward of one call needs: computed when it is first asked for, and then kept.

    Only the graph holds this object, so the tensors are freed when the last backward has freed the graph.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._count = 0
        self._tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        if not self._tensors:
            self._compute()
        return self._tensors[number]

    def _compute(self) -> None:
        tensors: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            tensors.append(tensor.detach())
            return tensors[-1]

        arguments = [
            argument.detach().requires_grad_(argument.requires_grad)
            if isinstance(argument, Tensor)
            else argument
            for argument in self._arguments
        ]
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            self._function(*arguments)
        assert len(tensors) == self._count, "a block saves the same tensors each time"
        self._tensors, self._arguments = tensors, ()
