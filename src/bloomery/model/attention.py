"""Causal self-attention with grouped key/value heads, its positions (rotary, ALiBi) and its key/value cache.

Grouped-query attention is Ainslie et al. 2023; rotary positions are Su et al. 2021 ("RoFormer"); ALiBi is
Press et al. 2021. The scalings of rotary positions to longer contexts: 'linear' is Chen et al. 2023,
'dynamic' is NTK-aware scaling, 'yarn' is Peng et al. 2023, 'llama3' is Llama 3.1's. The formulas follow
transformers' modeling_rope_utils, so that an imported model computes the same. Legend: b batch, s queries, t
keys, h hidden, d head width; heads and kv_heads are those that this module holds, which under tensor
parallelism are some of the model's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.model.dropout import BlockDropout, ElementKeys, drop
from bloomery.model.fused_attention import Visibility, tiled_attention
from bloomery.model.layers import Linear, MatmulMode, RMSNorm, matmul_mode_for, rms_norm
from bloomery.model.native_kernels import causal_attention, has_amx, supports_attention
from bloomery.model.shape import ResolvedModel, RopeScaling

SCORES_AT_ONCE = 2**24
"""The scores of which the largest are taken at a time: some 180 MiB with what is made beside them."""


def rotary_frequencies(
    *, head_dim: int, theta: float, scaling: RopeScaling | None, length: int, device: torch.device
) -> Tensor:
    """Return fp32 [d/2]: each channel pair's radians from one position to the next.

    length: the number of positions so far, on which 'dynamic' scaling depends.
    """
    if scaling is not None and scaling.kind == "dynamic" and length > scaling.positions:
        stretch = scaling.factor * length / scaling.positions - (scaling.factor - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    keeps = (
        _kept_by_llama3(plain, scaling) if scaling.kind == "llama3" else _kept_by_yarn(plain, theta, scaling)
    )
    return plain / scaling.factor * (1 - keeps) + plain * keeps


def _kept_by_llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the share [d/2] of each frequency that is kept: all of it if it turns often in the original
    context.
    """
    rotations = scaling.original_positions * plain / (2 * math.pi)
    low, high = scaling.low_rotations, scaling.high_rotations
    return ((rotations - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the share [d/2] of each frequency that is kept: a ramp over the channels between two
    rotations.
    """
    head_dim = 2 * plain.shape[0]

    def channel(rotations: float) -> float:
        length = scaling.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    first = max(math.floor(channel(scaling.high_rotations)), 0)
    last = float(min(math.ceil(channel(scaling.low_rotations)), head_dim - 1))
    if last == first:
        last += 0.001  # as in transformers, to avoid a division by 0
    channels = torch.arange(plain.shape[0], device=plain.device, dtype=torch.float32)
    return 1 - ((channels - first) / (last - first)).clamp(0.0, 1.0)


class KeyValueCache:
    """The keys and values of the tokens already seen, for generation.

    Memory for `capacity` tokens is allocated once. It is written in place, so it is not for training.

    padding: int64 [b], how many of the first positions of each row hold no token, so that rows of different
        lengths end together; None where no row has any.
    """

    def __init__(
        self,
        *,
        blocks: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        padding: Tensor | None = None,
    ) -> None:
        self.padding = padding
        shape = (blocks, batch, capacity, kv_heads, head_dim)
        self._keys = torch.empty(shape, device=device, dtype=dtype)
        self._values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return self._keys.shape[2]

    def extended(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [b, s, kv_heads, d] of `block`; return all of that block so far.

        Raises ValueError if they do not fit.
        """
        end = self.length + key.shape[1]
        if end > self.capacity:
            raise ValueError(f"a cache of {self.capacity} tokens was given {end}")
        self._keys[block, :, self.length : end] = key
        self._values[block, :, self.length : end] = value
        return self._keys[block, :, :end], self._values[block, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` as seen; call it once all blocks have called `extended`."""
        self.length += tokens


def positions_within(documents: Tensor) -> Tensor:
    """Return positions int64 [b, s] that start at 0 with each document.

    documents: int [b, s], the number of each token's document in its sample.
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    opens = torch.ones_like(documents, dtype=torch.bool)
    opens[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(opens, index, 0).cummax(dim=1).values


def rotary_table(
    positions: Tensor,
    *,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    length: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [s, d/2] of each position's angles, computed in fp32 and returned in `dtype`.

    scaling: None for unscaled frequencies.
    length: the number of positions so far, used by "dynamic" scaling.
    """
    frequencies = rotary_frequencies(
        head_dim=head_dim, theta=theta, scaling=scaling, length=length, device=positions.device
    )
    angles = positions.float()[:, None] * frequencies
    factor = 1.0 if scaling is None else scaling.attention_factor
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to x [b, s, heads, d]: pairs are channel i and i + d/2, as in Llama.

    table: cosines and sines [s, d/2] from `rotary_table`.
    """
    cosine, sine = (part[:, None, :] for part in table)  # [s, 1, d/2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def alibi_slopes(heads: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return ALiBi's slopes, fp32 [heads] (Press et al. 2021, section 3 and the authors' code).

    If `heads` is not a power of two, the heads beyond the largest power get every other slope of the next
    one. They are computed on the device, because copying a list of numbers to a GPU would make the host wait.
    """
    power = 2 ** math.floor(math.log2(heads))
    head = torch.arange(heads, device=device, dtype=torch.float64)
    steps = torch.where(head < power, head + 1, head - power + 0.5)
    return torch.exp2(steps * (-8.0 / power)).float()


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return ALiBi's bias, fp32 [heads, s, t]: -slope × (query position - key position).

    Relative to the query the numbers are small near the diagonal, and so exact in bf16.
    """
    distance = (queries[:, None] - keys[None, :]).float()
    return -slopes.float()[:, None, None] * distance


def visible(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """Return which keys each query may attend to, boolean [1 or b, 1, s, t]: causal, and within its document.

    queries, keys: positions.
    documents: int [b, s]; None if a token may attend across documents.
    """
    causal = (keys[None, :] <= queries[:, None])[None, None]
    if documents is None:
        return causal
    return causal & (documents[:, None, :, None] == documents[:, None, None, :])


@dataclass(frozen=True)
class AttentionContext:
    """What the attention of all blocks shares in one forward pass.

    mask: boolean (may attend) or float (added to the scores), broadcastable to [b, heads, s, t]; None if
        `is_causal` says everything.
    is_causal: whether plain causal attention is meant.
    rotary: cosines and sines [s, d/2]; None without rotary positions.
    dropout: that of the block; None where nothing is dropped.
    visibility: what a mask would say, where attention is computed by tiles and there is none; None elsewhere.
    """

    mask: Tensor | None
    is_causal: bool
    rotary: tuple[Tensor, Tensor] | None
    dropout: BlockDropout | None = None
    visibility: Visibility | None = None


class Attention(nn.Module):
    """Causal self-attention. Query, key and value share one stored matrix, in that order of rows.

    query_norm, key_norm: RMS norms over each head's channels (Henry et al. 2020; Dehghani et al. 2023), whose
        weights [d] all heads share; None without `model.qk_norm`.
    logit_maxima: fp32 [heads], raised to each head's largest logit in each forward that a backward follows;
        None where nobody asks. logit_stride: every n-th query is looked at.
    """

    def __init__(self, model: ResolvedModel, *, block: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.block = block
        self.dropout = model.section.attention_dropout
        self.matmul_mode: MatmulMode = matmul_mode_for(device, dtype)
        self.has_units = has_amx()  # asked here, since compiled code cannot ask
        heads, hidden, bias = model.section.heads, model.section.hidden, model.section.attention_bias
        rows = (heads + 2 * model.kv_heads) * self.head_dim
        self.qkv = Linear(rows, hidden, bias=bias, device=device, dtype=dtype)
        self.logit_maxima: Tensor | None = None
        self.logit_stride = 1
        self.query_norm, self.key_norm = None, None
        if model.section.qk_norm:
            epsilon = model.section.norm_epsilon
            self.query_norm, self.key_norm = (
                RMSNorm(self.head_dim, epsilon=epsilon, device=device, dtype=dtype) for _ in range(2)
            )
        self.output = Linear(hidden, heads * self.head_dim, bias=bias, device=device, dtype=dtype)

    @property
    def heads(self) -> int:
        """The number of query heads that this module holds."""
        return self.output.weight.shape[1] // self.head_dim

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads that this module holds."""
        return (self.qkv.weight.shape[0] // self.head_dim - self.heads) // 2

    def forward(self, x: Tensor, context: AttentionContext, cache: KeyValueCache | None = None) -> Tensor:
        """Return causal self-attention of x, without the output's bias (see `Linear.matmul`).

        x and the result: [b, s, h], samples, positions, hidden channels.
        """
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [b, s, heads + 2·kv_heads, d]
        rotated, value = qkv.split((heads + kv_heads, kv_heads), dim=2)
        rotated = self._normed(rotated)
        if self.logit_maxima is not None and torch.is_grad_enabled():
            self._measure_logits(rotated.detach(), context, self.logit_maxima)
        if self.has_units and context.is_causal and cache is None and supports_attention(qkv):
            # The native kernel keeps no scores, so recomputation, which replaces `attend`, has nothing to do.
            whole = qkv if self.query_norm is None else torch.cat((rotated, value), dim=2)
            mixed = causal_attention(whole, heads=heads, rotary=context.rotary)
            return self.output.matmul(mixed.flatten(2))
        if context.rotary is not None:
            rotated = rotate(rotated, context.rotary)
        query, key = rotated.split((heads, kv_heads), dim=2)
        if cache is not None:
            key, value = cache.extended(self.block, key, value)
        if context.visibility is not None:
            mixed = self._attend_by_tiles(query, key, value, context.visibility, context.dropout)
            return self.output.matmul(mixed.flatten(2))
        mixed = self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), context)
        return self.output.matmul(mixed.transpose(1, 2).flatten(2))

    def _normed(self, queries_and_keys: Tensor) -> Tensor:
        """Return queries and keys [b, s, heads + kv_heads, d] after their norms; as they are without."""
        if self.query_norm is None or self.key_norm is None:
            return queries_and_keys
        query, key = self.query_norm.weight, self.key_norm.weight
        weights = torch.cat((query.expand(self.heads, -1), key.expand(self.kv_heads, -1)))
        return rms_norm(queries_and_keys, weights, epsilon=self.query_norm.epsilon)

    @torch.no_grad()
    def _measure_logits(self, queries_and_keys: Tensor, context: AttentionContext, maxima: Tensor) -> None:
        """Raise `maxima` [heads] to the largest query · key / √d that a query sees, positions' bias left out.

        queries_and_keys: [b, s, heads + kv_heads, d], before rotary positions.
        """
        heads, kv_heads = self.heads, self.kv_heads
        query, key = queries_and_keys.split((heads, kv_heads), dim=2)
        length = queries_and_keys.shape[1]
        positions = torch.arange(length, device=query.device)
        first = (length - 1) % self.logit_stride  # so that the last query, which sees all, is among them
        query, at = query[:, first :: self.logit_stride], positions[first :: self.logit_stride]
        if context.rotary is not None:
            cosine, sine = context.rotary
            query = rotate(query, (cosine[at], sine[at]))
            key = rotate(key, context.rotary)
        if self.matmul_mode == "fp32":
            query, key = query.float(), key.float()
        grouped = query.transpose(1, 2).unflatten(1, (kv_heads, -1))  # [b, kv_heads, group, s/n, d]
        key = key.transpose(1, 2)[:, :, None].mT  # [b, kv_heads, 1, d, s]
        if context.mask is None:
            seen = visible(at, positions, None)
            if context.visibility is not None and context.visibility.starts is not None:
                seen = seen & (positions >= context.visibility.starts[:, None, at, None])
        else:
            mask = context.mask[..., at, :]
            seen = mask > float("-inf") if mask.is_floating_point() else mask
            if seen.dim() == 3:
                seen = seen[None]
        seen = seen.expand(-1, heads, -1, -1).unflatten(1, (kv_heads, -1))
        rows = max(1, SCORES_AT_ONCE // (queries_and_keys.shape[0] * heads * length))
        for some, visible_to_them in zip(grouped.split(rows, dim=3), seen.split(rows, dim=3), strict=True):
            scores = (some @ key).float()  # [b, kv_heads, group, rows, s]
            largest = scores.masked_fill(~visible_to_them, float("-inf")).amax((0, 3, 4)).flatten()
            maxima.copy_(torch.maximum(maxima, largest * self.head_dim**-0.5))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Return softmax(query · keyᵀ / √d) · value (Vaswani et al. 2017, equation 1), without position and
        projection.

        query: [b, heads, s, d], key and value: [b, kv_heads, t, d]; returns [b, heads, s, d].
        """
        dtype = query.dtype
        if self.matmul_mode == "fp32":
            query, key, value = query.float(), key.float(), value.float()
        weights = None if context.dropout is None else context.dropout.weights
        if weights is not None:
            mixed = self._attend_with_dropout(query, key, value, context.mask, weights)
        else:
            mask = context.mask
            if mask is not None and mask.is_floating_point():
                mask = mask.to(query.dtype)
            mixed = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=context.is_causal, enable_gqa=self.heads != self.kv_heads
            )
        return mixed.to(dtype)

    def _attend_by_tiles(
        self, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, dropout: BlockDropout | None
    ) -> Tensor:
        """Return [b, s, heads, d] from queries, keys and values of that order, with scores only on the chip.

        Recomputation, which replaces `attend`, has nothing to do here.
        """
        keys = None if dropout is None else dropout.weights
        rate = 0.0 if keys is None else self.dropout
        return tiled_attention(query, key, value, visibility, keys=keys, rate=rate)

    def _attend_with_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keys: ElementKeys
    ) -> Tensor:
        """Return attention with its weights as a tensor, because torch's fused kernels would draw masks
        without an address.
        """
        assert mask is not None, "the decoder gives an explicit mask where weights are dropped"
        group = self.heads // self.kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = (query @ key.transpose(-1, -2)).float() * self.head_dim**-0.5
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
        weights = drop(scores.softmax(-1), self.dropout, keys)
        return weights.to(value.dtype) @ value
