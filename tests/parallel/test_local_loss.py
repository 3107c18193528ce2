"""The loss of a micro-batch: its dropout addresses, and what of it a rank reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parallel.test_building import Calls, batch_of

from bloomery.model.loss import LossSums
from bloomery.parallel import local_loss


@pytest.mark.parametrize("reports", [True, False])
def test_dropout_is_addressed_by_step_sample_and_position_and_one_rank_reports_terms(
    reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        local_loss, "dropout_address", lambda **told: asked.append(told) or SimpleNamespace(rows="rows")
    )
    seen: list[Any] = []

    def loss(*arguments: Any) -> LossSums:
        seen.append(arguments)
        return LossSums(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(1.0))

    batch = batch_of(1, 2, 3)
    for seed, rows in ((11, "rows"), (None, None), (0, "rows")):
        sums = local_loss.micro_batch_loss(loss, dropout_seed=seed, reports=reports)(batch, 9)
        assert [float(each) for each in sums] == ([3.0, 2.0, 1.0] if reports else [3.0, 0.0, 0.0])
        assert seen.pop() == (batch.tokens, batch.targets, None, rows)
    usual = {"step": 9, "samples": batch.samples, "positions": range(3)}
    assert asked == [{**usual, "seed": 11}, {**usual, "seed": 0}]


@pytest.mark.parametrize("rows", [None, torch.arange(2)])
def test_a_loss_is_taken_of_what_the_decoder_makes_of_tokens_documents_and_dropout_rows(
    rows: torch.Tensor | None,
) -> None:
    calls = Calls()

    class Decoded:
        loss = staticmethod(calls.of("loss"))

        def __call__(self, tokens: Any, *, documents: Any, address: Any) -> str:
            calls.seen.append((tokens, documents, None if address is None else address.rows))
            return "hidden"

    local_loss.tensor_loss_of(Decoded(), z_loss=0.5, chunk=7, compiles="")(
        "tokens", "targets", "documents", rows
    )  # type: ignore[arg-type]
    assert calls.seen == [
        ("tokens", "documents", rows),
        ("loss", "hidden", "targets", {"z_loss": 0.5, "chunk": 7}),
    ]
