"""ZClip, AdaGC and the outlier gate against plain arithmetic on Python floats, and their state."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from bloomery.config.optim import OptimSection
from bloomery.optim.clip import (
    PREFIX,
    Clamps,
    CountedGradient,
    GradientFacts,
    GradientLimits,
    OutlierGate,
    TensorClip,
    examine,
    squared_norms,
)

RATE = 0.1


def norms_of_a_run(steps: int) -> list[float]:
    """Norms with a spread of a tenth, and spikes now and then."""
    draw = random.Random(4)
    return [
        1.0 + draw.gauss(0.0, 0.1) + (5.0 if step in (40, 41, 130, 131, 132) else 0.0)
        for step in range(steps)
    ]


def limits_of(**settings: object) -> GradientLimits:
    section = OptimSection(learning_rate=RATE, **settings)  # type: ignore[arg-type]  — settings of a test
    return GradientLimits(section, tensors=2, device=torch.device("cpu"))


def facts_of(norm: float, *, limit: float = 0.0, unscale: float = 1.0) -> GradientFacts:
    gradient = torch.tensor([norm * unscale, 0.0])
    return examine([CountedGradient(gradient=gradient)], limit=limit, unscale=unscale)


def limited(
    limits: GradientLimits, facts: GradientFacts, *, unscale: float = 1.0, z_score: float = 0.0
) -> GradientFacts:
    return limits.limit(
        facts,
        unscale=unscale,
        norms=lambda: torch.zeros(2),
        scale_tensors=lambda each: None,
        clamps=Clamps(z_score=z_score),
    )


def test_the_norm_of_a_large_gradient_is_exact_and_the_same_in_any_number_of_shards() -> None:
    gradient = torch.randn(1 << 24, generator=torch.Generator().manual_seed(5))
    exact = math.sqrt(float(torch.dot(gradient.double(), gradient.double())))
    whole = examine([CountedGradient(gradient=gradient)], limit=1.0, unscale=1.0)
    shards = [CountedGradient(gradient=part) for part in gradient.chunk(5)]
    assert float(whole.norm) == pytest.approx(exact, rel=5e-5)
    assert float(examine(shards, limit=1.0, unscale=1.0).norm) == pytest.approx(exact, rel=5e-5)
    of_tensors = squared_norms([gradient[:6].view(2, 3), gradient.view(1 << 12, -1)])
    assert float(of_tensors[1]) == pytest.approx(exact**2, rel=1e-4)


def test_the_norm_of_a_small_gradient_has_the_bits_of_one_sum() -> None:
    gradient = torch.randn(300_001, generator=torch.Generator().manual_seed(5))
    found = examine([CountedGradient(gradient=gradient)], limit=1.0, unscale=1.0)
    assert found.norm == torch.linalg.vector_norm(gradient)


def test_a_norm_is_that_of_all_ranks_and_each_element_counts_once() -> None:
    ours = CountedGradient(gradient=torch.tensor([3.0, 0.0, 0.0, 0.0]) * 8, padding=2)
    echoed = CountedGradient(gradient=torch.tensor([100.0, 0.0]), counts=False)
    summed: list[list[float]] = []

    def total(sums: torch.Tensor) -> torch.Tensor:
        summed.append(sums.tolist())
        return sums + torch.tensor([16.0 * 64, 5.0])  # another rank's, with a norm of 4

    found = examine([ours, echoed], limit=2.5, unscale=8.0, total=total)
    assert summed == [[9.0 * 64, 1.0]]
    assert (float(found.norm), int(found.zeros), bool(found.applies)) == (5.0, 6, True)
    assert float(found.shrink) == pytest.approx(0.5) and float(found.coefficient) == pytest.approx(0.5 / 8)
    unlimited = examine([ours], limit=0.0, unscale=8.0)
    assert (float(unlimited.shrink), float(unlimited.coefficient)) == (1.0, 1 / 8)
    below = examine([ours], limit=4.0, unscale=8.0)
    assert float(below.shrink) == 1.0, "what is below the limit is not made larger"


def test_facts_with_another_shrink_have_the_coefficient_that_follows_from_it() -> None:
    facts = facts_of(5.0, limit=2.5, unscale=8.0)
    less = facts.shrunk_to(torch.tensor(0.1))
    assert float(less.shrink) == pytest.approx(0.1) and float(less.coefficient) == pytest.approx(0.1 / 8)
    assert float(facts_of(math.inf, limit=2.5).shrunk_to(torch.tensor(0.1)).coefficient) == 0.0
    assert facts.to(torch.device("cpu")) is facts
    assert facts.to(torch.device("meta")).zeros.device.type == "meta"


def test_the_z_score_clips_what_the_paper_clips() -> None:
    limits = limits_of(clip_method="z-score", clip=0.0)
    norms, threshold, decay = norms_of_a_run(200), 2.5, 0.97
    mean, variance = statistics.fmean(norms[:25]), statistics.pvariance(norms[:25])
    clipped_steps = []
    for step, norm in enumerate(norms):
        found = limited(limits, facts_of(norm, unscale=8.0), unscale=8.0)
        wanted = norm
        if step >= 25:
            z = (norm - mean) / (math.sqrt(variance) + 1e-6)
            if z > threshold:
                wanted = mean + threshold**2 / z * math.sqrt(variance)
                clipped_steps.append(step)
            mean = decay * mean + (1 - decay) * wanted
            variance = decay * variance + (1 - decay) * (wanted - mean) ** 2
        assert float(found.coefficient) * norm * 8.0 == pytest.approx(wanted, rel=1e-4)
    assert {40, 41, 130, 131, 132} <= set(clipped_steps)
    assert len(clipped_steps) < 15


def test_a_clamp_clips_at_once_as_a_recipe_with_the_z_score_and_no_longer_than_it_holds() -> None:
    limits, norms = limits_of(clip=0.0), norms_of_a_run(140)
    factors = []
    for step, norm in enumerate(norms):
        found = limited(limits, facts_of(norm), z_score=2.5 if step >= 125 else 0.0)
        factors.append(float(found.coefficient))
    assert all(factor == 1.0 for factor in factors[:125]), "nothing is clipped before"
    assert all(factor < 0.3 for factor in factors[130:133])
    looser, stricter = limits_of(clip_method="z-score", clip=0.0), limits_of(clip_method="z-score", clip=0.0)
    for norm in norms[:25]:
        limited(looser, facts_of(norm))
        limited(stricter, facts_of(norm))
    loose, strict = limited(looser, facts_of(6.0)), limited(stricter, facts_of(6.0), z_score=1.0)
    assert float(strict.coefficient) < float(loose.coefficient) < 1.0, "the lower of both counts"
    both = [limits_of(clip_method="z-score", clip=0.0) for _ in range(2)]
    for norm in norms[:25]:
        for each in both:
            limited(each, facts_of(norm))
    alone, beside = limited(both[0], facts_of(6.0)), limited(both[1], facts_of(6.0), z_score=50.0)
    assert float(beside.coefficient) == float(alone.coefficient) < 1.0, "a looser clamp changes nothing"


def test_gradients_that_are_not_finite_are_scaled_by_no_tensors_history() -> None:
    clip = TensorClip(ratio=1.05, tensors=2, device=torch.device("cpu"))
    clip.reference.fill_(1.0)
    clip.seen.fill_(500.0)
    factors, _ = clip.factors(torch.tensor([math.inf, 5.0]), facts_of(math.inf))
    assert factors.tolist() == [1.0, 1.0]
    factors, shrink = clip.factors(torch.tensor([0.0, 5.0]), facts_of(5.0))
    assert factors.tolist() == pytest.approx([1.0, 1.05 / 5.0]) and float(shrink) == 1.0


def test_the_z_score_keeps_to_the_global_limit_too() -> None:
    limits = limits_of(clip_method="z-score")
    for norm in norms_of_a_run(100):
        found = limited(limits, facts_of(norm, limit=0.5))
        assert float(found.coefficient) * norm <= 0.5 + 1e-6


def test_each_tensor_is_clipped_by_its_own_history_as_the_paper_says() -> None:
    limits = limits_of(clip_method="tensor", clip_ratio=1.05)
    draw, decay, ratio, clip = random.Random(8), 0.98, 1.05, 1.0
    references = [math.inf, math.inf]
    for step in range(160):
        each = [2.0 + draw.gauss(0.0, 0.2), 0.1 + abs(draw.gauss(0.0, 0.01))]
        if step in (120, 121):
            each[1] *= 30.0
        if step in (0, 98):
            each[1] = 0.0  # a tensor before a projection that starts at zero, or an expert that had no token
        total = math.hypot(*each)
        scale = 4.0 if step % 3 else 16.0  # the loss scale changes, and the histories are without it
        applied: list[torch.Tensor] = []
        found = limits.limit(
            facts_of(total, limit=clip, unscale=scale),
            unscale=scale,
            norms=lambda each=each, scale=scale: torch.tensor(each) * scale,  # type: ignore[misc]
            scale_tensors=applied.append,
        )
        wanted = []
        for index, norm in enumerate(each):
            if step < 100:
                wanted.append(norm * min(clip / total, 1.0))
                if wanted[-1] > 0.0:
                    references[index] = min(references[index], wanted[-1])
            else:
                wanted.append(min(norm, ratio * references[index]))
                references[index] = decay * references[index] + (1 - decay) * wanted[-1]
        left = [
            norm * scale * float(found.coefficient) * float(factor)
            for norm, factor in zip(each, applied[0], strict=True)
        ]
        assert left == pytest.approx(wanted, rel=1e-4)
        if step == 120:
            assert left[1] < 0.5 * each[1]
            assert float(applied[0][1]) < 0.2


@pytest.mark.parametrize(
    ("clamps", "after"),
    [
        (Clamps(), 0.7),
        (Clamps(qk_clip=30.0), 0.7),
        (Clamps(holds_norm=True), 0.7 * 0.5 / math.hypot(3.0, 4.0)),
        (Clamps(z_score=2.5), 0.7 * 0.5 / math.hypot(3.0, 4.0)),
    ],
    ids=["none", "logits", "norm", "z-score"],
)
def test_clamps_hold_for_the_norm_of_all_also_where_tensors_are_clipped_apart(
    clamps: Clamps, after: float
) -> None:
    limits = limits_of(clip_method="tensor", clip_ratio=1.0)
    assert limits._by_tensor is not None
    limits._by_tensor.seen.fill_(100.0)
    limits._by_tensor.reference.copy_(torch.tensor([2.1, 4.0]))
    applied: list[torch.Tensor] = []
    found = limits.limit(
        facts_of(5.0, limit=0.5),
        unscale=1.0,
        norms=lambda: torch.tensor([3.0, 4.0]),
        scale_tensors=applied.append,
        clamps=clamps,
    )
    assert float(found.coefficient) * applied[0].tolist()[0] == pytest.approx(after, rel=1e-4)
    assert limits._by_tensor.reference.tolist()[0] == pytest.approx(2.1), "the history is without clamps"


def test_an_outlier_is_refused_by_a_tensor_and_a_lasting_change_is_not() -> None:
    limits = limits_of(skip_outliers=6.0)
    norms = [*norms_of_a_run(40), *norms_of_a_run(120)[45:], *[3.0] * 40]
    refused, window = [], list[float]()
    for step, norm in enumerate(norms):
        found = limited(limits, facts_of(norm))
        assert isinstance(found.applies, torch.Tensor) and bool(found.finite)
        recent = window[-128:]
        wanted = True
        if len(recent) >= 64:
            wanted = norm - statistics.fmean(recent) <= 6.0 * statistics.stdev(recent)
        assert bool(found.applies) is wanted
        refused += [] if wanted else [step]
        window.append(norm)
    assert refused
    assert refused[0] == 115  # the first norm of 3.0
    assert len(refused) < 5


@pytest.mark.parametrize(
    "settings",
    [{"clip_method": "z-score"}, {"clip_method": "tensor"}, {"skip_outliers": 6.0}],
    ids=["z-score", "tensor", "outliers"],
)
def test_a_norm_that_is_not_finite_leaves_the_history_alone(settings: dict[str, object]) -> None:
    limits = limits_of(**settings)
    for norm in norms_of_a_run(30):
        limited(limits, facts_of(norm))
    before = [entry.tensor.clone() for entry in limits.state_entries()]
    assert len(before) > 1
    for poison in (math.nan, math.inf):
        found = limits.limit(
            facts_of(poison),
            unscale=1.0,
            norms=lambda: torch.tensor([math.nan, 1.0]),
            scale_tensors=lambda each: None,
        )
        assert not bool(found.applies)
        assert float(found.coefficient) == 0.0
    after = [entry.tensor for entry in limits.state_entries()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_history_that_a_checkpoint_lacks_begins_anew() -> None:
    limits = limits_of(clip_method="z-score", skip_outliers=6.0)
    for norm in norms_of_a_run(30):
        limited(limits, facts_of(norm))
    limits.keep_only(["norm_window", "norm_window_seen"])
    state = {entry.name: entry.tensor for entry in limits.state_entries()}
    assert float(state["optim.limit.norm_window_seen"]) == 30
    assert float(state["optim.limit.norms_seen"]) == 0


@pytest.mark.parametrize("method", ["z-score", "tensor"])
def test_every_history_is_kept_whole_or_begins_anew(method: str) -> None:
    limits = limits_of(clip_method=method, skip_outliers=6.0)
    for norm in norms_of_a_run(30):
        limits.limit(
            facts_of(norm),
            unscale=1.0,
            norms=lambda norm=norm: torch.full((2,), norm),  # type: ignore[misc]
            scale_tensors=lambda each: None,
        )
    names = limits.names()
    state = {entry.name.removeprefix(PREFIX): entry.tensor for entry in limits.state_entries()}
    assert sorted(state) == sorted(names) and all(tensor.any() for tensor in state.values())
    before = {name: tensor.clone() for name, tensor in state.items()}
    limits.keep_only(names)
    assert all(torch.equal(state[name], before[name]) for name in names)
    limits.keep_only(["another"])
    assert not any(tensor.any() for tensor in state.values())


@pytest.mark.parametrize(("seen", "is_refused"), [(63, False), (64, True)])
def test_no_update_is_an_outlier_before_there_are_64_to_compare_it_with(seen: int, is_refused: bool) -> None:
    limits = limits_of(skip_outliers=6.0)
    for norm in (norms_of_a_run(32) * 2)[:seen]:
        limited(limits, facts_of(norm))
    assert bool(limited(limits, facts_of(100.0)).applies) is not is_refused


@pytest.mark.parametrize(("later", "is_refused"), [(127, False), (128, True)])
def test_a_norm_is_compared_with_the_last_128_alone(later: int, is_refused: bool) -> None:
    limits = limits_of(skip_outliers=6.0)
    for norm in [1000.0, *(norms_of_a_run(32) * 4)[:later]]:
        limited(limits, facts_of(norm))
    assert bool(limited(limits, facts_of(10.0)).applies) is not is_refused


def test_no_limit_asks_the_device_for_a_number() -> None:
    """On 'meta' any question for a value raises."""
    section = OptimSection(learning_rate=RATE, clip_method="tensor", skip_outliers=6.0)
    for method in ("tensor", "z-score"):
        section = OptimSection(learning_rate=RATE, clip_method=method, skip_outliers=6.0)
        limits = GradientLimits(section, tensors=2, device=torch.device("meta"))
        gradient = torch.ones(4, device="meta")
        facts = examine(
            [CountedGradient(gradient=gradient)], limit=1.0, unscale=torch.ones((), device="meta")
        )
        limits.limit(
            facts, unscale=1.0, norms=lambda: torch.ones(2, device="meta"), scale_tensors=lambda each: None
        )


@pytest.mark.parametrize("seen", [64, 1000])
@pytest.mark.parametrize(("norm", "is_admitted"), [(1.602, True), (1.61, False)])
def test_the_deviation_is_that_of_a_sample_of_as_many_norms_as_the_window_holds(
    seen: int, norm: float, is_admitted: bool
) -> None:
    gate = OutlierGate(deviations=6.0, device=torch.device("cpu"))
    held = min(seen, 128)
    gate.window[:held] = torch.tensor([0.9, 1.1] * (held // 2))
    gate.seen.fill_(float(seen))
    if seen == 1000:
        norm -= 0.0025  # the deviation of 128 norms is nearer to a tenth than that of 64
    assert bool(gate.admits(facts_of(norm))) is is_admitted


def test_the_first_reference_of_a_tensor_is_its_norm_after_the_global_clipping() -> None:
    clip = TensorClip(ratio=1.05, tensors=1, device=torch.device("cpu"))
    clip.factors(torch.tensor([4.0]), facts_of(4.0, limit=1.0))
    assert clip.reference.tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("settings", [{"clip_method": "tensor"}, {"skip_outliers": 6.0}])
def test_each_peer_has_a_history_of_its_own(settings: dict[str, object]) -> None:
    assert {entry.scope for entry in limits_of(**settings).state_entries()} == {"peer"}
