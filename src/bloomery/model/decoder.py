"""The decoder-only transformer: embedding, blocks, final norm, head.

Llama, BLOOM and GPT-2 are three configurations of it. It knows nothing of parallelism: modules read their
sizes from their weights, so a module whose weights were split computes its part. Legend: b batch, s
sequence, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from bloomery.config.model import ModelSection
from bloomery.errors import BloomeryError
from bloomery.model.attention import (
    Attention,
    AttentionContext,
    KeyValueCache,
    alibi_bias,
    alibi_slopes,
    positions_within,
    rotary_table,
    visible,
)
from bloomery.model.dropout import (
    SITE_EMBEDDING,
    DropoutAddress,
    ElementKeys,
    block_dropout,
    drop,
    hidden_keys,
)
from bloomery.model.fused_attention import Visibility, document_ranges, supports_tiled_attention
from bloomery.model.layers import MLP, Embedding, MatmulMode, linear, matmul_mode_for, norm
from bloomery.model.loss import LossSums, NextTokenLoss
from bloomery.model.shape import ResolvedModel, resolve, scaling_of


def build(
    model: ModelSection,
    *,
    vocabulary: int,
    sequence_length: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    blocks: Sequence[int] | None = None,
) -> Decoder:
    """Build a decoder whose weights have shapes but no values yet: initialise or load them.

    vocabulary, sequence_length: the tokenizer's and the data's, used where the section says 'auto'.
    device: on 'meta' nothing is allocated.
    blocks: the blocks that this rank holds, with the embedding beside the model's first block and the head
        beside its last; None for all.
    Raises ConfigError if the section cannot hold the vocabulary or the sequence.
    """
    resolved = resolve(model, vocabulary=vocabulary, sequence_length=sequence_length)
    return Decoder(resolved, device=torch.device(device), dtype=dtype, blocks=blocks)


class Decoder(nn.Module):
    """Computes hidden states from tokens. `loss` and `logits` compute the loss and the logits from those.

    It may hold only some of the model's blocks (a pipeline stage), under the names they have in the whole
    model. The embedding is beside block 0, the final norm and the head are beside the last block.

    embeds, finishes: whether block 0 and the last block are here.
    heads: the query heads held here. sequence_index, sequence_degree: which part of the residual stream's
        positions is here, of how many. Tensor parallelism sets these.
    resets_positions: whether learned positions count within documents.
    tiles_plain_attention: whether plain causal attention is computed by our kernel too, where that can run.
    """

    def __init__(
        self,
        model: ResolvedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        section = model.section
        blocks = range(section.layers) if blocks is None else blocks
        self.model = model
        self.matmul_mode: MatmulMode = matmul_mode_for(device, dtype)
        self.embeds, self.finishes = 0 in blocks, section.layers - 1 in blocks

        def table(rows: int) -> Embedding:
            return Embedding(rows, section.hidden, device=device, dtype=dtype)

        is_tied_head = self.finishes and section.tied
        self.embedding = table(model.vocabulary) if self.embeds or is_tied_head else None
        learned = self.embeds and section.position == "learned"
        self.positions = table(model.max_positions) if learned else None
        normed = self.embeds and section.embedding_norm
        self.embedding_norm = _norm(model, device=device, dtype=dtype) if normed else nn.Identity()
        self.blocks = nn.ModuleList()
        for index in blocks:
            self.blocks.add_module(str(index), Block(model, index=index, device=device, dtype=dtype))
        self.final_norm = _norm(model, device=device, dtype=dtype) if self.finishes else nn.Identity()
        self.head = table(model.vocabulary) if self.finishes and not section.tied else None
        # Beside the module's parameters: the weight of a tied head where its gradient is to come apart.
        self.tied_head: tuple[nn.Parameter, ...] = ()
        self.token_loss: nn.Module = NextTokenLoss()
        self.heads = range(section.heads)
        self.sequence_index, self.sequence_degree = 0, 1
        self.resets_positions, self.tiles_plain_attention = False, False

    @property
    def head_weight(self) -> nn.Parameter:
        """The head's weight [v, h]: the embedding's if they are tied."""
        if self.tied_head:
            return self.tied_head[0]
        owner = self.embedding if self.head is None else self.head
        assert owner is not None, "the head is asked for where the last block is"
        return owner.weight

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    def forward(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None = None,
        address: DropoutAddress | None = None,
        cache: KeyValueCache | None = None,
        hidden: Tensor | None = None,
        blocks: range | None = None,
    ) -> Tensor:
        """Return hidden states [b, s, h]; they are after the final norm if the last block is among `blocks`.

        tokens: int64 [b, s].
        documents: int [b, s]; a token then attends only to tokens of its own document. None for no limit.
        address: where the run stands, for dropout; None drops nothing.
        cache: keys and values of the tokens before these; None if there are none.
        hidden: the result of the block before `blocks`; None at block 0.
        blocks: the range of blocks to run; None for all.
        """
        before = 0 if cache is None else cache.length
        positions = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        address = None if address is None else self._held(address, tokens.shape[1])
        if hidden is None:
            at = positions
            if cache is not None and cache.padding is not None:
                at = (positions - cache.padding[:, None]).clamp(min=0)
            if self.resets_positions and documents is not None:
                at = positions_within(documents)
            hidden = self._embed(tokens, at, end=before + tokens.shape[1], address=address)
        x, padding = hidden, None if cache is None else cache.padding
        context = self._attention_context(
            x, positions, before=before, documents=documents, drops=address is not None, padding=padding
        )
        for module in self.blocks:
            block = cast(Block, module)
            if blocks is None or block.index in blocks:
                x = block(x, self._dropping(context, block.index, address, x.shape[1]), cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        ends = blocks is None or blocks.stop == self.model.section.layers
        return self.final_norm(x) if ends else x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., v] from hidden states [..., h], in the working dtype."""
        return linear(hidden, self.head_weight, matmul_mode=self.matmul_mode)

    def loss(self, hidden: Tensor, targets: Tensor, *, z_loss: float = 0.0, chunk: int = 1024) -> LossSums:
        """Return the loss of what `forward` returned.

        targets: int64 [b, s].
        z_loss: weight of the z term.
        chunk: number of tokens whose logits exist at one time.
        """
        sums: LossSums = self.token_loss(
            hidden, self.head_weight, targets, z_loss=z_loss, chunk=chunk, matmul_mode=self.matmul_mode
        )
        return sums

    def cache(self, *, batch: int, capacity: int, padding: Tensor | None = None) -> KeyValueCache:
        """Return an empty cache for `generate`, of this decoder's sizes, dtype and device.

        padding: see `KeyValueCache`.
        """
        attention = cast(Block, self.blocks[0]).attention
        weight = self.head_weight
        return KeyValueCache(
            blocks=len(self.blocks),
            batch=batch,
            capacity=capacity,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            device=weight.device,
            dtype=weight.dtype,
            padding=padding,
        )

    def _held(self, address: DropoutAddress, length: int) -> DropoutAddress:
        """Return the address of the heads and positions that this rank holds, in a sequence of `length`."""
        return DropoutAddress(
            rows=address.rows,
            first_head=self.heads.start,
            first_position=self.sequence_index * (length // self.sequence_degree),
        )

    def _embed(
        self, tokens: Tensor, positions: Tensor, *, end: int, address: DropoutAddress | None
    ) -> Tensor:
        assert self.embedding is not None, "tokens enter where block 0 is"
        x = self.embedding(tokens)
        if self.positions is not None:
            longest = self.positions.weight.shape[0]
            if end > longest:
                raise BloomeryError(
                    f"{end} tokens do not fit a model with {longest} learned positions.",
                    remedy="Give a shorter prompt, or ask for fewer new tokens.",
                )
            x = x + self.positions(positions)
        x = self.embedding_norm(x)
        rate = self.model.section.hidden_dropout
        if address is None or rate == 0.0:
            return x
        return drop(x, rate, hidden_keys(address, site=SITE_EMBEDDING, width=x.shape[2], held=x.shape[1]))

    def _dropping(
        self, context: AttentionContext, block: int, address: DropoutAddress | None, held: int
    ) -> AttentionContext:
        """Return the context with the dropout of a block; `held` positions of the residual stream are
        here.
        """
        section = self.model.section
        weights, outputs = section.attention_dropout > 0.0, section.hidden_dropout > 0.0
        if address is None or not (weights or outputs):
            return context
        dropout = block_dropout(
            address,
            block,
            heads=len(self.heads),
            hidden=section.hidden,
            held=held,
            weights=weights,
            outputs=outputs,
        )
        return replace(context, dropout=dropout)

    def _attention_context(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        before: int,
        documents: Tensor | None,
        drops: bool,
        padding: Tensor | None = None,
    ) -> AttentionContext:
        section = self.model.section
        rotary = None
        if section.position == "rotary":
            rotary = rotary_table(
                positions,
                head_dim=self.model.head_dim,
                theta=section.rope_theta,
                dtype=x.dtype,
                scaling=scaling_of(self.model),
                length=before + positions.shape[0],
            )
        is_alibi = section.position == "alibi"
        drops = drops and section.attention_dropout > 0.0
        sees_all = before > 0 and positions.shape[0] == 1
        is_plain = not (is_alibi or drops or documents is not None or before > 0)
        can_tile = padding is None and before == 0
        can_tile = can_tile and supports_tiled_attention(x.device, x.dtype, self.model.head_dim)
        is_plain = is_plain and not (can_tile and self.tiles_plain_attention)
        if padding is None and (is_plain or (sees_all and not is_alibi)):
            return AttentionContext(mask=None, is_causal=not sees_all, rotary=rotary)
        slopes = None
        if is_alibi:
            slopes = alibi_slopes(section.heads, device=x.device)[self.heads.start : self.heads.stop]
        if can_tile:
            starts, ends = (None, None) if documents is None else document_ranges(documents)
            visibility = Visibility(starts=starts, ends=ends, slopes=slopes)
            return AttentionContext(mask=None, is_causal=False, rotary=rotary, visibility=visibility)
        keys = torch.arange(before + positions.shape[0], device=positions.device)
        mask = visible(positions, keys, documents)
        if padding is not None:
            # a position without a token sees itself, for a row that sees nothing would become NaN
            mask = mask & (keys >= padding[:, None, None, None]) | (keys == positions[:, None])
        if slopes is not None or not drops:
            # Of a boolean mask torch would make one of numbers in each block, and keep all for backward.
            bias = 0.0 if slopes is None else alibi_bias(slopes, positions, keys)
            mask = torch.where(mask, bias, float("-inf"))
            mask = mask if drops or self.matmul_mode == "fp32" else mask.to(x.dtype)
        return AttentionContext(mask=mask, is_causal=False, rotary=rotary)


class Block(nn.Module):
    """A pre-norm transformer block: attention and MLP, each after a norm, added to the residual stream.

    enter_attention, leave_attention, enter_mlp, leave_mlp: identities that tensor parallelism replaces by its
    collectives.
    hidden_maximum: fp32 scalar, raised to the largest absolute value that the block returns in each forward
        that a backward follows; None where nobody asks.
    """

    def __init__(self, model: ResolvedModel, *, index: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.dropout = model.section.hidden_dropout
        self.attention_norm = _norm(model, device=device, dtype=dtype)
        self.enter_attention: nn.Module = nn.Identity()
        self.attention = Attention(model, block=index, device=device, dtype=dtype)
        self.leave_attention: nn.Module = nn.Identity()
        self.mlp_norm = _norm(model, device=device, dtype=dtype)
        self.enter_mlp: nn.Module = nn.Identity()
        self.mlp = MLP(model, device=device, dtype=dtype)
        self.leave_mlp: nn.Module = nn.Identity()
        self.hidden_maximum: Tensor | None = None

    def forward(self, x: Tensor, context: AttentionContext, cache: KeyValueCache | None = None) -> Tensor:
        """Return [b, s, h] from [b, s, h]."""
        dropout = context.dropout
        mixed = self.mix(x, context, cache)
        x = x + self._dropped(mixed, None if dropout is None else dropout.attention_output)
        expanded = self.expand(x)
        x = x + self._dropped(expanded, None if dropout is None else dropout.mlp_output)
        if self.hidden_maximum is not None and torch.is_grad_enabled():
            largest = x.detach().abs().amax().float()
            self.hidden_maximum.copy_(torch.maximum(self.hidden_maximum, largest))
        return x

    def mix(self, x: Tensor, context: AttentionContext, cache: KeyValueCache | None = None) -> Tensor:
        """Return what attention adds to the residual stream, before dropout: [b, s, h] from [b, s, h]."""
        mixed = self.attention(self.enter_attention(self.attention_norm(x)), context, cache)
        return self.attention.output.add_bias(self.leave_attention(mixed))

    def expand(self, x: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream, before dropout: [b, s, h] from [b, s, h]."""
        expanded = self.leave_mlp(self.mlp(self.enter_mlp(self.mlp_norm(x))))
        return self.mlp.down.add_bias(expanded)

    def _dropped(self, x: Tensor, keys: ElementKeys | None) -> Tensor:
        return x if keys is None else drop(x, self.dropout, keys)


def _norm(model: ResolvedModel, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    section = model.section
    return norm(section.norm, section.hidden, epsilon=section.norm_epsilon, device=device, dtype=dtype)
