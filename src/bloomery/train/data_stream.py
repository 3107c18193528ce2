"""Feeds the training loop: the stream of samples, a queue of batches, and what a checkpoint keeps of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bloomery.checkpoint.format.state import Json
from bloomery.data.dataset_shares import Demand
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order
from bloomery.data.position import SampleShare
from bloomery.data.stream import EpochEnds, SampleStream, ends_passed, epoch_ends, stream_identity
from bloomery.data_loader.batches import Batches
from bloomery.errors import DataError
from bloomery.plan.schedule import Phase
from bloomery.train.state import TrainState


@dataclass(kw_only=True)
class DataStream:
    """The stream and the batches of a run.

    names: names of the datasets.
    fingerprint: fingerprint of the text and its tokenizer.
    is_tokenised_here: whether the run tokenised the text itself; then the text must not change, while other
    datasets may be added to ones that were given as tokens.
    """

    stream: SampleStream
    batches: Batches
    names: tuple[str, ...]
    fingerprint: str
    is_tokenised_here: bool
    _cursor: int = 0
    _ends: tuple[SampleStream, int, EpochEnds] | None = None

    @property
    def order(self) -> Order | MegatronOrder:
        """The order of samples."""
        return self.stream.order

    def identity(self) -> dict[str, str]:
        """Return what another machine must read alike to mean the same samples by the same numbers."""
        datasets = dict(zip(self.names, self.batches.datasets, strict=True))
        return stream_identity(self.stream, datasets, text=self.fingerprint)

    def prefetch(
        self, state: TrainState, *, phase_of: Callable[[TrainState], Phase], share: SampleShare
    ) -> None:
        """Request the batches of the next steps from the readers, as far as they are known."""
        for _ in range(self.batches.prefetch):
            if state.done:
                return
            phase = phase_of(state)
            try:
                span = self.order.next_span(state.position, phase.global_batch, share)
            except DataError:  # the lease or the order ends here, and the step that needs more reports it
                return
            self.batches.expect(span, phase.micro_batch)
            state = state.after(span)

    def to_json(self) -> dict[str, Json]:
        """Return what a checkpoint keeps."""
        return {"fingerprint": self.fingerprint, **self.stream.to_json()}

    def about(self, cursor: int, *, below: int) -> dict[str, Json]:
        """Return what lists of checkpoints show of the data: the cursor, and the next end of a first
        epoch.
        """
        ahead = [sample for _, sample in self._epoch_ends(below) if sample > cursor]
        return {"cursor": cursor, "epoch_end_ahead": ahead[0] if ahead else None}

    def follow(
        self, stored: Mapping[str, Any], checkpoint: str, *, at: int, left: int
    ) -> dict[str, Json] | None:
        """Continue in the order of a checkpoint, and return the mixture if another one holds from index `at`
        on.

        left: number of indices from there to the run's end, over which budgets are spread.
        Raises DataError for another text, or an order that cannot continue with today's datasets.
        """
        if self.is_tokenised_here and stored["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{checkpoint} was trained on other text, or with another tokenizer, than "
                "data.sources gives now.",
                remedy="Bring the old files back, or start a run of another name.",
            )
        self._cursor = at
        stream = self.stream.following(stored, at=at, left=left)
        return self._take(stream, known=len(stored["mixtures"]))

    def demand(self, demand: Demand, *, at: int, left: int) -> dict[str, Json] | None:
        """Meet `demand` from stream index `at` on, and return the mixture if it changes.

        left: number of indices from there to the run's end.
        Raises DataError, and changes nothing, if budgets cannot be kept.
        """
        stream = self.stream.demanding(demand, at=at, left=left)
        return self._take(stream, known=len(self.stream.mixtures))

    def _take(self, stream: SampleStream, *, known: int) -> dict[str, Json] | None:
        if stream.order is not self.stream.order:
            self.batches.follow(stream.order)
        self.stream = stream
        mixture = stream.mixtures[-1]
        if len(stream.mixtures) == known:
            return None
        whole = sum(mixture.shares)
        shares: dict[str, Json] = {
            name: share / whole for name, share in zip(self.names, mixture.shares, strict=True)
        }
        return {"at": mixture.at, "shares": shares}

    def epochs_ended(self, cursor: int, *, below: int) -> list[dict[str, Json]]:
        """Return the first epochs that ended since the last call, as the journal holds them."""
        passed = ends_passed(self._epoch_ends(below), after=self._cursor, up_to=cursor)
        self._cursor = cursor
        return [{"dataset": self.names[dataset], "sample": sample} for dataset, sample in passed]

    def _epoch_ends(self, below: int) -> EpochEnds:
        """Return the ends of first epochs of a run that takes the stream up to `below`."""
        if self._ends is None or self._ends[:2] != (self.stream, below):
            self._ends = (self.stream, below, epoch_ends(self.order, below=below))
        return self._ends[2]
