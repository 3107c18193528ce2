"""The loss of logits that are split along the vocabulary, on GPUs: their gradient replaces them.

Legend: n tokens, h hidden, tp degree of the group, v/tp rows of the head that a rank stores, with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bloomery import torch_private
from bloomery.model.products import add_product

Gather = Callable[[Tensor], Callable[[], Tensor]]
"""Begins to collect a tensor of each rank, and returns what waits for them and returns them [tp, …]."""


def split_loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float,
    chunk: int,
    rows: range,
    group: str,
    degree: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the summed loss by hidden states and weight, and its two terms, fp32 scalars.

    hidden: [n, h]; its gradient is this rank's summand. weight: [v/tp, h], whose gradient is fp32.
    targets: int64 [n], where a negative one counts nothing. chunk: tokens of one product; logits of two
    chunks exist at one time. rows: the rows of the vocabulary that this rank holds.
    group, degree: torch's name of the process group, and the number of its ranks.
    Collective over the group, which gathers two numbers a token, once for each chunk.
    """
    by_hidden, by_weight, cross_entropy, z = torch.ops.bloomery.split_loss_and_gradients(
        hidden, weight, targets, z_loss, chunk, rows.start, rows.stop, group, degree
    )
    return by_hidden, by_weight, cross_entropy, z


def compute_by_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float,
    chunk: int,
    rows: range,
    gather: Gather,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `split_loss_and_gradients` returns.

    A chunk's two numbers a token travel while the logits of the next chunk are computed. All ranks add up the
    same numbers in the same order, and so have the same bits of the log-partition.
    """
    from bloomery.kernels.triton_loss import measure_logits, write_split_gradient  # only where Triton is

    tokens = hidden.shape[0]
    assert tokens, "a batch has at least one token"
    by_hidden, by_weight, *_ = _room(hidden, weight)
    terms = torch.empty(2, tokens, device=hidden.device)

    def begin(first: int) -> tuple[Tensor, Callable[[], Tensor]]:
        at = slice(first, first + chunk)
        logits = hidden[at] @ weight.t()  # [chunk, v/tp]
        own = torch.empty(2, logits.shape[0], device=hidden.device)
        measure_logits(logits, targets[at], rows, own)
        return logits, gather(own)

    following = begin(0)
    for first in range(0, tokens, chunk):
        logits, wait_for_all = following
        if first + chunk < tokens:
            following = begin(first + chunk)
        at = slice(first, first + chunk)
        # From here on the logits are their gradient.
        write_split_gradient(logits, targets[at], rows, wait_for_all(), z_loss, terms[:, at])
        torch.mm(logits, weight, out=by_hidden[at])
        add_product(by_weight, logits.t(), hidden[at], is_first=first == 0)
    return by_hidden, by_weight, terms[0].sum(), terms[1].sum()


def begin_gather(own: Tensor, *, group: str, degree: int) -> Callable[[], Tensor]:
    """Begin to gather `own` [2, n] of all ranks; what is returned waits for them: [tp, 2, n]. Collective."""
    gathered = torch_private.begin_all_gather(own, degree, group)
    return lambda: torch_private.wait_for(gathered).unflatten(0, (degree, -1))


# An operator, so that torch.compile leaves it whole; see `model/layers.py` for why it is made like this.
torch.library.define(
    "bloomery::split_loss_and_gradients",
    "(Tensor hidden, Tensor weight, Tensor targets, float z_loss, int chunk, int start, int stop, str group,"
    " int degree) -> (Tensor by_hidden, Tensor by_weight, Tensor cross_entropy, Tensor z)",
)


@torch.library.impl("bloomery::split_loss_and_gradients", "default")
def _split_loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    chunk: int,
    start: int,
    stop: int,
    group: str,
    degree: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return compute_by_chunks(
        hidden,
        weight,
        targets,
        z_loss=z_loss,
        chunk=chunk,
        rows=range(start, stop),
        gather=partial(begin_gather, group=group, degree=degree),
    )


@torch.library.register_fake("bloomery::split_loss_and_gradients")  # type: ignore[untyped-decorator]
def _(hidden: Tensor, weight: Tensor, *_unused: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _room(hidden, weight)


def _room(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scalar = hidden.new_empty((), dtype=torch.float32)
    by_weight = weight.new_empty(weight.shape, dtype=torch.float32)
    return hidden.new_empty(hidden.shape), by_weight, scalar, torch.empty_like(scalar)
