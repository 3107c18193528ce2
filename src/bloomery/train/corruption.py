"""Checks for silent data corruption: wrong bits in computed or stored tensors, without any error.

At a check each rank computes the first micro-batch of its step a second time, and that of another replica,
and digests of the gradients are compared; so are those of weights and reduced gradients, which replicas hold
alike. It happens between backward and update, so that what differs is never applied. Dropout, samples and
order have addresses, so the same micro-batch gives the same bits on every rank of a kind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bloomery.data_loader.batches import MicroBatch
from bloomery.events.journal import Journal
from bloomery.guard.digests import (
    BitFault,
    RankDigests,
    computation_faults,
    digests_from_json,
    disputed_micro_batches,
    held_faults,
    is_not_deterministic,
    settled_by_repetition,
)
from bloomery.guard.ladder import OTHER_BITS
from bloomery.guard.verdict import Watch
from bloomery.optim.clip import GradientFacts
from bloomery.parallel.bit_digest import digest_of_all
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.train.settings import RunSettings
from bloomery.train.state import TrainState

log = logging.getLogger(__name__)

_DISPUTES = 4
"""The most disputed micro-batches that all ranks compute again."""


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """What a step that is checked was trained with, from its backward until its update.

    digest: of the first micro-batch's gradients, as they were made.
    """

    first: MicroBatch
    step: int
    weight: Tensor | float
    digest: int


@dataclass(kw_only=True)
class _Known:
    """What this process knows from its checks.

    checks: how many there were, which chooses the rank that computes another's micro-batch.
    recomputes: False once the kernels were found not to be deterministic.
    open: what each rank held at steps where replicas differed and none had a majority.
    """

    checks: int = 0
    recomputes: bool = True
    open: dict[int, dict[int, dict[str, int]]] = field(default_factory=dict)


class CorruptionCheck:
    """Runs the checks of a run. It is the `StepCheck` of each step, and an interlude that says what it found.

    All methods are collective over the peer, and ranks decide alike, from digests that all of them have.
    """

    def __init__(
        self,
        model: TrainingModel,
        *,
        mesh: Mesh,
        settings: RunSettings,
        journal: Journal,
        incarnation: Callable[[], int],
    ) -> None:
        self._model, self._mesh, self._settings = model, mesh, settings
        self._journal, self._incarnation = journal, incarnation
        self._kind, self._host = numerics_of(mesh.device), os.uname().nodename
        elastic = settings.recipe.elastic
        self._averages_gradients = elastic.inner_steps > 0 and elastic.average == "gradients"
        self._known = _Known()
        self._trained: _Trained | None = None
        self._faults: list[BitFault] | None = None

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], step: int, *, weight: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Do what `TrainingModel.accumulate` does, and take the digest of the first gradients at a check."""
        self._trained = None
        if not (micro_batches and self._checks(step)):
            return self._model.accumulate(micro_batches, step, weight=weight)
        with self._model.weights.tapped(discards=False) as tap:
            sums = self._model.accumulate(micro_batches, step, weight=weight)
        self._mesh.wait_for_device()  # for the host reads the digest, which may wait for another rank
        self._trained = _Trained(first=micro_batches[0], step=step, weight=weight, digest=tap.digest)
        return sums

    def screen(self) -> None:
        """Compare bits before the gradients are averaged with those of other peers, where a run does that.

        All peers have to make the same updates. So a peer whose bits differ offers gradients that are not
        finite: the others leave it out of the step, and it goes on from their state.
        """
        if self._averages_gradients and self._finds_faults():
            self._model.weights.spoil_gradients()

    def admit(self, facts: GradientFacts) -> GradientFacts:
        """Return the facts of the step's gradients, refusing the update where bits differ."""
        if self._averages_gradients or not self._finds_faults():
            return facts
        return replace(facts, applies=torch.zeros_like(facts.applies))

    def _finds_faults(self) -> bool:
        """Whether bits of the step under way differ, if it is checked; what differs is journalled."""
        trained, self._trained = self._trained, None
        if trained is None:
            return False
        ranks, faults = self._compare(trained)
        self._faults = faults
        self._settle(trained.step, ranks, faults)
        for fault in faults:
            self._tell(trained.step + 1, fault, ranks)
        return bool(faults)

    def due(self, state: TrainState) -> bool:
        """Whether this step had a check, whose outcome belongs into its report."""
        return self._faults is not None

    def run(self, state: TrainState) -> dict[str, Any]:
        """Return the fields of the report."""
        faults, self._faults = self._faults or [], None
        return {
            "corruption_checked": True,
            "corruption": "; ".join(fault.reason for fault in faults),
            "corrupt_ranks": tuple(sorted({rank for f in faults if f.is_certain for rank in f.ranks})),
        }

    def _checks(self, step: int) -> bool:
        """Whether the step after `step` is checked: at the interval, when replicas that differed are made
        again, and when a repetition gave other bits.
        """
        interval = self._settings.recipe.guard.corruption_steps
        if not interval:
            return False
        watch_verdicts = [
            verdict for _, verdict in self._settings.guards.findings if isinstance(verdict, Watch)
        ]
        suspects = any(verdict.kind == OTHER_BITS for verdict in watch_verdicts)
        return (step > 0 and step % interval == 0) or step in self._known.open or suspects

    def _compare(self, trained: _Trained) -> tuple[list[RankDigests], list[BitFault]]:
        """Compute again, gather all digests, and return them with the faults that follow."""
        machine, mesh = self._known, self._mesh
        machine.checks += 1
        computed: dict[int, list[int]] = {}
        if machine.recomputes:
            computed[mesh.data.index] = [trained.digest, self._compute(trained, trained.first)]
            if mesh.data.degree > 1:
                offset = 1 + machine.checks % (mesh.data.degree - 1)
                other = (mesh.data.index + offset) % mesh.data.degree
                computed[other] = [self._compute(trained, self._first_of_next(trained, offset))]
        own_digests = self._held()
        ranks = self._gather(own_digests, computed)
        disputes = disputed_micro_batches(ranks)
        faults = held_faults(ranks)
        if any(fault.what == "weights" for fault in faults):
            return ranks, faults  # of other weights come other gradients
        if disputes:
            for data in disputes[:_DISPUTES]:
                computed.setdefault(data, []).append(self._compute(trained, self._first_of(trained, data)))
            ranks = self._gather(own_digests, computed)
            if is_not_deterministic(ranks):
                self._note_not_deterministic(trained.step + 1)
                return ranks, faults
            faults += computation_faults(ranks)
        return ranks, faults

    def _compute(self, trained: _Trained, micro_batch: MicroBatch) -> int:
        return self._model.digest_gradients(micro_batch, trained.step, weight=trained.weight)

    def _held(self) -> dict[str, int]:
        """What this rank holds as its replicas do, as digests."""
        weights = self._model.weights
        self._mesh.wait_for_device()
        held = {
            "weights": digest_of_all(weights.master),
            "gradients": digest_of_all(weights.reduced_gradient),
        }
        copies = [
            held for held, master in zip(weights.working, weights.master, strict=True) if held is not master
        ]
        if copies and not weights.gathers_weights:
            held["working weights"] = digest_of_all(copies)
        return held

    def _not_finite(self) -> tuple[str, ...]:
        """Return the names of the tensors whose masters hold NaN or infinities on this rank.

        A row of the embedding that no sample uses shows them in no loss and in no gradient.
        """
        weights = self._model.weights
        if all(map(_is_finite, weights.master)):
            return ()
        return tuple(
            sorted({entry.name for entry in weights.state_entries() if not _is_finite(entry.tensor)})
        )

    def _gather(self, held: dict[str, int], computed: dict[int, list[int]]) -> list[RankDigests]:
        mesh = self._mesh
        mine = RankDigests(
            rank=mesh.rank,
            host=self._host,
            device=str(mesh.device),
            kind=self._kind,
            data=mesh.data.index,
            place=(mesh.pipeline.index, mesh.tensor.index),
            shard=mesh.shard.index,
            held=held,
            computed={data: tuple(digests) for data, digests in computed.items()},
            not_finite=self._not_finite(),
        )
        return [digests_from_json(values) for values in mesh.all_gather_object(mine.to_json())]

    def _first_of_next(self, trained: _Trained, offset: int) -> MicroBatch:
        """Return the first micro-batch of the data index that is `offset` further, which sends it."""
        axis = self._mesh.data
        packed = _packed(trained.first)
        arriving = torch.empty_like(packed)
        receiver = axis.ranks[(axis.index - offset) % axis.degree]
        sender = axis.ranks[(axis.index + offset) % axis.degree]
        self._mesh.exchange({receiver: packed}, {sender: arriving})
        return _unpacked(arriving, trained.first)

    def _first_of(self, trained: _Trained, data: int) -> MicroBatch:
        """Return the first micro-batch of one data index, which all others receive."""
        axis = self._mesh.data
        packed = _packed(trained.first).view(torch.int64).to(self._mesh.device)
        if axis.index != data:
            packed = torch.zeros_like(packed)
        axis.all_reduce(packed)
        self._mesh.wait_for_device()
        return _unpacked(packed.cpu().view(torch.uint8), trained.first)

    def _settle(self, step: int, ranks: list[RankDigests], faults: list[BitFault]) -> None:
        """Name who held wrong bits at a step where none had a majority, once that step was made again."""
        before = self._known.open.pop(step, None)
        undecided = any(fault.what == "weights" and not fault.is_certain for fault in faults)
        if undecided and before is None:
            self._known.open[step] = {rank.rank: dict(rank.held) for rank in ranks}
        elif before is not None and not faults:
            wrong = settled_by_repetition(before, ranks)
            if wrong:
                names = ", ".join(rank.name for rank in ranks if rank.rank in wrong)
                reason = f"{names} held other bits before step {step + 1} was made again than all hold now"
                fault = BitFault(what="weights", ranks=wrong, is_certain=True, reason=reason)
                self._tell(step + 1, fault, ranks)

    def _tell(self, step: int, fault: BitFault, ranks: list[RankDigests]) -> None:
        machines = [
            {"rank": rank.rank, "host": rank.host, "device": rank.device}
            for rank in ranks
            if rank.rank in fault.ranks
        ]
        self._journal.write(
            "corruption",
            incarnation=self._incarnation(),
            step=step,
            what=fault.what,
            is_certain=fault.is_certain,
            machines=machines,
            reason=fault.reason,
        )
        if self._mesh.is_first:
            log.warning("step %d: silent corruption: %s", step, fault.reason)

    def _note_not_deterministic(self, step: int) -> None:
        self._known.recomputes = False
        why = (
            "the same micro-batch gave other bits on most ranks, so kernels are not deterministic here: "
            "micro-batches are not computed again in this process, replicas are still compared"
        )
        self._journal.write("corruption_check", incarnation=self._incarnation(), step=step, why=why)
        if self._mesh.is_first:
            log.warning("step %d: %s", step, why)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite. Finding extremes takes no memory, and NaN counts as one."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def numerics_of(device: torch.device) -> str:
    """Return what decides over the bits of a result on this rank, as a text to compare."""
    if device.type == "cuda":
        model = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        model = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"{device.type}, {model}, torch {torch.__version__}"


def _packed(micro_batch: MicroBatch) -> Tensor:
    """Return a micro-batch as bytes in main memory, uint8 [n]."""
    parts = [micro_batch.tokens, micro_batch.targets, micro_batch.samples]
    if micro_batch.documents is not None:
        parts.append(micro_batch.documents)
    return torch.cat([part.long().reshape(-1).cpu() for part in parts]).view(torch.uint8)


def _unpacked(packed: Tensor, like: MicroBatch) -> MicroBatch:
    """Return the micro-batch that `_packed` made, of the shapes and on the device of `like`."""
    numbers = packed.view(torch.int64)
    count = like.tokens.numel()
    tokens, targets = numbers[:count], numbers[count : 2 * count]
    samples = numbers[2 * count : 2 * count + like.samples.numel()]
    documents = None
    if like.documents is not None:
        rest = numbers[2 * count + like.samples.numel() :]
        documents = rest.view_as(like.documents).to(like.documents.device, like.documents.dtype)
    return MicroBatch(
        tokens=tokens.view_as(like.tokens).to(like.tokens.device, like.tokens.dtype),
        targets=targets.view_as(like.targets).to(like.targets.device, like.targets.dtype),
        documents=documents,
        samples=samples.to(like.samples.device, like.samples.dtype),
    )
