from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.config.model import ModelSection
from bloomery.model import attention, dropout
from bloomery.model import decoder as decoder_module
from bloomery.model.decoder import build
from bloomery.model.dropout import ElementKeys, drop, dropout_address, hidden_keys, keeps, weight_keys
from bloomery.model.initial_filling import initialise

SECTION = ModelSection(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, hidden_dropout=0.2, attention_dropout=0.2, init_std=0.2
)


def hidden_mask(
    *, rate: float = 0.5, seed: int = 1, step: int = 3, first: int = 0, site: int = 2
) -> torch.Tensor:
    samples = torch.arange(first, first + 8)
    address = dropout_address(seed=seed, step=step, samples=samples, positions=range(64))
    return keeps(hidden_keys(address, site=site, width=128, held=64), rate)


def deviations(mask: torch.Tensor, rate: float) -> torch.Tensor:
    return (mask.double() - (1 - rate)) / math.sqrt(rate * (1 - rate))


def test_samples_of_the_longest_streams_have_masks_of_their_own() -> None:
    masks = [hidden_mask(first=first) for first in (0, 1 << 32, 1 << 33, 3 << 32, 1 << 40)]
    alike = [(one == other).double().mean() for one in masks for other in masks if one is not other]
    assert max(abs(share - 0.5) for share in alike) < 0.05


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_kept_share_is_one_minus_the_rate_in_every_direction(rate: float) -> None:
    kept = deviations(hidden_mask(rate=rate), rate)
    assert abs(kept.sum()) / math.sqrt(kept.numel()) < 4
    for dims in ((0, 1), (0, 2), (1, 2), (2,)):
        sums = kept.sum(dims)
        spread = (sums / math.sqrt(kept.numel() / sums.numel())).var().item()
        assert abs(spread - 1) < 6 * math.sqrt(2 / sums.numel())


def test_neighbours_steps_sites_seeds_and_samples_are_independent() -> None:
    one = deviations(hidden_mask(), 0.5)
    others = [deviations(hidden_mask(**change), 0.5) for change in ({"seed": 2}, {"step": 4}, {"site": 3})]
    others += [deviations(hidden_mask(first=8), 0.5), deviations(hidden_mask(first=2**33), 0.5)]
    others += [one.roll(shift, dims=dim) for dim in (0, 1, 2) for shift in (1, 2, 4)]
    for other in others:
        assert abs((one * other).sum()) / math.sqrt(one.numel()) < 4.5


def test_eager_code_hashes_some_rows_at_a_time_and_drops_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = operation(*arguments, **(keywords or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.int64:
                largest = max(largest, result.numel())
            return result

    address = dropout_address(seed=1, step=2, samples=torch.arange(3), positions=range(50))
    keys = weight_keys(address, site=3, heads=4)
    whole = keeps(keys, 0.3)
    monkeypatch.setattr(dropout, "_ELEMENTS_AT_ONCE", 50 * 7)  # 600 rows, which are no multiple of 7
    with Largest():
        in_parts = keeps(keys, 0.3)
    assert torch.equal(in_parts, whole) and whole.shape == (3, 4, 50, 50)
    assert largest == 50 * 7


def test_each_block_drops_attention_weights_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[torch.Tensor] = []

    def watched(weights: torch.Tensor, rate: float, keys: ElementKeys) -> torch.Tensor:
        masks.append(keeps(keys, rate))
        return drop(weights, rate, keys)

    monkeypatch.setattr(attention, "drop", watched)
    decoder = build(SECTION, vocabulary=50, sequence_length=32)
    initialise(decoder, seed=1)
    address = dropout_address(seed=1, step=3, samples=torch.arange(4), positions=range(32))
    decoder(torch.zeros(4, 32, dtype=torch.int64), address=address)
    first, second = (deviations(mask, 0.2) for mask in masks)
    assert abs((first * second).sum()) / math.sqrt(first.numel()) < 4.5


def test_what_is_kept_is_scaled_up() -> None:
    address = dropout_address(seed=1, step=0, samples=torch.arange(2), positions=range(8))
    kept = drop(torch.ones(2, 8, 16), 0.2, hidden_keys(address, site=1, width=16, held=8))
    assert set(kept.unique().tolist()) == {0.0, 1.25}


def test_a_sample_has_its_mask_in_whatever_batch_it_comes() -> None:
    decoder = build(SECTION, vocabulary=50, sequence_length=12)
    initialise(decoder, seed=1)
    tokens, samples = torch.arange(48).view(4, 12), torch.tensor([7, 5, 2**40 + 1, 9])

    def hidden(rows: slice) -> torch.Tensor:
        address = dropout_address(seed=3, step=11, samples=samples[rows], positions=range(12))
        return decoder(tokens[rows], address=address)

    whole = hidden(slice(None))
    parts = torch.cat([hidden(slice(0, 1)), hidden(slice(1, 3)), hidden(slice(3, 4))])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-5)
    assert (whole - decoder(tokens)).abs().max() > 0.1


def test_a_rank_with_some_heads_or_positions_has_its_part_of_the_mask() -> None:
    whole = dropout_address(seed=1, step=2, samples=torch.arange(3), positions=range(16))
    some_heads = replace(whole, first_head=2)
    expected = keeps(weight_keys(whole, site=3, heads=4), 0.3)[:, 2:]
    assert torch.equal(keeps(weight_keys(some_heads, site=3, heads=2), 0.3), expected)
    some_positions = replace(whole, first_position=8)
    of_all = keeps(hidden_keys(whole, site=1, width=8, held=16), 0.3)
    assert torch.equal(keeps(hidden_keys(some_positions, site=1, width=8, held=8), 0.3), of_all[:, 8:])


def test_the_masks_of_two_rows_at_two_columns_are_independent() -> None:
    """Keys of rows and columns are combined by xor, so four elements share four keys."""
    kept = deviations(hidden_mask(), 0.5)
    for shift in (1, 2, 8, 31):
        square = kept * kept.roll(shift, 1) * kept.roll(shift, 2) * kept.roll((shift, shift), (1, 2))
        assert abs(square.sum()) / math.sqrt(square.numel()) < 4.5


def test_attention_with_next_to_no_dropout_is_attention() -> None:
    """The written-out path against the fused one: at this rate no weight of so few is dropped."""
    section = ModelSection(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, attention_dropout=1e-7, init_std=0.2
    )
    for position in ("rotary", "alibi"):
        decoder = build(
            ModelSection(**{**vars(section), "position": position}), vocabulary=50, sequence_length=12
        )
        initialise(decoder, seed=1)
        tokens = torch.arange(24).view(2, 12)
        documents = torch.tensor([[0] * 4 + [1] * 8] * 2)
        address = dropout_address(seed=3, step=1, samples=torch.arange(2), positions=range(12))
        for mask in (None, documents):
            dropped = decoder(tokens, documents=mask, address=address)
            torch.testing.assert_close(dropped, decoder(tokens, documents=mask), rtol=0, atol=1e-4)


def test_masks_are_those_of_earlier_versions_so_that_a_run_goes_on_as_it_began() -> None:
    samples = torch.tensor([3, (1 << 35) + 9])
    address = dropout_address(seed=(1 << 33) + 7, step=5, samples=samples, positions=range(2, 5))
    assert address.rows.tolist() == [[492785179, 2906601187, 3174347600], [2737888673, 3967897243, 979548897]]
    hidden = hidden_keys(address, site=4, width=6, held=3)
    assert hidden.rows.tolist() == [[634649511, -492758385, -793964912], [85475717, -2099859929, -648164411]]
    columns = [-400013027, -844545034, -417473535, 1760961955, -1016966216, -2084591527]
    assert hidden.columns.tolist() == columns
    weights = weight_keys(replace(address, first_head=1), site=4, heads=2)
    assert weights.rows.tolist() == [
        [[1682979414, 611496305, -1998772131], [1542508668, 1865349407, 1943637567]],
        [[-979088647, -1622953473, 877957421], [-716853726, -595707166, -1403502964]],
    ]
    assert weights.columns.tolist() == columns[:3]
    assert keeps(hidden, 0.5).int().tolist() == [
        [[0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 1, 0], [1, 0, 1, 1, 1, 1]],
        [[0, 1, 0, 1, 0, 1], [0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1]],
    ]


def test_a_block_has_three_sites_of_its_own_for_what_is_dropped() -> None:
    address = dropout_address(seed=1, step=2, samples=torch.arange(2), positions=range(4))
    sizes = {"heads": 2, "hidden": 6, "held": 4}
    both = dropout.block_dropout(address, 3, **sizes, weights=True, outputs=True)
    assert both.attention_output is not None and both.mlp_output is not None and both.weights is not None
    for found, wanted in (
        (both.attention_output, hidden_keys(address, site=10, width=6, held=4)),
        (both.mlp_output, hidden_keys(address, site=11, width=6, held=4)),
        (both.weights, weight_keys(address, site=12, heads=2)),
    ):
        assert torch.equal(found.rows, wanted.rows) and torch.equal(found.columns, wanted.columns)
    outputs = dropout.block_dropout(address, 3, **sizes, weights=False, outputs=True)
    assert outputs.weights is None and outputs.mlp_output is not None and outputs.attention_output is not None
    weights = dropout.block_dropout(address, 3, **sizes, weights=True, outputs=False)
    assert weights.weights is not None and weights.mlp_output is weights.attention_output is None


def test_the_embedding_is_dropped_at_a_site_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def keys(address: Any, *, site: int, width: int, held: int) -> ElementKeys:
        asked.append((site, width, held))
        return hidden_keys(address, site=site, width=width, held=held)

    monkeypatch.setattr(decoder_module, "hidden_keys", keys)
    monkeypatch.setattr(dropout, "hidden_keys", keys)
    model = build(SECTION, vocabulary=50, sequence_length=8)
    initialise(model, seed=1)
    address = dropout_address(seed=1, step=2, samples=torch.arange(2), positions=range(8))
    model(torch.arange(16).view(2, 8), address=address)
    assert asked == [(site, 32, 8) for site in (0, 1, 2, 4, 5)], "and each block's weights have the third"


@pytest.mark.parametrize("rates", [(0.2, 0.0), (0.0, 0.2), (0.2, 0.2), (0.0, 0.0)])
def test_a_rank_drops_what_the_recipe_says_of_the_heads_and_positions_that_it_holds(
    rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def block_dropout(address: Any, block: int, **told: Any) -> Any:
        asked.append((address.first_head, address.first_position, block, told))
        raise InterruptedError

    monkeypatch.setattr(decoder_module, "block_dropout", block_dropout)
    section = replace(SECTION, position="alibi", attention_dropout=rates[0], hidden_dropout=rates[1])
    model = build(section, vocabulary=50, sequence_length=12)
    initialise(model, seed=1)
    model.heads, model.sequence_index, model.sequence_degree = range(3, 4), 2, 3
    address = dropout_address(seed=1, step=2, samples=torch.arange(2), positions=range(12))
    context = model._attention_context(
        torch.zeros(2, 4, 32), torch.arange(12), before=0, documents=None, drops=True
    )
    of_rank = model._held(address, 12)
    if not any(rates):
        assert model._dropping(context, 1, of_rank, 4) is context
        return
    with pytest.raises(InterruptedError):
        model(torch.zeros(2, 12, dtype=torch.int64), address=address, hidden=torch.zeros(2, 4, 32))
    told = {"heads": 1, "hidden": 32, "held": 4, "weights": rates[0] > 0.0, "outputs": rates[1] > 0.0}
    assert asked == [(3, 8, 0, told)]


def test_what_attention_and_mlp_return_is_dropped_by_keys_of_its_own_at_the_rate_of_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    made: Any = dropout.BlockDropout(None, "attention's", "mlp's")  # type: ignore[arg-type]
    monkeypatch.setattr(decoder_module, "block_dropout", lambda *told, **more: made)
    monkeypatch.setattr(decoder_module, "hidden_keys", lambda *told, **more: "embedding's")
    monkeypatch.setattr(decoder_module, "drop", lambda x, rate, keys: asked.append((rate, keys)) or x)
    model = build(replace(SECTION, hidden_dropout=0.3), vocabulary=50, sequence_length=8)
    initialise(model, seed=1)
    address = dropout_address(seed=1, step=2, samples=torch.arange(2), positions=range(8))
    model._attention_context = lambda *told, **more: attention.AttentionContext(None, True, None)  # type: ignore[method-assign]
    model(torch.arange(16).view(2, 8), address=address)
    assert asked == [(0.3, "embedding's"), *[(0.3, "attention's"), (0.3, "mlp's")] * 2]


def test_nothing_is_dropped_at_a_rate_of_nothing() -> None:
    word = torch.zeros(3, dtype=torch.int32)  # which is hashed to zero
    assert keeps(ElementKeys(word, word), 0.0).all()


def test_a_row_that_is_longer_than_what_is_hashed_at_a_time_is_hashed_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, columns = torch.arange(4, dtype=torch.int32), torch.arange(9, dtype=torch.int32)
    expected = keeps(ElementKeys(rows, columns), 0.5)
    monkeypatch.setattr(dropout, "_ELEMENTS_AT_ONCE", 5)
    assert torch.equal(keeps(ElementKeys(rows, columns), 0.5), expected)
