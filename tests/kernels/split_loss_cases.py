"""The loss of split logits whose gradient replaces them, on simulated ranks, against fp64; prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bloomery.model.loss import IGNORED, next_token_loss
from bloomery.parallel.fused_vocabulary_loss import compute_by_chunks
from bloomery.parallel.tensor import split_range
from bloomery.plan.pipeline_stages import padded_rows

Z_LOSS = 0.01


@dataclass(kw_only=True)
class Rank:
    """A rank that runs by itself: notes what it tells, and hears what all told when they ran before.

    everybody: what each rank told, by rank and number of the collective; empty while nobody has run.
    chunks: the number of collectives to come.
    """

    everybody: list[list[Tensor]]
    chunks: int
    told: list[Tensor] = field(default_factory=list)
    waited: int = 0

    def gather(self, own: Tensor) -> Callable[[], Tensor]:
        number = len(self.told)
        self.told.append(own)

        def wait_for_all() -> Tensor:
            assert self.waited == number, "each collective is waited for once, in order"
            assert len(self.told) == min(number + 2, self.chunks), "one is under way while another is used"
            self.waited += 1
            return torch.stack([told[number] for told in self.everybody] or [own])

        return wait_for_all


def differences(*, ranks: int, vocabulary: int, chunk: int, device: str, dtype: torch.dtype) -> list[float]:
    """Return the largest differences over all ranks, of the terms and of the gradients by hidden states and
    weight, relative to the largest number of each; then the largest gradient of padding and the collectives.
    """
    random = torch.Generator(device).manual_seed(vocabulary)
    tokens, parts = 7, [split_range(vocabulary, index=index, degree=ranks) for index in range(ranks)]
    hidden = torch.randn(tokens, 32, generator=random, device=device).to(dtype)
    weight = torch.randn(vocabulary, 32, generator=random, device=device).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=random, device=device)
    targets[3] = IGNORED
    # The first column of a part would be a column of padding in the part before it.
    targets[0], targets[1], targets[2] = 0, parts[1].start, vocabulary - 1
    stored = padded_rows(vocabulary, degree=ranks)
    everybody: list[list[Tensor]] = []
    for _ in range(2):  # what a rank tells does not depend on what it hears
        ran = [Rank(everybody=everybody, chunks=-(-tokens // chunk)) for _ in parts]
        found = []
        for rank, rows in zip(ran, parts, strict=True):
            padding = torch.full((stored - len(rows), 32), 9.0, device=device, dtype=dtype)
            own = torch.cat([weight[rows.start : rows.stop], padding])
            found.append(
                compute_by_chunks(
                    hidden, own, targets, z_loss=Z_LOSS, chunk=chunk, rows=rows, gather=rank.gather
                )
            )
        everybody = [rank.told for rank in ran]
    wide = [factor.double().requires_grad_() for factor in (hidden, weight)]
    expected = next_token_loss(*wide, targets, z_loss=Z_LOSS, chunk=tokens)
    expected.total.backward()
    padding_gradient = max(
        float(part[1][len(rows) :].abs().sum()) for part, rows in zip(found, parts, strict=True)
    )
    by_weight = torch.cat([part[1][: len(rows)] for part, rows in zip(found, parts, strict=True)])
    by_hidden = torch.stack([part[0].double() for part in found]).sum(0)
    pairs = [(part[2], expected.cross_entropy) for part in found] + [(part[3], expected.z) for part in found]
    pairs += [(by_hidden, wide[0].grad), (by_weight, wide[1].grad)]
    measured = [
        float((own - other).detach().abs().max() / other.detach().abs().max())
        for own, other in pairs
        if other is not None
    ]
    return [max(measured[: 2 * ranks]), *measured[2 * ranks :], padding_gradient, float(len(ran[0].told))]


def all_cases(device: str, dtype: torch.dtype, vocabularies: tuple[int, ...]) -> list[list[float]]:
    """Return the differences of two and four ranks, for each size of the vocabulary."""
    return [
        differences(ranks=ranks, vocabulary=vocabulary, chunk=3, device=device, dtype=dtype)
        for ranks in (2, 4)
        for vocabulary in vocabularies
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(all_cases("cpu", torch.float32, (41, 100, 20_003))) + "\n")
