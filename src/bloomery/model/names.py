"""Names and shapes of the decoder's logical tensors: what checkpoints, optimizers and exports speak of.

Logical tensors are unfused (query, key, value, gate, up), whatever a module stores them in.
"""

from __future__ import annotations

from collections.abc import Iterator

from bloomery.model.resolve import ResolvedModel

Shape = tuple[int, ...]


def logical_shapes(model: ResolvedModel) -> dict[str, Shape]:
    """Each logical tensor's name and shape, in the order in which a token meets them."""
    hidden = model.section.hidden
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocabulary, hidden)}
    if model.section.position == "learned":
        shapes["positions.weight"] = (model.max_positions, hidden)
    if model.section.embedding_norm:
        shapes.update(_norm("embedding_norm", model))
    for block in range(model.section.layers):
        shapes.update(_block(f"blocks.{block}", model))
    shapes.update(_norm("final_norm", model))
    if not model.section.tied:
        shapes["head.weight"] = (model.vocabulary, hidden)
    return shapes


def is_residual_output(name: str) -> bool:
    """Whether `name` is a projection whose result is added to the residual stream."""
    return name.endswith((".attention.output.weight", ".mlp.down.weight"))


def _block(prefix: str, model: ResolvedModel) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = model.section.hidden, model.ffn
    query, kv = model.section.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from _norm(f"{prefix}.attention_norm", model)
    for part, rows, columns in (
        ("query", query, hidden),
        ("key", kv, hidden),
        ("value", kv, hidden),
        ("output", hidden, query),
    ):
        yield from _linear(f"{prefix}.attention.{part}", rows, columns, bias=model.section.bias)
    yield from _norm(f"{prefix}.mlp_norm", model)
    if model.section.activation == "swiglu":
        yield from _linear(f"{prefix}.mlp.gate", ffn, hidden, bias=model.section.bias)
    yield from _linear(f"{prefix}.mlp.up", ffn, hidden, bias=model.section.bias)
    yield from _linear(f"{prefix}.mlp.down", hidden, ffn, bias=model.section.bias)


def _norm(prefix: str, model: ResolvedModel) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", (model.section.hidden,)
    if model.section.norm == "layernorm":
        yield f"{prefix}.bias", (model.section.hidden,)


def _linear(prefix: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", (rows, columns)
    if bias:
        yield f"{prefix}.bias", (rows,)
