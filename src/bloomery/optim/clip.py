"""The gradient norm, and the limits on it: clipping by norm, z-score or tensor, and refusing outliers.

Every number is a tensor on the device, so that no step waits for the host. The gradients' history, which some
limits follow, is part of the checkpoint: a resumed run clips as the unbroken one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf

import torch
from torch import Tensor

from bloomery import torch_private
from bloomery.checkpoint.format.state import StateEntry, whole
from bloomery.config.optim import OptimSection

Z_SCORE_DECAY, Z_SCORE_WARMUP = 0.97, 25
TENSOR_DECAY, TENSOR_WARMUP = 0.98, 100
OUTLIER_WINDOW, OUTLIER_MINIMUM = 128, 64
PREFIX = "optim.limit."
_TINY = 1e-6
_PIECE = 1 << 20
"""Elements of which a CPU sums the squares at once: in fp32 and in one row, 2^27 of them lose 2%."""


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """What is known of a step's gradients, as 0-d tensors on their device.

    norm: of the gradients before clipping.
    finite: boolean, whether the norm is finite.
    applies: boolean, whether the update is made: the gradients are finite, and no gate refuses them.
    shrink: at most 1, what clipping multiplies gradients with.
    coefficient: what to multiply gradients with: `shrink` without the loss scale; 0 where not finite.
    zeros: the number of gradient elements that are 0.
    """

    norm: Tensor
    finite: Tensor
    applies: Tensor
    shrink: Tensor
    coefficient: Tensor
    zeros: Tensor

    def shrunk_to(self, shrink: Tensor) -> GradientFacts:
        """Return the same facts with another `shrink`, and the coefficient that follows from it."""
        usable = torch.where(self.finite, shrink / self.shrink, torch.ones_like(shrink))
        return replace(self, shrink=shrink, coefficient=self.coefficient * usable)

    def to(self, device: torch.device) -> GradientFacts:
        """Return the facts on another device, which waits for them; the same object if they are there
        already.
        """
        if self.norm.device == device:
            return self
        return GradientFacts(**{part.name: getattr(self, part.name).to(device) for part in fields(self)})


@dataclass(frozen=True, kw_only=True)
class CountedGradient:
    """A flat fp32 gradient, or this rank's shard of one, with what this rank has to count of it.

    padding: number of elements that belong to no parameter and are always zero.
    counts: false if another rank counts the same elements.
    """

    gradient: Tensor
    padding: int = 0
    counts: bool = True


def examine(
    gradients: Sequence[CountedGradient],
    *,
    limit: float,
    unscale: Tensor | float,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> GradientFacts:
    """Return the norm over all gradients of the peer, whether it is finite, and the factor for the gradients.

    limit: largest norm; 0 for no limit.
    unscale: the factor by which the loss was multiplied.
    total: sums a small tensor over the ranks among which gradients are split. Each element is counted on
    exactly one rank.
    The coefficient is 1 / unscale / max(1, norm / limit); it is 0 if the norm is not finite.
    """
    device = gradients[0].gradient.device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    zeros = torch.zeros((), dtype=torch.float64, device=device)
    for counted in gradients:
        if counted.counts:
            squares += squared_norm(counted.gradient)
            zeros += counted.gradient.numel() - torch.count_nonzero(counted.gradient) - counted.padding
    squares, zeros = total(torch.stack([squares, zeros])).unbind()
    norm = squares.sqrt().float() / unscale
    finite = torch.isfinite(norm)
    shrink = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit > 0 else torch.ones_like(norm)
    coefficient = torch.where(finite, shrink / unscale, torch.zeros_like(norm))
    return GradientFacts(
        norm=norm, finite=finite, applies=finite, shrink=shrink, coefficient=coefficient, zeros=zeros
    )


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of the squares of an fp32 tensor's elements, an fp64 scalar.

    A CPU sums piece by piece, so that large buffers lose nothing and any split of them has the same norm.
    """
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values).double().square()
    pieces = values.reshape(-1).split(_PIECE)
    return torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]).double().square().sum()


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return `squared_norm` of each of at least one tensor, fp64 [n]."""
    if tensors[0].device.type != "cpu":
        return torch_private.tensor_norms(tensors).double().square()
    return torch.stack([squared_norm(tensor) for tensor in tensors])


@dataclass(frozen=True, kw_only=True)
class Clamps:
    """Limits that hold for a while, beside those of the recipe. 0: none.

    z_score: the z-score above which gradient norms are clipped.
    holds_norm: whether the largest norm of all gradients holds also where each tensor is clipped by its own.
    qk_clip: the attention logit above which heads are rescaled.
    """

    z_score: float = 0.0
    holds_norm: bool = False
    qk_clip: float = 0.0


NO_CLAMPS = Clamps()


class ZScoreClip:
    """Clips the gradient norm where it is far above its running mean (Kumar et al. 2025, "ZClip").

    With mean m and deviation s of the norms so far, a norm whose z-score z = (norm - m) / s is above the
    threshold t becomes m + s·t²/z. The clipped norm enters the mean and the variance, which are exponential
    averages; the first 25 norms make their first values, and are not clipped.
    """

    def __init__(self, *, device: torch.device) -> None:
        self.mean, self.variance, self.seen = (torch.zeros((), device=device) for _ in range(3))

    @torch.no_grad()
    def shrink(self, facts: GradientFacts, *, threshold: float) -> Tensor:
        """Return what this step's gradients are multiplied with, at most 1, and count their norm.

        threshold: the z-score t; infinite: nothing is clipped.
        """
        warms_up = self.seen < Z_SCORE_WARMUP
        deviation = self.variance.sqrt()
        z = (facts.norm - self.mean) / (deviation + _TINY)
        is_high = ~warms_up & (z > threshold)
        clipped = torch.where(is_high, self.mean + deviation * threshold**2 / z, facts.norm)
        weight = torch.where(warms_up, 1.0 / (self.seen + 1.0), 1.0 - Z_SCORE_DECAY)
        mean = self.mean + weight * (clipped - self.mean)
        # In the warm-up the variance of all norms so far (Welford 1962), later an exponential average.
        squares = torch.where(warms_up, (clipped - self.mean) * (clipped - mean), (clipped - mean).square())
        _update(self.variance, self.variance + weight * (squares - self.variance), facts.finite)
        _update(self.mean, mean, facts.finite)
        _update(self.seen, self.seen + 1.0, facts.finite)
        return torch.where(is_high & facts.finite, clipped / facts.norm, torch.ones_like(clipped))

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the history, by name."""
        return {"norm_mean": self.mean, "norm_variance": self.variance, "norms_seen": self.seen}

    def reset(self) -> None:
        """Forget every norm."""
        for tensor in self.tensors().values():
            tensor.zero_()


class TensorClip:
    """Clips each tensor's gradient by its own running norm (Wang et al. 2025, "AdaGC", algorithm 1).

    For the first 100 steps gradients are clipped by the global norm, and each tensor's reference is its
    smallest norm. Then a tensor's norm is clipped to `ratio` × its reference, which follows the clipped norms
    as an exponential average. Unlike the paper, a norm of 0 makes no reference: the layers before a
    projection that starts at 0 have no gradient at the first step, and would never get one.
    """

    def __init__(self, *, ratio: float, tensors: int, device: torch.device) -> None:
        """tensors: the number of logical tensors of the whole model."""
        self._ratio = ratio
        self.reference = torch.zeros(tensors, device=device)
        self.seen = torch.zeros((), device=device)

    @torch.no_grad()
    def factors(self, norms: Tensor, facts: GradientFacts) -> tuple[Tensor, Tensor]:
        """Return each tensor's factor [n], and what multiplies all gradients beside it, at most 1.

        norms: [n] of the tensors' gradients, without the loss scale. This step is counted in the history.
        """
        warms_up = self.seen < TENSOR_WARMUP
        is_known = self.reference > 0.0
        ratio = self._ratio * self.reference / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        clips = ~warms_up & is_known & facts.finite
        factors = torch.where(clips, ratio.clamp(max=1.0), torch.ones_like(norms))
        shrink = torch.where(warms_up, facts.shrink, torch.ones_like(facts.shrink))
        clipped = norms * factors * shrink
        smallest = torch.where(clipped > 0.0, torch.minimum(clipped, self.reference), self.reference)
        average = TENSOR_DECAY * self.reference + (1.0 - TENSOR_DECAY) * clipped
        reference = torch.where(is_known, torch.where(warms_up, smallest, average), clipped)
        _update(self.reference, reference, facts.finite)
        _update(self.seen, self.seen + 1.0, facts.finite)
        return factors, shrink

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the history, by name."""
        return {"tensor_norms": self.reference, "tensor_norms_seen": self.seen}

    def reset(self) -> None:
        """Forget every norm."""
        for tensor in self.tensors().values():
            tensor.zero_()


class OutlierGate:
    """Refuses one update whose gradient norm is far above the last 128 (OLMo 2, "skip-step optimizer").

    The norm enters the window whether it is refused or not, so that a lasting change passes soon.
    """

    def __init__(self, *, deviations: float, device: torch.device) -> None:
        """deviations: standard deviations above the mean from which an update is refused."""
        self._deviations = deviations
        self.window = torch.zeros(OUTLIER_WINDOW, device=device)
        self.seen = torch.zeros((), device=device)

    @torch.no_grad()
    def admits(self, facts: GradientFacts) -> Tensor:
        """Return whether the update may be made, a boolean scalar, and count the norm in the window."""
        places = torch.arange(OUTLIER_WINDOW, device=self.window.device)
        count = self.seen.clamp(max=OUTLIER_WINDOW)
        is_filled = (places < count).to(self.window.dtype)
        mean = (self.window * is_filled).sum() / count.clamp(min=1.0)
        squares = ((self.window - mean).square() * is_filled).sum()
        deviation = (squares / (count - 1.0).clamp(min=1.0)).sqrt()
        is_outlier = (count >= OUTLIER_MINIMUM) & (facts.norm - mean > self._deviations * deviation)
        here = torch.where(places == self.seen % OUTLIER_WINDOW, facts.norm, self.window)
        _update(self.window, here, facts.finite)
        _update(self.seen, self.seen + 1.0, facts.finite)
        return ~is_outlier

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the history, by name."""
        return {"norm_window": self.window, "norm_window_seen": self.seen}

    def reset(self) -> None:
        """Forget every norm."""
        for tensor in self.tensors().values():
            tensor.zero_()


class GradientLimits:
    """The limits that `optim.clip_method` and `optim.skip_outliers` ask for, applied one after the other."""

    def __init__(self, optim: OptimSection, *, tensors: int, device: torch.device) -> None:
        """tensors: the number of logical tensors of the whole model."""
        self._gate = self._by_tensor = None
        self._z_score = ZScoreClip(
            device=device
        )  # it follows the norms, so that it can be put on at any time
        self._threshold = optim.clip_z_score if optim.clip_method == "z-score" else 0.0
        if optim.skip_outliers:
            self._gate = OutlierGate(deviations=optim.skip_outliers, device=device)
        if optim.clip_method == "tensor":
            self._by_tensor = TensorClip(ratio=optim.clip_ratio, tensors=tensors, device=device)

    def limit(
        self,
        facts: GradientFacts,
        *,
        unscale: Tensor | float,
        norms: Callable[[], Tensor],
        scale_tensors: Callable[[Tensor], None],
        clamps: Clamps = NO_CLAMPS,
    ) -> GradientFacts:
        """Return the facts with this step's limits in them.

        unscale: the loss scale. norms: returns the norm [n] of each tensor's gradient with the loss scale
        in it. scale_tensors: multiplies each tensor's gradient with a factor [n]. Both are called where
        tensors are clipped apart, and are collective over the peer. clamps: what limits norms besides. Where
        tensors are clipped apart, all gradients are then also shrunk as their norm before asks for.
        """
        if self._gate is not None:
            facts = replace(facts, applies=facts.applies & self._gate.admits(facts))
        threshold = min(filter(None, (self._threshold, clamps.z_score)), default=inf)
        shrink_by_score = self._z_score.shrink(facts, threshold=threshold)
        if threshold < inf:
            facts = facts.shrunk_to(torch.minimum(facts.shrink, shrink_by_score))
        if self._by_tensor is not None:
            factors, shrink = self._by_tensor.factors(norms() / unscale, facts)
            scale_tensors(factors)
            if clamps.holds_norm or clamps.z_score:
                shrink = torch.minimum(shrink, facts.shrink)
            facts = facts.shrunk_to(shrink)
        return facts

    def state_entries(self) -> Iterable[StateEntry]:
        """Yield the histories of the limits that are on."""
        for limit in self._on():
            for name, tensor in limit.tensors().items():
                yield whole(f"{PREFIX}{name}", tensor, scope="peer")

    def names(self) -> list[str]:
        """Return the names of the histories that a checkpoint holds."""
        return [name for limit in self._on() for name in limit.tensors()]

    def keep_only(self, loaded: Iterable[str]) -> None:
        """Forget every history that a checkpoint did not hold: its limit was off when it was saved."""
        loaded_names = set(loaded)
        for limit in self._on():
            if not loaded_names.issuperset(limit.tensors()):
                limit.reset()

    def _on(self) -> Iterable[ZScoreClip | TensorClip | OutlierGate]:
        return (limit for limit in (self._gate, self._z_score, self._by_tensor) if limit is not None)


def _update(tensor: Tensor, value: Tensor, condition: Tensor) -> None:
    """Write `value` into `tensor` where `condition`, a boolean scalar, is true."""
    tensor.copy_(torch.where(condition, value, tensor))
