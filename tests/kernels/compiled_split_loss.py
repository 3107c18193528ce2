"""The loss of split logits within torch.compile, eager within, over a group of one; prints JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, distributed

from bloomery.model.loss import LossSums
from bloomery.parallel import vocabulary_loss
from bloomery.parallel.tensor_collectives import TensorGroup
from bloomery.parallel.vocabulary_loss import VocabularyParallelLoss


def results(group: TensorGroup, *, compiles: bool, fused: bool) -> list[Tensor]:
    """Return the loss's sums and its gradients by hidden states and the head."""
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 5, 16, generator=random).requires_grad_()
    weight = torch.randn(48, 16, generator=random).requires_grad_()
    targets = torch.randint(0, 45, (2, 5), generator=random)
    module = VocabularyParallelLoss(group, range(45), sequence=False)
    module.has_triton = fused

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> LossSums:
        return module(hidden * 2, weight, targets, z_loss=0.01, chunk=4, matmul_mode="native")

    function = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiles else loss
    sums = function(hidden, weight, targets)
    (sums.total * 0.25).backward()
    gradients = [leaf.grad for leaf in (hidden, weight) if leaf.grad is not None]
    return [*(part.detach() for part in sums), *gradients]


if __name__ == "__main__":
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    world = distributed.group.WORLD
    assert world is not None
    group = TensorGroup(group=world.group_name, index=0, degree=1, has_fast_reduce_scatter=False)
    vocabulary_loss.supports_fused_loss = lambda hidden: True  # type: ignore[assignment]
    plain = results(group, compiles=False, fused=False)
    pairs = [
        zip(results(group, compiles=compiles, fused=True), plain, strict=True) for compiles in (False, True)
    ]
    found = [[float((own - other).abs().max()) for own, other in each] for each in pairs]
    distributed.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")
