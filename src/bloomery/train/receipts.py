"""Stores beside a checkpoint what the next step will be made with, and checks that before a resume trains."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from bloomery.checkpoint.format.state import Json, StateEntry
from bloomery.checkpoint.save.write_plan import WritePlanner
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.convert import settings_of
from bloomery.data.order import sample_indices
from bloomery.data.position import EVERYTHING
from bloomery.errors import CheckpointError, DataError
from bloomery.events.journal import Journal, is_step, read_tail
from bloomery.events.records import StepReport, as_float
from bloomery.guard.receipt import (
    Promise,
    RankEvidence,
    broken_promises,
    evidence_from_json,
    promise_from_json,
)
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.train.data_stream import DataStream
from bloomery.train.saved_state import Restored
from bloomery.train.settings import RunSettings
from bloomery.train.state import TrainState

log = logging.getLogger(__name__)

PROMISE = "promise"
"""The key of a promise in a manifest's `about` and in the journal's `checkpoint` event."""
_PIECE_BYTES = 64 << 20
_MIXED, _WORD = 0x9E3779B97F4A7C15, 1 << 64


class Receipts:
    """Makes promises and checks them.

    `promise` and `check` are collective over the peer, the other methods are not.
    """

    def __init__(
        self,
        *,
        settings: RunSettings,
        data_stream: DataStream,
        optimizers: Optimizers,
        mesh: Mesh,
        journal: Journal,
    ) -> None:
        self._settings, self._data_stream = settings, data_stream
        self._optimizers, self._mesh, self._journal = optimizers, mesh, journal
        ranks = Ranks(rank=mesh.rank, world=mesh.world, gather=mesh.all_gather_object)
        self._planner = WritePlanner(ranks, file_bytes=_PIECE_BYTES)
        self._pending: dict[str, Json] | None = None

    def promise(self, state: TrainState) -> Promise:
        """Return what the step after `state` is to be made with."""
        return self._outlook(state, count=self._settings.phase(state).global_batch)

    def check(self, restored: Restored, state: TrainState, *, other_mixture: bool, incarnation: int) -> None:
        """Compare what every rank is about to do with what the checkpoint promises.

        Raises CheckpointError, on every rank, where a promise is broken. other_mixture: other samples are
        right, since the mixture was changed at this start.
        """
        self._pending = None
        promised = promise_from_json(restored.about.get(PROMISE))
        if promised is None:
            return
        mine = RankEvidence(
            promise=self._outlook(state, count=promised.count),
            part=self._mesh.data.index,
            given=self._given(state),
        )
        journalled, loss_before = self._journalled(restored, state.step)
        evidence = self._mesh.all_gather_object(
            {**mine.to_json(), "journalled": journalled, "loss": repr(loss_before)}
        )
        ranks = [evidence_from_json(rank_evidence) for rank_evidence in evidence]
        shares = self._shares(state)
        broken = broken_promises(promised, ranks, shares=shares, other_mixture=other_mixture)
        in_journal = promise_from_json(evidence[0]["journalled"])
        if in_journal is not None and in_journal != promised:
            broken.append("the checkpoint promises something else than the journal of the run does")
        receipt: dict[str, Json] = {
            "checkpoint": restored.directory.name,
            "ranks": self._mesh.world,
            "promised_by": "checkpoint" if in_journal is None else "journal and checkpoint",
            PROMISE: promised.to_json(),
            "settings_changed": mine.promise.settings != promised.settings,
            "mixture_changed": other_mixture,
            "batch_checked": bool(shares),
        }
        if broken:
            self._journal.write(
                "receipt", incarnation=incarnation, step=state.step, kept=False, broken=broken, **receipt
            )
            raise CheckpointError(
                f"{restored.directory.name} was not resumed as it promises: {'; '.join(broken)}",
                remedy="Nothing was trained. Look for what changed in the code, the data or the machine; "
                "`bloomery ckpt show` has the promise.",
            )
        receipt["loss_saved"] = restored.about.get("loss")
        receipt["loss_made_before"] = None if evidence[0]["loss"] == "None" else float(evidence[0]["loss"])
        self._pending = receipt

    def complete(self, report: StepReport, *, incarnation: int) -> None:
        """Journal the receipt of a resume with the loss of its first step, once."""
        if self._pending is None:
            return
        receipt, self._pending = self._pending, None
        before = receipt["loss_made_before"]
        same: Json = None if before is None else before == report.loss
        self._journal.write(
            "receipt",
            incarnation=incarnation,
            step=report.step,
            kept=True,
            loss=report.loss,
            same_bits=same,
            learning_rate=report.learning_rate,
            **receipt,
        )

    def expect_another_loss(self) -> None:
        """Say that the step after a rewind is not made as it was before: other samples, or restrained."""
        if self._pending is not None:
            self._pending["loss_made_before"] = None

    def _outlook(self, state: TrainState, *, count: int) -> Promise:
        state = replace(state, under_way=None)  # what others do within a round is known to nobody
        digests = self._mesh.all_gather_object(self._own_digest())
        return Promise(
            first=state.position.cursor,
            count=count,
            samples=self._addresses(state, count),
            learning_rate=self._settings.learning_rate(state),
            settings=self._settings_hash(),
            optimizer=f"{sum(digests) % _WORD:016x}",
        )

    def _addresses(self, state: TrainState, count: int) -> str:
        """The hash of which dataset and window each of the next samples is."""
        try:
            span = self._data_stream.order.next_span(state.position, count, EVERYTHING)
        except DataError:
            return "the order ends here"
        samples = sample_indices(span)
        datasets, windows = self._data_stream.order.locate_samples(samples)
        table = np.stack([samples, datasets.astype(np.int64), windows.astype(np.int64)])
        return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(table).tobytes())

    def _given(self, state: TrainState) -> tuple[int, ...]:
        """The samples that this rank's first batch really has."""
        if not self._reads_everything(state):
            return ()
        phase = self._settings.phase(state)
        span = self._data_stream.order.next_span(state.position, phase.global_batch, EVERYTHING)
        batch = self._data_stream.batches.batch(span, phase.micro_batch)
        return tuple(int(sample) for micro in batch for sample in micro.samples.tolist())

    def _shares(self, state: TrainState) -> dict[int, list[int]]:
        """The samples that each index on the data axis has to read, as the first rank's state has it."""
        if not self._reads_everything(state):
            return {}
        phase, degree = self._settings.phase(state), self._mesh.data.degree
        span = self._data_stream.order.next_span(state.position, phase.global_batch, EVERYTHING)
        steps = sample_indices(span).reshape(-1, degree, phase.micro_batch)
        shares = {str(part): steps[:, part].reshape(-1).tolist() for part in range(degree)}
        first = self._mesh.all_gather_object(shares if self._mesh.is_first else None)[0]
        return {int(part): samples for part, samples in first.items()}

    def _reads_everything(self, state: TrainState) -> bool:
        """Whether the next step of this run is known before anybody gives out samples, and there is one."""
        return not self._settings.recipe.elastic.inner_steps and not state.done

    def _settings_hash(self) -> str:
        """The hash of the settings that learning rates are computed from."""
        names = ("optim.", "schedule.", "train.", "data.sequence_length", "elastic.peers")
        used = {
            key: value for key, value in settings_of(self._settings.recipe).items() if key.startswith(names)
        }
        return xxhash.xxh3_64_hexdigest(json.dumps(used, sort_keys=True).encode())

    def _own_digest(self) -> int:
        """The part of the optimizer's digest that this rank counts: each box is counted by one rank."""
        entries = list(self._optimizers.state_entries())
        self._planner.agree(entries, self._mesh.all_gather_object(self._planner.digest(entries)))
        return sum(_digest(entry) for entry in self._planner.entries_to_write(entries)) % _WORD

    def _journalled(self, restored: Restored, step: int) -> tuple[Json, float | None]:
        """What the first rank's journal promises, and the loss of the next step where it was made before."""
        promised: Json = None
        loss: float | None = None
        if not self._mesh.is_first:
            return promised, loss
        for event in read_tail(self._journal.path):
            if event["event"] == "checkpoint" and event.get("path") == restored.directory.name:
                promised = event.get(PROMISE)
            elif is_step(event, {"step", "incarnation", "loss"}) and (
                (event["step"], event["incarnation"]) == (step + 1, restored.incarnation)
            ):
                with suppress(ValueError):  # what a damaged line holds is compared with nothing
                    loss = as_float(event["loss"])
        return promised, loss


@torch.no_grad()
def _digest(entry: StateEntry) -> int:
    """A sum over the bits of a box, each weighted by where it is in the whole tensor, modulo 2^64.

    So sums over boxes add up to that of the tensor however it is cut. An exchange of two elements of a row or
    a column changes it, and so does any single bit.
    """
    tensor: Tensor = entry.tensor
    bits = tensor.reshape(1, 1) if tensor.dim() == 0 else tensor.reshape(-1, tensor.shape[-1])
    bits = bits.contiguous().view(torch.int32)
    rows, columns = bits.sum(dim=1, dtype=torch.int64), bits.sum(dim=0, dtype=torch.int64)
    row_at, column_at = _places(entry)
    salt = xxhash.xxh3_64_intdigest(entry.name.encode())
    total = int((rows.cpu() * _weights(row_at, 1)).sum()) + int(
        (columns.cpu() * _weights(column_at, 2)).sum()
    )
    return (total * (salt | 1)) % _WORD


def _places(entry: StateEntry) -> tuple[Tensor, Tensor]:
    """The indices of a box's rows, as if all but the last dimension were one, and of its columns."""
    shape, box = entry.global_shape, entry.box
    if not shape:
        return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    rows = torch.zeros(1, dtype=torch.int64)
    for size, offset, count in zip(shape[:-1], box.offset[:-1], box.shape[:-1], strict=True):
        rows = (rows[:, None] * size + torch.arange(offset, offset + count)).reshape(-1)
    return rows, torch.arange(box.offset[-1], box.offset[-1] + box.shape[-1])


def _weights(index: Tensor, purpose: int) -> Tensor:
    """Odd 64-bit numbers, one for each index."""
    mixed = (index * 2 + purpose) * (_MIXED - _WORD)
    return (mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D | 1
