"""The optimizers of all parameter groups, stepped together, and QK-clip, which follows their step.

QK-clip keeps attention logits bounded by rescaling the query and key weights of single heads.

After Kimi Team 2025, "Kimi K2", section 2.1 (MuonClip). A head whose largest logit L of this step was above
the threshold t has its logits multiplied with t / L from the next step on: queries and keys each with
sqrt(t / L) where each query head has a key head of its own. Where query heads share a key head, the shared
part stays as it is and the query takes the whole factor, as the paper does with its shared rotary keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from bloomery.checkpoint.format.state import Json, StateEntry, whole
from bloomery.config.optim import OptimSection
from bloomery.errors import TrainingFailed
from bloomery.model.attention import Attention
from bloomery.model.decoder import Block, Decoder
from bloomery.optim.clip import NO_CLAMPS, Clamps, GradientFacts, GradientLimits
from bloomery.optim.groups import GroupLayout, Rule
from bloomery.optim.update_rules import FlatAdamW, FlatMuon
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import MasterWeights, entries_of, multiplies_bf16
from bloomery.parallel.tensor import split_range


class Optimizers:
    """One `FlatAdamW` or `FlatMuon` for each parameter group of the master weights."""

    def __init__(self, weights: MasterWeights, optim: OptimSection, *, precision: str = "fp32") -> None:
        """precision: the run's. Muon multiplies in bf16 if the device has units for it, but never in fp32
        runs, which are there to be compared to many digits.
        """
        self._weights = weights
        self._peak = optim.learning_rate
        self._peaks = peak_rates(optim)
        # Counts the applied updates of each rule's AdamW, for its bias correction. On the device, since an
        # update that is refused there must not count.
        self._updates: dict[Rule, Tensor] = {
            group.rule: torch.zeros((), device=master.device)
            for group, master in zip(weights.layouts, weights.master, strict=True)
            if group.rule != "muon"
        }
        in_bf16 = precision != "fp32" and multiplies_bf16(weights.master[0].device)
        matmul_dtype = torch.bfloat16 if in_bf16 else torch.float32
        self._limits = GradientLimits(optim, tensors=len(weights.names), device=weights.device)
        self._optimizers = [
            _make_optimizer(group, master, gradient, optim, self._updates.get(group.rule), matmul_dtype)
            for group, master, gradient in zip(weights.layouts, weights.master, weights.gradient, strict=True)
        ]

    def limit(
        self, facts: GradientFacts, *, unscale: Tensor | float, clamps: Clamps = NO_CLAMPS
    ) -> GradientFacts:
        """Apply the limits that follow the gradients' history; clipping by tensor scales gradients in place.

        facts: what `MasterWeights.examine` returned. unscale: what the loss was multiplied with.
        clamps: what limits norms besides, see `GradientLimits.limit`. Collective over the peer.
        """
        return self._limits.limit(
            facts,
            unscale=unscale,
            norms=self._weights.norms_by_tensor,
            scale_tensors=self._weights.scale_gradients,
            clamps=clamps,
        )

    def step(self, facts: GradientFacts, *, learning_rate: float) -> None:
        """Update every group, or none where `facts.applies` is false.

        facts: what `limit` returned.
        learning_rate: the schedule's; a group with a peak rate of its own follows it in proportion.
        """
        facts = facts.to(self._weights.master[0].device)
        for updates in self._updates.values():
            updates += 1
        for index, optimizer in enumerate(self._optimizers):
            rate = learning_rate * self._peaks[self._weights.layouts[index].rule] / self._peak
            for elements in self._weights.parts_to_update(index, divides=optimizer.divides):
                optimizer.step(facts, learning_rate=rate, elements=elements)
        for updates in self._updates.values():
            updates -= (~facts.applies).float()

    def reset(self) -> None:
        """Set all moments and counts to 0, as at the start of a run."""
        for optimizer in self._optimizers:
            for moment in optimizer.moments.values():
                moment.zero_()
        for updates in self._updates.values():
            updates.zero_()
        self._limits.keep_only(())

    def state_entries(self) -> Iterable[StateEntry]:
        """Moments as logical tensors, and the count of applied updates of each rule's AdamW."""
        for group, optimizer in zip(self._weights.layouts, self._optimizers, strict=True):
            for suffix, flat in optimizer.moments.items():
                yield from entries_of(group, flat, prefix="optim", suffix=suffix)
        for rule, updates in self._updates.items():
            yield whole(f"optim.{rule}.updates", updates, scope="peer")
        yield from self._limits.state_entries()

    def state_values(self) -> dict[str, Json]:
        """Return which histories of limits are among the tensors; nothing where no limit has one."""
        names: list[Json] = [*self._limits.names()]
        return {"limits": names} if names else {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Forget the history of each limit that was off when the checkpoint was saved."""
        names = values.get("limits", [])
        assert isinstance(names, list), "state_values wrote a list"
        self._limits.keep_only(str(name) for name in names)


def peak_rates(optim: OptimSection) -> dict[Rule, float]:
    """The peak learning rate of each group."""
    own: dict[Rule, float | str] = {
        "muon": optim.muon_learning_rate,
        "embedding": optim.embedding_learning_rate,
        "head": optim.head_learning_rate,
    }
    rules: tuple[Rule, ...] = ("muon", "matrix", "embedding", "head", "plain")
    return {
        rule: optim.learning_rate if own.get(rule, "auto") == "auto" else float(own[rule]) for rule in rules
    }


def _make_optimizer(
    group: GroupLayout,
    master: Tensor,
    gradient: Tensor,
    optim: OptimSection,
    updates: Tensor | None,
    matmul_dtype: torch.dtype,
) -> FlatAdamW | FlatMuon:
    if group.rule == "muon":
        _refuse_parts(group)
        return FlatMuon(
            master,
            gradient,
            group.logical,
            momentum=optim.muon_momentum,
            weight_decay=optim.weight_decay,
            iterations=optim.muon_iterations,
            matmul_dtype=matmul_dtype,
        )
    assert updates is not None, "every rule but muon follows AdamW, and has its count"
    is_embedding = group.rule in ("embedding", "head")
    decays = group.rule != "plain" and (optim.decay_embeddings or not is_embedding)
    return FlatAdamW(
        master,
        gradient,
        betas=(optim.beta1, optim.beta2),
        epsilon=optim.epsilon,
        weight_decay=optim.weight_decay if decays else 0.0,
        updates=updates,
    )


def _refuse_parts(group: GroupLayout) -> None:
    """Raise TrainingFailed where this rank holds only parts of Muon's matrices.

    `check_recipe` refuses such layouts for every command; this refuses them for whoever trains without one.
    """
    is_sharded = len(group.held) != group.numel
    if is_sharded or any(place.shape != place.global_shape for place in group.logical):
        setting = "parallel.zero = 0" if is_sharded else "parallel.tensor = 1"
        raise TrainingFailed(
            "Muon needs whole matrices, and this layout divides them among ranks.",
            remedy=f"Set {setting}, or optim.name = 'adamw'.",
        )


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
        self._own, self._threshold = optim.qk_clip, 0.0
        self._weights, self._mesh = weights, mesh
        self._stride = optim.qk_clip_stride
        self._shares_keys = decoder.model.kv_heads != decoder.model.section.heads
        self._maxima: list[Tensor] = []
        self._attentions: list[Attention] = []
        blocks = dict[str, int]()
        for module in decoder.blocks:
            block = cast(Block, module)
            blocks[f"blocks.{block.index}.attention"] = len(self._maxima)
            self._maxima.append(torch.zeros(block.attention.heads, device=mesh.device))
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
        """Rescale from now on by this limit or the recipe's, the lower one; 0: only by the recipe's."""
        threshold = min(filter(None, (self._own, limit)), default=0.0)
        if bool(threshold) != bool(self._threshold):
            for attention, maximum in zip(self._attentions, self._maxima, strict=True):
                attention.logit_maxima = maximum.zero_() if threshold else None
                attention.logit_stride = self._stride  # a measurement of inner sizes may have set another
        self._threshold = threshold

    @torch.no_grad()
    def apply(self, applies: Tensor) -> None:
        """Rescale the masters of heads whose largest logit was above the threshold, and forget the maxima.

        applies: boolean scalar, whether the step's update was made; otherwise the weights stay as they are.
        Collective over the peer.
        """
        if not self._threshold:
            return
        self._weights.before_masters_change()
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
