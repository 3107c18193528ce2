"""What the native library's and Triton's kernels are called with: torch computes in their place.

So the arguments are tried on machines without matrix units or GPUs as well; the kernels themselves are tried
in test_kernels.py and tests/kernels.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.attention_cases import written_out
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from bloomery.config.model import ModelSection
from bloomery.kernels.rules import Rules, tiles_for
from bloomery.model import attention, fused_attention, native_kernels
from bloomery.model.attention import rotary_table, rotate
from bloomery.model.decoder import build
from bloomery.model.dropout import BlockDropout, ElementKeys
from bloomery.model.fused_attention import Visibility, document_ranges, tiled_attention
from bloomery.model.initial_filling import initialise
from bloomery.model.loss import IGNORED
from bloomery.model.native_kernels import causal_attention, entropy_gradient, supports_attention


def memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers at an address of this process."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_uint8 * (count * size)).from_address(address), dtype=dtype)


class Library:
    """The native library, computed by torch on the memory that it is given; `status` is what it returns."""

    def __init__(self) -> None:
        self.status = 0
        self.calls: list[Any] = []

    def bloomery_attention_units(self) -> int:
        return 1

    def bloomery_attend(self, reference: Any) -> int:
        call = reference._obj
        self.calls.append(call)
        if self.status == 0:
            mixed, log_partition = self._attend(call, *self._heads(call, "query", "key", "value"))
            (out,) = self._heads(call, "out")
            out.copy_(mixed)
            count = call.samples * call.heads * call.length
            memory(call.log_partition, count, torch.float32).copy_(log_partition.flatten())
        return self.status

    def bloomery_attend_backward(self, reference: Any) -> int:
        call = reference._obj
        leaves = [one.float().requires_grad_() for one in self._heads(call, "query", "key", "value")]
        with torch.enable_grad():
            mixed, log_partition = self._attend(call, *leaves)
        (out, slope) = self._heads(call, "out", "out_gradient")
        torch.testing.assert_close(out.float(), mixed.detach(), rtol=2**-7, atol=2**-7)
        count = call.samples * call.heads * call.length
        kept = memory(call.log_partition, count, torch.float32)
        torch.testing.assert_close(kept, log_partition.detach().flatten(), rtol=1e-2, atol=1e-2)
        gradients = torch.autograd.grad(mixed, leaves, slope.float())
        names = ("query_gradient", "key_gradient", "value_gradient")
        for place, gradient in zip(self._heads(call, *names), gradients, strict=True):
            place.copy_(gradient)
        return self.status

    def bloomery_slope_entropy(self, reference: Any) -> int:
        call = reference._obj
        self.calls.append(call)
        size = (call.rows, call.vocabulary)
        logits = memory(call.logits, call.rows * call.vocabulary, torch.bfloat16).view(size)
        targets = memory(call.targets, call.rows, torch.int64)
        with torch.enable_grad():
            leaf = logits.float().requires_grad_()
            counts = (targets >= 0) & (targets < call.vocabulary)
            z = call.z_loss * counts * leaf.logsumexp(-1).square()
            entropy = F.cross_entropy(leaf, torch.where(counts, targets, -100), reduction="none")
            (slope,) = torch.autograd.grad((entropy + z).sum(), leaf)
        memory(call.slopes, leaf.numel(), torch.bfloat16).view(size).copy_(slope)
        memory(call.cross_entropy, call.rows, torch.float32).copy_(entropy.detach())
        memory(call.z, call.rows, torch.float32).copy_(z.detach())
        return self.status

    def _heads(self, call: Any, *names: str) -> list[torch.Tensor]:
        found = []
        for name in names:
            vectors = getattr(call, name)
            heads = call.kv_heads if name.startswith(("key", "value")) else call.heads
            strides = (vectors.sample_stride, vectors.position_stride, call.width, 1)
            extent = (call.samples - 1) * strides[0] + (call.length - 1) * strides[1] + heads * call.width
            numbers = memory(vectors.data, extent, torch.bfloat16)
            found.append(numbers.as_strided((call.samples, call.length, heads, call.width), strides))
        return found

    def _attend(
        self, call: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = query.float(), key.float(), value.float()
        if call.cosines is not None:
            size = (call.length, call.width // 2)
            table = [
                memory(at, size[0] * size[1], torch.float32).view(size) for at in (call.cosines, call.sines)
            ]
            query, key = (rotate(part, (table[0], table[1])) for part in (query, key))
        group = call.heads // call.kv_heads
        key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * call.scale
        seen = torch.ones(call.length, call.length, dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)
        return mixed, scores.logsumexp(-1)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(native_kernels, "library", lambda: made)
    return made


@pytest.mark.parametrize("is_rotary", [True, False])
def test_the_library_attends_over_queries_keys_and_values_where_they_lie(
    native: Library, is_rotary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, width, length = 4, 2, 6, 5
    stored = torch.randn(2, length, width, heads + 2 * kv_heads, generator=generator).bfloat16().mT
    slope = torch.randn(2, length, width, heads, generator=generator).bfloat16().mT
    table = rotary_table(torch.arange(length), head_dim=width, theta=100.0, dtype=torch.bfloat16)
    rotary = table if is_rotary else None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def exact(qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=2)
        if rotary is not None:
            query, key = (rotate(part, tuple(one.double() for one in rotary)) for part in (query, key))  # type: ignore[arg-type]
        heads_first = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    leaf, truth = stored.clone().requires_grad_(), stored.double().requires_grad_()
    found, wanted = causal_attention(leaf, heads=heads, rotary=rotary), exact(truth)
    assert found.shape == wanted.shape and found.dtype == torch.bfloat16
    assert (found.detach() - wanted.detach()).norm() < 2**-7 * wanted.detach().norm()
    (ours,) = torch.autograd.grad(found, leaf, slope)
    (theirs,) = torch.autograd.grad(wanted, truth, slope.double())
    assert (ours - theirs).norm() < 2**-6 * theirs.norm()
    (call,) = native.calls
    assert (call.samples, call.length, call.heads, call.kv_heads, call.width) == (2, 5, 4, 2, 6)
    assert call.scale == pytest.approx(6**-0.5) and call.threads == 3
    assert call.parallel == native_kernels._parallel()
    assert (call.cosines is None) is (call.sines is None) is (not is_rotary)


def test_what_the_library_returns_is_told(native: Library) -> None:
    qkv = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16)
    native.status = -3
    with pytest.raises(MemoryError, match="no memory for bloomery_attend"):
        causal_attention(qkv, heads=1, rotary=None)
    native.status = -1
    with pytest.raises(AssertionError, match="bloomery_attend returned -1"):
        causal_attention(qkv, heads=1, rotary=None)
    native.status = 0
    assert supports_attention(qkv) and not supports_attention(qkv.half())
    assert not supports_attention(qkv[..., :3]) and not supports_attention(qkv.to("meta"))


def test_the_library_makes_slopes_and_terms_of_each_row(
    native: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 12, generator=generator).bfloat16()[:, ::2]
    targets = torch.tensor([[0, 5, IGNORED, 3, 6, 2, 1], [4] * 7]).T.contiguous()[:, 0]
    slopes, entropy, z = entropy_gradient(logits, targets, 0.01)
    leaf = logits.float().requires_grad_()
    counted = torch.tensor([True, True, False, True, False, True, True])
    safe = torch.where(counted, targets, IGNORED)
    wanted = F.cross_entropy(leaf, safe, reduction="none")
    wanted_z = 0.01 * counted * leaf.logsumexp(-1).square()
    (slope,) = torch.autograd.grad((wanted + wanted_z).sum(), leaf)
    torch.testing.assert_close((entropy, z), (wanted.detach(), wanted_z.detach()))
    torch.testing.assert_close(slopes, slope.bfloat16())
    (call,) = native.calls
    assert (call.rows, call.vocabulary, call.threads) == (7, 6, 3)
    assert call.z_loss == pytest.approx(0.01) and call.parallel == native_kernels._parallel()


@pytest.mark.parametrize(("present", "units", "has"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_the_units_are_those_of_the_processor_where_the_library_is_there(
    present: bool, units: int, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(bloomery_attention_units=lambda: units) if present else None
    monkeypatch.setattr(native_kernels, "library", lambda: library)
    assert native_kernels.has_amx.__wrapped__() is has


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_a_decoder_on_units_is_the_one_without(native: Library, qk_norm: bool, position: str) -> None:
    section = ModelSection(
        layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, init_std=0.3, qk_norm=qk_norm, position=position
    )
    decoder = build(section, vocabulary=20, sequence_length=6, dtype=torch.bfloat16)
    initialise(decoder, seed=1)
    tokens = torch.arange(12).view(2, 6)
    for block in decoder.blocks:
        block.attention.has_units = False
    expected = decoder(tokens)
    for block in decoder.blocks:
        block.attention.has_units = True
    found = decoder(tokens)
    assert len(native.calls) == 2
    assert (found - expected).norm() < 0.03 * expected.norm()
    with torch.no_grad():
        decoder(tokens, cache=decoder.cache(batch=2, capacity=6))
        decoder(tokens, documents=torch.zeros(2, 6, dtype=torch.int32))
        decoder.float()(tokens)
    assert len(native.calls) == 2, "a cache, a mask and other dtypes are not for the library"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tiles of each call of a kernel; torch computes what it would."""
    tiles: list[Any] = []

    def forward(
        query: Any, key: Any, value: Any, rules: Rules, mixed: Any, log_partition: Any, used: Any
    ) -> None:
        tiles.append(used)
        assert all(one.stride(-1) == 1 for one in (query, key, value)) and lies_in_one_piece(rules)
        mixed.copy_(written_out(query.double(), key.double(), value.double(), rules))
        log_partition.fill_(7.0)

    def backward(
        gradient: Any, query: Any, key: Any, value: Any, rules: Rules, mixed: Any, log_partition: Any,
        results: Any, *, tiles: Any,
    ) -> None:  # fmt: skip
        assert (log_partition == 7.0).all() and gradient.stride(-1) == 1 and lies_in_one_piece(rules)
        with torch.enable_grad():
            leaves = [one.double().requires_grad_() for one in (query, key, value)]
            again = written_out(*leaves, rules)
            torch.testing.assert_close(mixed.double(), again.detach(), rtol=1e-5, atol=1e-5)
            for place, slope in zip(
                results, torch.autograd.grad(again, leaves, gradient.double()), strict=True
            ):
                place.copy_(slope)
        used.append(tiles)

    used = tiles
    monkeypatch.setitem(sys.modules, "bloomery.kernels.triton_attention", SimpleNamespace(forward=forward))
    module = SimpleNamespace(backward=backward)
    monkeypatch.setitem(sys.modules, "bloomery.kernels.triton_attention_backward", module)
    return tiles


def lies_in_one_piece(rules: Rules) -> bool:
    """Whether the kernels, which are told no strides of rules, find what they look for."""
    parts = (rules.starts, rules.ends, rules.slopes, rules.row_keys, rules.column_keys)
    return all(part is None or part.is_contiguous() for part in parts)


def rules_of(*, documents: bool, alibi: bool, drops: bool) -> tuple[Visibility, ElementKeys | None, float]:
    starts = ends = None
    if documents:
        ranges = document_ranges(torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]]))
        starts, ends = (one.t().contiguous().t() for one in ranges)
    keys = None
    if drops:
        generator = torch.Generator().manual_seed(5)
        draw: Callable[..., torch.Tensor] = lambda *shape: torch.randint(  # noqa: E731
            -(2**31), 2**31, shape, generator=generator
        ).int()
        keys = ElementKeys(rows=draw(4, 2, 5).transpose(0, 1), columns=draw(10)[::2])
    slopes = torch.tensor([[0.5, 9.0], [0.25, 9.0], [0.125, 9.0], [0.0625, 9.0]])[:, 0] if alibi else None
    return Visibility(starts=starts, ends=ends, slopes=slopes), keys, 0.3 if drops else 0.0


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("alibi", [True, False])
@pytest.mark.parametrize("drops", [True, False])
def test_attention_by_tiles_and_its_gradients_follow_each_rule(
    triton: list[Any], documents: bool, alibi: bool, drops: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    visibility, keys, rate = rules_of(documents=documents, alibi=alibi, drops=drops)
    transposed = torch.randn(2, 5, 16, 4, generator=generator).transpose(2, 3)
    query = transposed.requires_grad_()  # whose numbers of a head do not lie side by side
    key, value = (torch.randn(2, 5, 2, 16, generator=generator).requires_grad_() for _ in range(2))
    leaves, slope = (query, key, value), torch.randn(2, 5, 4, 16, generator=generator)
    found = tiled_attention(*leaves, visibility, keys=keys, rate=rate)
    rows, columns = (None, None) if keys is None else (keys.rows, keys.columns)
    rules = Rules(
        starts=visibility.starts,
        ends=visibility.ends,
        slopes=visibility.slopes,
        row_keys=rows,
        column_keys=columns,
        rate=rate,
    )
    wide = [one.detach().double().requires_grad_() for one in leaves]
    wanted = written_out(*wide, rules)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    ours, theirs = (
        torch.autograd.grad(found, leaves, slope),
        torch.autograd.grad(wanted, wide, slope.double()),
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert triton == [tiles_for(16).forward, tiles_for(16)]


def test_a_compiler_is_told_the_shapes_of_attention_by_tiles_and_on_units() -> None:
    with FakeTensorMode():
        query, key = torch.empty(2, 5, 4, 16).half(), torch.empty(2, 5, 2, 16).half()
        none = (None,) * 5
        forward = torch.ops.bloomery.tiled_attention(query, key, key, *none, 0.0)
        backward = torch.ops.bloomery.tiled_attention_backward(query, query, key, key, *none, *forward, 0.0)
        qkv = torch.empty(2, 5, 8, 16).bfloat16()
        attended = torch.ops.bloomery.attend(qkv, None, None, 4)
        slopes = torch.ops.bloomery.attend_backward(attended[0], qkv, None, None, *attended)
        terms = torch.ops.bloomery.entropy_gradient(torch.empty(6, 9).bfloat16(), torch.empty(6).long(), 0.1)
    half, narrow, wide = torch.float16, torch.bfloat16, torch.float32
    assert [(tuple(one.shape), one.dtype) for one in (*forward, *backward, *attended, slopes, *terms)] == [
        ((2, 5, 4, 16), half),
        ((2, 4, 5), wide),
        ((2, 5, 4, 16), half),
        ((2, 5, 2, 16), half),
        ((2, 5, 2, 16), half),
        ((2, 5, 4, 16), narrow),
        ((2, 4, 5), wide),
        ((2, 5, 8, 16), narrow),
        ((6, 9), narrow),
        ((6,), wide),
        ((6,), wide),
    ]


@pytest.mark.parametrize(
    ("device", "dtype", "width", "has_triton", "supports"),
    [
        ("cuda", torch.bfloat16, 128, True, True),
        ("cuda", torch.float16, 64, True, True),
        ("cuda", torch.bfloat16, 129, True, False),
        ("cuda", torch.float32, 64, True, False),
        ("cpu", torch.bfloat16, 64, True, False),
        ("cuda", torch.bfloat16, 64, False, False),
    ],
)
def test_tiles_are_for_narrow_heads_in_16_bits_where_triton_is(
    device: str, dtype: torch.dtype, width: int, has_triton: bool, supports: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fused_attention, "has_triton", lambda: has_triton)
    assert fused_attention.supports_tiled_attention(torch.device(device), dtype, width) is supports


def test_heads_reach_the_kernel_in_place_unless_its_32_bits_cannot_address_a_tile_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached: list[torch.Tensor] = []
    module = SimpleNamespace(forward=lambda query, *_: reached.append(query))
    monkeypatch.setitem(sys.modules, "bloomery.kernels.triton_attention", module)
    rules = (None, None, None, None, None, 0.0)
    long = torch.empty(1, 2**31 // (64 * 128) + 1, 64, 128, dtype=torch.bfloat16)  # no page of it is touched
    key = torch.empty(1, long.shape[1], 1, 1, dtype=torch.bfloat16).expand(-1, -1, 1, 128)
    torch.ops.bloomery.tiled_attention(long, key, key, *rules)
    assert reached[0].data_ptr() == long.data_ptr()
    for stride, copies in ((2**24, False), (2**24 + 128, True)):
        apart = torch.empty(3 * stride, dtype=torch.bfloat16).as_strided((1, 3, 2, 128), (0, stride, 128, 1))
        torch.ops.bloomery.tiled_attention(apart, key[:, :3], key[:, :3], *rules)
        assert (reached[-1].data_ptr() != apart.data_ptr()) == copies
        assert reached[-1].stride(1) == (2 * 128 if copies else stride)


def test_attention_by_tiles_is_given_the_dropout_of_weights_at_its_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = ModelSection(layers=1, hidden=16, heads=4, ffn=24, attention_dropout=0.25)
    made = build(section, vocabulary=20, sequence_length=6).blocks[0].attention
    given: list[Any] = []
    monkeypatch.setattr(attention, "tiled_attention", lambda *told, **more: given.append((told, more)))
    keys: Any = "keys"
    made._attend_by_tiles("q", "k", "v", "visibility", BlockDropout(keys, None, None))
    made._attend_by_tiles("q", "k", "v", "visibility", None)
    usual = ("q", "k", "v", "visibility")
    assert given[0] == (usual, {"keys": "keys", "rate": 0.25})
    assert given[1][0] == usual and given[1][1].get("keys") is None
