"""Wraps the private functions of torch that this package calls, each under a name of its own.

torch promises nothing of names with an underscore. They stand only here, so that who moves to another
version of torch reads one file; `tests/test_torch_private.py` calls each and says which versions were tried.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

# These have public names too, torch.distributed.Store and so on, which torch's type hints leave out.
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore

# The versions that each function below was run with: 2.11 on a GPU, 2.13 on CPUs.
TRIED_VERSIONS = ("2.11", "2.13")

_X86 = ("x86_64", "AMD64")


def has_bf16_matmul() -> bool:
    """Return whether the CPU has units for products of bf16 matrices.

    oneDNN says that it supports bf16 on every x86 with AVX-512, also where it emulates it: there a product
    takes five times as long as one in fp32.
    """
    if platform.machine() in _X86:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_fp16_matmul() -> bool:
    """Return whether the CPU has units for products of fp16 matrices; of x86 those with AMX-FP16 count."""
    if platform.machine() in _X86:
        return torch.cpu._is_amx_fp16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def fused_adamw(
    master: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    updates: Tensor,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
    gradient_divisor: Tensor,
    is_refused: Tensor,
) -> None:
    """Make one update of AdamW in place, in one kernel (`torch.optim.AdamW(fused=True)` calls the same).

    master, gradient, moments: flat, of one size.
    updates: which update this is, counted from 1, one number in fp32; it is read, not counted up.
    gradient_divisor: one number by which the kernel divides the gradient first.
    is_refused: 1.0 leaves everything as it was, 0.0 updates: decided on the device, without waiting for it.
    """
    torch._fused_adamw_(
        [master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [updates],
        lr=learning_rate,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=gradient_divisor,
        found_inf=is_refused,
    )


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each of at least one tensor, [n], with few kernels for many tensors."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def scale_tensors(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply each tensor with its own factor, one number, in place, with few kernels for many tensors."""
    torch._foreach_mul_(list(tensors), list(factors))


def scaled_matmul(
    left: Tensor,
    right: Tensor,
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    is_fast: bool,
) -> Tensor:
    """Return (left × its scales) @ (right × its scales), computed by units for 8 bits.

    left: float8 [m, k], by rows. right: float8 [k, n], by columns. k and n: multiples of 16.
    scales: fp32, one number each; [m, 1] and [1, n]; [m, k/128] by columns with [k/128, n] by rows or
        [k/128, n/128] by columns; or E8M0 codes of 32 elements each, flat, in the order of cuBLAS.
    is_fast: whether Hopper's units add up in their own registers, with about 14 bits, instead of in fp32.
    """
    return torch._scaled_mm(
        left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype, use_fast_accum=is_fast
    )


# Collectives that torch.compile keeps within the graph, by the name of their process group. Each returns
# at once with a tensor whose values are there after `wait_for`.


def begin_all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    """Begin to reduce `x` over a group. operation: "sum" or "max"."""
    return cast(Tensor, torch.ops._c10d_functional.all_reduce(x, operation, group))


def begin_all_gather(x: Tensor, degree: int, group: str) -> Tensor:
    """Begin to join the `x` of `degree` ranks along the first dimension."""
    return cast(Tensor, torch.ops._c10d_functional.all_gather_into_tensor(x, degree, group))


def begin_reduce_scatter(x: Tensor, degree: int, group: str) -> Tensor:
    """Begin to sum `x` over `degree` ranks; each gets its part of the first dimension."""
    return cast(Tensor, torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", degree, group))


def wait_for(x: Tensor) -> Tensor:
    """Return the result of a collective that was begun."""
    return cast(Tensor, torch.ops._c10d_functional.wait_tensor(x))


# Products whose exchange overlaps them: torch divides each by ranks, and copies one rank's part through
# symmetric memory while it multiplies another's. Defined once `open_symmetric_memory` has been called.


def open_symmetric_memory(group: str) -> None:
    """Let the ranks of a group on this rank's GPU map each other's memory. Collective over the group.

    group: torch's name of the process group.
    Raises RuntimeError where they cannot: on several nodes, without peer access, or on one GPU together.
    """
    # Imported here because it defines operators, which only overlapped products need.
    from torch.distributed._symmetric_memory import get_symm_mem_workspace

    get_symm_mem_workspace(cast(Any, group), min_size=1)  # newer hints have a type of its own for names


def gather_and_multiply(x: Tensor, right: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return the `x` of all ranks joined along dimension 1, and the product of that with `right`.

    x: [b, s/tp, k]. right: [k, n]. Returns [b, s, k] and [b, s, n], stored with s outermost.
    """
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [right], 1, group)
    return gathered, product


def multiply_and_scatter(x: Tensor, right: Tensor, group: str) -> Tensor:
    """Return the sum over ranks of `x` @ `right`, at this rank's part of dimension 1.

    x: [b, s, k]. right: [k, n]. Returns [b, s/tp, n].
    """
    return cast(Tensor, torch.ops.symm_mem.fused_matmul_reduce_scatter(x, right, "sum", 1, group))


def allow_compilations(count: int) -> None:
    """Let torch.compile compile a function at least `count` times before it gives up on it."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    # Loading the compiler takes seconds, so a process that compiles nothing is not made to.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def can_split_backward() -> bool:
    """Return whether `backward_of_input` and `backward_of_weights` can split a backward here.

    torch begins the second half at a node of the graph, and asks it for what it takes. In 2.11 nodes of
    functions that Python defines, such as the loss's, do not answer.
    """
    with torch.enable_grad():
        result = _Unchanged.apply(torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    try:
        return bool(result.grad_fn._input_metadata)
    except RuntimeError:
        return False


class _Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return gradient


def backward_of_input(
    root: Tensor, output_gradient: Tensor | None, x: Tensor, parameters: Iterator[nn.Parameter]
) -> tuple[Tensor, Any]:
    """Compute only the gradient of `x`, and return it with what `backward_of_weights` needs for the rest."""
    # Imported here because it takes seconds to load, and only zero-bubble schedules split a backward.
    from torch.distributed.pipelining._backward import stage_backward_input

    output_gradients = None if output_gradient is None else [output_gradient]
    (gradient,), groups = stage_backward_input([root], output_gradients, [x], parameters)
    assert gradient is not None, "a stage depends on its input"
    return gradient, groups


def backward_of_weights(parameters: Sequence[nn.Parameter], groups: Any) -> Callable[[], object]:
    """Return what adds the gradients of `parameters` that `backward_of_input` left out."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    return lambda: stage_backward_weight(iter(parameters), groups)


def write_memory_snapshot(path: Path) -> None:
    """Write a list of what the CUDA allocator holds, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def flight_record() -> bytes:
    """Return what NCCL's flight recorder holds, as its dumps have it; empty where torch has no NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return b"" if dump is None else cast(bytes, dump())
