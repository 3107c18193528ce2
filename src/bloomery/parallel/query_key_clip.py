"""QK-clip: keeps attention logits bounded by rescaling the query and key weights of single heads.

After Kimi Team 2025, "Kimi K2", section 2.1 (MuonClip). A head whose largest logit L of this step was above
the threshold t has its logits multiplied with t / L from the next step on: queries and keys each with
sqrt(t / L) where each query head has a key head of its own. Where query heads share a key head, the shared
part stays as it is and the query takes the whole factor, as the paper does with its shared rotary keys.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from bloomery.config.optim import OptimSection
from bloomery.model.attention import Attention
from bloomery.model.decoder import Block, Decoder
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import MasterWeights
from bloomery.parallel.tensor import split_range


class _Rows(NamedTuple):
    """Rows of a query or key tensor in the masters.

    block: which of this rank's blocks. heads: [rows] the head of each row, among those that this rank holds.
    """

    block: int
    part: str
    view: Tensor
    heads: Tensor


class QueryKeyClip:
    """Measures each head's largest logit during a step's forwards, and rescales heads after the update.

    The decoder's attention writes into `logit_maxima`, one tensor [heads] for each of this rank's blocks.
    """

    def __init__(self, decoder: Decoder, weights: MasterWeights, *, mesh: Mesh, optim: OptimSection) -> None:
        self._own, self._threshold, self._mesh = optim.qk_clip, 0.0, mesh
        self._shares_keys = decoder.model.kv_heads != decoder.model.section.heads
        self._maxima: list[Tensor] = []
        self._attentions: list[Attention] = []
        blocks = dict[str, int]()
        for module in decoder.blocks:
            block = cast(Block, module)
            blocks[f"blocks.{block.index}.attention"] = len(self._maxima)
            self._maxima.append(torch.zeros(block.attention.heads, device=mesh.device))
            block.attention.logit_stride = optim.qk_clip_stride
            self._attentions.append(block.attention)
        first_key = split_range(
            decoder.model.kv_heads, index=mesh.tensor.index, degree=mesh.tensor.degree
        ).start
        first = {"query": decoder.heads.start, "key": first_key}
        self._rows = list[_Rows]()
        for entry in weights.state_entries():
            module_name = entry.name.removeprefix("model.").rpartition(".")[0]
            owner, _, part = module_name.rpartition(".")
            if owner in blocks and part in first:
                rows = torch.arange(entry.box.shape[0], device=entry.tensor.device) + entry.box.offset[0]
                heads = rows // decoder.model.head_dim - first[part]
                self._rows.append(_Rows(blocks[owner], part, entry.tensor, heads))

        self.clamp(0.0)

    def clamp(self, limit: float) -> None:
        """Rescale from now on by this limit or the recipe's, the lower one; 0: by the recipe's alone."""
        threshold = min(filter(None, (self._own, limit)), default=0.0)
        if bool(threshold) != bool(self._threshold):
            for attention, maximum in zip(self._attentions, self._maxima, strict=True):
                attention.logit_maxima = maximum.zero_() if threshold else None
        self._threshold = threshold

    @torch.no_grad()
    def apply(self, applies: Tensor) -> None:
        """Rescale the masters of heads whose largest logit was above the threshold, and forget the maxima.

        applies: boolean scalar, whether the step's update was made; otherwise the weights stay as they are.
        Collective over the peer.
        """
        if not self._threshold:
            return
        maxima = torch.stack(self._maxima)  # [blocks, heads]
        self._mesh.data.all_reduce(maxima, maximum=True)
        clips = applies & torch.isfinite(maxima) & (maxima > self._threshold)
        factor = torch.where(clips, self._threshold / maxima, torch.ones_like(maxima))
        factors = {"query": factor} if self._shares_keys else dict.fromkeys(("query", "key"), factor.sqrt())
        for rows in self._rows:
            if rows.part in factors:
                each = factors[rows.part][rows.block].to(rows.view.device)[rows.heads]
                rows.view.mul_(each.view(-1, *[1] * (rows.view.dim() - 1)))
        for maximum in self._maxima:
            maximum.zero_()
