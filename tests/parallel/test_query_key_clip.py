"""QK-clip: it measures the logits that attention computes, and rescales the heads that are above."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.model.test_decoder import STYLES
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.config.load import parse_recipe
from bloomery.config.optim import LossSection, OptimSection
from bloomery.config.parallel import ParallelSection
from bloomery.config.validate import check_recipe
from bloomery.data_loader.batches import MicroBatch
from bloomery.errors import ConfigError
from bloomery.model import attention
from bloomery.model.attention import rotary_table, rotate
from bloomery.optim.clip import CountedGradient, examine
from bloomery.parallel.build import TrainingModel, build_training_model
from bloomery.parallel.inner_sizes import InnerSizes, by_kind
from bloomery.parallel.mesh import Mesh

VOCABULARY, LENGTH = 64, 16


def model_of(style: str, *, threshold: float, stride: int = 1, compiled: bool = False) -> TrainingModel:
    model = build_training_model(
        STYLES[style],
        vocabulary=VOCABULARY,
        sequence_length=LENGTH,
        optim=OptimSection(name="muon", learning_rate=0.1, qk_clip=threshold, qk_clip_stride=stride),
        loss=LossSection(),
        loss_chunk=64,
        seed=1,
        mesh=Mesh(device=torch.device("cpu")),
        parallel=ParallelSection(),
        compiled=compiled,
    )
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    return model


def with_biases(model: TrainingModel) -> TrainingModel:
    """Draw the biases of attention, which begin as zeros."""
    generator = torch.Generator().manual_seed(9)
    for entry in model.weights.state_entries():
        if ".attention." in entry.name and entry.name.endswith(".bias"):
            entry.tensor.normal_(std=0.2, generator=generator)
    model.weights.copy_masters_to_working()
    return model


def batch(seed: int) -> MicroBatch:
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(tokens=tokens, targets=tokens, documents=None, samples=torch.arange(2))


def logits(model: TrainingModel, micro_batch: MicroBatch) -> list[torch.Tensor]:
    """Each block's q · k / √d, hidden places -inf, [b, heads, s, s]: recomputed from what its norm gave."""
    decoder = model.decoder
    inputs: list[torch.Tensor] = []
    hooks = [
        block.attention.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for block in decoder.blocks
    ]
    with torch.no_grad():
        decoder(micro_batch.tokens)
    for hook in hooks:
        hook.remove()
    found = []
    for block, x in zip(decoder.blocks, inputs, strict=True):
        attention = block.attention
        heads, kv_heads, width = attention.heads, attention.kv_heads, attention.head_dim
        qkv = torch.nn.functional.linear(x, attention.qkv.weight, attention.qkv.bias)
        query = qkv[..., : heads * width].unflatten(-1, (heads, width))
        key = qkv[..., heads * width : (heads + kv_heads) * width].unflatten(-1, (kv_heads, width))
        if decoder.model.section.position == "rotary":
            table = rotary_table(torch.arange(LENGTH), head_dim=width, theta=1e4, dtype=torch.float32)
            query, key = rotate(query, table), rotate(key, table)
        key = key.repeat_interleave(heads // kv_heads, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(width)
        hidden = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
        found.append(scores.masked_fill(hidden, -math.inf).detach())
    return found


def maxima_of(model: TrainingModel, *batches: MicroBatch) -> torch.Tensor:
    """Each head's largest logit over all batches, at least 0, [blocks, heads]."""
    each = [torch.stack([scores.amax((0, 2, 3)) for scores in logits(model, one)]) for one in batches]
    return torch.stack(each).amax(0).clamp(min=0.0)


@pytest.mark.parametrize("style", ["llama", "bloom", "gpt2"])
def test_heads_above_the_threshold_come_down_to_it_and_others_keep_every_bit(style: str) -> None:
    plain = with_biases(model_of(style, threshold=1.0))
    batches = [batch(1), batch(2)]
    before = maxima_of(plain, *batches)
    threshold = float(before.flatten().sort().values[before.numel() // 2])  # half of the heads are above
    model = with_biases(model_of(style, threshold=threshold))
    model.accumulate(batches, 0, weight=1.0)
    measured = torch.stack([block.attention.logit_maxima for block in model.decoder.blocks])
    torch.testing.assert_close(measured, before)
    weights = [block.attention.qkv.weight.detach().clone() for block in model.decoder.blocks]
    model.after_update(examine([CountedGradient(gradient=torch.ones(1))], limit=0.0, unscale=1.0))
    model.weights.copy_masters_to_working()
    changed = 0
    for index, block in enumerate(model.decoder.blocks):
        attention, old = block.attention, weights[index]
        heads, kv_heads, width = attention.heads, attention.kv_heads, attention.head_dim
        rows = attention.qkv.weight.detach().unflatten(0, (-1, width))
        were = old.unflatten(0, (-1, width))
        assert torch.equal(rows[heads + kv_heads :], were[heads + kv_heads :])  # values
        for head in range(heads):
            largest = float(before[index, head])
            factor = threshold / largest if largest > threshold else 1.0
            changed += factor != 1.0
            if kv_heads == heads:
                factor = math.sqrt(factor)
                torch.testing.assert_close(rows[heads + head], were[heads + head] * factor)
            torch.testing.assert_close(rows[head], were[head] * factor)
        if kv_heads != heads:
            assert torch.equal(rows[heads : heads + kv_heads], were[heads : heads + kv_heads])
    assert 0 < changed < before.numel()
    # The first block's inputs are what they were: its logits are at the threshold now.
    after = maxima_of(model, *batches)[0]
    torch.testing.assert_close(after, before[0].clamp(max=threshold), rtol=1e-4, atol=1e-5)
    assert all(float(block.attention.logit_maxima.max()) == 0.0 for block in model.decoder.blocks)


def test_a_clamp_rescales_as_the_recipe_does_and_measures_only_while_it_holds() -> None:
    recipes, clamped = model_of("llama", threshold=0.05), model_of("llama", threshold=0.0)
    unclamped = [master.clone() for master in clamped.weights.master]
    applied = examine([CountedGradient(gradient=torch.ones(1))], limit=0.0, unscale=1.0)
    for limit in (0.0, 0.05, 0.0):
        clamped.clip_queries(limit)
        clamped.accumulate([batch(1)], 0, weight=1.0)
        measures = [block.attention.logit_maxima is not None for block in clamped.decoder.blocks]
        assert set(measures) == {limit > 0.0}
        clamped.after_update(applied)
    recipes.accumulate([batch(1)], 0, weight=1.0)
    recipes.after_update(applied)
    masters = list(zip(recipes.weights.master, clamped.weights.master, unclamped, strict=True))
    assert all(torch.equal(a, b) for a, b, _ in masters)
    assert not all(torch.equal(b, before) for _, b, before in masters)


class LargestScores(TorchDispatchMode):
    """Keeps how many scores of a measurement there were at once, those of hidden keys among them."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.masked_fill.Scalar and result.dim() == 5:
            self.most = max(self.most, result.numel())
        return result


def test_the_scores_of_a_measurement_take_no_more_memory_at_once_than_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("gpt2", threshold=1.0)
    heads = model.decoder.blocks[0].attention.heads
    most = []
    for rows in (LENGTH, 3):
        monkeypatch.setattr(attention, "SCORES_AT_ONCE", rows * 2 * heads * LENGTH)
        with LargestScores() as seen:
            model.accumulate([batch(3)], 0, weight=1.0)
        most.append(seen.most)
    assert most == [LENGTH * 2 * heads * LENGTH, 3 * 2 * heads * LENGTH]


def test_a_refused_update_rescales_nothing_and_evaluation_measures_nothing() -> None:
    model = model_of("llama", threshold=1e-3)
    model.entropy([batch(1)])
    assert all(float(block.attention.logit_maxima.max()) == 0.0 for block in model.decoder.blocks)
    model.accumulate([batch(1)], 0, weight=1.0)
    before = [master.clone() for master in model.weights.master]
    model.after_update(examine([CountedGradient(gradient=torch.tensor([math.nan]))], limit=0.0, unscale=1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.weights.master, strict=True))


@pytest.mark.parametrize("at_once", [attention.SCORES_AT_ONCE, 3 * 4 * LENGTH, 1])
@pytest.mark.parametrize(("stride", "every"), [(5, [0, 5, 10, 15]), (6, [3, 9, 15])])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_stride_looks_at_every_nth_query_and_at_the_last(
    style: str, stride: int, every: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)
    model = model_of(style, threshold=1.0, stride=stride)
    model.accumulate([batch(3)], 0, weight=1.0)
    measured = torch.stack([block.attention.logit_maxima for block in model.decoder.blocks])
    expected = torch.stack([scores[:, :, every].amax((0, 2, 3)) for scores in logits(model, batch(3))])
    torch.testing.assert_close(measured, expected.clamp(min=0.0))


@pytest.mark.parametrize(
    "settings",
    [
        ["model.qk_norm=true", "optim.qk_clip=100"],
        ["elastic.inner_steps=1", "elastic.average=gradients", "optim.qk_clip=100"],
    ],
)
def test_qk_clip_is_refused_where_it_cannot_hold(settings: list[str]) -> None:
    loaded = parse_recipe(RECIPE, settings, label="tiny")
    with pytest.raises(ConfigError, match=r"optim\.qk_clip"):
        check_recipe(loaded.recipe, loaded.sources)


RECIPE = """
[run]
name = "tiny"
[model]
layers = 1
hidden = 16
heads = 2
[data]
sources = ["python:stdlib"]
sequence_length = 16
[train]
samples = 8
global_batch = 8
micro_batch = 8
[optim]
learning_rate = 1e-3
"""


@pytest.mark.parametrize("threshold", [0.0, 0.3], ids=["alone", "beside QK-clip"])
@pytest.mark.parametrize("style", ["llama", "bloom", "gpt2"])
def test_sizes_of_inner_tensors_are_those_of_the_forwards(style: str, threshold: float) -> None:
    model, batches = model_of(style, threshold=threshold), [batch(1), batch(2)]
    largest = maxima_of(model, *batches).amax(1)
    hidden: dict[int, float] = {}
    for block in model.decoder.blocks:

        def keep(block: Any, _: Any, output: torch.Tensor) -> None:
            hidden[block.index] = max(hidden.get(block.index, 0.0), output.abs().max().item())

        block.register_forward_hook(keep)
    for wanted in (True, False, True):
        model.clip_queries(0.0)
        model.begin_sizes(wanted=wanted)
        hidden.clear()
        model.accumulate(batches, 0, weight=1.0)
        if wanted:
            assert model.inner_sizes is not None
            sizes = by_kind(model.inner_sizes.collect().flatten().tolist())
            assert sizes["logit"] == pytest.approx(largest.tolist(), rel=1e-4)
            assert sizes["hidden"] == pytest.approx([hidden[index] for index in sorted(hidden)])
            for index, size in enumerate(sizes["weight"]):
                own = [p for n, p in model.decoder.named_parameters() if n.startswith(f"blocks.{index}.")]
                squares = sum(parameter.double().square().sum().item() for parameter in own)
                assert size == pytest.approx(math.sqrt(squares / sum(p.numel() for p in own)))
        else:
            taken = [block.attention.logit_maxima for block in model.decoder.blocks]
            assert all((maxima is None) == (threshold == 0.0) for maxima in taken)
            assert all(block.hidden_maximum is None for block in model.decoder.blocks)


def test_the_clamp_looks_at_its_own_queries_after_a_measurement_of_others() -> None:
    model = model_of("llama", threshold=0.0, stride=2)
    sizes = InnerSizes(model.decoder, model.weights, mesh=model.mesh, sequence_length=80, stays_on=False)
    for wanted, limit, stride in ((True, 0.0, 5), (False, 1.0, 2)):
        model.clip_queries(limit)
        sizes.begin(wanted=wanted)
        attentions = [block.attention for block in model.decoder.blocks]
        assert {attention.logit_stride for attention in attentions} == {stride}
        assert all(attention.logit_maxima is not None for attention in attentions)


def test_forwards_after_the_sizes_were_collected_count_to_no_step() -> None:
    model = model_of("llama", threshold=0.0)
    assert model.inner_sizes is not None
    model.begin_sizes(wanted=True)
    model.accumulate([batch(1)], 0, weight=1.0)
    expected = model.inner_sizes.collect()
    model.accumulate([batch(2)], 0, weight=1.0)  # as a check for flipped bits repeats a step
    model.begin_sizes(wanted=True)
    model.accumulate([batch(1)], 1, weight=1.0)
    torch.testing.assert_close(model.inner_sizes.collect(), expected)


@pytest.mark.parametrize(("length", "stride"), [(8, 1), (16, 1), (40, 2), (64, 4)])
def test_of_a_long_sequence_some_queries_are_measured_and_of_a_short_one_all(
    length: int, stride: int
) -> None:
    model = model_of("llama", threshold=0.0)
    sizes = InnerSizes(model.decoder, model.weights, mesh=model.mesh, sequence_length=length, stays_on=False)
    sizes.begin(wanted=True)
    assert [block.attention.logit_stride for block in model.decoder.blocks] == [stride] * 2
    assert all(block.attention.logit_maxima is not None for block in model.decoder.blocks)


def test_a_traced_model_is_measured_and_clamped_as_an_eager_one_and_is_traced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The code that is made of the graph would take half a minute; `make soak PART=compiled` runs that too.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert_compiled_clamps_alike()


def assert_compiled_clamps_alike() -> None:
    torch._dynamo.reset()
    counters.clear()
    eager, own = (sizes_while_clamped(compiled=compiled) for compiled in (False, True))
    for expected, found in zip(eager, own, strict=True):
        assert found["logit"] == pytest.approx(expected["logit"], rel=1e-4)
        assert found["weight"] == pytest.approx(expected["weight"], rel=1e-5)
    assert min(own[0]["logit"]) > 1.0 and max(own[1]["logit"]) < 1.0, "heads were rescaled"
    assert counters["stats"]["unique_graphs"] == 1


def sizes_while_clamped(*, compiled: bool) -> list[dict[str, list[float]]]:
    """Four steps, as on the rung `clamp`, which begins at the third step."""
    model, sizes = model_of("llama", threshold=0.0, compiled=compiled), []
    for step in range(4):
        model.clip_queries(0.5 if step >= 2 else 0.0)
        model.begin_sizes(wanted=step % 2 == 1, later=True)
        model.accumulate([batch(1)], step, weight=1.0)
        if step % 2 == 1:
            assert model.inner_sizes is not None
            sizes.append(by_kind(model.inner_sizes.collect().flatten().tolist()))
        model.after_update(examine([CountedGradient(gradient=torch.ones(1))], limit=0.0, unscale=1.0))
        model.weights.copy_masters_to_working()
    return sizes


@pytest.mark.parametrize("stays_on", [False, True])
def test_a_step_that_wants_no_sizes_is_measured_only_where_measuring_stays_on(stays_on: bool) -> None:
    model = model_of("llama", threshold=0.0)
    sizes = InnerSizes(
        model.decoder, model.weights, mesh=model.mesh, sequence_length=LENGTH, stays_on=stays_on
    )
    blocks = list(model.decoder.blocks)
    for later, measures in ((True, stays_on), (False, False)):
        sizes.begin(wanted=False, later=later)
        assert {block.attention.logit_maxima is not None for block in blocks} == {measures}
        assert {block.hidden_maximum is not None for block in blocks} == {measures}


def test_what_an_earlier_clamp_measured_does_not_count_for_the_next_one() -> None:
    model = model_of("llama", threshold=0.0)
    model.clip_queries(1.0)
    model.accumulate([batch(1)], 0, weight=1.0)
    attentions = [block.attention for block in model.decoder.blocks]
    assert all(float(attention.logit_maxima.max()) > 0.0 for attention in attentions)
    model.clip_queries(0.0)
    model.clip_queries(5.0)
    assert all(float(attention.logit_maxima.max()) == 0.0 for attention in attentions)


@pytest.mark.parametrize(("stays_on", "kept"), [(False, 0.0), (True, 5.0)])
def test_what_stays_on_is_the_largest_of_all_steps_since_the_last_sizes(stays_on: bool, kept: float) -> None:
    model = model_of("llama", threshold=0.0)
    sizes = InnerSizes(
        model.decoder, model.weights, mesh=model.mesh, sequence_length=LENGTH, stays_on=stays_on
    )

    def measured() -> list[float]:
        return [float(sizes._logits[0][0]), float(sizes._hidden[1])]

    def measure() -> None:
        sizes._logits[0][0] = 5.0
        sizes._hidden[1].fill_(5.0)

    sizes.begin(wanted=True)
    measure()
    sizes.begin(wanted=True)
    assert measured() == [kept, kept]
    sizes.begin(wanted=False)
    measure()
    sizes.begin(wanted=True)
    assert measured() == [0.0, 0.0], "what was measured before it was off"
